"""Product that XLA calls, with operands in memory of XLA: on a CUDA stream, or on the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..api import tiled_sgemm
from ..arrays import PROBES, Probe, row_major
from ..arrays.libraries import pointer_device
from ..arrays.probe import Reading
from ..device.units import FLOAT32_BYTES
from ..runtime.device import device_count
from ..runtime.matrix import at_address
from ..simulator.switch import SIMULATOR
from .foreign_call import Buffer, Call, register

__all__ = ["TARGET", "XlaArray", "compute_on_host", "compute_on_stream", "refuse"]

TARGET = "numba_gemm_matmul"


@dataclass(frozen=True, slots=True)
class XlaArray:
    """A float32 array in device memory of XLA, and the stream of the call."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stream: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe the array to `tiled_sgemm`."""
        return {
            "data": (self.address, False),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": "<f4",
            "version": 3,
            "stream": self.stream or 1,
        }


def _read(tag: Any, a: Any, b: Any, out: Any) -> Reading | None:
    # XLA calls with arrays of one device.
    if device_count() > 1 and not out.address:  # an empty array
        return None
    device = pointer_device("out", out.address) if device_count() > 1 else 0
    offsets = (a.address & 15) << 8 | (b.address & 15) << 4 | out.address & 15
    key = tag, XlaArray, device, offsets, a.shape, a.strides, b.shape, b.strides, (out.shape, out.strides)
    return key, a.address, b.address, out.address


# Repeated calls take the fast path. `out` is always given, and there are no vectors.
PROBES[XlaArray] = Probe(
    _read, lambda vector, a: None, lambda a, b, out, device: out.stream or 1, lambda a, shape, device: None
)


def _transposed(layout: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the strides in bytes of an operand, or, for the layout "T", of its transposes."""
    strides = row_major(shape, FLOAT32_BYTES)
    if layout == "N":
        return shape, strides
    return (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])


def compute_on_stream(call: Call) -> None:
    """Multiply arrays in device memory, on the stream of the call."""
    (a, b), (out,), (layout, precision), stream = call.operands, call.results, call.attributes, call.stream()

    def array(layout: str, buffer: Buffer) -> XlaArray:
        return XlaArray(buffer.address, *_transposed(layout, buffer.shape), stream)

    tiled_sgemm(array(layout[0], a), array(layout[1], b), array("N", out), precision=precision)


def compute_on_host(call: Call) -> None:
    """Multiply arrays in host memory, on the simulator."""
    (a, b), (out,), (layout, precision) = call.operands, call.results, call.attributes

    def array(layout: str, buffer: Buffer) -> Any:
        return at_address(call, buffer.address, *_transposed(layout, buffer.shape))

    tiled_sgemm(array(layout[0], a), array(layout[1], b), array("N", out), precision=precision)


def refuse(call: Call) -> None:
    """Refuse arrays on a platform other than this process computes on."""
    if SIMULATOR:
        raise ValueError(
            "the arrays are on a GPU, and this is Numba's CUDA simulator; expected arrays on JAX's CPU device; call "
            "under jax.default_device(jax.devices('cpu')[0]), or unset NUMBA_ENABLE_CUDASIM"
        )
    raise ValueError(
        "the arrays are on JAX's CPU device; expected arrays on a CUDA device; pass them to jax.device_put with a CUDA "
        "device, which JAX has with the package jax[cuda13] or jax[cuda12], or set NUMBA_ENABLE_CUDASIM=1 to use the "
        "simulator"
    )


register(TARGET, "CUDA", refuse if SIMULATOR else compute_on_stream)
register(TARGET, "cpu", compute_on_host if SIMULATOR else refuse)
