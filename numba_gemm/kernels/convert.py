"""Kernel that copies FP16 or BF16 matrices to float32 (see `conversion`).

Each thread copies eight elements of a row: with one 128-bit load where the row allows it, and two 128-bit stores. Rows
of a copy are whole vectors of four; elements beyond the last column are set to zero.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ..device.address import address_of, col_step
from ..device.half import AT_ONCE, reader
from ..device.matrix import shifted
from ..device.vector import store4
from ..simulator.switch import SIMULATOR, device_function, hardware_only
from .conversion import THREADS, ConversionVariant

if not SIMULATOR:
    from numba.cuda import types

    from ..device.matrix import MatrixType

WORDS = 7  # per operand: two extents of the batch, three steps, bytes of a copy, chunks


def signature(variant: ConversionVariant) -> tuple[Any, ...]:
    """Return the Numba types of the kernel's parameters."""
    pair = MatrixType(False), MatrixType(True)
    return (*pair, *pair, types.UniTuple(types.int64, 2 * WORDS + 1))


def copying(dtype: str):
    """Make a device function ``(x, copy, block, blocks, words)`` that copies one operand."""
    read1, read8 = reader(dtype)

    @device_function
    def copy_chunk(x, copy, row, col):
        if col + AT_ONCE <= x.shape[1] and col_step(x) == 2 and address_of(x, row, col) % 16 == 0:
            values = read8(x, row, col)
            store4(copy, row, col, (values[0], values[1], values[2], values[3]))
            store4(copy, row, col + 4, (values[4], values[5], values[6], values[7]))
        else:
            for first in range(0, AT_ONCE, 4):
                if col + first < x.shape[1]:
                    four = cuda.local.array(4, float32)
                    for i in range(4):
                        four[i] = float32(0)
                        if col + first + i < x.shape[1]:
                            four[i] = read1(x, row, col + first + i)
                    store4(copy, row, col + first, (four[0], four[1], four[2], four[3]))

    @device_function
    def copy_all(x, copy, block, blocks, words):
        second, third, first_step, second_step, third_step, each, count = words
        across = int64((x.shape[1] + AT_ONCE - 1) // AT_ONCE)
        chunk = int64(block) * THREADS + int64(cuda.threadIdx.x)
        while chunk < count:
            row, col = chunk // across, chunk % across * AT_ONCE
            matrix, step = int64(0), int64(0)
            if row >= x.shape[0]:
                matrix, row = row // x.shape[0], row % x.shape[0]
                i, j, k = matrix // third // second, matrix // third % second, matrix % third
                step = i * first_step + j * second_step + k * third_step
            copy_chunk(shifted(x, step), shifted(copy, matrix * each), row, col)
            chunk += int64(blocks) * THREADS

    return copy_all


def build(config: None, variant: ConversionVariant):
    """Make the kernel ``(x, x_copy, y, y_copy, words)``.

    `words` are seven per operand: matrices along the last two batch dimensions; bytes from one matrix to the next along
    each of the three; bytes of a copy; chunks of eight elements in all. Then come the blocks for x; the others, if any,
    copy y. The grid has one dimension.
    """
    copy_first, copy_second = copying(variant.first), copying(variant.second)

    @cuda.jit(**hardware_only(launch_bounds=THREADS))
    def convert(x, x_copy, y, y_copy, words):
        block, x_blocks = uint32(cuda.blockIdx.x), uint32(words[14])
        if block < x_blocks:
            copy_first(x, x_copy, block, x_blocks, words[:7])
        else:
            copy_second(y, y_copy, uint32(block - x_blocks), uint32(cuda.gridDim.x - x_blocks), words[7:14])

    return convert
