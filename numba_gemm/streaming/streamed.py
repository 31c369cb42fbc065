"""Public functions for matrices that are not on the device."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..gemm.precision import IEEE, check_precision
from ..gemm.request import Request, checked
from ..runtime.device import device_properties, ordinal_of
from ..typing import DeviceLike, PrecisionName, Scalar
from .blocking import Blocking
from .host import HostMatrix, Stopped, reserve_file
from .prediction import Prediction
from .preparation import divided, prepared
from .sharing import Done, Stop
from .supervision import supervised

__all__ = ["blocking_of", "expected_time", "streamed_sgemm"]


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
    devices: Sequence[DeviceLike] | None = None,
) -> np.ndarray:
    """Compute ``C = alpha * A @ B + beta * C`` in float32 for matrices in host memory that need not fit on the GPU.

    Blocks of C stay on the device while panels of A and B pass by; copies in both directions overlap with the products.
    Page-locked operands (``numba.cuda.pinned_array``, ``cupyx.empty_pinned``, PyTorch's ``pin_memory``) whose rows or
    columns are contiguous are copied directly. All others go through page-locked buffers, which host threads fill and
    empty.

    Parameters
    ----------
    a, b : ndarray of shape (M, K), ndarray of shape (K, N); float32
        NumPy arrays or memory maps, with any strides. They must not be written before the call returns. Numba's mapped
        and managed arrays are taken as host memory, on whichever device they were made.
    out : ndarray of shape (M, N), float32, optional
        C; must share no element with `a` or `b`. Sharing through two maps of one file is not detected. If `out` is in
        a mapped file (`numpy.memmap`, `mmap.mmap`, shared memory), the file's disk space is reserved before anything is
        computed, but only on Linux, and only if the file has a name and this process has no `fcntl` lock on it, which
        would be lost; otherwise a full disk ends the process (SIGBUS). By default, a new array.
    alpha, beta : real number
        As for `tiled_sgemm`.
    memory_limit : int, optional
        Most bytes of memory of each device for all operands, results and workspaces, in one allocation. (The code of
        kernels, a few MB once per process, is not included.) By default, three quarters of the device's memory, or nine
        tenths of the free memory if that is less; of several devices, the least.
    precision : str
        As for `tiled_sgemm`.
    progress : bool or callable
        True prints the predicted time, and then the progress, to stderr. A callable is called with a `Done` for each
        part of `out` that is complete, on another thread; an exception that it raises ends the product. Sums without
        terms (K = 0, or `alpha` 0) are not reported.
    device : int, str or device object, optional
        GPU: 0, "cuda:0", or an object of PyTorch, CuPy, Numba or cuda.core. By default, the current one.
    devices : sequence of int, str or device objects, optional
        GPUs of this host that compute together, in place of `device`. Each takes blocks of C until none is left, so
        none has to communicate with another one.

    Returns
    -------
    ndarray of shape (M, N), float32
        `out` if given.

    Raises
    ------
    TypeError
        For operands that are not NumPy arrays of float32; for a `memory_limit` that is not an int; for `devices` that
        are not a sequence.
    ValueError
        For shapes that do not match, an `out` that is read-only or overlaps an operand, a `memory_limit` that is too
        small (the message names a sufficient one), an unknown precision, or one that a GPU cannot run; for `devices`
        that are empty, repeated or unknown.
    OSError
        If the disk has no room for the file behind `out`. Nothing has been computed then.
    MemoryError
        If a device has less memory left than the product takes.
    GpuUnavailable
        Without a GPU, unless Numba's simulator is on.

    Notes
    -----
    The result has the same bits as the products of `blocking_of`, each computed by one `tiled_sgemm` on the device.
    With "fp32_auto", all of them use the precision that it selects for the full M, N and K. The bits depend on
    `memory_limit`: pass it to get the same bits whatever else the device holds. Each panel's sum is multiplied by
    `alpha` before it is added: with an infinite `alpha`, panels whose sums have opposite signs give NaN.

    The division also depends on the number of `devices`, each of which gets an equal part of C at least if there are
    enough rows and columns. A block is computed by one device alone, and has the same bits on all GPUs of one model, so
    that it does not matter which of them takes it. GPUs of different models may choose different kernels, and which
    of them takes a block depends on their speed: then the last bits can differ from one call to the next. "fp32_auto"
    selects for the first of `devices`.

    After an error of any device or an interrupt, the call waits for the copies and products that are enqueued (those of
    two panels per device at most), and for a kernel that is being compiled or a `progress` call that is running. It
    frees all device memory, and raises the error with a note that names the complete rows and columns of `out`. The
    error's attribute ``done`` also holds them, as a list of pairs of slices. `a` and `b` are only read.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_gemm import streamed_sgemm
    >>> a, b = np.ones((40, 30), np.float32), np.ones((30, 20), np.float32)
    >>> c = streamed_sgemm(a, b, memory_limit=1 << 22)
    >>> c.shape, float(c[0, 0])
    ((40, 20), 30.0)
    >>> c = streamed_sgemm(a, b, devices=[0, 1])  # doctest: +SKIP
    """
    wanted, ordinals = _checked(a, b, out, alpha, beta, precision, device, devices)
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
        reserve_file(result)
        _scale(result, wanted.beta)
        return result
    done: list[Done] = []
    turned = _by_columns(result)

    def multiply(stop: Stop) -> None:
        with prepared(wanted, ordinals, _by_rows(a, b, result), memory_limit) as ready:
            reserve_file(result)
            told = progress if callable(progress) else _Printer(ready.expected(stop)) if progress else None

            def report(part: Done) -> None:
                part = replace(part, rows=part.cols, cols=part.rows) if turned else part
                done.append(part)
                if told is None or stop.event.is_set():
                    return
                try:
                    told(part)
                except BaseException as error:
                    stop(error)  # before another device completes a part
                    raise Stopped from None

            ready.run(report, stop)

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
    devices: Sequence[DeviceLike] | None = None,
) -> Prediction:
    """Predict how long `streamed_sgemm` takes, from copies of parts of the operands and models of the products.

    Parameters and errors are those of `streamed_sgemm`; no matrix may have an extent of 0. The call takes some tenths
    of a second, and as much device memory as the product itself. `out` is not written.

    Several devices copy at the same time while their rates are measured, so that the rates contain what the devices
    share: links, the host's memory, its threads. The prediction takes these rates throughout, and therefore too long a
    time for copies of a device while the others do not copy.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_gemm.streaming import expected_time
    >>> a, b = np.ones((40, 30), np.float32), np.ones((30, 20), np.float32)
    >>> expected_time(a, b).devices
    1
    """
    wanted, ordinals = _checked(a, b, out, 1.0, beta, precision, device, devices)
    memory_limit = _checked_limit(memory_limit)
    _check_extents(wanted)
    found: list[Prediction] = []

    def predicted(stop: Stop) -> None:
        result = np.empty(wanted.shape, np.float32) if out is None else out
        with prepared(wanted, ordinals, _by_rows(a, b, result), memory_limit) as ready:
            found.append(ready.expected(stop))

    supervised(predicted)
    return found[0]


def blocking_of(
    a: np.ndarray,
    b: np.ndarray,
    *,
    memory_limit: int | None = None,
    precision: PrecisionName = IEEE,
    device: DeviceLike | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> Blocking:
    """Return how `streamed_sgemm` divides a product if `out` is stored by rows: its launches and device memory.

    Parameters and errors are those of `streamed_sgemm`; no matrix may have an extent of 0.

    Returns
    -------
    Blocking
        Its ``all_pieces()`` are the products, its ``device_bytes`` the memory of each device.
    """
    wanted, ordinals = _checked(a, b, None, 1.0, 0.0, precision, device, devices)
    memory_limit = _checked_limit(memory_limit)
    _check_extents(wanted)
    return divided(wanted, ordinals, wanted.shape, (_by_columns(a), _by_columns(b)), memory_limit)[0]


def _checked(
    a: Any, b: Any, out: Any, alpha: Any, beta: Any, precision: Any, device: Any, devices: Any
) -> tuple[Request, list[int]]:
    """Check all arguments of a product; return it, as it is for the first device, and the ordinals of all devices."""
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
        if name != "out" and array.dtype != np.float32:
            raise TypeError(f"{name} has dtype {array.dtype}; expected float32; pass {name}.astype(numpy.float32)")
    ordinals = _ordinals(device, devices)
    home = ordinals[0] if ordinals else None
    a, b, out = (_plain(array) for array in (a, b, out))
    wanted = checked(a, b, out, alpha, beta, None, "auto", None, (), home, precision)
    for ordinal in ordinals[1:]:
        check_precision(wanted.precision, device_properties(ordinal).cc)
    return wanted, ordinals or [wanted.device]


def _ordinals(device: Any, devices: Any) -> list[int]:
    """Return the ordinals of the devices that are asked for; none for the current one."""
    if devices is None:
        return [] if device is None else [ordinal_of(device)]
    if device is not None:
        raise ValueError(f"device is {device!r} and devices is {devices!r}; expected one of both; leave one out")
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence):
        raise TypeError(
            f"devices is of type {type(devices).__qualname__}; expected a list or tuple of GPUs; pass [0, 1] for the "
            "first two"
        )
    if not devices:
        raise ValueError("devices is empty; expected one GPU at least; leave it out for the current one")
    found = [ordinal_of(one, f"devices[{place}]") for place, one in enumerate(devices)]
    if repeated := [one for place, one in enumerate(found) if one in found[:place]]:
        raise ValueError(f"devices is {devices!r}, with GPU {repeated[0]} repeated; expected each once; leave one out")
    return found


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


def _by_columns(array: np.ndarray) -> bool:
    return HostMatrix.lies_by_columns(array)


def _plain(array: Any) -> Any:
    """Return an array without its subclass: Numba's mapped and managed arrays are host memory here.

    Their class has a transpose and a view of its own, in device memory. Masked arrays stay what they are: `checked`
    refuses them.
    """
    return array if array is None or isinstance(array, np.ma.MaskedArray) else np.asarray(array)


def _by_rows(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return operands of a product whose C is stored by rows: C stored by columns is its transpose stored by rows."""
    a, b, c = (_plain(array) for array in (a, b, c))
    return (b.T, a.T, c.T) if _by_columns(c) else (a, b, c)


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
