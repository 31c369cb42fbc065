"""one_warp: one warp multiplies by tensor cores, from registers.

Bottleneck before: FP32 multiply-adds: 128 per clock and multiprocessor, however fast their operands arrive.
Idea: one matrix instruction multiplies 16 rows of A by eight columns of B, 16 terms at a time. Each lane of the warp
    holds a fixed part of A, B and the sums, its fragments. It loads them from global memory, rounds them to BF16, and
    the instruction combines the fragments of all lanes.
Traffic: a warp requests 16 floats of A and eight of B per term: 0.19 floats per multiply-add.
Registers and shared memory: four sums and six words of operands per lane; none.
Measured: 11.6 TFLOP/s of bf16 at 4096x4096x4096 on an NVIDIA H200, 0.23 of cuBLAS SGEMM, in turns; 79 registers per
    thread; of positive operands the median error over |A| @ |B| is 3.1e-05.
Limits: each lane loads twelve single floats per instruction, with a test of the edges for each. Nothing is loaded while
    the instruction runs, and neighbouring warps load the same elements again.
"""

from numba import cuda, float32, int64

from ...device.mma import bf16_word, multiply
from ...device.store import store_axpby1
from ...device.units import WARP
from ...device.vector import fetch1
from ...simulator.switch import device_function, hardware_only
from ..stage import require

M, N, K = 16, 8, 16  # extents of the instruction


@device_function
def a_word(a, row, k):
    """Round two neighbours of a row of A to BF16."""
    return bf16_word(fetch1(a, row, k), fetch1(a, row, k + 1))


@device_function
def b_word(b, k, col):
    """Round two neighbours of a column of B to BF16."""
    return bf16_word(fetch1(b, k, col), fetch1(b, k + 1, col))


def build(config, variant):
    require(
        config,
        {
            "16x8x16, the instruction's extents": (config.BM, config.BN, config.BK) == (M, N, K),
            "2x2 sums per lane": (config.TM, config.TN) == (2, 2),
        },
    )
    multiply_add = multiply(variant.precision.kind)

    @cuda.jit(**hardware_only(launch_bounds=(WARP, 1)))
    def one_warp(alpha, a, b, beta, c):
        lane = int64(cuda.threadIdx.x)
        group, member = lane // 4, lane % 4
        row, col = int64(cuda.blockIdx.y) * M, int64(cuda.blockIdx.x) * N
        acc = (float32(0), float32(0), float32(0), float32(0))
        upper, lower = row + group, row + group + 8
        k = int64(0)
        while k < a.shape[1]:  # the same number of turns for all lanes, which multiply together
            first, second = k + 2 * member, k + 2 * member + 8
            left = a_word(a, upper, first), a_word(a, lower, first), a_word(a, upper, second), a_word(a, lower, second)
            right = b_word(b, first, col + group), b_word(b, second, col + group)
            acc = multiply_add(acc, left, right)
            k += K
        for i in range(4):
            store_axpby1(c, row + group + i // 2 * 8, col + 2 * member + i % 2, alpha, acc[i], beta)

    return one_warp
