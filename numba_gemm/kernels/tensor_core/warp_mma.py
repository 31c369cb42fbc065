"""warp_mma: matrix instructions of single warps, for GPUs without those of warpgroups.

Bottleneck before: none; this is the kernel for compute capability 8.0 and up wherever `persistent` cannot run.
Idea: the same parts in the same slots, copied by `cp.async`. Each warp loads fragments of its 32 rows of A and 32
    columns of B by `ldmatrix` and multiplies them by `mma.sync`. Its sums are kept as in `persistent`.
Traffic: a block reads 128 bytes per part, row and slot of k from the L2 cache; each of its four warps reads half of
    that from shared memory.
Registers and shared memory: two or three sums of 32 registers each, and the fragments of all parts; as many slots as
    fit: two with three parts each in 99 KB.
Limits: in every k-step, the fragments are loaded before they are multiplied. The kernel is neither tuned nor timed on
    any GPU.
"""

from numba import cuda, float32, int64, uint32

from ...device import mma
from ...device.address import address_of, copy16_if
from ...device.async_copy import commit_group, wait_group
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from .accumulate import FOLD, steps
from .epilogue import of_batch, place, sums_store
from .pipeline import first_slot
from .stage import ROW_BYTES, ROW_WORDS, WARP_EXTENT
from .warp_products import GROUPS, products_of

CHUNK = 16  # bytes per copy, and per row of a fragment
M = N = WARP_EXTENT


def build(config, variant):
    precision, BM, BN, PARTS = variant.precision, config.BM, config.BN, variant.precision.parts
    SLOTS, SLOT, THREADS = config.slots(precision), config.slot_bytes(precision), config.threads
    A_BYTES, B_BYTES = ROW_BYTES * BM, ROW_BYTES * BN
    ACROSS = BN // N  # warps
    LEADING, OTHERS = precision.products[-1:], precision.products[:-1]
    APART, COMPENSATED, STEPWISE = len(OTHERS) > 0, precision.compensated, precision.stepwise
    ONE = COMPENSATED and not STEPWISE  # one sum for all products: `rests` is `sums`
    IN_FLIGHT = SLOTS - 2
    A_FRAGMENTS, B_FRAGMENTS = PARTS * (M // 16), PARTS * (N // 16)
    A_TURNS, B_TURNS = A_BYTES // CHUNK // THREADS, B_BYTES // CHUNK // THREADS
    store = sums_store(variant, N // 8, M // 16)
    clear, add, add_exactly, add_rests, finish = steps(8 * GROUPS, precision.second_factor)

    @device_function
    def copy(memory, at, a, b, s, k_slots, block_row, block_col):
        """Start copying slot s; each thread copies every THREADS-th chunk."""
        tid = uint32(cuda.threadIdx.x)
        for p in range(PARTS):
            a_from = address_of(a, int64(p * k_slots + s), block_row * ROW_WORDS) + int64(tid) * CHUNK
            b_from = address_of(b, int64(p * k_slots + s), block_col * ROW_WORDS) + int64(tid) * CHUNK
            a_to = uint32(at + p * A_BYTES + tid * CHUNK)
            b_to = uint32(at + PARTS * A_BYTES + p * B_BYTES + tid * CHUNK)
            for i in range(A_TURNS):
                copy16_if(memory, uint32(a_to + i * (THREADS * CHUNK)), a, a_from + i * (THREADS * CHUNK), True)
            for i in range(B_TURNS):
                copy16_if(memory, uint32(b_to + i * (THREADS * CHUNK)), b, b_from + i * (THREADS * CHUNK), True)

    leading, others = products_of(precision, LEADING), products_of(precision, OTHERS)

    @device_function
    def run(alpha, a, b, beta, c, x, y, steps, vectors):
        a, b, c, x, y = member(a, b, c, x, y, steps)
        memory = cuda.shared.array(0, float32, alignment=128)
        start = first_slot(memory)
        tid = uint32(cuda.threadIdx.x)
        lane, warp = uint32(tid % WARP), uint32(tid // WARP)
        warp_row, warp_col = uint32(warp // ACROSS * M), uint32(warp % ACROSS * N)
        k_slots = uint32(a.shape[0] // PARTS)
        rows, cols = uint32((c.shape[0] + (BM - 1)) // BM), uint32((c.shape[1] + (BN - 1)) // BN)
        # A fragment consists of blocks of eight rows of 16 bytes. The second block of A is eight rows below the first,
        # that of B 16 bytes further along k.
        a_row, a_chunk = uint32(warp_row + lane % 16), uint32(lane // 16)
        b_row, b_chunk = uint32(warp_col + lane // 16 * 8 + lane % 8), uint32(lane // 8 % 2)
        total = cuda.local.array((GROUPS, 4), float32)
        sums = cuda.local.array((GROUPS, 4), float32)
        rests = sums if ONE else cuda.local.array((GROUPS, 4), float32)
        a_frag = cuda.local.array((A_FRAGMENTS, 4), uint32)
        b_frag = cuda.local.array((B_FRAGMENTS, 4), uint32)
        tile = uint32(cuda.blockIdx.x)
        while tile < uint32(rows * cols):
            tile_row, tile_col = place(tile, rows, cols)
            block_row, block_col = int64(tile_row) * BM, int64(tile_col) * BN
            clear(total)
            clear(rests)
            cuda.syncthreads()  # all threads have read the last tile's slots before they are refilled
            for i in range(SLOTS - 1):
                if uint32(i) < k_slots:
                    copy(memory, uint32(start + i * SLOT), a, b, uint32(i), k_slots, block_row, block_col)
                commit_group()
            s, i = uint32(0), uint32(0)
            while s < k_slots:
                wait_group(IN_FLIGHT)
                cuda.syncthreads()  # all copies of this slot have landed, and all warps have read the previous slot
                ahead = uint32(s + (SLOTS - 1))
                free = uint32(SLOTS - 1) if i == uint32(0) else uint32(i - 1)
                if ahead < k_slots:
                    copy(memory, uint32(start + free * SLOT), a, b, ahead, k_slots, block_row, block_col)
                commit_group()
                if APART and not ONE:
                    clear(sums)
                at = uint32(start + i * SLOT)
                step = uint32(0)
                while step < uint32(4):
                    a_at = uint32(at + a_row * ROW_BYTES + ((2 * step + a_chunk) ^ (a_row % 8)) * CHUNK)
                    b_at = uint32(at + b_row * ROW_BYTES + ((2 * step + b_chunk) ^ (b_row % 8)) * CHUNK)
                    for p in range(PARTS):
                        for j in range(M // 16):
                            found = mma.load4(uint32(a_at + (p * A_BYTES + j * 16 * ROW_BYTES)))
                            for q in range(4):
                                a_frag[p * (M // 16) + j, q] = found[q]
                        for j in range(N // 16):
                            found = mma.load4(uint32(b_at + (PARTS * A_BYTES + p * B_BYTES + j * 16 * ROW_BYTES)))
                            for q in range(4):
                                b_frag[p * (N // 16) + j, q] = found[q]
                    if APART:
                        others(rests, a_frag, b_frag)
                        leading(sums, a_frag, b_frag)
                        if STEPWISE:
                            add_exactly(total, sums)
                            add(rests, sums)
                            clear(sums)
                    else:
                        leading(total, a_frag, b_frag)
                    step = uint32(step + 1)
                if ONE:
                    add_exactly(total, sums)
                elif APART and not STEPWISE:
                    add(total, sums)
                    if s % uint32(FOLD) == uint32(FOLD - 1):
                        add_rests(total, rests)
                        clear(rests)
                s = uint32(s + 1)
                i = uint32(0) if i == uint32(SLOTS - 1) else uint32(i + 1)
            if APART:
                finish(total, rests)
            row = block_row + int64(warp_row + lane // 4)
            col = block_col + int64(warp_col + lane % 4 * 2)
            store(c, row, col, alpha, total, beta, a, b, x, y, vectors, False)
            tile = uint32(tile + cuda.gridDim.x)

    member = of_batch(variant)
    bounds = hardware_only(launch_bounds=(config.threads, 1))

    @cuda.jit(**bounds)
    def warp_mma(alpha, a, b, beta, c, x, y, steps):
        run(alpha, a, b, beta, c, x, y, steps, ())

    @cuda.jit(**bounds)
    def warp_mma_with(alpha, a, b, beta, c, x, y, steps, vectors):
        run(alpha, a, b, beta, c, x, y, steps, vectors)

    return warp_mma_with if variant.vectors else warp_mma
