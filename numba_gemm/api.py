"""The public functions: everything is checked here, before anything is launched."""

from __future__ import annotations

import ctypes
import numbers
from typing import Any

import numpy as np

from . import arrays, launch, select
from .arrays import Operand, streams
from .ladder import STAGES
from .ladder.stage import Stage

ANY_GPU = (99, 0)  # a compute capability that no stage finds too low


def stages() -> tuple[Stage, ...]:
    """Return the stages of the ladder, in climbing order; their names are what `tiled_sgemm` takes as `stage`."""
    return tuple(STAGES.values())


def tiled_sgemm(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    stage: str = "auto",
    stream: Any = None,
) -> Any:
    """Compute ``C = alpha * A @ B + beta * C`` in float32 on the GPU.

    Parameters
    ----------
    a, b : array of shape (M, K), array of shape (K, N); float32
        Both of one library: NumPy, Numba, CuPy, PyTorch (on CUDA), or any object that offers
        ``__cuda_array_interface__`` or ``__dlpack__``. Any M, N, K from 0 on, and any strides: transposed, sliced,
        reversed, broadcast. Arrays in device memory are read where they are, never copied. NumPy arrays are copied to
        the GPU and the result back; one that is contiguous neither by rows nor by columns is first copied on the host.
    out : array of shape (M, N), float32, optional
        C, of the same library as `a` and `b`; overwritten. It may have any strides under which its elements are
        distinct, and may interleave with `a` and `b` in memory as long as it shares no element with them. A NumPy one
        that is contiguous neither by rows nor by columns is filled through a host copy. For PyTorch's autograd it
        counts as modified in place.
    alpha, beta : real number
        Rounded to float32. Where `beta` is 0, C is not read and may hold anything, NaN too; where `alpha` is 0, neither
        `a` nor `b` is read.
    stage : str
        A name in `stages()`, to run that stage in its first configuration; or "auto", to have stage and configuration
        chosen by shape, alignment and device.
    stream : optional
        Stream to run on: a stream of Numba, CuPy or PyTorch, an object with ``__cuda_stream__``, or a handle. By
        default the current stream of the arrays' library; for Numba arrays and ``__cuda_array_interface__`` the first
        stream that `a`, `b` or `out` is bound to; else the default stream.

    Returns
    -------
    array of shape (M, N), float32
        `out` if given, else a new array of the library of `a` and `b`, in row order; a Numba device array if `a` and
        `b` are known by ``__cuda_array_interface__`` or ``__dlpack__`` only. (DLPack objects in host memory count as
        NumPy arrays.) A NumPy result is complete at the return; others are complete in the order of the stream.

    Raises
    ------
    TypeError
        For an operand that is no array, has another dtype than float32 (nothing is cast silently), or is not of the
        same library as the others; for an `alpha`, `beta` or `stream` that is none.
    ValueError
        For shapes that do not fit; an `out` that is read-only, overlaps `a`, `b` or itself; ``beta != 0`` without
        `out`; operands on several devices; a PyTorch tensor that requires grad; an unknown stage, or one that the GPU
        cannot run.
    GpuUnavailable
        Without a GPU, unless Numba's simulator is on (NUMBA_ENABLE_CUDASIM=1).

    Notes
    -----
    The product runs on the device that holds the operands (NumPy's: on the current one), and the current device stays
    as it was. It waits, on the GPU, for the work sent so far to the stream that the operands' library works on, or
    that they name. Operands on another stream than their library's, or known by a protocol only, are kept alive until
    the stream has passed the product, and let go by a later call. While the stream is captured into a CUDA graph,
    neither is done: the graph's owner orders and keeps them. Calls are safe from several host threads.
    """
    alpha, beta = _real("alpha", alpha), _real("beta", beta)
    if beta != 0 and out is None:
        raise ValueError(f"beta is {beta:g} and out is None; expected an array C to scale; pass it as out, or beta=0")
    if not isinstance(stage, str):
        raise TypeError(f"stage is a {type(stage).__qualname__}; expected a str; pass 'auto' or the name of a stage")
    if stage != "auto":
        select.resolve(stage, ANY_GPU)  # whether it is known at all: that needs no GPU to say
    queue = None if stream is None else streams.Stream.of(stream)

    left, right = arrays.describe("a", a, queue), arrays.describe("b", b, queue)
    target = None if out is None else arrays.describe("out", out, queue)
    operands = [left, right] if target is None else [left, right, target]
    for operand in operands:
        _check_matrix(operand)
    if left.kind.family != right.kind.family:
        raise TypeError(
            f"a is of kind {left.kind.name} and b of kind {right.kind.name}; expected both of one kind; "
            "convert one of them"
        )
    (m, k), n = left.shape, right.shape[1]
    if right.shape[0] != k:
        raise ValueError(
            f"a has shape {left.shape} and b has shape {right.shape}: {k} columns of a against {right.shape[0]} rows "
            "of b; expected shapes (M, K) and (K, N); pass a transpose or slice that fits"
        )
    if target is not None:
        _check_out(target, left, right)
    device = _common_device(operands)
    if queue is not None and launch.device_count() > 1 and streams.device_of(queue) not in (None, device):
        raise ValueError(
            f"stream belongs to device {streams.device_of(queue)} and the operands lie on device {device}; expected "
            "one device; pass a stream of the operands' device"
        )
    gpu = launch.device_properties(device)
    named = None if stage == "auto" else select.resolve(stage, gpu.cc)

    if alpha == 0 or 0 in (m, n, k):
        # Sums without terms: a and b are not read, and alpha = 0 keeps an infinite or NaN alpha out of beta * C.
        alpha, k, left, right = 0.0, 0, left.resized(m, 0), right.resized(0, n)
    with left.kind.product(left, right, target, reads_out=beta != 0, device=device, stream=queue) as product:
        if m and n:
            x, y, z = product.a, product.b, product.c
            if named is not None:
                chosen, config = named, named.configs[0]
            else:
                chosen, config = select.choose(m, n, k, launch.aligned_operands(x, y, z), gpu.cc, gpu.sm_count)
            launch.launch(chosen, config, alpha, x, y, beta, z, stream=product.stream.handle)
    return product.result if out is None else out


def _real(name: str, value: Any) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} is {value!r}, a {type(value).__qualname__}; expected a real number; pass float({name}) if it is "
            "one"
        )
    try:
        return ctypes.c_float(float(value)).value  # rounds to nearest, and to infinity beyond float32's range
    except OverflowError:
        raise ValueError(f"{name} is an integer beyond the range of a float; expected less; pass a float") from None


def _check_matrix(operand: Operand) -> None:
    name = operand.name
    if len(operand.shape) != 2:
        raise ValueError(
            f"{name} has {len(operand.shape)} dimensions, shape {operand.shape}; expected 2; "
            f"pass {name}.reshape(rows, columns)"
        )
    if operand.dtype != "float32":
        raise TypeError(
            f"{name} has dtype {operand.dtype}; expected float32, and nothing is cast silently; "
            f"pass {operand.kind.cast.format(name)}"
        )
    if operand.device is not None and any(value % arrays.ITEM for value in (operand.pointer, *operand.strides)):
        raise ValueError(
            f"{name} has elements off the 4-byte boundaries that a GPU reads float32 at (address {operand.pointer:#x}, "
            f"strides {operand.strides}); expected aligned elements; pass a contiguous copy of {name}"
        )


def _check_out(target: Operand, left: Operand, right: Operand) -> None:
    if target.kind.family != left.kind.family:
        raise TypeError(
            f"out is of kind {target.kind.name} and a and b of kind {left.kind.name}; expected out of the same kind; "
            "pass such an array, or no out"
        )
    expected = (left.shape[0], right.shape[1])
    if target.shape != expected:
        raise ValueError(
            f"out has shape {target.shape}; expected {expected}, for a of shape {left.shape} and b of shape "
            f"{right.shape}; pass an array of that shape, or no out"
        )
    if target.readonly:
        raise ValueError("out is read-only; expected an array that can be written; pass a copy of it")
    for other in (left, right):
        if target.overlaps(other):
            raise ValueError(
                f"out shares memory with {other.name}; expected an array apart from both operands, which are read "
                f"while it is written; pass another out, or a copy of {other.name}"
            )
    if target.overlaps_itself():
        raise ValueError(
            f"out, of shape {target.shape} and strides {target.strides} bytes, has elements that share memory; "
            "expected distinct ones; pass a copy of it"
        )


def _common_device(operands: list[Operand]) -> int:
    places = {operand.name: operand.device for operand in operands if operand.device is not None}
    if not places:
        return launch.current_device()
    if len(set(places.values())) > 1:
        described = ", ".join(f"{name} on device {device}" for name, device in places.items())
        raise ValueError(f"operands lie on several devices: {described}; expected one; copy them to one device")
    return next(iter(places.values()))
