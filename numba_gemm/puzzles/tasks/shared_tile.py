"""Multiply matrices by tiles that a block shares.

C = A @ B. In `product`, every element of A is read N times and every element of B is read M times. Now a block computes
a tile of 8 x 8 elements of C together and walks along K in steps of 8. In each step it copies a tile of A and a tile of
B to shared memory, one element of each per thread, and all 64 threads multiply from there. In NumPy, for a block:

    for k0 in range(0, k, 8):
        a_tile, b_tile = a[rows, k0 : k0 + 8], b[k0 : k0 + 8, cols]
        acc += a_tile @ b_tile

M, N and K are multiples of 8.
"""

from numba import cuda, float32

from ..record import Puzzle

T = 8  # extent of a tile, and of a block


@cuda.jit
def shared_tile(a, b, c):
    a_tile = cuda.shared.array((T, T), float32)
    b_tile = cuda.shared.array((T, T), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T + ty  # of this thread's element of C
    col = cuda.blockIdx.x * T + tx
    acc = float32(0)
    for k0 in range(0, a.shape[1], T):
        # begin
        a_tile[ty, tx] = a[row, k0 + tx]
        b_tile[ty, tx] = b[k0 + ty, col]
        cuda.syncthreads()
        for p in range(T):
            acc += a_tile[ty, p] * b_tile[p, tx]
        cuda.syncthreads()
        # end
    c[row, col] = acc


PUZZLE = Puzzle(
    idea="tiles of A and B in shared memory",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="N/8, M/8",
    block="8, 8",
    cases=({"M": 8, "N": 8, "K": 16}, {"M": 16, "N": 24, "K": 8}),
    limits={"global_floats": "2*M*N*K/T", "barriers": "2*K/T"},
    expected=lambda a, b, c: a @ b,
    hints=(
        "Thread (tx, ty) copies element [ty, tx] of both tiles. The tile of A begins at column k0, that of B at row "
        "k0.",
        "One barrier stands between the copies and the loop over the tile. The other one protects the tile from the "
        "next step's copies until all threads have read it.",
        "Copies: `a_tile[ty, tx] = a[row, k0 + tx]` and `b_tile[ty, tx] = b[k0 + ty, col]`. The loop "
        "`for p in range(T):` adds a_tile[ty, p] * b_tile[p, tx].",
    ),
)
