"""thin: a C with few rows or columns, or both, at the bandwidth of memory.

Bottleneck before: tiles of C are square or nearly so. If C has one column, or sixteen, most of a tile is outside C.
    If it has few rows too, most multiprocessors have no tile, and blocks that divide the sums of one compute too little
    between loads.
Idea: such a product reads its operands once and computes little, so only the number of bytes in flight counts. The
    lanes of a warp run along k, each with its own sums of a thread tile. Chunks of A and B are copied to shared memory
    asynchronously, several ahead, in the order in which they are stored: shared memory is a long queue before the
    registers. Operands stored by columns come through the L1 cache, where blocks share the few lines that they have. If
    all k fit, a small product waits for memory once. A block may take a single row of A, or four, so that few rows need
    no divided sums. A thread reads four k of its rows and of its columns at a time. The lanes' sums are added once per
    tile, through shared memory. Tiles are shared between blocks as in stream_k, but parts of a sum meet without a
    counter: the block with the last part waits for the others (`device.published`). More than 16 parts are divided into
    groups: the last block of each group adds its parts, and the tile's last block the groups' sums. In "bf16x6", sums
    are compensated: a thread adds what it rounded off to its next four terms (see `device.compensated`), and sums of
    lanes and of blocks are added in float64. In "ieee", a thread that has one sum adds groups of four products in
    float64, and sums of 16 lanes are added in float64.
Traffic: A and B once if C is one tile. If C has more rows: A once, and for B, from the L2 cache, BN/BM of A's bytes.
Registers and shared memory: TM*TN accumulators, twice as many in "bf16x6", and 4*TM floats of A, or up to 64 floats of
    other blocks' parts; slots*(BM + BN + 2)*BK floats at most.
Measured: 16384x16384 times 1, 4 and 16 columns on an NVIDIA H200, by tiled_sgemm, A not in the cache: 1.66, 1.65 and
    1.28 of a copy's bandwidth, 1.06, 2.15 and 1.66 of cuBLAS SGEMM.
Limits: within a block, the start and end of a tile do not overlap with the next tile; the other blocks of the
    multiprocessor hide that latency. Operands whose rows are not 16-byte aligned are copied float by float. "auto"
    considers this stage for a C of few rows or columns, and for any C of up to 2^18 elements.
"""

from functools import lru_cache
from math import inf

from numba import cuda, float32, float64, int32, int64, uint32

from ...device.address import (
    address_of,
    col_step,
    shared_address,
    shared_load4,
    shared_store1,
    transposed,
)
from ...device.async_copy import commit_group, wait_group
from ...device.chunk_loader import chunk_loader
from ...device.compensated import compensated_sums
from ...device.kept import in_step, pinned
from ...device.matrix import shifted
from ...device.partition import (
    batch_place,
    member_of,
    owner,
    parts_in_group,
    piece,
    tile_place,
)
from ...device.published import missing, published_floats
from ...device.store import element_store
from ...device.units import WARP, ceil_div
from ...simulator.switch import device_function, hardware_only
from .tile_config import require


@lru_cache(maxsize=64)
def operand(access, EXTENT, THREADS, BK, LANES):
    """Return bytes of a chunk, and device functions that copy and read one of an operand seen as (row, k).

    A chunk keeps the order of memory. Stored by rows, its rows are side by side, and lanes read adjacent vectors.
    Otherwise, four k are followed by a vector of padding, so that the k of eight lanes are in different banks.
    """
    # Blocks that share rows of an operand read them at the same time. Stored by columns, these have few cache lines,
    # and the slices of the L2 cache that hold them are the bottleneck. Through the L1 cache, blocks of one
    # multiprocessor share these reads.
    cached = access.startswith("across")
    loader = chunk_loader(access, EXTENT, BK, THREADS, pitch=BK, padding=4, any_extent=True, cached=cached)
    ACROSS, FOUR_K = loader.across, loader.four_k

    @device_function
    def origin(row, lane):
        """Bytes from the start of a chunk to the first float that a lane reads."""
        return uint32(4 * (lane * FOUR_K + row)) if ACROSS else uint32(4 * (row * BK + 4 * lane))

    STEP = 4 * LANES * (FOUR_K if ACROSS else 4)  # bytes from the four k that a lane reads to its next ones

    @device_function
    def read_row(tiles, at, r, s):
        """Four k of row r, stored by rows."""
        return shared_load4(tiles, uint32(at + (4 * BK * r + STEP * s)))

    @device_function
    def read_k(tiles, at, r, q, s):
        """Four rows from row r on of k q, stored by columns."""
        return shared_load4(tiles, uint32(at + (4 * (q * EXTENT + r) + STEP * s)))

    return ACROSS, loader.size, (loader.place, loader.fetch, origin, read_row, read_k)


def build(config, variant):
    BM, BN, BK, TM, TN, LANES = config.BM, config.BN, config.BK, config.TM, config.TN, config.lanes_k
    THREADS, SLOTS = config.threads, config.slots
    STEPS = BK // (4 * LANES)  # per chunk, of four k per lane
    TILES_N = BN // TN  # thread tiles along a row of C
    A_ACROSS, B_START, a_functions = operand(variant.a, BM, THREADS, BK, LANES)
    B_ACROSS, B_SIZE, b_functions = operand(variant.b, BN, THREADS, BK, LANES)
    place_a, fetch_a, origin_a, a_row, a_k = a_functions
    place_b, fetch_b, origin_b, b_row, b_k = b_functions
    SLOT = B_START + B_SIZE  # bytes per slot
    SUMS = TM * TN  # per thread
    SUMS_PITCH = THREADS + 4  # floats from one of a thread's sums to the next: eight are in different banks
    RESULTS = ceil_div(BM * BN, THREADS)  # per thread, after the lanes' sums are added
    EVEN = BM * BN % THREADS == 0
    ENDS = SUMS > 1  # no copies follow the last chunk; with one sum per thread, testing takes longer than copying zeros
    NEWEST = SLOTS - 2  # groups of copies that may be in flight when a chunk is read
    WORDS = RESULTS * (2 if variant.compensated else 1)  # floats per thread of a part of a tile's sums
    RUN = min(4, WORDS)  # of these that travel by one instruction
    AT_ONCE = max(1, min(16, 64 // WORDS))  # parts that are read at once, limited by registers
    publish, read, withdraw = published_floats(RUN)
    store = element_store(variant.epilogue)
    COMPENSATED = variant.compensated
    DOUBLED = COMPENSATED and SUMS >= 32  # many more sums than fit the registers of min_blocks blocks
    BOUNDS = (THREADS,) if DOUBLED else config.launch_bounds
    TOTALS = (TM, TN) if COMPENSATED else (1, 1)
    clear, add_exactly, finish = compensated_sums(TM, TN)
    PRECISE = SUMS == 1  # a thread has few additions, and they hardly take longer in float64
    lane_type = float64 if PRECISE and not COMPENSATED else float32  # of a lane's sum
    NEXT = 16 if PRECISE and LANES % 16 == 0 else 4  # lanes that are added to each other first
    few = float64 if COMPENSATED else float32  # type of their sum
    wide = float64 if COMPENSATED or PRECISE else float32  # of all lanes' sum, and of blocks'
    PART = THREADS * WORDS  # floats per part of a tile's sums
    require(
        config,
        {
            "extents and lanes are powers of two": all(x & (x - 1) == 0 for x in (BM, BN, BK, TM, TN, LANES)),
            "TM and TN are 1, of one row or column, or % 4 == 0": all(
                x % 4 == 0 or x == y == 1 for x, y in ((TM, BM), (TN, BN))
            ),
            "lanes along k are 4 or more": LANES >= 4,
            "a chunk is four k per lane, or a multiple": BK % (4 * LANES) == 0,
            "two slots or more": SLOTS >= 2,
            "dynamic shared memory": config.dynamic,
            "pads hold the chunks' padding": config.dynamic_shared >= SLOTS * SLOT,
            "slots hold the sums": config.dynamic_shared >= 4 * SUMS * SUMS_PITCH,
        },
    )

    @device_function
    def multiply_one(acc, values, four):
        """Add the products of four k to the only sum, which is of float64 unless it is compensated."""
        acc[0, 0] += lane_type(
            (values[0, 0] * four[0] + values[0, 1] * four[1]) + (values[0, 2] * four[2] + values[0, 3] * four[3])
        )

    @device_function
    def multiply_column(acc, values, four, j):
        for r in range(TM):
            acc[r, j] += values[r, 0] * four[0]
        for r in range(TM):
            acc[r, j] += values[r, 1] * four[1]
        for r in range(TM):
            acc[r, j] += values[r, 2] * four[2]
        for r in range(TM):
            acc[r, j] += values[r, 3] * four[3]

    @device_function
    def multiply_k(tiles, b_at, values, columns, acc, q, s):
        """Add the products of one k; q is a constant."""
        for j in range(0, TN, 4):
            columns[j], columns[j + 1], columns[j + 2], columns[j + 3] = b_k(tiles, b_at, j, q, s)
        for r in range(TM):
            for j in range(TN):
                acc[r, j] += values[r, q] * columns[j]

    @device_function
    def multiply(tiles, a_at, b_at, values, columns, acc, s):
        """Add the products of four k per lane."""
        if A_ACROSS:
            for r in range(0, TM, 4):
                for q in range(4):
                    four = a_k(tiles, a_at, r, q, s)
                    values[r, q], values[r + 1, q], values[r + 2, q], values[r + 3, q] = four
        else:
            for r in range(TM):
                four = a_row(tiles, a_at, r, s)
                values[r, 0], values[r, 1], values[r, 2], values[r, 3] = four
        if B_ACROSS:
            multiply_k(tiles, b_at, values, columns, acc, 0, s)
            multiply_k(tiles, b_at, values, columns, acc, 1, s)
            multiply_k(tiles, b_at, values, columns, acc, 2, s)
            multiply_k(tiles, b_at, values, columns, acc, 3, s)
        elif SUMS == 1:
            multiply_one(acc, values, b_row(tiles, b_at, 0, s))
        else:
            for j in range(TN):
                multiply_column(acc, values, b_row(tiles, b_at, j, s), j)

    @device_function
    def of_four(tiles, at):
        """Add the sums of four lanes."""
        four = shared_load4(tiles, at)
        return (few(four[0]) + few(four[1])) + (few(four[2]) + few(four[3]))

    @device_function
    def of_sixteen(tiles, at):
        return (of_four(tiles, at) + of_four(tiles, uint32(at + 16))) + (
            of_four(tiles, uint32(at + 32)) + of_four(tiles, uint32(at + 48))
        )

    of_lanes = of_sixteen if NEXT == 16 else of_four

    @device_function
    def publish_results(partition, slot, tid, results, words):
        """Publish a block's part of a sum, or the sum of its group's parts."""
        at = int64(slot) * PART + int64(RUN * tid)
        if EVEN or tid < uint32(BM * BN):
            for i in range(RESULTS):
                words[i] = float32(results[i])
                if COMPENSATED:
                    rest = float32(results[i] - wide(words[i]))
                    words[i + RESULTS] = rest if abs(words[i]) < float32(inf) else float32(0)
            for w in range(0, WORDS, RUN):
                publish(partition, at + w * THREADS, words, w)

    @device_function
    def add_published(partition, slot, count, tid, results, arrived):
        """Add what is published in `count` slots, in their order, to this block's results.

        A thread reads what the thread of the same index in other blocks publishes, so no barrier is needed. Threads
        without a sum read nothing, and wait with their warp.
        """
        mine = EVEN or tid < uint32(BM * BN)
        at = int64(slot) * PART + int64(RUN * tid)
        left = int32(count)
        while left > int32(0):
            waiting = True
            while waiting:
                for p in range(AT_ONCE):
                    for w in range(0, WORDS, RUN):
                        read(partition, at + (p * PART + w * THREADS), mine and p < left, arrived, p, w)
                waiting = False
                for p in range(AT_ONCE):
                    for w in range(WORDS):
                        waiting = waiting or missing(arrived[p, w])
                if THREADS % WARP == 0:  # whole warps, except in configurations for the simulator
                    waiting = in_step(waiting)
            for p in range(AT_ONCE):
                for i in range(RESULTS):
                    if COMPENSATED:
                        results[i] += wide(arrived[p, i]) + wide(arrived[p, i + RESULTS])
                    else:
                        results[i] += arrived[p, i]
                if mine and p < left:
                    for w in range(0, WORDS, RUN):
                        withdraw(partition, at + (p * PART + w * THREADS))
            at += AT_ONCE * PART
            left = int32(left - AT_ONCE)

    @cuda.jit(**hardware_only(launch_bounds=BOUNDS))
    def thin(alpha, a, b, beta, c, partition, vectors):
        tiles = cuda.shared.array(0, float32, alignment=16)
        start = shared_address(tiles)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        group, lane = tid // LANES, tid % LANES  # a group of lanes computes a thread tile
        k = int32(a.shape[1])
        k_tiles = uint32(partition.k_tiles)
        a_from = pinned(uint32(start + origin_a(uint32(group // TILES_N * TM), lane)))
        b_from = pinned(uint32(start + B_START + origin_b(uint32(group % TILES_N * TN), lane)))
        row_a, k_a = place_a(tid)
        row_b, k_b = place_b(tid)

        values = cuda.local.array((TM, 4), float32)
        columns = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), lane_type)
        total = cuda.local.array(TOTALS, float32)  # compensated sums, but for what acc still has
        results = cuda.local.array(RESULTS, wide)
        words = cuda.local.array(WORDS, float32)  # of a part that is published
        arrived = cuda.local.array((AT_ONCE, WORDS), float32)  # parts of a sum from other blocks

        at, end = piece(partition, block), piece(partition, uint32(block + 1))
        whole, own = uint32(partition.whole), block
        while at < end or own < whole:
            if at < end:  # shared tiles first, the last one before others: a later block may wait for its part
                index = uint32(uint32(end - 1) // k_tiles)
                line = uint32(index * k_tiles)  # where the tile begins on the line
                first, last = uint32(max(at, line) - line), uint32(end - line)
                end = uint32(line + first)
                tile = uint32(whole + index)
            else:
                index, first, last, tile = uint32(0), uint32(0), k_tiles, own
                own = uint32(own + uint32(cuda.gridDim.x))
            x, y, z = a, transposed(b), c  # y is (n, k)
            if uint32(partition.matrices) > uint32(1):
                member = member_of(partition, tile)
                tile = uint32(tile - uint32(member * uint32(uint32(partition.rows) * uint32(partition.cols))))
                i0, i1, i2 = batch_place(partition, member)
                x = shifted(a, i0 * partition.a_outer + i1 * partition.a_middle + i2 * partition.a_inner)
                y = shifted(y, i0 * partition.b_outer + i1 * partition.b_middle + i2 * partition.b_inner)
                z = shifted(c, i0 * partition.c_outer + i1 * partition.c_middle + i2 * partition.c_inner)
            down, across = tile, uint32(0)
            if uint32(partition.cols) > uint32(1):  # divisions take their time before the first copy
                down, across = tile_place(partition, tile)
            block_row, block_col = int64(down) * BM, int64(across) * BN

            for r in range(TM):
                for j in range(TN):
                    acc[r, j] = float32(0)
            if COMPENSATED:
                clear(total)
            k0 = int64(first) * BK
            rest = int32(min(int64(last) * BK, int64(k)) - k0)  # number of k left from the next chunk to copy on
            left = uint32(last - first)  # chunks
            rows = int32(min(x.shape[0] - block_row, int64(BM)))
            cols = int32(min(y.shape[0] - block_col, int64(BN)))
            a_address = address_of(x, block_row + int64(row_a), k0 + int64(k_a))
            b_address = address_of(y, block_col + int64(row_b), k0 + int64(k_b))

            cuda.syncthreads()  # all threads have read the last tile's sums before these copies overwrite them
            slot = uint32(0)
            ahead = uint32(0)
            while ahead < min(left, uint32(SLOTS - 1)):
                fetch_a(tiles, tid, uint32(start + slot), x, a_address, row_a, k_a, rows, rest)
                fetch_b(tiles, tid, uint32(start + slot + B_START), y, b_address, row_b, k_b, cols, rest)
                commit_group()
                a_address += BK * col_step(x)
                b_address += BK * col_step(y)
                rest = int32(rest - BK)
                slot = uint32(slot + SLOT)
                ahead = uint32(ahead + uint32(1))
            while ahead < uint32(SLOTS - 1):  # `wait_group` counts empty groups, too
                commit_group()
                ahead = uint32(ahead + uint32(1))
            slot = uint32((SLOTS - 1) * SLOT)
            other = uint32(0)  # the slot being read; chunks are copied to `slot`, which was read before

            while left > uint32(0):
                left = uint32(left - 1)
                wait_group(NEWEST)
                # the copies of all threads have landed before any reads this chunk; and all have read the chunk before
                # it before copies overwrite it
                cuda.syncthreads()
                if not ENDS or left >= uint32(SLOTS - 1):
                    fetch_a(tiles, tid, uint32(start + slot), x, a_address, row_a, k_a, rows, rest)
                    fetch_b(tiles, tid, uint32(start + slot + B_START), y, b_address, row_b, k_b, cols, rest)
                commit_group()
                a_address += BK * col_step(x)
                b_address += BK * col_step(y)
                rest = int32(rest - BK)
                for s in range(STEPS):
                    multiply(tiles, uint32(a_from + other), uint32(b_from + other), values, columns, acc, s)
                    if COMPENSATED:
                        add_exactly(total, acc)
                slot = other
                other = uint32(0) if other == uint32((SLOTS - 1) * SLOT) else uint32(other + SLOT)

            wait_group(0)
            cuda.syncthreads()  # no copy is in flight and no chunk is being read when the sums overwrite them
            if COMPENSATED:
                finish(total, acc)
            for r in range(TM):
                for j in range(TN):
                    shared_store1(tiles, uint32(start + 4 * (tid + (r * TN + j) * SUMS_PITCH)), float32(acc[r, j]))
            cuda.syncthreads()  # all threads have stored their sums before any adds them
            for i in range(RESULTS):
                e = uint32(tid + i * THREADS)
                results[i] = wide(0)
                if EVEN or e < uint32(BM * BN):
                    of_lane = uint32(start + 4 * (e % SUMS * SUMS_PITCH + e // SUMS * LANES))
                    for part in range(0, LANES, NEXT):
                        results[i] += of_lanes(tiles, uint32(of_lane + 4 * part))

            final = True
            if uint32(last - first) < k_tiles:
                lead = owner(partition, uint32(index * k_tiles))
                parts = uint32(owner(partition, uint32(uint32(uint32(index + 1) * k_tiles) - 1)) - lead + 1)
                most = parts_in_group(parts)
                mine = uint32(block - lead)
                before = uint32(mine % most)  # parts of its group that precede this block's
                final = uint32(mine + 1) == parts
                sums, earlier = uint32(uint32(cuda.gridDim.x) + lead), uint32(mine // most)  # of other groups
                place, begin, count, turns = block, uint32(block - before), before, int32(0)
                if final or uint32(before + 1) == most:
                    place, turns = uint32(sums + earlier), int32(2) if final and mine >= most else int32(1)
                while turns > int32(0):  # its group's other parts, then the other groups' sums
                    add_published(partition, begin, count, tid, results, arrived)
                    begin, count, turns = sums, earlier, int32(turns - 1)
                if not final:
                    publish_results(partition, place, tid, results, words)
            if final:
                for i in range(RESULTS):
                    e = uint32(tid + i * THREADS)
                    if EVEN or e < uint32(BM * BN):
                        of_group, of_sum = e // SUMS, e % SUMS
                        row = block_row + int64(of_group // TILES_N * TM + of_sum // TN)
                        col = block_col + int64(of_group % TILES_N * TN + of_sum % TN)
                        store(z, row, col, alpha, float32(results[i]), beta, vectors)

    return thin
