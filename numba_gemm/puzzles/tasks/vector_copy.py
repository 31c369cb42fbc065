"""Move four floats per instruction.

Compute C = 2*A once more. An instruction can read or write 16 bytes per thread, which are 4 neighbouring floats of a
row, if their address is a multiple of 16 bytes. Numba does not form such accesses by itself, so this package has two
functions for them:

- `load4(array, row, col)` returns the tuple `array[row, col], ..., array[row, col + 3]`;
- `store4(array, row, col, values)` writes a tuple of four floats there.

N is a multiple of 4. A block of 8 x 8 threads covers 8 rows and 32 columns. An instruction counts once for all 32
threads of a warp, so moving single floats would take four times as many as allowed.
"""

from numba import cuda, float32

from ...device.vector import load4, store4
from ..record import Puzzle


@cuda.jit
def vector_copy(a, c):
    m, n = c.shape
    # begin
    row = cuda.blockIdx.y * 8 + cuda.threadIdx.y
    col = (cuda.blockIdx.x * 8 + cuda.threadIdx.x) * 4
    if row < m and col < n:
        v = load4(a, row, col)
        two = float32(2)
        store4(c, row, col, (two * v[0], two * v[1], two * v[2], two * v[3]))
    # end


PUZZLE = Puzzle(
    idea="128-bit accesses",
    shapes={"a": "M, N", "c": "M, N"},
    grid="ceil(N/32), ceil(M/8)",
    block="8, 8",
    cases=({"M": 8, "N": 32}, {"M": 21, "N": 36}),
    limits={"global_floats": "M*N", "requests": "4*ceil(M/8)*ceil(N/32)"},
    expected=lambda a, c: 2 * a,
    hints=(
        "Row as before. Thread x of the grid takes the vector that begins at column 4*x.",
        "With `v = load4(a, row, col)`, v[0] to v[3] are four floats. store4 takes a tuple: (v[0], v[1], v[2], v[3]).",
        "A vector that begins inside ends inside, since N is a multiple of 4: `if row < m and col < n:` suffices.",
    ),
)
