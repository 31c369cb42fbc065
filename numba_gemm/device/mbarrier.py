"""Barriers in shared memory that count arrivals and bytes (compute capability 9.0).

A barrier takes eight bytes at an address that is a multiple of 8. It counts phases. A phase ends when there were as
many arrivals as `initialise` specified and all bytes that `expect` announced have landed. `ended` returns whether the
phase of a given parity has ended; the first, third, ... phases have parity 0. On a fresh barrier, the phase of parity 1
counts as just ended, so a producer that first waits for parity 1 finds its slots free.

PTX ISA: "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait", "fence.mbarrier_init", "cp.async.mbarrier.arrive",
"mapa". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .ptx import inline, instruction

    @instruction(types.void(types.uint32, types.uint32), "mbarrier.init.shared::cta.b64 [$0], $1;")
    def initialise(barrier, arrivals):
        """Set up the barrier at an address in shared memory; its phases end after `arrivals` arrivals."""

    @instruction(types.void(), "fence.mbarrier_init.release.cluster;")
    def initialised():
        """Make the barriers that this thread has set up visible to copies; a barrier of all threads must follow."""

    @instruction(
        types.void(types.uint32, types.uint32),
        "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], $1; }",
    )
    def expect(barrier, count):
        """Arrive, and make the phase wait for `count` more bytes."""

    @instruction(types.void(types.uint32), "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }")
    def arrive(barrier):
        """Arrive; for threads that wait, the earlier reads and writes of this thread are then complete."""

    @instruction(types.uint32(types.uint32, types.uint32), "mapa.shared::cluster.u32 $0, $1, $2;", clobbers="")
    def in_block(barrier, rank):
        """Return the address, for `arrive_at`, of the barrier that the block of this rank in the cluster has there."""

    # The default scope: with that of a cluster, every arrival and every wait would also flush or discard the L1 cache.
    @instruction(types.void(types.uint32), "mbarrier.arrive.shared::cluster.b64 _, [$0];")
    def arrive_at(barrier):
        """Arrive at a barrier of any block of the cluster; for threads of another block, this orders no accesses."""

    @instruction(types.void(types.uint32), "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];")
    def arrive_after_copies(barrier):
        """Arrive as soon as the earlier `cp.async` copies of this thread have landed."""

    @intrinsic
    def ended(typingctx, barrier, parity):
        """Return whether the phase of this parity has ended; the thread may sleep for a while before False."""
        code = "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2; selp.u32 $0, 1, 0, done; }"

        def codegen(context, builder, signature, args):
            found = inline(builder, ir.IntType(32), args, code, "=r,r,r,~{memory}")
            return builder.icmp_unsigned("!=", found, ir.Constant(ir.IntType(32), 0))

        return types.boolean(types.uint32, types.uint32), codegen
