"""thin: a C with few columns, at the bandwidth of memory.

Bottleneck before: tiles of C are square or nearly so. If C has one column, or sixteen, most of a tile is outside C.
    Also, stream_k transposes A's rows through registers, which keeps too few bytes in flight.
Idea: such a product reads A once and computes little, so only the number of bytes in flight counts. The lanes of a warp
    run along k, the contiguous dimension of A. A thread copies four k of each of its rows to shared memory, reads them
    back itself, and adds to a whole row of C. Shared memory is just a long queue before the registers, and A needs no
    barrier. The block shares its chunk of B. The lanes' sums are added once per tile, through shared memory. Tiles are
    shared between blocks as in stream_k.
Traffic: A once; BN/BM of A's bytes for B, from the L2 cache.
Registers and shared memory: TM*BN accumulators and 4*TM floats of A; slots*(BM + BN)*BK floats (75 KB at 128x16x32).
Measured: 16384x16384 times 1, 4 and 16 columns on an NVIDIA H200, by tiled_sgemm, A not in the cache: 1.65, 1.62 and
    1.46 of a copy's bandwidth, 1.05, 2.11 and 1.90 of cuBLAS SGEMM.
Limits: within a block, the start and end of a tile do not overlap with the next tile; the other blocks of the
    multiprocessor hide that latency. If A is not 16-byte aligned, or not contiguous along k, it is copied float by
    float.
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
    shared_store1,
    transposed,
)
from ...device.async_copy import commit_group, wait_group
from ...device.matrix import shifted
from ...device.partition import (
    arrive,
    batch_place,
    load_partial,
    member_of,
    owner,
    part_slot,
    piece,
    reset,
    store_partial,
    tile_place,
)
from ...device.store import element_store
from ...device.units import ceil_div
from ...simulator.switch import device_function, hardware_only
from .stage import require

NEVER = 2**31 - 1  # beyond any k of a chunk


def build(config, variant):
    BM, BN, BK, TM, LANES = config.BM, config.BN, config.BK, config.TM, config.lanes_k
    THREADS, SLOTS = config.threads, config.slots
    B_PITCH = BK + (4 if BN > 1 else 0)  # floats between columns: eight columns of one k are in eight banks
    B_START = 4 * BM * BK  # bytes from the start of a slot to its chunk of B
    SLOT = B_START + 4 * BN * B_PITCH  # bytes per slot
    SUMS = TM * BN  # per thread
    SUMS_PITCH = THREADS + 4  # floats between a thread's sums: eight of them are in different banks
    RESULTS = ceil_div(BM * BN, THREADS)  # per thread, after the lanes' sums are added
    B_COPIES = ceil_div(BN * BK, THREADS)  # per thread and chunk
    VECTORS = variant.a == "along4"  # A is copied four floats of a row at a time
    K_FIRST = BN == 1 or variant.b.startswith("along")  # adjacent threads copy adjacent floats of a column of B
    COLS = min(BN, 8)  # columns of B that adjacent threads copy otherwise
    NEWEST = SLOTS - 2  # groups of copies that may be in flight when a chunk is read
    AT_ONCE = max(1, 32 // RESULTS)  # parts of a sum that are read at once, limited by registers
    store = element_store(variant.epilogue)
    require(
        config,
        {
            "a thread has whole rows: TN == BN": config.TN == BN,
            "BN is a power of two": BN & (BN - 1) == 0,
            "lanes along k are 4, 8, 16 or 32": LANES in (4, 8, 16, 32),
            "a chunk is four k per lane": BK == 4 * LANES,
            "two slots or more": SLOTS >= 2,
            "dynamic shared memory": config.dynamic,
            "pad_b holds B's padding": config.dynamic_shared >= SLOTS * SLOT,
            "slots hold the sums": config.dynamic_shared >= 4 * SUMS * SUMS_PITCH,
        },
    )

    @device_function
    def b_place(f):
        """Column and k, within a chunk, of float f in the order in which threads copy the floats."""
        if K_FIRST:
            return uint32(f // BK), uint32(f % BK)
        rest = uint32(f // (4 * COLS))
        return uint32(rest // (BK // 4) * COLS + f % COLS), uint32(rest % (BK // 4) * 4 + f // COLS % 4)

    @device_function
    def turned(k):
        """Position of a k of a chunk in shared memory: a lane's four k are adjacent, even if they are not in A."""
        return k if VECTORS else uint32(k % LANES * 4 + k // LANES)

    @device_function
    def fetch(tiles, tid, a_to, b_to, slot, x, y, a_address, b_addresses, rows, first_k, b_k, rest):
        """Start copying a chunk of which `rest` k exist; copy only zeros if `rest` is not positive."""
        for i in range(B_COPIES):
            if BN * BK % THREADS == 0 or tid + i * THREADS < uint32(BN * BK):
                copy4_or_zero(tiles, uint32(b_to[i] + slot), y, b_addresses[i], b_k[i] < rest)
        at = a_address
        if VECTORS:
            here = rows if first_k < rest else uint32(0)
            for r in range(TM):
                copy16_or_zero(tiles, uint32(a_to + slot + 16 * THREADS * r), x, at, uint32(r) < here)
                at += row_step(x)
        else:
            for r in range(TM):
                for q in range(4):
                    inside = uint32(r) < rows and int32(first_k + q * LANES) < rest
                    to = uint32(a_to + slot + (16 * THREADS * r + 4 * q))
                    copy4_or_zero(tiles, to, x, at + q * LANES * col_step(x), inside)
                at += row_step(x)

    @device_function
    def multiply(tiles, a_at, b_at, values, acc):
        """Add the products of a chunk; four k of a column of B are read once for all rows."""
        for r in range(TM):
            four = shared_load4(tiles, uint32(a_at + 16 * THREADS * r))
            values[r, 0], values[r, 1], values[r, 2], values[r, 3] = four
        for j in range(BN):
            four = shared_load4(tiles, uint32(b_at + 4 * B_PITCH * j))
            for r in range(TM):
                acc[r, j] += values[r, 0] * four[0]
            for r in range(TM):
                acc[r, j] += values[r, 1] * four[1]
            for r in range(TM):
                acc[r, j] += values[r, 2] * four[2]
            for r in range(TM):
                acc[r, j] += values[r, 3] * four[3]

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def thin(alpha, a, b, beta, c, partition, vectors):
        tiles = cuda.shared.array(0, float32, alignment=16)
        start = shared_address(tiles)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        group, lane = tid // LANES, tid % LANES  # a group of lanes computes TM rows
        k = int32(a.shape[1])
        k_tiles = uint32(partition.k_tiles)
        a_to, b_from = pinned(uint32(start + 16 * tid)), pinned(uint32(start + B_START + 16 * lane))
        first_k = int32(lane * 4 if VECTORS else lane)  # this thread's, within a chunk

        b_addresses = cuda.local.array(B_COPIES, int64)
        b_to = cuda.local.array(B_COPIES, uint32)
        b_k = cuda.local.array(B_COPIES, int32)
        values = cuda.local.array((TM, 4), float32)
        acc = cuda.local.array((TM, BN), float32)
        results = cuda.local.array(RESULTS, float32)
        arrived = cuda.local.array((AT_ONCE, RESULTS), float32)  # parts of a sum from other blocks

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
            x, y, z = a, transposed(b), c  # y is (n, k)
            if uint32(partition.matrices) > uint32(1):
                member = member_of(partition, tile)
                tile = uint32(tile - uint32(member * uint32(uint32(partition.rows) * uint32(partition.cols))))
                i0, i1, i2 = batch_place(partition, member)
                x = shifted(a, i0 * partition.a_outer + i1 * partition.a_middle + i2 * partition.a_inner)
                y = shifted(y, i0 * partition.b_outer + i1 * partition.b_middle + i2 * partition.b_inner)
                z = shifted(c, i0 * partition.c_outer + i1 * partition.c_middle + i2 * partition.c_inner)
            down, across = tile_place(partition, tile)
            block_row, block_col = int64(down) * BM, int64(across) * BN

            for r in range(TM):
                for j in range(BN):
                    acc[r, j] = float32(0)
            k0 = int64(first) * BK
            rest = int32(min(int64(last) * BK, int64(k)) - k0)  # number of k left from the next chunk to copy on
            left = uint32(last - first)  # chunks
            first_row = block_row + int64(group) * TM
            rows = pinned(uint32(min(max(x.shape[0] - first_row, int64(0)), int64(TM))))
            a_address = address_of(x, first_row, k0 + int64(first_k))
            for i in range(B_COPIES):
                f = uint32(tid + i * THREADS)
                col, place = b_place(f)
                b_to[i] = uint32(start + B_START + 4 * (col * B_PITCH + turned(place)))
                b_addresses[i] = address_of(y, block_col + int64(col), k0 + int64(place))
                b_k[i] = int32(place) if block_col + int64(col) < y.shape[0] else int32(NEVER)

            cuda.syncthreads()  # all threads have read the last tile's sums before these copies overwrite them
            slot = uint32(0)
            for _ in range(SLOTS - 1):
                fetch(tiles, tid, a_to, b_to, slot, x, y, a_address, b_addresses, rows, first_k, b_k, rest)
                commit_group()
                a_address += BK * col_step(x)
                for i in range(B_COPIES):
                    b_addresses[i] += BK * col_step(y)
                rest = int32(rest - BK)
                slot = uint32(slot + SLOT)
            other = uint32(0)  # the slot being read; chunks are copied to `slot`, which was read before

            while left > uint32(0):
                left = uint32(left - 1)
                wait_group(NEWEST)
                # the copies of all threads have landed before any reads this chunk of B; and all have read the chunk
                # before it before copies overwrite it
                cuda.syncthreads()
                fetch(tiles, tid, a_to, b_to, slot, x, y, a_address, b_addresses, rows, first_k, b_k, rest)
                commit_group()
                a_address += BK * col_step(x)
                for i in range(B_COPIES):
                    b_addresses[i] += BK * col_step(y)
                rest = int32(rest - BK)
                multiply(tiles, uint32(a_to + other), uint32(b_from + other), values, acc)
                slot = other
                other = uint32(0) if other == uint32((SLOTS - 1) * SLOT) else uint32(other + SLOT)

            wait_group(0)
            cuda.syncthreads()  # no copy is in flight and no chunk is being read when the sums overwrite them
            for r in range(TM):
                for j in range(BN):
                    shared_store1(tiles, uint32(start + 4 * (tid + (r * BN + j) * SUMS_PITCH)), acc[r, j])
            cuda.syncthreads()  # all threads have stored their sums before any adds them
            for i in range(RESULTS):
                e = uint32(tid + i * THREADS)
                results[i] = float32(0)
                if BM * BN % THREADS == 0 or e < uint32(BM * BN):
                    of_lane = uint32(start + 4 * (e % SUMS * SUMS_PITCH + e // SUMS * LANES))
                    for part in range(0, LANES, 4):
                        four = shared_load4(tiles, uint32(of_lane + 4 * part))
                        results[i] += (four[0] + four[1]) + (four[2] + four[3])

            complete = True
            if uint32(last - first) < k_tiles:
                lead = owner(partition, uint32(index * k_tiles))
                parts = uint32(owner(partition, uint32(uint32(uint32(index + 1) * k_tiles) - 1)) - lead + 1)
                mine = part_slot(partition, index, lead, uint32(block - lead)) * (BM * BN) + int64(tid)
                for i in range(RESULTS):
                    if BM * BN % THREADS == 0 or tid + i * THREADS < uint32(BM * BN):
                        store_partial(partition, mine + i * THREADS, results[i])
                cuda.syncthreads()  # all threads have written this part before the block is counted
                final = int32(0)
                if tid == uint32(0) and arrive(partition, int64(index)) == int64(parts) - 1:
                    final = int32(1)
                complete = cuda.syncthreads_or(final) != 0  # and all threads know the count
                if complete:
                    if tid == uint32(0):
                        reset(partition, int64(index))
                    for i in range(RESULTS):
                        results[i] = float32(0)
                    q = uint32(0)
                    while q < parts:
                        for p in range(AT_ONCE):
                            part = part_slot(partition, index, lead, min(uint32(q + p), uint32(parts - 1))) * (BM * BN)
                            for i in range(RESULTS):
                                e = min(uint32(tid + i * THREADS), uint32(BM * BN - 1))
                                arrived[p, i] = load_partial(partition, part + int64(e))
                        for p in range(AT_ONCE):
                            for i in range(RESULTS):
                                if uint32(q + p) < parts:
                                    results[i] += arrived[p, i]
                        q = uint32(q + AT_ONCE)
            if complete:
                for i in range(RESULTS):
                    e = uint32(tid + i * THREADS)
                    if BM * BN % THREADS == 0 or e < uint32(BM * BN):
                        row, col = block_row + int64(e // BN), block_col + int64(e % BN)
                        store(z, row, col, alpha, results[i], beta, vectors)

    return thin
