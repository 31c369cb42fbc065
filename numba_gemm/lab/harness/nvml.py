"""Optional access to the GPU's clocks, power and throttle reasons through NVML."""

import contextlib
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

SM_CLOCK = 1  # NVML_CLOCK_SM
COUNTER_INTERVAL_S = 0.002  # between reads of the energy counter, which an H200 advances about every 0.1 s

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
    """SM clocks and throttle reasons sampled during a run, and changes of the energy counter."""

    mhz: list[int] = field(default_factory=list)
    reason_bits: int = 0
    energy: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and millijoules: the first read of the counter, then each that differs from the one before."""

    @property
    def median_mhz(self) -> float:
        """Median of the sampled clocks; NaN without samples."""
        return float(statistics.median(self.mhz)) if self.mhz else math.nan

    @property
    def watts(self) -> float:
        """Mean power between the first and the last change of the energy counter; NaN with fewer than two changes.

        The counter advances in steps. A window that begins or ends between two of them contains a part of a step, so
        energy over the length of the window would be wrong by up to one step.
        """
        if len(self.energy) < 3:
            return math.nan
        _, (begin, first), *_, (end, last) = self.energy
        return (last - first) * 1e-3 / (end - begin)

    @property
    def throttle(self) -> str:
        """Throttle reasons in words."""
        return "; ".join(word for bit, word in THROTTLE_REASONS.items() if self.reason_bits & bit)


def median_watts(windows: Iterable[ClockSamples]) -> float:
    """Median power of the windows in which it is known; NaN if it is known in none."""
    known = [one.watts for one in windows if not math.isnan(one.watts)]
    return statistics.median(known) if known else math.nan


@contextlib.contextmanager
def sampled_clocks(nvml: Nvml | None, interval_s: float = 0.02, *, power: bool = False) -> Iterator[ClockSamples]:
    """Sample clocks in the background while the context is active; with `power`, also watch the energy counter."""
    samples = ClockSamples()
    if nvml is None:
        yield samples
        return
    counter = nvml.energy_mj if power else None

    def sample() -> None:
        with contextlib.suppress(Exception):  # an occasional failure loses one sample
            samples.mhz.append(nvml.sm_clock_mhz())
            samples.reason_bits |= nvml.reasons()

    def read(counter: Callable[[], int]) -> None:
        with contextlib.suppress(Exception):
            energy = counter()
            if not samples.energy or energy != samples.energy[-1][1]:
                samples.energy.append((time.perf_counter(), energy))

    with contextlib.ExitStack() as background:
        background.enter_context(repeating(sample, interval_s))
        if counter is not None:
            background.enter_context(repeating(functools.partial(read, counter), COUNTER_INTERVAL_S))
        yield samples


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
