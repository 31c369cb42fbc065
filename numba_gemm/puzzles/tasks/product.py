"""Compute one element of a matrix product per thread.

C = A @ B. A has M rows and K columns, B has K rows and N columns. The thread of `c[row, col]` multiplies row `row` of A
by column `col` of B, term by term, and adds up the K products. In NumPy this is `(a[row, :] * b[:, col]).sum()`; in a
kernel it is a loop.

Add up in a local variable, which lives in a register, and write C once. `float32(0)` is a zero of 32 bits; a plain
`0.0` has 64 and would make the whole sum slow on a GPU.
"""

from numba import cuda, float32

from ..record import Puzzle


@cuda.jit
def product(a, b, c):
    m, n = c.shape
    k = a.shape[1]
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < m and col < n:
        # begin
        acc = float32(0)
        for p in range(k):
            acc += a[row, p] * b[p, col]
        c[row, col] = acc
        # end


PUZZLE = Puzzle(
    idea="one element of C per thread",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="ceil(N/8), ceil(M/8)",
    block="8, 8",
    cases=({"M": 8, "N": 8, "K": 5}, {"M": 9, "N": 20, "K": 7}),
    limits={"global_floats": "2*M*N*K"},
    expected=lambda a, b, c: a @ b,
    hints=(
        "Begin with `acc = float32(0)`, and add one product in each iteration of `for p in range(k):`.",
        "Term p is a[row, p] * b[p, col]: p walks along the row of A and down the column of B.",
        "After the loop, not in it, comes `c[row, col] = acc`. C holds no zeros before: `c[row, col] += ...` fails.",
    ),
)
