"""Occupancy of a stage: the number of blocks that a multiprocessor holds, given the compiled kernel."""

from __future__ import annotations

from math import prod
from typing import Any

from ..kernels import STAGES
from ..kernels.ladder.stage import LadderStage
from ..kernels.ladder.tile_config import TileConfig
from ..kernels.product import Product, dense
from ..kernels.stage import IEEE, Stage
from ..kernels.step import Kernel
from ..kernels.tensor_core.config import WarpConfig, WarpgroupConfig
from ..models import occupancy as counting
from ..models.gpu_names import dotted
from ..models.occupancy import Occupancy
from ..runtime import device as devices
from ..runtime import kernel_cache
from ..runtime.driver import advising, without_gpu
from ..simulator.switch import SIMULATOR
from ..typing import ComputeCapability, DeviceLike, PrecisionName, StageName
from .precision import canonical
from .stage_names import check_stage_precision
from .tensor_heuristics import configs_for

__all__ = ["Occupancy", "config_of", "occupancy", "stage_of", "usual_kernel"]

LARGE = 4096  # extents of operands whose sums are long


def occupancy(
    stage: StageName | Stage,
    config: str | TileConfig | WarpgroupConfig | WarpConfig | None = None,
    *,
    cc: ComputeCapability | None = None,
    device: DeviceLike | None = None,
    precision: PrecisionName | None = None,
) -> Occupancy:
    """Compute how many blocks of a stage a multiprocessor holds at once, and what keeps it from holding more.

    The stage is compiled, or found in the kernel cache, for aligned operands by rows; others may need more registers.

    Parameters
    ----------
    stage : str or Stage
        A stage of `stages`, or its name.
    config : str, TileConfig, WarpgroupConfig or WarpConfig, optional
        A configuration, or the name of one of the stage's. By default the first that computes in the precision.
    cc : tuple of int, float, int or str, optional
        A compute capability, (9, 0), 9.0, 90, "9.0" or "sm_90"; then no GPU is needed. By default that of `device`.
    device : int, str or device object, optional
        A GPU: 0, "cuda:0", or an object of PyTorch, CuPy, Numba or cuda.core. By default the current one.
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
        Without a GPU, unless `cc` is given.
    RuntimeError
        Under Numba's simulator, which compiles nothing; without the compiler's libraries.
    """
    found = stage_of(stage)
    chosen = config_of(found, config)
    if SIMULATOR:
        raise RuntimeError(
            "a kernel's registers are known once it is compiled, and Numba's simulator compiles nothing; expected the "
            "compiler; unset NUMBA_ENABLE_CUDASIM, and without a GPU pass a compute capability, cc=(9, 0)"
        )
    with advising(without_gpu(cc, device=device)):
        target = devices.capability_of(cc, device)
    if target not in counting.LIMITS or not found.runs_on(target):
        known = ", ".join(map(dotted, filter(found.runs_on, counting.LIMITS)))
        raise ValueError(
            f"the compute capability is {dotted(target)}; expected one of {known} for stage {found.name!r}; pass one, "
            "cc=(9, 0) for an H200, or another stage"
        )
    named = found.precisions[0] if precision is None else canonical(precision)
    check_stage_precision(found, named)
    if config is None and isinstance(found, LadderStage) and named != IEEE:
        chosen = configs_for(found, named, LARGE)[0]
    kernel = usual_kernel(found, chosen, named)
    cubin = kernel_cache.fetch(kernel, target).cubin
    threads = prod(found.block(chosen)) if isinstance(found, LadderStage) else kernel.threads
    return counting.occupancy(threads, cubin.registers, cubin.shared + kernel.dynamic_shared, target)


def usual_kernel(stage: Stage, config: Any, precision: str, aligned: bool = True) -> Kernel:
    """Return a stage's kernel for operands that are stored by rows, aligned or not."""
    if isinstance(stage, LadderStage):
        return stage.usual_kernel(config, aligned, precision)
    layout = dense("N", LARGE, LARGE)
    return stage.kernel(config, Product(layout, layout, layout), precision)


def stage_of(stage: str | Stage) -> Stage:
    """Return a stage, given itself or its name; raises TypeError or ValueError for anything else."""
    if isinstance(stage, Stage):
        return stage
    if not isinstance(stage, str):
        raise TypeError(f"stage is {stage!r}; expected a Stage or its name; numba_gemm.stages() has them")
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}; expected one of {', '.join(STAGES)}; pass one of these")
    return STAGES[stage]


def config_of(stage: Stage, config: Any) -> Any:
    """Return a configuration of a stage, given itself or its name, or the first; raises TypeError or ValueError."""
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
