"""Float32 rounded to what tensor cores multiply, and kept as float32.

`tf32` keeps 10 bits of fraction, rounds halves away from zero, and leaves the lower 13 bits zero. `bf16` keeps 7,
rounds halves to even, and leaves the lower 16 bits zero; ``pair(low, high)`` puts two such into one 32-bit word. Both
have the exponents of float32: what is nearer to the next power of two than to the largest rounds to infinity. A NaN
stays one; the instruction alone would round away the fraction of some.

PTX ISA: "cvt.rna.tf32.f32", "cvt.rn.bf16.f32" (compute capability 8.0 and up), "prmt".
"""

from __future__ import annotations

from .switch import SIMULATOR

if SIMULATOR:
    import numpy as np

    def _bits(value):
        return int(np.float32(value).view(np.uint32))

    def _float(bits):
        return np.uint32(bits).view(np.float32)

    def tf32(value):
        """The nearest TF32."""
        return _float(0x7FFFE000) if np.isnan(value) else _float(_bits(value) + 0x1000 & 0xFFFFE000)

    def bf16(value):
        """The nearest BF16."""
        bits = _bits(value)
        return _float(0x7FFF0000) if np.isnan(value) else _float(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000)

    def pair(low, high):
        """The word of two BF16, the first in its lower half."""
        return _float(_bits(low) >> 16 | _bits(high) & 0xFFFF0000)

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .address import inline

    def _rounding(code):
        def declare(typingctx, value):
            def codegen(context, builder, signature, args):
                return inline(builder, ir.FloatType(), args, code, "=f,f")

            return types.float32(types.float32), codegen

        return intrinsic(declare)

    tf32 = _rounding(
        "{ .reg .b32 bits; .reg .pred none; cvt.rna.tf32.f32 bits, $1; setp.nan.f32 none, $1, $1; "
        "@none mov.b32 bits, 0x7fffe000; mov.b32 $0, bits; }"
    )
    bf16 = _rounding(
        "{ .reg .b16 half; .reg .b16 none; cvt.rn.bf16.f32 half, $1; mov.b16 none, 0; mov.b32 $0, {none, half}; }"
    )

    @intrinsic
    def pair(typingctx, low, high):
        """The word of two BF16, the first in its lower half."""
        code = (
            "{ .reg .b32 first, second; mov.b32 first, $1; mov.b32 second, $2; prmt.b32 first, first, second, 0x7632; "
            "mov.b32 $0, first; }"
        )

        def codegen(context, builder, signature, args):
            return inline(builder, ir.FloatType(), args, code, "=f,f,f")

        return types.float32(types.float32, types.float32), codegen
