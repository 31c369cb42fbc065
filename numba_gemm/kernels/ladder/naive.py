"""naive: one thread per element of C; the lanes of a warp run down a column.

Bottleneck before: none; the climb starts here.
Idea: the definition of the product. Thread .x selects the row and .y the column, deliberately the reverse of every
    later stage: the 32 threads of a warp compute 32 rows of one column of C.
Traffic: 2*K reads per element, 2*M*N*K floats in total, and M*N writes; 1/4 FLOP per byte requested. The 32 elements of
    A that a warp reads at once are a row apart: 32 sectors of 32 bytes, 4 bytes of each used.
Registers and shared memory: one accumulator; none.
Measured: 0.50 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.01 of cuBLAS SGEMM; 32 registers per thread, 1.0 % of
    the FMA pipe.
Limits: the L1 cache, which handles 33 sectors for every 32 multiply-adds; the FMA pipe is idle.
"""

from numba import cuda, float32

from ...device.store import axpby

TERMS = 8  # per iteration; the compiler by itself unrolls a loop of unknown length by four only


@cuda.jit
def naive(alpha, a, b, beta, c):
    m, n = c.shape
    k = a.shape[1]
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    col = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    if row < m and col < n:
        acc = float32(0)
        p = 0
        while p + TERMS <= k:  # p and two 64-bit addresses are incremented once for all terms
            for q in range(TERMS):
                acc += a[row, p + q] * b[p + q, col]
            p += TERMS
        while p < k:
            acc += a[row, p] * b[p, col]
            p += 1
        c[row, col] = axpby(alpha, acc, beta, c, row, col)


def build(config, aligned):
    return naive
