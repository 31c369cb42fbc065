"""Registers that warpgroups hand to one another while a block runs (compute capability 9.0a).

A block starts with the same number for every thread. `release` gives up what is above a count, `claim` waits until its
warpgroup can have so many: both are for all threads of a warpgroup, and take a constant, a multiple of 8 from 24 to
256. What a block's warpgroups hold must never exceed what it started with, or a claim waits for ever. The compiler
ignores both unless it sees the whole program (`compiler.compile_cubin`).

PTX ISA: "setmaxnreg". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .address import inline

    def _setting(direction):
        def declare(typingctx, count):
            if not isinstance(count, types.IntegerLiteral):
                return None
            code = f"setmaxnreg.{direction}.sync.aligned.u32 {count.literal_value};"

            def codegen(context, builder, signature, args):
                inline(builder, ir.VoidType(), [], code, "~{memory}").attributes.add("convergent")
                return context.get_dummy_value()

            return types.void(count), codegen

        return intrinsic(declare)

    release = _setting("dec")
    claim = _setting("inc")
