"""Transfer of registers between the warpgroups of a running block (compute capability 9.0a).

A block starts with the same number of registers for every thread. `release` gives up the registers above a count;
`claim` waits until its warpgroup can have that many. All threads of a warpgroup must make the call, with a constant: a
multiple of 8 from 24 to 256. The registers that a block's warpgroups hold must never exceed what the block started
with, or a claim waits forever. The compiler ignores both calls unless it sees the whole program
(`compiler.compile_cubin`).

PTX ISA: "setmaxnreg". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .ptx import inline

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
