"""coalesced: one thread per element of C; the lanes of a warp run along a row.

Bottleneck before: each read of A by a warp touches 32 sectors, and so does each write of C.
Idea: swap the axes. Thread .x now selects the column, so a warp reads 32 consecutive floats of a row of B (4 sectors of
    32 bytes, fully used) and one element of A, which the hardware broadcasts.
Traffic: the same 2*M*N*K floats are requested, in 5 sectors per warp and step instead of 33.
Registers and shared memory: one accumulator; none.
Measured: 6.46 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.13 of cuBLAS SGEMM and 12.97 times naive.
Limits: two loads per multiply-add. The load unit accepts one request per clock, and loads and their address arithmetic
    fill most issue slots. "auto" chooses it where that does not matter: for few elements of C with short sums.
"""

from numba import cuda, float32

from ...device.store import axpby

TERMS = 8  # per iteration; the compiler by itself unrolls a loop of unknown length by four only


@cuda.jit
def coalesced(alpha, a, b, beta, c):
    m, n = c.shape
    k = a.shape[1]
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
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
    return coalesced
