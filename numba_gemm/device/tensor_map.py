"""Asynchronous copies of rectangles from global to shared memory, by one thread (compute capability 9.0).

A tensor map, 128 bytes that `numba_gemm.runtime.tensor_maps` makes on the host, describes matrices in global memory
and the box that one copy brings: extents, strides, the order of 16-byte chunks in shared memory, and how a float is
rounded on its way. `load` names it, and the coordinates of the box's first element: along what is contiguous, across
it, and which matrix. What lies beyond the matrix's edges arrives as zeros, and counts among the bytes that the mbarrier
waits for.

The map lies in global memory. `acquire` lets this thread's copies see what the host has written there.

PTX ISA: "cp.async.bulk.tensor", "fence.proxy.tensormap". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .address import inline

    @intrinsic
    def acquire(typingctx, tensor_map):
        """See the map at an address in global memory as it was before the kernel began."""

        def codegen(context, builder, signature, args):
            inline(builder, ir.VoidType(), args, "fence.proxy.tensormap::generic.acquire.sys [$0], 128;", "l,~{memory}")
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    @intrinsic
    def load(typingctx, to, tensor_map, x, y, z, barrier):
        """Start copying the box that begins at (x, y, z) to an address in shared memory, a multiple of 1024."""
        bulk = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        code = f"{bulk} [$0], [$1, {{$2, $3, $4}}], [$5];"

        def codegen(context, builder, signature, args):
            inline(builder, ir.VoidType(), args, code, "r,l,r,r,r,r,~{memory}")
            return context.get_dummy_value()

        coordinates = types.int32, types.int32, types.int32
        return types.void(types.uint32, types.int64, *coordinates, types.uint32), codegen
