"""Kernel-side view of a matrix in global memory: an address, two extents and two strides.

Kernels read and write ``x[row, col]`` and read ``x.shape``, as with any array. The type is `MatrixType` on the
hardware, and a NumPy array in the simulator. A Numba array of layout 'A' would do as well, but its address
arithmetic hides from the compiler that the memory is global (it emits generic LD and ST), and its signed indices may
count from the end (two more instructions per index). A `MatrixType` index must not be negative, and nothing is
checked.

A matrix whose type is `aligned` promises unit column stride, and rows and a first element at multiples of 16 bytes.
`vector.load4` needs that, and each address takes one multiplication less. Rows are whole vectors of four, unless the
kernel is for rows that end within one.
"""

from __future__ import annotations

import numpy as np

from ..simulator.switch import SIMULATOR

if SIMULATOR:
    from .watch import address, like

    def _check_index(row, col):
        """Raise for negative indices: NumPy would count from the end, while the hardware reads before the matrix."""
        if row < 0 or col < 0:
            raise IndexError(f"negative index [{row}, {col}] of a matrix in global memory")

    class _Elsewhere:
        """Array interface of a matrix moved by `step` bytes; keeps the memory's owner alive."""

        def __init__(self, matrix, step):
            self.owner = matrix
            self.__array_interface__ = {
                "data": (address(matrix) + int(step), False),
                "shape": matrix.shape,
                "strides": matrix.strides,
                "typestr": matrix.dtype.str,
                "version": 3,
            }

    def shifted(matrix, step):
        """Return the matrix of the same extents and strides that begins `step` bytes further on."""
        return like(np.asarray(_Elsewhere(matrix, step)), matrix) if step else matrix

    def read4_if(inside, matrix, row, col):
        """Read ``matrix[row, col:col+4]``; floats right of the matrix are zero, and all four unless ``inside``."""
        _check_index(row, col)
        values = [np.float32(0)] * 4
        for i in range(4):
            if inside and col + i < matrix.shape[1]:
                values[i] = matrix[row, col + i]
        return tuple(values)

    def write4_if(inside, matrix, row, col, values):
        """Write the floats of ``matrix[row, col:col+4]`` that lie in the matrix, if ``inside``."""
        _check_index(row, col)
        for i in range(4):
            if inside and col + i < matrix.shape[1]:
                matrix[row, col + i] = np.float32(values[i])

    def write4_partial(inside, matrix, row, col, values):
        """Write as `write4_if`, in one 128-bit access if all four floats lie in the matrix, whose rows are aligned."""
        write4_if(inside, matrix, row, col, values)

else:
    import operator

    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import core_models, intrinsic, overload, overload_attribute, register_model

    BYTE_POINTER = ir.IntType(8).as_pointer()
    GLOBAL = 1  # LLVM's address space of global memory, which it does not infer through a choice of pointers
    GLOBAL_BYTE_POINTER = ir.IntType(8).as_pointer(GLOBAL)
    FIELDS = ("data", "rows", "cols", "row_stride", "col_stride")  # in the order of the kernel's parameters

    class MatrixType(types.Type):
        """Numba type of a float32 matrix in global memory; extents in elements, strides in bytes."""

        def __init__(self, aligned: bool):
            self.aligned = aligned
            super().__init__(name=f"Matrix(float32, {'aligned' if aligned else 'any strides'})")

    @register_model(MatrixType)
    class MatrixModel(core_models.StructModel):
        def __init__(self, dmm, fe_type):
            words = [(name, types.int64) for name in FIELDS[1:]]
            super().__init__(dmm, fe_type, [("data", types.CPointer(types.float32)), *words])

    def element_address(builder, matrix_type, matrix, row, col):
        """Byte address of ``matrix[row, col]``."""
        generic = builder.bitcast(builder.extract_value(matrix, 0), BYTE_POINTER)
        data = builder.addrspacecast(generic, GLOBAL_BYTE_POINTER)
        row_offset = builder.mul(row, builder.extract_value(matrix, 3))
        if matrix_type.aligned:
            col_offset = builder.shl(col, ir.Constant(ir.IntType(64), 2))
        else:
            col_offset = builder.mul(col, builder.extract_value(matrix, 4))
        return builder.gep(builder.gep(data, [row_offset]), [col_offset])

    @intrinsic
    def shifted(typingctx, matrix, step):
        """Return the matrix of the same extents and strides that begins `step` bytes further on."""

        def codegen(context, builder, signature, args):
            matrix, step = args
            data = builder.extract_value(matrix, 0)
            moved = builder.gep(builder.bitcast(data, BYTE_POINTER), [step])
            return builder.insert_value(matrix, builder.bitcast(moved, data.type), 0)

        return matrix(matrix, types.int64), codegen

    @intrinsic
    def read_element(typingctx, matrix, row, col):
        def codegen(context, builder, signature, args):
            address = element_address(builder, signature.args[0], *args)
            return builder.load(builder.bitcast(address, ir.FloatType().as_pointer(GLOBAL)), align=4)

        return types.float32(matrix, types.int64, types.int64), codegen

    @intrinsic
    def write_element(typingctx, matrix, row, col, value):
        def codegen(context, builder, signature, args):
            *place, value = args
            address = element_address(builder, signature.args[0], *place)
            builder.store(value, builder.bitcast(address, ir.FloatType().as_pointer(GLOBAL)), align=4)
            return context.get_dummy_value()

        return types.void(matrix, types.int64, types.int64, types.float32), codegen

    def masked_neighbours(builder, matrix_type, inside, matrix, row, col):
        """Yield, for four consecutive floats, whether each lies inside (an i32 for inline PTX) and its address."""
        start = element_address(builder, matrix_type, matrix, row, col)
        for i in range(4):
            step = ir.Constant(ir.IntType(64), i)
            here = builder.icmp_signed("<", builder.add(col, step), builder.extract_value(matrix, 2))
            address = builder.gep(start, [builder.mul(step, builder.extract_value(matrix, 4))])
            yield builder.zext(builder.and_(inside, here), ir.IntType(32)), address

    @intrinsic
    def read4_if(typingctx, inside, matrix, row, col):
        """Read ``matrix[row, col:col+4]``; floats right of the matrix are zero, and all four unless ``inside``.

        The loads are predicated: four branches would be too much for the compiler to unroll around.
        """
        function = ir.FunctionType(ir.FloatType(), [ir.IntType(32), GLOBAL_BYTE_POINTER])
        code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; mov.f32 $0, 0f00000000; @p ld.global.f32 $0, [$2]; }"

        def codegen(context, builder, signature, args):
            values = [
                builder.asm(function, code, "=f,r,l", [here, address], side_effect=True)
                for here, address in masked_neighbours(builder, signature.args[1], *args)
            ]
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(types.float32, 4)(types.boolean, matrix, types.int64, types.int64), codegen

    @intrinsic
    def write4_if(typingctx, inside, matrix, row, col, values):
        """Write the floats of ``matrix[row, col:col+4]`` that lie in the matrix, if ``inside``."""
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(32), GLOBAL_BYTE_POINTER, ir.FloatType()])
        code = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.f32 [$1], $2; }"

        def codegen(context, builder, signature, args):
            *place, values = args
            for i, (here, address) in enumerate(masked_neighbours(builder, signature.args[1], *place)):
                value = builder.extract_value(values, i)
                builder.asm(function, code, "r,l,f", [here, address, value], side_effect=True)
            return context.get_dummy_value()

        return types.void(types.boolean, matrix, types.int64, types.int64, types.UniTuple(types.float32, 4)), codegen

    @intrinsic
    def write4_partial(typingctx, inside, matrix, row, col, values):
        """Write as `write4_if`, in one 128-bit access if all four floats lie in the matrix, whose rows are aligned."""
        I32 = ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [I32, I32, GLOBAL_BYTE_POINTER, *[ir.FloatType()] * 4])
        code = (
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.v4.f32 [$2], {$3, $4, $5, $6}; "
            "setp.gt.s32 p, $1, 0; @p st.global.f32 [$2], $3; setp.gt.s32 p, $1, 1; @p st.global.f32 [$2+4], $4; "
            "setp.gt.s32 p, $1, 2; @p st.global.f32 [$2+8], $5; }"
        )

        def codegen(context, builder, signature, args):
            inside, matrix, row, col, values = args
            address = element_address(builder, signature.args[1], matrix, row, col)
            left = builder.sub(builder.extract_value(matrix, 2), col)
            whole = builder.icmp_signed(">=", left, ir.Constant(left.type, 4))
            single = builder.select(whole, ir.Constant(left.type, 0), left)  # floats that are written one by one
            single = builder.select(inside, builder.trunc(single, I32), ir.Constant(I32, 0))
            whole = builder.zext(builder.and_(inside, whole), I32)
            floats = [builder.extract_value(values, i) for i in range(4)]
            builder.asm(function, code, "r,r,l,f,f,f,f", [whole, single, address, *floats], side_effect=True)
            return context.get_dummy_value()

        return types.void(types.boolean, matrix, types.int64, types.int64, types.UniTuple(types.float32, 4)), codegen

    @intrinsic
    def extents(typingctx, matrix):
        def codegen(context, builder, signature, args):
            shape = [builder.extract_value(args[0], i) for i in (1, 2)]
            return context.make_tuple(builder, signature.return_type, shape)

        return types.UniTuple(types.int64, 2)(matrix), codegen

    @overload(operator.getitem)
    def matrix_getitem(matrix, index):
        if isinstance(matrix, MatrixType):
            return lambda matrix, index: read_element(matrix, index[0], index[1])

    @overload(operator.setitem)
    def matrix_setitem(matrix, index, value):
        if isinstance(matrix, MatrixType):
            return lambda matrix, index, value: write_element(matrix, index[0], index[1], value)

    @overload_attribute(MatrixType, "shape")
    def matrix_shape(matrix):
        return lambda matrix: extents(matrix)

    def kernel_signature(aligned: bool, partition: bool = False) -> tuple[types.Type, ...]:
        """Numba types of every GEMM kernel's parameters (alpha, a, b, beta, c), and of a partition behind them."""
        from .partition import PARTITION

        matrix = MatrixType(aligned)
        return (types.float32, matrix, matrix, types.float32, matrix, *((PARTITION,) if partition else ()))

    def variant_signature(variant) -> tuple[types.Type, ...]:
        """Return the Numba types of a kernel's parameters, for a `numba_gemm.kernels.ladder.stage.Variant`."""
        from .partition import PARTITION

        a, b, c = MatrixType(variant.a == "along4"), MatrixType(False), MatrixType(variant.c_aligned)
        vectors = types.UniTuple(types.Array(types.float32, 1, "A"), variant.vectors)
        return types.float32, a, b, types.float32, c, PARTITION, vectors
