"""The tensor-core ladder: products of operands that are decomposed into narrow numbers."""

from ..code import Code
from ..ladder.tile_config import TileConfig
from .config import NarrowRowsConfig, RowsConfig, TensorVariant, WarpConfig, WarpgroupConfig
from .direct_stage import DirectStage
from .fused_stage import FusedStage
from .precision import SHORT_SUMS, TENSOR_PRECISIONS, TensorPrecision
from .stage import TensorStage
from .tma_stage import TmaStage, boxes

ONE_INSTRUCTION = TileConfig(BM=16, BN=8, BK=16, TM=2, TN=2)


def _warps(BM: int, BN: int, BK: int, lanes_k: int, slots: int) -> TileConfig:
    """Return a configuration of warps that multiply 32x32 each; a slot's rows have four floats more."""
    pad, pad_b = 4 * BM // BK, 4 * BN // BK
    return TileConfig(BM, BN, BK, 4, 8, 32, 32, slots=slots, pad=pad, dynamic=True, pad_b=pad_b, lanes_k=lanes_k)


RECORDS: tuple[DirectStage | FusedStage | TensorStage | TmaStage, ...] = (
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
        summary="blocks stay, and what additions round off is added, too",
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
        in_step=True,
        clusters=True,
    ),
    TmaStage(
        name="tf32_tma",
        summary="operands copied by tensor maps; at most one is decomposed",
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
        name="rows_in_registers",
        summary="a large A is decomposed by the warpgroups that multiply it",
        build=Code("tensor_core.rows_in_registers"),
        configs=(
            RowsConfig(128, 64, consumers=2, producers=1, claim=240),
            RowsConfig(64, 64, producers=1),
        ),
        narrow_configs=(
            NarrowRowsConfig(128, 128, consumers=2, producers=1, claim=240),
            NarrowRowsConfig(192, 64, consumers=3, producers=1, claim=160),
            NarrowRowsConfig(128, 64, consumers=2, producers=1, claim=240),
            NarrowRowsConfig(64, 64, producers=1),
        ),
        precisions=("bf16x3", "bf16x6", "bf16x9"),
        complete=True,
        waits=True,
        splits=True,
        reads_rows=True,
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
    FusedStage(
        name="fused_decomposition",
        summary="one launch: warps decompose in registers what they multiply",
        build=Code("tensor_core.fused_decomposition"),
        configs=(_warps(32, 32, 64, 4, slots=3), _warps(64, 64, 32, 1, slots=3)),
        test_config=_warps(32, 32, 32, 2, slots=2),
    ),
)
TENSOR_STAGES: dict[str, DirectStage | FusedStage | TensorStage | TmaStage] = {stage.name: stage for stage in RECORDS}

__all__ = [
    "SHORT_SUMS",
    "TENSOR_PRECISIONS",
    "TENSOR_STAGES",
    "DirectStage",
    "FusedStage",
    "TensorPrecision",
    "TensorStage",
    "TensorVariant",
    "TmaStage",
    "WarpgroupConfig",
]
