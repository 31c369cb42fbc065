"""warp_tiled: tiles of C for blocks, warps and threads, each nearly square and larger than before.

Bottleneck before: an 8x8 thread tile reads 16 floats of shared memory for 64 multiply-adds. The reads take issue slots.
    With a full FMA pipe, they would take three quarters of the bandwidth of shared memory.
Idea: one tile per level. A warp owns WM x WN of C and arranges its lanes so that this tile is nearly square: 8 x 4
    lanes with 8x16 elements each give 64x64. Thread tiles grow to 8x16; they consist of groups of four rows and four
    columns, interleaved with those of the other lanes. The block tile grows with them, beyond the 48 KB of static
    shared memory. The rows of A's tile are padded by four floats instead of swizzled. The transposing stores, now few,
    then have two-way conflicts, but the address of a read is a plain sum. Two k-steps are written out, so that the
    compiler can read the second one's fragments during the first.
Traffic: M*N*K*(1/BM + 1/BN) floats from global memory; 1/TM + 1/TN reads of shared memory per multiply-add: 0.19 at
    8x16, 0.25 at 8x8.
Registers and shared memory: TM*TN accumulators (128), TM + TN fragments and the staged floats; 2*BK*(BM + pad + BN)
    floats (49 KB at 128x256x16).
Measured: 48.3 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.94 of cuBLAS SGEMM and 1.00 times double_buffered; 208
    registers per thread, 76.1 % of the FMA pipe, 2.3 % excess shared wavefronts.
Limits: one block of eight warps has an SM to itself, two warps per scheduler. When both wait for fragments, nothing is
    multiplied: after every barrier, and at every other k-step. By itself, the larger tile gains little. Counters show
    why (docs/experiments.md): this stage executes fewer instructions and wavefronts of shared memory than
    double_buffered, but with more registers per thread half as many warps fit, and instructions are issued in fewer of
    the slots. At the end, larger tiles leave SMs idle for longer.
"""

from numba import cuda, float32, uint32

from ...device.shared import shared_view
from ...device.store import row_store
from ...device.units import WARP
from ...device.vector import fetch4, fetch4_any, load4, store4, store4_down
from ...simulator.switch import device_function, hardware_only
from ..stage import vector_copies
from .stage import ANY
from .tile_config import require


def build(config, fit):
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    THREADS = config.threads
    A_VECTORS, B_VECTORS = max(BK // 4, 1), max(BN // 4, 1)  # per row of the tiles that are copied
    A_ROWS = THREADS // A_VECTORS  # rows of A that the block copies at a time
    B_ROWS = THREADS // B_VECTORS  # rows of B
    A_LOADS, B_LOADS = BM // max(A_ROWS, 1), BK // max(B_ROWS, 1)  # vectors that each thread stages
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    BM_PAD = BM + config.pad
    B_START = 2 * BK * BM_PAD  # start of B's tiles in shared memory
    require(
        config,
        {
            "TM % 4 == 0, TN is 4, 8 or 16": TM % 4 == 0 and TN in (4, 8, 16),
            "warps have tiles: WM > 0": WM > 0,
            "BK % 4 == 0": BK % 4 == 0,
            "pad % 4 == 0": config.pad % 4 == 0,
            **vector_copies(config),
            "two buffers: slots == 2": config.slots == 2,
            "dynamic shared memory": config.dynamic,
        },
    )
    fetch = (fetch4_any, fetch4, load4)[fit]  # ANY, ALIGNED, WHOLE
    store_row = row_store(TN, 4 * LANES_N, fit != ANY)

    @device_function
    def read_fragments(a_tile, b_tile, p, row, col, a_frag, b_frag):
        """Read the fragments of k-step p, counted from the first buffer."""
        for i in range(0, TM, 4):
            values = load4(a_tile, p, row + i * LANES_M)
            a_frag[i], a_frag[i + 1], a_frag[i + 2], a_frag[i + 3] = values
        for j in range(0, TN, 4):
            values = load4(b_tile, p, col + j * LANES_N)
            b_frag[j], b_frag[j + 1], b_frag[j + 2], b_frag[j + 3] = values

    @device_function
    def multiply(a_frag, b_frag, acc):
        """Add the products of one k-step."""
        for j in range(TN):
            for i in range(TM):
                acc[i, j] += a_frag[i] * b_frag[j]

    @device_function
    def multiply_tile(a_tile, b_tile, buffer, row, col, acc):
        """Add the products of the tiles in the rows from `buffer` on."""
        a_frag = cuda.local.array(TM, float32)
        b_frag = cuda.local.array(TN, float32)
        p = buffer
        while p < uint32(buffer + BK):
            read_fragments(a_tile, b_tile, p, row, col, a_frag, b_frag)
            multiply(a_frag, b_frag, acc)
            read_fragments(a_tile, b_tile, p + 1, row, col, a_frag, b_frag)
            multiply(a_frag, b_frag, acc)
            p = uint32(p + 2)

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def warp_tiled(alpha, a, b, beta, c):
        tiles = cuda.shared.array(0, float32, alignment=16)
        a_tile = shared_view(tiles, 0, 2 * BK, BM_PAD)
        b_tile = shared_view(tiles, B_START, 2 * BK, BN)
        k = a.shape[1]
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        block_row = cuda.blockIdx.y * BM
        block_col = cuda.blockIdx.x * BN
        a_row, a_col = tid // A_VECTORS, tid % A_VECTORS * 4
        b_row, b_col = tid // B_VECTORS, tid % B_VECTORS * 4
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4

        a_next = cuda.local.array((A_LOADS, 4), float32)
        b_next = cuda.local.array((B_LOADS, 4), float32)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        for i in range(A_LOADS):
            values = fetch(a, block_row + a_row + i * A_ROWS, a_col)
            store4_down(a_tile, a_col, a_row + i * A_ROWS, values)
        for i in range(B_LOADS):
            store4(b_tile, b_row + i * B_ROWS, b_col, fetch(b, b_row + i * B_ROWS, block_col + b_col))
        buffer = uint32(0)  # first row of the tiles that are read
        cuda.syncthreads()  # all threads have written the first tiles before any reads them

        k0 = BK
        while k0 < k:
            for i in range(A_LOADS):
                values = fetch(a, block_row + a_row + i * A_ROWS, k0 + a_col)
                a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3] = values
            for i in range(B_LOADS):
                values = fetch(b, k0 + b_row + i * B_ROWS, block_col + b_col)
                b_next[i, 0], b_next[i, 1], b_next[i, 2], b_next[i, 3] = values
            multiply_tile(a_tile, b_tile, buffer, row, col, acc)
            buffer = uint32(buffer ^ BK)
            for i in range(A_LOADS):
                values = (a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3])
                store4_down(a_tile, buffer + a_col, a_row + i * A_ROWS, values)
            for i in range(B_LOADS):
                values = (b_next[i, 0], b_next[i, 1], b_next[i, 2], b_next[i, 3])
                store4(b_tile, buffer + b_row + i * B_ROWS, b_col, values)
            # all threads have written the next tiles before any reads them, and have read this tile before the next
            # iteration overwrites it
            cuda.syncthreads()
            k0 += BK
        multiply_tile(a_tile, b_tile, buffer, row, col, acc)

        for i in range(TM):
            c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return warp_tiled
