"""Avoid bank conflicts.

The transpose again, with a larger tile. Shared memory has 32 banks: element number i of an array of floats is in bank
i % 32, and a bank serves one element at a time. If the 32 threads of a warp read 32 elements of one bank, the read
takes 32 passes, called wavefronts; if each thread reads from another bank, it takes one. In a tile with 32 columns all
elements of a column are in the same bank, and the kernel below reads columns.

Change the file so that every access to shared memory takes one wavefront. (Extents of shared arrays are numbers or
constants such as `COLUMNS`; the compiler takes no sums there.) M and N are multiples of 32.
"""

from numba import cuda, float32

from ..record import Puzzle

T = 32  # extent of a tile
# begin
#: COLUMNS = 32  # of the shared array
COLUMNS = 33  # of the shared array, the last one unused
# end
ROWS = 4  # of the tile that the block copies at a time


@cuda.jit
def bank_conflicts(a, c):
    tile = cuda.shared.array((T, COLUMNS), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T  # of the tile's first element in A
    col = cuda.blockIdx.x * T
    for i in range(ty, T, ROWS):
        tile[i, tx] = a[row + i, col + tx]
    cuda.syncthreads()
    for i in range(ty, T, ROWS):
        c[col + i, row + tx] = tile[tx, i]


PUZZLE = Puzzle(
    idea="padding against bank conflicts",
    shapes={"a": "M, N", "c": "N, M"},
    grid="N/32, M/32",
    block="32, 4",
    cases=({"M": 32, "N": 32}, {"M": 64, "N": 96}),
    limits={"sectors": "2*M*N/8", "wavefronts": "2*M*N/32", "barriers": "1"},
    expected=lambda a, c: a.T,
    hints=(
        "tile[tx, i] is element number tx*32 + i of the tile, in bank i: the same for all tx. Which number of columns "
        "would move each row on by one bank?",
        "With 33 columns, element [tx, i] has the number tx*33 + i and is in bank (tx + i) % 32. The last column stays "
        "unused; it is called a pad.",
    ),
)
