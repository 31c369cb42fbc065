"""short_sums: up to 32 terms per sum, at the speed at which C is written.

Bottleneck before: stream_k prepares a pipeline of k-tiles and the division of its work for sums that end with the first
    k-tile. Most of the time passes before the first load and after the last multiply-add, and up to 16 terms are
    multiplied where there are three.
Idea: a block loads its tiles of A and B at once, waits, multiplies as many terms as there are, and stores. Nothing
    overlaps within a block; a multiprocessor has up to eight. A thread has one column of C and 8 or 16 rows, so a
    warp stores 32 neighbours of a row at a time: whole sectors, whatever the alignment of C. For each term, a lane
    reads one float of B, and the warp four floats of A at a time, which the hardware broadcasts.
Traffic: tiles of A and B once per tile of C, from the L2 cache, and C once.
Registers and shared memory: TM accumulators; one tile of each operand.
Measured: 97 random products of up to 32 terms on an NVIDIA H200, by tiled_sgemm: 1.74 of cuBLAS SGEMM in the
    geometric mean, 1.00 or more of it in each.
Limits: five reads of shared memory per sixteen multiply-adds, or three per eight. Sums of more terms than BK wait for
    each k-tile, so "auto" chooses this stage for one k-tile only, and in "bf16x6" for up to eight terms, which need no
    compensation.
"""

from numba import cuda, float32, int32, int64, uint32

from ...device.access import covers
from ...device.address import (
    address_of,
    col_step,
    global_store1_if,
    row_step,
    shared_address,
    shared_load1,
    shared_load4,
    transposed,
)
from ...device.async_copy import commit_group, wait_group
from ...device.matrix import shifted
from ...device.outer_product import outer_product
from ...device.partition import batch_place, member_of
from ...device.store import element_store
from ...device.tile_loader import tile_loader
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from .tile_config import require

STEPS = 4  # terms per iteration; a tile has zeros where there are fewer


def build(config, variant):
    BM, BN, BK, TM, THREADS = config.BM, config.BN, config.BK, config.TM, config.threads
    A_PITCH = BM + (0 if variant.a.startswith("across") else config.pad)
    B_PITCH = BN + (0 if variant.b.startswith("across") else config.pad_b)
    B_START = 4 * BK * A_PITCH  # bytes from A's tile to B's
    require(
        config,
        {
            "TM % 4 == 0": TM % 4 == 0,
            "TN == 1": config.TN == 1,
            "BN % 32 == 0": BN % WARP == 0,
            f"BK % {STEPS} == 0": BK % STEPS == 0,
            "copies cover A's tile": covers(variant.a, BM, BK, THREADS),
            "copies cover B's tile": covers(variant.b, BN, BK, THREADS),
            "pads % 4 == 0": config.pad % 4 == 0 and config.pad_b % 4 == 0,
            "one slot in dynamic shared memory": config.dynamic and config.slots == 1,
            "plain sums": not variant.compensated,
        },
    )
    TAILS = variant.tails
    # Blocks that share rows or columns read them at the same time, those of one multiprocessor from its L1 cache.
    a_loader = tile_loader(variant.a, BM, BK, THREADS, A_PITCH, cached=True, tails=TAILS)
    b_loader = tile_loader(variant.b, BN, BK, THREADS, B_PITCH, cached=True, tails=TAILS)
    A_ADDRESSES, A_STAGED = a_loader.addresses, a_loader.staged
    B_ADDRESSES, B_STAGED = b_loader.addresses, b_loader.staged
    origin_a, place_a, valid_a, begin_a, _, settle_a = a_loader.functions
    origin_b, place_b, valid_b, begin_b, _, settle_b = b_loader.functions
    multiply = outer_product(TM, 1, config.order)
    store1, PLAIN = element_store(variant.epilogue), variant.epilogue is None

    @device_function
    def read_fragments(tiles, a_at, b_at, a_frag, b_frag):
        for i in range(0, TM, 4):
            values = shared_load4(tiles, uint32(a_at + 4 * i))
            a_frag[i], a_frag[i + 1], a_frag[i + 2], a_frag[i + 3] = values
        b_frag[0] = shared_load1(tiles, b_at)

    @device_function
    def store(z, row, col, alpha, acc, beta, vectors):
        """Write a thread's rows of its column."""
        if PLAIN and beta == float32(0):
            to = address_of(z, row, col)
            rows = int32(min(z.shape[0] - row, int64(TM))) if col < z.shape[1] else int32(0)
            for i in range(TM):
                global_store1_if(z, to, alpha * acc[i, 0], int32(i) < rows)
                to += row_step(z)
        else:
            i = uint32(0)
            while i < uint32(TM):  # a loop, so that an epilogue is compiled once; constants select the sum
                value = acc[0, 0]
                for x in range(1, TM):
                    if i == uint32(x):
                        value = acc[x, 0]
                store1(z, row + int64(i), col, alpha, value, beta, vectors)
                i = uint32(i + 1)

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def short_sums(alpha, a, b, beta, c, partition, vectors):
        tiles = cuda.shared.array(0, float32, alignment=16)
        start = shared_address(tiles)
        tid, tile = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        warp = uint32(tid // WARP)
        row = uint32(warp // uint32(BN // WARP) * uint32(TM))  # this thread's first row within the block tile
        col = uint32(warp % uint32(BN // WARP) * uint32(WARP) + tid % WARP)
        a_to, b_to = uint32(start + origin_a(tid)), uint32(start + B_START + origin_b(tid))

        a_addresses = cuda.local.array(A_ADDRESSES, int64)
        b_addresses = cuda.local.array(B_ADDRESSES, int64)
        a_staged = cuda.local.array(A_STAGED, float32)  # vectors in flight to shared memory
        b_staged = cuda.local.array(B_STAGED, float32)
        a_frag = cuda.local.array(TM, float32)
        b_frag = cuda.local.array(1, float32)
        acc = cuda.local.array((TM, 1), float32)

        x, y, z = a, transposed(b), c  # x and y are (mn, k)
        if uint32(partition.matrices) > uint32(1):
            member = member_of(partition, tile)
            tile = uint32(tile - uint32(member * uint32(uint32(partition.rows) * uint32(partition.cols))))
            i0, i1, i2 = batch_place(partition, member)
            x = shifted(a, i0 * partition.a_outer + i1 * partition.a_middle + i2 * partition.a_inner)
            y = shifted(y, i0 * partition.b_outer + i1 * partition.b_middle + i2 * partition.b_inner)
            z = shifted(c, i0 * partition.c_outer + i1 * partition.c_middle + i2 * partition.c_inner)
        down = uint32(tile // uint32(partition.cols))
        across = uint32(tile - uint32(down * uint32(partition.cols)))
        block_row, block_col = int64(down) * BM, int64(across) * BN
        a_valid, b_valid = valid_a(x, block_row, tid), valid_b(y, block_col, tid)
        place_a(x, block_row, int64(0), tid, a_addresses)
        place_b(y, block_col, int64(0), tid, b_addresses)
        for i in range(TM):
            acc[i, 0] = float32(0)

        left = uint32(partition.k_tiles)
        width = a.shape[1] - (int64(left) - 1) * BK  # only the first tile along k may be partial
        terms, gap = width, int64(0)
        if TAILS:  # the last one to four terms come with the first tile
            terms, gap = (width - 1) // 4 * 4, a.shape[1] - width
        while left > uint32(0):
            begin_b(tiles, b_to, y, b_addresses, b_valid, width, gap, tid, b_staged)
            begin_a(tiles, a_to, x, a_addresses, a_valid, width, gap, tid, a_staged)
            commit_group()
            settle_a(tiles, a_to, a_staged)
            settle_b(tiles, b_to, b_staged)
            wait_group(0)
            cuda.syncthreads()  # all threads' copies and stores are complete before any reads the tiles
            a_at, b_at = uint32(start + 4 * row), uint32(start + B_START + 4 * col)
            end = uint32(
                a_at + uint32((uint32(width) + uint32(STEPS - 1)) // uint32(STEPS)) * uint32(4 * STEPS * A_PITCH)
            )
            while a_at < end:
                for p in range(STEPS):
                    read_fragments(
                        tiles, uint32(a_at + 4 * p * A_PITCH), uint32(b_at + 4 * p * B_PITCH), a_frag, b_frag
                    )
                    multiply(a_frag, b_frag, acc)
                a_at, b_at = uint32(a_at + 4 * STEPS * A_PITCH), uint32(b_at + 4 * STEPS * B_PITCH)
            left = uint32(left - 1)
            if left > uint32(0):
                cuda.syncthreads()  # all threads have read these tiles before the next ones overwrite them
                for i in range(A_ADDRESSES):
                    a_addresses[i] += terms * col_step(x)
                for i in range(B_ADDRESSES):
                    b_addresses[i] += terms * col_step(y)
                width, terms, gap = int64(BK), int64(BK), int64(0)
        store(z, block_row + row, block_col + col, alpha, acc, beta, vectors)

    return short_sums
