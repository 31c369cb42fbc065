"""Rounding of float32 to the formats that tensor cores multiply; results stay float32.

`tf32` keeps 10 bits of fraction, rounds halves away from zero, and sets the lower 13 bits to zero. `bf16` keeps 7 bits,
rounds halves to even, and sets the lower 16 bits to zero. `short_bf16` keeps 6 of these bits, and rounds halves away
from zero. All three have the exponents of float32: a value nearer to the next power of two than to the largest number
rounds to infinity. A NaN stays a NaN; the instruction alone would round away the fraction of some NaNs. `f16` keeps 10
bits of fraction and rounds halves to even; values of 65,520 or more become infinity, and values below 2^-14 keep fewer
bits.

`short_bf16_of_number` is `short_bf16` in two instructions; of a NaN it returns any number.

``pair(low, high)`` packs two BF16 into one 32-bit word, `pair_f16` two F16. `exponent` returns a float's binary
logarithm, rounded down; `power` returns the float of such a logarithm.

PTX ISA: "cvt.rna.tf32.f32", "cvt.rn.bf16.f32" (compute capability 8.0 and up), "cvt.rn.f16.f32", "prmt".
"""

from __future__ import annotations

import numpy as np
from numba import int32, uint32

from ..simulator.switch import SIMULATOR, device_function

if SIMULATOR:

    def _bits(value):
        return int((value if type(value) is np.float32 else np.float32(value)).view(np.uint32))

    def _float(bits):
        return np.uint32(bits).view(np.float32)

    def tf32(value):
        """Round to the nearest TF32."""
        return _float(0x7FFFE000) if value != value else _float(_bits(value) + 0x1000 & 0xFFFFE000)

    def bf16(value):
        """Round to the nearest BF16."""
        bits = _bits(value)
        return _float(0x7FFF0000) if value != value else _float(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000)

    def short_bf16(value):
        """Round to the nearest number of seven significant bits."""
        return _float(0x7FFE0000) if value != value else _float(_bits(value) + 0x10000 & 0xFFFE0000)

    def short_bf16_of_number(value):
        """Round to the nearest number of seven significant bits; of a NaN, return any number."""
        return _float(_bits(value) + 0x10000 & 0xFFFE0000)

    def f16(value):
        """Round to the nearest F16."""
        with np.errstate(over="ignore"):
            return np.float32(np.float16(value))

    def pair_f16(low, high):
        """Pack two F16 into a word, the first in its lower half."""
        return np.array([low, high], np.float16).view(np.float32)[0]

    def pair(low, high):
        """Pack two BF16 into a word, the first in its lower half."""
        return _float(_bits(low) >> 16 | _bits(high) & 0xFFFF0000)

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .ptx import WORD, instruction

    def _rounding(code):
        @instruction(types.float32(types.float32), code, "")
        def rounded(value):
            """Round a float."""

        return rounded

    tf32 = _rounding(
        "{ .reg .b32 bits; .reg .pred none; cvt.rna.tf32.f32 bits, $1; setp.nan.f32 none, $1, $1; "
        "@none mov.b32 bits, 0x7fffe000; mov.b32 $0, bits; }"
    )
    bf16 = _rounding(
        "{ .reg .b16 half; .reg .b16 none; cvt.rn.bf16.f32 half, $1; mov.b16 none, 0; mov.b32 $0, {none, half}; }"
    )

    short_bf16 = _rounding(
        "{ .reg .b32 bits; .reg .pred none; mov.b32 bits, $1; add.u32 bits, bits, 0x10000; "
        "and.b32 bits, bits, 0xfffe0000; setp.nan.f32 none, $1, $1; @none mov.b32 bits, 0x7ffe0000; mov.b32 $0, bits; }"
    )
    f16 = _rounding("{ .reg .b16 half; cvt.rn.f16.f32 half, $1; cvt.f32.f16 $0, half; }")

    @intrinsic
    def short_bf16_of_number(typingctx, value):
        """Round to the nearest number of seven significant bits; of a NaN, return any number."""

        def codegen(context, builder, signature, args):
            bits = builder.add(builder.bitcast(args[0], WORD), ir.Constant(WORD, 0x10000))
            return builder.bitcast(builder.and_(bits, ir.Constant(WORD, 0xFFFE0000)), ir.FloatType())

        return types.float32(types.float32), codegen

    def _pairing(code):
        @instruction(types.float32(types.float32, types.float32), code, "")
        def paired(low, high):
            """Pack two numbers into a word, the first in its lower half."""

        return paired

    pair = _pairing(
        "{ .reg .b32 first, second; mov.b32 first, $1; mov.b32 second, $2; prmt.b32 first, first, second, 0x7632; "
        "mov.b32 $0, first; }"
    )
    pair_f16 = _pairing(
        "{ .reg .b16 first, second; cvt.rn.f16.f32 first, $1; cvt.rn.f16.f32 second, $2; mov.b32 $0, {first, second}; }"
    )


@device_function
def exponent(value):
    """Binary logarithm of a positive float, rounded down; -127 for 0 and subnormals, 128 for infinity."""
    return int32(int32(value.view(np.uint32) >> uint32(23) & uint32(0xFF)) - int32(127))


@device_function
def power(logarithm):
    """Return 2 to the power of an integer from -126 to 127."""
    return uint32(uint32(logarithm + int32(127)) << uint32(23)).view(np.float32)
