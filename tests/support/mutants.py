"""Stages of the ladder, broken on purpose in one place."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from types import ModuleType

from numba_gemm import kernels
from numba_gemm.kernels.ladder import STAGES, TileConfig
from support.offline import run_command

# In the order in which they import one another; a mutant stage gets fresh copies of all of them.
DEVICE_MODULES = [
    f"numba_gemm.device.{name}"
    for name in (
        *("matrix", "vector", "shared", "async_copy", "address", "store"),
        *("outer_product", "tile_loader", "chunk_loader", "partition", "warp_tile"),
    )
]

BARRIER = "cuda.syncthreads()"
# Two warps, and sums enough for an unaligned C to go through shared memory: what stream_k's test configuration lacks.
STAGED = TileConfig(64, 64, 16, 8, 8, 32, 64, 2, pad=4, pad_b=4, dynamic=True, order="snake")
LANES = TileConfig(4, 2, 16, 4, 2, lanes_k=4, tiles=8)  # four lanes per tile of small_matrices
SLICED = TileConfig(32, 32, 32, 8, 4, 32, 32, 2, pad=4, pad_b=4, dynamic=True, order="snake", lanes_k=4)


def module_of(name: str) -> str:
    """Return the name of the module with a stage's kernel."""
    return importlib.import_module(STAGES[name].build.__module__).build.__module__


def barriers(name: str) -> int:
    return inspect.getsource(importlib.import_module(module_of(name))).count(BARRIER)


def nth(text: str, old: str, new: str, which: int) -> str:
    parts = text.split(old)
    assert len(parts) > which + 1, f"{old!r} does not occur {which + 1} times"
    return old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])


def mutant(name: str, module: str, old: str, new: str, which: int = 0):
    """The stage of a name, built from sources in one of which the occurrence `which` of `old` is replaced by `new`."""
    stage_module = module_of(name)
    target = stage_module if module == "stage" else f"numba_gemm.device.{module}"
    originals = {fullname: importlib.import_module(fullname) for fullname in DEVICE_MODULES}
    try:
        for fullname in [*DEVICE_MODULES, stage_module]:
            original = importlib.import_module(fullname)
            source = inspect.getsource(original)
            if fullname == target:
                source = nth(source, old, new, which)
            copy = ModuleType(fullname)
            copy.__package__, copy.__file__ = original.__package__, original.__file__
            exec(compile(source, str(original.__file__), "exec"), vars(copy))
            if fullname != stage_module:
                sys.modules[fullname] = copy
        return dataclasses.replace(STAGES[name], build=copy.build)
    finally:
        sys.modules.update(originals)


def inspect_mutant(name: str, old: str, new: str) -> tuple[int, str, str]:
    """Return what ``numba-gemm inspect`` gives for a mutant; for a process with a compiler."""
    kernels.STAGES[name] = mutant(name, "stage", old, new)
    try:
        return run_command("numba_gemm.inspect.cli", [name])
    finally:
        kernels.STAGES[name] = STAGES[name]
