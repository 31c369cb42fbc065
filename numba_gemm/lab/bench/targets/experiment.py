"""Performance of the public function, compared with its targets.

``ratio`` is the speed of `tiled_sgemm` divided by that of the baseline, as work per microsecond; rows without
``target`` are informative. A wrong result or an exception fails the target. cuBLAS is called through PyTorch and, if it
is there, CuPy, with TF32 off; the faster one counts, which ``cublas_via`` names. Host time is compared with PyTorch's
alone. Entries of `numba_gemm.autotune`'s cache are used, as in any call; NUMBA_GEMM_CACHE_DIR=off disables it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.buffers import NORMAL
from numba_gemm.lab.bench.targets.case import Rig, measure
from numba_gemm.lab.bench.targets.groups import FULL, GROUPS, TINY, cases_of
from numba_gemm.lab.bench.targets.verdicts import summary
from numba_gemm.lab.harness.environment import GRAPHS
from numba_gemm.lab.harness.experiment import Experiment, last_row


def targets(
    only: Sequence[str] = GROUPS, seed: int | None = None, shapes: int = 200, tiny: bool = False
) -> Iterator[pd.DataFrame]:
    """Measure the cases of groups, one row per comparison.

    Parameters
    ----------
    only: Groups to measure.
    seed: Seed of shapes and operands; a new one by default.
    shapes: Number of random shapes.
    tiny: Use shapes that are small enough for the simulator.
    """
    sizes = TINY if tiny else FULL
    rig = Rig(seed or 0, sizes.elements)
    rows: list[dict[str, Any]] = []
    complete: list[str] = []
    with rig.library.stream() as rig.stream:
        for group in (group for group in GROUPS if group in only):
            cases = cases_of(group, sizes, shapes, rig.seed)
            for case in cases:
                rows += measure(rig, case)
                with contextlib.suppress(Exception):  # if the GPU has failed, the rows say so
                    rig.library.release()  # else memory from the checks is missing for the next case
                if case is cases[-1]:
                    complete.append(group)
                frame = pd.DataFrame(rows)  # `attrs`: groups that are complete, and the M from which a shape is large
                frame.attrs = {"groups": tuple(complete), "large": sizes.large}
                yield frame


def judged(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per target of the complete groups; those of a recorded result all are."""
    groups = frame.attrs.get("groups", tuple(frame["group"].unique()))
    return summary(frame, groups, frame.attrs.get("large", FULL.large))


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check all targets of the complete groups."""
    return {f"{row['what']} ({row['statistic']})": bool(row["met"]) for row in judged(frame).to_dict("records")}


EXPERIMENT = Experiment(
    run=targets,
    claims=claims,
    allowed={"only": GROUPS},
    small={"tiny": True, "shapes": 2},
    progress=last_row,
    summary=judged,
    summary_file="targets_summary.csv",
    cache="hot, but for the group vector",
    operands=NORMAL,
    timing=GRAPHS,
    own_clocks=True,
)
