"""Stages by the names that callers pass."""

from __future__ import annotations

from ..kernels import STAGES
from ..kernels.stage import Stage
from ..models.gpu_names import dotted

__all__ = ["ANY_GPU", "check_stage_precision", "resolve"]

ANY_GPU = (99, 0)  # a compute capability that no stage finds too low


def resolve(name: str, cc: tuple[int, int]) -> Stage:
    """Return the stage of a name.

    Raises
    ------
    ValueError
        if there is none of that name, or a GPU of compute capability `cc` cannot run it.
    """
    if name not in STAGES:
        raise ValueError(f"stage is {name!r}; expected 'auto' or one of {', '.join(STAGES)}; pass one of these names")
    stage = STAGES[name]
    if cc != ANY_GPU and not stage.runs_on(cc):
        able = ", ".join(other.name for other in STAGES.values() if other.runs_on(cc))
        wanted = stage.min_cc if stage.only_cc is None else stage.only_cc
        advice = f"pass 'auto' or one of {able}" if able else "no stage runs on it; use a GPU of 7.5 or higher"
        raise ValueError(
            f"stage is {name!r}, which needs compute capability {dotted(wanted)}; this GPU has {dotted(cc)}; {advice}"
        )
    return stage


def check_stage_precision(stage: Stage, precision: str) -> None:
    """Raise ValueError unless a stage computes in a precision."""
    if precision not in stage.precisions:
        raise ValueError(
            f"precision is {precision!r} and stage is {stage.name!r}, which computes in "
            f"{', '.join(stage.precisions)}; expected a stage and a precision that agree; change one of them"
        )
