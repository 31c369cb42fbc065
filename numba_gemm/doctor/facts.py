"""Facts about a machine and its packages, as values; `numba_gemm.doctor.gather` obtains them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

READY, NOT_READY = 0, 1

GPU, SIMULATOR, NO_GPU, BROKEN_DRIVER = "gpu", "simulator", "no GPU", "broken driver"

PRODUCT = 64  # extent of the trial's matrices

PROHIBITED = 2  # CU_COMPUTEMODE_PROHIBITED

Version = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it; ``memory`` in bytes."""

    name: str
    cc: tuple[int, int]
    memory: int
    compute_mode: int = 0


@dataclass(frozen=True)
class Library:
    """A library of the compiler: its CUDA release, file and origin, or the error if it was not found."""

    version: tuple[int, int] | None = None
    path: str | None = None
    via: str | None = None
    error: str | None = None

    @property
    def extra(self) -> str | None:
        """Return the extra of the package that installed it; None if it was installed some other way."""
        parts = Path(self.path or "").parts
        if self.via != "site-packages" or "nvidia" not in parts:
            return None
        return "cu13" if "cu13" in parts else "cu12"


@dataclass(frozen=True)
class Trial:
    """Result of the trial: device, largest error in units of the bound and seconds, or the failure."""

    where: str
    simulated: bool
    error: float | None = None
    seconds: float = 0.0
    failure: str | None = None

    @property
    def correct(self) -> bool:
        """True if there is a result and it is correct."""
        return self.failure is None and self.error is not None and self.error <= 1.0


@dataclass(frozen=True)
class Facts:
    """Facts about a machine and its packages, gathered by `gather`.

    Attributes
    ----------
    python, system : tuple of int, str
        Version of the interpreter; ``platform.system()``.
    versions : mapping of str to str
        Installed distributions.
    settings : tuple of str
        ``NAME=value`` of the relevant environment variables.
    driver_error : str or None
        Reason why the driver offers no GPU.
    gpu_count : int
        Number of GPUs that this process may use.
    driver_cuda, driver_release : tuple of int, str
        CUDA release that the driver supports; its own version.
    driver_off_path : bool
        True if the driver's library was found only by its full path.
    gpus : tuple of Gpu
        GPUs as the driver describes them.
    kernel_driver, container, wsl : bool
        True if the kernel has loaded an NVIDIA driver; in a container; in WSL.
    imports : mapping of str to str
        Modules that cannot be imported, and the errors.
    libraries : mapping of str to Library
        Libraries of the compiler.
    supported : tuple of (int, int)
        Compute capabilities that the compiler supports; empty if unknown.
    requested, simulated : bool
        True if the environment requests the simulator; True if Numba uses it (None: Numba cannot be imported).
    cache, cache_error : str or None
        Directory of compiled kernels (None: disabled); the reason why it is not writable.
    wrong_settings : tuple of str
        Errors in values of this package's environment variables; each begins with the variable's name.
    lost : mapping of str to str
        Kinds of facts that could not be gathered, and the reasons.
    trial : Trial or None
        Result of the trial.
    """

    python: Version
    system: str = "Linux"
    machine: str = "x86_64"
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    driver_error: str | None = None
    gpu_count: int = 0
    driver_cuda: tuple[int, int] | None = None
    driver_release: str | None = None
    driver_off_path: bool = False
    gpus: tuple[Gpu, ...] = ()
    kernel_driver: bool = False
    container: bool = False
    wsl: bool = False
    imports: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, Library] = field(default_factory=dict)
    supported: tuple[tuple[int, int], ...] = ()
    requested: bool = False
    simulated: bool | None = None
    cache: str | None = None
    cache_error: str | None = None
    wrong_settings: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    trial: Trial | None = None

    @property
    def place(self) -> str:
        """Place where kernels would run, `GPU` or `SIMULATOR`; else the obstacle, `NO_GPU` or `BROKEN_DRIVER`."""
        if self.requested if self.simulated is None else self.simulated:
            return SIMULATOR
        if self.driver_error is None:
            return GPU
        return NO_GPU if is_absent(self) else BROKEN_DRIVER

    def setting(self, name: str) -> str | None:
        """Return the value of an environment variable; None if it is not set."""
        found = dict(setting.split("=", 1) for setting in self.settings)
        return found.get(name)


def parsed(version: str | None) -> Version:
    """Parse the leading numbers of a version: ``"2.5.0rc1"`` is (2, 5, 0); empty if there are none."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def dotted(version: Sequence[int]) -> str:
    """Format a version with dots."""
    return ".".join(str(part) for part in version)


NO_DEVICE, HIDDEN = 100, "reports no GPU"


def driver_result(facts: Facts) -> int | None:
    """Return the CUresult in the driver's error."""
    match = re.search(r"CUresult (\d+)", facts.driver_error or "")
    return int(match[1]) if match else None


def is_absent(facts: Facts) -> bool:
    """True if there is no GPU, or only hidden ones; False if the driver of a GPU is broken."""
    result = driver_result(facts)
    if result is not None:
        return result == NO_DEVICE
    error = facts.driver_error or ""
    return HIDDEN in error or ("does not load" in error and not facts.kernel_driver)
