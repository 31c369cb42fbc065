"""async_copy: tiles go from global to shared memory without passing through registers.

Bottleneck before: the next tile waits in registers while the current one is multiplied, and every element of A is
    stored by its own instruction. Only one tile can be loaded ahead.
Idea: ``cp.async``. Each thread starts its copies and continues; with three or more slots, two or more tiles are in
    flight. A is transposed by 4-byte copies: a warp copies 8 k of 4 rows, 32 bytes per row (one sector if the row is
    aligned to sectors). Four floats of padding per row of the tile distribute the 32 words over the 32 banks. B is
    copied in whole vectors. Counters have 32 bits, which saves an instruction per addition and comparison; the launcher
    splits K long before they overflow.
Traffic: the same; the copies write to shared memory directly.
Registers and shared memory: TM*TN accumulators and 2*(TM + TN) fragments; slots*BK*(BM + pad + BN) floats (73 KB at
    128x256x16 in three slots).
Measured: 50.0 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.98 of cuBLAS SGEMM and 1.05 times warp_tiled; 204
    registers per thread, 79.5 % of the FMA pipe, 7.0 % excess shared wavefronts.
Limits: the FMA pipe is now nearly as busy as under cuBLAS. One instruction in eight is not a multiply-add, and operands
    conflict in register banks. The copies of A still take four wavefronts each, one per row.
"""

from numba import cuda, float32, uint32

from ...device.async_copy import commit_group, cp_async4, cp_async16, wait_group
from ...device.outer_product import outer_product
from ...device.shared import shared_view
from ...device.store import row_store
from ...device.units import WARP
from ...device.vector import load4
from ...simulator.switch import device_function, hardware_only
from .stage import require

COPY_K = 8  # consecutive k of a row of A that adjacent threads copy: one sector


def build(config, aligned):
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    THREADS, SLOTS = config.threads, config.slots
    BM_PAD = BM + config.pad
    A_ROWS = THREADS // COPY_K  # rows of A that the block copies at a time
    B_WIDTH = 4 if aligned else 1  # floats of B per copy
    B_COLS = min(BN, THREADS * B_WIDTH)  # columns of B that the block copies at a time
    B_ROWS = THREADS * B_WIDTH // B_COLS  # rows of B
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    B_START = SLOTS * BK * BM_PAD  # start of B's slots in shared memory
    IN_FLIGHT = SLOTS - 2  # groups that may be in flight when the next tile is needed
    require(
        config,
        {
            "TM % 4 == 0, TN is 4, 8 or 16": TM % 4 == 0 and TN in (4, 8, 16),
            "warps have tiles: WM > 0": WM > 0,
            "BK % 8 == 0": BK % COPY_K == 0,
            "copies cover A's tile: threads % 8 == 0 and BM % (threads/8) == 0": (
                A_ROWS > 0 and THREADS % COPY_K == 0 and BM % A_ROWS == 0
            ),
            "copies cover B's tile, a whole number of its rows at a time": (
                BN % B_COLS == 0 and THREADS * B_WIDTH % B_COLS == 0 and BK % B_ROWS == 0
            ),
            "three or more slots": SLOTS >= 3,
            "pad % 4 == 0": config.pad % 4 == 0,
            "dynamic shared memory": config.dynamic,
        },
    )
    store_row = row_store(TN, 4 * LANES_N, aligned)
    multiply = outer_product(TM, TN, config.order)  # one k-step; acc[i, j] += a_frag[i] * b_frag[j] for all i, j
    copy_b = cp_async16 if aligned else cp_async4

    @device_function
    def start_copies(a, b, a_tile, b_tile, slot, k0, block_row, block_col, tid):
        """Start this thread's copies of the tiles at k0 to the rows from `slot` on, as one group."""
        a_row, a_col = tid // COPY_K, tid % COPY_K
        for p in range(0, BK, COPY_K):
            for i in range(0, BM, A_ROWS):
                row, col = block_row + a_row + i, k0 + a_col + p
                inside = row < a.shape[0] and col < a.shape[1]
                cp_async4(a_tile, slot + a_col + p, a_row + i, inside, a, row, col)
        b_row, b_col = tid // (B_COLS // B_WIDTH), tid % (B_COLS // B_WIDTH) * B_WIDTH
        for p in range(0, BK, B_ROWS):
            for j in range(0, BN, B_COLS):
                row, col = k0 + b_row + p, block_col + b_col + j
                inside = row < b.shape[0] and col < b.shape[1]
                copy_b(b_tile, slot + b_row + p, b_col + j, inside, b, row, col)
        commit_group()

    @device_function
    def read_fragments(a_tile, b_tile, slot, p, row, col, a_frag, b_frag):
        """Read the fragments of k-step p from the tiles at `slot`."""
        for i in range(0, TM, 4):
            values = load4(a_tile, slot + p, row + i * LANES_M)
            a_frag[i], a_frag[i + 1], a_frag[i + 2], a_frag[i + 3] = values
        for j in range(0, TN, 4):
            values = load4(b_tile, slot + p, col + j * LANES_N)
            b_frag[j], b_frag[j + 1], b_frag[j + 2], b_frag[j + 3] = values

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def async_copy(alpha, a, b, beta, c):
        tiles = cuda.shared.array(0, float32, alignment=16)
        a_tile = shared_view(tiles, 0, SLOTS * BK, BM_PAD)
        b_tile = shared_view(tiles, B_START, SLOTS * BK, BN)
        k = a.shape[1]
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        block_row = cuda.blockIdx.y * BM
        block_col = cuda.blockIdx.x * BN
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4

        a_even = cuda.local.array(TM, float32)  # fragments of the even k-steps
        b_even = cuda.local.array(TN, float32)
        a_odd = cuda.local.array(TM, float32)  # fragments of the odd k-steps
        b_odd = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        for s in range(SLOTS - 1):
            start_copies(a, b, a_tile, b_tile, s * BK, s * BK, block_row, block_col, tid)
        wait_group(IN_FLIGHT)
        cuda.syncthreads()  # the copies of all threads have landed before any reads the first tiles
        read_slot = uint32(0)
        write_slot = uint32((SLOTS - 1) * BK)
        read_fragments(a_tile, b_tile, read_slot, 0, row, col, a_even, b_even)

        k0 = uint32(0)  # 32 bits suffice: launch.MAX_K bounds k
        while k0 < k:
            start_copies(a, b, a_tile, b_tile, write_slot, k0 + (SLOTS - 1) * BK, block_row, block_col, tid)
            p = uint32(0)
            while p < BK - 2:
                read_fragments(a_tile, b_tile, read_slot, p + 1, row, col, a_odd, b_odd)
                multiply(a_even, b_even, acc)
                read_fragments(a_tile, b_tile, read_slot, p + 2, row, col, a_even, b_even)
                multiply(a_odd, b_odd, acc)
                p = uint32(p + 2)
            read_fragments(a_tile, b_tile, read_slot, BK - 1, row, col, a_odd, b_odd)
            multiply(a_even, b_even, acc)
            write_slot = read_slot
            read_slot = uint32(read_slot + BK) if read_slot < (SLOTS - 1) * BK else uint32(0)
            wait_group(IN_FLIGHT)
            # the copies of all threads have landed before any reads the next tiles; and all have read this tile's last
            # fragments before the next iteration's copies overwrite it
            cuda.syncthreads()
            read_fragments(a_tile, b_tile, read_slot, 0, row, col, a_even, b_even)
            multiply(a_odd, b_odd, acc)
            k0 = uint32(k0 + BK)
        wait_group(0)  # no copy may outlive the block

        for i in range(TM):
            c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return async_copy
