"""A counter in global memory by which blocks learn how far all of them are.

PTX ISA: "atom", "ld.relaxed". Simulator twin: a counter that is far ahead, since blocks run one after another.
"""

from __future__ import annotations

from numba import int32

from ..simulator.switch import SIMULATOR

if SIMULATOR:

    def add_to_counter(counter, count):
        return int32(1 << 30)

    def read_counter(counter):
        return int32(1 << 30)

    def clear_counter(counter):
        pass

else:
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .address import NOTHING, WORD, inline

    @intrinsic
    def add_to_counter(typingctx, counter, count):
        """Add to the counter at an address; return what it held before."""

        def codegen(context, builder, signature, args):
            return inline(builder, WORD, args, "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", "=r,l,r")

        return types.int32(types.int64, types.int32), codegen

    @intrinsic
    def read_counter(typingctx, counter):
        """Read the counter at an address."""

        def codegen(context, builder, signature, args):
            return inline(builder, WORD, args, "ld.relaxed.gpu.global.u32 $0, [$1];", "=r,l")

        return types.int32(types.int64), codegen

    @intrinsic
    def clear_counter(typingctx, counter):
        """Set the counter at an address to zero."""

        def codegen(context, builder, signature, args):
            inline(builder, NOTHING, args, "st.relaxed.gpu.global.u32 [$0], 0;", "l")
            return context.get_dummy_value()

        return types.void(types.int64), codegen
