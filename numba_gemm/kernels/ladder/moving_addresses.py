"""moving_addresses: each thread keeps the addresses of its copies and adds to them.

Bottleneck before: one instruction in eight is not a multiply-add. Most of the others compute addresses from indices and
    strides, and compare indices with the edges, again for every tile.
Idea: addresses in place of indices. Before the loop, each thread computes where its copies begin in global and in
    shared memory. In the loop it adds a tile's length to the former and a slot's to the latter; what differs from one
    copy to the next by a constant is part of the instruction. `pinned` values cannot be computed again, which the
    compiler would do in every tile to save a register. Rows of A and columns of B beyond the last are replaced by the
    last one, since their results are never stored: only k is compared with its end.
Traffic: the same.
Registers and shared memory: as async_copy, and addresses in place of indices: one of 64 bits for each row of A that the
    thread copies, and one for B.
Limits: register banks. A multiply-add reads three registers, and two of them often lie in the same of two banks, which
    then needs a second clock.
"""

from numba import cuda, float32, int32, int64, uint32

from ...device.address import (
    address_of,
    col_step,
    copy4_or_zero,
    copy16_or_zero,
    pinned,
    row_step,
    shared_address,
    shared_load4,
)
from ...device.async_copy import commit_group, wait_group
from ...device.outer_product import outer_product
from ...device.store import row_store
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from .stage import require

COPY_K = 8  # consecutive k of a row of A that adjacent threads copy: one sector


def main_loop(config, aligned):
    """Return a device function that adds terms of their sums to the accumulators of a block tile."""
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    THREADS, SLOTS = config.threads, config.slots
    A_ROWS = THREADS // COPY_K  # rows of A that the block copies at a time
    A_COPIES = BM // max(A_ROWS, 1)  # per thread and sector
    B_WIDTH = 4 if aligned else 1  # floats of B per copy
    B_ROWS = max(THREADS * B_WIDTH // BN, 1)  # rows of B that the block copies at a time
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    A_PITCH, B_PITCH = 4 * (BM + config.pad), 4 * BN  # bytes from one k to the next
    B_START = BK * A_PITCH  # bytes from the start of a slot to its tile of B
    SLOT = B_START + BK * B_PITCH  # bytes per slot
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
                THREADS * B_WIDTH % BN == 0 and BK % B_ROWS == 0
            ),
            "three or more slots": SLOTS >= 3,
            "pad % 4 == 0": config.pad % 4 == 0,
            "dynamic shared memory": config.dynamic,
        },
    )
    multiply = outer_product(TM, TN, config.order)  # one k-step; acc[i, j] += a_frag[i] * b_frag[j] for all i, j
    copy_b = copy16_or_zero if aligned else copy4_or_zero

    @device_function
    def start_copies(tiles, a, b, a_at, b_at, a_to, b_to, a_left, b_left):
        """Start this thread's copies of the next tiles, as one group; of its rows, a_left and b_left k exist."""
        for p in range(0, BK, COPY_K):
            for i in range(A_COPIES):
                to = uint32(a_to + p * A_PITCH + 4 * i * A_ROWS)
                copy4_or_zero(tiles, to, a, a_at[i] + p * col_step(a), p < a_left)
        for p in range(0, BK, B_ROWS):
            copy_b(tiles, uint32(b_to + p * B_PITCH), b, b_at[0] + p * row_step(b), p < b_left)
        commit_group()
        for i in range(A_COPIES):
            a_at[i] += BK * col_step(a)
        b_at[0] += BK * row_step(b)

    @device_function
    def read_fragments(tiles, a_from, b_from, p, a_frag, b_frag):
        """Read the fragments of the k-step p steps after the one at a_from and b_from; p is a constant."""
        for i in range(0, TM, 4):
            values = shared_load4(tiles, uint32(a_from + p * A_PITCH + 4 * i * LANES_M))
            a_frag[i], a_frag[i + 1], a_frag[i + 2], a_frag[i + 3] = values
        for j in range(0, TN, 4):
            values = shared_load4(tiles, uint32(b_from + p * B_PITCH + 4 * j * LANES_N))
            b_frag[j], b_frag[j + 1], b_frag[j + 2], b_frag[j + 3] = values

    @device_function
    def accumulate(tiles, a, b, block_row, block_col, row, col, k0, terms, acc):
        """Add `terms` terms from k0 on to the sums of this thread, whose first group is at (row, col) of the tile."""
        start = shared_address(tiles)
        tid = uint32(cuda.threadIdx.x)
        a_row, a_col = tid // COPY_K, tid % COPY_K
        b_row, b_col = tid // (BN // B_WIDTH), tid % (BN // B_WIDTH) * B_WIDTH

        # addresses of this thread's first copies, and of its fragments of the first k-step
        a_at = cuda.local.array(A_COPIES, int64)
        b_at = cuda.local.array(1, int64)
        for i in range(A_COPIES):
            a_at[i] = address_of(a, min(block_row + a_row + i * A_ROWS, a.shape[0] - 1), k0 + a_col)
        b_at[0] = address_of(b, k0 + b_row, min(block_col + b_col, b.shape[1] - B_WIDTH))
        a_to = pinned(uint32(start + a_col * A_PITCH + 4 * a_row))
        b_to = pinned(uint32(start + B_START + b_row * B_PITCH + 4 * b_col))
        a_from = pinned(uint32(start + 4 * row))
        b_from = pinned(uint32(start + B_START + 4 * col))

        a_even = cuda.local.array(TM, float32)  # fragments of the even k-steps
        b_even = cuda.local.array(TN, float32)
        a_odd = cuda.local.array(TM, float32)  # fragments of the odd k-steps
        b_odd = cuda.local.array(TN, float32)
        k = int32(terms)  # 32 bits suffice: launch.MAX_K bounds it
        a_left, b_left = int32(k - a_col), int32(k - b_row)
        for s in range(SLOTS - 1):
            start_copies(tiles, a, b, a_at, b_at, uint32(a_to + s * SLOT), uint32(b_to + s * SLOT), a_left, b_left)
            a_left, b_left = int32(a_left - BK), int32(b_left - BK)
        wait_group(IN_FLIGHT)
        cuda.syncthreads()  # the copies of all threads have landed before any reads the first tiles
        read_slot, write_slot = uint32(0), uint32((SLOTS - 1) * SLOT)  # bytes from the first slot
        read_fragments(tiles, a_from, b_from, 0, a_even, b_even)

        while k > 0:
            k = int32(k - BK)
            start_copies(tiles, a, b, a_at, b_at, uint32(a_to + write_slot), uint32(b_to + write_slot), a_left, b_left)
            a_left, b_left = int32(a_left - BK), int32(b_left - BK)
            a_now, b_now = uint32(a_from + read_slot), uint32(b_from + read_slot)
            p = uint32(0)
            while p < uint32(BK // 2 - 1):
                read_fragments(tiles, a_now, b_now, 1, a_odd, b_odd)
                multiply(a_even, b_even, acc)
                read_fragments(tiles, a_now, b_now, 2, a_even, b_even)
                multiply(a_odd, b_odd, acc)
                a_now, b_now = uint32(a_now + 2 * A_PITCH), uint32(b_now + 2 * B_PITCH)
                p = uint32(p + 1)
            read_fragments(tiles, a_now, b_now, 1, a_odd, b_odd)
            multiply(a_even, b_even, acc)
            write_slot = read_slot
            read_slot = uint32(read_slot + SLOT) if read_slot < uint32((SLOTS - 1) * SLOT) else uint32(0)
            wait_group(IN_FLIGHT)
            # the copies of all threads have landed before any reads the next tiles; and all have read this tile's last
            # fragments before the next iteration's copies overwrite it
            cuda.syncthreads()
            read_fragments(tiles, uint32(a_from + read_slot), uint32(b_from + read_slot), 0, a_even, b_even)
            multiply(a_odd, b_odd, acc)
        wait_group(0)  # no copy may outlive the block

    return accumulate


def build(config, aligned):
    BM, BN, TM, TN, WM, WN = config.BM, config.BN, config.TM, config.TN, config.WM, config.WN
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    accumulate = main_loop(config, aligned)
    store_row = row_store(TN, 4 * LANES_N, aligned)

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def moving_addresses(alpha, a, b, beta, c):
        tiles = cuda.shared.array(0, float32, alignment=16)
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        block_row = int64(cuda.blockIdx.y) * BM
        block_col = int64(cuda.blockIdx.x) * BN
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)
        accumulate(tiles, a, b, block_row, block_col, row, col, 0, a.shape[1], acc)
        for i in range(TM):
            c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return moving_addresses
