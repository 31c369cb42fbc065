"""Checks that derive findings from the facts alone, and `diagnose`, which runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from numba_gemm.doctor.facts import (
    BROKEN_DRIVER,
    GPU,
    HIDDEN,
    NO_DEVICE,
    NO_GPU,
    PROHIBITED,
    SIMULATOR,
    Facts,
    dotted,
    driver_result,
    parsed,
)
from numba_gemm.doctor.fixes import (
    DRIVER_ANSWERS,
    FAILURES,
    REINSTALL_DRIVER,
    SIMULATE,
    extra_for,
    install_command,
    package_to_install,
    pinned_command,
    upgrade_linker_command,
)
from numba_gemm.doctor.requirements import (
    BROKEN_NUMPY,
    BULK_CC,
    CUPY,
    HIGHEST_PYTHON,
    LIBRARIES,
    LOWEST,
    LOWEST_CC,
    LOWEST_DRIVER,
    LOWEST_LINKER,
    LOWEST_PYTHON,
    NAMES,
    NEEDED,
    NEEDED_BY_COMPILER,
    NEEDED_BY_TOOLS,
    TENSOR_CC,
)

ERROR, LIMIT, NOTE = "error", "limit", "note"  # no kernel runs; a feature does not work; worth knowing


@dataclass(frozen=True)
class Finding:
    """A problem or a remark, and the command that fixes or changes it."""

    level: str
    problem: str
    fix: str


def _on_gpu(facts: Facts) -> str:
    """Level of a problem that keeps kernels from running on a GPU: a note if there is no GPU, or none is requested."""
    return ERROR if facts.place in (GPU, BROKEN_DRIVER) else NOTE


def _python(facts: Facts) -> Iterator[Finding]:
    if facts.python < LOWEST_PYTHON:
        yield Finding(
            ERROR,
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
            needed = dict.fromkeys(package_to_install(facts, modules[module]) for module in absent)
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
                    again = f"--upgrade '{package_to_install(facts, modules[module])}'"
                fix = f"python -m pip install {again}"
                yield Finding(level, f"{module} does not import ({error}): {consequence}", fix)
            blamed.extend((module, error))

    yield from told(NEEDED, ERROR, "no kernel runs, not even on the simulator")
    yield from told(NEEDED_BY_COMPILER, _on_gpu(facts), "kernels are not compiled")
    yield from told(NEEDED_BY_TOOLS, LIMIT, "numba-gemm bench, numba-gemm lab and traced kernels need it")
    for section in sorted(facts.lost.keys() - {"driver"}):
        if section == "compiler" and blamed:
            continue
        level = ERROR if section == "imports" else _on_gpu(facts)
        command = f"python -m numba_gemm.doctor --section {section}"
        yield Finding(level, f"asking for the {section} failed: {facts.lost[section]}", f"see all of it: {command}")


def _is_missing(module: str, error: str) -> bool:
    """True if a module cannot be imported because it or its package is not installed."""
    match = re.match(r"ModuleNotFoundError: No module named '([^']+)'", error)
    return match is not None and f"{module}.".startswith(f"{match[1]}.")


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
            extra = f"[{extra_for(facts)}]" if name == "numba-cuda" else ""
            yield Finding(
                ERROR if name == "numba-cuda" else LIMIT,
                f"{name} is {facts.versions[name]}; {dotted(lowest)} or later is needed",
                f"python -m pip install --upgrade '{name}{extra}>={dotted(lowest)}{',<2.5' * (name == 'numpy')}'",
            )


def _driver(facts: Facts) -> Iterator[Finding]:
    error = (facts.driver_error or "").rstrip(".")
    if not error:
        return
    place, result, hidden = facts.place, driver_result(facts), facts.setting("CUDA_VISIBLE_DEVICES")
    level = {NO_GPU: LIMIT, BROKEN_DRIVER: ERROR}.get(place, NOTE)
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
        only = "" if level == ERROR else "; the simulator does not need them, inspect and precompile do"
        causes = {library.error for library in facts.libraries.values() if library.error is not None}
        others = "; ".join(sorted(cause for cause in causes if "LibNotFound" not in cause))
        yield Finding(level, f"{', '.join(missing)} not found{others and f' ({others})'}{only}", install_command(facts))
        return
    nvvm, nvrtc, linker = (facts.libraries[name].version for name in LIBRARIES)
    release = nvvm or nvrtc
    driver = facts.driver_cuda
    if linker is not None and linker < LOWEST_LINKER:
        yield Finding(
            level, f"nvJitLink is {dotted(linker)}; {dotted(LOWEST_LINKER)} or later is needed", pinned_command(facts)
        )
    elif release is not None and linker is not None and release > linker:
        yield Finding(
            level,
            f"nvJitLink is of CUDA {dotted(linker)} and does not understand the PTX of NVVM's CUDA {dotted(release)}",
            upgrade_linker_command(release),
        )
    if release is not None and driver is not None and driver >= LOWEST_DRIVER:
        if release[0] > driver[0]:
            yield Finding(
                level,
                f"the compiler is of CUDA {dotted(release)} and the driver of CUDA {dotted(driver)}, an earlier major "
                "release, which does not load what it makes",
                install_command(facts),
            )
        elif release > driver and (linker is None or linker >= release):
            yield Finding(
                NOTE,
                f"the compiler is of CUDA {dotted(release)}, newer than the driver's {dotted(driver)}: nvJitLink makes "
                "machine code that it loads, but PTX of this compiler it would not",
                f"should something fail: {pinned_command(facts)}",
            )
    bindings = parsed(facts.versions.get("cuda-bindings"))
    if bindings and nvrtc is not None and bindings[0] != nvrtc[0]:
        yield Finding(
            level,
            f"cuda-bindings is {facts.versions['cuda-bindings']} and the compiler of CUDA {dotted(nvrtc)}: their major "
            "releases have to be the same",
            install_command(facts),
        )


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.place != GPU or not facts.gpus:
        return
    first = facts.gpus[0]
    able = [index for index, gpu in enumerate(facts.gpus) if gpu.cc >= LOWEST_CC]
    if first.cc < LOWEST_CC:
        fix = f"export CUDA_VISIBLE_DEVICES={able[0]}" if able else SIMULATE
        yield Finding(
            ERROR,
            f"{first.name} has compute capability {dotted(first.cc)}; {dotted(LOWEST_CC)} or later is needed",
            fix,
        )
    elif facts.supported and first.cc not in facts.supported:
        known = f"{dotted(min(facts.supported))} to {dotted(max(facts.supported))}"
        yield Finding(
            ERROR,
            f"{first.name} has compute capability {dotted(first.cc)}, unknown to the compiler, which knows {known}",
            f"python -m pip install --upgrade 'numba-cuda[{extra_for(facts)}]' cuda-toolkit",
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
            "measure them: numba-gemm bench --stages auto,cublas --precisions all",
        )
    if first.compute_mode == PROHIBITED:
        yield Finding(ERROR, f"{first.name} is set to let no process compute on it", "sudo nvidia-smi -i 0 -c DEFAULT")
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
    for wrong in facts.wrong_settings:
        problem, _, _ = wrong.rpartition("; ")
        yield Finding(LIMIT, problem, f"unset {problem.partition(' ')[0]}")


def _optional(facts: Facts) -> Iterator[Finding]:
    cupy = [name for name in CUPY if name in facts.versions]
    install_cupy = f"python -m pip install 'cupy-cuda{extra_for(facts)[2:]}x[ctk]'"
    torch = facts.versions.get("torch")
    if len(cupy) > 1:
        yield Finding(
            LIMIT,
            f"{' and '.join(cupy)} are installed together and overwrite one another",
            f"python -m pip uninstall -y {' '.join(cupy)} && {install_cupy}",
        )
    elif not cupy and (torch is None or torch.endswith("+cpu")) and facts.place == GPU:
        without = "PyTorch is one without CUDA and CuPy is not installed" if torch else "neither CuPy nor PyTorch is"
        yield Finding(
            NOTE,
            f"{without}{'' if torch else ' installed'}: cuBLAS is not measured beside the stages",
            install_cupy,
        )
    if "matplotlib" not in facts.versions:
        yield Finding(NOTE, "matplotlib is not installed: there are no pictures", "python -m pip install matplotlib")


def _trial(facts: Facts, before: Sequence[Finding]) -> Iterator[Finding]:
    trial = facts.trial
    if trial is None or trial.correct:
        return
    if trial.failure is None:
        yield Finding(
            ERROR,
            f"the product on {trial.where} is wrong: its largest error is {trial.error:.3g} times the bound",
            "python -m pytest -k 'ladder or api', and report what fails",
        )
        return
    if any(finding.level == ERROR for finding in before):
        return  # a consequence of the findings before
    fixes = {
        "pinned": pinned_command(facts),
        "numpy": "python -m pip install 'numpy<2.5'",
        "upgrade": f"python -m pip install --upgrade 'numba-cuda[{extra_for(facts)}]' cuda-toolkit",
        "compiler": install_command(facts),
    }
    for pattern, meaning, fix in FAILURES:
        if re.search(pattern, trial.failure):
            yield Finding(ERROR, f"{meaning} ({trial.failure})", fix.format(**fixes))
            return
    command = ("NUMBA_ENABLE_CUDASIM=1 " if trial.simulated else "") + "python -m numba_gemm.doctor --section trial"
    yield Finding(ERROR, f"the product on {trial.where} fails: {trial.failure}", f"see all of it: {command}")


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
ORDER = (ERROR, LIMIT, NOTE)


def diagnose(facts: Facts) -> list[Finding]:
    """Return the findings that follow from facts, the most severe first.

    A successful trial overrules findings that predict that kernels cannot run there.

    Returns
    -------
    list of Finding
    """
    found = [finding for check in CHECKS for finding in check(facts)]
    found += _trial(facts, found)
    if facts.trial is not None and facts.trial.correct and facts.place in (GPU, SIMULATOR):
        found = [replace(finding, level=LIMIT) if finding.level == ERROR else finding for finding in found]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))
