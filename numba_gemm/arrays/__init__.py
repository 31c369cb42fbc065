"""Array libraries: description of their arrays for kernels, allocation of results, and choice of the stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..simulator.switch import SIMULATOR
from .export import maker_of, returned
from .host import HostArrays, SimulatedHostArrays, SimulatedNumbaArrays
from .libraries import CupyArrays, NumbaArrays
from .operand import ArrayKind, Copies, Operand, Product, imported, row_major
from .probe import PROBES, Probe, probe_of
from .protocols import CudaArrayInterface, Dlpack
from .streams import Stream
from .torch_tensors import TorchTensors

__all__ = [
    "KINDS",
    "PROBES",
    "ArrayKind",
    "Copies",
    "Operand",
    "Probe",
    "Product",
    "Stream",
    "describe",
    "kind_of",
    "probe_of",
    "returned",
    "row_major",
]

ACCEPTED = (
    "a float32 array of NumPy, Numba or CuPy, a CUDA tensor of PyTorch, "
    "or an object with __cuda_array_interface__ or __dlpack__"
)


def _refusal(name: str, passed: str, remedy: str) -> TypeError:
    return TypeError(
        f"{name} is {passed}, and this is Numba's CUDA simulator; expected a NumPy or Numba array; pass {remedy}, or "
        "unset NUMBA_ENABLE_CUDASIM on a machine with a GPU"
    )


class OutOfReach(ArrayKind):
    """Arrays in device memory, which the simulator cannot reach."""

    def owns(self, array: Any) -> bool:
        """Return True if only a GPU can reach the array."""
        return any(kind.owns(array) for kind in (CupyArrays(), CudaArrayInterface(), Dlpack()))

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        """Raise TypeError."""
        raise _refusal(name, f"an array in device memory, of type {type(array).__qualname__}", "a NumPy copy")


class TensorsOutOfReach(TorchTensors):
    """PyTorch tensors in the simulator, including those on the CPU, which are not accepted on a GPU either."""

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        """Raise TypeError."""
        self.check_has_data(name, array)
        raise _refusal(name, f"a PyTorch tensor on device {array.device}", f"{name}.detach().cpu().numpy()")


HOST: ArrayKind = SimulatedHostArrays() if SIMULATOR else HostArrays()
# In order of precedence: a library's own arrays come before the protocols, which they support as well.
KINDS: tuple[ArrayKind, ...] = (
    (SimulatedNumbaArrays(), HOST, TensorsOutOfReach(), OutOfReach())
    if SIMULATOR
    else (NumbaArrays(), HOST, CupyArrays(), TorchTensors(), CudaArrayInterface(), Dlpack())
)


FOREIGN = (CudaArrayInterface, Dlpack, OutOfReach)  # kinds of arrays whose library is not known
_KIND_OF: dict[type, ArrayKind] = {}  # types whose objects are all of one kind


def kind_of(name: str, array: Any) -> ArrayKind:
    """Return the library that an array belongs to.

    Raises
    ------
    TypeError
        if no library or protocol recognises it.
    """
    own = type(array)
    if (known := _KIND_OF.get(own)) is not None and known in KINDS:
        return known
    for kind in KINDS:
        if kind.owns(array):
            if kind.owns_type(own):
                _KIND_OF[own] = kind
            return kind
    if isinstance(array, imported("jax.core", "Tracer")):
        raise TypeError(
            f"{name} is a JAX tracer, of type {own.__qualname__}, as inside jax.jit, jax.grad and jax.vmap; expected "
            "an array with data; call numba_gemm.jax.matmul there"
        )
    if name != "out" and any(kind.owns(getattr(array, "array", None)) for kind in KINDS):
        advice = f"pass the array that it holds, {name}.array"  # as a prepared operand does
    elif name != "out":
        vector = name.startswith("epilogue_args")
        advice = f"convert it{' to one dimension' * vector}, for instance with numpy.asarray({name}, "
        advice += f"dtype=numpy.float32){'.reshape(-1)' * vector}"
    else:  # the result in a converted copy would be lost
        advice = "pass out[0]" if isinstance(array, tuple) and len(array) == 1 else "pass such an array, or no out"
    raise TypeError(f"{name} is of type {own.__qualname__}; expected {ACCEPTED}; {advice}")


def describe(name: str, array: Any, stream: Stream | None) -> Operand:
    """Describe the array that was passed as parameter `name`, of any library.

    DLPack objects in host memory count as NumPy's.

    Raises
    ------
    TypeError, ValueError
        if kernels cannot read it; the message says why.
    """
    kind = kind_of(name, array)
    if not isinstance(kind, FOREIGN):
        return kind.describe(name, array, stream)
    in_host_memory = not isinstance(kind, CudaArrayInterface) and Dlpack().owns(array)
    if in_host_memory and array.__dlpack_device__()[0] in Dlpack.HOST:
        found = _on_host(name, array, stream)
    else:
        found = kind.describe(name, array, stream)
    return replace(found, maker=maker_of(array))


def _on_host(name: str, array: Any, stream: Stream | None) -> Operand:
    """Describe a DLPack object in host memory."""
    try:
        host = np.from_dlpack(array)
    except (BufferError, RuntimeError) as error:  # NumPy has no such dtype, BF16 for example
        try:
            return Dlpack().describe_host(name, array, HOST)
        except (BufferError, RuntimeError):
            pass
        raise TypeError(
            f"{name} is of type {type(array).__qualname__} and dtype {getattr(array, 'dtype', 'unknown')}, which "
            f"NumPy cannot read ({error}); expected float32; convert {name} to float32"
        ) from None
    return HOST.describe(name, host, stream)
