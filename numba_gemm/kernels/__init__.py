"""The kernels: one stage per file, in two ladders, FP32 and tensor cores, and one registry of all stages."""

from .ladder import STAGES as LADDER
from .stage import Stage
from .tensor_core import TENSOR_STAGES

STAGES: dict[str, Stage] = {**LADDER, **TENSOR_STAGES}

__all__ = ["STAGES", "Stage"]
