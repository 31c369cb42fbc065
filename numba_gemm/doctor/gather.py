"""Gathering of facts, each kind in a child process with a time limit, and the trial."""

from __future__ import annotations

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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from numba_gemm.doctor.facts import (
    GPU,
    NOT_READY,
    PRODUCT,
    READY,
    SIMULATOR,
    Facts,
    Gpu,
    Library,
    Trial,
    Version,
    parsed,
)
from numba_gemm.doctor.requirements import (
    BINDINGS,
    COMPILER,
    COMPILER_12,
    DISTRIBUTIONS,
    LIBRARIES,
    NEEDED,
    NEEDED_BY_COMPILER,
    NEEDED_BY_TOOLS,
    OPTIONAL,
)
from numba_gemm.simulator.probe import driver_error, gpu_count, simulator_environment, simulator_requested

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR, COMPUTE_MODE = 75, 76, 20  # CUdevice_attribute


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
    from numba_gemm.lab.harness.nvml import open_nvml

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
    """Gather failed imports, Numba's choice between GPU and simulator, the cache directory, and wrong settings."""
    failed = {}
    for module in (*NEEDED, *NEEDED_BY_COMPILER, *NEEDED_BY_TOOLS):
        try:
            importlib.import_module(module)
        except Exception as error:
            failed[module] = _one_line(error)
    facts: dict[str, Any] = {"imports": failed}
    if not failed.keys() & NEEDED.keys():
        from numba_gemm.runtime.compilation import default_jobs
        from numba_gemm.runtime.kernel_files import directory, size_limit
        from numba_gemm.simulator.switch import SIMULATOR as simulated

        facts["simulated"] = simulated
        try:
            path = directory()
        except RuntimeError as error:
            facts["cache_error"] = str(error)
        else:
            facts["cache"] = None if path is None else str(path)
            facts["cache_error"] = None if path is None else cannot_write(path)
        facts["wrong_settings"] = []
        for value_of in (default_jobs, size_limit):
            try:
                value_of()
            except ValueError as error:
                facts["wrong_settings"].append(str(error))
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
        wrong_settings=tuple(imports.get("wrong_settings", ())),
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
