"""``python -m numba_gemm.lab.memory [NAME...]``: run experiments, print and save their results."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numba_gemm.lab.bench.command import UsageError, command, commit_hash, csv_text, json_text, make_folder, write_files
from numba_gemm.lab.memory.experiment import NAMES, Experiment, Unavailable, load
from numba_gemm.runtime.driver import GpuUnavailable

DEFAULT_OUT = Path("results") / "local" / "memory_lab"
RIGHT, WRONG, UNUSABLE = 0, 1, 2
FIGURE = (9.0, 5.0)  # inches


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m numba_gemm.lab.memory",
        description="Run experiments on memory: predict, measure, draw. On the simulator they are small, and their "
        "times mean nothing.",
        epilog="Exit status: 0; 1 if an experiment failed or a claim of its docstring does not hold here; 2 if there "
        "is no such experiment or no GPU.",
    )
    made.add_argument("names", nargs="*", metavar="NAME", help="experiments (default: all)")
    made.add_argument("--list", action="store_true", help="say which there are, and what each shows")
    made.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"default: {DEFAULT_OUT}")
    made.add_argument("--no-plot", action="store_true", help="draw nothing")
    made.add_argument(
        "--commit", type=commit_hash, metavar="HASH", help="the commit to record where git cannot tell it"
    )
    return made


def draw(experiment: Experiment, frame: Any, where: str) -> bytes:
    """Render the plot of an experiment as PNG, titled with the name of the device."""
    from numba_gemm.lab.bench.plots import png, pyplot

    plt = pyplot()
    figure = plt.figure(figsize=FIGURE, layout="constrained")
    try:
        experiment.plot(frame, figure)
        figure.suptitle(f"{experiment.name} ({experiment.section}): {where}")
        return png(figure, dpi=120)
    finally:
        plt.close(figure)


def record(experiment: Experiment, options: argparse.Namespace) -> bool:
    """Run one experiment, print its result and write its files; return True if its claims hold."""
    from numba_gemm.lab.bench import environment
    from numba_gemm.lab.bench.nvml import sampled_clocks
    from numba_gemm.lab.memory import machine

    if machine.SIMULATOR and experiment.unavailable:
        raise Unavailable(experiment.unavailable)
    parameters = dict(experiment.small) if machine.SIMULATOR else {}
    described = environment.describe(
        simulated=machine.SIMULATOR,
        seed=0,
        cache="as each experiment says",
        command=f"python -m numba_gemm.lab.memory {experiment.name}",
        stated_commit=options.commit,
    )
    described["ceilings"] = machine.ceilings()[1]
    begin = time.perf_counter()
    with contextlib.ExitStack() as scopes:
        clocks = None if machine.SIMULATOR else scopes.enter_context(sampled_clocks(environment.current_nvml()))
        frame = experiment.run(**parameters)
    if clocks is not None:
        environment.conclude(described, [clocks.median_mhz], [clocks.throttle])
    described["seconds"] = round(time.perf_counter() - begin, 1)
    name = experiment.name
    write_files(options.out, {f"{name}.csv": csv_text(frame), f"{name}.json": json_text(described)})
    print(frame.to_string(index=False, float_format=lambda value: f"{value:.4g}", max_rows=80))
    if not options.no_plot:
        picture = draw(experiment, frame, environment.device_name(described))
        write_files(options.out, {f"{name}.png": picture})
    if machine.SIMULATOR:
        print("times are the simulator's and mean nothing; claims are left alone")
        return True
    claims = experiment.claims(frame)
    for sentence, holds in claims.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {sentence}")
    return all(claims.values())


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested experiments; return the exit status."""
    options = parser().parse_args(arguments)
    try:
        experiments = [load(name) for name in options.names or NAMES]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    if options.list:
        width = max(len(name) for name in NAMES)
        for experiment in experiments:
            print(f"{experiment.name:{width}}  {experiment.section:8}  {experiment.lesson}")
        return RIGHT
    make_folder(options.out)
    status = RIGHT
    for experiment in experiments:
        print(f"\n== {experiment.name} ({experiment.section}): {experiment.lesson}")
        try:
            if not record(experiment, options):
                status = WRONG
        except Unavailable as error:
            print(f"not run: {error}")
        except GpuUnavailable as error:
            print(f"error: {error}", file=sys.stderr)
            return UNUSABLE
        except UsageError:
            raise
        except Exception as error:  # the others still run
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            status = WRONG
    return status


if __name__ == "__main__":
    sys.exit(main())
