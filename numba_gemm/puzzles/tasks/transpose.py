"""Share a tile in shared memory.

C is the transpose of A: `c[j, i] = a[i, j]`. A thread that reads `a[i, j]` and writes it straight to `c[j, i]` either
reads or writes down a column. In a block of 8 x 8 threads, a warp then touches 8 rows and half a sector in each, one
sector per four elements: twice the sectors needed. Go through shared memory instead: `cuda.shared.array` is an array
that all threads of a block see. The block copies a tile of 8 x 8 elements of A to it, row by row. Then every thread
takes another element of the tile, such that the block writes the tile of C row by row too.

The other threads have to be done with writing the tile before a thread reads it: `cuda.syncthreads()` is a barrier, at
which a thread waits for all threads of its block. M and N are multiples of 8.
"""

from numba import cuda, float32

from ..record import Puzzle

T = 8  # extent of a tile, and of a block


@cuda.jit
def transpose(a, c):
    tile = cuda.shared.array((T, T), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T  # of the tile's first element in A
    col = cuda.blockIdx.x * T
    # begin
    tile[ty, tx] = a[row + ty, col + tx]
    cuda.syncthreads()
    c[col + ty, row + tx] = tile[tx, ty]
    # end


PUZZLE = Puzzle(
    idea="a tile in shared memory",
    shapes={"a": "M, N", "c": "N, M"},
    grid="N/8, M/8",
    block="8, 8",
    cases=({"M": 8, "N": 8}, {"M": 8, "N": 16}, {"M": 24, "N": 16}),
    limits={"global_floats": "M*N", "sectors": "2*M*N/8", "barriers": "1"},
    expected=lambda a, c: a.T,
    hints=(
        "Three lines: read from A and write to the tile; barrier; read from the tile and write to C. Both times tx "
        "must walk along a row of the matrix.",
        "The tile takes `tile[ty, tx] = a[row + ty, col + tx]`. The tile of C begins at c[col, row].",
        "The last line is `c[col + ty, row + tx] = tile[tx, ty]`: the transposition is in the tile's indices.",
    ),
)
