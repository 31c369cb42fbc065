"""A counter in global memory by which blocks learn how far all of them are.

PTX ISA: "atom", "ld.relaxed". Simulator twin: a counter that is far ahead, since blocks run one after another.
"""

from __future__ import annotations

from numba import int32

from ..simulator.switch import SIMULATOR

if SIMULATOR:

    def add_to_counter(counter, count):
        return int32(1 << 30)

    def read_counter(counter):
        return int32(1 << 30)

    def clear_counter(counter):
        pass

else:
    from numba.cuda import types

    from .ptx import instruction

    @instruction(types.int32(types.int64, types.int32), "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", "")
    def add_to_counter(counter, count):
        """Add to the counter at an address; return what it held before."""

    @instruction(types.int32(types.int64), "ld.relaxed.gpu.global.u32 $0, [$1];", "")
    def read_counter(counter):
        """Read the counter at an address."""

    @instruction(types.void(types.int64), "st.relaxed.gpu.global.u32 [$0], 0;", "")
    def clear_counter(counter):
        """Set the counter at an address to zero."""
