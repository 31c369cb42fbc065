"""Block of the page of precisions: the energy of a product of `bf16x6`, and why it is no faster."""

from typing import Any

import pandas as pd

from blocks.published import Published, missed, source, spelled
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.energy import (
    BUILDS,
    EXPERIMENT,
    GIVEN_BF16,
    GOAL,
    IDLE,
    ONLY_INSTRUCTIONS,
    PRECISION,
    PREPARED,
    PRODUCTS,
    ZEROS,
    account,
)
from numba_gemm.lab.bench.results import CUBLAS
from numba_gemm.lab.bench.tables import Table, number, significant

NAMES = {
    CUBLAS: "cuBLAS SGEMM",
    GIVEN_BF16: "cuBLAS BF16, operands and result in BF16",
    "ieee": "`ieee`",
    PRECISION: f"`{PRECISION}`",
    ZEROS: f"`{PRECISION}`, operands all zero",
    **{name: f"`{PRECISION}`, {name}" for name in (PREPARED, *BUILDS)},
    IDLE: "GPU idle",
}


def energy(found: Published) -> str:
    """Tables of the energy per product by contender, and by part of a product of `bf16x6`, for each shape."""
    rows, how = found.measured("energy")
    shapes = dict.fromkeys(Shape(row["m"], row["n"], row["k"]) for row in rows)
    tables = [of_shape(shape, [row for row in rows if (row["m"], row["n"], row["k"]) == shape]) for shape in shapes]
    return "\n\n".join([*tables, missed(EXPERIMENT.claims(pd.DataFrame(rows))), source(how)])


def of_shape(shape: Shape, measured: list[dict[str, Any]]) -> str:
    """Both tables of a shape, and the energy that the goal would allow."""
    rows = {row["contender"]: row for row in measured}
    headers = ["contender", "TFLOP/s", "/ cuBLAS SGEMM", "W", "SM clock, MHz", "J per product", "pJ per FLOP"]
    lines = [
        [
            name,
            number(row["tflops"]),
            number(row["ratio_to_cublas"], 2),
            number(row["watts"], 0),
            number(row["sm_clock_mhz"], 0),
            significant(row["joules"]),
            significant(row["pj_per_flop"]),
        ]
        for row, name in ((rows[key], name) for key, name in NAMES.items())
    ]
    own, spent = rows[PRECISION], account(pd.DataFrame(measured))
    shares = [
        [part, significant(joules), number(100 * joules / own["joules"], 0, " %")] for part, joules in spent.items()
    ]
    allowed = own["watts"] * rows[CUBLAS]["us"] * 1e-6 / GOAL
    bare, narrow = rows[ONLY_INSTRUCTIONS], PRODUCTS * rows[GIVEN_BF16]["joules"]
    said = (
        f"At {number(own['watts'], 0)} W, {GOAL:g} times the speed of cuBLAS SGEMM allows {significant(allowed)} J per "
        f"product. `{PRECISION}` takes {significant(own['joules'])} J, its matrix instructions alone "
        f"{significant(bare['joules'])} J, and {PRODUCTS} products of cuBLAS BF16 {significant(narrow)} J. On operands "
        f"that are all zero, for which few bits change, the same kernels take {number(rows[ZEROS]['watts'], 0)} W at "
        f"{number(rows[ZEROS]['sm_clock_mhz'], 0)} MHz and have {number(rows[ZEROS]['ratio_to_cublas'], 2)} times the "
        f"speed of cuBLAS SGEMM on ordinary operands."
    )
    contenders = Table("", headers, lines, left=headers[:1]).markdown()
    parts = Table("", [f"part of `{PRECISION}`", "J", "share"], shares, left=[f"part of `{PRECISION}`"]).markdown()
    return "\n\n".join([f"At {spelled(shape)}:", contenders, parts, said])
