"""Compiled code of stages for test_offline.py, and the environment of processes that compile."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from numba_gemm.simulator.probe import gpu_environment

Code = dict[str, Any]  # of a job, see `outcomes`


def compiler_environment() -> dict[str, str]:
    """The environment of a process that compiles: this one's, without the simulator's switch."""
    return gpu_environment()


def outcomes(jobs: list[dict[str, Any]]) -> list[Code]:
    """Compile jobs, ``{"stage": ..., "config": ..., "cc": [9, 0], "aligned": true}``, and describe their code.

    A job with ``"ptx": [10, 0]`` is assembled from the PTX of that compute capability, and one with ``"variant"`` is of
    that variant. What was described once in a run
    of the tests, by any process, is not compiled again.

    The code that all jobs of a compute capability compile to is read at once: a process of nvdisasm takes 0.2 s before
    it reads the first instruction.
    """
    places = [_place(job) for job in jobs]
    missing = [i for i, place in enumerate(places) if not place.exists()]
    made = {i: _compiled(jobs[i]) for i in missing}
    for cc in dict.fromkeys(made[i].cubin.cc for i in missing):
        chosen = [i for i in missing if made[i].cubin.cc == cc]
        for i, read in zip(chosen, instructions([made[i].cubin for i in chosen]), strict=True):
            part = places[i].with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(_described(made[i].cubin, made[i].shared, read)), encoding="utf-8")
            part.replace(places[i])
    return [json.loads(place.read_text(encoding="utf-8")) for place in places]


def _place(job: dict[str, Any]) -> Path:
    """The file that describes a job's code, in the folder of this run of the tests, by Numba's settings."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    name = hashlib.sha256(json.dumps([job, settings]).encode()).hexdigest()
    return Path(os.environ["NUMBA_GEMM_CACHE_DIR"], f"{name}.code")


def assembled(job: dict[str, Any], ccs: list[list[int]]) -> list[Code]:
    """Compile a job, unless it was the last one, and assemble its PTX for others; the code is not read."""
    found = [_assembled(_compiled(job), (major, minor)) for major, minor in ccs]
    return [_described(one.cubin, one.shared, []) for one in found]


def _assembled(made: Any, cc: tuple[int, int]) -> Any:
    """Return a compiled stage for another compute capability, assembled from its PTX with its limit of registers."""
    from numba_gemm.runtime.compilation import _built
    from numba_gemm.runtime.compiler import assemble, register_limit, target

    ptx, count = re.subn(r"(?m)^\.target \w+", f".target {target(cc)}", made.cubin.ptx)
    assert count == 1
    return dataclasses.replace(made, cubin=assemble(ptx, cc, made.cubin.name, register_limit(_built(made.kernel), cc)))


@functools.lru_cache(maxsize=1)
def _made(name: str, config_name: str, cc: tuple[int, int], aligned: bool, variant: Any) -> Any:
    from numba_gemm.inspect import report
    from numba_gemm.kernels import STAGES
    from numba_gemm.kernels.ladder.stage import Variant

    stage = STAGES[name]
    config = next(config for config in stage.configs if config.name == config_name)
    if variant is None:
        return report.compiled(stage, config, cc, aligned)
    kernel = stage.kernel_of(config, Variant(*variant) if isinstance(variant, tuple) else variant)
    return report.Compiled(stage, config, aligned, report.compile_kernel(kernel, cc), kernel, stage.precisions[0])


def _compiled(job: dict[str, Any]) -> Any:
    cc = tuple(job["cc"])
    variant = tuple(job["variant"]) if isinstance(job["variant"], list) else job["variant"]
    made = _made(job["stage"], job["config"], tuple(job.get("ptx") or cc), job["aligned"], variant)
    return _assembled(made, cc) if job.get("ptx") else made


def _hash(text: str) -> str:
    """Return a hash of PTX without its target and the numbers of names."""
    names: dict[str, str] = {}
    text = re.sub(r"(?m)^\.target \w+", "", text)
    text = re.sub(r"_ZN\w+|_cudapy_smem_\d+", lambda found: names.setdefault(found[0], f"name{len(names)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()


def _described(cubin: Any, shared: int, found: list[Any]) -> Code:
    from numba_gemm.inspect import sass
    from numba_gemm.runtime.compiler import machine_code

    # Without the floats that blocks exchange, whose accesses are ordered (STRONG) and not part of any claim.
    weak = [instruction for instruction in found if "STRONG" not in instruction.opcode]
    loop = sass.main_loop(found)
    return {
        "ptx": _hash(cubin.ptx),
        "code": hashlib.sha256(b"".join(machine_code(cubin))).hexdigest(),
        "registers": cubin.registers,
        "shared": shared,
        "local": cubin.local,
        "spills": cubin.spill_stores + cubin.spill_loads,
        "opcodes": sass.instruction_mix(found),
        "widths": [[name, bits] for name, bits in sass.access_widths(weak)],
        "ffma_in_loop": loop.count("FFMA") if loop else 0,
    }


def instructions(cubins: list[Any]) -> list[list[Any]]:
    """Return the instructions of several kernels for one compute capability, as `Compiled.instructions` does."""
    from numba_gemm.inspect import report, sass
    from numba_gemm.runtime import compiler

    codes = []
    for cubin in cubins:
        parts = {name: code for name, code in compiler._sections(cubin.code).items() if name.startswith(".text.")}
        own = [name for name in parts if not any(word in name for word in report.COMPILERS_OWN)]
        assert len(own) == 1, f"{cubin.name}: not one function but {', '.join(parts)}"
        codes.append(parts[own[0]])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code")
        path.write_bytes(b"".join(codes))
        architecture = compiler.target(cubins[0].cc).replace("sm_", "SM")
        command = [str(sass.find_tool("nvdisasm")), "-b", architecture, str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    starts = [0, *itertools.accumulate(map(len, codes))]
    result: list[list[Any]] = [[] for _ in codes]
    for found in filter(None, map(sass.INSTRUCTION.match, listing.splitlines())):
        if found["opcode"] != "NOP" and found["predicate"] != sass.NEVER:
            number = bisect.bisect_right(starts, int(found["address"], 16)) - 1
            result[number].append(_instruction(found, starts[number]))
    return result


def read_alike(jobs: list[dict[str, Any]]) -> list[bool]:
    """Return whether `instructions` are those that the package reads, by job."""
    made = [_compiled(job) for job in jobs]

    def told(found: list[Any]) -> list[Any]:
        return [(one.address, one.opcode, one.target) for one in found]

    read = instructions([one.cubin for one in made])
    return [told(found) == told(one.instructions) for one, found in zip(made, read, strict=True)]


def _instruction(found: re.Match[str], start: int) -> Any:
    from numba_gemm.inspect import sass

    opcode, operands = found["opcode"], found["operands"]
    jump = re.search(r"0x([0-9a-f]+)$", operands) if opcode.startswith("BRA") else None
    target = int(jump[1], 16) - start if jump else None
    return sass.Instruction(int(found["address"], 16) - start, opcode, operands, target)
