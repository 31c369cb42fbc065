"""A child process of test_offline.py: compiles stages, and prints what became of each as a line of JSON.

Reads from its standard input one JSON line a job, ``{"stage": ..., "config": ..., "cc": [9, 0], "aligned": true}``. It
runs without the simulator, which has no compiler: the tests' own process may have switched the simulator on, and cannot
switch it off.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from numba_gemm.simulator.probe import gpu_environment


def compiler_environment() -> dict[str, str]:
    """The environment of a process that compiles: this one's, without the simulator's switch."""
    return gpu_environment()


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    """Return the compiled code of one job; the compiler's errors pass through."""
    from numba_gemm.inspect import report, sass
    from numba_gemm.kernels import STAGES

    stage = STAGES[job["stage"]]
    config = next(config for config in stage.configs if config.name == job["config"])
    compiled = report.compiled(stage, config, tuple(job["cc"]), job["aligned"])
    # Without the floats that blocks exchange, whose accesses are ordered (STRONG) and not part of any claim.
    weak = [instruction for instruction in compiled.instructions if "STRONG" not in instruction.opcode]
    return {
        "registers": compiled.registers,
        "shared": compiled.shared,
        "local": compiled.local,
        "spills": compiled.spills,
        "opcodes": sass.instruction_mix(compiled.instructions),
        "widths": [[name, bits] for name, bits in sass.access_widths(weak)],
        "ffma_in_loop": compiled.loop.count("FFMA") if compiled.loop else 0,
    }


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        try:
            result = outcome(job)
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(job | result), flush=True)


if __name__ == "__main__":
    main()
