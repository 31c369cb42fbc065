"""Optional access to the GPU's clocks, power and throttle reasons through NVML."""

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SM_CLOCK = 1  # NVML_CLOCK_SM

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
    """Open NVML for the GPU with a UUID (``GPU-...``); None if cuda.bindings lacks it, or it may not be used here."""
    with contextlib.suppress(Exception):  # clocks are omitted, results are not
        from cuda.bindings import nvml

        nvml.init_v2()
        gpu, driver = nvml.device_get_handle_by_uuid(uuid), str(nvml.system_get_driver_version())
        highest = int(nvml.device_get_max_clock_info(gpu, SM_CLOCK))

        def asked(query: Callable[..., Any], *arguments: int) -> Callable[[], int]:
            return lambda: int(query(gpu, *arguments))

        clock = asked(nvml.device_get_clock_info, SM_CLOCK)
        reasons = asked(nvml.device_get_current_clocks_event_reasons)
        energy = asked(nvml.device_get_total_energy_consumption)
        clock()  # what a GPU does not support fails here
        reasons()
        try:
            energy()
        except Exception:
            return Nvml(driver, highest, clock, reasons)
        return Nvml(driver, highest, clock, reasons, energy)
    return None


@dataclass
class ClockSamples:
    """SM clocks and throttle reasons sampled during a run, and mean power in watts (NaN if it is not known)."""

    mhz: list[int] = field(default_factory=list)
    reason_bits: int = 0
    watts: float = math.nan

    @property
    def median_mhz(self) -> float:
        """Median of the sampled clocks; NaN without samples."""
        return float(statistics.median(self.mhz)) if self.mhz else math.nan

    @property
    def throttle(self) -> str:
        """Throttle reasons in words."""
        return "; ".join(word for bit, word in THROTTLE_REASONS.items() if self.reason_bits & bit)


@contextlib.contextmanager
def sampled_clocks(nvml: Nvml | None, interval_s: float = 0.02) -> Iterator[ClockSamples]:
    """Sample clocks in the background while the context is active; the power is known at its end."""
    samples = ClockSamples()
    if nvml is None:
        yield samples
        return

    def sample() -> None:
        with contextlib.suppress(Exception):  # an occasional failure loses one sample
            samples.mhz.append(nvml.sm_clock_mhz())
            samples.reason_bits |= nvml.reasons()

    counted = nvml.energy_mj
    with repeating(sample, interval_s):
        energy, begin = 0 if counted is None else counted(), time.perf_counter()
        yield samples
        if counted is not None:
            samples.watts = (counted() - energy) * 1e-3 / (time.perf_counter() - begin)


@contextlib.contextmanager
def repeating(work: Callable[[], object], interval_s: float) -> Iterator[None]:
    """Call a function again and again in the background while the context is active."""
    stop = threading.Event()

    def repeat() -> None:
        work()
        while not stop.wait(interval_s):
            work()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
