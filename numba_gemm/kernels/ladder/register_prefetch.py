"""register_prefetch: the fragments of the next k-step are read while the current ones are multiplied.

Bottleneck before: each k-step starts with reads of shared memory and waits about 30 clocks for them before its first
    multiply-add.
Idea: two sets of fragments; ``launch_bounds`` leaves just enough registers for them with two blocks per SM. While one
    set is multiplied, the fragments of the next k-step are read into the other. The first fragments of the next tile
    are read right after the barrier at the end of the current tile, so that the tile's last k-step hides that latency
    as well.
Traffic: the same.
Registers and shared memory: TM*TN accumulators, 2*(TM + TN) fragments, and BK*(BM + BN)/threads staged floats; 2*BK*(BM
    + BN) floats (16 KB at 128x128x8).
Measured: 42.6 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.83 of cuBLAS SGEMM and 1.11 times double_buffered; 128
    registers per thread, 68.5 % of the FMA pipe, 0.0 % excess shared wavefronts.
Limits: issue slots: one instruction in five is not a multiply-add, but one of the four fragment reads per 64
    multiply-adds, address arithmetic, or part of a tile's copies. At full speed the reads would take 12 of every 16
    clocks of shared memory.
"""

from numba import cuda, float32, uint32

from ...device.outer_product import outer_product
from ...device.store import row_store
from ...device.vector import fetch4, fetch4_any, load4, store4, store4_down
from ...simulator.switch import device_function, hardware_only
from .stage import require

HALF_WARP = 16  # lanes that store k = 0..3 in one transposing store; the others store k = 4..7


def build(config, aligned):
    BM, BN, BK, TM, TN = config.BM, config.BN, config.BK, config.TM, config.TN
    THREADS = config.threads
    A_VECTORS, B_VECTORS = max(BK // 4, 1), max(BN // 4, 1)  # per row of the tiles that are copied
    A_ROWS = THREADS // A_VECTORS  # rows of A that the block copies at a time
    B_ROWS = THREADS // B_VECTORS  # rows of B
    A_SHAPE, B_SHAPE = (2 * BK, BM), (2 * BK, BN)  # the two buffers of a tile are stacked
    A_LOADS, B_LOADS = BM // max(A_ROWS, 1), BK // max(B_ROWS, 1)  # vectors that each thread stages
    require(
        config,
        {
            "quadrants of 4x4: TM == TN == 8": TM == TN == 8,
            "BK == 8: two groups of four k": BK == 8,
            "quadrants keep the swizzle: BM % 64 == 0": BM % 64 == 0,
            "copies cover A's tile: threads % (BK/4) == 0 and BM % (threads/(BK/4)) == 0": (
                A_ROWS > 0 and THREADS % A_VECTORS == 0 and BM % A_ROWS == 0
            ),
            "copies cover B's tile: threads % (BN/4) == 0 and BK % (threads/(BN/4)) == 0": (
                B_ROWS > 0 and THREADS % B_VECTORS == 0 and BK % B_ROWS == 0
            ),
            "two buffers: slots == 2": config.slots == 2,
        },
    )
    fetch = fetch4 if aligned else fetch4_any
    store_row = row_store(TN, BN // 2, aligned)
    multiply = outer_product(TM, TN, config.order)  # one k-step; acc[i, j] += a_frag[i] * b_frag[j] for all i, j

    @device_function
    def read_fragments(a_tile, b_tile, buffer, p, row, col, a_frag, b_frag):
        """Read the fragments of k-step p from the tiles at `buffer`."""
        place = row ^ (p // 4 * HALF_WARP)
        a_frag[0], a_frag[1], a_frag[2], a_frag[3] = load4(a_tile, buffer + p, place)
        a_frag[4], a_frag[5], a_frag[6], a_frag[7] = load4(a_tile, buffer + p, place + BM // 2)
        b_frag[0], b_frag[1], b_frag[2], b_frag[3] = load4(b_tile, buffer + p, col)
        b_frag[4], b_frag[5], b_frag[6], b_frag[7] = load4(b_tile, buffer + p, col + BN // 2)

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def register_prefetch(alpha, a, b, beta, c):
        a_tile = cuda.shared.array(A_SHAPE, float32, alignment=16)
        b_tile = cuda.shared.array(B_SHAPE, float32, alignment=16)
        k = a.shape[1]
        tid = uint32(cuda.threadIdx.x)
        block_row = cuda.blockIdx.y * BM
        block_col = cuda.blockIdx.x * BN
        a_row, a_col = tid // A_VECTORS, tid % A_VECTORS * 4
        # XORed into A's column for k = 4..7, so that the halves of a warp store to different banks
        a_swizzle = a_col // 4 * HALF_WARP
        b_row, b_col = tid // B_VECTORS, tid % B_VECTORS * 4
        row = tid // (BN // TN) * 4  # this thread's first quadrant within the block tile
        col = tid % (BN // TN) * 4

        a_next = cuda.local.array((A_LOADS, 4), float32)
        b_next = cuda.local.array((B_LOADS, 4), float32)
        a_even = cuda.local.array(TM, float32)  # fragments of the even k-steps
        b_even = cuda.local.array(TN, float32)
        a_odd = cuda.local.array(TM, float32)  # fragments of the odd k-steps
        b_odd = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        for i in range(A_LOADS):
            values = fetch(a, block_row + a_row + i * A_ROWS, a_col)
            store4_down(a_tile, a_col, (a_row + i * A_ROWS) ^ a_swizzle, values)
        for i in range(B_LOADS):
            store4(b_tile, b_row + i * B_ROWS, b_col, fetch(b, b_row + i * B_ROWS, block_col + b_col))
        buffer = uint32(0)
        cuda.syncthreads()  # all threads have written the first tiles before any reads them
        read_fragments(a_tile, b_tile, buffer, 0, row, col, a_even, b_even)

        k0 = 0
        while k0 < k:
            k0 += BK
            for i in range(A_LOADS):
                values = fetch(a, block_row + a_row + i * A_ROWS, k0 + a_col)
                a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3] = values
            for i in range(B_LOADS):
                values = fetch(b, k0 + b_row + i * B_ROWS, block_col + b_col)
                b_next[i, 0], b_next[i, 1], b_next[i, 2], b_next[i, 3] = values
            p = 0
            while p < BK - 2:
                read_fragments(a_tile, b_tile, buffer, p + 1, row, col, a_odd, b_odd)
                multiply(a_even, b_even, acc)
                read_fragments(a_tile, b_tile, buffer, p + 2, row, col, a_even, b_even)
                multiply(a_odd, b_odd, acc)
                p += 2
            read_fragments(a_tile, b_tile, buffer, BK - 1, row, col, a_odd, b_odd)
            multiply(a_even, b_even, acc)
            buffer = uint32(buffer ^ BK)
            for i in range(A_LOADS):
                values = (a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3])
                store4_down(a_tile, buffer + a_col, (a_row + i * A_ROWS) ^ a_swizzle, values)
            for i in range(B_LOADS):
                values = (b_next[i, 0], b_next[i, 1], b_next[i, 2], b_next[i, 3])
                store4(b_tile, buffer + b_row + i * B_ROWS, b_col, values)
            # all threads have written the next tiles before any reads them, and have read this tile's last
            # fragments before the next iteration overwrites it
            cuda.syncthreads()
            read_fragments(a_tile, b_tile, buffer, 0, row, col, a_even, b_even)
            multiply(a_odd, b_odd, acc)

        for i in range(TM):
            c_row = block_row + row + i // 4 * (BM // 2) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return register_prefetch
