"""Blocks of the page of benchmarks: random shapes, the models' choices, and router gates."""

from collections.abc import Callable, Mapping
from statistics import geometric_mean
from typing import Any

import pandas as pd

from blocks.published import Published, missed, source
from numba_gemm.lab.bench import batches as batched
from numba_gemm.lab.bench import choices as models_choices
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.random_products import LEAST, RANDOM_PRODUCTS, ROUTER_GATES
from numba_gemm.lab.bench.tables import Table, significant

WORST = 3  # shapes to name
COMPARED = {
    "ieee_ratio": "`ieee`, over cuBLAS SGEMM",
    "auto_ratio": "`fp32_auto`, over the faster of cuBLAS SGEMM and `ieee`",
    "bf16x6_ratio": "`bf16x6`, over cuBLAS SGEMM",
}


FOLDERS = ("../../h100", "")  # of the newest run on each GPU, relative to the results of one


def on_each_gpu(block: Callable[[Published, str], str]) -> Callable[[Published], str]:
    """Return the block of all GPUs, given that of one folder."""
    return lambda found: "\n\n".join(block(found, folder) for folder in FOLDERS)


@on_each_gpu
def random_products(found: Published, folder: str) -> str:
    """Table of the speeds at random shapes, by precision, with the worst shapes."""
    rows, how = found.measured("random_products", folder=folder)
    lines = []
    for ratio, what in COMPARED.items():
        worst = sorted(rows, key=lambda row: float(row[ratio]))[:WORST]
        below = sum(row[ratio] < LEAST[ratio] for row in rows)
        mean, named = geometric_mean(row[ratio] for row in rows), "; ".join(described(row, ratio) for row in worst)
        calls = significant(geometric_mean(plain_ratio(row, ratio) for row in rows))
        lines.append([what, significant(mean), f"≥ {LEAST[ratio]:g}", f"{below} of {len(rows)}", named, calls])
    required = ["required of each", "shapes below that", f"the {WORST} least"]
    headers = ["speed", "geometric mean", *required, "plain calls, geometric mean"]
    made = Table("", headers, lines, left=[headers[0], headers[4]]).markdown()
    return "\n\n".join(
        [f"{how['gpu']['name']}:", made, missed(RANDOM_PRODUCTS.claims(pd.DataFrame(rows))), source(how)]
    )


def plain_ratio(row: Mapping[str, Any], ratio: str) -> float:
    """Return a ratio of speeds as of plain calls."""
    ours = {"ieee_ratio": "ieee", "bf16x6_ratio": "bf16x6", "auto_ratio": "fp32_auto"}[ratio]
    others = ["cublas", *(["ieee"] if ratio == "auto_ratio" and "ieee_call_us" in row else [])]
    return min(row[f"{name}_call_us"] for name in others) / row[f"{ours}_call_us"]


def described(row: Mapping[str, Any], ratio: str) -> str:
    """Return a random shape in words, with its ratio."""
    shape = f"{Shape(row['m'], row['n'], row['k'])} {row['layout']}"
    return f"`{shape}{'' if row['aligned'] else ' unaligned'}`: {significant(row[ratio])}"


def batches(found: Published) -> str:
    """Table of the speeds of batches of square matrices, and a sentence on random ones."""
    rows, how = found.measured("batches")
    frame = pd.DataFrame(rows)
    drawn = frame[frame["drawn"]]
    lines = []
    for row in frame[~frame["drawn"]].to_dict("records"):
        us = [significant(row[f"{name}_us"]) for name in ("cublas", "ieee")]
        bandwidth = batched.Batch(row["matrices"], row["m"], row["n"], row["k"], row["layout"]).bytes / row["ieee_us"]
        extents = f"{row['matrices']:,}", f"{row['m']}x{row['n']}x{row['k']}"
        lines.append([*extents, *us, significant(row["ieee_ratio"]), f"{bandwidth * 1e-6:.2f}", f"`{row['stage']}`"])
    headers = ["matrices", "M x N x K", "cuBLAS, us", "`tiled_sgemm`, us", "ratio", "TB/s", "its choice"]
    made = Table("", headers, lines, left=[headers[1], headers[-1]]).markdown()
    below = drawn[drawn["ieee_ratio"] < LEAST["ieee_ratio"]].sort_values("ieee_ratio")
    calls = geometric_mean(drawn["cublas_call_us"] / drawn["ieee_call_us"])
    named = [
        f"{row['matrices']:,} of `{row['m']}x{row['n']}x{row['k']} {row['layout']}` {significant(row['ieee_ratio'])}"
        for row in below.to_dict("records")
    ]
    said = (
        f"{len(drawn)} random batches: {significant(geometric_mean(drawn['ieee_ratio']))} of cuBLAS's speed in the "
        f"geometric mean, {significant(calls)} as plain calls; below {LEAST['ieee_ratio']}: "
        f"{'; '.join(named) or 'none'}."
    )
    return "\n\n".join([made, said, missed(batched.EXPERIMENT.claims(frame)), source(how)])


@on_each_gpu
def choices(found: Published, folder: str) -> str:
    """Table of the time that the models' choices take over that of the fastest candidate, by precision."""
    rows, how = found.measured("choices", folder=folder)
    frame = pd.DataFrame(rows)
    lines = []
    for row in models_choices.summary(frame).to_dict("records"):
        slower = f"{row['slower_mean']:.3f}", f"{row['slower_worst']:.3f}, `{row['worst_case']}`"
        lines.append([f"`{row['precision']}`", str(row["products"]), str(row["candidates"]), *slower])
    headers = ["precision", "products", "candidates", "mean", "at worst"]
    made = Table("", headers, lines, left=[headers[0], headers[-1]]).markdown()
    limit = models_choices.LIMITS[-1][-1]
    times = models_choices.slower(frame)
    over = times[times > limit].reset_index().groupby(models_choices.PRODUCT[:-1], sort=False)["precision"]
    listed = [f"`{models_choices.named(*case)}` in `{'`, `'.join(found)}`" for case, found in over]
    made += f"\n\nOver {limit:g}: {'; '.join(listed) or 'none'}."
    return "\n\n".join([f"{how['gpu']['name']}:", made, missed(models_choices.claims(frame)), source(how)])


@on_each_gpu
def router_gates(found: Published, folder: str) -> str:
    """Table of the speeds of router gates over PyTorch, by tokens and experts."""
    rows, how = found.measured("router_gates", folder=folder)
    frame = pd.DataFrame(rows)
    least, most = (
        frame.pivot_table(index="m", columns="n", values="auto_ratio", aggfunc=name) for name in ("min", "max")
    )
    lines = [
        [f"{m:,}", *(f"{significant(low)} to {significant(high)}" for low, high in zip(least.loc[m], most.loc[m]))]
        for m in least.index
    ]
    made = Table("", ["tokens (M)", *(f"{n} experts (N)" for n in least.columns)], lines).markdown()
    depths = " and ".join(f"{k:,}" for k in sorted(frame["k"].unique()))
    name = how["gpu"]["name"]
    said = f"{name}, speed of `fp32_auto` over PyTorch in float32; K of {depths}, and both types of activations:"
    calls = [plain_ratio(row, "auto_ratio") for row in rows]
    plain = (
        f"As plain calls, whose time on the host counts, the ratios are {significant(min(calls))} to "
        f"{significant(max(calls))}, in the geometric mean {significant(geometric_mean(calls))}; "
        f"{sum(ratio < 1 for ratio in calls)} of {len(calls)} are below 1."
    )
    return "\n\n".join([said, made, plain, missed(ROUTER_GATES.claims(frame)), source(how)])
