"""Stores of small matrices by a warp, from registers to shared memory (compute capability 9.0 and up).

The inverse of `numba_gemm.device.mma.load4`, for four blocks of eight rows of 16 bytes. Of each block, lane l holds
word l % 4 of row l // 4; it passes the address of row l % 8 of block l // 8. ``store4`` writes the blocks like this.
``store4_transposed`` takes each block's 16-bit numbers by columns: word l % 4 of row l // 4 holds rows l % 4 * 2 and
the next of column l // 4. So one instruction stores a lane's accumulators of two neighbouring columns, rounded to 16
bits, to rows or to columns. There is no bank conflict if the eight rows of 16 bytes lie in different banks.

PTX ISA: "stmatrix". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if SIMULATOR:

    def store4(address, words):
        """Raise: the simulator has no matrix instructions."""
        raise NotImplementedError("the simulator has no matrix instructions; compile for 9.0 or later, or run on a GPU")

    store4_transposed = store4

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .address import inline

    def _storing(name, qualifier, meaning):
        def storing(typingctx, address, words):
            code = f"stmatrix.sync.aligned.m8n8.x4{qualifier}.shared.b16 [$0], {{$1, $2, $3, $4}};"

            def codegen(context, builder, signature, args):
                place, values = args
                operands = [place, *(builder.extract_value(values, i) for i in range(4))]
                done = inline(builder, ir.VoidType(), operands, code, "r,r,r,r,r,~{memory}")
                done.attributes.add("convergent")  # must not move to where only some of the lanes execute it
                return context.get_dummy_value()

            return types.void(types.uint32, types.UniTuple(types.uint32, 4)), codegen

        storing.__name__, storing.__doc__ = name, meaning
        return intrinsic(storing)

    store4 = _storing("store4", "", "Write four blocks of eight rows of 16 bytes; `address` is this lane's row.")
    store4_transposed = _storing("store4_transposed", ".trans", "Write four blocks of 8x8 16-bit numbers, transposed.")
