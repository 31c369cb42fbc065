"""Build hook: a wheel contains the recorded tables that the notebooks show, and a bundle of kernels if one is named.

``NUMBA_GEMM_WHEEL_BUNDLE`` names the bundle, which ``numba-gemm precompile --export kernels.bundle --cc 8.0,9.0`` makes
from the same sources.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RESULTS = Path("results") / "h200"
# Tables that `numba_gemm.course.notebook.recorded` reads, each with the file that describes its run, and outputs that
# `recorded_output` reads.
RECORDED = (
    "latest/ceilings.json",
    "latest/batches.*",
    "latest/counters.*",
    "latest/environment.json",
    "latest/orders.*",
    "latest/random_products.*",
    "latest/results.csv",
    "latest/targets.*",
    "latest/precisions/accuracy.csv",
    "latest/precisions/accuracy.json",
    "latest/precisions/environment.json",
    "latest/precisions/results.csv",
    "latest/precisions/tensor_ladder.*",
    "memory_lab/*.csv",
    "memory_lab/*.json",
    "notebooks/*.json",
)


def recorded_files(root: Path) -> dict[str, str]:
    """Return the recorded files of a checkout, with their places in a wheel; raise FileNotFoundError if one is gone."""
    found: dict[str, str] = {}
    for pattern in RECORDED:
        if not (matching := sorted((root / RESULTS).glob(pattern))):
            raise FileNotFoundError(f"no {RESULTS / pattern} to put into the wheel")
        found |= {str(path): f"numba_gemm/recorded/h200/{path.relative_to(root / RESULTS)}" for path in matching}
    return found


class WheelFiles(BuildHookInterface):
    """Adds files from outside of the package to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files; raise FileNotFoundError if one is not there."""
        if version != "standard":
            return
        build_data["force_include"] |= recorded_files(Path(self.root))
        if named := os.environ.get("NUMBA_GEMM_WHEEL_BUNDLE"):
            path = Path(named).resolve(strict=True)
            build_data["force_include"][str(path)] = "numba_gemm/kernels.bundle"
