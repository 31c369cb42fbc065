"""Compiled code of stages for test_offline.py, and the environment of processes that compile."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import pickle
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
    that variant.

    What a process of this run has compiled or read is not compiled or read again. The code that all jobs of a compute
    capability compile to is read at once: a process of nvdisasm takes 0.2 s before it reads the first instruction.
    """
    made = [_compiled(job) for job in jobs]
    places = [_place(hashlib.sha256(repr(one.cubin).encode()).hexdigest()) for one in made]
    missing = [i for i, place in enumerate(places) if not place.exists()]
    for cc in dict.fromkeys(made[i].cubin.cc for i in missing):
        chosen = [i for i in missing if made[i].cubin.cc == cc]
        for i, found in zip(chosen, instructions([made[i].cubin for i in chosen]), strict=True):
            _keep(places[i], _described(made[i].cubin, made[i].shared, found))
    return [pickle.loads(place.read_bytes()) for place in places]


def _place(name: str) -> Path:
    """Return the file of a name in the folder of this run of the tests."""
    return Path(os.environ["NUMBA_GEMM_CACHE_DIR"], f"{name}.code")


def _keep(place: Path, value: Any) -> None:
    """Write a file at once, since several processes may write it."""
    part = place.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(value))
    part.replace(place)


def assembled(jobs: list[dict[str, Any]]) -> list[Code]:
    """Compile jobs as `outcomes` does; their code is not read."""
    return [_described(one.cubin, one.shared, []) for one in map(_compiled, jobs)]


def _compiled(job: dict[str, Any]) -> Any:
    from numba_gemm.gemm.occupancy import usual_kernel
    from numba_gemm.inspect import report
    from numba_gemm.kernels import STAGES
    from numba_gemm.kernels.ladder.stage import Variant

    stage, cc, ptx, variant = STAGES[job["stage"]], tuple(job["cc"]), job.get("ptx"), job.get("variant")
    config = next(config for config in stage.configs if config.name == job["config"])
    if variant is None:
        kernel = usual_kernel(stage, config, stage.precisions[0], job["aligned"])
    else:
        kernel = stage.kernel_of(config, Variant(*variant) if isinstance(variant, list) else variant)
    cubin = _cubin(kernel, cc, tuple(ptx or cc))
    return report.Compiled(stage, config, job["aligned"], cubin, kernel, stage.precisions[0])


def _cubin(kernel: Any, cc: tuple[int, int], ptx: tuple[int, int]) -> Any:
    """Return a kernel assembled for a compute capability from the PTX of one, unless a process of this run has it."""
    from numba_gemm.runtime.compilation import compile_kernel
    from numba_gemm.runtime.kernel_key import key

    # All settings, not only those that the package knows to change code.
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_")))
    name = hashlib.sha256(repr((key(kernel, cc), ptx, settings)).encode()).hexdigest()
    place = _place(name)
    if not place.exists():
        _keep(place, compile_kernel(kernel, cc) if ptx == cc else _assembled(kernel, _cubin(kernel, ptx, ptx), cc))
    return pickle.loads(place.read_bytes())


def _assembled(kernel: Any, cubin: Any, cc: tuple[int, int]) -> Any:
    """Return a kernel for another compute capability, assembled from its PTX with its limit of registers."""
    from numba_gemm.runtime.compilation import _built
    from numba_gemm.runtime.compiler import assemble, register_limit, target

    ptx, count = re.subn(r"(?m)^\.target \w+", f".target {target(cc)}", cubin.ptx)
    assert count == 1
    return assemble(ptx, cc, cubin.name, register_limit(_built(kernel, ()), cc))


def _hash(text: str) -> str:
    """Return a hash of PTX without its target, the numbers of names, and Numba's variables.

    The module of a kernel declares a variable ``NumbaEnv...`` per device function, which nothing reads. How many there
    are depends on the kernels that the process has compiled before.
    """
    names: dict[str, str] = {}
    text = re.sub(r"(?m)^\.target \w+|^\.common .* _ZN08NumbaEnv\w+;\n", "", text)
    text = re.sub(r"_ZN\w+|_cudapy_smem_\d+", lambda found: names.setdefault(found[0], f"name{len(names)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()


def _described(cubin: Any, shared: int, found: list[Any]) -> Code:
    from numba_gemm.inspect import sass
    from numba_gemm.runtime.compiler import machine_code

    # Without the floats that blocks exchange, whose accesses are ordered (STRONG) and not part of any claim.
    ordered = [instruction for instruction in found if "STRONG" in instruction.opcode]
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
        "ordered_widths": [[name, bits] for name, bits in sass.access_widths(ordered)],
        "ffma_in_loop": loop.count("FFMA") if loop else 0,
        "cached_copies": sum(_is_cached_copy(instruction.opcode) for instruction in found),
    }


def _is_cached_copy(opcode: str) -> bool:
    """Return True for asynchronous copies of vectors through the L1 cache."""
    return opcode.startswith("LDGSTS") and ".128" in opcode and "BYPASS" not in opcode


def instructions(cubins: list[Any]) -> list[list[Any]]:
    """Return the instructions of several kernels for one compute capability, as `Compiled.instructions` does."""
    from numba_gemm.inspect import report, sass
    from numba_gemm.runtime import compiler

    codes = []
    for cubin in cubins:
        parts = {name: code for name, code in compiler._sections(cubin.code).items() if name.startswith(".text.")}
        own = report.kernels_own(parts)
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
