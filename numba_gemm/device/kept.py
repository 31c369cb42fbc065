"""Values that the compiler must compute where they are written.

`pinned` hides from the compiler how a value was computed. Otherwise, to save a register, the compiler would recompute
cheap values in every iteration of a loop, which costs instructions where registers are plentiful.

`product` is computed where it is used. Otherwise, the compiler would compute many products long before, and hold all of
them in registers.

PTX ISA: "shfl.sync", "mul".
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if SIMULATOR:

    def pinned(value):
        """Return the 32-bit value unchanged; the compiler must keep it and cannot recompute it."""
        return value

    def product(x, y):
        """Return ``x * y``, which the compiler must compute in place."""
        return x * y

else:
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .address import FLOAT, WORD, inline

    @intrinsic
    def pinned(typingctx, value):
        """Return the 32-bit value unchanged; the compiler must keep it and cannot recompute it."""
        code = "{ .reg .b32 lane; mov.u32 lane, %laneid; shfl.sync.idx.b32 $0, $1, lane, 31, 0xffffffff; }"

        def codegen(context, builder, signature, args):
            return inline(builder, WORD, args, code, "=r,r")

        return types.uint32(types.uint32), codegen

    @intrinsic
    def product(typingctx, x, y):
        """Return ``x * y``, which the compiler must compute in place."""

        def codegen(context, builder, signature, args):
            return inline(builder, FLOAT, args, "mul.rn.f32 $0, $1, $2;", "=f,f,f")

        return types.float32(types.float32, types.float32), codegen
