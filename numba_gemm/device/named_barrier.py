"""Barriers of some of a block's threads, by number.

A barrier is complete when as many threads have arrived as its calls say, a multiple of 32; it then starts again. All
lanes of a warp must make a call together. Number 0 is that of ``cuda.syncthreads``; there are 16.

PTX ISA: "bar.sync", "bar.arrive". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .address import NOTHING, inline

    def _statement(code):
        def declare(typingctx, number, threads):
            def codegen(context, builder, signature, args):
                inline(builder, NOTHING, args, code, "r,r,~{memory}").attributes.add("convergent")
                return context.get_dummy_value()

            return types.void(types.uint32, types.uint32), codegen

        return intrinsic(declare)

    arrive_and_wait = _statement("bar.sync $0, $1;")
    arrive = _statement("bar.arrive $0, $1;")
