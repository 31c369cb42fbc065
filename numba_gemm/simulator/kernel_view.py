"""`numba.cuda` as a kernel sees it, and the memory that kernels create."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

import numpy as np

from . import patches
from .call_chains import call_chain, position_of
from .threads import Index, SimulatedThread

_DYNAMIC_ALIGNMENT = 128
_STATIC_BYTES = 48 << 10  # of shared memory per block

# A quiet NaN if read as float16, bfloat16 (either half), float32 or float64; far beyond any array's end as an int32.
_POISON = 0x7FFFFFFF


def poisoned(shape: Any, dtype: Any, alignment: int | None) -> np.ndarray[Any, Any]:
    """Return a new array full of NaN whose memory is aligned to 16 bytes, or to more on request."""
    dtype = patches.as_dtype(dtype)
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if alignment is None:
        alignment = 16
    elif alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two, got {alignment}")
    alignment = max(alignment, 16)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty((size + alignment) // 4 + 1, np.uint32)
    raw.fill(_POISON)
    start = -raw.__array_interface__["data"][0] % alignment
    return np.ndarray(shape, dtype, raw, start)


class Shared:
    """`cuda.shared`: an array belongs to a block, and to the function and the place in it that create the array."""

    def __init__(self, dynamic_bytes: int, see: Callable[..., Any] | None) -> None:
        self._dynamic_bytes = dynamic_bytes
        self._see = see
        self.functions: Counter[CodeType] = Counter()  # of the kernel and its known callees, by their code
        self._alone: dict[CodeType, bool] = {}
        self.begin_block()

    def begin_block(self) -> None:
        """Forget the arrays of the block before."""
        self._arrays: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}
        self._dynamic: np.ndarray[Any, Any] | None = None

    def _made(self, place: Any, *how: Any) -> np.ndarray[Any, Any]:
        array = poisoned(*how)
        return array if self._see is None else self._see(array, place)

    def _place(self, frame: FrameType) -> Any:
        """Return a key for the hardware array: each function has its own, however often it is called.

        If several functions share one code object, as a factory creates them, nothing tells which one runs. These
        functions are told apart by their callers.
        """
        code = frame.f_code
        if code not in self._alone:
            # The search of all objects is slow: for functions that a kernel finds in a dictionary or an attribute.
            count = self.functions[code] or sum(isinstance(one, FunctionType) for one in gc.get_referrers(code))
            self._alone[code] = count == 1
        return (code, position_of(frame)) if self._alone[code] else call_chain(frame)

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray[Any, Any]:
        """Return the array of the calling line; a shape of 0 is all dynamic shared memory."""
        if isinstance(shape, (int, np.integer)) and shape == 0:
            if alignment is not None and alignment > _DYNAMIC_ALIGNMENT:
                raise ValueError(f"dynamic shared memory is aligned to {_DYNAMIC_ALIGNMENT} bytes, not {alignment}")
            dtype = patches.as_dtype(dtype)
            if self._dynamic is None:
                whole = -(-self._dynamic_bytes // dtype.itemsize)
                self._dynamic = self._made(None, whole, dtype, _DYNAMIC_ALIGNMENT).view(np.uint8)
            whole = self._dynamic_bytes // dtype.itemsize * dtype.itemsize
            return self._dynamic[:whole].view(dtype)
        place = self._place(sys._getframe(1))
        array = self._arrays.get(place)
        if array is None:
            # Threads of Numba's own simulator run at the same time: the first array counts.
            array = self._arrays.setdefault(place, self._made(place, shape, dtype, alignment))
            static = sum(one.nbytes for one in self._arrays.values())
            if static > _STATIC_BYTES:
                raise ValueError(
                    f"the block's shared arrays have {static} bytes, and at most {_STATIC_BYTES} are possible: larger "
                    "tiles need dynamic shared memory, cuda.shared.array(0, ...)"
                )
        return array

    @property
    def lacks_dynamic(self) -> bool:
        """True if the block has asked for dynamic shared memory, and there is none."""
        return self._dynamic is not None and not self._dynamic_bytes


class _Local:
    """`cuda.local`: a new array at every call."""

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray[Any, Any]:
        return poisoned(shape, dtype, alignment)


class _Barriers(Protocol):
    """The part of a launch that its barriers use."""

    threads: list[SimulatedThread]

    def wait(self, frame: FrameType, *, mask: int | None = None, vote: bool = False) -> int: ...

    def exchange(self, frame: FrameType, value: Any, combine: Callable[[list[Any]], Any]) -> Any: ...


class KernelCuda(patches.SimulatedModule):
    """`numba.cuda` as a kernel sees it. Attributes that depend on the thread are set at every thread switch."""

    # These hide properties of the base class that query the operating-system thread.
    threadIdx: Any = None
    blockIdx: Any = None
    laneid: Any = None
    shared: Any = None
    local: Any = None

    def __init__(self, launch: _Barriers, grid: Index, block: Index, dynamic_bytes: int, observer: Any) -> None:
        super().__init__(grid, block, dynamic_bytes)
        self._launch = launch
        self.shared = Shared(dynamic_bytes, getattr(observer, "shared", None))
        self.local = _Local()

    def __getattr__(self, name: str) -> Any:
        """Refuse a name of `numba.cuda` that only compiled kernels have."""
        raise AttributeError(f"cuda has no attribute {name!r} in the simulator (docs/tracing.md)")

    @property
    def cg(self) -> Any:
        """Cooperative groups, whose barriers Numba's simulator would give to its own threads."""
        raise AttributeError("cg")

    def syncthreads(self) -> None:
        """Wait for all threads of the block."""
        self._launch.wait(sys._getframe(1))

    def syncthreads_count(self, predicate: Any) -> int:
        """Wait for all threads of the block; return for how many of them the predicate holds."""
        return self._launch.wait(sys._getframe(1), vote=bool(predicate))

    def syncthreads_and(self, predicate: Any) -> int:
        """Wait for all threads of the block; return 1 if the predicate holds for all of them, else 0."""
        return int(self._launch.wait(sys._getframe(1), vote=bool(predicate)) == len(self._launch.threads))

    def syncthreads_or(self, predicate: Any) -> int:
        """Wait for all threads of the block; return 1 if the predicate holds for any of them, else 0."""
        return int(self._launch.wait(sys._getframe(1), vote=bool(predicate)) > 0)

    def syncwarp(self, mask: int = 0xFFFFFFFF) -> None:
        """Wait for the lanes of the mask."""
        self._launch.wait(sys._getframe(1), mask=int(mask))

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: int) -> Any:
        """Return the value of the lane whose number differs in the bits of `lane_mask`; all lanes must take part."""
        return self._values_of_warp(mask, value)[self.laneid ^ int(lane_mask)]

    def all_sync(self, mask: int, predicate: Any) -> bool:
        """Return whether the predicate holds in all lanes of the warp, which must all take part."""
        return all(self._values_of_warp(mask, predicate))

    def _values_of_warp(self, mask: int, value: Any) -> list[Any]:
        if mask != 0xFFFFFFFF:
            raise NotImplementedError(
                f"mask is {mask:#x}; the simulator exchanges values of whole warps: pass 0xFFFFFFFF"
            )
        return self._launch.exchange(sys._getframe(2), value, list)
