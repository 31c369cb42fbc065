"""Build hook: a wheel contains the bundle of compiled kernels that NUMBA_GEMM_WHEEL_BUNDLE names, if it is set.

``numba-gemm precompile --export kernels.bundle --cc 8.0,9.0`` makes such a bundle, from the same sources.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BundleHook(BuildHookInterface):
    """Adds the bundle as ``numba_gemm/kernels.bundle``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file; raise FileNotFoundError if it is not there."""
        named = os.environ.get("NUMBA_GEMM_WHEEL_BUNDLE")
        if named and version == "standard":
            path = Path(named).resolve(strict=True)
            build_data["force_include"][str(path)] = "numba_gemm/kernels.bundle"
