"""The parts of `sanitize.py` that need no GPU: its cases, the kernels that it compiles ahead, and its table."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import sanitize
from support.recorded_launches import record_launches

from numba_gemm.device.access import ACCESSES
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.stage import Partition
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS
from numba_gemm.kernels.tensor_core.tma_stage import TmaStage
from numba_gemm.runtime.launch import launch
from numba_gemm.runtime.matrix import Vector, at_address

STREAM_K = STAGES["stream_k"]
SCHEDULED = [stage for stage in STAGES.values() if stage.takes_partition]
TENSOR = list(sanitize.cases([*TENSOR_PRECISIONS], (9, 0)))


def on_host(operands):
    """Return A, B and C as the launcher takes them, in the operands' own allocations."""
    owners = {name: views[0] for name, views in operands.views.items()}
    return operands.matrices({name: flat.ctypes.data for name, flat in operands.flats.items()}, owners)


@pytest.mark.simulator
@pytest.mark.parametrize(
    "case",
    [
        *(case for one in SCHEDULED for case in sanitize.cases_of(one, one.test_config)),
        *(
            case
            for one in SCHEDULED
            if "bf16x6" in one.precisions
            for case in sanitize.compensated_cases_of(one, one.test_config, "bf16x6")
        ),
    ],
)
def test_cases_are_correct(case):
    operands = sanitize.Operands(case)
    options = operands.options()
    if case.epilogue:
        options["vectors"] = tuple(Vector(0, one.size, 4, one) for one in (operands.across, operands.down))
    a, b, c = on_host(operands)
    assert not operands.judge(1.5, -0.5, operands.flats["c"]) <= 1
    options |= {"partition": Partition(case.blocks, case.whole), "precision": case.precision}
    launch(case.stage, case.config, 1.5, a, b, -0.5, c, **options)
    assert operands.judge(1.5, -0.5, operands.flats["c"]) <= 1


@pytest.mark.parametrize("stage", SCHEDULED, ids=lambda stage: stage.name)
def test_variants_differ(stage):
    cases = [*sanitize.cases_of(stage, stage.configs[0])]
    words = [(sanitize.variant_of(case, sanitize.Operands(case).product()), case.shape) for case in cases]
    assert len(set(words)) == len(words)


def test_variants_say_what_runs():
    cases = [*sanitize.cases_of(STREAM_K, STREAM_K.configs[0])]
    words = [sanitize.variant_of(case, sanitize.Operands(case).product()) for case in cases]
    assert len(set(words)) == len(words)
    for access in ACCESSES:
        assert any(word.startswith(f"{access}_") for word in words), access
        assert any(f"_{access}_" in word for word in words), access
    for what in ("-batch", "_bias-", "-1whole", "-7blocks"):
        assert any(what in word for word in words), what


def test_variants_of_tensor_core_cases():
    words = {sanitize.variant_of(case, sanitize.Operands(case).product()) for case in TENSOR}
    assert {
        f"tf32-{layout}-{how}" for layout in ("NN", "NT", "TT") for how in ("plain", "epilogue", "plain-batch")
    } < words
    assert {
        f"{precision}-{how}" for precision in TENSOR_PRECISIONS for how in ("plain", "epilogue", "epilogue-batch")
    } < words


def test_every_stage_has_cases_in_every_precision():
    found = {(case.stage.name, case.precision) for case in sanitize.cases(None, (9, 0))}
    assert found == {(stage.name, precision) for stage in STAGES.values() for precision in stage.precisions}
    some = {(case.stage.name, case.precision) for case in sanitize.cases(["naive", "bf16x9"], (9, 0))}
    assert {stage for stage, _ in some} == {"naive"} | {
        stage.name for stage in STAGES.values() if "bf16x9" in stage.precisions
    }
    older = {case.stage.name for case in sanitize.cases(None, (8, 0))}
    assert older == {stage.name for stage in STAGES.values() if stage.runs_on((8, 0))}


def test_kernels_that_are_compiled_ahead(monkeypatch):
    """They are the ones that the cases launch."""
    cases = [case for case in TENSOR if case.stage.name in ("wide_tiles", "tf32_tma")]
    launched = record_launches(monkeypatch)
    for case in cases:
        operands = sanitize.Operands(case)
        case = dataclasses.replace(case, public=False)
        if not isinstance(case.stage, TmaStage):
            operands.case = dataclasses.replace(case, batch=(1, 1))
        sanitize.run(case, 1.5, -0.5, operands.matrices(dict.fromkeys("abc", 1 << 20), {}), {}, **operands.options())
    used = {step.kernel for one in launched for step in one.launches.steps}
    assert used == set(sanitize.kernels(["wide_tiles", "tf32_tma"], (9, 0)))
    kernels = sanitize.kernels(["bf16x6", "fp16x3"], (9, 0))
    names = {kernel.name for kernel in kernels}
    assert len(kernels) == len(set(kernels)) > len(names), "some differ in their variant alone"
    assert {"row_maxima", "decompose_bf16x6", "decompose_fp16x3", "one_warpgroup_bf16x6_64x128-c1p0"} < names


@pytest.mark.parametrize("case", [case for case in TENSOR if case.public and case.stage.name == "fresh_sums"])
def test_arrays_of_the_public_function(case):
    """They have the elements of the matrices, and a batch's are broadcast."""
    operands = sanitize.Operands(case)
    batch, steps = operands.batch(), {}
    steps["a"], steps["b"], steps["c"] = batch.a, batch.b, batch.c
    for name, matrix in zip("abc", on_host(operands)):
        array = sanitize.DeviceArray(operands.flats[name], matrix, batch.extents, steps[name])
        described = array.__cuda_array_interface__
        found = at_address(array.owner, described["data"][0], described["shape"], described["strides"])
        views = operands.views[name]
        expected = np.stack(views if len(views) == batch.matrices else views * batch.matrices)
        np.testing.assert_array_equal(found, expected.reshape(found.shape))


def test_reports_belong_to_their_cases():
    output = """
        @begin stream_k tiles along4_across4_aligned-7blocks 44 36 36
        ========= Error: Race reported between Write access and Read access
        @end 0.25
        @begin thin tiles any_any_any-8blocks 1 2 3
        @end inf
        ========= Invalid __global__ read of size 4 bytes
    """
    rows, stray = sanitize.parse("racecheck", "\n".join(line.strip() for line in output.splitlines()))
    assert [(row.stage, row.k, row.reports, row.clean) for row in rows] == [
        ("stream_k", 36, 1, False),
        ("thin", 3, 0, False),
    ]
    assert rows[0].variant == "along4_across4_aligned-7blocks"
    assert stray == 1


def test_a_table_is_saved_with_its_environment_and_command(tmp_path):
    row = sanitize.Row("racecheck", "thin", "16x16", "aligned", 1, 2, 3, 0, 0.25, "")
    sanitize.save([row], tmp_path / "sanitize.csv", "python tests/sanitize.py --stages thin", "0123456")
    assert pd.read_csv(tmp_path / "sanitize.csv", keep_default_na=False).to_dict("records") == [vars(row)]
    described = json.loads((tmp_path / "sanitize.json").read_text(encoding="utf-8"))
    assert described["command"] == "python tests/sanitize.py --stages thin"
    assert {"commit", "date", "gpu", "versions", "seed"} <= set(described)
