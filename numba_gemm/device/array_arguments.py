"""Arguments of Numba's own launches: arrays as matrices, and a partition that is compiled into the kernel.

Numba passes an array as a descriptor, whose address does not tell the compiler that the memory is global. The kernels
take a `numba_gemm.device.matrix.MatrixType` instead. `matrix_of` makes one from an array, within the kernel.

Simulator twin: the NumPy array behind the argument.
"""

from __future__ import annotations

from functools import lru_cache

from ..simulator.switch import SIMULATOR

if SIMULATOR:
    from ..simulator.patches import plain_array
    from .partition import PartitionArguments

    def matrix_of(aligned, contiguous):
        """Return a function that takes a kernel's array argument and returns the matrix."""
        return plain_array

    def partition_of(partials, counters, words):
        """Return the `PartitionArguments` of a workspace, its counters, and the other words."""
        return PartitionArguments(partials, counters, *words)

else:
    from llvmlite import ir
    from numba.core.errors import TypingError
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .matrix import MatrixType
    from .partition import FIELDS, PARTITION

    LONG = ir.IntType(64)

    @lru_cache(maxsize=8)
    def matrix_of(aligned, contiguous):
        """Return a device function that takes an array and returns the matrix; it refuses other arrays."""
        expected = "a C-contiguous float32 matrix" if contiguous else "a float32 matrix"

        @intrinsic
        def matrix(typingctx, array):
            fits = isinstance(array, types.Array) and array.ndim == 2 and array.dtype == types.float32
            if not fits or (contiguous and array.layout != "C"):
                advice = "; launchable(..., contiguous=False) takes any strides" if fits else ""
                raise TypingError(f"the kernel was passed {array}, expected {expected}{advice}")

            def codegen(context, builder, signature, args):
                base = context.make_array(signature.args[0])(context, builder, args[0])
                words = [builder.extract_value(part, i) for part in (base.shape, base.strides) for i in (0, 1)]
                return _struct(context, builder, signature.return_type, [base.data, *words])

            return MatrixType(aligned)(array), codegen

        return matrix

    @intrinsic
    def partition_of(typingctx, partials, counters, words):
        """Return the `PartitionArguments` of a workspace, its counters (None: no tile is shared), and other words."""

        def codegen(context, builder, signature, args):
            places = [
                builder.ptrtoint(context.make_array(kind)(context, builder, value).data, LONG)
                if isinstance(kind, types.Array)
                else ir.Constant(LONG, 0)
                for kind, value in zip(signature.args, args[:2])
            ]
            others = [builder.extract_value(args[2], i) for i in range(len(FIELDS) - 2)]
            return _struct(context, builder, PARTITION, [*places, *others])

        return PARTITION(partials, counters, types.UniTuple(types.int64, len(FIELDS) - 2)), codegen

    def _struct(context, builder, kind, fields):
        struct = ir.Constant(context.get_value_type(kind), ir.Undefined)
        for i, field in enumerate(fields):
            struct = builder.insert_value(struct, field, i)
        return struct
