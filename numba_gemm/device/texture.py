"""Reads through the texture unit, and clocks to time such reads, which Numba lacks.

`texel` reads a one-dimensional texture object over linear memory. The host creates the object (``cuTexObjectCreate``)
and passes it to the kernel as a 64-bit number. One TEX instruction returns up to four 32-bit channels of the texel at
an index, as integers, without filtering, scaling or normalization. The texture unit's cache is L1; it does not see
writes by the same kernel.

`cycles` reads the multiprocessor's clock, which runs at the multiprocessor's frequency. `nanoseconds` reads the GPU's
clock, which advances in steps of up to a microsecond. Memory accesses are not moved across either read.

PTX ISA: "tex", "Indirect Texture Access", "%clock64", "%globaltimer".

Simulator twin: a texture is an array of texels by channels, and an index outside of it raises. Missing channels are 0,
except the fourth, which is 1, as on the hardware. Both clocks return the host's nanoseconds.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if SIMULATOR:
    import time

    import numpy as np

    from .watch import read_run

    def texel(texture, x):
        """Return the four channels of the texel at an index, as unsigned integers."""
        count, channels = texture.shape
        if not 0 <= x < count:
            raise IndexError(f"texel {x} of a texture of {count}")
        found = read_run(texture, [(int(x), channel) for channel in range(channels)])
        return (*found, *map(np.uint32, (0, 0, 0, 1)[channels:]))

    def cycles():
        """The multiprocessor's clock."""
        return np.uint64(time.perf_counter_ns())

    def nanoseconds():
        """The GPU's clock."""
        return np.uint64(time.perf_counter_ns())

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .ptx import WORD, inline, instruction

    @intrinsic
    def texel(typingctx, texture, x):
        """Return the four channels of the texel at an index, as unsigned integers."""
        code = "tex.1d.v4.u32.s32 {$0, $1, $2, $3}, [$4, {$5}];"

        def codegen(context, builder, signature, args):
            values = inline(builder, ir.LiteralStructType([WORD] * 4), args, code, "=r,=r,=r,=r,l,r,~{memory}")
            return context.make_tuple(
                builder, signature.return_type, [builder.extract_value(values, i) for i in range(4)]
            )

        return types.UniTuple(types.uint32, 4)(types.uint64, types.uint32), codegen

    @instruction(types.uint64(), "mov.u64 $0, %clock64;")
    def cycles():
        """Return the multiprocessor's clock."""

    @instruction(types.uint64(), "mov.u64 $0, %globaltimer;")
    def nanoseconds():
        """Return the GPU's clock."""
