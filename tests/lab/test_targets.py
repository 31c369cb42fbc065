"""The experiment `targets`: shapes, verdicts, command line, and a run of every group on small shapes."""

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import numba_gemm
from numba_gemm.gemm import precision as precisions
from numba_gemm.gemm.explain import explain_shape
from numba_gemm.kernels.stage import IEEE
from numba_gemm.kernels.tensor_core import TENSOR_STAGES
from numba_gemm.lab.__main__ import main
from numba_gemm.lab.bench import experiment as bench
from numba_gemm.lab.bench import results
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import CUBLAS, ERROR, OK, WRONG
from numba_gemm.lab.bench.run import Outcome
from numba_gemm.lab.bench.targets import case as shared
from numba_gemm.lab.bench.targets import experiment, verdicts
from numba_gemm.lab.bench.targets.case import OURS, Case, Contender, Rig, Truth, Turn, both, matrix
from numba_gemm.lab.bench.targets.groups import (
    COPY,
    FULL,
    GROUPS,
    TINY,
    batched_cases,
    cases_of,
    host_cases,
    new_shapes,
    product_case,
    random_shapes,
)
from numba_gemm.lab.bench.targets.verdicts import targets
from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.lab.harness.nvml import ClockSamples
from numba_gemm.runtime.timing import Samples
from numba_gemm.simulator import switch

COLUMNS = ["group", "case", "m", "n", "k", "layout", "batch", "us", "tflops", "baseline", "cublas_via"]
COLUMNS += ["baseline_us", "ratio", "target", "status", "error_in_bounds", "rounds", "sm_clock_mhz", "throttle", "note"]
LATEST = Path(__file__).parents[2] / "results" / "h200" / "latest"


def target_row(group="seed", case="x", m=4096, ratio=1.05, target=1.0, **changes):
    row = dict.fromkeys(COLUMNS, math.nan)
    row |= {"group": group, "case": case, "m": m, "n": m, "k": m, "us": 5.0, "baseline": CUBLAS}
    return row | {"ratio": ratio, "target": target, "status": OK, "note": ""} | changes


def judged(rows, *groups):
    frame = verdicts.summary(pd.DataFrame(rows, columns=COLUMNS), groups, FULL.large)
    return frame.set_index(["what", "statistic"])


class TestShapes:
    def test_random_shapes_repeat_by_seed(self):
        first = random_shapes(200, 7, 64, 8192)
        assert first == random_shapes(200, 7, 64, 8192)
        assert first[:20] == random_shapes(20, 7, 64, 8192)
        assert first != random_shapes(200, 8, 64, 8192)
        assert len(set(first)) == 200

    def test_random_extents_are_log_uniform(self):
        extents = np.array(random_shapes(20_000, 1, 64, 8192))
        assert extents.min() == 64
        assert extents.max() == 8192
        octaves = np.histogram(np.log2(extents), bins=np.arange(6, 14))[0] / extents.size
        np.testing.assert_allclose(octaves, 1 / 7, atol=0.01)
        assert (abs(np.corrcoef(np.log(extents.T)) - np.eye(3)) < 0.03).all()

    def test_random_extents_stay_within_narrow_limits(self):
        assert set(random_shapes(50, 1, 3, 3)) == {Shape(3, 3, 3)}
        assert {shape.m for shape in random_shapes(200, 1, 1, 2)} == {1, 2}

    @pytest.mark.parametrize("sizes", [FULL, TINY], ids=["full", "tiny"])
    def test_cases(self, sizes):
        cases = [case for group in GROUPS for case in cases_of(group, sizes, 5, 1)]
        names = [(case.group, case.name) for case in cases if case.group != "random"]
        assert len(set(names)) == len(names)
        for case in cases:
            m, n, k = case.shape
            assert case.batch * max(m * n, m * k, k * n) <= sizes.elements
            assert case.target > 0 or case.each_once
            assert len(set(case.baselines)) == len(case.baselines)
        assert max(math.prod(case.shape) for case in cases_of("cubes", TINY, 0, 0)) <= 1 << 21

    def test_full_cases_are_those_of_the_targets(self):
        counts = {group: len(cases_of(group, FULL, 200, 1)) for group in GROUPS}
        libraries, kinds, new = len(verdicts.LIBRARIES), len(verdicts.HOST_LIMITS), len(verdicts.NEW_KINDS)
        host = libraries * kinds + libraries * new + new
        assert list(counts.values()) == [15, 7, 200, 17, 3, 6, 1, 1, host]
        assert 4 * FULL.vector**2 >= 1 << 30
        for _, aligned, _ in FULL.odd:
            assert all(extent % 4 == 0 for extent in aligned)
        seeds = cases_of("seed", FULL, 0, 0)
        assert [case.target for case in seeds] == [0.9] * 8 + [1.0] * 7

    def test_targets_of_rows_are_those_that_were_recorded(self):
        recorded = pd.read_csv(LATEST / "targets.csv")
        seed = json.loads((LATEST / "targets.json").read_text(encoding="utf-8"))["seed"]
        cases = [case for group in GROUPS if group != "host" for case in cases_of(group, FULL, 200, seed)]
        made = {(case.group, case.name, name): case.target for case in cases for name in case.baselines[:1]}
        found = recorded[recorded["target"].notna() & (recorded["group"] != "host")]
        assert {tuple(row[:3]): row[3] for row in found[["group", "case", "baseline", "target"]].to_numpy()} == made

    def test_recorded_rows_are_judged_as_they_were(self):
        """Without the group host, whose cases are fewer in the simulator."""
        made = experiment.judged(pd.read_csv(LATEST / "targets.csv"))
        recorded = pd.read_csv(LATEST / "targets_summary.csv")
        one, other = (frame[~frame["what"].str.startswith("host")] for frame in (made, recorded))
        columns = ["what", "statistic", "at_least", "met", "cases", "failed", "worst"]
        assert len(one) == 12
        assert one[columns].to_dict("list") == other[columns].to_dict("list")
        np.testing.assert_allclose(one["value"], other["value"], rtol=1e-5)

    @pytest.mark.parametrize(("kind", "launches"), [("bf16x6", 2), ("tf32x3", 2), ("fp16x3", 3), ("tf32", 1)])
    def test_host_times_are_those_of_tensor_cores(self, kind, launches, monkeypatch):
        """On compute capability 9.0, these products decompose operands, and `tf32` reads them through tensor maps."""
        monkeypatch.setattr(precisions, "SIMULATOR", False)
        monkeypatch.setattr(verdicts, "HOST_WAYS", {"call": ("torch", kind)})
        monkeypatch.setattr(verdicts, "PLAN_WAYS", {"plan": ("torch", kind)})
        monkeypatch.setattr(verdicts, "NEW_SHAPES", {"new": kind})
        made = [case.shape for case in host_cases(FULL)]
        assert len(made) == 3
        for shape in (*made, *new_shapes(FULL, kind)):
            found = explain_shape(*shape, precision=kind, cc=(9, 0))
            assert found.precision == kind
            assert found.stage in TENSOR_STAGES
            assert found.launches >= launches

    @pytest.mark.parametrize("stored", ["N", "T"])
    def test_matrix(self, stored):
        made = matrix(np.arange(20.0), 3, 5, stored)
        assert made.shape == (3, 5)
        assert made.flags.c_contiguous is (stored == "N")
        assert sorted(made.ravel()) == list(range(15))


class TestVerdicts:
    def test_statistics(self):
        assert verdicts.STATISTICS["geomean"]([0.5, 2.0]) == pytest.approx(1.0)
        assert set(verdicts.STATISTICS) == {"geomean", "min", "median"}

    def test_every_group_has_a_line_and_every_line_a_limit(self):
        lines = targets(2048)
        assert {group for line in lines for group in line.groups} == set(GROUPS)
        for line in lines:
            assert math.isnan(line.at_least) is not math.isnan(line.at_most)
        assert len({(line.what, line.statistic) for line in lines}) == len(lines)

    def test_seed_lines(self):
        rows = [target_row(m=128, case="small", ratio=0.95, target=0.9), target_row(m=2048, ratio=1.0)]
        frame = judged(rows, "seed")
        assert list(frame["met"]) == [False, True, True]
        assert list(frame["cases"]) == [2, 1, 1]
        assert frame["value"].iloc[0] == pytest.approx(math.sqrt(0.95))
        assert list(frame["worst"]) == ["small", "x", "small"]
        rows[0]["ratio"] = 0.8999
        assert list(judged(rows, "seed")["met"]) == [False, True, False]

    def test_line_of_two_groups(self):
        rows = [target_row(m=128, ratio=0.5), target_row(ratio=1.02), target_row("cubes", ratio=1.05)]
        line = "seed shapes from 2048 on, and cubes"
        assert line not in judged(rows, "seed").index.get_level_values(0)
        both = judged(rows, "seed", "cubes").loc[(line, "geomean")]
        assert both["value"] == pytest.approx(math.sqrt(1.02 * 1.05))
        assert both["cases"] == 2
        assert both["met"]

    @pytest.mark.parametrize(
        "change", [{"status": WRONG}, {"status": ERROR, "ratio": math.nan}, {"ratio": math.nan}], ids=str
    )
    def test_failed_row_fails_its_target(self, change):
        rows = [target_row("random", case="a"), target_row("random", case="b", **change)]
        frame = judged(rows, "random")
        assert list(frame["value"]) == pytest.approx([1.05, 1.05])
        assert list(frame["failed"]) == [1, 1]
        assert not frame["met"].any()
        assert not judged(rows[1:], "random")["met"].any()

    def test_measured_group_without_rows_is_not_met(self):
        frame = judged([], *GROUPS)
        assert len(frame) == len(targets(2048))
        assert not frame["met"].any()
        assert frame["value"].isna().all()

    def test_rows_for_information_do_not_count(self):
        rows = [target_row("odd", ratio=0.96, target=0.95), target_row("odd", ratio=0.1, target=math.nan)]
        assert list(judged(rows, "odd")["met"]) == [True]

    @pytest.mark.parametrize(("us", "met"), [(149.0, True), (150.0, True), (150.1, False)])
    def test_new_shapes_have_a_limit_in_microseconds(self, us, met):
        name, call = f"new shape, {IEEE}", f"torch arrays, {IEEE}"
        rows = [target_row("host", case=name, us=us), target_row("host", case=call, us=20.0)]
        frame = judged(rows, "host")
        limit = frame.loc[(f"host, {name} whose kernel is loaded: microseconds per call", "median")]
        assert (limit["met"], limit["worst"]) == (met, name)
        assert frame.loc[(f"host, {call}: torch.matmul's time over ours", "min"), "met"]
        other = f"cupy arrays, {IEEE}"
        assert not frame.loc[(f"host, {other}: torch.matmul's time over ours", "min"), "met"]

    @pytest.mark.parametrize("kind", verdicts.HOST_LIMITS)
    def test_host_time_has_a_limit_in_units_of_matmul(self, kind):
        """A limit of 1.4 times torch.matmul's time is a ratio of at least 1 / 1.4."""
        name, least = f"torch arrays, {kind}", 1 / verdicts.HOST_LIMITS[kind]
        for ratio, met in ((least * 1.001, True), (least * 0.999, False)):
            frame = judged([target_row("host", case=name, ratio=ratio, target=least)], "host")
            assert frame.loc[(f"host, {name}: torch.matmul's time over ours", "min"), "met"] == met

    def test_row_compares_work_a_microsecond(self):
        case = Case("vector", "x", Shape(2, 3, 4), lambda rig: {}, (COPY, CUBLAS), target=0.85)
        measured = ((OURS, 10.0, 2.0), (COPY, 40.0, 4.0))
        outcomes = {name: Outcome(samples=Samples(np.array([us])), work=work) for name, work, us in measured}
        outcomes[CUBLAS] = Outcome(status=WRONG, note="half of it")
        clocks = ClockSamples()
        copy, cublas = (shared.row(case, outcomes, name, clocks) for name in (COPY, CUBLAS))
        assert list(copy) == COLUMNS
        assert copy["ratio"] == 0.5
        assert copy["target"] == 0.85
        assert math.isnan(cublas["target"])
        assert copy["tflops"] == pytest.approx(48 / 2.0 * 1e-6)
        assert (copy["status"], copy["note"]) == (OK, "")
        assert math.isnan(cublas["ratio"])
        assert (cublas["status"], cublas["note"]) == (WRONG, "cublas: half of it")


@pytest.fixture
def rig(on_gpu):
    if on_gpu:
        pytest.importorskip("torch")
    made = Rig(1, TINY.elements)
    with made.library.stream() as made.stream:
        yield made


def spoiling(case, name, spoil):
    """Return the case with a contender whose first call is replaced by `spoil`, which receives the original call."""

    def make(rig):
        made = dict(case.make(rig))
        turn, *others = made[name].turns
        wrong = functools.partial(spoil, turn.call, turn.out)
        made[name] = Contender([Turn(wrong, turn.out, turn.judge), *others], made[name].work)
        return made

    return Case(case.group, case.name, case.shape, make, case.baselines, case.layout, case.batch)


def changes_last(call, out):
    call()
    out[-1, -1] += 0.01


def leaves_rows(call, out):
    pass


def raises(call, out):
    raise TypeError("no such\nargument")


class TestMeasurement:
    @pytest.mark.parametrize(
        ("spoil", "status", "says"),
        [
            (changes_last, WRONG, "WRONG: worst element [7, 7]"),
            (leaves_rows, WRONG, "is nan"),
            (raises, ERROR, "TypeError: no such argument"),
        ],
    )
    def test_what_is_not_right_is_not_timed(self, rig, spoil, status, says):
        case = product_case("seed", Shape(8, 8, 5))
        (row,) = shared.measure(rig, spoiling(case, OURS, spoil))
        assert row["status"] == status
        assert says in row["note"]
        assert math.isnan(row["us"])
        assert math.isnan(row["ratio"])
        (row,) = shared.measure(rig, spoiling(case, CUBLAS, spoil))
        assert row["status"] == status
        assert row["note"].startswith("cublas: ")
        assert math.isnan(row["ratio"])

    @pytest.mark.simulator
    @pytest.mark.parametrize("group", ["seed", "vector", "batched"])
    @pytest.mark.parametrize(
        ("torch", "cupy", "via", "us"),
        [
            (20.0, 10.0, "cupy", 10.0),
            (10.0, 20.0, "torch", 10.0),
            (10.0, None, "torch", 10.0),
            (None, 20.0, "cupy", 20.0),
        ],
    )
    def test_the_faster_correct_cublas_counts(self, group, torch, cupy, via, us, monkeypatch):
        """Without a time, a library computes nothing."""
        rig, case = Rig(1, TINY.elements), cases_of(group, TINY, 1, 1)[0]
        times = {OURS: 5.0, COPY: 4.0, CUBLAS: torch, shared.BY_CUPY: cupy}

        def product(time):
            return (lambda a, b, out: None) if time is None else np.matmul

        def timed(outcomes, *_):
            for name, outcome in outcomes.items():
                outcome.samples = Samples(np.array([times[name]]))

        rig.library.name, rig.torch = "torch", None
        rig.multiply = rig.multiply_batch = product(torch)
        rig.cupy = SimpleNamespace(matmul=product(cupy), asarray=np.asarray)
        monkeypatch.setattr(shared, "time_on_device", timed)
        *_, row = shared.measure(rig, case)
        assert (row["baseline"], row["cublas_via"], row["baseline_us"], row["status"]) == (CUBLAS, via, us, OK)

    def test_case_that_cannot_be_made_fails_all_its_rows(self, rig):
        def make(rig):
            raise AttributeError("no plans")

        rows = shared.measure(rig, Case("host", "x", Shape(2, 2, 2), make, (CUBLAS, COPY)))
        assert [row["status"] for row in rows] == [ERROR, ERROR]
        assert {row["note"] for row in rows} == {"AttributeError: no plans"}

    def test_every_row_is_checked(self, rig):
        a, b = matrix(rig.flat_a, 64, 4, "T"), matrix(rig.flat_b, 4, 3)
        truth, c = Truth(rig, a, b), matrix(rig.flat_c, 64, 3)
        rig.multiply(a, b, out=c)
        assert truth.judge(c)[1] == ""
        c[41, 1] += 1.0
        error, note = truth.judge(c)
        assert error > 1
        assert "[41, 1]" in note
        rig.library.fill_nan(c[2:3])
        assert truth.judge(c)[0] == math.inf

    def test_bias_and_relu_in_the_reference(self, rig):
        a, b = matrix(rig.flat_a, 9, 5), matrix(rig.flat_b, 5, 6)
        bias = rig.random(6)
        c = rig.multiply(a, b)
        right = (c + bias).clip(0)
        assert 0 < float((right == 0).sum()) < 54
        assert Truth(rig, a, b, bias).judge(right)[1] == ""
        for wrong in (c.clip(0), c + bias, c.clip(0) + bias):
            assert Truth(rig, a, b, bias).judge(wrong)[0] > 1

    def test_batch_is_judged_product_by_product(self, rig):
        (case,) = batched_cases(TINY)
        own = case.make(rig)[CUBLAS].turns[0]
        own.call()
        assert own.judge(own.out) == (pytest.approx(0, abs=1), "")
        own.out[1, 2, 3] += 1.0
        assert own.judge(own.out)[1].startswith("product 1: WRONG: worst element [2, 3]")

    @pytest.mark.parametrize("group", GROUPS)
    def test_tiny_group(self, rig, group):
        """Every group runs; if the public function raises, or a library is missing, the row gives the reason."""
        for case in cases_of(group, TINY, 1, 1):
            rows = shared.measure(rig, case)
            assert [row["baseline"] for row in rows] == list(case.baselines)
            for row in rows:
                assert list(row) == COLUMNS
                if row["status"] == OK:
                    assert row["us"] > 0
                    assert row["ratio"] > 0
                    assert row["error_in_bounds"] <= 1
                else:
                    assert row["status"] == ERROR
                    assert row["note"]
                    assert group in ("batched", "epilogue") or "cupy arrays" in case.name


class TestPrecisions:
    @pytest.fixture
    def recorded(self, monkeypatch):
        monkeypatch.setattr(switch, "SIMULATOR", False)
        return results.load(LATEST / "precisions")[0]

    def test_the_benchmark_judges_them(self, recorded):
        """Each target is judged, and missed if its geometric mean is too small."""
        claims = bench.EXPERIMENT.claims(recorded)
        whats = [target.what for target in verdicts.PRECISION_TARGETS]
        assert [sentence.partition(": ")[0] for sentence in claims] == [bench.CORRECT, *whats]
        for factor, met in ((10.0, True), (0.1, False)):
            faster = recorded.assign(steady_ratio_to_cublas=factor * recorded["steady_ratio_to_cublas"])
            auto = faster["stage"] == "auto"
            faster.loc[auto, "steady_us"] /= factor
            assert set([*bench.EXPERIMENT.claims(faster).values()][1:]) == {met}

    def test_a_few_shapes_are_not_judged(self, recorded):
        few = recorded[(recorded["m"] == 4096) | (recorded["m"] == 512)]
        assert list(bench.EXPERIMENT.claims(few)) == [bench.CORRECT]
        without = recorded[recorded["stage"] != CUBLAS].assign(steady_ratio_to_cublas=math.nan)
        assert list(bench.EXPERIMENT.claims(without)) == [bench.CORRECT]


class TestCommandLine:
    def test_tiny_run(self, tmp_path, capsys, on_gpu):
        if on_gpu:
            pytest.importorskip("torch")
        arguments = ["--tiny", "--only=random,seed", "--shapes=2", "--seed=5", f"--out={tmp_path / 'new'}"]
        status = main(["targets", *arguments, "--commit=0123456"])
        frame = pd.read_csv(tmp_path / "new" / "targets.csv")
        assert list(frame.columns) == COLUMNS
        assert list(frame["group"]) == ["seed", "seed", "random", "random"]
        assert set(frame["status"]) == {OK}
        shapes = [Shape(*row) for row in frame[frame["group"] == "random"][["m", "n", "k"]].to_numpy().tolist()]
        assert shapes == random_shapes(2, 5, TINY.low, TINY.high)

        judged = pd.read_csv(tmp_path / "new" / "targets_summary.csv")
        assert list(judged.columns)[:5] == ["what", "statistic", "value", "at_least", "at_most"]
        assert len(judged) == 5
        assert status == int(on_gpu and not judged["met"].all())

        how = json.loads((tmp_path / "new" / "targets.json").read_text())
        assert how["seed"] == 5
        assert how["simulator"] is not on_gpu
        assert how["command"].startswith("numba-gemm lab targets --tiny ")
        assert " --shapes 2" in how["command"]
        assert " --only random,seed" in how["command"]
        assert how["clocks"]["throttle_reasons"] is not None
        printed = capsys.readouterr().out
        assert printed.index("random shapes") > printed.index(f"group random, case {shapes[0]}")

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--only", "fast"], "invalid choice: 'fast'; expected one of seed, cubes"),
            (["--shapes", "0"], "is not at least 1"),
            (["--seed", "-1"], "is not from 0 to 4294967295"),
            (["--seed", "4294967296"], "is not from 0 to 4294967295"),
            (["--ou", "here"], "unrecognized arguments: --ou"),
        ],
    )
    def test_errors(self, arguments, says, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        try:
            status = main(["targets", *arguments])
        except SystemExit as stopped:
            status = stopped.code
        assert status == 2
        assert says in capsys.readouterr().err

    def test_library_that_is_lacking(self, monkeypatch):
        monkeypatch.setattr(shared, "SIMULATOR", False)
        monkeypatch.setattr(shared, "optional", lambda module: None)
        with pytest.raises(Unavailable, match="PyTorch is not here"):
            next(experiment.targets(tiny=True))

    def test_group_that_was_not_completed_is_not_judged(self):
        frame = pd.DataFrame([target_row("seed"), target_row("cubes")])
        assert len(experiment.judged(frame)) == 5
        frame.attrs = {"groups": ("seed",), "large": 2048}
        assert set(experiment.claims(frame)) == {
            "seed shapes, cuBLAS's time over ours (geomean)",
            "seed shapes from 2048 on (min)",
            "seed shapes below 2048 (min)",
        }


def test_ours_is_the_public_function(rig, monkeypatch):
    called = []
    monkeypatch.setattr(numba_gemm, "tiled_sgemm", lambda *arguments, **options: called.append(options))
    both(rig, Shape(4, 4, 4))[OURS].turns[0].call()
    assert list(called[0]) == ["out"]
