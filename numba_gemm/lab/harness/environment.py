"""Environment of a run, written beside its results: GPU, driver, clocks, versions, commit."""

from __future__ import annotations

import ast
import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba_gemm.lab.harness.nvml import Nvml, open_nvml
from numba_gemm.simulator.probe import driver_error

if TYPE_CHECKING:
    from numba_gemm.lab.harness.experiment import Experiment
    from numba_gemm.runtime.device import DeviceProperties

COMMIT_DIGITS = 12  # in prose
PACKAGE = Path(__file__).resolve().parents[2]
# Values of `timing` in the environment of a run on a GPU: without or with launch overhead.
GRAPHS, LAUNCHES = "graphs", "launches"
TIMINGS = {GRAPHS: "timed by replays of CUDA graphs", LAUNCHES: "timed by plain launches, which count"}
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
DISTRIBUTIONS = (
    *("numba-cuda", "numba", "numpy", "pandas", "cuda-bindings", "cuda-core", *CUPY, "torch"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nvvm", "nvidia-nvjitlink"),
)


def describe(
    experiment: Experiment, *, simulated: bool, seed: int, command: str, stated_commit: str | None
) -> dict[str, Any]:
    """Return the part of the environment that is known before the run; `stated_commit` counts if git has none."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "seed": seed,
        "cache": experiment.cache,
        "timing": None if simulated else experiment.timing,
        "operands": experiment.operands,
        "simulator": simulated,
        "commit": commit() or stated_commit,
        "source_sha256": source_digest(),
        "gpu": None if simulated or driver_error() else describe_gpu(),
        "versions": versions(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def describe_gpu() -> dict[str, Any]:
    """Describe the current GPU: its limits, and the peaks that results are compared with."""
    from numba_gemm.runtime.device import current_device, device_properties

    properties = device_properties(current_device())
    nvml, peak = current_nvml(), peak_flops(properties)
    return {
        "name": properties.name,
        "compute_capability": ".".join(str(part) for part in properties.cc),
        "multiprocessors": properties.sm_count,
        "max_clock_mhz": properties.clock_hz / 1e6,
        "fp32_peak_gflops": None if math.isnan(peak) else peak / 1e9,
        "bandwidth_gb_s": properties.memory_bandwidth / 1e9,
        "l2_bytes": properties.l2_bytes,
        "driver": nvml.driver if nvml else None,
        "cuda_driver_api": driver_api(),
        "nvml_max_sm_clock_mhz": nvml.max_sm_clock_mhz if nvml else None,
    }


def peak_flops(properties: DeviceProperties) -> float:
    """FP32 peak in FLOP/s at the highest clock; NaN for compute capabilities newer than the table of lanes."""
    from numba_gemm.models.roofline import fp32_peak

    try:
        return fp32_peak(properties.sm_count, properties.clock_hz, properties.cc)
    except ValueError:
        return math.nan


def device_name(environment: Mapping[str, Any]) -> str:
    """Return the name of the GPU, or that of the simulator."""
    gpu = environment.get("gpu")
    return gpu["name"] if gpu else "CUDA simulator" if environment.get("simulator") else "an unknown device"


def current_nvml() -> Nvml | None:
    """Return NVML for the current GPU, or None."""
    if driver_error():
        return None
    from numba import cuda

    return open_nvml(cuda.get_current_device().uuid)


def driver_api() -> str | None:
    """Return the CUDA version that the driver supports, such as "13.0"."""
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}" if int(error) == 0 else None


def conclude(environment: dict[str, Any], clocks_mhz: Iterable[float], throttle: Iterable[str]) -> None:
    """Add the clocks that were sampled during the run."""
    seen = [clock for clock in clocks_mhz if clock == clock]
    environment["clocks"] = {
        "sm_mhz_lowest": min(seen, default=None),
        "sm_mhz_highest": max(seen, default=None),
        "throttle_reasons": sorted({reason for text in throttle for reason in text.split("; ") if reason}),
    }


def caption(environment: Mapping[str, Any]) -> str:
    """Summarise GPU, driver, versions, commit, date and command in one sentence."""
    gpu, clocks, found = (environment.get(name) or {} for name in ("gpu", "clocks", "versions"))
    parts = ["CUDA simulator"]
    if gpu:
        peak = f", FP32 peak {gpu['fp32_peak_gflops'] / 1000:.1f} TFLOP/s" if gpu.get("fp32_peak_gflops") else ""
        parts = [f"{gpu['name']} ({gpu['multiprocessors']} SMs at up to {gpu['max_clock_mhz']:.0f} MHz{peak})"]
        if clocks.get("sm_mhz_lowest"):
            seen = dict.fromkeys(f"{clocks[f'sm_mhz_{edge}']:.0f}" for edge in ("lowest", "highest"))
            parts.append(f"median SM clock {' to '.join(seen)} MHz")
        if clocks.get("throttle_reasons"):
            parts.append(f"throttled by: {', '.join(clocks['throttle_reasons'])}")
        parts.append(f"driver {gpu.get('driver') or 'unknown'} (CUDA {gpu.get('cuda_driver_api')})")
    parts.append(TIMINGS.get(environment.get("timing") or "", ""))
    parts.append(f"operands {environment['operands']}" if environment.get("operands") else "")
    parts.append(f"Python {environment.get('python', 'unknown')}")
    parts += [
        f"{name} {found[name]}" for name in ("numba-cuda", "numba", *CUPY, "torch", "nvidia-cublas") if name in found
    ]
    parts.append(f"commit {environment['commit'][:COMMIT_DIGITS]}" if environment.get("commit") else "")
    parts.append(str(environment.get("date", "undated"))[:10])
    return f"{', '.join(filter(None, parts))}; `{environment.get('command', 'python bench.py')}`"


def versions() -> dict[str, str]:
    """Return the versions of installed packages that results depend on."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """Return the commit of the checkout, with ``-dirty`` if the package differs from it; None outside a checkout."""
    line = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        described = subprocess.run(line, cwd=PACKAGE, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None if described.returncode == 0 else None


def source_digest() -> str:
    """Return a digest of the package's Python code, which identifies it even outside a checkout.

    Comments, layout and docstrings, into which measurements are written after a run, do not matter. Releases of Python
    differ in their syntax trees: compare digests of one release only.
    """
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode())
        digest.update(_code_digest(path.read_bytes()))
    return digest.hexdigest()


@functools.cache  # parsing all files takes seconds, and a process may record several runs
def _code_digest(source: bytes) -> bytes:
    """Return the digest of a file's code."""
    tree = _WithoutDocstrings().visit(ast.parse(source))
    return hashlib.sha256(ast.dump(tree).encode()).digest()


class _WithoutDocstrings(ast.NodeTransformer):
    """Remove strings that stand alone as statements."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        alone = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if alone else node
