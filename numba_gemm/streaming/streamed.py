"""Public functions for matrices that are not on the device."""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cuda.bindings import driver

from ..gemm.precision import IEEE
from ..gemm.request import Request, checked
from ..runtime.device import ordinal_of
from ..runtime.driver import device_scope, failure
from ..simulator.switch import SIMULATOR
from ..typing import DeviceLike, PrecisionName, Scalar
from . import blocking as dividing
from .blocking import Blocking
from .host import HostMatrix, reserve_file
from .pipeline import Done, Run, Stop
from .prediction import Prediction, predict
from .products import Products
from .queues import Device, open_device
from .rates import measured_rates
from .supervision import supervised

__all__ = ["blocking_of", "expected_time", "streamed_sgemm"]

SHARE_OF_MEMORY = 0.75  # of the device's memory, the most that a product takes by default
SHARE_OF_FREE = 0.9
MOST_THREADS = 8  # per direction; more do not copy faster

SIMULATED_MEMORY = 1 << 30


def streamed_sgemm(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    memory_limit: int | None = None,
    precision: PrecisionName = IEEE,
    progress: bool | Callable[[Done], object] = False,
    device: DeviceLike | None = None,
) -> np.ndarray:
    """Compute ``C = alpha * A @ B + beta * C`` in float32 for matrices in host memory that need not fit on the GPU.

    Blocks of C stay on the device while panels of A and B pass by; copies in both directions overlap with the products.
    Page-locked operands (``numba.cuda.pinned_array``, ``cupyx.empty_pinned``, PyTorch's ``pin_memory``) whose rows or
    columns are contiguous are copied directly. All others go through page-locked buffers, which host threads fill and
    empty.

    Parameters
    ----------
    a, b : ndarray of shape (M, K), ndarray of shape (K, N); float32
        NumPy arrays or memory maps, with any strides. They must not be written before the call returns.
    out : ndarray of shape (M, N), float32, optional
        C; must share no element with `a` or `b`. Sharing through two maps of one file is not detected. If `out` is in
        a mapped file (`numpy.memmap`, `mmap.mmap`, shared memory), the file's disk space is reserved before anything is
        computed, but only on Linux, and only while the file has a name; otherwise a full disk ends the process
        (SIGBUS). By default, a new array.
    alpha, beta : real number
        As for `tiled_sgemm`.
    memory_limit : int, optional
        Most bytes of device memory for all operands, results and workspaces, in one allocation. (The code of kernels, a
        few MB once per process, is not included.) By default, three quarters of the device's memory, or nine tenths of
        the free memory if that is less.
    precision : str
        As for `tiled_sgemm`.
    progress : bool or callable
        True prints the predicted time, and then the progress, to stderr. A callable is called with a `Done` for each
        part of `out` that is complete, on another thread; an exception that it raises ends the product. Sums without
        terms (K = 0, or `alpha` 0) are not reported.
    device : int, str or device object, optional
        GPU: 0, "cuda:0", or an object of PyTorch, CuPy, Numba or cuda.core. By default, the current one.

    Returns
    -------
    ndarray of shape (M, N), float32
        `out` if given.

    Raises
    ------
    TypeError
        For operands that are not NumPy arrays of float32; for a `memory_limit` that is not an int.
    ValueError
        For shapes that do not match, an `out` that is read-only or overlaps an operand, a `memory_limit` that is too
        small (the message names a sufficient one), an unknown precision, or one that the GPU cannot run.
    OSError
        If the disk has no room for the file behind `out`. Nothing has been computed then.
    MemoryError
        If the device has less memory left than the product takes.
    GpuUnavailable
        Without a GPU, unless Numba's simulator is on.

    Notes
    -----
    The result has the same bits as the products of `blocking_of`, each computed by one `tiled_sgemm` on the device.
    With "fp32_auto", all of them use the precision that it selects for the full M, N and K. The bits depend on
    `memory_limit`: pass it to get the same bits whatever else the device holds. Each panel's sum is multiplied by
    `alpha` before it is added: with an infinite `alpha`, panels whose sums have opposite signs give NaN.

    After an error or an interrupt, the call waits for the copies and products that are enqueued (those of two panels at
    most), and for a kernel that is being compiled or a `progress` call that is running. It frees all device memory, and
    raises the error with a note that names the complete rows and columns of `out`. The error's attribute ``done`` also
    holds them, as a list of pairs of slices. `a` and `b` are only read.
    """
    wanted = _checked(a, b, out, alpha, beta, precision, device)
    memory_limit = _checked_limit(memory_limit)
    if not callable(progress) and not isinstance(progress, bool | np.bool_):
        raise TypeError(
            f"progress is of type {type(progress).__qualname__}; expected a bool or a callable; pass one of these"
        )
    m, n = wanted.shape
    result = np.empty((m, n), np.float32) if out is None else out
    if m == 0 or n == 0:
        return result
    if wanted.k == 0:
        _scale(result, wanted.beta)
        return result
    done: list[Done] = []
    turned = _by_columns(result)

    def multiply(stop: Stop) -> None:
        with _prepared(wanted, a, b, result, memory_limit) as ready:
            reserve_file(result)
            told = progress if callable(progress) else _Printer(ready.expected(stop)) if progress else None

            def report(part: Done) -> None:
                part = replace(part, rows=part.cols, cols=part.rows) if turned else part
                done.append(part)
                if told is not None:
                    told(part)

            ready.run(report, stop)()

    try:
        supervised(multiply)
    except BaseException as error:
        _describe(error, done, (m, n))
        raise
    return result


def expected_time(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray | None = None,
    *,
    beta: Scalar = 0.0,
    memory_limit: int | None = None,
    precision: PrecisionName = IEEE,
    device: DeviceLike | None = None,
) -> Prediction:
    """Predict how long `streamed_sgemm` takes, from copies of parts of the operands and models of the products.

    Parameters and errors are those of `streamed_sgemm`; no matrix may have an extent of 0. The call takes some tenths
    of a second, and as much device memory as the product itself. `out` is not written.
    """
    wanted = _checked(a, b, out, 1.0, beta, precision, device)
    memory_limit = _checked_limit(memory_limit)
    _check_extents(wanted)
    found: list[Prediction] = []

    def predicted(stop: Stop) -> None:
        result = np.empty(wanted.shape, np.float32) if out is None else out
        with _prepared(wanted, a, b, result, memory_limit) as ready:
            found.append(ready.expected(stop))

    supervised(predicted)
    return found[0]


@dataclass
class _Ready:
    """Product whose device memory is allocated."""

    gpu: Device
    memory: Any
    blocking: Blocking
    products: Products
    operands: tuple[HostMatrix, HostMatrix, HostMatrix]
    wanted: Request

    def expected(self, stop: Stop) -> Prediction:
        room = self.blocking.device_bytes
        found = (self.gpu, self.memory, room, *self.operands, self.products)
        rates = measured_rates(*found, host_threads(), stop.event)
        return predict(self.blocking, rates, self.wanted.beta != 0)

    def run(self, report: Callable[[Done], object], stop: Stop) -> Run:
        scalars = (self.wanted.alpha, self.wanted.beta)
        found = (self.gpu, self.memory, self.blocking, self.products, self.operands)
        return Run(*found, *scalars, report, host_threads(), stop)


@contextmanager
def _prepared(
    wanted: Request, a: np.ndarray, b: np.ndarray, c: np.ndarray, memory_limit: int | None
) -> Iterator[_Ready]:
    """Divide a product and allocate its device memory until the context ends."""
    # C stored by columns is its transpose stored by rows.
    x, y, z = (b.T, a.T, c.T) if _by_columns(c) else (a, b, c)
    with open_device(wanted.device) as gpu:
        operands = (HostMatrix(x, gpu), HostMatrix(y, gpu), HostMatrix(z, gpu))
        products = Products(wanted.device, wanted.precision, operands[0].by_columns, operands[1].by_columns)
        m, n = z.shape
        blocking = _divided(products, (m, n, wanted.k), memory_limit, wanted.device)
        memory = gpu.allocate(blocking.device_bytes)
        yield _Ready(gpu, memory, blocking, products, operands, wanted)


def blocking_of(
    a: np.ndarray,
    b: np.ndarray,
    *,
    memory_limit: int | None = None,
    precision: PrecisionName = IEEE,
    device: DeviceLike | None = None,
) -> Blocking:
    """Return how `streamed_sgemm` divides a product if `out` is stored by rows: its launches and device memory.

    Parameters and errors are those of `streamed_sgemm`; no matrix may have an extent of 0.

    Returns
    -------
    Blocking
        Its ``all_pieces()`` are the products, its ``device_bytes`` the memory.
    """
    wanted = _checked(a, b, None, 1.0, 0.0, precision, device)
    memory_limit = _checked_limit(memory_limit)
    _check_extents(wanted)
    products = Products(wanted.device, wanted.precision, _by_columns(a), _by_columns(b))
    m, n = wanted.shape
    return _divided(products, (m, n, wanted.k), memory_limit, wanted.device)


def _checked(a: Any, b: Any, out: Any, alpha: Any, beta: Any, precision: Any, device: Any) -> Request:
    for name, array in (("a", a), ("b", b), ("out", out)):
        if array is None and name == "out":
            continue
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{name} is of type {type(array).__qualname__}; expected a NumPy array or memory map; for arrays "
                "on the GPU call tiled_sgemm"
            )
        if array.ndim != 2:
            raise ValueError(
                f"{name} has {array.ndim} dimensions, shape {array.shape}; expected 2; pass one matrix at a time"
            )
    home = None if device is None else ordinal_of(device)
    wanted = checked(a, b, out, alpha, beta, None, "auto", None, (), home, precision)
    for name, array in (("a", a), ("b", b)):
        if array.dtype != np.float32:
            raise TypeError(f"{name} has dtype {array.dtype}; expected float32; pass {name}.astype(numpy.float32)")
    return wanted


def _check_extents(wanted: Request) -> None:
    if 0 in (*wanted.shape, wanted.k):
        raise ValueError(f"a and b have shapes {wanted.given[0]} and {wanted.given[1]}; expected no extent of 0")


def _checked_limit(memory_limit: Any) -> int | None:
    if memory_limit is None:
        return None
    if isinstance(memory_limit, bool) or not hasattr(memory_limit, "__index__"):
        raise TypeError(
            f"memory_limit is of type {type(memory_limit).__qualname__}; expected a number of bytes; pass an int, "
            "as 8 << 30"
        )
    limit = operator.index(memory_limit)
    if limit < 1:
        raise ValueError(f"memory_limit is {limit}; expected a number of bytes above 0; pass a larger one")
    return limit


def _divided(products: Products, extents: tuple[int, int, int], memory_limit: int | None, device: int) -> Blocking:
    """Return the division for a memory limit, or for the memory of the device."""
    m, n, k = extents
    limit, free = memory_limit, None
    if limit is None:
        free, total = _memory(device)
        limit = int(SHARE_OF_MEMORY * total)
    found = dividing.choose(m, n, k, limit, products.workspace_bytes)
    if found is not None and free is not None and found.device_bytes > SHARE_OF_FREE * free:
        found = dividing.choose(m, n, k, int(SHARE_OF_FREE * free), products.workspace_bytes)
    if found is not None:
        return found
    least = dividing.smallest(m, n, k, products.workspace_bytes)
    if memory_limit is None:
        raise MemoryError(f"the device has {free:,} bytes left; expected {least:,} at least; free some of its memory")
    raise ValueError(
        f"memory_limit is {memory_limit:,} bytes; expected at least {least:,} for M={m}, N={n} and K={k}; pass that, "
        "or more"
    )


def _memory(device: int) -> tuple[int, int]:
    """Bytes of a device's memory: free, and total."""
    if SIMULATOR:
        return SIMULATED_MEMORY, SIMULATED_MEMORY
    with device_scope(device):
        status, free, total = driver.cuMemGetInfo()
    if status != driver.CUresult.CUDA_SUCCESS:
        raise failure("cuMemGetInfo", status)
    return int(free), int(total)


def _by_columns(array: np.ndarray) -> bool:
    return HostMatrix.lies_by_columns(array)


def _scale(out: np.ndarray, beta: float) -> None:
    """Compute ``beta * C``, for sums without terms."""
    if beta == 0:
        out[...] = 0
    else:
        with np.errstate(all="ignore"):  # overflow and NaN are results, as on the GPU
            np.multiply(out, np.float32(beta), out=out)


def _describe(error: BaseException, done: list[Done], shape: tuple[int, int]) -> None:
    """Add to an error the parts of `out` that are complete."""
    places = [(part.rows, part.cols) for part in done]
    error.done = places  # type: ignore[attr-defined]
    most = 20
    named = [f"[{rows.start}:{rows.stop}, {cols.start}:{cols.stop}]" for rows, cols in places]
    listed = ", ".join(named[:most]) + (f" and {len(named) - most} more (attribute done)" if len(named) > most else "")
    error.add_note(f"streamed_sgemm: complete of out, which has shape {shape}: {listed or 'nothing'}")


def host_threads() -> tuple[int, int]:
    """Numbers of host threads that copy to the device, and from it."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, min(MOST_THREADS, able // 2))
    return each, each


class _Printer:
    """Printer of the progress, at most once per second."""

    def __init__(self, prediction: Prediction) -> None:
        self._begin = self._last = time.perf_counter()
        print(f"streamed_sgemm: {prediction}", file=sys.stderr, flush=True)

    def __call__(self, part: Done) -> None:
        now = time.perf_counter()
        if part.number < part.count and now - self._last < 1:
            return
        self._last = now
        text = f"streamed_sgemm: {part.elements / part.of:4.0%} of out after {now - self._begin:.1f} s"
        print(text, file=sys.stderr, flush=True)
