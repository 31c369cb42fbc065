"""Overlap of consecutive kernels on a stream (compute capability 9.0).

A kernel that is launched this way (`driver.Frame`, ``overlapping``) may start when every block of the previous kernel
has called `let_next_start` or has ended. The previous kernel's writes are visible after `wait_for_last`.

PTX ISA: "griddepcontrol". Simulator twin: nothing, since kernels run one after the other there.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if SIMULATOR:

    def let_next_start():
        """Allow the next kernel to start."""

    def wait_for_last():
        """Wait until the previous kernel has ended and its writes are visible."""

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .address import inline

    @intrinsic
    def let_next_start(typingctx):
        """Allow the next kernel to start."""

        def codegen(context, builder, signature, args):
            inline(builder, ir.VoidType(), [], "griddepcontrol.launch_dependents;", "~{memory}")
            return context.get_dummy_value()

        return types.void(), codegen

    @intrinsic
    def wait_for_last(typingctx):
        """Wait until the previous kernel has ended and its writes are visible."""

        def codegen(context, builder, signature, args):
            inline(builder, ir.VoidType(), [], "griddepcontrol.wait;", "~{memory}")
            return context.get_dummy_value()

        return types.void(), codegen
