"""Clusters: blocks that run at the same time and reach each other's shared memory (compute capability 9.0).

A launch says how many blocks along x form a cluster (`kernels.step.Step`, ``cluster``); by default, each block is one.
A block's rank in it is ``blockIdx.x % size()``. The functions of `mbarrier`, `bulk_copy` and `tensor_map` for clusters
take a rank, or a mask with a bit for each.

Addresses in shared memory are those of the calling block. A copy for several blocks writes to the same address in each,
and tells the barrier at the same address in each.

PTX ISA: "cluster_nctarank", "barrier.cluster". No simulator twin.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if not SIMULATOR:
    from numba.cuda import types

    from .ptx import instruction

    @instruction(types.uint32(), "mov.u32 $0, %cluster_nctarank;", clobbers="")
    def size():
        """Return the number of blocks in a cluster."""

    @instruction(
        types.void(),
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;",
        convergent=True,
    )
    def await_barriers():
        """Wait until each block of the cluster has set up its barriers; every warp calls it as a whole.

        Of earlier writes, only those before `mbarrier.initialised` are visible then.
        """
