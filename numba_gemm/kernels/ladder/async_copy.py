"""async_copy: B's tiles go from global to shared memory without passing through registers.

Bottleneck before: the next tiles wait in registers while the current ones are multiplied: 24 of 255 per thread. Each
    vector is loaded by one instruction and stored by another one, which must wait for the first.
Idea: ``cp.async``. Each thread starts its copies of B's next tile and continues; the data arrive in shared memory while
    it multiplies, and the thread waits for them before the barrier at the end of the tile. A is transposed on its way.
    Asynchronous copies could do that only four bytes at a time, which take more instructions and four times the
    bandwidth of shared memory. Its vectors go through registers as before.
Traffic: the same; copies of B write to shared memory directly.
Registers and shared memory: TM*TN accumulators, 2*(TM + TN) fragments and the staged floats of A; 2*BK*(BM + pad + BN)
    floats (49 KB at 128x256x16).
Limits: one instruction in ten is not a multiply-add. Half of these read fragments; most of the others compute addresses
    from indices and strides, again for every tile.
"""

from numba import cuda, float32, uint32

from ...device.async_copy import commit_group, cp_async4, cp_async16, wait_group
from ...device.outer_product import outer_product
from ...device.shared import shared_view
from ...device.store import row_store
from ...device.units import WARP
from ...device.vector import fetch4, fetch4_any, load4, store4_down
from ...simulator.switch import device_function, hardware_only
from .stage import ANY, WHOLE, require


def build(config, fit):
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    THREADS = config.threads
    A_VECTORS = max(BK // 4, 1)  # per row of A's tile
    A_ROWS = THREADS // A_VECTORS  # rows of A that the block copies at a time
    A_LOADS = BM // max(A_ROWS, 1)  # vectors of A that each thread stages
    B_WIDTH = 1 if fit == ANY else 4  # floats of B per copy
    B_ROWS = max(THREADS * B_WIDTH // BN, 1)  # rows of B that the block copies at a time
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    BM_PAD = BM + config.pad
    B_START = 2 * BK * BM_PAD  # start of B's tiles in shared memory
    require(
        config,
        {
            "TM % 4 == 0, TN is 4, 8 or 16": TM % 4 == 0 and TN in (4, 8, 16),
            "warps have tiles: WM > 0": WM > 0,
            "BK % 4 == 0": BK % 4 == 0,
            "pad % 4 == 0": config.pad % 4 == 0,
            "copies cover A's tile: threads % (BK/4) == 0 and BM % (threads/(BK/4)) == 0": (
                A_ROWS > 0 and THREADS % A_VECTORS == 0 and BM % A_ROWS == 0
            ),
            "copies cover B's tile, a whole number of its rows at a time": (
                THREADS * B_WIDTH % BN == 0 and BK % B_ROWS == 0
            ),
            "two buffers: slots == 2": config.slots == 2,
            "dynamic shared memory": config.dynamic,
        },
    )
    fetch = (fetch4_any, fetch4, load4)[fit]  # ANY, ALIGNED, WHOLE
    copy_b = cp_async4 if fit == ANY else cp_async16
    store_row = row_store(TN, 4 * LANES_N, fit != ANY)
    multiply = outer_product(TM, TN, config.order)  # one k-step; acc[i, j] += a_frag[i] * b_frag[j] for all i, j

    @device_function
    def start_copies(b, b_tile, buffer, k0, block_col, tid):
        """Start this thread's copies of B's tile at k0 to the rows from `buffer` on, as one group."""
        b_row, col = tid // (BN // B_WIDTH), block_col + tid % (BN // B_WIDTH) * B_WIDTH
        for p in range(0, BK, B_ROWS):
            row = k0 + b_row + p
            inside = fit == WHOLE or (row < b.shape[0] and col < b.shape[1])
            copy_b(b_tile, buffer + b_row + p, tid % (BN // B_WIDTH) * B_WIDTH, inside, b, row, col)
        commit_group()

    @device_function
    def read_fragments(a_tile, b_tile, buffer, p, row, col, a_frag, b_frag):
        """Read the fragments of k-step p from the tiles at `buffer`."""
        for i in range(0, TM, 4):
            values = load4(a_tile, buffer + p, row + i * LANES_M)
            a_frag[i], a_frag[i + 1], a_frag[i + 2], a_frag[i + 3] = values
        for j in range(0, TN, 4):
            values = load4(b_tile, buffer + p, col + j * LANES_N)
            b_frag[j], b_frag[j + 1], b_frag[j + 2], b_frag[j + 3] = values

    @device_function
    def multiply_tile(a_tile, b_tile, buffer, row, col, a_even, b_even, a_odd, b_odd, acc):
        """Add the products of the tiles at `buffer`, but for the last k-step, whose fragments end in a_odd, b_odd."""
        p = uint32(0)
        while p < BK - 2:
            read_fragments(a_tile, b_tile, buffer, p + 1, row, col, a_odd, b_odd)
            multiply(a_even, b_even, acc)
            read_fragments(a_tile, b_tile, buffer, p + 2, row, col, a_even, b_even)
            multiply(a_odd, b_odd, acc)
            p = uint32(p + 2)
        read_fragments(a_tile, b_tile, buffer, BK - 1, row, col, a_odd, b_odd)
        multiply(a_even, b_even, acc)

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def async_copy(alpha, a, b, beta, c):
        tiles = cuda.shared.array(0, float32, alignment=16)
        a_tile = shared_view(tiles, 0, 2 * BK, BM_PAD)
        b_tile = shared_view(tiles, B_START, 2 * BK, BN)
        k = a.shape[1]
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        block_row = cuda.blockIdx.y * BM
        block_col = cuda.blockIdx.x * BN
        a_row, a_col = tid // A_VECTORS, tid % A_VECTORS * 4
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4

        a_next = cuda.local.array((A_LOADS, 4), float32)
        a_even = cuda.local.array(TM, float32)  # fragments of the even k-steps
        b_even = cuda.local.array(TN, float32)
        a_odd = cuda.local.array(TM, float32)  # fragments of the odd k-steps
        b_odd = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        start_copies(b, b_tile, 0, 0, block_col, tid)
        for i in range(A_LOADS):
            values = fetch(a, block_row + a_row + i * A_ROWS, a_col)
            store4_down(a_tile, a_col, a_row + i * A_ROWS, values)
        buffer = uint32(0)  # first row of the tiles that are read
        wait_group(0)
        cuda.syncthreads()  # all threads' stores and copies of the first tiles are complete before any reads them
        read_fragments(a_tile, b_tile, buffer, 0, row, col, a_even, b_even)

        k0 = BK
        while k0 < k:
            start_copies(b, b_tile, uint32(buffer ^ BK), k0, block_col, tid)
            for i in range(A_LOADS):
                values = fetch(a, block_row + a_row + i * A_ROWS, k0 + a_col)
                a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3] = values
            multiply_tile(a_tile, b_tile, buffer, row, col, a_even, b_even, a_odd, b_odd, acc)
            buffer = uint32(buffer ^ BK)
            for i in range(A_LOADS):
                values = (a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3])
                store4_down(a_tile, buffer + a_col, a_row + i * A_ROWS, values)
            wait_group(0)
            # all threads' stores and copies of the next tiles are complete before any reads them, and all have read
            # this tile's last fragments before the next iteration overwrites it
            cuda.syncthreads()
            read_fragments(a_tile, b_tile, buffer, 0, row, col, a_even, b_even)
            multiply(a_odd, b_odd, acc)
            k0 += BK
        multiply_tile(a_tile, b_tile, buffer, row, col, a_even, b_even, a_odd, b_odd, acc)
        multiply(a_odd, b_odd, acc)

        for i in range(TM):
            c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return async_copy
