"""Elements of FP16 and BF16 matrices in global memory, read as float32.

A kernel passes a matrix of 16-bit elements as any other (`device.matrix`): address, extents, and strides in bytes. The
functions of `reader` know the format. All values of both formats are float32 numbers; a NaN stays a NaN.

PTX ISA: "cvt.f32.f16", "ld.global.v4.b32". Simulator twin: the matrix is an array of uint16.
"""

from __future__ import annotations

from functools import cache

from ..simulator.switch import SIMULATOR

AT_ONCE = 8  # elements of a 128-bit access

if SIMULATOR:
    import numpy as np

    from .matrix import _check_index
    from .watch import address

    def _widen(bits, dtype):
        bits = np.uint16(bits)
        return np.float32(bits.view(np.float16)) if dtype == "float16" else (np.uint32(bits) << 16).view(np.float32)

    @cache
    def reader(dtype):
        """Make functions ``(x, row, col)`` that read one element, and eight of a row in one 128-bit access."""

        def read1(x, row, col):
            _check_index(row, col)
            return _widen(x[row, col], dtype)

        def read8(x, row, col):
            _check_index(row, col)
            place = address(x) + int(row) * x.strides[0] + int(col) * x.strides[1]
            if x.strides[1] != 2 or place % 16:
                raise ValueError(f"128-bit access to [{row}, {col}], at {place:#x}, of strides {x.strides}")
            return tuple(_widen(x[row, col + i], dtype) for i in range(AT_ONCE))

        return read1, read8

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .matrix import GLOBAL, element_address

    HALF, WORD, FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()
    WORDS = ir.VectorType(WORD, AT_ONCE // 2)

    def _of_f16(builder, half):
        return builder.fpext(builder.bitcast(half, ir.HalfType()), FLOAT)

    def _of_bf16(builder, half):
        return builder.bitcast(builder.shl(builder.zext(half, WORD), ir.Constant(WORD, 16)), FLOAT)

    def _halves(builder, word):
        yield builder.trunc(word, HALF)
        yield builder.trunc(builder.lshr(word, ir.Constant(WORD, 16)), HALF)

    @cache
    def reader(dtype):
        """Make functions ``(x, row, col)`` that read one element, and eight of a row in one 128-bit access."""
        widen = {"float16": _of_f16, "bfloat16": _of_bf16}[dtype]

        @intrinsic
        def read1(typingctx, x, row, col):
            def codegen(context, builder, signature, args):
                address = element_address(builder, signature.args[0], *args)
                return widen(builder, builder.load(builder.bitcast(address, HALF.as_pointer(GLOBAL)), align=2))

            return types.float32(x, types.int64, types.int64), codegen

        @intrinsic
        def read8(typingctx, x, row, col):
            def codegen(context, builder, signature, args):
                address = element_address(builder, signature.args[0], *args)
                four = builder.load(builder.bitcast(address, WORDS.as_pointer(GLOBAL)), align=16)
                words = (builder.extract_element(four, ir.Constant(WORD, i)) for i in range(AT_ONCE // 2))
                values = [widen(builder, half) for word in words for half in _halves(builder, word)]
                return context.make_tuple(builder, signature.return_type, values)

            return types.UniTuple(types.float32, AT_ONCE)(x, types.int64, types.int64), codegen

        return read1, read8
