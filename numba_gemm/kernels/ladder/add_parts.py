"""The kernel that adds the parts of tiles that many blocks of stream_k share, after it.

In stream_k itself, one block per tile adds the parts, and waits for a few of them at a time. Here each element of a
tile has a thread, which waits for several parts of it at a time. Sums are the same, in the same order.
"""

from numba import cuda, float32, int64, uint32

from ...device.matrix import shifted
from ...device.partition import batch_place, load_partial, member_of, owner, part_slot, tile_place
from ...device.store import element_store
from ...device.units import WARP
from ...simulator.switch import hardware_only

AT_ONCE = 8  # parts that a thread reads at a time


def build(config, variant):
    """Make the kernel, with the parameters of stream_k.

    Blocks have the threads of stream_k. Along x, the grid has one per element of a thread tile; along y, one per shared
    tile of C.
    """
    BM, BN, TM, TN, WM, WN, THREADS = config.BM, config.BN, config.TM, config.TN, config.WM, config.WN, config.threads
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    store = element_store(variant.epilogue)

    @cuda.jit(**hardware_only(launch_bounds=(THREADS,)))
    def add_parts(alpha, a, b, beta, c, partition, vectors):
        tid, element, index = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        i, j = uint32(element // TN), uint32(element % TN)
        warp, lane = tid // WARP, tid % WARP
        k_tiles = uint32(partition.k_tiles)
        lead = owner(partition, uint32(index * k_tiles))
        parts = uint32(owner(partition, uint32(uint32(uint32(index + 1) * k_tiles) - 1)) - lead + 1)
        if parts > uint32(1):  # else stream_k has written the tile
            at = int64(element) * THREADS + int64(tid)
            values = cuda.local.array(AT_ONCE, float32)
            total = float32(0)
            q = uint32(0)
            while q < parts:
                for r in range(AT_ONCE):
                    slot = part_slot(partition, index, lead, min(uint32(q + r), uint32(parts - 1)))
                    values[r] = load_partial(partition, slot * (BM * BN) + at)
                for r in range(AT_ONCE):
                    if uint32(q + r) < parts:
                        total += values[r]
                q = uint32(q + AT_ONCE)
            tile = uint32(uint32(partition.whole) + index)
            z = c
            if uint32(partition.matrices) > uint32(1):
                member = member_of(partition, tile)
                tile = uint32(tile - uint32(member * uint32(uint32(partition.rows) * uint32(partition.cols))))
                i0, i1, i2 = batch_place(partition, member)
                z = shifted(c, i0 * partition.c_outer + i1 * partition.c_middle + i2 * partition.c_inner)
            down, across = tile_place(partition, tile)
            row = warp // (BN // WN) * WM + lane // LANES_N * 4 + i // 4 * (4 * LANES_M) + i % 4
            col = warp % (BN // WN) * WN + lane % LANES_N * 4 + j // 4 * (4 * LANES_N) + j % 4
            store(z, int64(down) * BM + int64(row), int64(across) * BN + int64(col), alpha, total, beta, vectors)

    return add_parts
