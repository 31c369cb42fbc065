"""Compilation of a stage for any compute capability, on a machine with or without a GPU; resource usage and SASS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..kernels.ladder.stage import Stage, TileConfig
from ..runtime.compiler import Cubin, supported_ccs
from ..runtime.launch import compile_stage
from ..simulator.switch import SIMULATOR
from .sass import Instruction, Loop, disassemble, functions, instruction_mix, main_loop

# Before compute capability 9.0, a shuffle is a call unless the compiler can see that the whole warp takes part.
COMPILERS_OWN = ("__cuda_sm70_shflsync",)


@dataclass(frozen=True)
class Compiled:
    """One configuration of a stage, compiled for one compute capability."""

    stage: Stage
    config: TileConfig
    aligned: bool
    cubin: Cubin

    @property
    def label(self) -> str:
        """Names of the configuration and the variant."""
        return f"{self.config.name} {'aligned' if self.aligned else 'unaligned'}"

    @property
    def registers(self) -> int:
        """32-bit registers per thread."""
        return self.cubin.registers

    @property
    def shared(self) -> int:
        """Bytes of shared memory per block, static and dynamic."""
        return self.cubin.shared + self.config.dynamic_shared

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
        own = [name for name in found if not any(word in name for word in COMPILERS_OWN)]
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


def compiled(stage: Stage, config: TileConfig, cc: tuple[int, int], aligned: bool = True) -> Compiled:
    """Compile one configuration of a stage as the launcher would on a GPU of this compute capability.

    Parameters
    ----------
    stage : Stage
        A stage, from ``numba_gemm.stages()``.
    config : TileConfig
        One of its configurations.
    cc : (int, int)
        Compute capability, such as (9, 0).
    aligned : bool
        Whether to compile for operands that allow 128-bit accesses. A stage without such accesses still saves address
        arithmetic.

    Raises
    ------
    ValueError
        if the stage needs a higher compute capability, or the compiler does not know this one.
    RuntimeError
        under the simulator, or if the compiler's packages are not installed.
    """
    if cc < stage.min_cc:
        raise ValueError(
            f"{stage.name} needs compute capability {dotted(stage.min_cc)} or higher, and {dotted(cc)} was asked for"
        )
    if not SIMULATOR and cc not in (known := supported_ccs()):
        raise ValueError(
            f"the installed compiler does not know compute capability {dotted(cc)}; it knows "
            f"{', '.join(map(dotted, known))}"
        )
    return Compiled(stage, config, aligned, compile_stage(stage, config, aligned, cc))


def variants(stage: Stage, cc: tuple[int, int], config_name: str | None = None) -> Iterator[Compiled]:
    """Compile a stage's configurations one by one, or only the named one, each for aligned and for any operands."""
    for config in stage.configs:
        if config_name in (None, config.name):
            for aligned in (True, False):
                yield compiled(stage, config, cc, aligned)


def dotted(cc: tuple[int, int]) -> str:
    """Format a compute capability: (9, 0) becomes "9.0"."""
    return f"{cc[0]}.{cc[1]}"
