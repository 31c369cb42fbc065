"""lean_loop: a main loop with almost nothing but multiply-adds.

Bottleneck before: one instruction in eight is not a multiply-add. Most of these compute addresses, check edges and
    select slots, again for every tile.
Idea: the kernel keeps addresses instead of indices, and increments them. Edges leave the loop: only the first tile may
    be partial along k; rows and columns outside are replaced by the last one inside, or not read at all, since their
    results are never stored. One loop serves all tiles: the last iteration skips its loads under a predicate, not a
    branch. A goes through registers again, four k per instruction, which takes fewer instructions than 4-byte copies.
    The products are computed in snake order, so that an operand is read from the register file once for several
    products, and from alternating banks.
Traffic: the same.
Registers and shared memory: TM*TN accumulators, 2*(TM + TN) fragments and the vectors in flight; 2*BK*(BM + pad + BN)
    floats (50 KB at 128x256x16).
Measured: 55.2 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 1.08 of cuBLAS SGEMM and 1.10 times async_copy; 198
    registers per thread, 85.6 % of the FMA pipe, 2.3 % excess shared wavefronts.
Limits: wave quantization: 4096x4096 is 512 tiles on 132 SMs, four rounds where 3.88 would suffice. Within a round, one
    instruction in thirteen is not a multiply-add, and half of these read fragments.
"""

from numba import cuda, float32, int64, uint32

from ...device.access import covers
from ...device.address import col_step, pinned, shared_address, shared_load4, transposed
from ...device.async_copy import commit_group, wait_group
from ...device.outer_product import outer_product
from ...device.store import row_store
from ...device.tile_loader import tile_loader
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from .stage import require


def build(config, aligned):
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    THREADS = config.threads
    A_PITCH, B_PITCH = BM + config.pad, BN + (0 if aligned else config.pad_b)
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    B_START = 4 * BK * A_PITCH  # bytes from the start of a slot to its tile of B
    SLOT = B_START + 4 * BK * B_PITCH  # bytes per slot
    a_access, b_access = ("along4", "across4") if aligned else ("any", "any")
    require(
        config,
        {
            "TM % 4 == 0, TN is 4, 8 or 16": TM % 4 == 0 and TN in (4, 8, 16),
            "warps have tiles: WM > 0": WM > 0,
            "BK % 4 == 0": BK % 4 == 0,
            "copies cover A's tile": covers(a_access, BM, BK, THREADS),
            "copies cover B's tile": covers(b_access, BN, BK, THREADS),
            "two slots": config.slots == 2,
            "pads % 4 == 0": config.pad % 4 == 0 and config.pad_b % 4 == 0,
            "dynamic shared memory": config.dynamic,
        },
    )
    a_loader = tile_loader(a_access, BM, BK, THREADS, A_PITCH)
    b_loader = tile_loader(b_access, BN, BK, THREADS, B_PITCH)
    A_ADDRESSES, A_STAGED, A_PARTS = a_loader.addresses, a_loader.staged, a_loader.parts
    B_ADDRESSES, B_STAGED, B_PARTS = b_loader.addresses, b_loader.staged, b_loader.parts
    origin_a, place_a, valid_a, begin_a, fetch_a, settle_a = a_loader.functions
    origin_b, place_b, valid_b, begin_b, fetch_b, settle_b = b_loader.functions
    multiply = outer_product(TM, TN, config.order)  # one k-step; acc[i, j] += a_frag[i] * b_frag[j] for all i, j
    store_row = row_store(TN, 4 * LANES_N, aligned)

    @device_function
    def read_fragments(tiles, a_at, b_at, p, a_frag, b_frag):
        """Read the fragments of the k-step p steps after the one at a_at and b_at; p is a constant."""
        for i in range(0, TM, 4):
            values = shared_load4(tiles, uint32(a_at + 4 * (p * A_PITCH + i * LANES_M)))
            a_frag[i], a_frag[i + 1], a_frag[i + 2], a_frag[i + 3] = values
        for j in range(0, TN, 4):
            values = shared_load4(tiles, uint32(b_at + 4 * (p * B_PITCH + j * LANES_N)))
            b_frag[j], b_frag[j + 1], b_frag[j + 2], b_frag[j + 3] = values

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def lean_loop(alpha, a, b, beta, c):
        tiles = cuda.shared.array(0, float32, alignment=16)
        start = shared_address(tiles)
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        block_row = int64(cuda.blockIdx.y) * BM
        block_col = int64(cuda.blockIdx.x) * BN
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4
        x, y = a, transposed(b)  # both as (mn, k)
        k = a.shape[1]
        a_to, b_to = pinned(uint32(start + origin_a(tid))), pinned(uint32(start + B_START + origin_b(tid)))
        a_from, b_from = pinned(uint32(start + 4 * row)), pinned(uint32(start + B_START + 4 * col))
        a_valid, b_valid = pinned(valid_a(x, block_row, tid)), pinned(valid_b(y, block_col, tid))

        a_addresses = cuda.local.array(A_ADDRESSES, int64)
        b_addresses = cuda.local.array(B_ADDRESSES, int64)
        a_staged = cuda.local.array(A_STAGED, float32)  # vectors in flight to shared memory
        b_staged = cuda.local.array(B_STAGED, float32)
        a_even = cuda.local.array(TM, float32)  # fragments of the even k-steps
        b_even = cuda.local.array(TN, float32)
        a_odd = cuda.local.array(TM, float32)  # fragments of the odd k-steps
        b_odd = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        left = uint32(max((k + (BK - 1)) // BK, 1))  # tiles
        width = k - (int64(left) - 1) * BK  # of the first tile; the others are whole
        place_a(x, block_row, 0, tid, a_addresses)
        place_b(y, block_col, 0, tid, b_addresses)
        begin_b(tiles, b_to, y, b_addresses, b_valid, width, tid, b_staged)
        begin_a(tiles, a_to, x, a_addresses, a_valid, width, tid, a_staged)
        commit_group()
        settle_a(tiles, a_to, a_staged)
        settle_b(tiles, b_to, b_staged)
        for i in range(A_ADDRESSES):
            a_addresses[i] += width * col_step(x)
        for i in range(B_ADDRESSES):
            b_addresses[i] += width * col_step(y)
        wait_group(0)
        cuda.syncthreads()  # all threads' copies and stores are complete before any reads the first tiles
        slot = uint32(0)  # bytes from the first slot to the slot being read
        read_fragments(tiles, a_from, b_from, 0, a_even, b_even)

        while left > uint32(0):
            left = uint32(left - 1)
            more = left > uint32(0)
            other = uint32(SLOT - slot)
            for part in range(B_PARTS):
                fetch_b(tiles, uint32(b_to + other), y, b_addresses, b_valid, more, b_staged, part)
            for part in range(A_PARTS):
                fetch_a(tiles, uint32(a_to + other), x, a_addresses, a_valid, more, a_staged, part)
            commit_group()
            for i in range(A_ADDRESSES):
                a_addresses[i] += BK * col_step(x)
            for i in range(B_ADDRESSES):
                b_addresses[i] += BK * col_step(y)
            a_at, b_at = uint32(a_from + slot), uint32(b_from + slot)
            p = uint32(0)
            while p < uint32(BK // 2 - 1):
                read_fragments(tiles, a_at, b_at, 1, a_odd, b_odd)
                multiply(a_even, b_even, acc)
                read_fragments(tiles, a_at, b_at, 2, a_even, b_even)
                multiply(a_odd, b_odd, acc)
                a_at, b_at = uint32(a_at + 8 * A_PITCH), uint32(b_at + 8 * B_PITCH)
                p = uint32(p + 1)
            read_fragments(tiles, a_at, b_at, 1, a_odd, b_odd)
            multiply(a_even, b_even, acc)
            slot = other
            settle_a(tiles, uint32(a_to + slot), a_staged)
            settle_b(tiles, uint32(b_to + slot), b_staged)
            wait_group(0)
            # all threads' copies and stores are complete before any reads the next tiles; and all have read this tile's
            # last fragments before the next iteration overwrites it
            cuda.syncthreads()
            read_fragments(tiles, uint32(a_from + slot), uint32(b_from + slot), 0, a_even, b_even)
            multiply(a_odd, b_odd, acc)

        for i in range(TM):
            c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return lean_loop
