"""basic_stream_k: an equal share of the k-tiles for every block, for operands stored by rows.

Bottleneck before: wave quantization. Blocks run in rounds, and the last round is seldom full: 4096x4096 is 512 tiles on
    132 SMs, four rounds where 3.88 would suffice. A small C has fewer tiles than the GPU has SMs, however long K is.
Idea: Stream-K. The k-tiles of all shared tiles of C form one line, which is cut into equal pieces, one per block. A
    block whose piece begins or ends within a tile of C writes a partial sum to a workspace. The last block to arrive at
    the tile adds the parts, always in the order of k. With many tiles of C, only those of the last two rounds are
    shared; each of the others is computed by one block. The main loop is that of async_copy, in snake order.
Traffic: the same, plus at most two partial tiles per block, written and read.
Registers and shared memory: as snake_order, plus the position on the line and, mostly, the parts being added (about 40
    registers).
Measured: 55.7 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 1.08 of cuBLAS SGEMM and 1.03 times snake_order; 254
    registers per thread, 84.0 % of the FMA pipe, 2.3 % excess shared wavefronts.
Limits: one layout. `stream_k` adds loaders for transposed and other operands, batches and epilogues.
"""

from numba import cuda, float32, int32, int64, uint32

from ...device.partition import arrive, owner, part_slot, piece, reset, row_partial, tile_place
from ...device.store import row_store
from ...device.units import WARP
from ...simulator.switch import hardware_only
from .async_copy import main_loop
from .stage import ANY


def build(config, fit):
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    accumulate = main_loop(config, fit)
    store_row = row_store(TN, 4 * LANES_N, fit != ANY)
    store_partial_row, load_partial_row = row_partial(TN, config.threads, BM * BN)

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def basic_stream_k(alpha, a, b, beta, c, partition):
        tiles = cuda.shared.array(0, float32, alignment=16)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        warp, lane = tid // WARP, tid % WARP
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4
        k, k_tiles = a.shape[1], uint32(partition.k_tiles)
        acc = cuda.local.array((TM, TN), float32)
        part = cuda.local.array((TM, TN), float32)  # of a sum, from another block

        at, end = piece(partition, block), piece(partition, uint32(block + 1))  # this block's piece of the line
        whole, own = uint32(partition.whole), block  # tiles that one block each computes, and this block's next one
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
            down, across = tile_place(partition, tile)
            block_row, block_col = int64(down) * BM, int64(across) * BN

            for i in range(TM):
                for j in range(TN):
                    acc[i, j] = float32(0)
            cuda.syncthreads()  # all threads have read the previous piece's last fragments before copies overwrite them
            accumulate(tiles, a, b, block_row, block_col, row, col, int64(first) * BK, min(int64(last) * BK, k), acc)

            complete = True
            if uint32(last - first) < k_tiles:
                lead = owner(partition, uint32(index * k_tiles))  # the first of the blocks that share this tile
                parts = uint32(owner(partition, uint32(uint32(uint32(index + 1) * k_tiles) - 1)) - lead + 1)
                mine = part_slot(partition, index, lead, uint32(block - lead))
                for i in range(TM):
                    store_partial_row(partition, mine, tid, acc, i)
                cuda.syncthreads()  # all threads have written this part before the block is counted
                final = int32(0)
                if tid == uint32(0) and arrive(partition, int64(index)) == int64(parts) - 1:
                    final = int32(1)
                    reset(partition, int64(index))
                # no thread reads the parts before thread 0 has counted this block as the last, when all are visible
                complete = cuda.syncthreads_or(final) != 0
                if complete:
                    for i in range(TM):
                        for j in range(TN):
                            acc[i, j] = float32(0)
                    q = uint32(0)
                    while q < parts:
                        theirs = part_slot(partition, index, lead, q)
                        for i in range(TM):
                            load_partial_row(partition, theirs, tid, part, i)
                        for i in range(TM):
                            for j in range(TN):
                                acc[i, j] += part[i, j]
                        q = uint32(q + 1)
            if complete:
                for i in range(TM):
                    c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
                    store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return basic_stream_k
