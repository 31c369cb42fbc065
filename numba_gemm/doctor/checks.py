"""``python -m numba_gemm.doctor``: report on this machine, problems found, and the commands that fix them.

Facts are gathered first, each kind in a child process with a time limit, so that a broken installation or a library
that crashes is reported like any other problem. `diagnose` then derives the findings from the facts alone. A small
matrix multiplication on the GPU, or else on Numba's simulator, confirms the verdict.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from numba_gemm.simulator.probe import driver_error, gpu_count, simulator_environment, simulator_requested

READY, NOT_READY = 0, 1
MEND, LIMIT, NOTE = "mend", "limit", "note"  # no kernel runs; a feature does not work; worth knowing
GPU, SIMULATOR, NO_GPU, BROKEN_DRIVER = "gpu", "simulator", "no GPU", "broken driver"

LOWEST_PYTHON, HIGHEST_PYTHON = (3, 11), (3, 13)
LOWEST_CC, TENSOR_CC, BULK_CC = (7, 5), (8, 0), (9, 0)
LOWEST_DRIVER = (12, 0)  # CUDA release
LOWEST_LINKER = (12, 3)  # older releases of nvJitLink lack functions that cuda-core calls
# Lower bounds of the requirements, as in pyproject.toml.
LOWEST = {
    "numba-cuda": (0, 30, 4),
    "cuda-bindings": (12, 9, 3),
    "cuda-core": (0, 7),
    "cuda-pathfinder": (1, 4, 2),
    "llvmlite": (0, 43),
    "numba": (0, 60),
    "numpy": (2, 0),
    "pandas": (2, 2, 2),
    "rich": (12, 0),
}
# The first compilation of numba-cuda calls numpy.row_stack, which this release removed.
BROKEN_NUMPY = (2, 5)
PRODUCT = 64  # extent of the trial's matrices

DISTRIBUTIONS = ("numba-gemm", "numba-cuda", "numba", "llvmlite", "numpy", "pandas", "rich")
BINDINGS = ("cuda-bindings", "cuda-core", "cuda-pathfinder", "cuda-toolkit")
COMPILER = ("nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink")
COMPILER_12 = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-nvjitlink-cu12")
CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
OPTIONAL = ("matplotlib", *CUPY, "torch")
LIBRARIES = dict(zip(("nvvm", "nvrtc", "nvJitLink"), zip(COMPILER, COMPILER_12)))
NAMES = {"nvvm": "NVVM", "nvrtc": "NVRTC", "nvJitLink": "nvJitLink"}

# Modules and the packages that provide them. Without the first ones, not even the simulator works.
NEEDED = {
    "numpy": "numpy<2.5",
    "numba": "numba",
    "numba_cuda": "numba-cuda",
    "numba.cuda": "numba-cuda",
    "cuda.pathfinder": "cuda-pathfinder",
    "cuda.bindings.driver": "cuda-bindings",
}
NEEDED_BY_COMPILER = {"cuda.core": "cuda-core"}
NEEDED_BY_TOOLS = {"pandas": "pandas", "rich": "rich"}

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR, COMPUTE_MODE = 75, 76, 20  # CUdevice_attribute
PROHIBITED = 2  # CU_COMPUTEMODE_PROHIBITED

Version = tuple[int, ...]


# ---------------------------------------------------------------------------------------------------------------- facts


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
    def right(self) -> bool:
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
    lost: Mapping[str, str] = field(default_factory=dict)
    trial: Trial | None = None

    @property
    def place(self) -> str:
        """Place where kernels would run, `GPU` or `SIMULATOR`; else the obstacle, `NO_GPU` or `BROKEN_DRIVER`."""
        if self.requested if self.simulated is None else self.simulated:
            return SIMULATOR
        if self.driver_error is None:
            return GPU
        return NO_GPU if _is_absent(self) else BROKEN_DRIVER

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


# ------------------------------------------------------------------------------- facts, gathered in child processes


def _driver_facts() -> dict[str, Any]:
    """Query the driver through ctypes, since cuda.bindings may be missing."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(name)
        off_path = False
    except OSError:
        off_path = True
    facts: dict[str, Any] = {"driver_error": driver_error(), "gpu_count": gpu_count()}
    try:
        driver = ctypes.CDLL(name)  # loaded by now if it exists at all: the loader knows it by its name
    except OSError:
        return facts
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) == 0:
        facts["driver_cuda"] = [number.value // 1000, number.value % 1000 // 10]
    facts["driver_off_path"] = off_path
    facts["gpus"] = [_describe(driver, index) for index in range(facts["gpu_count"])]
    facts["driver_release"] = _release(driver) if facts["gpus"] else None
    return facts


def _describe(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, number, memory, name = (
        ctypes.c_int(0),
        ctypes.c_int(0),
        ctypes.c_size_t(0),
        ctypes.create_string_buffer(128),
    )
    driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index))
    driver.cuDeviceGetName(name, ctypes.c_int(len(name)), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(which: int) -> int:
        driver.cuDeviceGetAttribute(ctypes.byref(number), ctypes.c_int(which), device)
        return number.value

    return {
        "name": name.value.decode(errors="replace"),
        "cc": [attribute(COMPUTE_CAPABILITY_MAJOR), attribute(COMPUTE_CAPABILITY_MINOR)],
        "memory": memory.value,
        "compute_mode": attribute(COMPUTE_MODE),
    }


def _release(driver: ctypes.CDLL) -> str | None:
    """Return the driver's own version, from NVML or the kernel module."""
    from numba_gemm.lab.bench.nvml import open_nvml

    uuid = (ctypes.c_ubyte * 16)()
    try:
        driver.cuDeviceGetUuid(ctypes.byref(uuid), ctypes.c_int(0))
    except AttributeError:
        pass
    else:
        digits = bytes(uuid).hex()
        cut = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        if (nvml := open_nvml("GPU-" + "-".join(cut))) is not None:
            return nvml.driver
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else None


def _import_facts() -> dict[str, Any]:
    """Gather failed imports, Numba's choice between GPU and simulator, and the cache directory."""
    failed = {}
    for module in (*NEEDED, *NEEDED_BY_COMPILER, *NEEDED_BY_TOOLS):
        try:
            importlib.import_module(module)
        except Exception as error:
            failed[module] = _one_line(error)
    facts: dict[str, Any] = {"imports": failed}
    if not failed.keys() & NEEDED.keys():
        from numba_gemm.runtime.kernel_cache import directory
        from numba_gemm.simulator.switch import SIMULATOR as simulated

        facts["simulated"] = simulated
        try:
            path = directory()
        except RuntimeError as error:
            facts["cache_error"] = str(error)
        else:
            facts["cache"] = None if path is None else str(path)
            facts["cache_error"] = None if path is None else cannot_write(path)
    return facts


def cannot_write(path: Path) -> str | None:
    """Return the reason why the cache cannot write to a directory, which need not exist yet; None if it can."""
    from numba_gemm.runtime.private_files import refusal

    try:
        if path.is_dir() and (problem := refusal(path, path.stat())) is not None:
            return problem
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not existing.is_dir():
            return f"{existing} is no directory"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} cannot be written"
        with tempfile.TemporaryFile(dir=existing) as file:  # deleted on close
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        return _one_line(error)
    return None


def _compiler_facts() -> dict[str, Any]:
    """Gather the locations and versions of the compiler's libraries."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    libraries, facts = {}, {}
    for name, (distribution, distribution_12) in LIBRARIES.items():
        try:
            loaded = load_nvidia_dynamic_lib(name)
            library = Library(path=loaded.abs_path, via=getattr(loaded, "found_via", None))
            release: Sequence[int]
            if name == "nvvm":  # NVVM only reports the version of its language
                package = distribution_12 if library.extra == "cu12" else distribution
                release = parsed(_version(package))[:2] if library.extra else _release_in(loaded.abs_path)
            elif name == "nvrtc":
                from cuda.bindings import nvrtc

                _, *release = nvrtc.nvrtcVersion()
                _, architectures = nvrtc.nvrtcGetSupportedArchs()
                facts["supported"] = [divmod(architecture, 10) for architecture in architectures]
            else:
                from cuda.bindings import nvjitlink

                release = nvjitlink.version()
            libraries[name] = {**asdict(library), "version": list(release) or None}
        except Exception as error:
            libraries[name] = asdict(Library(error=_one_line(error)))
    return {"libraries": libraries, **facts}


def _release_in(path: str | None) -> Version:
    """CUDA release in the name of a toolkit's directory, as in ``/usr/local/cuda-13.0``; empty if there is none."""
    match = re.search(r"cuda-(\d+)\.(\d+)", str(Path(path or "").resolve()))
    return tuple(int(part) for part in match.groups()) if match else ()


def _trial_facts() -> dict[str, Any]:
    """Multiply small matrices, and compare the result with float64."""
    import numpy as np

    from numba_gemm import tiled_sgemm
    from numba_gemm.models.accuracy import compare, reference
    from numba_gemm.runtime.device import current_device, device_properties
    from numba_gemm.simulator.switch import SIMULATOR as simulated

    where = "Numba's simulator" if simulated else device_properties(current_device()).name
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((PRODUCT, PRODUCT), dtype=np.float32) for _ in range(2))
    begin = time.perf_counter()
    c = tiled_sgemm(a, b)
    seconds = time.perf_counter() - begin
    error = compare(c, *reference(1.0, a, b), PRODUCT).in_bounds
    return {"where": where, "simulated": simulated, "error": error, "seconds": seconds}


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "driver": _driver_facts,
    "imports": _import_facts,
    "compiler": _compiler_facts,
    "trial": _trial_facts,
}
ANSWER = "numba_gemm.doctor answers: "


def _one_line(error: BaseException) -> str:
    """Format an exception in one line: its type and its most informative line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # NumPy's import error begins with a page of advice; its last line gives the cause.
    told = lines[-1] if lines and lines[0].startswith("IMPORTANT") else " ".join(lines)
    return f"{type(error).__name__}: {told[:400]}" if told else type(error).__name__


def answer(section: str) -> int:
    """Print one kind of facts; runs in a child process of `asked`."""
    try:
        facts = SECTIONS[section]()
    except Exception as error:
        traceback.print_exc()
        facts = {"lost": _one_line(error)}
        print(ANSWER + json.dumps(facts), flush=True)
        return NOT_READY
    print(ANSWER + json.dumps(facts), flush=True)
    return READY


def asked(section: str, limit_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Ask a child process for one kind of facts; ``{"lost": reason}`` if it does not answer, whatever the cause.

    Parameters
    ----------
    section : str
        One of `SECTIONS`.
    limit_s : float
        Time limit in seconds.
    environment : mapping of str to str, optional
        Environment of the child; by default, that of this process.
    """
    command = [sys.executable, "-m", "numba_gemm.doctor", "--section", section]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"lost": f"it did not end within {limit_s:g} s"}
    except OSError as error:
        return {"lost": _one_line(error)}
    output, complaint = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    answers = [line[len(ANSWER) :] for line in output.splitlines() if line.startswith(ANSWER)]
    try:
        return dict(json.loads(answers[-1]))
    except (IndexError, ValueError):
        pass
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        return {"lost": f"its process was ended by {name}"}
    last = next((line for line in reversed(complaint.splitlines()) if line.strip()), "it said nothing")
    return {"lost": f"its process ended with status {done.returncode}: {last[:400]}"}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception:  # unreadable metadata
        return None


def _settings() -> Iterator[str]:
    wanted = ("NUMBA_", "CUDA_", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    return (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(wanted))


def _kernel_release() -> str:
    try:
        return Path("/proc/sys/kernel/osrelease").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return ""


def gather(limit_s: float = 120.0) -> Facts:
    """Gather all facts except the trial, which `with_trial` runs.

    Parameters
    ----------
    limit_s : float
        Time limit in seconds for each kind of facts.
    """
    versions = {
        name: version
        for name in (*DISTRIBUTIONS, *BINDINGS, *COMPILER, *COMPILER_12, *OPTIONAL)
        if (version := _version(name)) is not None
    }
    answers = {section: asked(section, limit_s) for section in ("driver", "imports", "compiler")}
    driver, imports, compiler = answers.values()
    gpus = tuple(Gpu(**{**gpu, "cc": tuple(gpu["cc"])}) for gpu in driver.get("gpus", []))
    libraries = {
        name: Library(**{**library, "version": tuple(library["version"]) if library["version"] else None})
        for name, library in compiler.get("libraries", {}).items()
    }
    lost = {section: found["lost"] for section, found in answers.items() if "lost" in found}
    return Facts(
        python=tuple(sys.version_info[:3]),
        system=platform.system(),
        machine=platform.machine(),
        versions=versions,
        settings=tuple(_settings()),
        driver_error=driver.get("driver_error", f"asking the driver failed: {lost.get('driver')}.")
        if "driver" in lost
        else driver["driver_error"],
        gpu_count=driver.get("gpu_count", 0),
        driver_cuda=tuple(driver["driver_cuda"]) if driver.get("driver_cuda") else None,
        driver_release=driver.get("driver_release"),
        driver_off_path=driver.get("driver_off_path", False),
        gpus=gpus,
        kernel_driver=any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl")),
        container=any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv"))
        or "KUBERNETES_SERVICE_HOST" in os.environ,
        wsl="microsoft" in _kernel_release(),
        imports=imports.get("imports", {}),
        libraries=libraries,
        supported=tuple(tuple(cc) for cc in compiler.get("supported", [])),
        requested=simulator_requested(),
        simulated=imports.get("simulated"),
        cache=imports.get("cache"),
        cache_error=imports.get("cache_error"),
        lost=lost,
    )


def with_trial(facts: Facts, limit_s: float) -> Facts:
    """Run the trial where kernels would run, or on the simulator if they would run nowhere."""
    simulated = facts.place != GPU
    environment = simulator_environment() if simulated and facts.place != SIMULATOR else dict(os.environ)
    environment["NUMBA_GEMM_CACHE_DIR"] = "off"  # a cached kernel would not test the compiler
    found = asked("trial", limit_s, environment)
    if "lost" in found:
        name = facts.gpus[0].name if facts.gpus and not simulated else "the GPU"
        where = "Numba's simulator" if simulated else name
        return replace(facts, trial=Trial(where, simulated, failure=found["lost"]))
    return replace(facts, trial=Trial(**found))


# ------------------------------------------------------------------------------------------------------------ diagnosis


@dataclass(frozen=True)
class Finding:
    """A problem or a remark, and the command that fixes or changes it."""

    level: str
    problem: str
    fix: str


SIMULATE = "export NUMBA_ENABLE_CUDASIM=1"
REINSTALL_DRIVER = (
    "install a newer driver (Ubuntu: sudo ubuntu-drivers install; others: https://www.nvidia.com/drivers)"
)
# Errors of the driver's initialisation, by CUresult (CUDA Driver API, "Data types used by CUDA driver").
DRIVER_ANSWERS = {
    34: (
        "the library that was found is a toolkit's stub, not a driver",
        "take the directory that ends in /stubs out of LD_LIBRARY_PATH: echo $LD_LIBRARY_PATH",
    ),
    46: ("another process holds the GPU for itself", "sudo nvidia-smi -c DEFAULT"),
    802: ("the switches between the GPUs are not set up", "sudo systemctl start nvidia-fabricmanager"),
    803: ("the library is of another version than the kernel's driver, after an update for instance", "sudo reboot"),
    804: (
        "a compatibility package's library came before the driver's own, and this GPU does not support it",
        "take the directory of cuda-compat out of LD_LIBRARY_PATH: echo $LD_LIBRARY_PATH",
    ),
    999: (
        "often after the machine slept, or in a container whose devices were lost",
        "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
    ),
}
NO_DEVICE, HIDDEN = 100, "reports no GPU"

# Messages of a failed trial, in the words of the driver, the compiler or this package, and their meaning. The most
# common causes are a compiler newer than the driver, and nvJitLink older than NVVM.
FAILURES = (
    (
        r"Unsupported \.version|UNSUPPORTED_PTX_VERSION|unsupported toolchain",
        "the compiler's PTX is newer than what is to assemble it understands",
        "{pinned}",
    ),
    (r"row_stack", "numba-cuda calls a function that this release of NumPy no longer has", "{numpy}"),
    (
        r"NO_BINARY_FOR_GPU|sm_\d+a?' is not|not defined for option 'gpu-architecture'",
        "the compiler does not know this GPU",
        "{upgrade}",
    ),
    (
        r"compiler's libraries|libnvvm|libNVVM|LibNotFound|FunctionNotFound|ptxas_options option is not supported",
        "a library of the compiler is missing, or too old",
        "{compiler}",
    ),
    (
        r"OUT_OF_MEMORY",
        "the GPU's memory is full",
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv, then end what is not needed",
    ),
    (r"did not end within", "the product took too long", "python -m numba_gemm.doctor --timeout 1200"),
)


def _result(facts: Facts) -> int | None:
    """Return the CUresult in the driver's error."""
    match = re.search(r"CUresult (\d+)", facts.driver_error or "")
    return int(match[1]) if match else None


def _is_absent(facts: Facts) -> bool:
    """True if there is no GPU, or only hidden ones; False if the driver of a GPU is broken."""
    result = _result(facts)
    if result is not None:
        return result == NO_DEVICE
    error = facts.driver_error or ""
    return HIDDEN in error or ("does not load" in error and not facts.kernel_driver)


def _extra(facts: Facts) -> str:
    """Return the extra for the driver's CUDA major release; without a driver, for that of the bindings."""
    major = (facts.driver_cuda or parsed(facts.versions.get("cuda-bindings")) or (13,))[0]
    return "cu12" if major <= 12 else "cu13"


def _install(facts: Facts) -> str:
    return f"python -m pip install 'numba-cuda[{_extra(facts)}]'"


def _pinned(facts: Facts) -> str:
    """Return the command that installs the compiler's packages of the driver's release."""
    extra, release = _extra(facts), facts.driver_cuda
    if release is None:
        return _install(facts)
    linker = "nvidia-nvjitlink" if extra == "cu13" else "nvidia-nvjitlink-cu12"
    least = max(release, LOWEST_LINKER)
    return f"{_install(facts)} 'cuda-toolkit=={dotted(release)}.*' '{linker}=={dotted(least)}.*'"


def _on_gpu(facts: Facts) -> str:
    """Level of a problem that keeps kernels from running on a GPU: a note if there is no GPU, or none is requested."""
    return MEND if facts.place in (GPU, BROKEN_DRIVER) else NOTE


def _python(facts: Facts) -> Iterator[Finding]:
    if facts.python < LOWEST_PYTHON:
        yield Finding(
            MEND,
            f"Python is {dotted(facts.python)}; {dotted(LOWEST_PYTHON)} or later is needed",
            f"make an environment of a newer one: python{dotted(LOWEST_PYTHON)} -m venv .venv",
        )
    elif facts.python[:2] > HIGHEST_PYTHON:
        yield Finding(
            NOTE,
            f"Python is {dotted(facts.python)}; this package is tested with {dotted(HIGHEST_PYTHON)} at most",
            f"should something fail: python{dotted(HIGHEST_PYTHON)} -m venv .venv",
        )


def _imports(facts: Facts) -> Iterator[Finding]:
    blamed: list[str] = []  # modules and errors that explain the failure of others

    def told(modules: Mapping[str, str], level: str, consequence: str) -> Iterator[Finding]:
        failed = {name: facts.imports[name] for name in modules if facts.imports.get(name, "") not in ["", *blamed]}
        absent = [module for module, error in failed.items() if _is_missing(module, error)]
        if absent:
            whole = [module for module in absent if module.rpartition(".")[0] not in absent]
            verb = "is" if len(whole) == 1 else "are"
            needed = dict.fromkeys(_package(facts, modules[module]) for module in absent)
            fix = f"python -m pip install {' '.join(repr(package) for package in needed)}"
            yield Finding(level, f"{', '.join(whole)} {verb} not installed: {consequence}", fix)
            for module in absent:
                blamed.extend((module, failed[module], modules[module].partition("<")[0]))
        for module, error in failed.items():
            if module in absent:
                continue
            if not any(re.search(rf"(?<!\w){re.escape(cause)}(?!\w)", error) for cause in blamed):
                version = facts.versions.get(modules[module].partition("<")[0])
                again = f"--force-reinstall --no-deps '{modules[module].partition('<')[0]}=={version}'"
                if version is None or "No module named" in error:
                    again = f"--upgrade '{_package(facts, modules[module])}'"
                fix = f"python -m pip install {again}"
                yield Finding(level, f"{module} does not import ({error}): {consequence}", fix)
            blamed.extend((module, error))

    yield from told(NEEDED, MEND, "no kernel runs, not even on the simulator")
    yield from told(NEEDED_BY_COMPILER, _on_gpu(facts), "kernels are not compiled")
    yield from told(NEEDED_BY_TOOLS, LIMIT, "bench.py, memory_lab and traced kernels need it")
    for section in sorted(facts.lost.keys() - {"driver"}):
        if section == "compiler" and blamed:
            continue
        level = MEND if section == "imports" else _on_gpu(facts)
        command = f"python -m numba_gemm.doctor --section {section}"
        yield Finding(level, f"asking for the {section} failed: {facts.lost[section]}", f"see all of it: {command}")


def _is_missing(module: str, error: str) -> bool:
    """True if a module cannot be imported because it or its package is not installed."""
    match = re.match(r"ModuleNotFoundError: No module named '([^']+)'", error)
    return match is not None and f"{module}.".startswith(f"{match[1]}.")


def _package(facts: Facts, package: str) -> str:
    """Return the requirement to install for a package; numba-cuda selects releases that are compatible."""
    return f"numba-cuda[{_extra(facts)}]" if package.startswith(("numba", "cuda")) else package


def _numpy(facts: Facts) -> Iterator[Finding]:
    if parsed(facts.versions.get("numpy"))[:2] >= BROKEN_NUMPY:
        yield Finding(
            _on_gpu(facts),
            f"NumPy is {facts.versions['numpy']}, which removed row_stack; numba-cuda "
            f"{facts.versions.get('numba-cuda', '')} calls it when it compiles for the first time".replace("  ", " "),
            "python -m pip install 'numpy<2.5'",
        )
    for name, lowest in LOWEST.items():
        found = parsed(facts.versions.get(name))
        if found and found < lowest:
            extra = f"[{_extra(facts)}]" if name == "numba-cuda" else ""
            yield Finding(
                MEND if name == "numba-cuda" else LIMIT,
                f"{name} is {facts.versions[name]}; {dotted(lowest)} or later is needed",
                f"python -m pip install --upgrade '{name}{extra}>={dotted(lowest)}{',<2.5' * (name == 'numpy')}'",
            )


def _driver(facts: Facts) -> Iterator[Finding]:
    error = (facts.driver_error or "").rstrip(".")
    if not error:
        return
    place, result, hidden = facts.place, _result(facts), facts.setting("CUDA_VISIBLE_DEVICES")
    level = {NO_GPU: LIMIT, BROKEN_DRIVER: MEND}.get(place, NOTE)
    if result in DRIVER_ANSWERS:
        meaning, fix = DRIVER_ANSWERS[result]
        yield Finding(level, f"{error}: {meaning}", fix)
    elif (result == NO_DEVICE or HIDDEN in error) and hidden is not None:
        yield Finding(level, f"{error}; CUDA_VISIBLE_DEVICES is {hidden!r}", "unset CUDA_VISIBLE_DEVICES")
    elif facts.wsl and "does not load" in error:
        fix = "install NVIDIA's driver in Windows, none in Linux, then in Windows: wsl --update"
        yield Finding(level, f"{error}; this is WSL, where Windows brings the driver, in /usr/lib/wsl/lib", fix)
    elif facts.container and (result == NO_DEVICE or "does not load" in error):
        has = "the host has a driver" if facts.kernel_driver else "if the host has a GPU"
        fix = "install NVIDIA's container toolkit on the host, and there: docker run --gpus all IMAGE"
        yield Finding(level, f"{error}; this is a container, and {has}, it was started without it", fix)
    elif "does not load" in error and facts.kernel_driver:
        where = 'find / -name libcuda.so.1 -not -path "*/stubs/*" -print -quit 2>/dev/null'
        fix = f'export LD_LIBRARY_PATH="$(dirname "$({where})"):$LD_LIBRARY_PATH"'
        yield Finding(level, f"{error}, though the kernel has an NVIDIA driver loaded", fix)
    elif place == BROKEN_DRIVER:
        yield Finding(level, error, "sudo dmesg | grep -i nvrm; then reboot, or " + REINSTALL_DRIVER)
    elif place != SIMULATOR:
        yield Finding(level, f"{error}; kernels run on Numba's simulator, without a GPU and slowly", SIMULATE)


def _simulator(facts: Facts) -> Iterator[Finding]:
    name = "NUMBA_ENABLE_CUDASIM="
    value = next((setting[len(name) :] for setting in facts.settings if setting.startswith(name)), None)
    if value is not None and not re.fullmatch(r"\s*[+-]?\d+\s*", value):
        level = LIMIT if facts.place != GPU else NOTE
        yield Finding(level, f"{name}{value} is no number, and Numba takes it for 0", SIMULATE)
    if facts.place == SIMULATOR and not facts.requested:
        fix = "sed -i /enable_cudasim/d .numba_config.yaml"
        yield Finding(NOTE, "it is Numba's configuration file that asks for the simulator", fix)
    elif facts.place == SIMULATOR and facts.driver_error is None and facts.gpu_count:
        found = facts.gpus[0].name if facts.gpus else "a GPU"
        yield Finding(LIMIT, f"the simulator is asked for, and {found} goes unused", "unset NUMBA_ENABLE_CUDASIM")


def _release_of_driver(facts: Facts) -> Iterator[Finding]:
    if facts.driver_cuda is not None and facts.driver_cuda < LOWEST_DRIVER:
        yield Finding(
            _on_gpu(facts),
            f"the driver is one of CUDA {dotted(facts.driver_cuda)}; one of CUDA {dotted(LOWEST_DRIVER)} or later, "
            "release 525 or later, is needed",
            REINSTALL_DRIVER,
        )
    if facts.driver_off_path and facts.driver_error is None:
        yield Finding(
            NOTE,
            "the driver's library is not on the loader's path: this package finds it, other libraries may not",
            "export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH",
        )


def _compiler(facts: Facts) -> Iterator[Finding]:
    if not facts.libraries:
        return
    level = _on_gpu(facts)
    missing = [NAMES[name] for name, library in facts.libraries.items() if library.error is not None]
    if missing:
        # Without nvJitLink, cuda-core assembles PTX with the driver, which rejects the options that kernels need.
        only = "" if level == MEND else "; the simulator does not need them, inspect and precompile do"
        causes = {library.error for library in facts.libraries.values() if library.error is not None}
        others = "; ".join(sorted(cause for cause in causes if "LibNotFound" not in cause))
        yield Finding(level, f"{', '.join(missing)} not found{others and f' ({others})'}{only}", _install(facts))
        return
    nvvm, nvrtc, linker = (facts.libraries[name].version for name in LIBRARIES)
    release = nvvm or nvrtc
    driver = facts.driver_cuda
    if linker is not None and linker < LOWEST_LINKER:
        yield Finding(
            level, f"nvJitLink is {dotted(linker)}; {dotted(LOWEST_LINKER)} or later is needed", _pinned(facts)
        )
    elif release is not None and linker is not None and release > linker:
        yield Finding(
            level,
            f"nvJitLink is of CUDA {dotted(linker)} and does not understand the PTX of NVVM's CUDA {dotted(release)}",
            _upgrade_linker(release),
        )
    if release is not None and driver is not None and driver >= LOWEST_DRIVER:
        if release[0] > driver[0]:
            yield Finding(
                level,
                f"the compiler is of CUDA {dotted(release)} and the driver of CUDA {dotted(driver)}, an earlier major "
                "release, which does not load what it makes",
                _install(facts),
            )
        elif release > driver and (linker is None or linker >= release):
            yield Finding(
                NOTE,
                f"the compiler is of CUDA {dotted(release)}, newer than the driver's {dotted(driver)}: nvJitLink makes "
                "machine code that it loads, but PTX of this compiler it would not",
                f"should something fail: {_pinned(facts)}",
            )
    bindings = parsed(facts.versions.get("cuda-bindings"))
    if bindings and nvrtc is not None and bindings[0] != nvrtc[0]:
        yield Finding(
            level,
            f"cuda-bindings is {facts.versions['cuda-bindings']} and the compiler of CUDA {dotted(nvrtc)}: their major "
            "releases have to be the same",
            _install(facts),
        )


def _upgrade_linker(release: Sequence[int]) -> str:
    package = "nvidia-nvjitlink" if release[0] >= 13 else f"nvidia-nvjitlink-cu{release[0]}"
    return f"python -m pip install --upgrade '{package}>={dotted(release)},<{release[0] + 1}'"


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.place != GPU or not facts.gpus:
        return
    first = facts.gpus[0]
    able = [index for index, gpu in enumerate(facts.gpus) if gpu.cc >= LOWEST_CC]
    if first.cc < LOWEST_CC:
        fix = f"export CUDA_VISIBLE_DEVICES={able[0]}" if able else SIMULATE
        yield Finding(
            MEND,
            f"{first.name} has compute capability {dotted(first.cc)}; {dotted(LOWEST_CC)} or later is needed",
            fix,
        )
    elif facts.supported and first.cc not in facts.supported:
        known = f"{dotted(min(facts.supported))} to {dotted(max(facts.supported))}"
        yield Finding(
            MEND,
            f"{first.name} has compute capability {dotted(first.cc)}, unknown to the compiler, which knows {known}",
            f"python -m pip install --upgrade 'numba-cuda[{_extra(facts)}]' cuda-toolkit",
        )
    elif first.cc < TENSOR_CC:
        yield Finding(
            LIMIT,
            f'{first.name} has compute capability {dotted(first.cc)}: precision="ieee" alone runs, and the stages '
            f"without asynchronous copies; other precisions need {dotted(TENSOR_CC)} or later",
            'leave precision at "ieee"; which stages run: python -c "import numba_gemm; print(numba_gemm.stages())"',
        )
    elif first.cc != BULK_CC:
        yield Finding(
            NOTE,
            f"{first.name} has compute capability {dotted(first.cc)}: every precision runs, without the instructions "
            f'of {dotted(BULK_CC)} that make them fastest; "fp32_auto" is "ieee"',
            "measure them: python bench.py --stages auto,cublas --precisions all",
        )
    if first.compute_mode == PROHIBITED:
        yield Finding(MEND, f"{first.name} is set to let no process compute on it", "sudo nvidia-smi -i 0 -c DEFAULT")
    if len(facts.gpus) > 1:
        others = ", ".join(f"{index}: {gpu.name}" for index, gpu in enumerate(facts.gpus))
        yield Finding(
            NOTE,
            f"{len(facts.gpus)} GPUs ({others}): arrays on a GPU are multiplied there, NumPy's on the current one, 0 "
            "unless the program chooses",
            "use one alone: export CUDA_VISIBLE_DEVICES=1",
        )


def _cache(facts: Facts) -> Iterator[Finding]:
    if facts.cache_error is not None:
        level = LIMIT if facts.place in (GPU, BROKEN_DRIVER) else NOTE
        yield Finding(
            level,
            f"compiled kernels cannot be kept ({facts.cache_error}): each process compiles its own",
            'export NUMBA_GEMM_CACHE_DIR="$(mktemp -d)"',
        )


def _optional(facts: Facts) -> Iterator[Finding]:
    cupy = [name for name in CUPY if name in facts.versions]
    torch = facts.versions.get("torch")
    if len(cupy) > 1:
        yield Finding(
            LIMIT,
            f"{' and '.join(cupy)} are installed together and overwrite one another",
            f"python -m pip uninstall -y {' '.join(cupy)} && python -m pip install cupy-cuda{_extra(facts)[2:]}x",
        )
    elif not cupy and (torch is None or torch.endswith("+cpu")) and facts.place == GPU:
        without = "PyTorch is one without CUDA and CuPy is not installed" if torch else "neither CuPy nor PyTorch is"
        yield Finding(
            NOTE,
            f"{without}{'' if torch else ' installed'}: cuBLAS is not measured beside the stages",
            f"python -m pip install cupy-cuda{_extra(facts)[2:]}x",
        )
    if "matplotlib" not in facts.versions:
        yield Finding(NOTE, "matplotlib is not installed: there are no pictures", "python -m pip install matplotlib")


def _trial(facts: Facts, before: Sequence[Finding]) -> Iterator[Finding]:
    trial = facts.trial
    if trial is None or trial.right:
        return
    if trial.failure is None:
        yield Finding(
            MEND,
            f"the product on {trial.where} is wrong: its largest error is {trial.error:.3g} times the bound",
            "python -m pytest -k 'ladder or api', and report what fails",
        )
        return
    if any(finding.level == MEND for finding in before):
        return  # a consequence of the findings before
    fixes = {
        "pinned": _pinned(facts),
        "numpy": "python -m pip install 'numpy<2.5'",
        "upgrade": f"python -m pip install --upgrade 'numba-cuda[{_extra(facts)}]' cuda-toolkit",
        "compiler": _install(facts),
    }
    for pattern, meaning, fix in FAILURES:
        if re.search(pattern, trial.failure):
            yield Finding(MEND, f"{meaning} ({trial.failure})", fix.format(**fixes))
            return
    command = ("NUMBA_ENABLE_CUDASIM=1 " if trial.simulated else "") + "python -m numba_gemm.doctor --section trial"
    yield Finding(MEND, f"the product on {trial.where} fails: {trial.failure}", f"see all of it: {command}")


CHECKS = (
    _python,
    _imports,
    _numpy,
    _driver,
    _simulator,
    _release_of_driver,
    _compiler,
    _gpus,
    _cache,
    _optional,
)
ORDER = (MEND, LIMIT, NOTE)


def diagnose(facts: Facts) -> list[Finding]:
    """Return the findings that follow from facts, the most severe first.

    A successful trial overrules findings that predict that kernels cannot run there.

    Returns
    -------
    list of Finding
    """
    found = [finding for check in CHECKS for finding in check(facts)]
    found += _trial(facts, found)
    if facts.trial is not None and facts.trial.right and facts.place in (GPU, SIMULATOR):
        found = [replace(finding, level=LIMIT) if finding.level == MEND else finding for finding in found]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))


def verdict(facts: Facts, findings: Sequence[Finding]) -> tuple[str, int]:
    """Return the last line and the exit status, which is 0 if kernels run on a GPU or on the simulator."""
    count = sum(finding.level == MEND for finding in findings)
    right = facts.trial is not None and facts.trial.right
    if right and facts.trial is not None and not count:
        if facts.place in (GPU, SIMULATOR):
            return f"verdict: ready: kernels run on {facts.trial.where}", READY
        return (
            "verdict: no GPU: set NUMBA_ENABLE_CUDASIM=1 before Python starts, and kernels run on Numba's simulator",
            READY,
        )
    count = max(count, 1)
    text = f"verdict: not ready: {count} thing{'' if count == 1 else 's'} to mend"
    if right:
        text += "; until then NUMBA_ENABLE_CUDASIM=1 runs kernels on Numba's simulator"
    return text, NOT_READY


# --------------------------------------------------------------------------------------------------------------- report


def _listed(facts: Facts, names: Sequence[str]) -> str:
    found = [f"{name} {facts.versions[name]}" for name in names if name in facts.versions]
    return ", ".join(found) or "none"


def _library_text(name: str, library: Library) -> str:
    if library.error is not None:
        return f"{NAMES[name]}: not found"
    release = f" of CUDA {dotted(library.version)}" if library.version else ""
    origin = f"extra {library.extra}" if library.extra else library.via or "unknown origin"
    return f"{NAMES[name]}{release} ({origin}): {library.path}"


def report(facts: Facts) -> list[str]:
    """Format the facts as lines of plain text."""
    lines = [("system", f"Python {dotted(facts.python)}, {facts.system} {facts.machine}")]
    if facts.wsl or facts.container:
        lines[0] = ("system", lines[0][1] + (", WSL" if facts.wsl else "") + (", container" if facts.container else ""))
    release = f"{facts.driver_release or 'of unknown release'}, " if facts.driver_cuda else ""
    cuda = f"CUDA {dotted(facts.driver_cuda)}" if facts.driver_cuda else ""
    lines.append(("driver", f"{release}{cuda}" or f"none: {facts.driver_error}"))
    for index, gpu in enumerate(facts.gpus):
        lines.append(("GPU", f"{index}: {gpu.name}, compute capability {dotted(gpu.cc)}, {gpu.memory / 2**30:.1f} GiB"))
    if not facts.gpus:
        lines.append(("GPU", "none"))
    lines += [("packages", _listed(facts, DISTRIBUTIONS)), ("CUDA bindings", _listed(facts, BINDINGS))]
    for name, library in facts.libraries.items():
        lines.append(("compiler", _library_text(name, library)))
    if facts.supported:
        known = f"compute capabilities {dotted(min(facts.supported))} to {dotted(max(facts.supported))}"
        lines.append(("compiler", f"compiles for {known}"))
    lines.append(("optional", _listed(facts, OPTIONAL)))
    lines.append(("simulator", "asked for" if facts.place == SIMULATOR else "not asked for"))
    if facts.cache_error is not None:
        lines.append(("kernel cache", f"not usable: {facts.cache_error}"))
    elif facts.simulated is not None:
        lines.append(("kernel cache", "off" if facts.cache is None else f"{facts.cache}, can be written"))
    for setting in facts.settings:
        lines.append(("environment", setting))
    return [f"{label:<13}  {text}" for label, text in lines]


def _trial_line(trial: Trial) -> str:
    shape = f"{PRODUCT} x {PRODUCT} x {PRODUCT} on {trial.where}"
    if trial.failure is not None:
        return f"{'product':<13}  {shape}: failed: {trial.failure}"
    word = "right" if trial.right else "WRONG"
    return f"{'product':<13}  {shape}: {word}, largest error {trial.error:.2g} of the bound, {trial.seconds:.1f} s"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m numba_gemm.doctor",
        description="Say what this machine has, what will not work and what mends it; then try a product.",
        epilog="Exit status: 0 where kernels run, on a GPU or the simulator; 1 where something has to be mended.",
    )
    made.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="S", help="seconds that the product may take (default: 300)"
    )
    made.add_argument(
        "--section", choices=SECTIONS, help="gather one kind of facts alone, and print it with its errors"
    )
    return made


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} given; expected a number of seconds above 0; pass 300, for instance"
        )
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Report the facts, run the trial and print the findings; return the exit status."""
    options = parser().parse_args(arguments)
    if options.section:
        return answer(options.section)
    facts = gather()
    print("\n".join(report(facts)), flush=True)
    facts = with_trial(facts, options.timeout)
    assert facts.trial is not None
    print(_trial_line(facts.trial))
    findings = diagnose(facts)
    for finding in findings:
        print(f"\n{finding.level}: {finding.problem}\nfix: {finding.fix}")
    text, status = verdict(facts, findings)
    print(f"\n{text}")
    return status


if __name__ == "__main__":
    sys.exit(main())
