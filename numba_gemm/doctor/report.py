"""The doctor's report: facts as text, and the verdict with its exit status."""

from __future__ import annotations

from collections.abc import Sequence

from numba_gemm.doctor.checks import ERROR, Finding
from numba_gemm.doctor.facts import GPU, NOT_READY, PRODUCT, READY, SIMULATOR, Facts, Library, Trial, dotted
from numba_gemm.doctor.requirements import BINDINGS, DISTRIBUTIONS, NAMES, OPTIONAL


def verdict(facts: Facts, findings: Sequence[Finding]) -> tuple[str, int]:
    """Return the last line and the exit status, which is 0 if kernels run on a GPU or on the simulator."""
    count = sum(finding.level == ERROR for finding in findings)
    correct = facts.trial is not None and facts.trial.correct
    if correct and facts.trial is not None and not count:
        if facts.place in (GPU, SIMULATOR):
            return f"verdict: ready: kernels run on {facts.trial.where}", READY
        return (
            "verdict: no GPU: set NUMBA_ENABLE_CUDASIM=1 before Python starts, and kernels run on Numba's simulator",
            READY,
        )
    count = max(count, 1)
    text = f"verdict: not ready: {count} thing{'' if count == 1 else 's'} to fix"
    if correct:
        text += "; until then NUMBA_ENABLE_CUDASIM=1 runs kernels on Numba's simulator"
    return text, NOT_READY


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


def trial_line(trial: Trial) -> str:
    """Format the result of the trial as a line of plain text."""
    shape = f"{PRODUCT} x {PRODUCT} x {PRODUCT} on {trial.where}"
    if trial.failure is not None:
        return f"{'product':<13}  {shape}: failed: {trial.failure}"
    word = "correct" if trial.correct else "WRONG"
    return f"{'product':<13}  {shape}: {word}, largest error {trial.error:.2g} of the bound, {trial.seconds:.1f} s"
