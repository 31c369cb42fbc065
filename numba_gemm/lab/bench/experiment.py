"""The benchmark: stages, the public function and cuBLAS, each product verified and then timed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from numba_gemm.kernels import STAGES
from numba_gemm.kernels.ladder import STAGES as LADDER
from numba_gemm.lab.bench import results
from numba_gemm.lab.bench.cases import Shape, check_simulated, chosen_shapes
from numba_gemm.lab.harness import pictures
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.lab.harness.environment import device_name
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.terminal import BENCH

if TYPE_CHECKING:
    from numba_gemm.lab.bench.contenders import Contender
    from numba_gemm.lab.bench.run import Plan

CORRECT = "every product is correct"
DEFAULT_STAGES = (*LADDER, *results.NOT_STAGES)
PIPE_WIDTH = 160  # of the report where there is no terminal


def bench(
    stages: Sequence[str] = DEFAULT_STAGES,
    precisions: Sequence[str] = (),
    shape: Sequence[Shape] = (),
    sizes: Sequence[Literal["seed", "square", "odd", "quick"]] = (),
    cold: bool = False,
    configs: Literal["default", "all"] = "default",
    rounds: int | None = None,
    seed: int | None = None,
    operands: Literal["normal", "uniform"] = "normal",
    steady: Literal["public", "all", "none"] = "public",
) -> Iterator[pd.DataFrame]:
    """Verify and time contenders at each shape; yield the columns `results.COLUMNS`, one row per contender and shape.

    Parameters
    ----------
    stages: Stages to run, separated by commas; auto, cublas and cpu are names too. Default: the FP32 ladder and these.
    precisions: Also the public function in these tensor-core precisions, or all, and cuBLAS in the same ones. Default:
        none.
    shape: A shape to run, as M,N,K; repeatable. Default: those of --sizes.
    sizes: seed, square, odd, quick: a named set of shapes; repeatable. Default: seed and square; in the simulator
        quick.
    cold: Rotate sets of operands that exceed the L2 cache.
    configs: The default, first configuration of each stage, or all.
    rounds: Interleaved rounds, on a GPU five or more. Default: 5 to 25, depending on their duration.
    seed: Seed of the random operands. Default: a new one, which is printed.
    operands: Distribution: standard normal, or uniform in [-1, 1); it changes power and speed.
    steady: Contenders also measured alone at their steady state: the public function and cuBLAS (public), all, or none.
    """
    from numba_gemm.lab.bench import buffers
    from numba_gemm.lab.bench.contenders import select_contenders
    from numba_gemm.lab.bench.run import FEWEST_ROUNDS, Plan, candidate_of
    from numba_gemm.lab.harness import environment
    from numba_gemm.runtime.device import current_device, device_properties
    from numba_gemm.simulator.switch import SIMULATOR

    shapes = chosen_shapes(sizes, shape, SIMULATOR)
    how: dict[str, Any] = {"cold": cold, "rounds": rounds, "steady": steady}
    how["distribution"] = buffers.UNIFORM if operands == "uniform" else buffers.NORMAL
    if SIMULATOR:
        check_simulated(shapes)
    else:
        if rounds is not None and rounds < FEWEST_ROUNDS:
            raise UsageError(f"--rounds: {rounds} is too few to tell a spread: give five or more")
        properties = device_properties(current_device())
        how |= {"cc": properties.cc, "peak": environment.peak_flops(properties), "l2_bytes": properties.l2_bytes}
        how["nvml"] = environment.current_nvml()
    contenders = select_contenders(
        stages, simulated=SIMULATOR, all_configs=configs == "all", precisions=precision_names(precisions)
    )
    plan = Plan(shapes, contenders, buffers.choose_library(SIMULATOR), seed or 0, SIMULATOR, **how)
    taken = [one for one in plan.contenders if any(map(one.takes, shapes))]
    if not taken:
        raise UsageError(f"nothing to measure: {reason_for_nothing(plan.contenders, SIMULATOR)}")
    notes = [f"{one.label} {note}" for one in taken if (note := candidate_of(plan, one).note)]
    if len(notes) == len(taken):
        raise UsageError(f"nothing to measure: {'; '.join(notes)}; name another stage, such as naive")
    return measured(plan, notices(plan, stages))


def measured(plan: Plan, said: Iterable[str]) -> Iterator[pd.DataFrame]:
    """Print messages, then measure a plan and yield all rows after each shape."""
    from numba_gemm.lab.bench.run import run

    for line in (*said, f"seed {plan.seed}, operands in {plan.library.name}"):
        print(line, flush=True)
    frame = results.frame_of([])
    for rows in run(plan):
        if rows.empty:
            continue
        frame = rows if frame.empty else pd.concat([frame, rows], ignore_index=True)
        cache = "cold" if plan.cold else "hot"
        frame.attrs = {"cache": cache, "timing": plan.timing, "operands": plan.distribution}
        yield frame


def precision_names(names: Sequence[str]) -> Sequence[str]:
    """Return the precisions, without float32 itself."""
    from numba_gemm.gemm.precision import FP32_AUTO, IEEE, PRECISIONS, canonical

    known = [name for name in PRECISIONS if name != IEEE]
    if list(names) == ["all"]:
        return known
    try:
        found = [canonical(name) for name in names]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if IEEE in found or FP32_AUTO in found:
        raise UsageError(f"--precisions is {','.join(names)}; expected some of {', '.join(known)}, or all")
    return found


def reason_for_nothing(contenders: Sequence[Contender], simulated: bool) -> str:
    """Return why none of some contenders takes a shape, and what to do."""
    if not contenders:
        where = "on a GPU" if simulated else f"with CuPy or PyTorch, by pip install {BENCH}"
        return f"{results.CUBLAS} is measured only {where}; name another stage"
    columns = max(contender.max_columns for contender in contenders)
    if not math.isinf(columns):
        return f"{contenders[0].stage} is for up to {columns} columns of C; pass a shape such as 64,{columns},64"
    terms = max(contender.max_terms for contender in contenders)
    return f"the shapes have more than {terms:,} multiply-adds, too many for the chosen stages; pass smaller shapes"


def notices(plan: Plan, stages: Sequence[str]) -> Iterator[str]:
    """Yield a message for each request that cannot be met, and in the simulator that its times mean nothing."""
    from numba_gemm.lab.bench.report import SIMULATOR_NOTICE

    if plan.simulated:
        yield SIMULATOR_NOTICE
    elif results.CUBLAS in stages and all(contender.stage != results.CUBLAS for contender in plan.contenders):
        yield f"neither CuPy nor PyTorch can use the GPU: there is no cuBLAS; CuPy comes with pip install {BENCH}"
    for stage in dict.fromkeys(contender.stage for contender in plan.contenders):
        several = [contender for contender in plan.contenders if contender.stage == stage]
        if not any(contender.takes(shape) for contender in several for shape in plan.shapes):
            yield f"{stage} is left out: {reason_for_nothing(several, plan.simulated)}"


def progress(frame: pd.DataFrame) -> str:
    """Describe the results of the last shape in one line."""
    extents = list(results.EXTENTS)
    rows = frame[(frame[extents] == frame[extents].iloc[-1]).all(axis=1)]
    every = results.records(rows)
    failed = results.names_in([row for row in every if row["status"] in results.FAILURES], "stage")
    said = f"{every[0]['shape']}: {sum(row['status'] == results.OK for row in every)} correct"
    if failed:
        said += f", NOT CORRECT: {', '.join(failed)}"
    timed = [row for row in results.records(results.fastest(rows)) if not math.isnan(row["percent_of_peak"])]
    if timed:
        top = max(timed, key=lambda row: row["gflops"])
        ratio = "" if math.isnan(top["ratio_to_cublas"]) else f", {top['ratio_to_cublas']:.3f} of cuBLAS"
        said += f"; fastest {top['stage']}: {top['gflops']:,.0f} GFLOP/s{ratio}"
    return said


class Report:
    """Report of a run, with what it is compared with."""

    def __init__(
        self, compare: Path | None = None, model: bool = False, ceilings: Path | None = None, plot: bool = False
    ) -> None:
        """Read the older results and the ceilings; raise `UsageError` if they cannot be read."""
        self.old_path, self.plot = compare, plot
        self.model: tuple[Any, str, Any] | None = None
        if plot:
            pictures.pyplot()  # fails now if matplotlib is missing, not after the measurement
        if ceilings and not model:
            raise UsageError("--ceilings says what --model predicts by: give both")
        try:
            self.old = results.load(compare) if compare else None
            if model:
                from numba_gemm.lab.bench.model import choose_ceilings
                from numba_gemm.runtime.device import current_device, device_properties

                device = device_properties(current_device())
                self.model = *choose_ceilings(ceilings, device), device
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from None

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame | None:
        """Compare a result with the older one, if there is one."""
        return results.compare(frame, self.old[0]) if self.old else None

    def claims(self, frame: pd.DataFrame) -> dict[str, bool]:
        """Check all products, and on a GPU the targets of the precisions, and that nothing is slower or failed."""
        from numba_gemm.lab.bench.targets.verdicts import precision_verdicts
        from numba_gemm.simulator.switch import SIMULATOR

        compared = self.compared(frame)
        found = {CORRECT: not frame["status"].isin(results.FAILURES).any()}
        if SIMULATOR:
            return found
        for row in precision_verdicts(frame):
            found["{what}: geometric mean {value:.3g}, at least {at_least:g}".format_map(row)] = row["met"]
        if compared is not None:
            slower = compared["verdict"].isin(results.REGRESSIONS)
            found[f"nothing is slower than in {self.old_path}"] = not slower.any()
        return found

    def __call__(self, frame: pd.DataFrame, environment: Mapping[str, Any]) -> dict[str, str | bytes]:
        """Print the report, and return its files."""
        from numba_gemm.lab.bench import plots, report
        from numba_gemm.lab.bench.model import model_table

        compared = self.compared(frame)
        if self.old and compared is not None:
            if device_name(self.old[1]) != device_name(environment):
                print(f"{self.old_path} was measured on {device_name(self.old[1])}")
            if environment.get("timing") != self.old[1].get("timing"):
                print(f"launching counts in only one of this run and {self.old_path}")
            if compared.empty:
                print(f"{self.old_path} has no measurement in common with this run")
        modelled = model_table(frame, *self.model, bool(environment.get("simulator"))) if self.model else None
        width = shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
        print(report.text_of(frame, environment, compared, modelled, width))
        drawn = plots.pictures(frame, environment) if self.plot else {}
        return {"report.md": report.text_of(frame, environment, compared, modelled), **drawn}


EXPERIMENT = Experiment(
    command="bench",
    run=bench,
    claims=Report().claims,
    claims_of_times=False,
    allowed={"stages": (*STAGES, *results.NOT_STAGES)},
    progress=progress,
    report=Report(),
    own_clocks=True,
    table=results.RESULTS,
    record=results.ENVIRONMENT,
)
