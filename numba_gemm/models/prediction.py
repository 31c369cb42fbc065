"""The shortest time that a stage's memory traffic and multiply-adds allow on a device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..device.units import WARP, ceil_div
from .requests import LINE_BYTES
from .traffic import Traffic, traffic

if TYPE_CHECKING:
    from ..kernels.ladder.stage import LadderStage
    from ..kernels.ladder.tile_config import TileConfig

__all__ = ["Ceilings", "Prediction", "predict", "theoretical_ceilings"]

SHARED_BYTES_A_CLOCK = 128  # per SM: 32 banks of 4 bytes
L2_BYTES_A_CLOCK = 64  # per SM, from the L2 cache


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of a device, each resource alone.

    Attributes
    ----------
    fp32 : float
        FLOP/s of multiply-adds, two FLOP each.
    dram, l2, shared : float
        Byte/s read from device memory, from the L2 cache by all multiprocessors, and from the shared memories or L1
        caches of all multiprocessors.
    """

    fp32: float
    dram: float
    l2: float
    shared: float

    def __post_init__(self) -> None:
        wrong = [f"{field.name} is {getattr(self, field.name)!r}" for field in fields(self)]
        if not all(getattr(self, field.name) > 0 for field in fields(self)):
            raise ValueError(f"{', '.join(wrong)}; expected positive numbers, in FLOP/s and byte/s")


def theoretical_ceilings(fp32: float, dram: float, sm_count: int, clock_hz: float) -> Ceilings:
    """Return ceilings computed without any measurement.

    Shared memory and L1 cache deliver 128 bytes per clock on each multiprocessor, one word from each of 32 banks (CUDA
    C++ Programming Guide, "Shared Memory"). The L2 cache is assumed to deliver 64 bytes per clock to each
    multiprocessor, the width of its connection. On devices with many multiprocessors, all together receive less.

    Parameters
    ----------
    fp32, dram : float
        FLOP/s and byte/s; see `numba_gemm.models.roofline.fp32_peak`.
    sm_count, clock_hz
        Number of multiprocessors, and their clock in Hz.
    """
    return Ceilings(fp32, dram, L2_BYTES_A_CLOCK * sm_count * clock_hz, SHARED_BYTES_A_CLOCK * sm_count * clock_hz)


@dataclass(frozen=True)
class Prediction:
    """Lower bound of a product's time: the time of the resource that is busy longest.

    The bound excludes waiting, filling and draining, and all instructions except multiply-adds.

    Attributes
    ----------
    traffic : Traffic
        Operations and data moved.
    fp32, dram, l2, shared : float
        Seconds that each resource is busy; `shared` is shared memory and L1 cache, which share one data path.
    """

    traffic: Traffic
    fp32: float
    dram: float
    l2: float
    shared: float

    @property
    def seconds(self) -> float:
        """The longest of the four times."""
        return max(self.fp32, self.dram, self.l2, self.shared)

    @property
    def binding(self) -> str:
        """The name of the resource that is busy longest: "FP32", "DRAM", "L2" or "shared"."""
        busy = {"FP32": self.fp32, "DRAM": self.dram, "L2": self.l2, "shared": self.shared}
        return max(busy, key=lambda name: busy[name])


def predict(
    stage: LadderStage,
    config: TileConfig,
    m: int,
    n: int,
    k: int,
    ceilings: Ceilings,
    *,
    in_l2: bool = False,
    sm_count: int = 1,
) -> Prediction:
    """Predict the time of a product from its traffic and a device's ceilings.

    Parameters
    ----------
    stage, config, m, n, k, in_l2
        As in `traffic`.
    ceilings : Ceilings
        Ceilings of the device.
    sm_count : int
        Number of multiprocessors of the device. They receive whole blocks, or whole k-tiles from a stage with a
        schedule; FP32 lanes and shared memories are busy as long as those of the multiprocessor that receives most.
        By default the work is shared evenly.

    Raises
    ------
    ValueError
        As for `traffic`.
    """
    moved = traffic(stage, config, m, n, k, in_l2=in_l2)
    pieces = ceil_div(m, config.BM) * ceil_div(n, config.BN) * (1 if stage.schedule is None else ceil_div(k, config.BK))
    uneven = ceil_div(pieces, sm_count) * sm_count / pieces
    return Prediction(
        traffic=moved,
        fp32=uneven * 2 * WARP * moved.ffma / ceilings.fp32,
        dram=moved.dram_bytes / ceilings.dram,
        l2=moved.l2_bytes / ceilings.l2,
        shared=uneven * LINE_BYTES * moved.passes / ceilings.shared,
    )
