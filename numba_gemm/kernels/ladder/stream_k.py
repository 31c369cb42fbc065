"""stream_k: Stream-K for operands of any layout, batches and epilogues; the stage that "auto" uses.

Bottleneck before: operands that are not stored by rows, or not aligned, are loaded float by float. The matrices of a
    batch take a launch each, and an epilogue a pass over C.
Idea: basic_stream_k with a tile loader for each of five layouts, which makes transposed operands almost as fast. The
    matrices of a batch are additional tiles. An epilogue is applied to the elements of C as they are stored. Where many
    blocks share a tile, another kernel adds their parts (`add_parts`), because one block would read them one after the
    other. The main loop includes the last k-tile, with its loads switched off by a predicate; basic_stream_k multiplies
    the last k-tile after the loop. The first k-tile, which alone may reach beyond k, leaves out pairs of k-steps beyond
    it; it also takes the last terms of rows that end within a vector, so that all other k-tiles are copied by whole
    vectors. With few tiles, equal shares are split-K (see `device.partition`). Small tiles may have slices: two or four
    groups of warps that multiply different k-steps of each k-tile ("sliced-K" in CUTLASS), and add their sums after the
    last one, through shared memory. A block that is alone on a multiprocessor then has enough warps to hide waits.
    In "bf16x6", small tiles have sums that are compensated after every six k-steps, see `device.compensated`; blocks do
    not share these.
Traffic: the same, plus at most two partial tiles per block, written and read; in shared memory, sums of all slices but
    one.
Registers and shared memory: those of basic_stream_k, and in "bf16x6" twice the accumulators.
Measured: 56.8 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 1.11 of cuBLAS SGEMM and 1.02 times basic_stream_k; 253
    registers per thread, 85.5 % of the FMA pipe, 2.3 % excess shared wavefronts.
Limits: small products: the launch, the first memory access and the exchange of partial sums take longer than the
    multiplications. A multiprocessor's shared memory gives one float per lane and clock to one warp, so that thread
    tiles of 8x4, which read 12 floats for 32 multiply-adds in each of four warps, reach two thirds of the peak. Odd
    pitches: rows that are not 16-byte aligned are copied 4 bytes at a time, in four times as many copies, which large
    thread tiles spread over the first k-steps; and tiles at the edges lie partly outside C. Compute capabilities 8.0
    and 8.6: kernels for a C that is not 16-byte aligned spill, those of 64x128 and 128x128 tiles up to 988 bytes per
    thread, those with slices up to 96; from 9.0 on, none spills.
"""

from numba import cuda, float32, int32, int64, uint32

from ...device.access import covers
from ...device.address import col_step, shared_address, transposed
from ...device.async_copy import commit_group, wait_group
from ...device.compensated import compensated_sums, plain_sums
from ...device.grid_order import let_next_start, nothing
from ...device.kept import as_is, in_step, pinned
from ...device.matrix import shifted
from ...device.outer_product import outer_product
from ...device.partition import (
    arrive,
    batch_place,
    first_k_tile,
    member_of,
    owner,
    part_slot,
    piece,
    reset,
    row_partial,
    tile_place,
)
from ...device.store import row_store, staged_store
from ...device.tile_loader import fetch_of, pairs_beyond, tile_loader
from ...device.units import FLOAT32_BYTES, WARP
from ...device.warp_tile import fragment_reader, slice_adder
from ...simulator.switch import device_function, hardware_only
from .partitions import adds_early, most_left_out, parts_at_once
from .stage import SUMS_STAGED, compensates
from .tile_config import require

SUMS_SPREAD = 64  # per thread; from here on, spreading 4-byte copies over k-steps always pays


def build(config, variant):
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    THREADS, SLICES = config.threads, config.lanes_k
    TILE_THREADS = THREADS // SLICES  # threads of a slice
    PAIRS, NEXT = BK // (2 * SLICES), 2 * SLICES  # pairs of k-steps per slice, and k-steps from one to the next
    A_PITCH = BM + (0 if variant.a.startswith("across") else config.pad)
    B_PITCH = BN + (0 if variant.b.startswith("across") else config.pad_b)
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    B_START = 4 * BK * A_PITCH  # bytes from the start of a slot to its tile of B
    SLOT = B_START + 4 * BK * B_PITCH  # bytes per slot
    WARP_FLOATS, store_tile = staged_store(TM, TN, LANES_M, LANES_N, variant.epilogue)
    SUMS_OF_SLICES, add_slices = slice_adder(TM, TN, SLICES, TILE_THREADS)  # bytes
    read_fragments = fragment_reader(TM, TN, LANES_M, LANES_N, A_PITCH, B_PITCH)
    compensated_fits = compensates(config) or not variant.compensated
    require(
        config,
        {
            "TM % 4 == 0, TN is 4, 8 or 16": TM % 4 == 0 and TN in (4, 8, 16),
            "warps have tiles: WM > 0": WM > 0,
            "BK % 4 == 0": BK % 4 == 0,
            "slices are a power of two": SLICES & (SLICES - 1) == 0,
            "a slice has two pairs of k-steps, or more": PAIRS >= 2 and BK % NEXT == 0,
            "sums of slices fit into the tiles": SUMS_OF_SLICES <= 2 * SLOT,
            "copies cover A's tile": covers(variant.a, BM, BK, THREADS),
            "copies cover B's tile": covers(variant.b, BN, BK, THREADS),
            "two slots": config.slots == 2,
            "compensated sums: BN >= 32, at most 32 per thread, one slice": compensated_fits,
            "pads % 4 == 0": config.pad % 4 == 0 and config.pad_b % 4 == 0,
            "dynamic shared memory": config.dynamic,
            "a staged C fits into the tiles": FLOAT32_BYTES * (TILE_THREADS // WARP) * WARP_FLOATS <= 2 * SLOT,
        },
    )
    # All 4-byte copies of a tile at once would stall all warps; spread over the first k-steps, they do not. Small
    # thread tiles, whose multiprocessors run several blocks, gain from this only if B is transposed on the way.
    FLOATS = not (variant.a.endswith("4") and variant.b.endswith("4"))
    SPREADS = FLOATS and (TM * TN >= SUMS_SPREAD or not variant.b.startswith("across"))
    SPREAD = min(2, PAIRS - 1) if SPREADS else 0  # pairs of k-steps
    PARTS = max(1, 2 * SPREAD)
    # Pairs of k-steps are left out by whole chunks: otherwise the first chunk would have more terms than the others.
    CHUNK = 3 if variant.compensated and SPREAD > 0 else 1
    LOOPS, beyond = PAIRS - 1 > SPREAD, pairs_beyond(BK, most_left_out(config, SPREAD), CHUNK, SLICES)
    # Large thread tiles leave no register to spare where several blocks share an SM, if A passes through registers and
    # B does so, too, or is copied 4 bytes at a time; with eight blocks and a C that is stored float by float, smaller
    # ones do not, either.
    LARGE = 32 if config.min_blocks >= 8 and not variant.c_aligned else 64
    THROUGH = variant.a == "along4" and variant.b != "across4"
    CROWDED = THROUGH and TM * TN >= LARGE and config.min_blocks > 1
    begin_sum = first_k_tile(BK, variant.tails)
    a_loader = tile_loader(variant.a, BM, BK, THREADS, A_PITCH, PARTS, CROWDED, tails=variant.tails)
    b_loader = tile_loader(variant.b, BN, BK, THREADS, B_PITCH, PARTS, CROWDED, tails=variant.tails)
    A_ADDRESSES, A_STAGED = a_loader.addresses, a_loader.staged
    B_ADDRESSES, B_STAGED = b_loader.addresses, b_loader.staged
    origin_a, place_a, valid_a, begin_a, _, settle_a = a_loader.functions
    origin_b, place_b, valid_b, begin_b, _, settle_b = b_loader.functions
    fetch = fetch_of(a_loader, b_loader)
    multiply = outer_product(TM, TN, config.order)  # one k-step; acc[i, j] += a_frag[i] * b_frag[j] for all i, j
    store_partial_row, load_partial_row = row_partial(TN, TILE_THREADS, BM * BN)
    COMPENSATED = variant.compensated
    DOUBLED = COMPENSATED and TM * TN >= 32  # many more sums than fit the registers of min_blocks blocks
    BOUNDS = (THREADS,) if DOUBLED else config.launch_bounds
    TOTALS = (TM, TN) if COMPENSATED else (1, 1)
    clear, add_exactly, finish = compensated_sums(TM, TN, checked=False)
    compute_special = plain_sums(TM, TN, LANES_M, LANES_N)
    AT_ONCE = parts_at_once(config)
    let_adding_start = let_next_start if adds_early(config) else nothing
    store_row = row_store(TN, 4 * LANES_N, variant.c_aligned, variant.c_partial)
    # Without an epilogue, small tiles are stored faster directly.
    STAGED = variant.epilogue is not None or (not variant.c_aligned and TM * TN >= SUMS_STAGED)
    agree = in_step if STAGED else as_is  # `syncwarp` follows where C is staged

    @device_function
    def step(tiles, a_at, b_at, p, a_now, b_now, a_next, b_next, acc):
        """Multiply the fragments of one k-step while those of the next are read."""
        read_fragments(tiles, a_at, b_at, p, a_next, b_next)
        multiply(a_now, b_now, acc)

    @cuda.jit(**hardware_only(launch_bounds=BOUNDS))
    def stream_k(alpha, a, b, beta, c, partition, vectors):
        tiles = cuda.shared.array(0, float32, alignment=16)
        start = shared_address(tiles)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        warp, lane, of_slice = tid // WARP, tid % WARP, uint32(0)
        if SLICES > 1:
            warp, of_slice = warp % (TILE_THREADS // WARP), tid // TILE_THREADS
        has_sums = SLICES == 1 or agree(of_slice == uint32(0))  # of all slices, once these are added
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4
        k, k_tiles = a.shape[1], uint32(partition.k_tiles)
        a_to, b_to = pinned(uint32(start + origin_a(tid))), pinned(uint32(start + B_START + origin_b(tid)))
        a_from = pinned(uint32(start + 4 * row + 8 * A_PITCH * of_slice))
        b_from = pinned(uint32(start + B_START + 4 * col + 8 * B_PITCH * of_slice))

        a_addresses = cuda.local.array(A_ADDRESSES, int64)
        b_addresses = cuda.local.array(B_ADDRESSES, int64)
        a_staged = cuda.local.array(A_STAGED, float32)  # vectors in flight to shared memory
        b_staged = cuda.local.array(B_STAGED, float32)
        a_even = cuda.local.array(TM, float32)  # fragments of the even k-steps
        b_even = cuda.local.array(TN, float32)
        a_odd = cuda.local.array(TM, float32)  # fragments of the odd k-steps
        b_odd = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        total = cuda.local.array(TOTALS, float32)  # compensated sums, but for what acc still has
        arrived = cuda.local.array((AT_ONCE, TM, TN), float32)  # parts of a sum from other blocks

        at, end = piece(partition, block), piece(partition, uint32(block + 1))
        whole, own = uint32(partition.whole), block
        while at < end or own < whole:
            if at < end:  # shared tiles first, so that their parts are ready when other blocks arrive
                index = uint32(at // k_tiles)
                first = uint32(at - uint32(index * k_tiles))
                last = min(k_tiles, uint32(first + uint32(end - at)))
                at = uint32(at + uint32(last - first))
                tile = uint32(whole + index)
            else:
                index, first, last, tile = uint32(0), uint32(0), k_tiles, own
                own = uint32(own + uint32(cuda.gridDim.x))
            x, y, z = a, transposed(b), c  # x and y are (mn, k)
            if uint32(partition.matrices) > uint32(1):
                member = member_of(partition, tile)
                tile = uint32(tile - uint32(member * uint32(uint32(partition.rows) * uint32(partition.cols))))
                i0, i1, i2 = batch_place(partition, member)
                x = shifted(a, i0 * partition.a_outer + i1 * partition.a_middle + i2 * partition.a_inner)
                y = shifted(y, i0 * partition.b_outer + i1 * partition.b_middle + i2 * partition.b_inner)
                z = shifted(c, i0 * partition.c_outer + i1 * partition.c_middle + i2 * partition.c_inner)
            down, across = tile_place(partition, tile)
            block_row, block_col = int64(down) * BM, int64(across) * BN
            a_valid, b_valid = pinned(valid_a(x, block_row, tid)), pinned(valid_b(y, block_col, tid))

            for i in range(TM):
                for j in range(TN):
                    acc[i, j] = float32(0)
            if COMPENSATED:
                clear(total)
            k0, width, terms, gap = begin_sum(k, k_tiles, first)
            left = uint32(last - first)
            left_out = beyond(width)  # pairs of k-steps beyond k, of the first k-tile
            place_a(x, block_row, k0, tid, a_addresses)
            place_b(y, block_col, k0, tid, b_addresses)
            # all threads have read the previous piece's fragments, those read ahead at its end and its staged C before
            # these copies overwrite them
            cuda.syncthreads()
            begin_b(tiles, b_to, y, b_addresses, b_valid, width, gap, tid, b_staged)
            begin_a(tiles, a_to, x, a_addresses, a_valid, width, gap, tid, a_staged)
            commit_group()
            settle_a(tiles, a_to, a_staged)
            settle_b(tiles, b_to, b_staged)
            for i in range(A_ADDRESSES):
                a_addresses[i] += terms * col_step(x)
            for i in range(B_ADDRESSES):
                b_addresses[i] += terms * col_step(y)
            wait_group(0)
            cuda.syncthreads()  # all threads' copies and stores are complete before any reads the first tiles
            slot = uint32(0)  # bytes from the first slot to the slot being read
            read_fragments(tiles, a_from, b_from, 0, a_even, b_even)

            while left > uint32(0):
                left = uint32(left - 1)
                more = left > uint32(0)
                other = uint32(SLOT - slot)
                a_at, b_at = uint32(a_from + slot), uint32(b_from + slot)
                to_a = (tiles, uint32(a_to + other), x, a_addresses, a_valid, more, a_staged)
                to_b = (tiles, uint32(b_to + other), y, b_addresses, b_valid, more, b_staged)
                fetch(to_a, to_b, 0)
                if SPREAD > 0:
                    step(tiles, a_at, b_at, 1, a_even, b_even, a_odd, b_odd, acc)
                    fetch(to_a, to_b, 1)
                    step(tiles, a_at, b_at, NEXT, a_odd, b_odd, a_even, b_even, acc)
                    a_at, b_at = uint32(a_at + 4 * NEXT * A_PITCH), uint32(b_at + 4 * NEXT * B_PITCH)
                if SPREAD > 1:
                    fetch(to_a, to_b, 2)
                    step(tiles, a_at, b_at, 1, a_even, b_even, a_odd, b_odd, acc)
                    fetch(to_a, to_b, 3)
                    step(tiles, a_at, b_at, NEXT, a_odd, b_odd, a_even, b_even, acc)
                    a_at, b_at = uint32(a_at + 4 * NEXT * A_PITCH), uint32(b_at + 4 * NEXT * B_PITCH)
                commit_group()
                p, inner = uint32(left_out + uint32(SPREAD)), LOOPS
                while inner:  # tested at its end: it has at least one iteration
                    step(tiles, a_at, b_at, 1, a_even, b_even, a_odd, b_odd, acc)
                    step(tiles, a_at, b_at, NEXT, a_odd, b_odd, a_even, b_even, acc)
                    a_at, b_at = uint32(a_at + 4 * NEXT * A_PITCH), uint32(b_at + 4 * NEXT * B_PITCH)
                    if COMPENSATED and p % uint32(3) == uint32(2):  # after every six k-steps
                        add_exactly(total, acc)
                    p = uint32(p + 1)
                    inner = p < uint32(PAIRS - 1)
                for i in range(A_ADDRESSES):
                    a_addresses[i] += BK * col_step(x)
                for i in range(B_ADDRESSES):
                    b_addresses[i] += BK * col_step(y)
                # The slice's last k-step has a constant address; if others are left out, it adds zeros.
                a_at, b_at = uint32(a_from + slot), uint32(b_from + slot)
                step(tiles, a_at, b_at, BK - NEXT + 1, a_even, b_even, a_odd, b_odd, acc)
                slot, left_out = other, uint32(0)
                settle_a(tiles, uint32(a_to + slot), a_staged)
                settle_b(tiles, uint32(b_to + slot), b_staged)
                wait_group(0)
                # all threads' copies and stores are complete before any reads the next tiles; and all have read this
                # tile's last fragments before the next iteration overwrites it
                cuda.syncthreads()
                read_fragments(tiles, uint32(a_from + slot), uint32(b_from + slot), 0, a_even, b_even)
                multiply(a_odd, b_odd, acc)
                if COMPENSATED:
                    add_exactly(total, acc)
            if COMPENSATED:
                finish(total, acc)
                compute_special(total, acc, x, y, block_row + row, block_col + col, a_even, b_even)

            if SLICES > 1:
                add_slices(tiles, start, tid, acc)
            complete = True
            if not COMPENSATED and uint32(last - first) < k_tiles:
                lead = owner(partition, uint32(index * k_tiles))
                parts = uint32(owner(partition, uint32(uint32(uint32(index + 1) * k_tiles) - 1)) - lead + 1)
                let_adding_start()  # `add_parts` may be launched; it waits until all blocks have ended
                mine = part_slot(partition, index, lead, uint32(block - lead))
                if has_sums:
                    for i in range(TM):
                        store_partial_row(partition, mine, tid, acc, i)
                cuda.syncthreads()  # all threads have written this part before the block is counted
                final = int32(0)
                counts = tid == uint32(0) and partition.apart == int64(0)  # else another kernel adds the parts
                if counts and arrive(partition, int64(index)) == int64(parts) - 1:
                    final = int32(1)
                # no thread reads the parts before thread 0 has counted this block as the last, when all are visible
                complete = agree(cuda.syncthreads_or(final) != 0)
                if complete and has_sums:
                    if tid == uint32(0):
                        reset(partition, int64(index))
                    for i in range(TM):
                        for j in range(TN):
                            acc[i, j] = float32(0)
                    q = uint32(0)
                    while q < parts:
                        for r in range(AT_ONCE):
                            from_slot = part_slot(partition, index, lead, min(uint32(q + r), uint32(parts - 1)))
                            for i in range(TM):
                                load_partial_row(partition, from_slot, tid, arrived[r], i)
                        for r in range(AT_ONCE):
                            for i in range(TM):
                                for j in range(TN):
                                    if uint32(q + r) < parts:
                                        acc[i, j] += arrived[r, i, j]
                        q = uint32(q + AT_ONCE)
            if complete:
                if STAGED:
                    c_row, c_col = block_row + warp // (BN // WN) * WM, block_col + warp % (BN // WN) * WN
                    cuda.syncthreads()  # all threads have read the last fragments and sums before C is staged over them
                    at_warp = uint32(start + 4 * WARP_FLOATS * warp)
                    if has_sums:
                        store_tile(tiles, at_warp, lane, z, c_row, c_col, alpha, acc, beta, vectors)
                elif has_sums:
                    for i in range(TM):
                        c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
                        store_row(z, c_row, block_col + col, alpha, acc, i, beta)

    return stream_k
