#!/usr/bin/env python3
"""Run every stage under compute-sanitizer, on a GPU: ``python tests/sanitize.py [--out sanitize.csv]``.

memcheck checks every access to global and shared memory, racecheck every pair of accesses to a shared address without
a barrier between them. One child process per tool runs every stage in every configuration over small ragged shapes,
each operand in an allocation of its own, and compares each result with float64. Scheduled stages run with each tile
loader, with tiles that several blocks share, with a batch and with an epilogue. Each of these runs three times and must
give the same bits, because the next launch reuses counters and partial sums. Stages of the tensor-core ladder run in
each of their precisions, the teaching stages through `tiled_sgemm`. Kernels are compiled beforehand on all cores,
unless the cache on disk is disabled. The exit status is 1 if a tool reports an error or a result is wrong, and 2 if the
script cannot run.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

REPORT = re.compile(
    r"^========= (?!\w+ SUMMARY)(?P<text>(?:Error|Warning|Invalid|Program hit|Race|Barrier|Uninitialized|Out-of).*)",
    re.IGNORECASE,
)
SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (?P<count>\d+)")
BEGIN, END = "@begin", "@end"
SEED = 0  # of the operands
FOUND = 86  # exit status of compute-sanitizer if it has reported an error


@dataclass
class Row:
    """Report of one tool on one case."""

    tool: str
    stage: str
    config: str
    variant: str
    m: int
    n: int
    k: int
    reports: int
    in_bounds: float
    first_report: str

    @property
    def clean(self) -> bool:
        """True if nothing was reported and the result is correct; False for NaN."""
        return self.reports == 0 and self.in_bounds <= 1.0


@dataclass(frozen=True)
class Layout:
    """Placement of a matrix at the end of an allocation, from `offset` floats after its beginning."""

    by_columns: bool = False
    offset: int = 0
    step: int = 1  # distance in floats between elements of a line
    aligned: bool = False  # lines begin at multiples of four floats
    padded: bool = False  # and the last one, too, ends at such a multiple

    def view(self, rows: int, cols: int, fill: Any) -> tuple[Any, Any]:
        """Return an allocation filled with `fill`, and its view of shape (rows, cols)."""
        import numpy as np

        lines, length = (cols, rows) if self.by_columns else (rows, cols)
        if self.aligned:
            pitch = -(-length // 4) * 4
            flat = np.full(lines * pitch - (0 if self.padded else pitch - length), fill, np.float32)
            view = np.lib.stride_tricks.as_strided(flat, (lines, length), (4 * pitch, 4))
            return flat, view.T if self.by_columns else view
        flat = np.full(self.offset + lines * length * self.step, fill, np.float32)
        view = flat[self.offset :: self.step].reshape(lines, length)
        return flat, view.T if self.by_columns else view


@dataclass(frozen=True)
class Case:
    """One launch; for stages that take a partition, `blocks` share all tiles except `whole` of them.

    `batch` is a grid of products: those in one row have the same A, those in one column the same B. A `public` case
    runs through `tiled_sgemm`.
    """

    stage: Any
    config: Any
    shape: tuple[int, int, int]
    layouts: tuple[Layout, Layout, Layout]
    blocks: int = 0
    whole: int = 0
    batch: tuple[int, int] = (1, 1)
    epilogue: bool = False
    launches: int = 1
    precision: str = "ieee"
    public: bool = False


ROWS, COLUMNS = Layout(), Layout(by_columns=True)
OFF, COLUMNS_OFF = Layout(offset=1), Layout(by_columns=True, offset=1)
SPACED = Layout(offset=1, step=2)
ALIGNED, ALIGNED_COLUMNS = Layout(aligned=True), Layout(by_columns=True, aligned=True)
# For `thin`, whose copies of 16 bytes may be told to read fewer: memcheck reports them as if they read all. What they
# must not read is NaN.
PADDED, PADDED_COLUMNS = replace(ALIGNED, padded=True), replace(ALIGNED_COLUMNS, padded=True)
BATCH = (2, 3)  # for scheduled stages
ROW = (1, 3)  # for tensor-core stages, whose launches take a one-dimensional batch
LAUNCHES = 3  # for scheduled stages


def cases_of(stage: Any, config: Any) -> Iterator[Case]:
    """Yield cases of the FP32 ladder: two block tiles per side, three along k, the last ones partial; shared tiles."""
    m, n, k = config.BM, config.BN, max(config.BK, 8)
    if stage.schedule is None:
        yield Case(stage, config, (m + 12, n + 20, 2 * k + 4), (ROWS, ROWS, ROWS))
        yield Case(stage, config, (m + 13, n + 19, 2 * k + 3), (ROWS, ROWS, ROWS))
        yield Case(stage, config, (1, 3, 1), (ROWS, ROWS, ROWS))
        return
    even, odd, epilogue = (n // 4 + 1) * 4, n + 1, stage.takes_epilogue
    batch = BATCH if stage.batch_dimensions else Case.batch
    yield Case(stage, config, (m + 12, even, 4 * k + 4), (ROWS, ROWS, ROWS), 7)
    yield Case(stage, config, (m + 12, even, 4 * k + 4), (COLUMNS, COLUMNS, ROWS), 5, whole=1)
    yield Case(stage, config, (m + 13, odd, 4 * k + 3), (OFF, OFF, OFF), 7)
    yield Case(stage, config, (m + 13, odd, 4 * k + 3), (COLUMNS_OFF, COLUMNS_OFF, ROWS), 5, whole=1)
    yield Case(stage, config, (m + 13, odd, 2 * k + 3), (SPACED, SPACED, SPACED), 8)
    if stage.takes_variants:
        rows, columns = (PADDED, PADDED_COLUMNS) if stage.name == "thin" else (ALIGNED, ALIGNED_COLUMNS)
        yield Case(stage, config, (m + 13, odd, 4 * k + 3), (rows, rows, ALIGNED), 7)
        yield Case(stage, config, (m + 13, odd, 4 * k + 4), (columns, columns, ALIGNED), 5, whole=1)
    few = max(m // 2, 1)
    yield Case(stage, config, (few, even, 2 * k), (ROWS, ROWS, ROWS), 5, whole=2, batch=batch, epilogue=epilogue)
    yield Case(stage, config, (m + 13, odd, 4 * k + 3), (OFF, OFF, OFF), 3, epilogue=epilogue)
    yield Case(stage, config, (1, 3, 1), (ROWS, ROWS, ROWS), 1)


def compensated_cases_of(stage: Any, config: Any, precision: str) -> Iterator[Case]:
    """Yield cases of a configuration with compensated sums; only `thin` shares these among blocks."""
    from numba_gemm.device.units import ceil_div
    from numba_gemm.kernels.ladder.stage import FEW_TERMS

    for case in cases_of(stage, config):
        m, n, k = case.shape
        if k > FEW_TERMS:
            case = replace(case, precision=precision)
            if not config.in_lanes:
                tiles = ceil_div(m, config.BM) * ceil_div(n, config.BN) * case.batch[0] * case.batch[1]
                case = replace(case, blocks=min(case.blocks, tiles), whole=tiles)
            yield case


def tensor_cases_of(stage: Any, precision: str) -> Iterator[Case]:
    """Yield cases of a stage without tensor maps: two tiles per side, three slots along k, the last ones partial.

    There are long sums, too, if short ones use another kernel.
    """
    from numba_gemm.gemm.tensor_heuristics import configs_for
    from numba_gemm.kernels.tensor_core import SHORT_SUMS, TENSOR_PRECISIONS
    from numba_gemm.kernels.tensor_core.stage import LONG_SUM, TensorStage

    slot_k = TENSOR_PRECISIONS[precision].slot_k
    for config in configs_for(stage, precision, 1):
        shape = (config.BM + 13, config.BN + 19, 2 * slot_k + 3)
        even = (config.BM + 16, config.BN + 32, 2 * slot_k + 4)
        of = {"stage": stage, "config": config, "precision": precision}
        if not stage.takes_epilogue:
            of["public"] = True
            yield Case(shape=shape, layouts=(ROWS, ROWS, OFF), launches=LAUNCHES, **of)
            yield Case(shape=even, layouts=(COLUMNS, COLUMNS, ROWS), **of)
            yield Case(shape=shape, layouts=(SPACED, COLUMNS_OFF, ROWS), batch=ROW, **of)
            continue
        yield Case(shape=shape, layouts=(ROWS, ROWS, OFF), launches=LAUNCHES, **of)
        yield Case(shape=even, layouts=(COLUMNS, COLUMNS, ROWS), epilogue=True, **of)
        yield Case(shape=even, layouts=(ROWS, ROWS, ROWS), **of)
        yield Case(shape=shape, layouts=(COLUMNS, ROWS, ROWS), batch=ROW, epilogue=True, launches=LAUNCHES, **of)
        if isinstance(stage, TensorStage) and stage.splits:  # among two blocks and three
            yield Case(shape=shape, layouts=(ROWS, ROWS, OFF), blocks=2 * 4, **of)
            yield Case(shape=shape, layouts=(COLUMNS, ROWS, ROWS), blocks=3 * 4, batch=ROW, epilogue=True, **of)
        if precision in SHORT_SUMS:
            yield Case(shape=(*shape[:2], LONG_SUM + 3), layouts=(ROWS, ROWS, OFF), launches=LAUNCHES, **of)


def tma_cases_of(stage: Any) -> Iterator[Case]:
    """Yield cases of the stage whose operands tensor maps describe, in all layouts of these."""
    from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS
    from numba_gemm.kernels.tensor_core.tma_stage import LAYOUTS

    for config, letters in product(stage.configs, LAYOUTS):
        layouts = (*({"N": ROWS, "T": COLUMNS, "*": OFF}[order] for order in letters), ROWS)
        shape = (config.BN + 20, config.BN + 36, 2 * TENSOR_PRECISIONS["tf32"].slot_k + 4)
        of = {"stage": stage, "config": config, "shape": shape, "layouts": layouts, "launches": LAUNCHES}
        for epilogue in (False, True):
            yield Case(epilogue=epilogue, precision="tf32", **of)
        yield Case(batch=ROW, precision="tf32", **of)


def cases(names: list[str] | None, cc: tuple[int, int]) -> Iterator[Case]:
    """Yield all cases of the named stages or precisions, by default of all, that a compute capability can run."""
    from numba_gemm.kernels import STAGES
    from numba_gemm.kernels.ladder import STAGES as LADDER
    from numba_gemm.kernels.ladder.stage import compensates
    from numba_gemm.kernels.tensor_core.tma_stage import TmaStage

    for stage in STAGES.values():
        if not stage.runs_on(cc):
            continue
        for precision in stage.precisions:
            if names and stage.name not in names and precision not in names:
                continue
            if stage.name in LADDER:
                for config in stage.configs:
                    if precision == "ieee":
                        yield from cases_of(stage, config)
                    elif compensates(config):
                        yield from compensated_cases_of(stage, config, precision)
            elif isinstance(stage, TmaStage):
                yield from tma_cases_of(stage)
            else:
                yield from tensor_cases_of(stage, precision)


def bias(value: Any, row: Any, col: Any, across: Any, down: Any) -> Any:
    """Epilogue of the cases: add a vector along columns and subtract one along rows."""
    return value + across[col] - down[row]


class Operands:
    """Operands of a case on the host."""

    def __init__(self, case: Case) -> None:
        import numpy as np

        rng = np.random.default_rng(SEED)
        m, n, k = case.shape
        many, wide = case.batch
        copies = {"a": many, "b": wide, "c": many * wide}
        self.case, self.flats, self.views = case, {}, {}
        for name, layout, (rows, cols) in zip("abc", case.layouts, ((m, k), (k, n), (m, n))):
            # The matrices of a batch are stacked along rows.
            flat, view = layout.view(copies[name] * rows, cols, np.nan)
            view[...] = rng.standard_normal(view.shape, dtype=np.float32)
            self.flats[name], self.views[name] = flat, np.split(view, copies[name])
        self.across, self.down = (rng.standard_normal(extent, dtype=np.float32) for extent in (n, m))
        self.before = self.flats["c"].copy()

    def matrices(self, bases: dict[str, int], owners: dict[str, Any]) -> list[Any]:
        """Return A, B and C, or the first ones of a batch, in allocations at these addresses."""
        from numba_gemm.runtime.matrix import Matrix

        made = []
        for name in "abc":
            view = self.views[name][0]
            offset = view.ctypes.data - self.flats[name].ctypes.data
            made.append(Matrix(bases[name] + offset, *view.shape, *view.strides, device=0, owner=owners.get(name)))
        return made

    def batch(self) -> Any:
        """Return the batch: two dimensions, of which A has one and B the other."""
        from numba_gemm.kernels.product import ONE, Batch

        many, wide = self.case.batch
        if (many, wide) == (1, 1):
            return ONE
        a, b, c = (views[-1].ctypes.data - views[0].ctypes.data for views in self.views.values())
        a, b, c = a // max(1, many - 1), b // (wide - 1), c // (many * wide - 1)
        return Batch((1, many, wide), (0, a, 0), (0, 0, b), (0, wide * c, c))

    def options(self, across: Any = None, down: Any = None) -> dict[str, Any]:
        """Return keywords of `launch`: the batch, and the epilogue with its vectors."""
        from numba_gemm.runtime import epilogue as epilogues
        from numba_gemm.runtime.matrix import Vector

        if not self.case.epilogue:
            return {"batch": self.batch()}
        vectors = tuple(
            Vector(0 if array is None else address(array), values.size, 4, array)
            for array, values in ((across, self.across), (down, self.down))
        )
        return {"batch": self.batch(), "epilogue": epilogues.prepared(bias, 2), "vectors": vectors}

    def product(self) -> Any:
        """Return the description of the product, in allocations that are aligned."""
        from numba_gemm.runtime.launch import product_of

        return product_of(*self.matrices(dict.fromkeys("abc", 0), {}), **self.options())

    def judge(self, alpha: float, beta: float, result: Any) -> float:
        """Return the worst error of a result in units of the bound."""
        from numba_gemm.models.accuracy import compare, reference

        flat, start, errors = self.flats["c"], self.flats["c"].ctypes.data, []
        pairs = product(self.views["a"], self.views["b"])
        for (a, b), c in zip(pairs, self.views["c"]):
            begin = (c.ctypes.data - start) // 4
            old, new = (strided(values[begin:], c) for values in (self.before, result))
            expected, scale = reference(alpha, a, b, beta, old)
            if self.case.epilogue:
                expected += self.across - self.down[:, None]
                scale += abs(self.across) + abs(self.down[:, None])
            error = compare(new, expected, scale, a.shape[1], self.case.precision, alpha).in_bounds
            errors.append(error * self._tightness(a.shape[1]))
        assert flat.size == result.size
        return max(errors)

    def _tightness(self, k: int) -> float:
        """Return the bound of the precision in units of the stage's: teaching stages have larger errors."""
        if not self.case.public:
            return 1.0
        from support import tensor_core_cases

        from numba_gemm.models import accuracy

        own = tensor_core_cases.bound(self.case.stage.name, self.case.precision, k)
        return accuracy.bound(self.case.precision, k) / (own + 2 * accuracy.UNIT_ROUNDOFF)


def strided(values: Any, like: Any) -> Any:
    """View values with the shape and strides of another array."""
    import numpy as np

    return np.lib.stride_tricks.as_strided(values, like.shape, like.strides)


def address(array: Any) -> int:
    """Return the address of a device array."""
    return int(array.__cuda_array_interface__["data"][0])


class DeviceArray:
    """Batch of matrices in device memory that keeps its `owner` alive; known by ``__cuda_array_interface__`` only."""

    def __init__(self, owner: Any, matrix: Any, extents: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (matrix.pointer, False),
            "shape": (*extents, matrix.rows, matrix.cols),
            "strides": (*steps, matrix.row_stride, matrix.col_stride),
            "typestr": "<f4",
            "stream": None,
            "version": 3,
        }


def variant_of(case: Case, product: Any) -> str:
    """Return a word for all that distinguishes a case except its stage, configuration and shape."""
    from numba_gemm.kernels.ladder.stage import LadderStage
    from numba_gemm.kernels.tensor_core.tma_stage import TmaStage, tma_operands

    batch = "-batch" if case.batch != (1, 1) else ""
    if not isinstance(case.stage, LadderStage):
        layout = ""
        if isinstance(case.stage, TmaStage):
            layout = f"-{tma_operands(product).layout}"
        blocks = f"-{case.blocks}blocks" if case.blocks else ""
        return f"{case.precision}{layout}-{'epilogue' if case.epilogue else 'plain'}{blocks}{batch}"
    variant = case.stage.variant(case.config, product, case.precision)
    word = variant.name if case.stage.takes_variants else "aligned" if variant else "unaligned"
    if not case.stage.takes_partition:
        return word
    word += f"-{case.blocks}blocks"
    word += f"-{case.whole}whole" if case.whole else ""
    return word + batch


def run(case: Case, alpha: float, beta: float, matrices: list[Any], owners: dict[str, Any], **options: Any) -> None:
    """Launch a case once; options are those of `Operands.options`."""
    from numba_gemm import tiled_sgemm
    from numba_gemm.kernels.stage import Partition
    from numba_gemm.runtime.launch import launch

    a, b, c = matrices
    if not case.public:
        partition = Partition(case.blocks, case.whole) if case.blocks else None
        launch(case.stage, case.config, alpha, a, b, beta, c, partition=partition, precision=case.precision, **options)
        return
    batch = options["batch"]
    arrays = [
        DeviceArray(owners[name], matrix, batch.extents, steps)
        for name, matrix, steps in zip("abc", matrices, (batch.a, batch.b, batch.c))
    ]
    x, y, out = arrays
    tiled_sgemm(x, y, out, alpha=alpha, beta=beta, stage=case.stage.name, precision=case.precision)


def child(names: list[str] | None) -> None:
    """Run every case, marking its beginning and end among the tool's reports; runs under compute-sanitizer."""
    from numba import cuda

    from numba_gemm.runtime.device import device_properties, synchronize

    alpha, beta = 1.5, -0.5
    for case in cases(names, device_properties(0).cc):
        operands = Operands(case)
        on_device = {name: cuda.to_device(flat) for name, flat in operands.flats.items()}
        matrices = operands.matrices({name: address(array) for name, array in on_device.items()}, on_device)
        options = operands.options(cuda.to_device(operands.across), cuda.to_device(operands.down))
        print(BEGIN, case.stage.name, case.config.name, variant_of(case, operands.product()), *case.shape, flush=True)
        results = []
        for _ in range(LAUNCHES if case.blocks else case.launches):
            on_device["c"].copy_to_device(operands.before)
            cuda.synchronize()
            run(case, alpha, beta, matrices, on_device, **options)
            synchronize()
            results.append(on_device["c"].copy_to_host())
        error = operands.judge(alpha, beta, results[0])
        same_bits = len({result.tobytes() for result in results}) == 1
        print(END, error if same_bits else "inf", flush=True)


def kernels(names: list[str] | None, cc: tuple[int, int]) -> list[Any]:
    """Return the distinct kernels of the cases, in order."""
    from numba_gemm.kernels.product import ONE
    from numba_gemm.kernels.stage import Gpu, Partition

    gpu, found = Gpu(cc, 132), {}
    for case in cases(names, cc):
        described = Operands(case).product()
        if case.public:  # which launches the matrices of a batch one by one
            described = described._replace(batch=ONE)
        partition = Partition(case.blocks, case.whole) if case.blocks else None
        for piece in case.stage.pieces(case.config, described, case.precision, gpu):
            launches = case.stage.launches(case.config, piece.product, case.precision, partition, gpu)
            found |= dict.fromkeys(step.kernel for step in launches.steps)
    return list(found)


def compile_all(names: list[str] | None) -> None:
    """Compile all kernels beforehand, on all cores."""
    from numba_gemm.runtime import device, kernel_cache, kernel_files

    if kernel_files.directory() is not None:
        cc = device.device_properties(0).cc
        kernel_cache.fetch_all([(kernel, cc) for kernel in kernels(names, cc)])


def stages_option(names: list[str] | None) -> list[str]:
    """Return the option ``--stages`` for a process of this script."""
    return ["--stages", *names] if names else []


def parse(tool: str, output: str) -> tuple[list[Row], int]:
    """Parse a child's output into rows and the reports outside of all cases."""
    rows: list[Row] = []
    open_row: Row | None = None
    stray = 0
    for line in output.splitlines():
        if line.startswith(BEGIN):
            stage, config, variant, *shape = line.split()[1:]
            open_row = Row(tool, stage, config, variant, *map(int, shape), 0, float("nan"), "")
            rows.append(open_row)
        elif line.startswith(END) and open_row is not None:
            open_row.in_bounds = float(line.split()[1])
            open_row = None
        elif report := REPORT.match(line):
            if open_row is None:
                stray += 1
            else:
                open_row.reports += 1
                open_row.first_report = open_row.first_report or report["text"]
    return rows, stray


def check(tool: str, sanitizer: str, names: list[str] | None, log: Path | None) -> tuple[list[Row], bool]:
    """Run one tool over every case; return the rows, and True if tool and rows agree that there are no errors."""
    command = [sanitizer, "--tool", tool, f"--error-exitcode={FOUND}", "--print-limit=1000"]
    if tool == "memcheck":
        # Padding keeps an access past the end of one allocation from hitting the next. Errors of driver functions raise
        # in Python if they matter, and the libraries above the driver provoke some that do not.
        command += ["--padding=4096", "--report-api-errors=no"]
    command += [sys.executable, str(Path(__file__).resolve()), "--child", *stages_option(names)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if log is not None:
        log.with_suffix(f".{tool}.log").write_text(done.stdout, encoding="utf-8")
    rows, stray = parse(tool, done.stdout)
    summary = [int(match["count"]) for match in map(SUMMARY.match, done.stdout.splitlines()) if match]
    clean = done.returncode == 0 and stray == 0 and summary == [0] and bool(rows) and all(row.clean for row in rows)
    if not clean:
        print(done.stdout[-8000:])
        print(f"{tool}: exit status {done.returncode}, {stray} reports outside of every case, summary {summary}")
    return rows, clean


def save(rows: list[Row], path: Path, command_line: str, commit: str | None) -> None:
    """Write the table, and beside it a JSON file with its environment and command."""
    import pandas as pd

    from numba_gemm.lab.harness import command, environment
    from numba_gemm.lab.harness.experiment import Experiment
    from numba_gemm.simulator.switch import SIMULATOR

    described = environment.describe(
        Experiment(run=check), simulated=SIMULATOR, seed=SEED, command=command_line, stated_commit=commit
    )
    texts = {".csv": command.csv_text(pd.DataFrame(rows)), ".json": command.json_text(described)}
    command.write_files(path.parent, {path.with_suffix(ending).name: text for ending, text in texts.items()})


def main() -> int:
    """Run the command; return its exit status."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"], help="default: memcheck racecheck")
    arguments.add_argument("--stages", nargs="+", metavar="NAME", help="stages or precisions; default: all")
    arguments.add_argument(
        "--out", type=Path, help="write the table to this CSV file, and its environment and the tools' output beside it"
    )
    arguments.add_argument("--commit", metavar="HASH", help="the commit to record where git cannot tell it")
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        child(options.stages)
        return 0

    from numba_gemm.inspect.sass import find_tool
    from numba_gemm.simulator.probe import driver_error

    if (reason := driver_error()) is not None:
        print(f"error: this needs a GPU, and {reason}", file=sys.stderr)
        return 2
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        print("error: compute-sanitizer was not found; it comes with the CUDA toolkit", file=sys.stderr)
        return 2

    from numba_gemm.kernels import STAGES
    from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS

    known = (*STAGES, *TENSOR_PRECISIONS)
    if unknown := [name for name in options.stages or [] if name not in known]:
        print(f"error: unknown stage {', '.join(unknown)}; known are {', '.join(known)}", file=sys.stderr)
        return 2

    compile_all(options.stages)
    rows: list[Row] = []
    clean = True
    for tool in options.tools:
        found, tool_clean = check(tool, sanitizer, options.stages, options.out)
        rows += found
        clean &= tool_clean
    print(
        f"{'tool':10} {'stage':18} {'configuration':32} {'variant':44} {'m x n x k':16} {'reports':>7} {'in bounds':>9}"
    )
    for row in rows:
        shape = f"{row.m}x{row.n}x{row.k}"
        print(
            f"{row.tool:10} {row.stage:18} {row.config:32} {row.variant:44} {shape:16} {row.reports:7} "
            f"{row.in_bounds:9.3f}  {row.first_report}"
        )
    if options.out is not None:
        save(rows, options.out, shlex.join(["python", "tests/sanitize.py", *sys.argv[1:]]), options.commit)
    print(f"{len(rows)} cases, {sum(not row.clean for row in rows)} not clean: {'clean' if clean else 'NOT CLEAN'}")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
