"""The kernel that adds the parts of tiles that many blocks of stream_k share.

In stream_k itself, one block per tile adds the parts, and waits for a few of them at a time. Here each element of a
tile has a thread, which waits for several parts of it at a time. Finding the places of the element and of its parts
takes hundreds of instructions, so if there are many elements, one thread handles four neighbours of a row. Sums are the
same, in the same order. One kernel serves all tiles; their extents are arguments. From compute capability 9.0 on, it
may be launched before stream_k has ended, unless thread tiles are the largest (`partitions.adds_early`); it then waits
for stream_k to end.
"""

from numba import cuda, float32, int64, uint32

from ...device.grid_order import wait_for_last
from ...device.matrix import shifted
from ...device.partition import batch_place, load_partial, member_of, owner, part_slot, tile_place
from ...device.store import element_store
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from .partitions import ADDED_AT_ONCE, EXTENT_BITS, MOST_THREADS


@device_function
def extent(partition, i):
    """Return one of the extents that `partitions.packed_extents` packs."""
    return uint32((partition.apart >> (EXTENT_BITS * i)) & ((1 << EXTENT_BITS) - 1))


def build(config, variant):
    """Make the kernel, with the parameters of stream_k; its configuration is the number of elements per thread.

    Blocks have the threads of a slice of stream_k. Along x, the grid has one per so many elements of a thread tile;
    along y, one per shared tile of C.
    """
    ELEMENTS = config
    store = element_store(variant.epilogue)

    @cuda.jit(**hardware_only(launch_bounds=(MOST_THREADS,)))
    def add_parts(alpha, a, b, beta, c, partition, vectors):
        tid, index = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.y)
        element = uint32(cuda.blockIdx.x * ELEMENTS)  # of a thread tile, the first of a few neighbours
        rows, cols = extent(partition, 0), extent(partition, 1)  # of a block tile
        thread_rows, thread_cols = extent(partition, 2), extent(partition, 3)
        warp_rows, warp_cols = extent(partition, 4), extent(partition, 5)
        lanes_m, lanes_n = uint32(warp_rows // thread_rows), uint32(warp_cols // thread_cols)
        k_tiles = uint32(partition.k_tiles)
        lead = owner(partition, uint32(index * k_tiles))
        parts = uint32(owner(partition, uint32(uint32(uint32(index + 1) * k_tiles) - 1)) - lead + 1)
        wait_for_last()  # all parts have been written
        if parts > uint32(1):  # else stream_k has written the tile
            threads, size = int64(cuda.blockDim.x), int64(uint32(rows * cols))
            at = int64(element) * threads + int64(tid)
            values = cuda.local.array((ADDED_AT_ONCE, ELEMENTS), float32)
            total = cuda.local.array(ELEMENTS, float32)
            for e in range(ELEMENTS):
                total[e] = float32(0)
            q = uint32(0)
            while q < parts:
                for r in range(ADDED_AT_ONCE):
                    if uint32(q + r) < parts:
                        slot = part_slot(partition, index, lead, uint32(q + r))
                        for e in range(ELEMENTS):
                            values[r, e] = load_partial(partition, slot * size + at + e * threads)
                for r in range(ADDED_AT_ONCE):
                    if uint32(q + r) < parts:
                        for e in range(ELEMENTS):
                            total[e] += values[r, e]
                q = uint32(q + ADDED_AT_ONCE)
            tile = uint32(uint32(partition.whole) + index)
            z = c
            if uint32(partition.matrices) > uint32(1):
                member = member_of(partition, tile)
                tile = uint32(tile - uint32(member * uint32(uint32(partition.rows) * uint32(partition.cols))))
                i0, i1, i2 = batch_place(partition, member)
                z = shifted(c, i0 * partition.c_outer + i1 * partition.c_middle + i2 * partition.c_inner)
            down, across = tile_place(partition, tile)
            # the place of the thread's first element in the block tile, and then of these (see `stream_k`)
            warp, lane = tid // WARP, tid % WARP
            across_warps = uint32(cols // warp_cols)
            row = uint32(uint32(warp // across_warps) * warp_rows) + uint32(uint32(lane // lanes_n) * 4)
            col = uint32(uint32(warp % across_warps) * warp_cols) + uint32(uint32(lane % lanes_n) * 4)
            i, j = uint32(element // thread_cols), uint32(element % thread_cols)
            row = int64(row) + int64(uint32(i // 4 * 4) * lanes_m) + int64(i % 4)
            col = int64(col) + int64(uint32(j // 4 * 4) * lanes_n) + int64(j % 4)
            for e in range(ELEMENTS):
                store(z, int64(down) * rows + row, int64(across) * cols + col + e, alpha, total[e], beta, vectors)

    return add_parts
