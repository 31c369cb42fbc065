"""Tensor maps: descriptions of matrices for the hardware that copies boxes of them (`device.tensor_map`).

A map is 128 bytes in device memory, which the driver encodes from an address, extents, strides and the box that a copy
brings. It depends on nothing else, so it serves every product of the same matrix and is never overwritten: launches and
graphs may refer to it at any time. The number of maps is limited, so that memory does not grow without end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.product import Layout
from ..kernels.step import MapOf
from ..kernels.tensor_core.tma_stage import UNIT
from .driver import call, failure, relaxed_capture

MAP_BYTES = 128
PAGE = 512  # maps for which memory is allocated at a time
MAX_MAPS = 1 << 16  # per device: 8 MiB
# Of every map: the type of its elements; steps between them; interleaving, permutation, promotion to L2, and fill. With
# 256 bytes promoted instead of 128, products took up to 1.2 times as long where rows do not begin at sectors.
FORMAT = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
FORM = (
    [driver.cuuint32_t(1)] * 3,
    driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
    driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
)


class TensorMaps:
    """Tensor maps of one device, whose context is current in every call; safe from several threads."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], int] = {}
        self._free: list[int] = []
        self._pages: set[int] = set()  # addresses
        self._stream: Any = None

    def places(self, matrices: Sequence[tuple[int, MapOf]]) -> list[int] | None:
        """Return the addresses of the maps of matrices at some addresses; None if there is no room, or no such map.

        A copy brings a box of up to 256 rows and 32 columns, whose elements it rounds to TF32, to nearest; 16-byte
        chunks of a row of 128 bytes are permuted by XOR with the row modulo 8.
        """
        keys = [_key(*one) for one in matrices]
        own: dict[tuple[Any, ...], int] = {}
        try:
            # Atomic operations without a lock: another thread, or a finaliser, may come here too.
            data = []
            for key, one in zip(keys, matrices, strict=True):
                if key not in self._places and key not in own:
                    place = self._next_place()
                    if place is None:
                        return None
                    own[key] = place
                    encoded = _encode(*one)
                    if encoded is None:
                        return None
                    data.append((place, encoded))
            if data:
                self._write(data)
            found = [self._places.setdefault(key, own.get(key, 0)) for key in keys]
            own = {key: place for key, place in own.items() if place not in found}
            return found
        finally:
            self._free += own.values()

    def _next_place(self) -> int | None:
        try:
            return self._free.pop()
        except IndexError:
            pass
        if len(self._pages) * PAGE >= MAX_MAPS:
            return None
        with relaxed_capture():
            status, page = driver.cuMemAlloc(PAGE * MAP_BYTES)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return None
        if status != driver.CUresult.CUDA_SUCCESS:
            raise failure("cuMemAlloc", status)
        self._pages.add(int(page))
        self._free += range(int(page) + MAP_BYTES, int(page) + PAGE * MAP_BYTES, MAP_BYTES)
        return int(page)

    def _write(self, data: Sequence[tuple[int, bytes]]) -> None:
        with relaxed_capture():
            if self._stream is None:
                # A stream that no other waits for and that is never captured.
                self._stream = call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            begin, joined = 0, b""
            for place, encoded in sorted(data):
                # Maps that are neighbours in one page are copied together.
                if joined and (place != begin + len(joined) or place in self._pages):
                    call(driver.cuMemcpyHtoDAsync, begin, joined, len(joined), self._stream)
                    joined = b""
                begin, joined = (begin if joined else place), joined + encoded
            call(driver.cuMemcpyHtoDAsync, begin, joined, len(joined), self._stream)
            call(driver.cuStreamSynchronize, self._stream)


def _key(pointer: int, wanted: MapOf) -> tuple[Any, ...]:
    """Return all that a map depends on."""
    return pointer, wanted.layout, wanted.box, wanted.matrices if wanted.step else 1, wanted.step


def _encode(pointer: int, wanted: MapOf) -> bytes | None:
    """Return the map; None if the driver refuses to make it."""
    layout, (box_rows, box_cols), step = wanted.layout, wanted.box, wanted.step
    row_bytes = _row_bytes(layout)
    status, made = driver.cuTensorMapEncodeTiled(
        FORMAT,
        3,
        pointer,
        [driver.cuuint64_t(extent) for extent in (layout.cols, layout.rows, wanted.matrices if step else 1)],
        [driver.cuuint64_t(stride) for stride in (row_bytes, step or row_bytes)],
        [driver.cuuint32_t(extent) for extent in (box_cols, box_rows, 1)],
        *FORM,
    )
    if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
        return None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise failure("cuTensorMapEncodeTiled", status)
    return ctypes.string_at(made.getPtr(), MAP_BYTES)


def _row_bytes(layout: Layout) -> int:
    """Return the row stride; of a single row, one that a map allows."""
    return layout.row_stride if layout.rows > 1 else ceil_div(FLOAT32_BYTES * layout.cols, UNIT) * UNIT
