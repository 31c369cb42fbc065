"""Tensor maps: what the hardware that copies boxes of a matrix is told of it (`device.tensor_map`).

A map is 128 bytes in the device's memory, made by the driver from an address, extents, strides and the box that a copy
brings. It depends on nothing else, so one that was made once serves whenever the same matrix comes again, and is never
written anew: launches, and graphs, may refer to it at any time. So that memory does not grow without end, so many are
kept, and no more are made.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from ..models.roofline import FLOAT32_BYTES
from .driver import call, failure, relaxed_capture
from .launch import Matrix

MAP_BYTES = 128
PAGE = 512  # maps that memory is allocated for at a time
MOST = 1 << 16  # of a device: 8 MiB
UNIT = 16  # bytes, of which addresses and strides are multiples
STRIDE_END = 1 << 40

_places: dict[tuple[int, ...], int] = {}
_free: dict[int, list[int]] = {}
_made: dict[int, int] = {}
_streams: dict[int, Any] = {}


def describable(matrix: Matrix, step: int = 0) -> bool:
    """Whether a tensor map can describe a matrix whose rows are contiguous, and others that many bytes further on."""
    return (
        step % UNIT == 0
        and 0 <= step < STRIDE_END
        and matrix.col_stride == FLOAT32_BYTES
        and min(matrix.rows, matrix.cols) > 0
        and matrix.pointer % UNIT == 0
        and (matrix.rows == 1 or _regular(matrix))
    )


def _regular(matrix: Matrix) -> bool:
    """Whether rows are so far apart as a map can say, and do not overlap."""
    return matrix.row_stride % UNIT == 0 and FLOAT32_BYTES * matrix.cols <= matrix.row_stride < STRIDE_END


def place(matrix: Matrix, box_rows: int, box_cols: int, matrices: int = 1, step: int = 0) -> int | None:
    """Address of the map of a `describable` matrix, or of several; None if there is no place for it, or no such map.

    The device's context is current. A copy brings a box of so many rows, up to 256, and columns, up to 32, of which it
    rounds the elements to TF32, to nearest; 16-byte chunks of a row of 128 bytes are exchanged by XOR with the row
    modulo 8.
    """
    if step == 0:
        matrices = 1  # all are this one
    key = (matrix.device, *matrix.packed[:4], box_rows, box_cols, matrices, step)
    found = _places.get(key)
    if found is None:
        # In steps that are one each, without a lock: another thread, or a finaliser, may come here too.
        own = _next_place(matrix.device)
        if own is None:
            return None
        try:
            encoded = _encode(matrix, box_rows, box_cols, matrices, step)
            if encoded is not None:
                _write(matrix.device, own, encoded)
                found = _places.setdefault(key, own)
        finally:
            if found != own:
                _free[matrix.device].append(own)
    return found


def _next_place(device: int) -> int | None:
    free = _free.setdefault(device, [])
    try:
        return free.pop()
    except IndexError:
        pass
    if _made.get(device, 0) >= MOST:
        return None
    with relaxed_capture():
        status, page = driver.cuMemAlloc(PAGE * MAP_BYTES)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise failure("cuMemAlloc", status)
    _made[device] = _made.get(device, 0) + PAGE
    free += range(int(page) + MAP_BYTES, int(page) + PAGE * MAP_BYTES, MAP_BYTES)
    return int(page)


def _encode(matrix: Matrix, box_rows: int, box_cols: int, matrices: int, step: int) -> bytes | None:
    """The map; None if the driver refuses to make it."""
    row_bytes = matrix.row_stride if matrix.rows > 1 else -(-FLOAT32_BYTES * matrix.cols // UNIT) * UNIT
    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        3,
        matrix.pointer,
        [driver.cuuint64_t(extent) for extent in (matrix.cols, matrix.rows, matrices)],
        [driver.cuuint64_t(stride) for stride in (row_bytes, step or row_bytes)],
        [driver.cuuint32_t(extent) for extent in (box_cols, box_rows, 1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
        return None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise failure("cuTensorMapEncodeTiled", status)
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


def _write(device: int, place: int, data: bytes) -> None:
    with relaxed_capture():
        own = _streams.get(device)
        if own is None:
            # Which no other waits for and which is never captured.
            own = call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            _streams[device] = own
        call(driver.cuMemcpyHtoDAsync, place, data, len(data), own)
        call(driver.cuStreamSynchronize, own)
