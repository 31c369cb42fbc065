"""Optional access to the GPU's clocks and throttle reasons through NVML."""

from __future__ import annotations

import contextlib
import importlib
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SM_CLOCK = 1  # NVML_CLOCK_SM

# By module: initialisation, handle by UUID, driver, highest clock, clock, throttle reasons, energy.
FUNCTIONS = {
    "pynvml": (
        *("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlSystemGetDriverVersion", "nvmlDeviceGetMaxClockInfo"),
        *("nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetTotalEnergyConsumption"),
    ),
    "cuda.bindings.nvml": (
        *("init_v2", "device_get_handle_by_uuid", "system_get_driver_version", "device_get_max_clock_info"),
        *("device_get_clock_info", "device_get_current_clocks_event_reasons", "device_get_total_energy_consumption"),
    ),
}
Query = Callable[..., Any]

# nvmlClocksEventReasons bits that slow a busy GPU down; an idle GPU and a clock set by a user are not among them.
THROTTLE_REASONS = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal, software",
    0x040: "thermal, hardware",
    0x080: "power brake",
    0x100: "display clock",
    0x200: "board limit",
    0x400: "reliability limit",
}


@dataclass(frozen=True)
class Nvml:
    """NVML queries that the harness makes of one GPU."""

    driver: str  # its release
    max_sm_clock_mhz: int
    sm_clock_mhz: Callable[[], int]  # the current clock
    reasons: Callable[[], int]  # bits of `THROTTLE_REASONS`
    energy_mj: Callable[[], int] | None = None  # millijoules that the GPU has taken since the driver was loaded


def open_nvml(uuid: str) -> Nvml | None:
    """Open NVML for the GPU with a UUID (``GPU-...``) through pynvml or cuda.bindings; None if neither works."""
    for module, names in FUNCTIONS.items():
        # Missing, outdated or forbidden in this container: clocks are omitted, results are not.
        with contextlib.suppress(Exception):
            found = importlib.import_module(module)
            return _opened(uuid, *(getattr(found, name) for name in names))
    return None


def _opened(
    uuid: str, start: Query, find: Query, driver: Query, max_clock: Query, clock: Query, reasons: Query, energy: Query
) -> Nvml:
    """Return the queries after one trial of each, so that unsupported ones fail here; some GPUs count no energy."""
    start()
    gpu, text = find(uuid), driver()
    most = int(max_clock(gpu, SM_CLOCK))
    clock(gpu, SM_CLOCK)
    reasons(gpu)
    counted: Callable[[], int] | None = None
    with contextlib.suppress(Exception):
        energy(gpu)
        counted = lambda: int(energy(gpu))  # noqa: E731
    named = text.decode() if isinstance(text, bytes) else str(text)
    return Nvml(named, most, lambda: int(clock(gpu, SM_CLOCK)), lambda: int(reasons(gpu)), counted)


@dataclass
class ClockSamples:
    """SM clocks and throttle reasons sampled during a run."""

    mhz: list[int] = field(default_factory=list)
    reason_bits: int = 0

    @property
    def median_mhz(self) -> float:
        """Median of the sampled clocks; NaN without samples."""
        return float(statistics.median(self.mhz)) if self.mhz else float("nan")

    @property
    def throttle(self) -> str:
        """Throttle reasons in words."""
        return "; ".join(word for bit, word in THROTTLE_REASONS.items() if self.reason_bits & bit)


@contextlib.contextmanager
def sampled_clocks(nvml: Nvml | None, interval_s: float = 0.02) -> Iterator[ClockSamples]:
    """Sample clocks in the background while the context is active."""
    samples = ClockSamples()
    if nvml is None:
        yield samples
        return
    stop = threading.Event()

    def sample() -> None:
        while True:
            with contextlib.suppress(Exception):  # an occasional failure loses one sample
                samples.mhz.append(nvml.sm_clock_mhz())
                samples.reason_bits |= nvml.reasons()
            if stop.wait(interval_s):
                return

    thread = threading.Thread(target=sample, name="sm-clock", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
