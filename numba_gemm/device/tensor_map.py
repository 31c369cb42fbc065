"""Asynchronous copies of rectangles from global to shared memory, started by one thread (compute capability 9.0).

A tensor map is 128 bytes that `numba_gemm.runtime.tensor_maps` creates on the host. It describes matrices in global
memory and the box that one copy brings: extents, strides, the order of 16-byte chunks in shared memory, and how floats
are rounded on their way. `load` takes the map and the coordinates of the box's first element: along the contiguous
dimension, across it, and the index of the matrix. Elements beyond the matrix's edges arrive as zeros, and count among
the bytes that the mbarrier waits for. `load_in` is the same for several blocks of a cluster.

The map is in global memory. `acquire` makes the host's writes there visible to this thread's copies.

PTX ISA: "cp.async.bulk.tensor", "fence.proxy.tensormap". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from numba.cuda import types

    from .ptx import instruction

    @instruction(types.void(types.int64), "fence.proxy.tensormap::generic.acquire.sys [$0], 128;")
    def acquire(tensor_map):
        """Make the map at an address in global memory visible, as it was before the kernel began."""

    @instruction(
        types.void(types.uint32, types.int64, types.int32, types.int32, types.int32, types.uint32),
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$2, $3, $4}], [$5];",
    )
    def load(to, tensor_map, x, y, z, barrier):
        """Start copying the box that begins at (x, y, z) to an address in shared memory, a multiple of 1024."""

    @instruction(
        types.void(types.uint32, types.int64, types.int32, types.int32, types.int32, types.uint32, types.uint32),
        "{ .reg .b16 mask; cvt.u16.u32 mask, $6; "
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[$0], [$1, {$2, $3, $4}], [$5], mask; }",
    )
    def load_in(to, tensor_map, x, y, z, barrier, blocks):
        """Start copying the box that begins at (x, y, z) to the same address in all `blocks`, a mask of ranks."""
