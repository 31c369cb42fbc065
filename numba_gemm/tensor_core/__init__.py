"""Products on tensor cores, of operands split into narrow parts.

`MODES` are the precisions, `TENSOR_STAGES` the kernels, in climbing order. No public function runs them yet.
"""

from . import one_warpgroup, persistent, producer_consumer, warp_mma
from .mode import MODES, Mode
from .stage import TensorForm, TensorStage, WarpgroupConfig

TENSOR_STAGES: dict[str, TensorStage] = {
    module.STAGE.name: module.STAGE for module in (one_warpgroup, producer_consumer, persistent, warp_mma)
}

__all__ = ["MODES", "TENSOR_STAGES", "Mode", "TensorForm", "TensorStage", "WarpgroupConfig"]
