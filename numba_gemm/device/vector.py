"""128-bit accesses: four consecutive floats of a row in one instruction.

Numba compiles ``x[row, col]`` to one 32-bit access and never merges four of them in global memory. `load4` and `store4`
request the vector access: LDG.E.128 and STG.E.128 on an array in global memory, LDS.128 and STS.128 on one in shared
memory. The address must be a multiple of 16 bytes, and the four floats must be consecutive; neither is checked on the
hardware (a misaligned address faults). PTX ISA: "ld" and "st", vector forms ``.v4.f32``.

Simulator twin: the same four elements, after a check of alignment, of unit column stride and of the number of values.
"""

from __future__ import annotations

from numba import float32

from ..simulator.switch import SIMULATOR, device_function
from .matrix import read4_if
from .units import VECTOR_BYTES

if SIMULATOR:
    import numpy as np

    from .watch import address, read_run, write_run

    def _check_vector(array, row, col):
        """Raise unless the hardware can make this 128-bit access."""
        row_stride, col_stride = array.strides
        place = address(array) + int(row) * row_stride + int(col) * col_stride
        if col_stride != array.itemsize or array.itemsize != 4:
            raise ValueError(f"128-bit access to floats {col_stride} bytes apart; they must be neighbours")
        if place % VECTOR_BYTES:
            raise ValueError(f"misaligned 128-bit access to [{row}, {col}]: address {place:#x} % 16 = {place % 16}")
        if row < 0 or col < 0 or row >= array.shape[0] or col + 4 > array.shape[1]:
            raise IndexError(f"128-bit access to [{row}, {col}:{col + 4}] of an array of shape {array.shape}")

    def load4(array, row, col):
        """Read ``array[row, col:col+4]`` as a tuple in one 128-bit access."""
        _check_vector(array, row, col)
        return read_run(array, [(row, col + i) for i in range(4)])

    def store4(array, row, col, values):
        """Write a tuple of four floats to ``array[row, col:col+4]`` in one 128-bit access."""
        _check_vector(array, row, col)
        if not isinstance(values, tuple) or len(values) != 4:
            got = f"{len(values)} in a {type(values).__name__}" if hasattr(values, "__len__") else repr(values)
            raise ValueError(f"expected a tuple of four floats, got {got}; compute with the floats one by one")
        write_run(array, [(row, col + i) for i in range(4)], map(np.float32, values))

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .matrix import BYTE_POINTER, GLOBAL, MatrixType, element_address

    FLOAT4 = ir.VectorType(ir.FloatType(), 4)
    LANES = tuple(ir.Constant(ir.IntType(32), i) for i in range(4))

    def vector_address(context, builder, array_type, array, row, col):
        """Address of ``array[row, col]`` as a ``<4 x float>*``."""
        if isinstance(array_type, MatrixType):
            address = element_address(builder, array_type, array, row, col)
            return builder.bitcast(address, FLOAT4.as_pointer(GLOBAL))
        base = context.make_array(array_type)(context, builder, array)
        offset = builder.mul(row, builder.extract_value(base.strides, 0))
        offset = builder.add(offset, builder.shl(col, ir.Constant(ir.IntType(64), 2)))
        address = builder.gep(builder.bitcast(base.data, BYTE_POINTER), [offset])
        return builder.bitcast(address, FLOAT4.as_pointer())

    @intrinsic
    def load4(typingctx, array, row, col):
        """Read ``array[row, col:col+4]`` as a tuple in one 128-bit access."""

        def codegen(context, builder, signature, args):
            vector = builder.load(vector_address(context, builder, signature.args[0], *args), align=VECTOR_BYTES)
            return context.make_tuple(
                builder, signature.return_type, [builder.extract_element(vector, i) for i in LANES]
            )

        return types.UniTuple(types.float32, 4)(array, types.int64, types.int64), codegen

    @intrinsic
    def store4(typingctx, array, row, col, values):
        """Write a tuple of four floats to ``array[row, col:col+4]`` in one 128-bit access."""

        def codegen(context, builder, signature, args):
            *place, values = args
            vector = ir.Constant(FLOAT4, ir.Undefined)
            for i, lane in enumerate(LANES):
                vector = builder.insert_element(vector, builder.extract_value(values, i), lane)
            builder.store(vector, vector_address(context, builder, signature.args[0], *place), align=VECTOR_BYTES)
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64, types.UniTuple(types.float32, 4)), codegen


@device_function
def store4_down(array, row, col, values):
    """Write a tuple of four floats to ``array[row:row+4, col]``, by four 32-bit accesses."""
    array[row, col] = values[0]
    array[row + 1, col] = values[1]
    array[row + 2, col] = values[2]
    array[row + 3, col] = values[3]


@device_function
def fetch4(array, row, col):
    """Read ``array[row, col:col+4]`` in one access, or return four zeros outside; the extents are whole vectors."""
    if row < array.shape[0] and col < array.shape[1]:
        return load4(array, row, col)
    return (float32(0), float32(0), float32(0), float32(0))


@device_function
def fetch1(array, row, col):
    """Read ``array[row, col]``, or return zero outside."""
    if row < array.shape[0] and col < array.shape[1]:
        return array[row, col]
    return float32(0)


@device_function
def fetch4_any(array, row, col):
    """Read ``array[row, col:col+4]`` by 32-bit accesses, with zeros outside, for any strides and extents."""
    return read4_if(row < array.shape[0], array, row, col)
