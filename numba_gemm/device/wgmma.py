"""Multiplication of small matrices by a warpgroup: four consecutive warps, 64 rows (compute capability 9.0a).

``multiply(kind, columns)`` returns a device function ``(acc, a, b, keep)`` that starts ``acc = A @ B + (acc if keep
else 0)``. A has 64 rows and B `columns` columns, each contiguous along k in shared memory; `a` and `b` are the
descriptors that `descriptor` returns for their addresses. `acc` is a local array of ``columns // 2`` floats. Products
run asynchronously, one after the other:

- `fence` must precede the first product, so that it reads the current registers;
- `show_stores` must precede that, in each thread that has written to shared memory by ordinary stores, and a barrier;
- `commit` closes the group of products started since the last `commit`;
- ``wait(acc, newest)``, which `waiting` returns, waits until at most the `newest` groups are in flight. It takes the
  accumulators that are waited for; otherwise the compiler would move their uses above it.

`multiply_rows` takes rows of A from registers: a word of the upper row, the same of the lower row, then the word four
further on of both. Of the eight words of a product's k, lane l has l % 4 and l % 4 + 4; a word is a TF32, or two 16-bit
numbers. The registers must not change until the products have been waited for (`waiting_for_rows`).

Lane l of warp w holds row ``16 * w + l // 4`` and the row eight below, and of every eight columns ``l % 4 * 2`` and the
next: ``acc[4 * j + 2 * down + right]``.

Kinds: `tf32`, 8 k of 32-bit words whose lower 13 bits are ignored; `bf16` and `f16`, 16 k of 16-bit words.

PTX ISA: "wgmma.mma_async", "fence.proxy.async", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "Matrix
Descriptor Format". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR
from .units import GROUP_BYTES

STEP_BYTES = 32  # along k that one product takes
INSTRUCTIONS = {"tf32": "k8.f32.tf32.tf32", "bf16": "k16.f32.bf16.bf16", "f16": "k16.f32.f16.f16"}

if SIMULATOR:

    def waiting(columns):
        """Raise: the simulator has no matrix instructions."""
        raise NotImplementedError("the simulator has no matrix instructions; compile for 9.0, or run on such a GPU")

    def waiting_for_rows(columns, held):
        """Raise: the simulator has no matrix instructions."""
        return waiting(columns)

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .ptx import FLOAT, LONG, WORD, inline, instruction

    # 128-byte swizzle; groups of eight rows 1024 bytes apart; with this swizzle the leading distance does not matter.
    FORMAT = 1 << 62 | GROUP_BYTES // 16 << 32 | 1 << 16

    @intrinsic
    def descriptor(typingctx, address):
        """Descriptor of 128-byte rows at a multiple of 1024 bytes of shared memory, or of k-steps into them.

        The address is that of the warp's first lane: so the compiler knows that it is the same in all lanes, as it must
        be, and adds steps to it in registers of the warp, from which alone an instruction takes a descriptor.
        """
        code = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"

        def codegen(context, builder, signature, args):
            first = together(inline(builder, WORD, args, code, "=r,r"))
            place = builder.and_(builder.lshr(first, ir.Constant(WORD, 4)), ir.Constant(WORD, 0x3FFF))
            return builder.or_(builder.zext(place, LONG), ir.Constant(LONG, FORMAT))

        return types.uint64(types.uint32), codegen

    def together(call):
        """Keep the compiler from moving a call to where only some of the threads execute it."""
        call.attributes.add("convergent")
        return call

    @instruction(types.void(), "wgmma.fence.sync.aligned;", convergent=True)
    def fence():
        """Order the warp's accesses to registers and shared memory before the products that follow."""

    @instruction(types.void(), "wgmma.commit_group.sync.aligned;", convergent=True)
    def commit():
        """Close the group of products started since the last call."""

    @instruction(types.void(), "fence.proxy.async.shared::cta;", convergent=True)
    def show_stores():
        """Make this thread's stores to shared memory visible to products and copies."""

    def _places(context, builder, kind, array, count):
        """Pointers to the elements of a local array."""
        data = context.make_array(kind)(context, builder, array).data
        return [builder.gep(data, [ir.Constant(WORD, i)]) for i in range(count)]

    def _through(builder, places, code, operands, constraints, fresh=False):
        """Emit PTX that reads and writes all accumulators, or only writes them if `fresh`."""
        count = len(places)
        values = [] if fresh else [builder.load(place) for place in places]
        tied = ",".join(["=f"] * count + constraints + [str(i) for i in range(len(values))])
        struct = ir.LiteralStructType([FLOAT] * count)
        result = together(inline(builder, struct, [*operands, *values], code, tied + ",~{memory}"))
        for i, place in enumerate(places):
            builder.store(builder.extract_value(result, i), place)

    def waiting(columns):
        """Return a `wait` for accumulators of `columns` columns."""
        count = columns // 2

        @intrinsic
        def wait(typingctx, acc, newest):
            """Wait until at most the `newest` groups of products are in flight; `newest` is a constant."""
            if not isinstance(newest, types.IntegerLiteral):
                return None
            code = f"wgmma.wait_group.sync.aligned {newest.literal_value};"

            def codegen(context, builder, signature, args):
                _through(builder, _places(context, builder, signature.args[0], args[0], count), code, [], [])
                return context.get_dummy_value()

            return types.void(acc, newest), codegen

        return wait

    def waiting_for_rows(columns, held):
        """Return a `wait` for accumulators of `columns` columns and the `held` words that their products read."""
        count = columns // 2

        @intrinsic
        def wait(typingctx, acc, rows, newest):
            """Wait until at most the `newest` groups of products are in flight; `newest` is a constant."""
            if not isinstance(newest, types.IntegerLiteral):
                return None
            code = f"wgmma.wait_group.sync.aligned {newest.literal_value};"

            def codegen(context, builder, signature, args):
                # As operands of the wait, so that the registers stay unchanged until here.
                rows = [builder.load(place) for place in _places(context, builder, signature.args[1], args[1], held)]
                places = _places(context, builder, signature.args[0], args[0], count)
                _through(builder, places, code, rows, ["f" if rows[0].type == FLOAT else "r"] * held)
                return context.get_dummy_value()

            return types.void(acc, rows, newest), codegen

        return wait

    def multiply_rows(columns, first, kind="tf32", fresh=False):
        """Return the product ``(acc, rows, b, keep)`` of rows in registers: four words of `rows`, from the `first` on.

        If `fresh`, it never keeps.
        """
        count = columns // 2
        registers = ", ".join(f"${i}" for i in range(count))
        row_registers = ", ".join(f"${count + i}" for i in range(4))
        transposed = "" if kind == "tf32" else ", 0"
        code = (
            f"{{ .reg .pred keep; setp.ne.b32 keep, {0 if fresh else f'${count + 5}'}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{columns}{INSTRUCTIONS[kind]} "
            f"{{{registers}}}, {{{row_registers}}}, ${count + 4}, keep, 1, 1{transposed}; }}"
        )

        @intrinsic
        def product(typingctx, acc, rows, b, keep):
            def codegen(context, builder, signature, args):
                places = _places(context, builder, signature.args[1], args[1], first + 4)[first:]
                words = [builder.bitcast(builder.load(place), WORD) for place in places]
                operands = [*words, args[2]] + ([] if fresh else [builder.zext(args[3], WORD)])
                places = _places(context, builder, signature.args[0], args[0], count)
                _through(builder, places, code, operands, (["r"] * 4 + ["l", "r"])[: len(operands)], fresh)
                return context.get_dummy_value()

            return types.void(acc, rows, types.uint64, types.boolean), codegen

        return product

    def multiply(kind, columns, fresh=False):
        """Return the product ``(acc, a, b, keep)`` of 64 rows and `columns` columns; if `fresh`, it never keeps."""
        count = columns // 2
        registers = ", ".join(f"${i}" for i in range(count))
        transposed = "" if kind == "tf32" else ", 0, 0"  # 16-bit operands could be contiguous across k; these are not
        code = (
            f"{{ .reg .pred keep; setp.ne.b32 keep, {0 if fresh else f'${count + 2}'}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{columns}{INSTRUCTIONS[kind]} "
            f"{{{registers}}}, ${count}, ${count + 1}, keep, 1, 1{transposed}; }}"
        )

        @intrinsic
        def product(typingctx, acc, a, b, keep):
            def codegen(context, builder, signature, args):
                operands = [args[1], args[2]] + ([] if fresh else [builder.zext(args[3], WORD)])
                places = _places(context, builder, signature.args[0], args[0], count)
                _through(builder, places, code, operands, ["l", "l", "r"][: len(operands)], fresh)
                return context.get_dummy_value()

            return types.void(acc, types.uint64, types.uint64, types.boolean), codegen

        return product
