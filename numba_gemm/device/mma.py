"""Multiplication of small matrices by a warp, from registers (compute capability 8.0 and up).

``multiply(kind)`` returns a device function ``(c, a, b)``. Its arguments are tuples of four, four and two 32-bit words,
and it returns ``a @ b + c`` as four. A has 16 rows and B eight columns, each contiguous along k: 8 k of 32-bit words
for `tf32`, 16 k of 16-bit words for `bf16` and `f16`. Of C, lane l holds row l // 4 and the row eight below, and
columns l % 4 * 2 and the next. Of A and B, it holds what `load4` returns. `load4` reads four blocks of eight rows of 16
bytes from shared memory. Lane l passes the address of row l % 8 of block l // 8, and gets word l % 4 of row l // 4 of
each block.

The twin of `multiply` exchanges the fragments of the warp's 32 lanes and adds as `simulator.tensor_core` models it. It
raises if a lane is missing.

`bf16_word` rounds two floats to the nearest BF16 and packs them into a word, as operands of `multiply`. `bf16_floats`
returns the two floats of such a word, and `word_of` the bits of a float.

PTX ISA: "mma.sync", "ldmatrix", "cvt.rn.bf16x2.f32". `load4` has no simulator twin.
"""

from __future__ import annotations

import numpy as np
from numba import uint32

from ..simulator.switch import SIMULATOR, device_function

INSTRUCTIONS = {"tf32": "m16n8k8.row.col.f32.tf32.tf32", "bf16": "m16n8k16.row.col.f32.bf16.bf16"}
INSTRUCTIONS["f16"] = "m16n8k16.row.col.f32.f16.f16"

if SIMULATOR:
    from ..simulator.scheduler import current_thread, exchange
    from ..simulator.tensor_core import add_products
    from .narrow import bf16

    def bf16_word(low, high):
        """Round two floats to BF16 and pack them into a word, the first in its lower half."""
        low, high = (bf16(value).view(np.uint32) for value in (low, high))
        return low >> np.uint32(16) | high

    def _narrow(words, kind):
        """Numbers in an array of 32-bit words, in float64; the lower 13 bits of TF32 are ignored."""
        if kind == "f16":
            return words.view(np.float16).astype(np.float64)
        if kind == "bf16":
            words = words.view(np.uint16).astype(np.uint32) << np.uint32(16)
        else:
            words = words & np.uint32(0xFFFFE000)
        return words.view(np.float32).astype(np.float64)

    def multiply(kind):
        """Return the device function ``(c, a, b)``."""

        def of_warp(lanes):
            """Sums of each lane, from the (c, a, b) of all lanes."""

            def lines(operand, chosen):
                """Block of eight rows of A, or columns of B, from two words of each lane."""
                words = np.array([lane[operand] for lane in lanes], np.uint32)[:, chosen].reshape(8, 4, 2)
                return _narrow(words.transpose(0, 2, 1).reshape(8, 8), kind)

            rows, columns = np.concatenate([lines(1, (0, 2)), lines(1, (1, 3))]), lines(2, (0, 1))
            sums = np.array([lane[0] for lane in lanes], np.float32).reshape(8, 4, 2, 2)  # group, member, row, column
            sums = sums.transpose(2, 0, 1, 3).reshape(16, 8)
            sums = add_products(sums, rows[:, None] * columns[None]).astype(np.float32)
            return sums.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)

        def product(c, a, b):
            return tuple(exchange((c, a, b), of_warp)[current_thread().lane])

        return product

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .ptx import FLOAT, WORD, inline, instruction

    @instruction(types.uint32(types.float32, types.float32), "cvt.rn.bf16x2.f32 $0, $2, $1;", "")
    def bf16_word(low, high):
        """Round two floats to BF16 and pack them into a word, the first in its lower half."""

    @intrinsic
    def load4(typingctx, address):
        """Read a word of each of four blocks of eight rows of 16 bytes; `address` is this lane's row."""
        code = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"

        def codegen(context, builder, signature, args):
            found = inline(builder, ir.LiteralStructType([WORD] * 4), args, code, "=r,=r,=r,=r,r,~{memory}")
            found.attributes.add("convergent")  # must not move to where only some of the lanes execute it
            found_words = [builder.extract_value(found, i) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, found_words)

        return types.UniTuple(types.uint32, 4)(types.uint32), codegen

    def multiply(kind):
        """Return the device function ``(c, a, b)``."""
        code = (
            f"mma.sync.aligned.{INSTRUCTIONS[kind]}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, "
            "{$10, $11, $12, $13};"
        )

        @intrinsic
        def product(typingctx, c, a, b):
            def codegen(context, builder, signature, args):
                c, a, b = args
                operands = [builder.extract_value(a, i) for i in range(4)]
                operands += [builder.extract_value(b, i) for i in range(2)]
                operands += [builder.extract_value(c, i) for i in range(4)]
                struct = ir.LiteralStructType([FLOAT] * 4)
                function = ir.FunctionType(struct, [operand.type for operand in operands])
                constraints = "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3"
                found = builder.asm(function, code, constraints, operands, side_effect=False)
                found.attributes.add("convergent")
                return context.make_tuple(
                    builder, signature.return_type, [builder.extract_value(found, i) for i in range(4)]
                )

            floats = types.UniTuple(types.float32, 4)
            words = types.UniTuple(types.uint32, 4), types.UniTuple(types.uint32, 2)
            return floats(floats, *words), codegen

        return product


@device_function
def bf16_floats(word):
    """Return the two BF16 of a word as floats, that in its lower half first."""
    return uint32(word << uint32(16)).view(np.float32), uint32(word & uint32(0xFFFF0000)).view(np.float32)
