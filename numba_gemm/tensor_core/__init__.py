"""Products on tensor cores (compute capability 9.0), of operands split into narrow parts.

`MODES` are the precisions, `TENSOR_STAGES` the kernels, in climbing order. No public function runs them yet.
"""

from . import one_warpgroup, persistent, producer_consumer
from .mode import MODES, Mode
from .stage import TensorForm, TensorStage, WarpgroupConfig

TENSOR_STAGES: dict[str, TensorStage] = {
    module.STAGE.name: module.STAGE for module in (one_warpgroup, producer_consumer, persistent)
}

__all__ = ["MODES", "TENSOR_STAGES", "Mode", "TensorForm", "TensorStage", "WarpgroupConfig"]
