"""Asynchronous bulk copies from global to shared memory, started by one thread (compute capability 9.0).

`bulk_load` starts a copy of a multiple of 16 bytes between addresses that are multiples of 16, and returns. An
mbarrier counts the bytes that have landed; they must have been announced to it (`mbarrier.expect`). `bulk_load_in` is
the same for several blocks of a cluster.

PTX ISA: "cp.async.bulk". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from numba.cuda import types

    from .ptx import instruction

    @instruction(
        types.void(types.uint32, types.int64, types.uint32, types.uint32),
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    )
    def bulk_load(to, source, count, barrier):
        """Start copying `count` bytes from an address in global memory to one in shared memory."""

    @instruction(
        types.void(types.uint32, types.int64, types.uint32, types.uint32, types.uint32),
        "{ .reg .b16 mask; cvt.u16.u32 mask, $4; "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[$0], [$1], $2, [$3], mask; }",
    )
    def bulk_load_in(to, source, count, barrier, blocks):
        """Start copying `count` bytes to the same address in all `blocks`, a mask of ranks."""
