"""small_matrices: batches of matrices of a few rows and columns, several of them per block.

Bottleneck before: short_sums and thin give each block a tile of one matrix. Most of a tile of 32x32 lies outside of an
    8x8 matrix, and a multiprocessor starts a block every 270 ns, whatever it computes.
Idea: the thread tiles of all matrices form one line, of which each block takes the next 256. There is no shared memory:
    a thread reads its rows of A and columns of B itself, four terms at a time, and waits for no other thread. Most of
    what it reads its neighbours read, too, so it comes from the L1 cache. If few threads would have long sums, 8 or 32
    lanes of a warp share a tile, and a block has 32 or 8: each lane reads other terms, and their sums are added by
    shuffles. In "bf16x6", sums are compensated after every four terms (see
    `device.compensated`), and those of lanes are added in float64. In "bf16x9", all are float64, which keeps all bits
    of the products, as nine products of parts do.
Traffic: A, B and C once each, if the L1 cache keeps what a block reads as long as its threads read it.
Registers and shared memory: TM*TN accumulators, twice as many in "bf16x6" and "bf16x9", and four terms of TM rows and
    TN columns; no shared memory.
Measured: products of 3x3, 4x4, 6x6, 8x8, 12x12, 16x16 and 24x24 matrices, 14,467 to 65,536 of them, on an NVIDIA
    H200, by tiled_sgemm: 33.2, 27.9, 16.7, 8.6, 4.18, 2.33 and 1.12 times as fast as cuBLAS SGEMM.
Limits: each thread loads what it multiplies, four terms at a time or, if they are not aligned, one. From about 32
    rows, columns and terms on, tiles in shared memory need fewer loads, and are faster. If k is the contiguous axis of
    B, threads that have a tile each read different lines of the L1 cache, which takes longer from 16 terms on. Lanes
    that share a tile read different lines if k is not contiguous. "auto" considers this stage for batches, in other
    precisions than "ieee" on 9.0 alone.
"""

from numba import cuda, float32, float64, int64, uint32

from ...device.address import address_of, col_step, global_load1, global_load4, row_step, transposed
from ...device.compensated import compensated_sums
from ...device.matrix import shifted
from ...device.partition import batch_place
from ...device.store import element_store, store_axpby4
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from .tile_config import require

TERMS = 4  # that are read at a time


def build(config, variant):
    TM, TN, TILES, LANES = config.TM, config.TN, config.tiles, config.lanes_k
    A_ALONG, B_ALONG, B_ACROSS = variant.a == "along4", variant.b == "along4", variant.b == "across4"
    VECTORS, COMPENSATED = variant.c_aligned, variant.compensated
    SUM = float64 if variant.in_float64 else float32
    TOTALS = (TM, TN) if COMPENSATED else (1, 1)
    clear, add_exactly, finish = compensated_sums(TM, TN)
    # Each lane reads four adjacent terms as a vector; or lanes read adjacent floats, four times.
    APART = 1 if LANES == 1 or (A_ALONG and B_ALONG) else LANES  # terms from one of a lane's four to the next
    FIRST = TERMS if APART == 1 else 1  # terms from a lane's first to that of the next lane
    CHUNK = TERMS * LANES  # terms of all lanes
    STEPS = LANES.bit_length() - 1
    wide = float64 if COMPENSATED else SUM  # type of the sum of all lanes
    require(
        config,
        {
            "a thread has a tile, or several lanes have": (config.BM, config.BN) == (TM, TN),
            f"BK == {TERMS} * lanes_k": config.BK == CHUNK,
            "several tiles per block": TILES > 1,
            "lanes of a whole warp": LANES == 1 or (WARP % LANES == 0 and config.threads % WARP == 0),
            "vectors along k alone if lanes have a tile": LANES == 1 or not (VECTORS or B_ACROSS or A_ALONG != B_ALONG),
            "TN == 4 for vectors": TN == 4 or not (B_ACROSS or VECTORS),
            "no epilogue of vectors": variant.epilogue is None or not VECTORS,
            "compensated or float64 sums": not (COMPENSATED and variant.in_float64),
        },
    )
    store1 = element_store(variant.epilogue)

    @device_function
    def four(x, at, along):
        """Read four terms of a row of an (mn, k) matrix, which are `APART`."""
        if along:
            return global_load4(x, at)
        step = APART * col_step(x)
        return (
            global_load1(x, at)[0],
            global_load1(x, at + step)[0],
            global_load1(x, at + 2 * step)[0],
            global_load1(x, at + 3 * step)[0],
        )

    @device_function
    def of_lanes(value):
        """Add the sums of a tile's lanes."""
        for step in range(STEPS):
            value += cuda.shfl_xor_sync(uint32(0xFFFFFFFF), value, 1 << step)
        return value

    @device_function
    def read_b(y, at, columns, frag):
        """Read four terms of a thread's columns."""
        if B_ACROSS:
            for p in range(TERMS):
                values = global_load4(y, at + p * col_step(y))
                for j in range(TN):
                    frag[p, j] = values[j]
        else:
            for j in range(TN):
                values = four(y, at + columns[j], B_ALONG)
                for p in range(TERMS):
                    frag[p, j] = values[p]

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def small_matrices(alpha, a, b, beta, c, partition, vectors):
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(LANES))
        index = uint32(uint32(cuda.blockIdx.x) * uint32(TILES) + uint32(cuda.threadIdx.x) // uint32(LANES))
        rows, cols = uint32(partition.rows), uint32(partition.cols)  # of a matrix, in thread tiles
        of_matrix = uint32(rows * cols)
        inside = index < uint32(of_matrix * uint32(partition.matrices))
        if LANES > 1 and not inside:
            index = uint32(0)  # computed, but not stored: all lanes of a warp exchange sums
        if LANES > 1 or inside:
            x, y, z = a, transposed(b), c  # x and y are (mn, k)
            if uint32(partition.matrices) > uint32(1):
                member = uint32(index // of_matrix)
                index = uint32(index - uint32(member * of_matrix))
                last = int64(member)
                a_step, b_step, c_step = int64(0), int64(0), int64(0)
                if uint32(partition.inner) < uint32(partition.matrices):  # one dimension takes no divisions
                    i0, i1, last = batch_place(partition, member)
                    a_step = i0 * partition.a_outer + i1 * partition.a_middle
                    b_step = i0 * partition.b_outer + i1 * partition.b_middle
                    c_step = i0 * partition.c_outer + i1 * partition.c_middle
                x = shifted(a, a_step + last * partition.a_inner)
                y = shifted(y, b_step + last * partition.b_inner)
                z = shifted(c, c_step + last * partition.c_inner)
            down = uint32(index // cols)
            row, col = int64(down) * TM, int64(uint32(index - uint32(down * cols))) * TN

            a_frag = cuda.local.array((TM, TERMS), float32)
            b_frag = cuda.local.array((TERMS, TN), float32)
            acc = cuda.local.array((TM, TN), SUM)
            total = cuda.local.array(TOTALS, float32)  # compensated sums, but for what acc still has
            # Bytes from the first row, and from the first column, to each; to the last one from those beyond it.
            a_rows = cuda.local.array(TM, int64)
            b_columns = cuda.local.array(TN, int64)
            for i in range(TM):
                a_rows[i] = min(int64(i), x.shape[0] - 1 - row) * row_step(x) if i > 0 else int64(0)
                for j in range(TN):
                    acc[i, j] = SUM(0)
            for j in range(TN):
                b_columns[j] = min(int64(j), y.shape[0] - 1 - col) * row_step(y) if j > 0 else int64(0)
            if COMPENSATED:
                clear(total)

            a_at, b_at, left = address_of(x, row, 0), address_of(y, col, 0), uint32(x.shape[1])
            if LANES > 1:
                first = uint32(lane * uint32(FIRST))
                a_at, b_at = a_at + int64(first) * col_step(x), b_at + int64(first) * col_step(y)
                left = uint32(left - min(left, first))
            while left >= uint32((TERMS - 1) * APART + 1):
                for i in range(TM):
                    values = four(x, a_at + a_rows[i], A_ALONG)
                    for p in range(TERMS):
                        a_frag[i, p] = values[p]
                read_b(y, b_at, b_columns, b_frag)
                for p in range(TERMS):
                    for i in range(TM):
                        for j in range(TN):
                            acc[i, j] += SUM(a_frag[i, p]) * SUM(b_frag[p, j])
                if COMPENSATED:
                    add_exactly(total, acc)
                a_at, b_at = a_at + CHUNK * col_step(x), b_at + CHUNK * col_step(y)
                step = uint32(CHUNK)
                if LANES > 1:  # other lanes may have the last terms
                    step = min(left, step)
                left = uint32(left - step)
            while left > uint32(0):
                for j in range(TN):
                    b_frag[0, j] = global_load1(y, b_at + b_columns[j])[0]
                for i in range(TM):
                    value = global_load1(x, a_at + a_rows[i])[0]
                    for j in range(TN):
                        acc[i, j] += SUM(value) * SUM(b_frag[0, j])
                a_at, b_at = a_at + APART * col_step(x), b_at + APART * col_step(y)
                step = uint32(APART)
                if LANES > 1:
                    step = min(left, step)
                left = uint32(left - step)

            if COMPENSATED and LANES == 1:
                finish(total, acc)
            for i in range(TM):
                if LANES > 1:
                    for j in range(TN):
                        value = of_lanes(wide(acc[i, j]) + (wide(total[i, j]) if COMPENSATED else wide(0)))
                        if inside and lane == uint32((i * TN + j) % LANES):
                            store1(z, row + i, col + j, alpha, float32(value), beta, vectors)
                elif VECTORS:
                    s0, s1, s2, s3 = float32(acc[i, 0]), float32(acc[i, 1]), float32(acc[i, 2]), float32(acc[i, 3])
                    store_axpby4(z, row + i, col, alpha, (s0, s1, s2, s3), beta)
                else:
                    for j in range(TN):
                        store1(z, row + i, col + j, alpha, float32(acc[i, j]), beta, vectors)

    return small_matrices
