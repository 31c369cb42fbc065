"""Blocks of docs/memory_lab.md: each experiment's lesson, and its picture, claims and main rows if it is recorded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from blocks.published import Published
from numba_gemm.lab.bench.results import dictionaries
from numba_gemm.lab.bench.tables import Column, number, significant, table
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.registry import MEMORY, load

FAILED = "**does not hold here:** "


class Shown(NamedTuple):
    """Rows of an experiment that its section shows: a query, empty for all; and their columns, by header."""

    rows: str
    columns: Mapping[str, str]


TABLES = {
    "transfers": Shown(
        "part == 'copy' and memory in ('pageable', 'pinned', 'device') and bytes in (4096, 1048576, 268435456)",
        {"copy": "direction", "memory": "memory", "bytes": "bytes"}
        | {"us": "us", "predicted us": "predicted_us", "GB/s": "gb_s"},
    ),
    "overlap": Shown(
        "part not in ('timeline', 'remainder') and streams in (1, 2, 3, 8)",
        {"part": "part", "what": "what", "streams": "streams", "multiply-adds per element": "turns"}
        | {"ms": "ms", "predicted ms": "predicted_ms"},
    ),
    "zero_copy": Shown(
        "", {"way": "way", "passes": "passes", "stride": "stride", "ms": "ms", "predicted ms": "predicted_ms"}
    ),
    "mapped_streams": Shown(
        "way != 'staged' or streams in (1, 4, 16)",
        {"way": "way", "streams": "streams", "kernel alone, ms": "kernel_ms"}
        | {"ms": "ms", "predicted ms": "predicted_ms"},
    ),
    "unified_addressing": Shown("part == 'copy'", {"copy": "name", "GB/s": "gb_s", "predicted GB/s": "predicted_gb_s"}),
    "memory_spaces": Shown(
        "",
        {"space": "space", "data in": "level", "rank in the guide": "predicted_latency_order"}
        | {"cycles per read": "latency_cycles", "TB/s": "tb_s", "predicted TB/s": "predicted_tb_s"},
    ),
    "coalescing": Shown(
        "", {"pattern": "pattern", "lanes": "lanes", "sectors": "sectors", "us": "us", "predicted us": "predicted_us"}
    ),
    "misaligned_copy": Shown(
        "offset in (0, 1, 8, 16, 24, 32) or block != 256",
        {"offset": "offset", "threads per block": "block", "sectors per warp": "sectors", "GB/s": "gb_s"}
        | {"by sectors": "predicted_by_sectors_gb_s", "by bytes": "predicted_by_bytes_gb_s"},
    ),
    "strided_copy": Shown(
        "stride in (1, 2, 4, 8, 12, 16, 32)",
        {"stride": "stride", "sectors per warp": "sectors", "GB/s": "gb_s"}
        | {"by sectors": "predicted_by_sectors_gb_s", "by fetches": "predicted_by_fetches_gb_s"},
    ),
    "l2_persistence": Shown(
        "way == 'stream' and region_mib in (15, 30, 35)",
        {"region, MiB": "region_mib", "set aside, MiB": "set_aside_mib", "window": "window"}
        | {"ms": "ms", "predicted ms": "predicted_ms"},
    ),
    "bank_conflicts": Shown(
        "(pattern == 'stride' and stride in (1, 2, 32, 33)) or pattern == 'broadcast'",
        {"pattern": "pattern", "stride": "stride", "bits": "width_bits"}
        | {"wavefronts": "predicted_wavefronts", "cycles": "cycles"},
    ),
    "narrow_product": Shown(
        "",
        {"kernel": "kernel", "sectors": "global_sectors_a_warp", "passes": "passes_a_warp", "GB/s": "gb_s"}
        | {"by hits": "predicted_by_hits_gb_s", "by misses": "predicted_by_misses_gb_s"},
    ),
    "partial_tiles": Shown(
        "",
        {"tile": "tile", "rows and columns": "extent", "zeros, %": "zeros_percent"}
        | {"us": "us", "predicted us": "predicted_us"},
    ),
    "product_with_transpose": Shown(
        "",
        {"kernel": "kernel", "passes": "passes_a_warp", "GB/s": "gb_s", "predicted GB/s": "predicted_by_hits_gb_s"},
    ),
    "async_copies": Shown(
        "kib == kib.max()",
        {"way": "way", "bytes per element": "width_bytes", "KiB": "kib"}
        | {"cycles": "cycles", "predicted cycles": "predicted_cycles"},
    ),
    "barriers": Shown(
        "measurement != 'divergent' and block in (32, 128, 1024)",
        {"measurement": "measurement", "barrier": "barrier", "threads per block": "block"}
        | {"ns per turn": "ns_a_turn", "predicted ns": "predicted_ns_a_turn"},
    ),
    "allocation": Shown(
        "bytes in (100, 1048576, 16777216, 1073741824)",
        {"way": "way", "bytes": "bytes", "us": "us", "predicted us": "predicted_us"}
        | {"freeing beside a kernel, us": "free_busy_us"},
    ),
}


def run_of(name: str, found: Published) -> tuple[Experiment, Path, pd.DataFrame | None]:
    """Return an experiment, the path of its recorded run without an ending, and the run; None if there is none."""
    path = found.folder.parent / "memory_lab" / name
    csv = path.with_suffix(".csv")
    return load(name), path, pd.read_csv(csv) if csv.is_file() else None


def section(name: str, found: Published) -> str:
    """Return the heading and lesson of an experiment, with the picture, claims and main rows of a recorded run."""
    experiment, path, frame = run_of(name, found)
    parts = [f"## {experiment.section} [{name}](../numba_gemm/lab/memory/{name}.py)", f"**{experiment.lesson}**"]
    if frame is None:
        return "\n\n".join([*parts, f"No run is recorded; `numba-gemm lab {name}` measures it."])
    held = "\n".join(f"- {'' if holds else FAILED}{claim}" for claim, holds in experiment.claims(frame).items())
    picture = "/".join(path.parts[-4:])
    parts += [f"![{name}](../{picture}.png)", "The numbers say:", held]
    return "\n\n".join([*parts, rows(frame, TABLES[name])] if name in TABLES else parts)


def rows(frame: pd.DataFrame, shown: Shown) -> str:
    """Return some rows of a run as a table, without the columns that the run lacks."""

    def column(header: str, name: str) -> Column:
        return Column(header, lambda row: cell(row[name]), left=not pd.api.types.is_numeric_dtype(frame[name]))

    columns = (column(header, name) for header, name in shown.columns.items() if name in frame)
    return table("", dictionaries(frame.query(shown.rows) if shown.rows else frame), *columns).markdown()


def cell(value: Any) -> str:
    """Format a cell: text as it is, numbers from 1000 on without decimals, others with three digits."""
    if isinstance(value, str):
        return value
    return number(value, 0) if abs(value) >= 1000 else significant(value)


def provenance(found: Published) -> str:
    """Return the sentence on GPU, date, commit and claims of the recorded runs."""
    runs = [
        (path, experiment.claims(frame))
        for experiment, path, frame in (run_of(name, found) for name in MEMORY)
        if frame is not None
    ]
    described = [json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) for path, _ in runs]
    held = [holds for _, claims in runs for holds in claims.values()]
    gpus = ", ".join(sorted({one["gpu"]["name"] for one in described}))
    commits = ", ".join(sorted({one["commit"][:12] for one in described}))
    drivers = ", ".join(sorted({one["gpu"]["driver"] or "unknown" for one in described}))
    return (
        f"Recorded on {gpus}, {max(one['date'] for one in described)[:10]}, commit {commits}, driver {drivers}: "
        f"{sum(held)} of {len(held)} claims hold."
    )
