"""``numba-gemm bench``, also ``python bench.py``."""

from __future__ import annotations

import argparse
import math
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba_gemm.lab.bench import cases
from numba_gemm.lab.harness.command import add_result_options, make_folder
from numba_gemm.simulator import probe
from numba_gemm.terminal import BENCH, Parser, UsageError, at_least_one, command

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from numba_gemm.lab.bench.run import Plan

RIGHT, WRONG = 0, 1
PIPE_WIDTH = 160


def shape(text: str) -> cases.Shape:
    """Parse the value of ``--shape``, raising argparse's error."""
    try:
        return cases.parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> Parser:
    """Return the parser of the command line; imports no numba."""
    made = Parser(
        prog="numba-gemm bench",
        description="Verify, then time, every stage of the ladder and cuBLAS. Without a GPU, Numba's simulator runs "
        "small products: they are verified, and not timed.",
        epilog="Exit status: 0 if every product is correct and nothing is slower than in the results of --compare "
        "beyond the spread; 1 otherwise; 2 for arguments that are wrong, or an output that cannot be written; 130 if "
        "interrupted, which keeps the shapes that were measured.",
    )
    made.add_argument("--list", action="store_true", help="list the stages, one per line, and stop")
    made.add_argument(
        "--stages", metavar="A,B,...", help="stages to run; auto, cublas and cpu are names too (default: all)"
    )
    made.add_argument(
        "--precisions",
        metavar="A,B,...",
        help="also the public function in these tensor-core precisions, or in all, and cuBLAS in the same ones",
    )
    made.add_argument(
        "--shape",
        type=shape,
        action="append",
        metavar="M,N,K",
        help="a shape to run; repeatable (default: those of --sizes)",
    )
    made.add_argument(
        "--sizes",
        choices=list(cases.ON_GPU),
        action="append",
        help="a named set of shapes; repeatable (default: seed and square; in the simulator quick, and all are small)",
    )
    cache = made.add_mutually_exclusive_group()
    cache.add_argument(
        "--hot", dest="cold", action="store_false", help="one set of operands, in the L2 cache if it fits (default)"
    )
    cache.add_argument(
        "--cold", dest="cold", action="store_true", help="rotate sets of operands that exceed the L2 cache"
    )
    made.set_defaults(cold=False)
    made.add_argument(
        "--configs",
        choices=("default", "all"),
        default="default",
        help="the first configuration of each stage, or all (default: default)",
    )
    made.add_argument(
        "--rounds",
        type=at_least_one,
        metavar="N",
        help="interleaved rounds, on a GPU five or more (default: 5 to 25, depending on their duration)",
    )
    made.add_argument(
        "--seed", type=int, metavar="N", help="seed of the random operands (default: a new one, which is printed)"
    )
    made.add_argument(
        "--operands",
        choices=("normal", "uniform"),
        default="normal",
        help="distribution of the operands: standard normal, or uniform in [-1, 1); it changes power and speed "
        "(default: normal)",
    )
    made.add_argument(
        "--steady",
        choices=("public", "all", "none"),
        default="public",
        help="contenders that are also measured alone at their steady state, for one to four seconds per shape: the "
        "public function and cuBLAS, all, or none (default: public)",
    )
    add_result_options(made)
    made.add_argument("--compare", type=Path, metavar="OLD", help="an older results folder or CSV; report what changed")
    made.add_argument(
        "--model", action="store_true", help="also predict times from bytes and the device's ceilings, and compare"
    )
    made.add_argument(
        "--ceilings",
        type=Path,
        metavar="FILE",
        help="ceilings.json for --model (default: that of results/h200/latest for the same GPU, else theoretical ones)",
    )
    made.add_argument("--plot", action="store_true", help="also draw gflops_vs_size.png, roofline.png and ladder.png")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, without a GPU on Numba's simulator; return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    if probe.driver_error() is not None:
        probe.choose(simulator=True)  # before anything imports Numba
    return list_stages() if options.list else benchmark(options, arguments)


def list_stages() -> int:
    """Print the name of every stage and its technique."""
    from numba_gemm.api import stages

    print(stages())
    return RIGHT


def stage_names(text: str | None) -> list[str]:
    """Return the stages that ``--stages`` names; by default the FP32 ladder and the baselines."""
    from numba_gemm.kernels.ladder import STAGES
    from numba_gemm.lab.bench.contenders import NOT_STAGES, known_stages

    known = known_stages()
    if text is None:
        return [*STAGES, *NOT_STAGES]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown stage {', '.join(unknown)}; known are {', '.join(known)}")
    if not names:
        raise UsageError("--stages names no stage")
    return names


def precision_names(text: str | None) -> list[str]:
    """Return the precisions of ``--precisions``, without float32 itself."""
    from numba_gemm.gemm.precision import IEEE, PRECISIONS

    known = [name for name in PRECISIONS if name != IEEE]
    if text is None:
        return []
    names = known if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown precision {', '.join(unknown)}; known are {', '.join(known)}, and all")
    return names


def chosen_shapes(options: argparse.Namespace, simulated: bool) -> tuple[cases.Shape, ...]:
    """Return the shapes to run, without duplicates."""
    named = cases.named_shapes(tuple(options.sizes or ()), simulated)
    shapes = tuple(dict.fromkeys((*named, *(options.shape or ())))) or cases.default_shapes(simulated)
    if simulated:
        try:
            cases.check_simulated(shapes)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return shapes


def benchmark(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the parts of the benchmark that need numba."""
    from rich.console import Console

    from numba_gemm.lab.bench import compare, model, plots, report, results
    from numba_gemm.lab.bench.run import FEWEST_ROUNDS
    from numba_gemm.lab.harness import environment, pictures
    from numba_gemm.runtime.device import current_device, device_properties
    from numba_gemm.simulator.switch import SIMULATOR

    if not SIMULATOR and options.rounds is not None and options.rounds < FEWEST_ROUNDS:
        parser().error(f"argument --rounds: {options.rounds} is too few to tell a spread: give five or more")
    if options.plot:
        pictures.pyplot()
    old = None
    if options.compare:
        try:
            old, old_environment = results.load(options.compare)
        except (FileNotFoundError, ValueError) as error:
            raise UsageError(str(error)) from None

    if options.ceilings and not options.model:
        raise UsageError("--ceilings says what --model predicts by: give both")
    if options.model:
        try:
            device = device_properties(current_device())
            ceilings, source = model.choose_ceilings(options.ceilings, device)
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from None

    # Rich assumes 80 columns for a pipe or a file, and would wrap the tables.
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    if seed < 0:
        raise UsageError(f"--seed must not be negative, not {seed}")
    plan = make_plan(options, seed, SIMULATOR)
    if not plan.steps:
        raise UsageError("nothing to measure: no chosen stage takes a chosen shape")
    make_folder(options.out)
    described = environment.describe(
        simulated=SIMULATOR,
        seed=seed,
        cache="cold" if options.cold else "hot",
        command=command_line(arguments),
        timing=plan.timing,
        stated_commit=options.commit,
    )
    described["operands"] = plan.distribution
    if SIMULATOR:
        console.print(report.SIMULATOR_NOTICE, style="bold yellow")
    for notice in notices(options, plan, SIMULATOR):
        console.print(notice, style="yellow")
    console.print(f"{environment.device_name(described)}, seed {seed}, operands in {plan.library.name}")

    frame = measured(plan, described, console, options.out)
    compared = None
    if old is not None:
        if environment.device_name(old_environment) != environment.device_name(described):
            console.print(
                f"{options.compare} was measured on {environment.device_name(old_environment)}", style="bold yellow"
            )
        if not compare.timed_alike(described, old_environment):
            console.print(f"launching counts in only one of this run and {options.compare}", style="bold yellow")
        compared = compare.compare(frame, old)
        if compared.empty:
            console.print(f"{options.compare} has no measurement in common with this run", style="bold yellow")
    modelled = model.model_table(frame, ceilings, source, device, SIMULATOR) if options.model else None
    text = report.markdown(frame, described, compared, modelled)
    results.save(frame, described, options.out, {"report.md": text})
    report.show(console, frame, described, compared, modelled)
    if options.plot:
        plots.draw(frame, described, options.out)
    console.print(f"results in {options.out}")

    if bool(frame["status"].isin(results.FAILURES).any()):
        return WRONG
    slower = compared is not None and not SIMULATOR and not compare.regressions(compared).empty
    return WRONG if slower else RIGHT


def command_line(arguments: Sequence[str]) -> str:
    """Return the command to record, without the options for output files and those recorded elsewhere."""
    kept = list(arguments)
    for option in ("--out", "--compare", "--commit", "--ceilings"):
        while option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
        kept = [argument for argument in kept if not argument.startswith(option + "=")]
    return shlex.join(["numba-gemm", "bench", *kept])


def make_plan(options: argparse.Namespace, seed: int, simulated: bool) -> Plan:
    """Return the measurements to make, from the options and the device."""
    from numba_gemm.lab.bench.buffers import NORMAL, UNIFORM, choose_library
    from numba_gemm.lab.bench.contenders import select_contenders
    from numba_gemm.lab.bench.run import Plan
    from numba_gemm.lab.harness import environment
    from numba_gemm.runtime.device import current_device, device_properties

    shapes = chosen_shapes(options, simulated)
    names = stage_names(options.stages)
    device: dict[str, Any] = {}
    if not simulated:
        properties = device_properties(current_device())
        device = {
            "cc": properties.cc,
            "peak": environment.peak_flops(properties),
            "l2_bytes": properties.l2_bytes,
            "nvml": environment.current_nvml(),
        }
    return Plan(
        shapes=shapes,
        contenders=select_contenders(
            names,
            simulated=simulated,
            all_configs=options.configs == "all",
            precisions=precision_names(options.precisions),
        ),
        library=choose_library(simulated),
        seed=seed,
        simulated=simulated,
        cold=options.cold,
        distribution=UNIFORM if options.operands == "uniform" else NORMAL,
        steady=options.steady,
        rounds=options.rounds,
        **device,
    )


def notices(options: argparse.Namespace, plan: Plan, simulated: bool) -> list[str]:
    """Return a message for each request that cannot be met."""
    from numba_gemm.lab.bench.results import CUBLAS

    said: list[str] = []
    if any(contender.stage == CUBLAS for contender in plan.contenders):
        return said
    asked = options.stages is None or CUBLAS in stage_names(options.stages)
    if asked and not simulated:
        said.append(
            "neither CuPy nor PyTorch can use the GPU: no cuBLAS rows, no ratio_to_cublas; CuPy comes with pip install "
            + BENCH
        )
    elif asked and options.stages is not None:
        said.append("cublas needs a GPU: left out")
    return said


def measured(plan: Plan, described: dict[str, Any], console: Console, out: Path) -> pd.DataFrame:
    """Measure with a progress bar; results are saved after every shape, so an interrupted run keeps them."""
    import pandas as pd
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from numba_gemm.lab.bench import results
    from numba_gemm.lab.bench.contenders import Contender
    from numba_gemm.lab.bench.run import run
    from numba_gemm.lab.harness import environment

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    frame = results.frame_of([])
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=plan.steps)

        def observe(at: cases.Shape, contender: Contender) -> None:
            progress.update(task, advance=1, description=f"{at} {contender.stage}")

        for rows in run(plan, observe):
            if rows.empty:
                continue
            frame = rows if frame.empty else pd.concat([frame, rows], ignore_index=True)
            environment.conclude(described, frame["sm_clock_mhz"], frame["throttle"])
            results.save(frame, described, out)
            progress.console.print(progress_line(rows))
    return frame


def progress_line(rows: pd.DataFrame) -> str:
    """Describe the results of a shape in one line."""
    from numba_gemm.lab.bench.results import FAILURES, fastest, names_in, records

    every = records(rows)
    failed = names_in([row for row in every if row["status"] in FAILURES], "stage")
    correct = sum(row["status"] == "ok" for row in every)
    said = f"{every[0]['shape']}: {correct} correct"
    if failed:
        said += f", NOT CORRECT: {', '.join(failed)}"
    timed = [row for row in records(fastest(rows)) if not math.isnan(row["percent_of_peak"])]
    if timed:
        top = max(timed, key=lambda row: row["gflops"])
        ratio = "" if math.isnan(top["ratio_to_cublas"]) else f", {top['ratio_to_cublas']:.3f} of cuBLAS"
        said += f"; fastest {top['stage']}: {top['gflops']:,.0f} GFLOP/s{ratio}"
    return said
