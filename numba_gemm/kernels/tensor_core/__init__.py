"""Products on tensor cores, of operands split into narrow parts.

`MODES` are the precisions, `TENSOR_STAGES` the kernels: six in climbing order, and `warp_mma` beside them for GPUs
other than those of compute capability 9.0. `numba_gemm.gemm.split_products` runs `persistent` or `warp_mma`.
`numba_gemm.gemm.direct_products` runs `direct`, which takes operands that are not split.
"""

from . import bulk_copies, fresh_sums, one_warpgroup, persistent, producer_consumer, warp_mma, wide_tiles
from .mode import MODES, SHORT_SUMS, Mode
from .stage import TensorForm, TensorStage, WarpgroupConfig

TENSOR_STAGES: dict[str, TensorStage] = {
    module.STAGE.name: module.STAGE
    for module in (one_warpgroup, bulk_copies, producer_consumer, wide_tiles, fresh_sums, persistent, warp_mma)
}

__all__ = ["MODES", "SHORT_SUMS", "TENSOR_STAGES", "Mode", "TensorForm", "TensorStage", "WarpgroupConfig"]
