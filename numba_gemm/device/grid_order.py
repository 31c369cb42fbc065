"""Overlap of consecutive kernels on a stream (compute capability 9.0).

A kernel that is launched this way (`kernels.step.Step`, ``overlaps``) may start when every block of the previous kernel
has called `let_next_start` or has ended. The previous kernel's writes are visible after `wait_for_last`.

Below 9.0, where kernels run one after the other, both functions do nothing. The compiler decides this when it reads the
target's number: what Numba makes of a kernel is kept for all targets (`runtime.kept_library`).

PTX ISA: "griddepcontrol". LLVM, "User Guide for NVPTX Back-end": "__nvvm_reflect". Simulator twin: nothing, since
kernels run one after the other there.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR, device_function

if SIMULATOR:

    def let_next_start():
        """Allow the next kernel to start."""

    def wait_for_last():
        """Wait until the previous kernel has ended and its writes are visible."""

else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    from .ptx import NOTHING, WORD, inline
    from .units import OVERLAPPING

    def _target(builder):
        """Return the target's compute capability, 900 for 9.0, which the compiler reads as a constant."""
        name, text = "__CUDA_ARCH", ir.Constant(ir.ArrayType(ir.IntType(8), 12), bytearray(b"__CUDA_ARCH\0"))
        asked = builder.module.globals.get(name)
        if asked is None:
            asked = ir.GlobalVariable(builder.module, text.type, name)
            asked.linkage, asked.global_constant, asked.initializer = "internal", True, text
        of_type = ir.FunctionType(WORD, [ir.IntType(8).as_pointer()])
        reflect = cgutils.get_or_insert_function(builder.module, of_type, "__nvvm_reflect")
        first = ir.Constant(WORD, 0)
        return builder.call(reflect, [builder.gep(asked, [first, first])])

    def _from_9_0(context, builder, code):
        major, minor = OVERLAPPING
        with builder.if_then(
            builder.icmp_unsigned(">=", _target(builder), ir.Constant(WORD, 100 * major + 10 * minor))
        ):
            inline(builder, NOTHING, [], code, "~{memory}")
        return context.get_dummy_value()

    @intrinsic
    def let_next_start(typingctx):
        """Allow the next kernel to start."""

        def codegen(context, builder, signature, args):
            return _from_9_0(context, builder, "griddepcontrol.launch_dependents;")

        return types.void(), codegen

    @intrinsic
    def wait_for_last(typingctx):
        """Wait until the previous kernel has ended and its writes are visible."""

        def codegen(context, builder, signature, args):
            return _from_9_0(context, builder, "griddepcontrol.wait;")

        return types.void(), codegen


@device_function
def nothing():
    """Do nothing, in place of `let_next_start`."""
