"""Scale and add: C = alpha*A @ B + beta*C.

This is the function SGEMM of every library. The sum `acc`, an element of A @ B, is there. The end is missing: multiply
it by `alpha`, add `beta` times the old element of C, and write the result. By convention C is not read if beta is 0: it
may hold NaN then, and 0 times NaN is NaN. M, N and K need not be multiples of 8.
"""

from numba import cuda, float32

from ..record import Puzzle

T = 8  # extent of a tile, and of a block


@cuda.jit
def epilogue(alpha, a, b, beta, c):
    a_tile = cuda.shared.array((T, T), float32)
    b_tile = cuda.shared.array((T, T), float32)
    m, n = c.shape
    k = a.shape[1]
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T + ty
    col = cuda.blockIdx.x * T + tx
    acc = float32(0)
    for k0 in range(0, k, T):
        a_tile[ty, tx] = a[row, k0 + tx] if row < m and k0 + tx < k else float32(0)
        b_tile[ty, tx] = b[k0 + ty, col] if k0 + ty < k and col < n else float32(0)
        cuda.syncthreads()
        for p in range(T):
            acc += a_tile[ty, p] * b_tile[p, tx]
        cuda.syncthreads()
    # begin
    if row < m and col < n:
        value = alpha * acc
        if beta != float32(0):
            value += beta * c[row, col]
        c[row, col] = value
    # end


def scaled(alpha, a, b, beta, c):
    """NumPy's answer."""
    return alpha * (a @ b) + (beta * c if beta else 0)


PUZZLE = Puzzle(
    idea="alpha, beta and the old C",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="ceil(N/8), ceil(M/8)",
    block="8, 8",
    cases=(
        {"M": 8, "N": 8, "K": 8, "alpha": 2.0, "beta": 0.0},
        {"M": 5, "N": 9, "K": 3, "alpha": -1.0, "beta": 0.5},
        {"M": 13, "N": 9, "K": 11, "alpha": 3.0, "beta": -2.0},
    ),
    limits={"global_floats": "K*(M*ceil(N/T) + N*ceil(M/T)) + M*N*(beta != 0)", "barriers": "2*ceil(K/T)"},
    expected=scaled,
    hints=(
        "Compute `value = alpha * acc` first. Then add beta * c[row, col] under a condition.",
        "The condition is `if beta != float32(0):`. All of it is under `if row < m and col < n:`.",
    ),
)
