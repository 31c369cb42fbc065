"""Occupancy of a stage: the number of blocks that a multiprocessor holds, given the compiled kernel."""

from __future__ import annotations

from math import prod
from typing import Any

from ..kernels import STAGES
from ..kernels.ladder.stage import LadderStage, TileConfig
from ..kernels.product import Product, dense
from ..kernels.stage import Stage
from ..kernels.step import Kernel
from ..kernels.tensor_core.config import WarpConfig, WarpgroupConfig
from ..models import occupancy as counting
from ..models.occupancy import Occupancy
from ..runtime import device as devices
from ..runtime import kernel_cache
from ..runtime.driver import advising
from ..simulator.switch import SIMULATOR
from .heuristics import check_stage_precision

__all__ = ["Occupancy", "config_of", "occupancy", "stage_of", "usual_kernel"]

LARGE = 4096  # extents of operands whose sums are long


@advising("Pass a compute capability, (9, 0) for an H200, for which no GPU is needed")
def occupancy(
    stage: str | Stage,
    config: str | TileConfig | WarpgroupConfig | WarpConfig | None = None,
    device: int | tuple[int, int] | None = None,
    precision: str | None = None,
) -> Occupancy:
    """Compute how many blocks of a stage a multiprocessor holds at once, and what keeps it from holding more.

    The stage is compiled, or found in the kernel cache, for aligned operands by rows; others may need more registers.

    Parameters
    ----------
    stage : str or Stage
        A stage of `stages`, or its name.
    config : str, TileConfig, WarpgroupConfig or WarpConfig, optional
        A configuration, or the name of one of the stage's. By default its first.
    device : int or tuple of int, optional
        A device's ordinal, or a compute capability, (9, 0) for one, for which no GPU is needed. By default the current
        device.
    precision : str, optional
        A precision that the stage computes in. By default its first.

    Returns
    -------
    Occupancy
        Its text is a paragraph to read.

    Raises
    ------
    TypeError
        For arguments of other types.
    ValueError
        For an unknown stage, configuration or compute capability, or one that the stage cannot run on.
    GpuUnavailable
        Without a GPU, unless a compute capability is given.
    RuntimeError
        Under Numba's simulator, which compiles nothing; without the compiler's libraries.
    """
    found = stage_of(stage)
    chosen = config_of(found, config)
    if SIMULATOR:
        raise RuntimeError(
            "a kernel's registers are known once it is compiled, and Numba's simulator compiles nothing; expected the "
            "compiler; unset NUMBA_ENABLE_CUDASIM, and without a GPU pass a compute capability, device=(9, 0)"
        )
    cc = _compute_capability(device)
    if cc not in counting.LIMITS or not found.runs_on(cc):
        known = ", ".join(f"{major}.{minor}" for major, minor in counting.LIMITS if found.runs_on((major, minor)))
        raise ValueError(
            f"device is {device!r}, of compute capability {cc[0]}.{cc[1]}; expected one of {known} for stage "
            f"{found.name!r}; pass one, (9, 0) for an H200, or another stage"
        )
    named = found.precisions[0] if precision is None else precision
    check_stage_precision(found, named)
    kernel = usual_kernel(found, chosen, named)
    cubin = kernel_cache.fetch(kernel, cc).cubin
    threads = prod(found.block(chosen)) if isinstance(found, LadderStage) else kernel.threads
    return counting.occupancy(threads, cubin.registers, cubin.shared + kernel.dynamic_shared, cc)


def usual_kernel(stage: Stage, config: Any, precision: str, aligned: bool = True) -> Kernel:
    """Return a stage's kernel for operands that are stored by rows, aligned or not."""
    if isinstance(stage, LadderStage):
        return stage.usual_kernel(config, aligned)
    layout = dense("N", LARGE, LARGE)
    return stage.kernel(config, Product(layout, layout, layout), precision)


def stage_of(stage: str | Stage) -> Stage:
    """A stage, or the one of a name; raises TypeError or ValueError for what is neither."""
    if isinstance(stage, Stage):
        return stage
    if not isinstance(stage, str):
        raise TypeError(f"stage is {stage!r}; expected a Stage or its name; numba_gemm.stages() has them")
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}; expected one of {', '.join(STAGES)}; pass one of these")
    return STAGES[stage]


def config_of(stage: Stage, config: Any) -> Any:
    """A configuration, the one of a stage's that has a name, or its first; raises TypeError or ValueError if none."""
    if config is None:
        return stage.configs[0]
    kind = type(stage.configs[0])
    if isinstance(config, kind):
        return config
    if not isinstance(config, str):
        raise TypeError(
            f"config is {config!r}; expected a {kind.__name__}, or the name of one, for stage {stage.name!r}; leave it "
            "out for the first"
        )
    named = {one.name: one for one in stage.configs}
    if config not in named:
        raise ValueError(
            f"config is {config!r}; expected one of {', '.join(named)} for stage {stage.name!r}; pass one of these, or "
            f"a {kind.__name__} of your own"
        )
    return named[config]


def _compute_capability(device: int | tuple[int, int] | None) -> tuple[int, int]:
    if isinstance(device, tuple) and [type(part) for part in device] == [int, int]:
        return device
    if device is None:
        return devices.device_properties(devices.current_device()).cc
    if type(device) is not int:
        raise TypeError(
            f"device is {device!r}; expected a device's ordinal or a compute capability; pass 0, or (9, 0) for an H200"
        )
    devices.current_device()  # raises GpuUnavailable with the reason
    count = devices.device_count()
    if not 0 <= device < count:
        raise ValueError(f"device is {device}; expected 0 to {count - 1}; pass one of these, or a compute capability")
    return devices.device_properties(device).cc
