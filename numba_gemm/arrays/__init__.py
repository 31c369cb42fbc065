"""Array libraries: what each one's arrays look like to a kernel, where its results go, and on which stream it works.

One `ArrayKind` a library. A library is only looked at when the caller has imported it, and none is a dependency. Device
memory is never copied: kernels take any byte strides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..simulator.switch import SIMULATOR
from .host import HostArrays, SimulatedHostArrays, SimulatedNumbaArrays
from .libraries import CupyArrays, NumbaArrays, TorchTensors
from .operand import ITEM, ArrayKind, Copies, Operand, Product, row_major
from .probe import PROBES, Probe, probe_of
from .protocols import CudaArrayInterface, Dlpack
from .streams import Stream

__all__ = [
    "ITEM",
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
    "row_major",
]

ACCEPTED = (
    "a float32 array of NumPy, Numba or CuPy, a CUDA tensor of PyTorch, "
    "or an object with __cuda_array_interface__ or __dlpack__"
)


def _refusal(name: str, passed: str, remedy: str) -> TypeError:
    return TypeError(
        f"{name} is a {passed}, and this is Numba's CUDA simulator; expected a NumPy or Numba array; pass {remedy}, or "
        "unset NUMBA_ENABLE_CUDASIM on a machine with a GPU"
    )


class OutOfReach(ArrayKind):
    """Device memory, where there is only the simulator."""

    def owns(self, array: Any) -> bool:
        """Whether it is an array that only a GPU reaches."""
        return any(kind.owns(array) for kind in (CupyArrays(), CudaArrayInterface(), Dlpack()))

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        """Refuse it."""
        raise _refusal(name, f"{type(array).__qualname__} in device memory", "a NumPy copy")


class TensorsOutOfReach(TorchTensors):
    """PyTorch tensors where there is only the simulator: those on the CPU are not taken on a GPU either."""

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        """Refuse it."""
        self.check_has_data(name, array)
        raise _refusal(name, f"PyTorch tensor on device {array.device}", f"{name}.detach().cpu().numpy()")


HOST: ArrayKind = SimulatedHostArrays() if SIMULATOR else HostArrays()
# In the order in which they are asked: a library's own arrays before the protocols, which they speak as well.
KINDS: tuple[ArrayKind, ...] = (
    (SimulatedNumbaArrays(), HOST, TensorsOutOfReach(), OutOfReach())
    if SIMULATOR
    else (NumbaArrays(), HOST, CupyArrays(), TorchTensors(), CudaArrayInterface(), Dlpack())
)


PROTOCOLS = (Dlpack, OutOfReach)  # kinds whose arrays may lie in host memory
_KIND_OF: dict[type, ArrayKind] = {}  # of types all of whose objects are of one kind


def kind_of(name: str, array: Any) -> ArrayKind:
    """Whose array an object is.

    Raises
    ------
    TypeError
        if it is none that is known.
    """
    own = type(array)
    if (known := _KIND_OF.get(own)) is not None and known in KINDS:
        return known
    for kind in KINDS:
        if kind.owns(array):
            if kind.owns_type(own):
                _KIND_OF[own] = kind
            return kind
    raise TypeError(
        f"{name} is a {type(array).__qualname__}; expected {ACCEPTED}; convert it, for instance with "
        f"numpy.asarray({name}, dtype=numpy.float32)"
    )


def describe(name: str, array: Any, stream: Stream | None) -> Operand:
    """Describe what was passed as parameter `name`, whatever its library.

    DLPack objects in host memory count as NumPy's.

    Raises
    ------
    TypeError, ValueError
        if it is no array that kernels can read, saying why.
    """
    kind = kind_of(name, array)
    if isinstance(kind, PROTOCOLS) and Dlpack().owns(array) and array.__dlpack_device__()[0] in Dlpack.HOST:
        return HOST.describe(name, np.from_dlpack(array), stream)
    return kind.describe(name, array, stream)
