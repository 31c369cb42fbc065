"""Inline PTX in intrinsics.

Where an intrinsic is one instruction whose operands are its arguments, and its result if it has one, `instruction`
makes it of its name, parameters and docstring.

LLVM, "Inline Assembler Expressions". PTX ISA: each module names the entries of its instructions. No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from functools import wraps
    from inspect import Parameter, Signature, signature

    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    WORD, LONG, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
    NOTHING = ir.VoidType()
    LETTERS = {types.float32: "f", types.int64: "l", types.uint64: "l"}  # of operands' constraints; of others "r"

    def inline(builder, result, operands, code, constraints):
        """Emit inline PTX that the compiler must keep in place."""
        function = ir.FunctionType(result, [operand.type for operand in operands])
        return builder.asm(function, code, constraints, operands, side_effect=True)

    def instruction(typed, code, clobbers="~{memory}", convergent=False):
        """Return a decorator that makes an intrinsic of a function without a body.

        `typed` has the types of its result and its parameters. In `code`, ``$0`` is the result, if there is one, and
        the parameters follow. By default, the compiler moves no access to memory across it. A `convergent` one is not
        moved to where only some of the threads execute it.
        """
        constraints = [LETTERS.get(one, "r") for one in typed.args]
        if typed.return_type != types.void:
            constraints.insert(0, "=" + LETTERS.get(typed.return_type, "r"))
        if clobbers:
            constraints.append(clobbers)

        def made(function):
            @wraps(function)
            def declare(typingctx, *given):
                def codegen(context, builder, signature, args):
                    kind = NOTHING if typed.return_type == types.void else context.get_value_type(typed.return_type)
                    call = inline(builder, kind, args, code, ",".join(constraints))
                    if convergent:
                        call.attributes.add("convergent")
                    return context.get_dummy_value() if kind is NOTHING else call

                return typed, codegen

            own = signature(function).parameters.values()
            declare.__signature__ = Signature([Parameter("typingctx", Parameter.POSITIONAL_OR_KEYWORD), *own])
            return intrinsic(declare)

        return made
