"""Thread tiles of a warp: their fragments in shared memory, and sums that several warps add.

Fragments are groups of four rows, or four columns, as far apart as the lanes of a warp need. Warps of different slices
have sums of the same elements of C, for different k.
"""

from __future__ import annotations

from numba import cuda, uint32

from ..simulator.switch import device_function
from .address import shared_load4, shared_store4
from .units import FLOAT32_BYTES


def fragment_reader(TM, TN, LANES_M, LANES_N, A_PITCH, B_PITCH):
    """Make a device function that reads a thread's fragments of one k-step.

    A warp has LANES_M x LANES_N thread tiles of TM x TN; tiles of A and B have a row per k, with so many floats from
    one to the next.
    """

    @device_function
    def read_fragments(tiles, a_at, b_at, p, a_frag, b_frag):
        """Read the fragments of the k-step p steps after the one at a_at and b_at; p is a constant."""
        for i in range(0, TM, 4):
            values = shared_load4(tiles, uint32(a_at + 4 * (p * A_PITCH + i * LANES_M)))
            a_frag[i], a_frag[i + 1], a_frag[i + 2], a_frag[i + 3] = values
        for j in range(0, TN, 4):
            values = shared_load4(tiles, uint32(b_at + 4 * (p * B_PITCH + j * LANES_N)))
            b_frag[j], b_frag[j + 1], b_frag[j + 2], b_frag[j + 3] = values

    return read_fragments


def slice_adder(TM, TN, SLICES, THREADS):
    """Return bytes of shared memory, and a device function that adds the sums of all slices to those of the first.

    SLICES is a power of two; a slice has so many threads.
    """
    STORING = SLICES // 2 * THREADS  # threads whose sums are in shared memory at the same time, at most

    @device_function
    def add_slices(tiles, start, tid, acc):
        """Add the sums of half of the slices to those of the other half, until the first slice has all."""
        half = uint32(STORING)  # threads of half of the slices
        while half >= uint32(THREADS):
            cuda.syncthreads()  # all threads have read the last fragments, or sums, before others overwrite them
            if tid >= half and tid < uint32(2 * half):
                at = uint32(start + 16 * (tid - half))
                for i in range(TM):
                    for j in range(0, TN, 4):
                        four = acc[i, j], acc[i, j + 1], acc[i, j + 2], acc[i, j + 3]
                        shared_store4(tiles, uint32(at + 4 * STORING * (i * TN + j)), four)
            cuda.syncthreads()  # the sums of one half are stored before the other reads them
            if tid < half:
                at = uint32(start + 16 * tid)
                for i in range(TM):
                    for j in range(0, TN, 4):
                        four = shared_load4(tiles, uint32(at + 4 * STORING * (i * TN + j)))
                        acc[i, j] += four[0]
                        acc[i, j + 1] += four[1]
                        acc[i, j + 2] += four[2]
                        acc[i, j + 3] += four[3]
            half = uint32(half // 2)

    return FLOAT32_BYTES * TM * TN * STORING, add_slices
