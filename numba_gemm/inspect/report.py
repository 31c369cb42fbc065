"""Compilation of a stage for any compute capability, on a machine with or without a GPU; resource usage and SASS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..gemm.occupancy import LARGE, usual_kernel
from ..gemm.precision import canonical
from ..gemm.stage_names import check_stage_precision
from ..gemm.tensor_heuristics import configs_for
from ..kernels.stage import IEEE, Stage
from ..kernels.step import Kernel
from ..models.gpu_names import compute_capability, dotted
from ..runtime.compilation import compile_kernel
from ..runtime.compiler import Cubin, supported_ccs
from ..simulator.switch import SIMULATOR
from ..typing import ComputeCapability
from .sass import Instruction, Loop, disassemble, functions, instruction_mix, main_loop

# Before compute capability 9.0, shuffles and votes are calls unless the compiler sees that the whole warp takes part.
COMPILERS_OWN = ("__cuda_sm70_shflsync", "__cuda_sm70_votesync")


def kernels_own(names: Iterable[str]) -> list[str]:
    """Return the names of functions, or of their sections, without those of the compiler's own functions."""
    return [name for name in names if not any(word in name for word in COMPILERS_OWN)]


@dataclass(frozen=True)
class Compiled:
    """One configuration of a stage, compiled for one compute capability."""

    stage: Stage
    config: Any
    aligned: bool
    cubin: Cubin
    kernel: Kernel
    precision: str

    @property
    def label(self) -> str:
        """Names of the configuration and the variant."""
        if self.precision != IEEE:
            return f"{self.config.name} {self.precision}"
        return f"{self.config.name} {'aligned' if self.aligned else 'unaligned'}"

    @property
    def registers(self) -> int:
        """32-bit registers per thread."""
        return self.cubin.registers

    @property
    def shared(self) -> int:
        """Bytes of shared memory per block, static and dynamic."""
        return self.cubin.shared + self.kernel.dynamic_shared

    @property
    def local(self) -> int:
        """Bytes of local memory per thread: arrays and spilled registers, which are stored in global memory."""
        return self.cubin.local

    @property
    def spills(self) -> int:
        """Bytes of register spills per thread, stores plus loads."""
        return self.cubin.spill_stores + self.cubin.spill_loads

    @cached_property
    def sass(self) -> str:
        """Disassembly of the kernel; raises ToolMissing without nvdisasm."""
        return disassemble(self.cubin.code)

    @cached_property
    def instructions(self) -> list[Instruction]:
        """Instructions of the kernel, without those of the compiler's own functions that it calls.

        Raises
        ------
        RuntimeError
            if a device function was not inlined into the kernel, or a division became a call.
        """
        found = functions(self.sass)
        own = kernels_own(found)
        if len(own) != 1:
            raise RuntimeError(f"{self.stage.name} {self.label}: not one function but {', '.join(found) or 'none'}")
        return found[own[0]]

    @property
    def loop(self) -> Loop | None:
        """The loop in which the kernel spends its time."""
        return main_loop(self.instructions)

    @property
    def mix(self) -> Counter[str]:
        """Count of each opcode in the main loop, without modifiers."""
        return instruction_mix(self.loop.instructions) if self.loop else Counter()


def compiled(
    stage: Stage, config: Any, cc: ComputeCapability, aligned: bool = True, precision: str | None = None
) -> Compiled:
    """Compile one configuration of a stage as the launcher would on a GPU of this compute capability.

    Parameters
    ----------
    stage : Stage
        A stage, from ``numba_gemm.stages()``.
    config : TileConfig, WarpgroupConfig or WarpConfig
        One of its configurations.
    cc : tuple of int, float, int or str
        Compute capability: (9, 0), 9.0, 90, "9.0" or "sm_90".
    aligned : bool
        True to compile for operands that allow 128-bit accesses, and consist of whole tiles if the stage has a kernel
        for them. A stage without such accesses still saves address
        arithmetic. Stages of the tensor-core ladder have one kernel for both.
    precision : str, optional
        A precision that the stage computes in. By default its first.

    Raises
    ------
    ValueError
        if the stage needs a higher compute capability, or the compiler does not know this one.
    RuntimeError
        under the simulator, if the compiler's packages are not installed, or if Numba does not compile the kernel.
    """
    from numba.core.errors import NumbaError

    cc = compute_capability(cc)
    if not stage.runs_on(cc):
        wanted = f"{dotted(stage.min_cc)} or higher" if stage.only_cc is None else dotted(stage.only_cc)
        raise ValueError(f"{stage.name} needs compute capability {wanted}, and {dotted(cc)} was asked for")
    if not SIMULATOR and cc not in (known := supported_ccs()):
        raise ValueError(
            f"the installed compiler does not know compute capability {dotted(cc)}; it knows "
            f"{', '.join(map(dotted, known))}"
        )
    named = stage.precisions[0] if precision is None else canonical(precision)
    check_stage_precision(stage, named)
    kernel = usual_kernel(stage, config, named, aligned)
    try:
        cubin = compile_kernel(kernel, cc)
    except NumbaError as error:
        advice = "; extents must be constants: compute PITCH = BK + 1 outside of the kernel"
        text = str(error).strip().rstrip(".")
        text += advice if "shared.array" in text or "local.array" in text else ""
        raise RuntimeError(f"{stage.name} {config.name} does not compile: {text}") from error
    return Compiled(stage, config, aligned, cubin, kernel, named)


def variants(
    stage: Stage, cc: ComputeCapability, config_name: str | None = None, precision: str | None = None
) -> Iterator[Compiled]:
    """Compile a stage's configurations one by one, or only the named one, for aligned operands and for any."""
    named = stage.precisions[0] if precision is None else canonical(precision)
    for config in configs_for(stage, named, LARGE) if named != IEEE else stage.configs:
        if config_name in (None, config.name):
            for aligned in (True, False) if named == IEEE else (True,):
                yield compiled(stage, config, cc, aligned, named)
