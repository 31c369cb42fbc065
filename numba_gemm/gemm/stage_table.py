"""The stages as a tuple that prints as a table."""

from __future__ import annotations

from ..kernels.ladder.stage import LadderStage
from ..kernels.stage import Stage

HEADINGS = ("stage", "ladder", "precisions", "GPUs", "idea")


class StageTable(tuple[Stage, ...]):
    """Stages in climbing order."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [HEADINGS, *(_row(stage) for stage in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
        return "\n".join("  ".join((*map(str.ljust, row, widths), row[-1])) for row in rows)

    def __repr__(self) -> str:
        return f"<{len(self)} stages: {', '.join(stage.name for stage in self)}>"


def _row(stage: Stage) -> tuple[str, ...]:
    ladder = "FP32" if isinstance(stage, LadderStage) else "tensor cores"
    (major, minor), only = stage.min_cc, stage.only_cc is not None
    precisions = ", ".join(stage.precisions)
    return stage.name, ladder, precisions, f"{major}.{minor}{' only' if only else ' and later'}", stage.summary
