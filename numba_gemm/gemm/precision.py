"""Names of precisions, and those that a GPU can compute in."""

from __future__ import annotations

from typing import Any

from ..kernels.ladder import STAGES as LADDER
from ..kernels.stage import IEEE
from ..kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES
from ..kernels.tensor_core.stage import TensorStage
from ..simulator.switch import SIMULATOR
from ..typing import PrecisionName

__all__ = [
    "ALIASES",
    "FP32_AUTO",
    "IEEE",
    "KNOWN",
    "PRECISIONS",
    "canonical",
    "check_precision",
    "runnable",
]

FP32_AUTO = "fp32_auto"
PRECISIONS = (IEEE, *TENSOR_PRECISIONS)
KNOWN = (*PRECISIONS, FP32_AUTO)

# Names that other libraries give to exactly the same arithmetic. `docs/precision.md` has this table, too.
ALIASES = {
    "fp32": IEEE,
    "float32": IEEE,
    "highest": IEEE,  # torch.set_float32_matmul_precision, jax.default_matmul_precision
    "bfx9": "bf16x9",  # cuBLAS
    "F32_F32_F32": IEEE,  # JAX's and XLA's algorithms
    "TF32_TF32_F32": "tf32",
    "TF32_TF32_F32_X3": "tf32x3",
    "BF16_BF16_F32": "bf16",
    "BF16_BF16_F32_X3": "bf16x3",
    "BF16_BF16_F32_X6": "bf16x6",
    "BF16_BF16_F32_X9": "bf16x9",
}
_NAMES: dict[str, PrecisionName] = {name: name for name in KNOWN} | {
    alias.lower(): name for alias, name in ALIASES.items()
}
# Names by which other libraries permit several precisions: what to choose from here.
_SEVERAL = {"high": ("tf32", "bf16x3"), "medium": ("bf16", "tf32"), "default": (IEEE, "tf32")}

STAGES = tuple(TENSOR_STAGES[name] for name in ("persistent", "warp_mma"))  # the first that a GPU can run is used


def tensor_stage(cc: tuple[int, int]) -> TensorStage | None:
    """Return the stage that decomposes operands on a GPU of this compute capability; None if there is none."""
    if not SIMULATOR:
        for stage in STAGES:
            if stage.runs_on(cc) and isinstance(stage, TensorStage):
                return stage
    return None


SIMULATED = tuple(stage for stage in TENSOR_STAGES.values() if stage.test_config is not None)


def runnable(cc: tuple[int, int], stage: str = "auto") -> tuple[str, ...]:
    """Return the precisions that a GPU of this compute capability, or in the simulator a stage, can compute in."""
    named = TENSOR_STAGES.get(stage)
    if SIMULATOR and named in SIMULATED:
        return named.precisions
    if SIMULATOR and stage in LADDER:
        return LADDER[stage].precisions
    return (IEEE,) if tensor_stage(cc) is None else PRECISIONS


def canonical(precision: Any) -> PrecisionName:
    """Return the package's name of a precision, given that name or an alias, in any case.

    Raises
    ------
    TypeError, ValueError
        If it is unknown.
    """
    if not isinstance(precision, str):
        raise TypeError(
            f"precision is of type {type(precision).__qualname__}; expected a str; pass one of {', '.join(KNOWN)}"
        )
    if (found := _NAMES.get(precision.lower())) is not None:
        return found
    if (several := _SEVERAL.get(precision.lower())) is not None:
        raise ValueError(
            f"precision is {precision!r}, which permits several; expected the name of one; pass "
            f"{' or '.join(map(repr, several))}"
        )
    raise ValueError(
        f"precision is {precision!r}; expected one of {', '.join(KNOWN)}, or of their aliases {', '.join(ALIASES)}; "
        "pass one of these"
    )


def check_precision(precision: Any, cc: tuple[int, int], stage: str = "auto") -> None:
    """Raise TypeError or ValueError unless this is a precision, and one for this compute capability.

    In the simulator, which has one matrix instruction, the stage decides, too.
    """
    precision = canonical(precision)
    if precision != FP32_AUTO and precision not in (able := runnable(cc, stage)):
        where = (
            "the simulator, which has no matrix instructions for it"
            if SIMULATOR
            else f"compute capability {cc[0]}.{cc[1]}"
        )
        able_stages = sorted((*SIMULATED, *LADDER.values()), key=lambda one: len(one.precisions)) if SIMULATOR else ()
        named = [(one.name, ", ".join(name for name in one.precisions if name != IEEE)) for one in able_stages]
        others = [f"{name!r} for {precisions}" for name, precisions in named if precisions]
        advice = f"one of these, or stage {' or '.join(others)}" if others else "one of these"
        raise ValueError(
            f"precision is {precision!r}, and this is {where}; expected one of {', '.join(able)}; pass {advice}"
        )
