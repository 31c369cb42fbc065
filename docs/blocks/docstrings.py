"""The paragraph ``Measured: `` of each stage's docstring."""

import math
import re
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from blocks import published
from blocks.published import LADDER_SHAPE, Published, ReadmeError, Rows, tflops
from numba_gemm.gemm.ladder_heuristics import SHORT_TERMS
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.ladder import ASIDE
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.counters import COUNTERS, KEY, TOTAL, WAVEFRONTS
from numba_gemm.lab.bench.results import AUTO, CUBLAS, OK, alone, dictionaries, fastest
from numba_gemm.lab.bench.tables import number, significant
from numba_gemm.lab.bench.targets.groups import COPY
from numba_gemm.lab.bench.tensor_ladder import DECOMPOSE
from numba_gemm.lab.harness.environment import device_name

# Parts of the module docstrings of stages; the lines of a paragraph after its first are indented.
DOCSTRING = re.compile(r'\A"""(?P<text>.*?)"""', re.DOTALL)
MEASURED = re.compile(r"^Measured: .*\n(?:[ \t]+\S.*\n)*", re.MULTILINE)
LIMITS = re.compile(r"^Limits: ", re.MULTILINE)
DOCSTRING_WIDTH = 118

DIRECT, DIRECT_PRECISION = "tf32_tma", "tf32"  # the stage whose operands are not decomposed
SAME_KERNEL = 0.015  # relative difference of the times of one kernel in two runs, at most


def gpu(environment: Mapping[str, Any]) -> str:
    """Return the name of the GPU with its vendor's."""
    return f"an NVIDIA {device_name(environment).removeprefix('NVIDIA ')}"


def tensor_measured(name: str, rows: Rows, found: Published) -> str:
    """Return the paragraph of a tensor core stage."""
    frame, how = found.precisions
    if name == DIRECT:
        direct = published.warm_rows(fastest(alone(frame)), LADDER_SHAPE).get((AUTO, DIRECT_PRECISION))
        if direct is None:
            raise ReadmeError(f"the results hold no {DIRECT_PRECISION} at {LADDER_SHAPE}")
        return filled(
            f"Measured: {number(direct['gflops'] / 1000)} TFLOP/s of {DIRECT_PRECISION} at {LADDER_SHAPE} on "
            f"{gpu(how)}, {number(direct['ratio_to_same_precision'], 2)} of cuBLAS TF32."
        )
    row, stages = rows[name], published.ladder_stages(rows)
    text = (
        f"Measured: {number(row['tflops'])} TFLOP/s of {row['precision']} at {Shape(row['m'], row['n'], row['k'])} on "
        f"{gpu(how)}, {number(row['ratio_to_cublas'], 2)} of cuBLAS SGEMM, in turns"
    )
    if (at := stages.index(name)) and (before := rows[stages[at - 1]])["precision"] == row["precision"]:
        text += f" and {number(row['tflops'] / before['tflops'], 2)} times {stages[at - 1]}"
    if row["precision"] == rows[DECOMPOSE]["precision"]:
        text += ", decomposition not counted"
    return filled(
        f"{text}; {row['registers']:.0f} registers per thread; of positive operands the "
        f"median error over |A| @ |B| is {significant(row['error_median'], 2)}."
    )


def generate_tensor_docstrings(folder: Path, found: Published) -> dict[Path, str]:
    """Return the source of every measured tensor core stage with its paragraph generated again."""
    try:
        rows, _ = found.tensor_ladder()
    except ReadmeError:
        return {}  # the table reports that it is missing
    names = {*published.ladder_stages(rows), DIRECT}
    paths = [path for path in sorted(folder.glob("*.py")) if path.stem in names]
    return {path: with_paragraph(path, tensor_measured(path.stem, rows, found)) for path in paths}


def counted(results: Path, file: str, row: Mapping[str, Any], **wanted: Any) -> dict[str, Any]:
    """Return the row of counters of the same configuration as a row of results; empty if there is none."""
    path = results / file
    if not path.is_file():
        return {}
    wanted |= {name: row[name] for name in KEY}
    frame = pd.read_csv(path, dtype={"stage": str, "config": str})
    if missing := [name for name in wanted if name not in frame.columns]:
        raise ReadmeError(f"{path} has no column {', '.join(missing)}")
    found = (one for one in dictionaries(frame) if all(one[name] == value for name, value in wanted.items()))
    return next(found, {})


def clauses(results: Path, row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause per counter of a stage; none if the kernel that was counted took another time."""
    counters, shared = counted(results, COUNTERS, row), counted(results, WAVEFRONTS, row, op=TOTAL)
    if not math.isclose(counters.get("time_us", math.nan), float(row["median_us"]), rel_tol=SAME_KERNEL):
        return
    for value, digits, words in (
        (counters.get("registers", math.nan), 0, "registers per thread"),
        (counters.get("fma_pipe_percent", math.nan), 1, "% of the FMA pipe"),
        (shared.get("excess_percent", math.nan), 1, "% excess shared wavefronts"),
    ):
        if not math.isnan(value):
            yield f"{number(value, digits)} {words}"


def measured(rows: Rows, stage: str, found: Published) -> str:
    """Return the paragraph of a stage: its speed relative to the previous stage and to cuBLAS, and its counters."""
    if stage in ASIDE:
        return filled(MEASURED_ASIDE[stage](found))
    row, speed = rows[stage], tflops(rows, stage)
    text = f"Measured: {number(speed, 1 if speed >= 10 else 2)} TFLOP/s at {LADDER_SHAPE} on {gpu(found.environment)}"
    ratio, below = float(row["ratio_to_cublas"]), measured_below(stage, rows)
    comparisons = [] if math.isnan(ratio) else [f"{number(ratio, 2)} of cuBLAS SGEMM"]
    if below:
        comparisons.append(f"{number(speed / tflops(rows, below[-1]), 2)} times {below[-1]}")
    if comparisons:
        text += f", {' and '.join(comparisons)}"
    if said := ", ".join(clauses(found.folder, row)):
        text += f"; {said}"
    return filled(f"{text}.")


def was_measured(stage: str, rows: Rows) -> bool:
    """Return True if there is a row of a stage in one of its present configurations."""
    return stage in rows and any(config.name == rows[stage]["config"] for config in STAGES[stage].configs)


def measured_below(stage: str, rows: Rows) -> list[str]:
    """Return the measured stages below another one, the lowest first."""
    names = list(STAGES)
    return [name for name in names[: names.index(stage)] if was_measured(name, rows)]


def measured_thin(found: Published) -> str:
    """Return the paragraph of the stage for a C with few columns, from the targets in which B has few columns."""
    rows, how = found.measured("targets")
    ours = [row for row in rows if row["group"] == "vector" and row["m"] > row["n"] and row["status"] == OK]
    if not ours:
        raise ReadmeError(f"{found.folder / 'targets.csv'} holds no product of the group vector")
    ratios = [[row for row in ours if row["baseline"] == baseline] for baseline in (COPY, CUBLAS)]
    shares, over_cublas = (listed([number(float(row["ratio"]), 2) for row in some]) for some in ratios)
    columns = listed([str(row["n"]) for row in ratios[0]])
    return (
        f"Measured: {ours[0]['m']}x{ours[0]['k']} times {columns} columns on {gpu(how)}, by tiled_sgemm, A not in the "
        f"cache: {shares} of a copy's bandwidth, {over_cublas} of cuBLAS SGEMM."
    )


def measured_short_sums(found: Published) -> str:
    """Return the paragraph of the stage for sums of few terms, from the random products that have so few."""
    rows, how = found.measured("random_products")
    ratios = [float(row["ieee_ratio"]) for row in rows if row["k"] <= SHORT_TERMS]
    if not ratios:
        raise ReadmeError(f"{found.folder / 'random_products.csv'} holds no product of up to {SHORT_TERMS} terms")
    return (
        f"Measured: {len(ratios)} random products of up to {SHORT_TERMS} terms on {gpu(how)}, by tiled_sgemm: "
        f"{number(statistics.geometric_mean(ratios), 2)} of cuBLAS SGEMM in the geometric mean, "
        f"{number(math.floor(100 * min(ratios)) / 100, 2)} or more of it in each."
    )


def measured_small_matrices(found: Published) -> str:
    """Return the paragraph of the stage for batches of small matrices, from the square ones that it was chosen for."""
    rows, how = found.measured("batches")
    ours = [row for row in rows if row["stage"] == "small_matrices" and not row["drawn"] and row["m"] >= 3]
    if not ours:
        raise ReadmeError(f"{found.folder / 'batches.csv'} holds no square matrices that small_matrices multiplies")
    extents = listed([f"{row['m']}x{row['m']}" for row in ours])
    ratios = listed([significant(float(row["ieee_ratio"])) for row in ours])
    counts = [row["matrices"] for row in ours]
    return (
        f"Measured: products of {extents} matrices, {min(counts):,} to {max(counts):,} of them, on "
        f"{gpu(how)}, by tiled_sgemm: {ratios} times as fast as cuBLAS SGEMM."
    )


MEASURED_ASIDE = {
    "thin": measured_thin,
    "short_sums": measured_short_sums,
    "small_matrices": measured_small_matrices,
}


def listed(words: Sequence[str]) -> str:
    """Join words with commas and a final "and"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def filled(paragraph: str) -> str:
    """Wrap the lines of a docstring's paragraph."""
    how = textwrap.TextWrapper(DOCSTRING_WIDTH, "", "    ", break_long_words=False, break_on_hyphens=False)
    return how.fill(paragraph)


def with_paragraph(path: Path, paragraph: str) -> str:
    """Return a module's source with the paragraph in its docstring: before ``Limits: ``, else at the end.

    If the paragraph is empty, the docstring has none.
    """
    source = path.read_text(encoding="utf-8")
    docstring = DOCSTRING.match(source)
    if docstring is None:
        raise ReadmeError(f'{path.name}: a stage begins with a docstring in """')
    text = MEASURED.sub("", docstring["text"].rstrip() + "\n").rstrip()
    if not paragraph:
        end = "\n" if "\n" in text else ""
        return f'"""{text}{end}"""{source[docstring.end() :]}'
    text += "\n" if "\n" in text else "\n\n"  # a blank line after a one-line summary
    limits = LIMITS.search(text)
    at = limits.start() if limits else len(text)
    return f'"""{text[:at]}{paragraph}\n{text[at:]}"""{source[docstring.end() :]}'


def generate_docstrings(folder: Path, found: Published) -> dict[Path, str]:
    """Return the source of every stage with its paragraph generated again; without one if it was not measured."""
    if not folder.is_dir():
        raise ReadmeError(f"there is no {folder}")
    rows = published.rows_at(fastest(found.frame), LADDER_SHAPE)
    paths = [path for path in sorted(folder.glob("*.py")) if path.stem in STAGES]
    paragraphs = {
        path: measured(rows, path.stem, found) if path.stem in ASIDE or was_measured(path.stem, rows) else ""
        for path in paths
    }
    return {path: with_paragraph(path, paragraph) for path, paragraph in paragraphs.items()}
