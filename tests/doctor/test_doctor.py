"""``numba-gemm doctor``: every known failure as facts, and the command on installations that are broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile_stages import compiler_environment

from numba_gemm.doctor import checks, cli, gather, report, requirements
from numba_gemm.doctor.checks import ERROR, LIMIT, NOTE, Finding
from numba_gemm.doctor.facts import BROKEN_DRIVER, NO_GPU, PROHIBITED, Facts, Gpu, Library, Trial, dotted, parsed
from numba_gemm.simulator.probe import simulator_environment

ROOT = Path(checks.__file__).parents[2]
H200 = Gpu("NVIDIA H200", (9, 0), 150_000_000_000)
SITE = "/env/lib/python3.12/site-packages/nvidia"


def compiler(nvvm=(13, 0), nvrtc=(13, 0), linker=(13, 0)) -> dict[str, Library]:
    where = f"{SITE}/cu13/lib" if nvrtc[0] == 13 else f"{SITE}/cuda_nvrtc/lib"
    versions = {"nvvm": nvvm, "nvrtc": nvrtc, "nvJitLink": linker}
    return {name: Library(version, f"{where}/lib{name}.so", "site-packages") for name, version in versions.items()}


READY = Facts(
    python=(3, 12, 3),
    versions={
        "numba-cuda": "0.30.4",
        "numba": "0.68.1",
        "numpy": "2.4.6",
        "matplotlib": "3.11.2",
        "cupy-cuda13x": "14.2.0",
        "cuda-bindings": "13.0.3",
    },
    gpu_count=1,
    driver_cuda=(13, 0),
    driver_release="580.159.04",
    gpus=(H200,),
    kernel_driver=True,
    libraries=compiler(),
    supported=((7, 5), (8, 0), (8, 9), (9, 0), (12, 0)),
    simulated=False,
    cache="/home/user/.cache/numba_gemm",
    trial=Trial("NVIDIA H200", simulated=False, error=0.05, seconds=2.0),
)
FAILED = Trial("NVIDIA H200", simulated=False, failure="RuntimeError: it does not work")
SIMULATED = Trial("Numba's simulator", simulated=True, error=0.05, seconds=2.0)
NO_DRIVER = "no NVIDIA driver was found (libcuda does not load)."
HIDDEN = "the NVIDIA driver reports no GPU (CUDA_VISIBLE_DEVICES may hide them)."
BARE = replace(
    READY,
    driver_error=NO_DRIVER,
    gpu_count=0,
    driver_cuda=None,
    driver_release=None,
    gpus=(),
    kernel_driver=False,
    trial=SIMULATED,
)
WANTED = replace(BARE, requested=True, simulated=True, settings=("NUMBA_ENABLE_CUDASIM=1",))


def refused(result: int) -> dict:
    """Return the facts of a driver that returns this error when it is initialised."""
    error = f"the NVIDIA driver does not start: some words (CUresult {result})."
    return {"driver_error": error, "gpu_count": 0, "gpus": (), "trial": SIMULATED}


def versions(**changed: str | None) -> dict:
    names = {name.replace("_", "-"): version for name, version in changed.items()}
    return {"versions": {name: found for name, found in {**READY.versions, **names}.items() if found is not None}}


def fails(message: str) -> dict:
    return {"trial": replace(FAILED, failure=message)}


def gpu(**changed) -> dict:
    return {"gpus": (replace(H200, **changed),)}


MISSING = Library(error="DynamicLibNotFoundError: no libnvvm.so")


def absent(module: str) -> str:
    """Return the error of importing a module that is not installed."""
    return f"ModuleNotFoundError: No module named '{module}'"


# Changes to the facts of a machine that is ready; then the level of the finding, words of it, and words of its fix. An
# error comes with a product that failed.
ON_GPU = {
    "old Python": ({"python": (3, 10, 12)}, ERROR, "Python is 3.10.12; 3.11", "python3.11 -m venv"),
    "new Python": ({"python": (3, 14, 0)}, NOTE, "Python is 3.14.0", "python3.13 -m venv"),
    "NumPy without row_stack": (versions(numpy="2.5.0"), ERROR, "2.5.0, which removed row_stack", "'numpy<2.5'"),
    "NumPy later still": (versions(numpy="3.0.0rc1"), ERROR, "removed row_stack; numba-cuda 0.30.4", "'numpy<2.5'"),
    "old numba-cuda": (versions(numba_cuda="0.20.1"), ERROR, "0.20.1; 0.30.4 or later", "--upgrade 'numba-cuda[cu13]"),
    "old NumPy": (versions(numpy="1.26.4"), LIMIT, "numpy is 1.26.4; 2.0 or later", "--upgrade 'numpy>=2.0,<2.5'"),
    "old cuda-core": (versions(cuda_core="0.5.1"), LIMIT, "cuda-core is 0.5.1; 0.7 or", "--upgrade 'cuda-core>=0.7'"),
    "no numba-cuda": (
        {"imports": {"numba_cuda": absent("numba_cuda")}},
        ERROR,
        "numba_cuda is not",
        "'numba-cuda[cu13]'",
    ),
    "no numba": ({"imports": {"numba": absent("numba")}}, ERROR, "numba is not installed", "'numba-cuda[cu13]'"),
    "broken numba": (
        {"imports": {"numba": "ImportError: no", "numba.cuda": "ImportError: no"}},
        ERROR,
        "numba does not import (ImportError: no)",
        "--force-reinstall --no-deps 'numba==0.68.1'",
    ),
    "a package that another one needs": (
        {"imports": {"numba": absent("llvmlite"), "numba.cuda": absent("llvmlite")}},
        ERROR,
        "numba does not import (ModuleNotFoundError: No module named 'llvmlite')",
        "--upgrade 'numba-cuda[cu13]'",
    ),
    "no NumPy": (
        {
            "imports": {
                "numpy": absent("numpy"),
                "numba": absent("numpy"),
                "cuda.core": absent("numpy"),
                "pandas": "ImportError: Unable to import required dependency numpy.",
            },
            "lost": {"compiler": absent("numpy")},
        },
        ERROR,
        "numpy is not installed",
        "pip install 'numpy<2.5'",
    ),
    "nothing installed": (
        {
            "imports": {
                **{module: absent(module) for module in ("numpy", "numba", "numba_cuda")},
                **{module: absent("cuda") for module in ("cuda.pathfinder", "cuda.bindings.driver")},
            },
        },
        ERROR,
        "numpy, numba, numba_cuda, cuda.pathfinder, cuda.bindings.driver are not installed",
        "pip install 'numpy<2.5' 'numba-cuda[cu13]'",
    ),
    "no bindings": (
        {
            "imports": {
                "numba.cuda": "ImportError: NVIDIA CUDA Python bindings not found. Install cuda-bindings.",
                "cuda.bindings.driver": absent("cuda.bindings"),
            },
        },
        ERROR,
        "cuda.bindings.driver is not installed",
        "'numba-cuda[cu13]'",
    ),
    "no cuda-core": ({"imports": {"cuda.core": absent("cuda.core")}}, ERROR, "are not compiled", "'numba-cuda[cu13]'"),
    "no pandas": ({"imports": {"pandas": absent("pandas")}}, LIMIT, "pandas is not installed", "pip install 'pandas'"),
    "crash of an import": ({"lost": {"imports": "ended by SIGSEGV"}}, ERROR, "SIGSEGV", "--section imports"),
    "crash of the driver": (
        {"lost": {"driver": "SIGSEGV"}, "driver_error": "asking the driver failed: SIGSEGV.", "gpus": ()},
        ERROR,
        "asking the driver failed: SIGSEGV",
        "dmesg",
    ),
    "no compiler": (
        {"libraries": dict.fromkeys(requirements.LIBRARIES, MISSING)},
        ERROR,
        "NVVM, NVRTC, nvJitLink not found",
        "pip install 'numba-cuda[cu13]'",
    ),
    "no compiler, driver of CUDA 12": (
        {"libraries": dict.fromkeys(requirements.LIBRARIES, MISSING), "driver_cuda": (12, 8)},
        ERROR,
        "not found",
        "pip install 'numba-cuda[cu12]'",
    ),
    "no nvJitLink": ({"libraries": {**compiler(), "nvJitLink": MISSING}}, ERROR, "nvJitLink not found", "[cu13]"),
    "old nvJitLink": (
        {"libraries": compiler((12, 2), (12, 2), (12, 2)), "driver_cuda": (12, 2), **versions(cuda_bindings="12.9.3")},
        ERROR,
        "nvJitLink is 12.2; 12.3",
        "'nvidia-nvjitlink-cu12==12.3.*'",
    ),
    "PTX newer than nvJitLink": (
        {"libraries": compiler((13, 5), (13, 5), (13, 0))},
        ERROR,
        "nvJitLink is of CUDA 13.0 and does not understand the PTX of NVVM's CUDA 13.5",
        "--upgrade 'nvidia-nvjitlink>=13.5,<14'",
    ),
    "compiler of a later major release than the driver": (
        {"driver_cuda": (12, 8)},
        ERROR,
        "of CUDA 13.0 and the driver of CUDA 12.8, an earlier major",
        "'numba-cuda[cu12]'",
    ),
    "compiler of a later minor release than the driver": (
        {"libraries": compiler((13, 5), (13, 5), (13, 5))},
        NOTE,
        "CUDA 13.5, newer than the driver's 13.0",
        "'cuda-toolkit==13.0.*' 'nvidia-nvjitlink==13.0.*'",
    ),
    "bindings of another major release": (
        versions(cuda_bindings="12.9.3"),
        ERROR,
        "cuda-bindings is 12.9.3 and the compiler of CUDA 13.0",
        "'numba-cuda[cu13]'",
    ),
    "driver of CUDA 11": (
        {"driver_cuda": (11, 4)},
        ERROR,
        "one of CUDA 11.4; one of CUDA 12.0 or later",
        "ubuntu-drivers install",
    ),
    "driver off the path": ({"driver_off_path": True, "wsl": True}, NOTE, "the loader's path", "/usr/lib/wsl/lib"),
    "compute capability too low": (gpu(cc=(7, 0)), ERROR, "compute capability 7.0; 7.5", "NUMBA_ENABLE_CUDASIM=1"),
    "the other GPU would do": (
        {"gpus": (replace(H200, cc=(6, 1)), H200), "gpu_count": 2},
        ERROR,
        "compute capability 6.1; 7.5",
        "export CUDA_VISIBLE_DEVICES=1",
    ),
    "compute capability unknown to the compiler": (
        gpu(cc=(13, 0)),
        ERROR,
        "13.0, unknown to the compiler, which knows 7.5 to 12.0",
        "--upgrade",
    ),
    "no tensor cores": (gpu(cc=(7, 5)), LIMIT, 'precision="ieee" alone runs', "stages()"),
    "tensor cores without bulk copies": (gpu(cc=(8, 0)), NOTE, '"fp32_auto" is "ieee"', "--precisions all"),
    "prohibited": (gpu(compute_mode=2), ERROR, "no process compute", "nvidia-smi -i 0 -c DEFAULT"),
    "several GPUs": (
        {"gpus": (H200, replace(H200, name="NVIDIA T4")), "gpu_count": 2},
        NOTE,
        "2 GPUs (0: NVIDIA H200, 1: NVIDIA T4)",
        "CUDA_VISIBLE_DEVICES=1",
    ),
    "stub": (refused(34), ERROR, "a toolkit's stub", "/stubs out of LD_LIBRARY_PATH"),
    "fabric": (refused(802), ERROR, "switches between the GPUs", "nvidia-fabricmanager"),
    "driver of two versions": (refused(803), ERROR, "another version than the kernel's", "sudo reboot"),
    "forward compatibility": (refused(804), ERROR, "does not support it", "cuda-compat out of"),
    "devices lost": (refused(999), ERROR, "CUresult 999", "modprobe nvidia_uvm"),
    "another refusal": (refused(304), ERROR, "CUresult 304", "dmesg"),
    "library of the driver not seen": (
        {"driver_error": NO_DRIVER, "gpus": (), "trial": SIMULATED},
        ERROR,
        "though the kernel has an NVIDIA driver",
        "export LD_LIBRARY_PATH=",
    ),
    "container without its driver": (
        {"driver_error": NO_DRIVER, "gpus": (), "container": True, "trial": SIMULATED},
        ERROR,
        "this is a container, and the host has a driver",
        "docker run --gpus all",
    ),
    "cache cannot be written": (
        {"cache_error": "/home/user cannot be written"},
        LIMIT,
        "(/home/user cannot be written): each process compiles",
        "export NUMBA_GEMM_CACHE_DIR=",
    ),
    "settings that are wrong": (
        {"wrong_settings": ("NUMBA_GEMM_JOBS is '0'; expected a number of processes from 1 on; set one",)},
        LIMIT,
        "NUMBA_GEMM_JOBS is '0'; expected a number of processes from 1 on",
        "unset NUMBA_GEMM_JOBS",
    ),
    "no cuBLAS": (
        versions(cupy_cuda13x=None),
        NOTE,
        "neither CuPy nor PyTorch is installed",
        "install 'cupy-cuda13x[ctk]'",
    ),
    "PyTorch without CUDA": (
        versions(cupy_cuda13x=None, torch="2.11.0+cpu"),
        NOTE,
        "PyTorch is one without CUDA",
        "install 'cupy-cuda13x[ctk]'",
    ),
    "two CuPys": (versions(cupy_cuda12x="14.2.0"), LIMIT, "overwrite one another", "-y cupy-cuda12x cupy-cuda13x"),
    "no matplotlib": (versions(matplotlib=None), NOTE, "there are no pictures", "install matplotlib"),
    "simulator by a word": (
        {"settings": ("NUMBA_ENABLE_CUDASIM=yes",)},
        NOTE,
        "NUMBA_ENABLE_CUDASIM=yes is no number",
        "export NUMBA_ENABLE_CUDASIM=1",
    ),
    "simulator beside a GPU": (
        {"requested": True, "simulated": True, "trial": SIMULATED},
        LIMIT,
        "NVIDIA H200 goes unused",
        "unset NUMBA_ENABLE_CUDASIM",
    ),
    "simulator by Numba's file": ({"simulated": True, "trial": SIMULATED}, NOTE, "file that asks", "enable_cudasim"),
    "product fails by old PTX": (
        fails("LinkerError: ptxas fatal : Unsupported .version 8.7; current version is '8.4'"),
        ERROR,
        "PTX is newer than",
        "'cuda-toolkit==13.0.*'",
    ),
    "product fails by row_stack": (
        fails("AttributeError: module 'numpy' has no attribute 'row_stack'"),
        ERROR,
        "no longer has",
        "'numpy<2.5'",
    ),
    "product fails by an unknown GPU": (fails("CUDA_ERROR_NO_BINARY_FOR_GPU"), ERROR, "not know this GPU", "--upgrade"),
    "product fails without nvJitLink": (
        fails("ValueError: ptxas_options option is not supported by the driver API"),
        ERROR,
        "missing, or too old",
        "'numba-cuda[cu13]'",
    ),
    "product fails for memory": (fails("CUDA_ERROR_OUT_OF_MEMORY"), ERROR, "memory is full", "nvidia-smi"),
    "product takes too long": (fails("it did not end within 300 s"), ERROR, "too long", "--timeout 1200"),
    "product fails": (fails("KeyError: 'what'"), ERROR, "fails: KeyError: 'what'", "--section trial"),
    "product is wrong": ({"trial": replace(READY.trial, error=7.0)}, ERROR, "7 times the bound", "pytest"),
    "product is NaN": ({"trial": replace(READY.trial, error=float("nan"))}, ERROR, "nan times the bound", "pytest"),
}


def one(findings: list[Finding], words: str) -> Finding:
    found = [finding for finding in findings if words in finding.problem]
    assert len(found) == 1, findings
    return found[0]


@pytest.mark.parametrize("case", ON_GPU)
def test_every_known_failure_is_found(case):
    changed, level, words, fix = ON_GPU[case]
    facts = replace(READY, **{**({"trial": FAILED} if level == ERROR else {}), **changed})
    findings = checks.diagnose(facts)
    finding = one(findings, words)
    assert finding.level == level
    assert fix in finding.fix
    text, status = report.verdict(facts, findings)
    assert len(findings) == 1 + (case == "the other GPU would do"), findings
    if level == ERROR:
        assert text.startswith("verdict: not ready: 1 thing to fix")
        assert status == 1
    else:
        assert text.startswith("verdict: ready: kernels run on ")
        assert status == 0


def test_every_fix_is_one_line():
    for changed, *_ in ON_GPU.values():
        for facts in (replace(READY, **changed), replace(BARE, **changed), replace(WANTED, **changed)):
            for finding in checks.diagnose(replace(facts, trial=None)):
                assert finding.fix
                assert "\n" not in finding.fix + finding.problem
                assert "{" not in finding.fix


def test_a_machine_that_is_ready():
    assert checks.diagnose(READY) == []
    assert report.verdict(READY, []) == ("verdict: ready: kernels run on NVIDIA H200", 0)


def test_things_to_mend_are_counted():
    facts = replace(READY, **versions(numpy="2.5.1"), libraries={**compiler(), "nvJitLink": MISSING}, trial=FAILED)
    findings = checks.diagnose(facts)
    assert [finding.level for finding in findings] == [ERROR, ERROR]
    assert report.verdict(facts, findings) == ("verdict: not ready: 2 things to fix", 1)


def test_a_correct_product_overrules_what_was_feared():
    """A correct product overrules what is known of releases: a later numba-cuda may not call row_stack."""
    facts = replace(READY, **versions(numpy="2.5.1"))
    findings = checks.diagnose(facts)
    assert one(findings, "row_stack").level == LIMIT
    assert report.verdict(facts, findings)[1] == 0


def test_without_a_trial_nothing_is_ready():
    facts = replace(READY, trial=None)
    assert report.verdict(facts, checks.diagnose(facts)) == ("verdict: not ready: 1 thing to fix", 1)


WITHOUT_GPU = {
    "no driver": ({}, "libcuda does not load", "export NUMBA_ENABLE_CUDASIM=1"),
    "WSL": ({"wsl": True}, "this is WSL", "wsl --update"),
    "container": ({"container": True}, "if the host has a GPU", "docker run --gpus all"),
    "hidden": (
        {"driver_error": HIDDEN, "settings": ("CUDA_VISIBLE_DEVICES=",), "kernel_driver": True, "driver_cuda": (13, 0)},
        "CUDA_VISIBLE_DEVICES is ''",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "hidden, by a refusal": (
        {**refused(100), "settings": ("CUDA_VISIBLE_DEVICES=7",), "kernel_driver": True},
        "CUDA_VISIBLE_DEVICES is '7'",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "driver without a GPU": (refused(100), "CUresult 100", "export NUMBA_ENABLE_CUDASIM=1"),
}


@pytest.mark.parametrize("case", WITHOUT_GPU)
def test_without_a_gpu_the_simulator_is_offered(case):
    changed, words, fix = WITHOUT_GPU[case]
    facts = replace(BARE, **changed)
    assert facts.place == NO_GPU
    findings = checks.diagnose(facts)
    finding = one(findings, words)
    assert (finding.level, len(findings)) == (LIMIT, 1)
    assert fix in finding.fix
    text, status = report.verdict(facts, findings)
    assert text.startswith("verdict: no GPU: set NUMBA_ENABLE_CUDASIM=1 before Python starts")
    assert status == 0


@pytest.mark.parametrize(
    "changed",
    [
        versions(numpy="2.5.0"),
        {"libraries": dict.fromkeys(requirements.LIBRARIES, MISSING)},
        versions(cuda_bindings="12.9.3"),
    ],
)
@pytest.mark.parametrize("bare", [BARE, WANTED])
def test_what_the_simulator_does_not_need_is_a_note(bare, changed):
    facts = replace(bare, **changed)
    findings = checks.diagnose(facts)
    assert {finding.level for finding in findings} <= {NOTE, LIMIT}
    assert len(findings) == 1 + (bare is BARE)
    assert report.verdict(facts, findings)[1] == 0


def test_a_broken_driver_is_told_from_none():
    """The simulator works, but the owner of a GPU is told that the GPU does not."""
    facts = replace(BARE, kernel_driver=True)
    assert facts.place == BROKEN_DRIVER
    text, status = report.verdict(facts, checks.diagnose(facts))
    assert text == (
        "verdict: not ready: 1 thing to fix; until then NUMBA_ENABLE_CUDASIM=1 runs kernels on Numba's simulator"
    )
    assert status == 1


def test_the_simulator_that_is_asked_for_is_ready():
    assert checks.diagnose(WANTED) == []
    assert report.verdict(WANTED, []) == ("verdict: ready: kernels run on Numba's simulator", 0)


def test_a_simulator_that_fails_is_not_ready():
    facts = replace(WANTED, trial=replace(SIMULATED, error=None, failure="RuntimeError: no"))
    findings = checks.diagnose(facts)
    assert "NUMBA_ENABLE_CUDASIM=1 python -m numba_gemm.doctor --section trial" in findings[0].fix
    assert report.verdict(facts, findings) == ("verdict: not ready: 1 thing to fix", 1)


def test_the_capabilities_are_those_of_the_stages():
    from numba_gemm.gemm.precision import STAGES as TENSOR_STAGES
    from numba_gemm.kernels.ladder import STAGES

    assert min(stage.min_cc for stage in STAGES.values()) == requirements.LOWEST_CC
    able = [(major, minor) for major in range(7, 13) for minor in range(10)]
    assert min(cc for cc in able if any(stage.runs_on(cc) for stage in TENSOR_STAGES)) == requirements.TENSOR_CC
    assert [cc for cc in able if TENSOR_STAGES[0].runs_on(cc)] == [requirements.BULK_CC]


def test_the_attributes_are_those_of_the_driver():
    from cuda.bindings.driver import CUcomputemode, CUdevice_attribute

    for name in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "COMPUTE_MODE"):
        assert getattr(CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}") == getattr(gather, name)
    assert CUcomputemode.CU_COMPUTEMODE_PROHIBITED == PROHIBITED


@pytest.mark.parametrize(
    ("facts", "switch"), [(READY, None), (WANTED, None), (BARE, "1"), (replace(BARE, kernel_driver=True), "1")]
)
def test_the_product_is_tried_where_kernels_would_run(facts, switch, monkeypatch):
    """Kernels are compiled for it: a cached kernel would not test the compiler."""
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "/somewhere")
    seen = []

    def asked(section, limit_s, environment):
        seen.append(environment)
        return {"lost": f"{section} within {limit_s} s"}

    monkeypatch.setattr(gather, "asked", asked)
    trial = gather.with_trial(facts, 5.0).trial
    assert seen[0]["NUMBA_GEMM_CACHE_DIR"] == "off"
    assert seen[0].get("NUMBA_ENABLE_CUDASIM") == switch
    where = "NVIDIA H200" if facts is READY else "Numba's simulator"
    assert trial == Trial(where, simulated=facts is not READY, failure="trial within 5.0 s")


@pytest.mark.parametrize(
    ("driver", "bindings", "extra"),
    [((13, 0), "12.9.1", "cu13"), ((12, 4), "13.0.0", "cu12"), (None, "12.9.1", "cu12"), (None, None, "cu13")],
)
def test_the_compiler_that_is_offered_suits_the_driver(driver, bindings, extra):
    libraries = dict.fromkeys(requirements.LIBRARIES, MISSING)
    facts = replace(BARE, driver_cuda=driver, libraries=libraries, **versions(cuda_bindings=bindings))
    assert one(checks.diagnose(facts), "not found;").fix == f"python -m pip install 'numba-cuda[{extra}]'"


def test_the_releases_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    numpy = f"numpy>={dotted(requirements.LOWEST['numpy'])},<{dotted(requirements.BROKEN_NUMPY)}"
    assert numpy in project["dependencies"]
    assert project["requires-python"] == f">={dotted(requirements.LOWEST_PYTHON)}"
    tested = [parsed(line.rpartition(" ")[2]) for line in project["classifiers"] if "Python :: 3." in line]
    assert max(tested) == requirements.HIGHEST_PYTHON


def test_settings_are_read(monkeypatch):
    for name in ("NUMBA_GEMM_JOBS", "NUMBA_GEMM_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert gather._import_facts()["wrong_settings"] == []
    monkeypatch.setenv("NUMBA_GEMM_JOBS", "0")
    monkeypatch.setenv("NUMBA_GEMM_CACHE_SIZE", "lots")
    jobs, size = gather._import_facts()["wrong_settings"]
    assert jobs.startswith("NUMBA_GEMM_JOBS is '0'; expected a number of processes")
    assert size.startswith("NUMBA_GEMM_CACHE_SIZE is 'lots'; expected bytes")


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.5.0rc1", (2, 5, 0)), ("2.11.0+cpu", (2, 11, 0)), ("13.3.5.0.6", (13, 3, 5, 0, 6)), ("x", ()), (None, ())],
)
def test_versions_are_read(version, numbers):
    assert parsed(version) == numbers


def test_a_directory_that_cannot_be_written(tmp_path):
    assert gather.cannot_write(tmp_path) is None
    assert gather.cannot_write(tmp_path / "a" / "b") is None
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o777)
    assert "can be written by other users" in gather.cannot_write(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    assert "is no directory" in gather.cannot_write(tmp_path / "file" / "b")
    if sys.platform == "linux":  # not writable, even for root
        assert gather.cannot_write(Path("/proc/self")) is not None
        assert gather.cannot_write(Path("/proc/nothing/of/it")) is not None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("raise SystemExit('no more')", "ended with status 1: no more"),
        ("time.sleep(60)", "did not end within 1 s"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_probe_that_dies_is_told(tmp_path, code, words):
    """Every end of a child process gives an answer."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\nif '--section' in sys.orig_argv:\n"
        "    class Finder:\n        def find_spec(self, name, *_):\n"
        f"            if name == 'numba':\n                {code}\n"
        "    sys.meta_path.insert(0, Finder())\n"
    )
    environment = {**simulator_environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    limit = 1 if "sleep" in code else 60
    found = gather.asked("trial", limit, environment)
    assert words in found["lost"]


# -------------------------------------------------------------------------------------------- the command, end to end


def hidden() -> dict[str, str]:
    """Return the environment of a machine without a GPU; an existing GPU is hidden."""
    return {**compiler_environment(), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def run(environment: dict[str, str], *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "numba_gemm.doctor", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert "\x1b" not in done.stdout
    problems = re.findall(r"^(error|limit|note): .+\nfix: .+$", done.stdout, re.MULTILINE)
    assert len(problems) == len(re.findall(r"^(?:error|limit|note|fix): ", done.stdout, re.MULTILINE)) / 2
    assert done.stdout.rstrip().rpartition("\n")[2].startswith("verdict: ")
    return done


def last(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.rstrip().rpartition("\n")[2]


def test_without_a_gpu():
    done = run(hidden())
    assert done.returncode == 0, done.stdout
    assert last(done).startswith("verdict: no GPU: set NUMBA_ENABLE_CUDASIM=1")
    assert "64 x 64 x 64 on Numba's simulator: correct" in done.stdout


def test_on_the_simulator(tmp_path):
    """The cache is checked, but neither created nor filled."""
    cache = tmp_path / "cache"
    done = run({**hidden(), "NUMBA_ENABLE_CUDASIM": "1", "NUMBA_GEMM_CACHE_DIR": str(cache)})
    assert (done.returncode, last(done)) == (0, "verdict: ready: kernels run on Numba's simulator"), done.stdout
    assert f"{cache}, can be written" in done.stdout
    assert not cache.exists()


def test_simulator_asked_for_by_a_word():
    done = run({**hidden(), "NUMBA_ENABLE_CUDASIM": "true"})
    assert "NUMBA_ENABLE_CUDASIM=true is no number" in done.stdout
    assert last(done).startswith("verdict: no GPU")


@pytest.fixture
def bench(tmp_path_factory) -> Path:
    """Create a copy of this environment that a test may break: a folder of links to the installed packages.

    It has the same path in all tests, so that Python finds the bytecode of the test before.
    """
    made = tmp_path_factory.getbasetemp() / "env"
    shutil.rmtree(made, ignore_errors=True)
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not base.exists():
        pytest.skip(f"needs {base}")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(made)}))
    packages.mkdir(parents=True)
    (made / "bin").mkdir()
    (made / "bin" / "python").symlink_to(base)
    (made / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        (packages / path.name).symlink_to(path)
    return made


def packages_of(bench: Path) -> Path:
    return next((bench / "lib").glob("python*/site-packages"))


def test_the_copied_environment_works(bench):
    """The problems that the tests below find are those that they create."""
    done = run({**hidden(), "NUMBA_ENABLE_CUDASIM": "1"}, python=str(bench / "bin" / "python"))
    assert (done.returncode, last(done)) == (0, "verdict: ready: kernels run on Numba's simulator"), done.stdout
    assert "error: " not in done.stdout


def skip_if_found_elsewhere(done):
    if re.search(r"^compiler +nvJitLink of CUDA", done.stdout, re.MULTILINE):
        pytest.skip("this machine has a CUDA toolkit beside the one of its packages")


def test_an_installation_without_compiler(bench):
    (packages_of(bench) / "nvidia").unlink()
    done = run(hidden(), python=str(bench / "bin" / "python"))
    skip_if_found_elsewhere(done)
    assert re.search(r"^note: .*nvJitLink not found; the simulator does not need", done.stdout, re.MULTILINE), (
        done.stdout
    )
    assert "fix: python -m pip install 'numba-cuda[cu1" in done.stdout
    assert done.returncode == 0


@pytest.mark.gpu
def test_a_gpu_without_compiler(bench):
    (packages_of(bench) / "nvidia").unlink()
    done = run({**compiler_environment(), "PYTHONPATH": str(ROOT)}, python=str(bench / "bin" / "python"))
    skip_if_found_elsewhere(done)
    assert re.search(r"^error: .*nvJitLink not found", done.stdout, re.MULTILINE), done.stdout
    assert (done.returncode, last(done)) == (1, "verdict: not ready: 1 thing to fix")


@pytest.mark.gpu
def test_a_gpu_that_is_ready():
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    done = run({**compiler_environment(), "PYTHONPATH": os.pathsep.join(paths)})
    assert re.fullmatch(r"verdict: ready: kernels run on NVIDIA .+", last(done)), done.stdout
    assert done.returncode == 0


# A package that is removed, and words of its finding.
MAIMED = {
    "numba_cuda": ("numba_cuda is not installed: no kernel runs, not even on the simulator", "numba-cuda[cu13]"),
    "numba": ("numba is not installed", "numba-cuda[cu13]"),
    "numpy": ("numpy is not installed", "numpy<2.5"),
    "llvmlite": ("numba does not import (ModuleNotFoundError: No module named 'llvmlite')", "numba-cuda[cu13]"),
    "cuda": ("cuda.pathfinder, cuda.bindings.driver are not installed", "numba-cuda[cu13]"),
}


@pytest.mark.parametrize("package", MAIMED)
def test_an_installation_without_a_package(bench, package):
    """The doctor runs even if numba cannot be imported."""
    words, wanted = MAIMED[package]
    (packages_of(bench) / package).unlink()
    done = run({**hidden(), "NUMBA_ENABLE_CUDASIM": "1"}, python=str(bench / "bin" / "python"))
    problems = re.findall(r"^error: (.+)\nfix: (.+)$", done.stdout, re.MULTILINE)
    assert len(problems) == 1, done.stdout
    assert words in problems[0][0]
    assert f"'{wanted}'" in problems[0][1]
    assert (done.returncode, last(done)) == (1, "verdict: not ready: 1 thing to fix")


def test_numpy_that_is_too_new(bench):
    """A stand-in for NumPy claims to be release 2.5 and has no row_stack."""
    packages = packages_of(bench)
    for path in [*packages.glob("numpy-*.dist-info"), packages / "numpy"]:
        path.unlink()
    told = packages / "numpy-2.5.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.5.0\n")
    source = Path(sysconfig.get_path("purelib")) / "numpy"
    (packages / "numpy").mkdir()
    for path in source.iterdir():
        (packages / "numpy" / path.name).symlink_to(path)
    (packages / "numpy" / "__init__.py").unlink()
    text = (source / "__init__.py").read_text(encoding="utf-8")
    (packages / "numpy" / "__init__.py").write_text(text + "\nglobals().pop('row_stack', None)\n", encoding="utf-8")
    done = run({**hidden(), "NUMBA_ENABLE_CUDASIM": "1"}, python=str(bench / "bin" / "python"))
    assert re.search(r"^note: NumPy is 2.5.0, which removed row_stack", done.stdout, re.MULTILINE), done.stdout
    assert "fix: python -m pip install 'numpy<2.5'" in done.stdout
    assert (done.returncode, last(done)) == (0, "verdict: ready: kernels run on Numba's simulator")


DRIVER = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return %(init)d; }
int cuDriverGetVersion(int *version) { *version = %(cuda)d; return 0; }
int cuDeviceGetCount(int *count) { *count = %(count)d; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Pretended GPU", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)16 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device)
{ *value = which == 75 ? 7 : which == 76 ? 0 : 0; return 0; }
int cuGetErrorString(int status, const char **text) { *text = "some words"; return 0; }
"""

PRETENDED = {
    "mismatch": (
        {"init": 803},
        ["CUresult 803", "fix: sudo reboot"],
        "1 thing to fix; until then NUMBA_ENABLE_CUDASIM=1",
    ),
    "stub": ({"init": 34}, ["a toolkit's stub"], "1 thing to fix; until then"),
    "old": (
        {"count": 1, "cuda": 11040},
        ["0: Pretended GPU, compute capability 7.0, 16.0 GiB", "one of CUDA 11.4;", "7.0; 7.5 or later"],
        "things to fix",
    ),
    "two": ({"count": 2, "cuda": 13000}, ["2 GPUs (0: Pretended GPU, 1: Pretended GPU)"], "to fix"),
}


@pytest.mark.simulator
@pytest.mark.parametrize("case", PRETENDED)
def test_drivers_that_are_pretended(tmp_path, case):
    """A library that returns the errors of such drivers precedes the real one on the loader's path."""
    if sys.platform != "linux" or (cc := shutil.which("cc")) is None:
        pytest.skip("needs Linux and a C compiler")
    changed, words, end = PRETENDED[case]
    (tmp_path / "driver.c").write_text(DRIVER % {"init": 0, "cuda": 13000, "count": 0, **changed})
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [cc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, tmp_path / "driver.c"], check=True
    )
    done = run({**compiler_environment(), "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)})
    for word in words:
        assert word in done.stdout
    assert last(done).startswith("verdict: not ready: ")
    assert end in last(done)
    assert done.returncode == 1


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan", "3000000"])
def test_errors_of_the_command_line(value, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--timeout", value])
    assert caught.value.code == 2
    assert f"{value!r} given; expected a number of seconds above 0" in capsys.readouterr().err


def test_a_product_that_takes_too_long():
    done = run({**hidden(), "NUMBA_ENABLE_CUDASIM": "1"}, "--timeout", "0.05")
    assert "did not end within 0.05 s" in done.stdout
    assert done.returncode == 1
