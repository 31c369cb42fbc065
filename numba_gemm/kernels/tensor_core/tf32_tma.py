"""tf32_tma: operands are multiplied as they are in memory, or one of them is.

Bottleneck before: rearranging the operands takes much of the time of a product of one part per element.
Idea: tensor maps. A copy fetches a box of the matrix itself, rounds it to TF32, and places its rows where the matrix
    instruction expects them. In shared memory, that instruction needs operands that are contiguous along k. It can also
    take the rows of its first operand from registers, which threads load in any order, so only one of the operands must
    be contiguous along k. If none is, or a map can describe only one, the other is decomposed before. Blocks keep in
    step, as those of `persistent`. If rows begin within sectors of memory, copies are limited by their requests to the
    L2 cache: if V's do, two blocks form a cluster, and each copies half of V's tile for both.
Traffic: as before, without the reads and writes of the decomposition, or with those of the smaller operand.
Registers and shared memory: a sum, and two slots' rows of the first operand, 32 registers: while products read one set,
    the other is loaded. As many slots as fit.
Measured: 344.7 TFLOP/s of tf32 at 4096x4096x4096 on an NVIDIA H200, 1.00 of cuBLAS TF32.
Limits: the power limit; a tile is stored while its warpgroup's tensor cores idle. An operand that tensor maps cannot
    describe, or one of two that are contiguous across k, must be rearranged first.
"""

from functools import lru_cache

from numba import cuda, float32, int32, int64, uint32

from ...device import bulk_copy, cluster, mbarrier, registers, tensor_map, wgmma
from ...device.address import (
    address_of,
    col_step,
    global_store,
    row_step,
    shared_load1,
    shared_load2,
    transposed,
)
from ...device.grid_order import wait_for_last
from ...device.matrix import shifted
from ...device.store import element_store
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from ..stage import require
from .epilogue import for_each_sum, place
from .pacing import pace
from .pipeline import STEP, barriers_to_tell, first_slot, give_back, give_back_to_all, last_arrivals, own_share, ring
from .precision import TENSOR_PRECISIONS
from .stage import BARRIER_BYTES, GROUP_ROWS, LEFT, ROW_BYTES, ROW_WORDS, WARPGROUP
from .tma_stage import PANEL
from .warp_store import add_pair, warp_store

STEPS = 4  # k-steps per slot, 8 k each
HELD = 4 * STEPS  # floats of a slot's rows that each thread holds


@lru_cache(maxsize=64)
def row_loads(along):
    """Make two device functions that load a thread's two rows of U, ``start(group, warp, lane)`` and ``load(...)``.

    `start` returns the upper row's index in the block and the byte offset of its floats in a slot. ``load(held, memory,
    at, first)`` loads both rows from the slot at `at` in the matrix instruction's order: for each 8 k, float l % 4 of
    the upper and lower row, then the floats four further on.
    """

    @device_function
    def start_along(group, warp, lane):
        row = uint32(group * uint32(GROUP_ROWS) + warp * uint32(16) + lane // uint32(4))
        return row, uint32(row * uint32(ROW_BYTES) + (row % uint32(8) << uint32(4)) + lane % uint32(4) * uint32(4))

    @device_function
    def load_along(held, memory, at, first):
        for chunk in range(2 * STEPS):
            upper = uint32(uint32(at + first) ^ uint32(chunk << 4))
            held[2 * chunk] = shared_load1(memory, upper)
            held[2 * chunk + 1] = shared_load1(memory, uint32(upper + uint32(8 * ROW_BYTES)))

    @device_function
    def start_across(group, warp, lane):
        # One load reads two adjacent rows. The assignment of rows to lanes is free; this one avoids bank conflicts
        # within a half warp.
        pair, t = uint32(lane // uint32(4)), uint32(lane % uint32(4))
        chunk = uint32(pair // uint32(2) % uint32(2) * uint32(4) + warp % uint32(2) * uint32(2) + pair // uint32(4))
        panel = uint32(group * uint32(GROUP_ROWS // PANEL) + warp // uint32(2))
        row = uint32(panel * uint32(PANEL) + chunk * uint32(4) + pair % uint32(2) * uint32(2))
        start = uint32(panel * uint32(PANEL * ROW_BYTES) + t * uint32(ROW_BYTES))
        return row, uint32(start + ((chunk ^ t) << uint32(4)) + pair % uint32(2) * uint32(8))

    @device_function
    def load_across(held, memory, at, first):
        upper = uint32(at + first)
        lower = uint32((upper ^ uint32(4 << 4)) + uint32(4 * ROW_BYTES))
        for step in range(STEPS):
            two = shared_load2(memory, uint32(upper + uint32(8 * ROW_BYTES * step)))
            held[4 * step], held[4 * step + 1] = two[0], two[1]
            two = shared_load2(memory, uint32(lower + uint32(8 * ROW_BYTES * step)))
            held[4 * step + 2], held[4 * step + 3] = two[0], two[1]

    return (start_along, load_along) if along else (start_across, load_across)


def sums_store(config, variant):
    """Make a device function ``(c, row, col, alpha, acc, beta, vectors, inside)`` that writes a thread's sums.

    `c` is C or its transpose, with the rows and columns of ``U @ V.T``. In each group of 8 columns, a thread has two
    adjacent columns of two rows; `row` and `col` are the first of them. `inside` means that the whole block tile is in
    `c`.
    """
    COLUMN_GROUPS, DOWN, SWAPPED = config.BN // 8, 8 if variant.along else 1, variant.swapped
    PLAIN = variant.epilogue is None
    store1 = element_store(variant.epilogue)
    BELOW = (1, 2, 4) if variant.along else (2, 16, 4)
    store_plain = warp_store(DOWN, BELOW, COLUMN_GROUPS, 1, True, variant.along)

    @device_function
    def put(found, c, row, col, j, q, alpha, value, beta, vectors):
        row, col = row + q // 2 * DOWN, col + 8 * j + q % 2
        if SWAPPED:
            store1(transposed(c), col, row, alpha, value, beta, vectors)
        else:
            store1(c, row, col, alpha, value, beta, vectors)
        return found

    write_all = for_each_sum(COLUMN_GROUPS, put)

    @device_function
    def write_apart(c, row, col, alpha, acc, beta, vectors):
        # With an epilogue, even short loops may stay rolled. Arrays that are indexed at run time are in local memory,
        # and the accumulators must not be: hence the copy.
        apart = cuda.local.array((COLUMN_GROUPS, 4), float32)
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                apart[j, q] = acc[j, q]
        write_all(c, row, col, alpha, apart, beta, vectors)

    @device_function
    def write_columns(c, row, col, alpha, acc, beta):
        """Write pairs of rows, whose elements are neighbours in memory."""
        start, right = address_of(c, row, col), col_step(c)
        over = 8 * right
        if beta != float32(0):  # all of C is read before any of it is written, so that the reads overlap
            for j in range(COLUMN_GROUPS):
                add_pair(c, start + j * over, alpha, acc, beta, j, 0, 2)
                add_pair(c, start + j * over + right, alpha, acc, beta, j, 1, 3)
            alpha = float32(1)
        for j in range(COLUMN_GROUPS):
            global_store(c, start + j * over, (alpha * acc[j, 0], alpha * acc[j, 2]))
            global_store(c, start + j * over + right, (alpha * acc[j, 1], alpha * acc[j, 3]))

    @device_function
    def store(c, row, col, alpha, acc, beta, vectors, inside):
        in_columns = DOWN == 1 and inside and row_step(c) == 4 and (address_of(c, row, col) | col_step(c)) % 8 == 0
        if not PLAIN:
            write_apart(c, row, col, alpha, acc, beta, vectors)
        elif in_columns:
            write_columns(c, row, col, alpha, acc, beta)
        else:
            store_plain(c, row, col, alpha, acc, beta, inside)

    return store


def build(config, variant):
    """Make the kernel ``(alpha, u, v, part, beta, c, k, steps)``; the epilogue's `vectors` follow if it has any.

    `u` and `v` are addresses of tensor maps of U as stored and of V, for the `boxes`; if V is decomposed, `v` is 0 and
    `part` its part. `c` is C, or its transpose if that is what ``U @ V.T`` is. The grid has any number of blocks along
    x, and the matrices of a batch along y. `steps` lead from one matrix to the next: 0 or 1 for both maps, bytes for
    `part` and `c`; those of `words_of_turns` follow.
    """
    one_part = variant.tensor_variant.precision == TENSOR_PRECISIONS["tf32"]
    two_slots = config.slots(TENSOR_PRECISIONS["tf32"]) >= 2  # one is awaited before the other is given back
    require(config, {"one producer": config.producers == 1, "one part": one_part, "two slots or more": two_slots})
    BM, BN, ALONG, PAIRS = config.BM, config.BN, variant.along, variant.pairs
    SLOTS, CONSUMERS, SLOT, CLAIM = (
        config.slots(TENSOR_PRECISIONS["tf32"]),
        config.consumers,
        config.slot_bytes(TENSOR_PRECISIONS["tf32"]),
        config.claim,
    )
    U_BYTES, COLUMN_GROUPS = ROW_BYTES * BM, BN // 8
    start_of, load_rows = row_loads(ALONG)
    (await_slot, following), await_all = ring(SLOTS), last_arrivals(SLOTS)
    free = give_back_to_all if PAIRS else give_back
    store, wait, keep_in_step = sums_store(config, variant), wgmma.waiting_for_rows(BN, HELD), pace(SLOTS)
    multiply0, multiply1, multiply2, multiply3 = (wgmma.multiply_rows(BN, 4 * step) for step in range(STEPS))

    @device_function
    def fetch_u(at, u, k, row, u_place, full):
        if ALONG:
            tensor_map.load(at, u, k, row, u_place, full)
        else:
            for panel in range(BM // PANEL):
                to = uint32(at + uint32(panel * PANEL * ROW_BYTES))
                tensor_map.load(to, u, int32(row + int32(panel * PANEL)), k, u_place, full)

    @device_function
    def fetch_v(at, v, s, col, v_place, full):
        k = int32(s * uint32(ROW_WORDS))
        if PAIRS:  # blocks of a cluster have the same rows of V
            first, _, blocks = own_share(uint32(BN))
            to = uint32(at + uint32(first * uint32(ROW_BYTES)))
            tensor_map.load_in(to, v, k, int32(col + int32(first)), v_place, full, blocks)
        else:
            tensor_map.load(at, v, k, col, v_place, full)

    @device_function
    def fetch_part(at, part, s, col, v_place, full):
        bulk_copy.bulk_load(at, address_of(part, int64(s), int64(col) * ROW_WORDS), uint32(ROW_BYTES * BN), full)

    def fetching(begin, fetch_other):
        """Make a device function that fetches all slots of a block; it returns what follows the last one.

        Its `v` is the address of V's map, or the part of a V that is decomposed.
        """

        @device_function
        def fetch(u, v, u_place, v_place, start, full, empty, rows, cols, k_slots):
            tensor_map.acquire(u)
            begin(v)
            i, parity = uint32(0), uint32(1)  # of the phase before the first, so that all slots count as empty
            tile = uint32(cuda.blockIdx.x)
            while tile < uint32(rows * cols):
                tile_row, tile_col = place(tile, rows, cols)
                s = uint32(0)
                while s < k_slots:
                    at, filled = uint32(start + i * uint32(SLOT)), uint32(full + i * BARRIER_BYTES)
                    while not mbarrier.ended(uint32(empty + i * BARRIER_BYTES), parity):
                        pass
                    row, col = int32(tile_row * uint32(BM)), int32(tile_col * uint32(BN))
                    mbarrier.expect(filled, uint32(SLOT))
                    fetch_u(at, u, int32(s * uint32(ROW_WORDS)), row, u_place, filled)
                    fetch_other(uint32(at + uint32(U_BYTES)), v, s, col, v_place, filled)
                    s = uint32(s + 1)
                    i, parity = following(i, parity)
                tile = uint32(tile + cuda.gridDim.x)
            return i, parity

        return fetch

    @device_function
    def await_part(part):
        wait_for_last()  # V has been decomposed

    fetch_mapped, fetch_decomposed = fetching(tensor_map.acquire, fetch_v), fetching(await_part, fetch_part)

    @device_function
    def turn(acc, held, held_before, memory, start, full, i, parity, first, keep):
        """Start the products of a slot, and wait for those of the previous slot."""
        await_slot(full, i, parity)
        at = uint32(start + i * uint32(SLOT))
        load_rows(held, memory, at, first)
        v = wgmma.descriptor(uint32(at + uint32(U_BYTES)))
        wgmma.fence()
        multiply0(acc, held, v, keep)
        multiply1(acc, held, v + STEP, True)
        multiply2(acc, held, v + 2 * STEP, True)
        multiply3(acc, held, v + 3 * STEP, True)
        wgmma.commit()
        wait(acc, held_before, 1)

    @device_function
    def run(alpha, u, v, part, beta, c, k, steps, vectors):
        member = int64(cuda.blockIdx.y)
        c = shifted(c, member * steps[3])
        memory = cuda.shared.array(0, float32, alignment=128)
        start = first_slot(memory)
        full = uint32(start + SLOTS * SLOT)
        empty = uint32(full + SLOTS * BARRIER_BYTES)
        tid = uint32(cuda.threadIdx.x)
        k_slots = uint32((k + (2 * ROW_WORDS - 1)) // (2 * ROW_WORDS) * 2)  # even; the last slot may hold only zeros
        rows, cols = uint32((c.shape[0] + (BM - 1)) // BM), uint32((c.shape[1] + (BN - 1)) // BN)
        blocks = uint32(1)
        if PAIRS:
            blocks = cluster.size()
            rows = uint32(uint32(rows + uint32(blocks - uint32(1))) & uint32(0 - blocks))  # one may be beyond C
        counter = steps[4]  # 0 if blocks do not keep in step
        if tid == uint32(0):
            for i in range(SLOTS):
                mbarrier.initialise(uint32(full + i * BARRIER_BYTES), uint32(1))
                readers = WARPGROUP // WARP * CONSUMERS * blocks + (1 if counter else 0)
                mbarrier.initialise(uint32(empty + i * BARRIER_BYTES), uint32(readers))
            mbarrier.initialised()
        if PAIRS:
            cluster.await_barriers()  # set up before any thread waits on them, or copies for them
        else:
            cuda.syncthreads()  # the barriers are set up before any thread waits on them

        i, tile = uint32(0), uint32(cuda.blockIdx.x)
        if tid >= uint32(WARPGROUP * CONSUMERS):
            if CLAIM > 0:
                registers.release(LEFT)
            warp = cuda.shfl_sync(0xFFFFFFFF, int32(tid // WARP), 0)  # so the compiler knows that a warp has one role
            if warp == WARPGROUP // WARP * CONSUMERS + 1:
                if counter and tid % WARP == 0:
                    keep_in_step(counter, uint32(steps[5]), uint32(rows * cols), k_slots, full, empty)
            else:
                u_place, v_place = int32(member * steps[0]), int32(member * steps[1])
                if tid == uint32(WARPGROUP * CONSUMERS):
                    if PAIRS:
                        i, parity = fetch_mapped(u, v, u_place, v_place, start, full, empty, rows, cols, k_slots)
                        await_all(empty, i, parity)
                    elif v:
                        fetch_mapped(u, v, u_place, v_place, start, full, empty, rows, cols, k_slots)
                    else:
                        part = shifted(part, member * steps[2])
                        fetch_decomposed(u, part, u_place, v_place, start, full, empty, rows, cols, k_slots)
        else:
            if CLAIM > 0:
                registers.claim(CLAIM)
            group, lane, warp = uint32(tid // WARPGROUP), uint32(tid % WARP), uint32(tid // WARP % 4)
            own_row, first = start_of(group, warp, lane)
            if PAIRS:
                empty = barriers_to_tell(empty)
            acc = cuda.local.array((COLUMN_GROUPS, 4), float32)
            even, odd = cuda.local.array(HELD, float32), cuda.local.array(HELD, float32)
            parity = uint32(0)
            while tile < uint32(rows * cols):
                for j in range(HELD):
                    odd[j] = float32(0)
                for j in range(COLUMN_GROUPS):
                    for q in range(4):
                        acc[j, q] = float32(0)
                s, last = uint32(0), uint32(0)
                while s < k_slots:
                    turn(acc, even, odd, memory, start, full, i, parity, first, s > uint32(0))
                    if s > uint32(0):
                        free(empty, last)  # its lanes' loads have landed: products of them are complete
                    last = i
                    i, parity = following(i, parity)
                    turn(acc, odd, even, memory, start, full, i, parity, first, True)
                    free(empty, last)
                    last = i
                    i, parity = following(i, parity)
                    s = uint32(s + 2)
                wait(acc, odd, 0)
                free(empty, last)
                tile_row, tile_col = place(tile, rows, cols)
                block_row, block_col = int64(tile_row) * BM, int64(tile_col) * BN
                inside = block_row + BM <= c.shape[0] and block_col + BN <= c.shape[1]
                col = block_col + int64(lane % 4 * 2)
                store(c, block_row + int64(own_row), col, alpha, acc, beta, vectors, inside)
                tile = uint32(tile + cuda.gridDim.x)

    bounds = hardware_only(launch_bounds=(config.threads, 1))

    @cuda.jit(**bounds)
    def tf32_tma(alpha, u, v, part, beta, c, k, steps):
        run(alpha, u, v, part, beta, c, k, steps, ())

    @cuda.jit(**bounds)
    def tf32_tma_with(alpha, u, v, part, beta, c, k, steps, vectors):
        run(alpha, u, v, part, beta, c, k, steps, vectors)

    return tf32_tma_with if variant.vectors else tf32_tma
