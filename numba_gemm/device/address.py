"""Addresses as plain integers, for loops that may hold nothing but multiplications.

An index costs a multiplication by a stride, a read of the array descriptor or both at every access, unless the compiler
proves that it grows by a constant. Here the kernel keeps the address itself and adds to it. Addresses are in bytes: 32
bits wide in shared memory, 64 bits in global memory. An added constant becomes part of the instruction.

Each access also takes the array or matrix that contains the address. The hardware ignores it. The simulator uses it to
find the element, and raises if there is none. There, an address in shared memory is a byte offset from the array's
start, and an address in global memory is the host's own.

PTX ISA: "Addresses as Operands", "ld", "st", "cp.async".
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if SIMULATOR:
    import numpy as np

    from .async_copy import start_copy
    from .watch import address as start_of
    from .watch import read_run, write_run

    def shared_address(array):
        """Address of the first float of a flat array in shared memory."""
        return np.uint32(0)

    def _shared_index(array, address, count):
        address = int(address)
        if address % (4 * count):
            raise ValueError(f"misaligned {4 * count}-byte access to shared memory at {address:#x}")
        if address < 0 or address // 4 + count > array.shape[0]:
            raise IndexError(f"address {address:#x} in {array.shape[0]} floats of shared memory")
        return address // 4

    def shared_load4(array, address):
        """Read four consecutive floats from shared memory in one 128-bit access."""
        at = _shared_index(array, address, 4)
        return read_run(array, range(at, at + 4))

    def shared_load2(array, address):
        """Read two consecutive floats from shared memory in one 64-bit access."""
        at = _shared_index(array, address, 2)
        return read_run(array, range(at, at + 2))

    def shared_load1(array, address):
        """Read one float from shared memory."""
        return array[_shared_index(array, address, 1)]

    def shared_store1(array, address, value):
        """Write one float to shared memory."""
        array[_shared_index(array, address, 1)] = value

    def shared_store4(array, address, values):
        """Write four consecutive floats to shared memory in one 128-bit access."""
        at = _shared_index(array, address, 4)
        write_run(array, range(at, at + 4), values)

    def address_of(matrix, row, col):
        """Address of ``matrix[row, col]``; the element need not exist unless it is read."""
        return np.int64(start_of(matrix) + int(row) * matrix.strides[0] + int(col) * matrix.strides[1])

    def row_step(matrix):
        """Bytes from an element to the one in the next row."""
        return np.int64(matrix.strides[0])

    def col_step(matrix):
        """Bytes from an element to the one in the next column."""
        return np.int64(matrix.strides[1])

    def transposed(matrix):
        """View of the same memory with rows and columns swapped."""
        return matrix.T

    def _element(matrix, address):
        """Row and column of an address."""
        offset = int(address) - start_of(matrix)
        (rows, cols), (down, across) = matrix.shape, matrix.strides
        by_rows = _places(offset, down, across)
        by_cols = ((row, col) for col, row in _places(offset, across, down))
        for row, col in (*by_rows, *by_cols):
            if 0 <= row < rows and 0 <= col < cols:
                return row, col
        raise IndexError(f"an address {offset} bytes from the start of a matrix of shape {matrix.shape} is not in it")

    def _places(offset, step, rest_step):
        """Yield pairs of indices whose address has this offset, if the first index has the larger step."""
        first = offset // step if step else 0
        for candidate in (first, first + 1, 0):
            rest = offset - candidate * step
            if rest_step and rest % rest_step == 0:
                yield candidate, rest // rest_step
            elif rest == 0:
                yield candidate, 0

    def _run(matrix, address, count, width=None):
        """Places of neighbours; the access is aligned to `width` floats, by default as many as are accessed."""
        row, col = _element(matrix, address)
        width = width or count
        if int(address) % (4 * width):
            raise ValueError(f"misaligned {4 * width}-byte access to [{row}, {col}]")
        down = matrix.strides[1] != 4 and count > 1
        if down and matrix.strides[0] != 4:
            raise ValueError("a vector access to floats that are no neighbours")
        places = [(row + i, col) if down else (row, col + i) for i in range(count)]
        if places[-1][0] >= matrix.shape[0] or places[-1][1] >= matrix.shape[1]:
            raise IndexError(f"{count} floats from [{row}, {col}] of a matrix of shape {matrix.shape}")
        return places

    def global_load4_or_zero(matrix, address, inside):
        """Read four consecutive floats in one 128-bit access, or return zeros unless ``inside``."""
        return read_run(matrix, _run(matrix, address, 4)) if inside else (np.float32(0),) * 4

    global_load4_over_zeros = global_load4_or_zero

    def global_load4_if(matrix, address, inside):
        """Read four consecutive floats in one 128-bit access; the values are undefined unless ``inside``."""
        return read_run(matrix, _run(matrix, address, 4)) if inside else (np.float32(np.nan),) * 4

    def global_store1_if(matrix, address, value, inside):
        """Write one float if ``inside``."""
        if inside:
            matrix[_element(matrix, address)] = value

    def global_load1_or_zero(matrix, address, inside):
        """Read one float, or return zero unless ``inside``."""
        return read_run(matrix, _run(matrix, address, 1))[0] if inside else np.float32(0)

    def global_load1(matrix, address):
        """Read one float, as a tuple."""
        return read_run(matrix, _run(matrix, address, 1))

    def global_load2(matrix, address):
        """Read two consecutive floats in one 64-bit access."""
        return read_run(matrix, _run(matrix, address, 2))

    def global_load4(matrix, address):
        """Read four consecutive floats in one 128-bit access."""
        return read_run(matrix, _run(matrix, address, 4))

    def global_store(matrix, address, values):
        """Write two or four consecutive floats in one access."""
        write_run(matrix, _run(matrix, address, len(values)), values)

    def copy4_or_zero(array, to, matrix, address, inside):
        """Start a copy of one float to shared memory, or of a zero unless ``inside``."""
        _begin_copy(array, to, matrix, address, 1 if inside else 0, 1)

    def copy16_or_zero(array, to, matrix, address, inside):
        """Start a copy of four consecutive floats to shared memory, or of zeros unless ``inside``."""
        _begin_copy(array, to, matrix, address, 4 if inside else 0, 4)

    def copy4_of(array, to, matrix, address, size):
        """Start a copy of ``size`` bytes, 4 or 0, to shared memory; zeros follow up to 4."""
        _begin_copy(array, to, matrix, address, size // 4, 1)

    def copy16_of(array, to, matrix, address, size):
        """Start a copy of ``size`` bytes, up to 16, to shared memory; zeros follow up to 16."""
        _begin_copy(array, to, matrix, address, size // 4, 4)

    copy16_or_zero_cached, copy16_of_cached = copy16_or_zero, copy16_of  # the same, through the L1 cache

    def copy4_if(array, to, matrix, address, inside):
        """Start a copy of one float to shared memory if ``inside``."""
        if inside:
            _begin_copy(array, to, matrix, address, 1, 1)

    def copy16_if(array, to, matrix, address, inside):
        """Start a copy of four consecutive floats to shared memory if ``inside``."""
        if inside:
            _begin_copy(array, to, matrix, address, 4, 4)

    def copy16_within(array, to, matrix, address, inside):
        """Start a copy of four floats of a column if ``inside``; the last ones may lie between two columns."""
        if inside:
            row, col = _element(matrix, address)
            rows = min(matrix.shape[0] - row, 4)
            if rows < 4 and (col == matrix.shape[1] - 1 or matrix.strides[1] < 4 * (row + 4)):
                raise IndexError(f"four floats from [{row}, {col}] of a matrix of shape {matrix.shape}")
            _begin_copy(array, to, matrix, address, rows, 4)

    def _begin_copy(array, to, matrix, address, read, count):
        at = _shared_index(array, to, count)
        start_copy(array, range(at, at + count), matrix, _run(matrix, address, read, count) if read else [])

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .matrix import BYTE_POINTER, MatrixType, element_address
    from .ptx import FLOAT, LONG, NOTHING, WORD, inline

    BIT = ir.IntType(1)
    FLOAT4 = ir.VectorType(FLOAT, 4)
    LANES = tuple(ir.Constant(WORD, i) for i in range(4))

    @intrinsic
    def shared_address(typingctx, array):
        """Address of the first float of a flat array in shared memory."""

        def codegen(context, builder, signature, args):
            base = context.make_array(signature.args[0])(context, builder, args[0])
            generic = builder.bitcast(base.data, BYTE_POINTER)
            return builder.ptrtoint(builder.addrspacecast(generic, ir.IntType(8).as_pointer(3)), WORD)

        return types.uint32(array), codegen

    def _load(count, space, width):
        """Return an intrinsic that reads consecutive floats in one access."""

        def load(typingctx, array, address):
            def codegen(context, builder, signature, args):
                pointer = builder.inttoptr(args[1], ir.VectorType(FLOAT, count).as_pointer(space))
                vector = builder.load(pointer, align=4 * count)
                values = [builder.extract_element(vector, lane) for lane in LANES[:count]]
                return context.make_tuple(builder, signature.return_type, values)

            return types.UniTuple(types.float32, count)(array, width), codegen

        return intrinsic(load)

    shared_load4, shared_load2 = _load(4, 3, types.uint32), _load(2, 3, types.uint32)
    global_load1, global_load2, global_load4 = (_load(count, 1, types.int64) for count in (1, 2, 4))

    @intrinsic
    def shared_load1(typingctx, array, address):
        """Read one float from shared memory."""

        def codegen(context, builder, signature, args):
            return builder.load(builder.inttoptr(args[1], FLOAT.as_pointer(3)), align=4)

        return types.float32(array, types.uint32), codegen

    @intrinsic
    def shared_store4(typingctx, array, address, values):
        """Write four consecutive floats to shared memory in one 128-bit access."""

        def codegen(context, builder, signature, args):
            vector = ir.Constant(FLOAT4, ir.Undefined)
            for i, lane in enumerate(LANES):
                vector = builder.insert_element(vector, builder.extract_value(args[2], i), lane)
            builder.store(vector, builder.inttoptr(args[1], FLOAT4.as_pointer(3)), align=16)
            return context.get_dummy_value()

        return types.void(array, types.uint32, types.UniTuple(types.float32, 4)), codegen

    @intrinsic
    def shared_store1(typingctx, array, address, value):
        """Write one float to shared memory."""

        def codegen(context, builder, signature, args):
            builder.store(args[2], builder.inttoptr(args[1], FLOAT.as_pointer(3)), align=4)
            return context.get_dummy_value()

        return types.void(array, types.uint32, types.float32), codegen

    @intrinsic
    def address_of(typingctx, matrix, row, col):
        """Address of ``matrix[row, col]``; the element need not exist unless it is read."""

        def codegen(context, builder, signature, args):
            return builder.ptrtoint(element_address(builder, signature.args[0], *args), LONG)

        return types.int64(matrix, types.int64, types.int64), codegen

    ROW_STRIDE, COL_STRIDE = 3, 4  # fields of a MatrixType

    def _field(index, summary):
        def read(typingctx, matrix):
            def codegen(context, builder, signature, args):
                if index == COL_STRIDE and signature.args[0].aligned:
                    return ir.Constant(LONG, 4)
                return builder.extract_value(args[0], index)

            return types.int64(matrix), codegen

        read.__doc__ = summary
        return intrinsic(read)

    row_step = _field(ROW_STRIDE, "Bytes from an element to the one in the next row.")
    col_step = _field(COL_STRIDE, "Bytes from an element to the one in the next column.")

    @intrinsic
    def transposed(typingctx, matrix):
        """View of the same memory with rows and columns swapped."""

        def codegen(context, builder, signature, args):
            fields = [builder.extract_value(args[0], i) for i in (0, 2, 1, 4, 3)]
            result = args[0]
            for i, field in enumerate(fields):
                result = builder.insert_value(result, field, i)
            return result

        return MatrixType(False)(matrix), codegen

    def _load4(code, constraints):
        def load(typingctx, matrix, address, inside):
            def codegen(context, builder, signature, args):
                operands = [builder.zext(args[2], WORD), args[1]]
                four = ir.LiteralStructType([FLOAT] * 4)
                values = inline(builder, four, operands, code, constraints)
                return context.make_tuple(
                    builder, signature.return_type, [builder.extract_value(values, i) for i in range(4)]
                )

            return types.UniTuple(types.float32, 4)(matrix, types.int64, types.boolean), codegen

        return load

    def _zeros(guard=""):
        return " ".join(f"{guard}mov.f32 ${i}, 0f00000000;" for i in range(4))

    _LOAD = "setp.ne.b32 p, $4, 0; @p ld.global.v4.f32 {$0, $1, $2, $3}, [$5];"
    _FOUR = "=&f,=&f,=&f,=&f,r,l"
    # Predicated rather than branched: a branch would end the run of multiplications. If all writes of a register are
    # predicated, ptxas assumes that it holds a value before them, and reserves it throughout the loop around. Zeros
    # that are written first, without a predicate, prevent this.
    global_load4_or_zero = intrinsic(_load4("{ .reg .pred p; " + _LOAD + " " + _zeros("@!p ") + " }", _FOUR))
    global_load4_over_zeros = intrinsic(_load4("{ .reg .pred p; " + _zeros() + " " + _LOAD + " }", _FOUR))
    global_load4_if = intrinsic(_load4("{ .reg .pred p; " + _LOAD + " }", _FOUR))

    @intrinsic
    def global_load1_or_zero(typingctx, matrix, address, inside):
        """Read one float, or return zero unless ``inside``."""
        code = "{ .reg .pred p; mov.f32 $0, 0f00000000; setp.ne.b32 p, $2, 0; @p ld.global.f32 $0, [$1]; }"

        def codegen(context, builder, signature, args):
            return inline(builder, FLOAT, [args[1], builder.zext(args[2], WORD)], code, "=&f,l,r")

        return types.float32(matrix, types.int64, types.boolean), codegen

    @intrinsic
    def global_store1_if(typingctx, matrix, address, value, inside):
        """Write one float if ``inside``."""
        code = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }"

        def codegen(context, builder, signature, args):
            _, address, value, inside = args
            inline(builder, NOTHING, [address, value, builder.zext(inside, WORD)], code, "l,f,r")
            return context.get_dummy_value()

        return types.void(matrix, types.int64, types.float32, types.boolean), codegen

    @intrinsic
    def global_store(typingctx, matrix, address, values):
        """Write two or four consecutive floats in one access."""
        count = len(values)
        code = f"st.global.v{count}.f32 [$0], {{{', '.join(f'${i + 1}' for i in range(count))}}};"

        def codegen(context, builder, signature, args):
            floats = [builder.extract_value(args[2], i) for i in range(count)]
            inline(builder, NOTHING, [args[1], *floats], code, "l" + ",f" * count)
            return context.get_dummy_value()

        return types.void(matrix, types.int64, types.UniTuple(types.float32, count)), codegen

    def _copy(size, cache, otherwise):
        """Return an intrinsic that copies ``size`` bytes if it is told so, and if not, "zeros" or "nothing".

        If ``otherwise`` is "fewer", it is told how many bytes to copy, and writes zeros in place of the others.
        """
        copy = f"cp.async.{cache}.shared.global [$0], [$1], {size}"
        guarded = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p " + copy + "; }"
        code = guarded if otherwise == "nothing" else f"{copy}, $2;"
        told = types.int32 if otherwise == "fewer" else types.boolean

        def start(typingctx, array, to, matrix, address, read):
            def codegen(context, builder, signature, args):
                _, to, _, address, read = args
                if otherwise == "zeros":  # a source size of 0 reads nothing and writes zeros
                    read = builder.select(read, ir.Constant(WORD, size), ir.Constant(WORD, 0))
                elif otherwise == "nothing":
                    read = builder.zext(read, WORD)
                inline(builder, NOTHING, [to, address, read], code, "r,l,r,~{memory}")
                return context.get_dummy_value()

            return types.void(array, types.uint32, matrix, types.int64, told), codegen

        return intrinsic(start)

    copy4_of, copy4_or_zero, copy4_if = (_copy(4, "ca", otherwise) for otherwise in ("fewer", "zeros", "nothing"))
    copy16_of, copy16_or_zero, copy16_if = (_copy(16, "cg", otherwise) for otherwise in ("fewer", "zeros", "nothing"))
    copy16_of_cached, copy16_or_zero_cached = (_copy(16, "ca", otherwise) for otherwise in ("fewer", "zeros"))
    copy16_within = copy16_if
