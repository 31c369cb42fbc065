"""The ladder: one optimisation per stage, from the definition of the product to asynchronously fed warp tiles.

`STAGES` is the single list that drives the API, the tests, the benchmark and the inspector, in climbing order.

Two idioms recur in the kernels, for the sake of what Numba makes of them. Loops over k are ``while`` loops: Numba's
``range`` selects its next value, and the compiler, which then does not see that an index grows by a constant,
computes every address anew. And a thread's index is taken as ``uint32``: what may be negative is divided with
Python's signs and indexes from an array's end, which costs instructions, and hides from the compiler which elements
are neighbours.
"""

from . import (
    async_copy,
    coalesced,
    conflict_free,
    double_buffered,
    lean_loop,
    naive,
    register_prefetch,
    shared_tile,
    stream_k,
    thin,
    thread_tile_1d,
    thread_tile_2d,
    vectorized,
    warp_tiled,
)
from .stage import LadderStage, TileConfig

STAGES: dict[str, LadderStage] = {
    module.STAGE.name: module.STAGE
    for module in (
        naive,
        coalesced,
        shared_tile,
        thread_tile_1d,
        thread_tile_2d,
        vectorized,
        conflict_free,
        double_buffered,
        register_prefetch,
        warp_tiled,
        async_copy,
        lean_loop,
        stream_k,
        thin,
    )
}

__all__ = ["STAGES", "LadderStage", "TileConfig"]
