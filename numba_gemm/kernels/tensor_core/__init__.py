"""The tensor-core ladder: products of operands that are decomposed into narrow numbers.

`TENSOR_PRECISIONS` are the precisions. `TENSOR_STAGES` are the stages: six in climbing order, then `tf32_tma`, whose
operands need no decomposition, and `warp_mma` for GPUs other than those of compute capability 9.0.
"""

from . import (
    bulk_copies,
    fresh_sums,
    one_warpgroup,
    persistent,
    producer_consumer,
    tf32_tma,
    warp_mma,
    wide_tiles,
)
from .config import TensorVariant, WarpgroupConfig
from .precision import SHORT_SUMS, TENSOR_PRECISIONS, TensorPrecision
from .stage import TensorStage
from .tma_stage import TmaStage

TENSOR_STAGES: dict[str, TensorStage | TmaStage] = {
    module.STAGE.name: module.STAGE
    for module in (
        one_warpgroup,
        bulk_copies,
        producer_consumer,
        wide_tiles,
        fresh_sums,
        persistent,
        tf32_tma,
        warp_mma,
    )
}

__all__ = [
    "SHORT_SUMS",
    "TENSOR_PRECISIONS",
    "TENSOR_STAGES",
    "TensorPrecision",
    "TensorStage",
    "TensorVariant",
    "TmaStage",
    "WarpgroupConfig",
]
