"""The tensor-core ladder: products of operands that are decomposed into narrow numbers."""

from ..code import Code
from ..ladder.stage import TileConfig
from .config import TensorVariant, WarpConfig, WarpgroupConfig
from .direct_stage import DirectStage
from .precision import SHORT_SUMS, TENSOR_PRECISIONS, TensorPrecision
from .stage import TensorStage
from .tma_stage import TmaStage, boxes

ONE_INSTRUCTION = TileConfig(BM=16, BN=8, BK=16, TM=2, TN=2)

RECORDS: tuple[DirectStage | TensorStage | TmaStage, ...] = (
    DirectStage(
        name="one_warp",
        summary="one warp loads fragments from global memory and multiplies them on tensor cores",
        build=Code("tensor_core.one_warp"),
        configs=(ONE_INSTRUCTION,),
        test_config=ONE_INSTRUCTION,
    ),
    TensorStage(
        name="one_warpgroup",
        summary="one warpgroup copies a slot of decomposed operands, then multiplies it",
        build=Code("tensor_core.one_warpgroup"),
        configs=(WarpgroupConfig(64, 128, max_slots=1),),
    ),
    TensorStage(
        name="bulk_copies",
        summary="one thread asks for a slot of decomposed operands, then all multiply it",
        build=Code("tensor_core.bulk_copies"),
        configs=(WarpgroupConfig(64, 128, max_slots=1),),
    ),
    TensorStage(
        name="producer_consumer",
        summary="one warpgroup fetches, another multiplies",
        build=Code("tensor_core.producer_consumer"),
        configs=(WarpgroupConfig(64, 128, producers=1),),
    ),
    TensorStage(
        name="wide_tiles",
        summary="two warpgroups multiply by the same columns",
        build=Code("tensor_core.wide_tiles"),
        configs=(WarpgroupConfig(128, 128, consumers=2, producers=1),),
    ),
    TensorStage(
        name="fresh_sums",
        summary="sums of a slot are added up outside the tensor cores",
        build=Code("tensor_core.fresh_sums"),
        configs=(WarpgroupConfig(128, 128, consumers=2, producers=1),),
    ),
    TensorStage(
        name="persistent",
        summary="blocks stay, leading sums are kept apart and compensated",
        build=Code("tensor_core.persistent"),
        configs=(
            WarpgroupConfig(128, 128, consumers=2, producers=1, claim=240),
            WarpgroupConfig(64, 128, producers=1),
            WarpgroupConfig(64, 96, producers=1),
            WarpgroupConfig(64, 64, producers=1),
            WarpgroupConfig(128, 256, consumers=2, producers=1, claim=240),
        ),
        precisions=tuple(TENSOR_PRECISIONS),
        complete=True,
        waits=True,
        splits=True,
    ),
    TmaStage(
        name="tf32_tma",
        summary="operands copied by tensor maps, without a decomposition pass",
        build=Code("tensor_core.tf32_tma"),
        configs=(
            WarpgroupConfig(128, 256, consumers=2, producers=1, claim=240),
            WarpgroupConfig(128, 192, consumers=2, producers=1, claim=240),
            WarpgroupConfig(128, 128, consumers=2, producers=1, claim=240),
            WarpgroupConfig(64, 128, producers=1),
            WarpgroupConfig(64, 64, producers=1),
        ),
        min_cc=(9, 0),
        only_cc=(9, 0),
        precisions=("tf32",),
        tensor_precision=TENSOR_PRECISIONS["tf32"],
        boxes=boxes,
    ),
    TensorStage(
        name="warp_mma",
        summary="warps multiply from registers, on compute capability 8.0 and up",
        build=Code("tensor_core.warp_mma"),
        configs=(WarpConfig(64, 64),),
        precisions=tuple(TENSOR_PRECISIONS),
        complete=True,
        min_cc=(8, 0),
        only_cc=None,
    ),
)
TENSOR_STAGES: dict[str, DirectStage | TensorStage | TmaStage] = {stage.name: stage for stage in RECORDS}

__all__ = [
    "SHORT_SUMS",
    "TENSOR_PRECISIONS",
    "TENSOR_STAGES",
    "DirectStage",
    "TensorPrecision",
    "TensorStage",
    "TensorVariant",
    "TmaStage",
    "WarpgroupConfig",
]
