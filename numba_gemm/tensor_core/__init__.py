"""Products on tensor cores (compute capability 9.0), of operands split into narrow parts.

`MODES` are the precisions, `TENSOR_STAGES` the kernels, in climbing order. No public function runs them yet.
"""

from . import one_warpgroup, producer_consumer
from .mode import MODES, Mode
from .stage import TensorStage, WarpgroupConfig

TENSOR_STAGES: dict[str, TensorStage] = {
    module.STAGE.name: module.STAGE for module in (one_warpgroup, producer_consumer)
}

__all__ = ["MODES", "TENSOR_STAGES", "Mode", "TensorStage", "WarpgroupConfig"]
