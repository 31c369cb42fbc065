"""Values that the compiler must compute where they are written.

`pinned` hides from the compiler how a value was computed. Otherwise, to save a register, the compiler would recompute
cheap values in every iteration of a loop, which costs instructions where registers are plentiful.

`product` is computed where it is used. Otherwise, the compiler would compute many products long before, and hold all of
them in registers.

`in_step` keeps the lanes of a warp together that branch on a condition. Otherwise, unless the compiler knows that they
agree, it takes them for apart from there on, and main loops have no uniform registers.

PTX ISA: "shfl.sync", "mul", "vote.sync".
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR, device_function


@device_function
def as_is(condition):
    """Return a condition; where the compiler knows that lanes agree, in place of `in_step`."""
    return condition


if SIMULATOR:

    def pinned(value):
        """Return the 32-bit value unchanged; the compiler must keep it and cannot recompute it."""
        return value

    def product(x, y):
        """Return ``x * y``, which the compiler must compute in place."""
        return x * y

    def in_step(condition):
        """Return the condition, on the hardware whether it holds for any lane of the warp; all lanes must take part."""
        return condition

else:
    from numba import cuda, uint32
    from numba.cuda import types

    from .ptx import instruction

    def _in_any_lane(condition):
        """Return whether a condition holds for any lane of the warp, which must all take part."""
        return cuda.any_sync(uint32(0xFFFFFFFF), condition)

    in_step = device_function(_in_any_lane)

    @instruction(
        types.uint32(types.uint32),
        "{ .reg .b32 lane; mov.u32 lane, %laneid; shfl.sync.idx.b32 $0, $1, lane, 31, 0xffffffff; }",
        "",
    )
    def pinned(value):
        """Return the 32-bit value unchanged; the compiler must keep it and cannot recompute it."""

    @instruction(types.float32(types.float32, types.float32), "mul.rn.f32 $0, $1, $2;", "")
    def product(x, y):
        """Return ``x * y``, which the compiler must compute in place."""
