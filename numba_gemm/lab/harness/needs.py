"""Requirements of experiments on the machine."""

from __future__ import annotations

from collections.abc import Callable

from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.simulator.probe import driver_error
from numba_gemm.simulator.switch import SIMULATOR


def _gpu() -> str | None:
    reason = driver_error()
    return reason and f"this needs a GPU, and {reason}"


def _hopper() -> str | None:
    from numba_gemm.runtime.device import current_device, device_properties

    cc = device_properties(current_device()).cc
    return None if cc == (9, 0) else f"this needs a GPU of compute capability 9.0, not {cc[0]}.{cc[1]}"


def _torch() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "this needs PyTorch, through which cuBLAS is called: pip install torch"
    return None if torch.cuda.is_available() else "this needs PyTorch, which finds no GPU"


def _ncu() -> str | None:
    from numba_gemm.inspect.sass import find_tool

    found = find_tool("ncu")
    return None if found else "ncu was not found: install Nsight Compute, which comes with CUDA, and put it on PATH"


def _simulator() -> str | None:
    return "this runs on the simulator: set NUMBA_ENABLE_CUDASIM=1"


CHECKS: dict[str, Callable[[], str | None]] = {
    "gpu": _gpu,
    "hopper": _hopper,
    "torch": _torch,
    "ncu": _ncu,
    "simulator": _simulator,
}
"""Functions that return what is missing without the simulator, or None."""


def check(experiment: Experiment) -> None:
    """Raise `Unavailable` if this machine cannot run an experiment."""
    if SIMULATOR:
        missing: str | None = experiment.unavailable
    else:
        missing = next((reason for need in experiment.needs if (reason := CHECKS[need]())), None)
    if missing:
        raise Unavailable(missing)
