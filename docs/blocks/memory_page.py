"""Blocks of docs/memory_lab.md: each experiment's lesson, and its picture and claims if it is recorded."""

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from blocks.published import Published
from numba_gemm.lab.registry import MEMORY, load

FAILED = "**does not hold here:** "


def claims_of(name: str, found: Published) -> tuple[Path, Mapping[str, bool]]:
    """Return the path of a recorded run without its ending, and the claims that it decides; none if there is no run."""
    path = found.folder.parent / "memory_lab" / name
    table = path.with_suffix(".csv")
    return path, load(name).claims(pd.read_csv(table)) if table.is_file() else {}


def section(name: str, found: Published) -> str:
    """Return the heading and lesson of an experiment, with the picture and the claims of a recorded run."""
    experiment, (path, claims) = load(name), claims_of(name, found)
    parts = [f"## {experiment.section} [{name}](../numba_gemm/lab/memory/{name}.py)", f"**{experiment.lesson}**"]
    if not claims:
        return "\n\n".join([*parts, f"No run is recorded; `numba-gemm lab {name}` measures it."])
    held = "\n".join(f"- {'' if holds else FAILED}{sentence}" for sentence, holds in claims.items())
    picture = "/".join(path.parts[-4:])
    return "\n\n".join([*parts, f"![{name}](../{picture}.png)", "The numbers say:", held])


def provenance(found: Published) -> str:
    """Return the sentence on GPU, date, commit and claims of the recorded runs."""
    runs = [run for run in (claims_of(name, found) for name in MEMORY) if run[1]]
    described = [json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) for path, _ in runs]
    held = [holds for _, claims in runs for holds in claims.values()]
    gpus = ", ".join(sorted({one["gpu"]["name"] for one in described}))
    commits = ", ".join(sorted({one["commit"][:12] for one in described}))
    drivers = ", ".join(sorted({one["gpu"]["driver"] or "unknown" for one in described}))
    return (
        f"Recorded on {gpus}, {max(one['date'] for one in described)[:10]}, commit {commits}, driver {drivers}: "
        f"{sum(held)} of {len(held)} claims hold."
    )
