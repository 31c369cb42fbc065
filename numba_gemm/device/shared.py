"""Matrices within one flat array of shared memory.

``cuda.shared.array(0, float32)`` is all the dynamic shared memory of a launch, as a one-dimensional array; it may
exceed the 48 KB of static shared memory. `shared_view` returns a part of it as a matrix, in row-major order.

Simulator twin: the same part of the same array, reshaped.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if SIMULATOR:

    def shared_view(flat, start, rows, cols):
        """Return a (rows, cols) matrix that begins ``start`` floats into a flat array."""
        if start < 0 or start + rows * cols > flat.shape[0]:
            raise IndexError(f"a {rows} x {cols} matrix at {start} does not fit into {flat.shape[0]} floats")
        return flat[start : start + rows * cols].reshape(rows, cols)

else:
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def shared_view(typingctx, flat, start, rows, cols):
        """Return a (rows, cols) matrix that begins ``start`` floats into a flat array."""
        matrix_type = types.Array(types.float32, 2, "C")

        def codegen(context, builder, signature, args):
            flat, start, rows, cols = args
            base = context.make_array(signature.args[0])(context, builder, flat)
            view = context.make_array(matrix_type)(context, builder)
            row_stride = builder.mul(cols, base.itemsize)
            context.populate_array(
                view,
                data=builder.gep(base.data, [start]),
                shape=[rows, cols],
                strides=[row_stride, base.itemsize],
                itemsize=base.itemsize,
                meminfo=base.meminfo,
                parent=base.parent,
            )
            return view._getvalue()

        return matrix_type(flat, types.int64, types.int64, types.int64), codegen
