"""Give every thread one element of a matrix.

Compute C = 2*A. A kernel is a function that many threads run, each for itself. Here each thread computes one element.
Threads come in blocks of 8 x 8, and as many blocks as it takes to cover C form the grid. A thread finds its element
from two indices:

- `cuda.threadIdx.x` and `.y`, its position in its block, from 0 to 7 each;
- `cuda.blockIdx.x` and `.y`, the position of its block in the grid.

`cuda.blockDim.x` and `.y` are the extents of a block, 8 here. Let x count columns and y count rows. M and N need not be
multiples of 8: the last blocks have threads outside of the matrix, and these must access nothing. Replace each `...`,
and put the last line under a condition.
"""

from numba import cuda, float32

from ..record import Puzzle


@cuda.jit
def element(a, c):
    m, n = c.shape
    # begin
    #: row = ...  # your code: the row of this thread's element
    #: col = ...  # your code: its column
    #: c[row, col] = float32(2) * a[row, col]  # your code: only where (row, col) is inside of C
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < m and col < n:
        c[row, col] = float32(2) * a[row, col]
    # end


PUZZLE = Puzzle(
    idea="index of an element, edges",
    shapes={"a": "M, N", "c": "M, N"},
    grid="ceil(N/8), ceil(M/8)",
    block="8, 8",
    cases=({"M": 8, "N": 8}, {"M": 13, "N": 18}),
    limits={"global_floats": "M*N"},
    expected=lambda a, c: 2 * a,
    hints=(
        "Block (1, 0) begins 8 columns to the right of block (0, 0). So which column has thread x of block (1, 0)?",
        "The column is cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x. The row is the same with y.",
        "Index 13 of an axis of 13 elements is outside: put the last line under `if row < m and col < n:`.",
    ),
)
