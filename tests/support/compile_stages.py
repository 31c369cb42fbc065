"""Compiled code of stages for test_offline.py, and the environment of processes that compile."""

from __future__ import annotations

from typing import Any

from numba_gemm.simulator.probe import gpu_environment


def compiler_environment() -> dict[str, str]:
    """The environment of a process that compiles: this one's, without the simulator's switch."""
    return gpu_environment()


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    """Compile a job, ``{"stage": ..., "config": ..., "cc": [9, 0], "aligned": true}``, and describe its code."""
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
