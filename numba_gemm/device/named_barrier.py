"""Barriers of some of a block's threads, by number.

A barrier is complete when as many threads have arrived as its calls say, a multiple of 32; it then starts again. All
lanes of a warp must make a call together. Number 0 is that of ``cuda.syncthreads``; there are 16.

PTX ISA: "bar.sync", "bar.arrive". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from numba.cuda import types

    from .ptx import instruction

    @instruction(types.void(types.uint32, types.uint32), "bar.sync $0, $1;", convergent=True)
    def arrive_and_wait(number, threads):
        """Arrive, and wait until so many threads have arrived."""

    @instruction(types.void(types.uint32, types.uint32), "bar.arrive $0, $1;", convergent=True)
    def arrive(number, threads):
        """Arrive."""
