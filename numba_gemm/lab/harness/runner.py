"""Run of an experiment: machine check, environment, clocks, files, and the verdict on its claims."""

import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.harness import environment, pictures
from numba_gemm.lab.harness.command import SEED_BITS, csv_text, json_text, make_folder, write_files
from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.lab.harness.nvml import sampled_clocks
from numba_gemm.simulator.probe import driver_error
from numba_gemm.simulator.switch import SIMULATOR


def _gpu() -> str | None:
    reason = driver_error()
    return reason and f"this needs a GPU, and {reason}"


def _hopper() -> str | None:
    from numba_gemm.runtime.device import current_device, device_properties

    cc = device_properties(current_device()).cc
    return None if cc == (9, 0) else f"this needs a GPU of compute capability 9.0, not {cc[0]}.{cc[1]}"


def _torch() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "this needs PyTorch: pip install torch"
    return None if SIMULATOR or torch.cuda.is_available() else "this needs PyTorch, which finds no GPU"


def _ncu() -> str | None:
    from numba_gemm.inspect.sass import find_tool

    found = find_tool("ncu")
    return None if found else "ncu was not found: install Nsight Compute, which comes with CUDA, and put it on PATH"


CHECKS: dict[str, Callable[[], str | None]] = {
    "gpu": _gpu,
    "hopper": _hopper,
    "torch": _torch,
    "ncu": _ncu,
    "simulator": lambda: "this runs on the simulator: set NUMBA_ENABLE_CUDASIM=1",
}
"""Functions that return what is missing without the simulator, or None."""


ON_SIMULATOR = "with NUMBA_ENABLE_CUDASIM=1 it runs on the simulator, small"


def check(experiment: Experiment) -> None:
    """Raise `Unavailable` if this machine cannot run an experiment."""
    if SIMULATOR:
        missing = experiment.unavailable or (_torch() if "torch" in experiment.needs else None)
    else:
        missing = next((reason for need in experiment.needs if (reason := CHECKS[need]())), None)
        if missing and not experiment.unavailable and "simulator" not in experiment.needs:
            missing = f"{missing.rstrip('.')}; {ON_SIMULATOR}"
    if missing:
        raise Unavailable(missing)


SAVE_INTERVAL_S = 5.0
CLOCK_COLUMNS = ("sm_clock_mhz", "throttle")  # of experiments that sample clocks for each row
MOST_ROWS = 80


def run(
    experiment: Experiment, given: Mapping[str, Any], *, out: Path, commit: str | None = None, plot: bool = True
) -> bool:
    """Run an experiment, print its result and write its files; return True if its claims hold.

    If it is interrupted or fails, what was measured until then is saved. It raises `Unavailable` if this machine cannot
    run it.

    Parameters
    ----------
    given : mapping
        Parameters that replace its defaults.
    commit : str, optional
        Commit to record where git cannot tell it.
    """
    check(experiment)
    make_folder(out)
    drawn = plot and experiment.plot is not None
    if drawn:
        pictures.pyplot()  # fails now if matplotlib is missing, not after the measurement
    parameters = {**(experiment.small if SIMULATOR else {}), **given}
    known = experiment.parameters
    seed = parameters.get("seed", known["seed"].default) if "seed" in known else experiment.seed
    if seed is None:
        seed = parameters["seed"] = secrets.randbits(SEED_BITS)
    command = command_line(experiment, parameters)
    described = environment.describe(experiment, simulated=SIMULATOR, seed=seed, command=command, stated_commit=commit)
    print(f"{environment.device_name(described)}, commit {described['commit']}: {described['command']}", flush=True)
    frame = _measured(experiment, parameters, described, out)
    if experiment.report:
        write_files(out, experiment.report(frame, described))
    else:
        shown = experiment.summary(frame) if experiment.summary else frame
        print(shown.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-", max_rows=MOST_ROWS))
    if drawn:
        write_files(out, {experiment.files[-1]: pictures.drawn(experiment, frame, environment.device_name(described))})
    print(f"results in {out}")
    return _judged(experiment, frame, by_default=not given)


def _measured(
    experiment: Experiment, parameters: Mapping[str, Any], described: dict[str, Any], out: Path
) -> pd.DataFrame:
    """Run an experiment and save its results, at the end and meanwhile."""
    begin = saved = time.perf_counter()
    frame = pd.DataFrame()
    with sampled_clocks(None if SIMULATOR or experiment.own_clocks else environment.current_nvml()) as clocks:

        def save() -> None:
            if experiment.own_clocks:
                environment.conclude(described, *(frame[column] for column in CLOCK_COLUMNS))
            elif not SIMULATOR:
                environment.conclude(described, [clocks.median_mhz], [clocks.throttle])
            described["seconds"] = round(time.perf_counter() - begin, 1)
            described.update({str(name): value for name, value in frame.attrs.items()} | dict(experiment.facts(frame)))
            files = dict(zip(experiment.files, (csv_text(frame), json_text(described))))
            if experiment.summary and experiment.summary_file:
                files[experiment.summary_file] = csv_text(experiment.summary(frame))
            write_files(out, files)

        try:
            for frame in experiment.frames(**parameters):
                if experiment.progress:
                    print(experiment.progress(frame), flush=True)
                if (now := time.perf_counter()) - saved > SAVE_INTERVAL_S:
                    save()
                    saved = now
                    print(f"{len(frame)} rows after {now - begin:.0f} s", flush=True)
        finally:
            if len(frame):
                save()
    return frame


def _judged(experiment: Experiment, frame: pd.DataFrame, by_default: bool) -> bool:
    """Print which claims hold; return True if all do, or if the simulator or other parameters cannot tell."""
    if SIMULATOR and experiment.claims_of_times and "simulator" not in experiment.needs:
        print("times are the simulator's and mean nothing; claims are not checked")
        return True
    try:
        claims = experiment.claims(frame)
    except (LookupError, ValueError) as error:
        if by_default:
            raise
        print(f"claims are not checked: with these parameters, the result lacks rows that they need ({error})")
        return True
    for sentence, holds in claims.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {sentence}")
    return all(claims.values())


def command_line(experiment: Experiment, parameters: Mapping[str, Any]) -> str:
    """Return the command that repeats a run."""
    words = ["numba-gemm", *(experiment.command or f"lab {experiment.name}").split()]
    known = experiment.parameters
    for name, value in parameters.items():
        if name in known and value == known[name].default:
            continue
        repeated = isinstance(value, list | tuple) and any(isinstance(item, tuple) for item in value)
        for one in value if repeated else [value]:
            words.append(f"--{name.replace('_', '-')}")
            if one is not True:
                words.append(",".join(map(str, one)) if isinstance(one, list | tuple | range) else str(one))
    return shlex.join(words)
