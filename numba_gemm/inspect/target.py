"""Preparation of a launch on the simulator, for stepping and tracing: a stage of the ladder or any other kernel."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..gemm.occupancy import config_of, stage_of
from ..kernels.ladder import TileConfig
from ..kernels.stage import Stage
from ..runtime.launch import Simulated, simulated
from ..runtime.matrix import Matrix
from ..simulator import patches
from ..simulator.switch import SIMULATOR

__all__ = ["arrays_of", "prepare"]

TEST_CONFIG = "test"


def _matrix(name: str, array: Any) -> Matrix:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 2:
        what = f"{array.dtype} array of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} is a {what}; a stage takes 2-D float32 NumPy arrays")
    (rows, cols), (down, across) = array.shape, array.strides
    return Matrix(array.ctypes.data, rows, cols, down, across, 0, array)


def _of_stage(stage: Stage, args: Sequence[Any], config: TileConfig | str | None) -> Simulated:
    if len(args) != 5:
        raise TypeError(f"a stage takes five arguments (alpha, a, b, beta, c), got {len(args)}")
    alpha, a, b, beta, c = args
    x, y, z = (_matrix(name, array) for name, array in (("a", a), ("b", b), ("c", c)))
    if (x.rows, y.cols) != (z.rows, z.cols) or x.cols != y.rows:
        raise ValueError(f"shapes do not match: a {a.shape}, b {b.shape}, c {c.shape}; expected (m, k), (k, n), (m, n)")
    if not c.size:
        raise ValueError(f"c has shape {c.shape}: no block would run")
    chosen = stage.test_config if config == TEST_CONFIG else config_of(stage, config)
    return simulated(stage, chosen, float(alpha), x, y, float(beta), z, precision=stage.precisions[0])


def prepare(
    stage_or_kernel: Any,
    grid: int | Sequence[int] | None,
    block: int | Sequence[int] | None,
    args: Sequence[Any],
    *,
    config: TileConfig | str | None = None,
    dynamic_shared: int | None = None,
) -> Simulated:
    """Check a stage or kernel with its launch, and convert it to the form that the simulator runs.

    Parameters
    ----------
    stage_or_kernel : str, Stage or kernel
        A stage of the FP32 ladder, `one_warp`, `fused_decomposition`, or the name of one; a kernel made by ``cuda.jit``
        in the simulator; or a Python function.
    grid, block : int or sequence of one to three int, or None
        Number of blocks, and of threads per block, in the order x, y, z. None takes the stage's own.
    args : sequence
        The kernel's arguments, with NumPy arrays in place of global memory. For a stage: alpha, a, b, beta, c.
    config : TileConfig or str, optional
        For a stage only: a configuration or its name; ``"test"`` is the small configuration used by its tests. By
        default, the stage's first.
    dynamic_shared : int, optional
        Bytes of dynamic shared memory per block. By default, the stage's own, and none for other kernels.

    Raises
    ------
    RuntimeError
        outside the simulator.
    NotImplementedError
        for a tensor core stage whose instructions the simulator lacks: any but `one_warp` and `fused_decomposition`.
    TypeError, ValueError
        if `stage_or_kernel` is neither a stage nor a kernel, or does not take the arguments.
    """
    if not SIMULATOR:
        raise RuntimeError(
            "stepping and tracing run kernels as Python, on Numba's simulator: set NUMBA_ENABLE_CUDASIM=1 before "
            "anything imports numba"
        )
    linecache.checkcache()  # a kernel's file may have been edited and loaded anew
    if isinstance(stage_or_kernel, str):
        stage_or_kernel = stage_of(stage_or_kernel)
    if isinstance(stage_or_kernel, Stage) and stage_or_kernel.test_config is None:
        raise NotImplementedError(
            f"{stage_or_kernel.name} multiplies on tensor cores by instructions that the simulator lacks; take "
            "'one_warp', 'fused_decomposition', or a stage of the FP32 ladder"
        )
    if isinstance(stage_or_kernel, Stage):
        made = _of_stage(stage_or_kernel, args, config)
        shared = made.dynamic_shared if dynamic_shared is None else dynamic_shared
        blocks, threads = (made.grid if grid is None else grid), (made.block if block is None else block)
        return Simulated(made.kernel, _extents("grid", blocks), _extents("block", threads), made.arguments, shared)
    if config is not None:
        raise TypeError("config is for stages; a kernel is built already")
    function = patches.python_function(stage_or_kernel)
    if grid is None or block is None:
        raise TypeError(f"{function.__name__} is no stage, so grid and block must be given")
    if any(given.kind is given.VAR_POSITIONAL for given in inspect.signature(function).parameters.values()):
        raise TypeError(f"{function.__name__} takes any number of arguments, which no compiled kernel does; name them")
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise TypeError(f"{function.__name__} does not take these arguments: {error}") from None
    for name, array in arrays_of(function, args):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is a {type(array).__name__} in device memory; pass a NumPy array")
    return Simulated(
        stage_or_kernel, _extents("grid", grid), _extents("block", block), tuple(args), dynamic_shared or 0
    )


def _extents(what: str, given: int | Sequence[int]) -> tuple[int, ...]:
    extents = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(extent, (int, np.integer)) for extent in extents):
        raise TypeError(f"{what} is {given!r}; expected integers: divide with // instead of /")
    return extents


def arrays_of(kernel: Any, args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays among a kernel's arguments, also inside tuples, with the names of the parameters."""
    names = list(inspect.signature(patches.python_function(kernel)).parameters)
    for name, value in zip(names, args, strict=False):
        yield from _arrays_in(name, value)


def _arrays_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "shape") and hasattr(value, "strides") and not np.isscalar(value):
        yield name, value
    elif isinstance(value, tuple):
        for i, field in enumerate(value):
            own = value._fields[i] if hasattr(value, "_fields") else i
            yield from _arrays_in(f"{name}.{own}" if isinstance(own, str) else f"{name}[{own}]", field)
