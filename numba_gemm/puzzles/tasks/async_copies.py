"""Copy without waiting.

A copy to shared memory by `tile[...] = a[...]` goes through a register, and the thread waits for it. `cp_async4` starts
a copy of one float and returns at once:

- `cp_async4(tile, tile_row, tile_col, inside, matrix, row, col)` starts `tile[tile_row, tile_col] = matrix[row, col]`,
  and writes a zero if `inside` is False;
- `commit_group()` closes a group of all copies that the thread has started since the last group;
- `wait_group(n)` waits until at most the newest n groups of this thread are in flight; `wait_group(0)` waits for all.

A thread waits for its own copies only: a barrier after the wait covers those of the other threads. Buffer 1 of a tile
begins at row T. The first tiles are on their way. M, N and K need not be multiples of 8.
"""

from numba import cuda, float32

from ...device.async_copy import commit_group, cp_async4, wait_group
from ..record import Puzzle

T = 8  # extent of a tile, and of a block
TWO_T = 2 * T  # rows of two buffers


@cuda.jit
def async_copies(a, b, c):
    a_tile = cuda.shared.array((TWO_T, T), float32)
    b_tile = cuda.shared.array((TWO_T, T), float32)
    m, n = c.shape
    k = a.shape[1]
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T + ty
    col = cuda.blockIdx.x * T + tx
    acc = float32(0)
    buffer = 0  # first row of the buffer that is multiplied next: 0 or T
    cp_async4(a_tile, ty, tx, row < m and tx < k, a, row, tx)
    cp_async4(b_tile, ty, tx, ty < k and col < n, b, ty, col)
    commit_group()
    for k0 in range(0, k, T):
        following = k0 + T  # first k of the tiles to copy
        # begin
        wait_group(0)
        cuda.syncthreads()
        if following < k:
            to = T - buffer
            cp_async4(a_tile, to + ty, tx, row < m and following + tx < k, a, row, following + tx)
            cp_async4(b_tile, to + ty, tx, following + ty < k and col < n, b, following + ty, col)
            commit_group()
        for p in range(T):
            acc += a_tile[buffer + ty, p] * b_tile[buffer + p, tx]
        buffer = T - buffer
        # end
    if row < m and col < n:
        c[row, col] = acc


PUZZLE = Puzzle(
    idea="asynchronous copies",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="ceil(N/8), ceil(M/8)",
    block="8, 8",
    cases=({"M": 8, "N": 8, "K": 24}, {"M": 5, "N": 9, "K": 11}, {"M": 13, "N": 9, "K": 11}),
    limits={
        "global_floats": "K*(M*ceil(N/T) + N*ceil(M/T))",
        "register_floats": "0",
        "barriers": "ceil(K/T)",
    },
    expected=lambda a, b, c: a @ b,
    hints=(
        "The order of `two_buffers` stays: wait_group(0), barrier, start the next copies, multiply, swap.",
        "The wait must come before the barrier. After the barrier the copies of all threads have landed.",
        "The copies go to rows T - buffer + ty, and `commit_group()` closes them. The element of A is inside if "
        "row < m and following + tx < k. The swap is `buffer = T - buffer`.",
    ),
)
