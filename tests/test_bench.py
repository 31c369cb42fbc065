"""bench.py: its command line, its verdicts, its comparisons, its pictures, and README's tables."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numba import cuda

from numba_gemm.bench import cases, cli, compare, contenders, nvml, plots, readme, report, results, run, verify
from numba_gemm.bench.buffers import DeviceBuffers, HostLibrary
from numba_gemm.bench.cases import Shape
from numba_gemm.ladder import STAGES
from numba_gemm.models import accuracy
from numba_gemm.timing import Samples

ROOT = Path(__file__).resolve().parents[1]

TIMES = ["min_us", "median_us", "mean_us", "max_us", "p10_us", "p90_us"]
REQUIRED_COLUMNS = ["stage", "precision", "m", "n", "k", "layout", "cache", *TIMES, "gflops", "percent_of_peak"]
REQUIRED_COLUMNS += ["ratio_to_cublas", "error_in_bounds", "host_us", "compile_s"]


def bench(*arguments, **variables):
    """Run bench.py as a user does, in a process whose environment says nothing about the simulator."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    command = [sys.executable, str(ROOT / "bench.py"), *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=120, check=False
    )


# Rows as a GPU gives them: the same times for every shape, but for what a test changes.
SPEEDS = {"naive": 4000.0, "warp_tiled": 100.0, "auto": 101.0, "cublas": 105.0}
SHAPES = (*readme.HEADLINE_SHAPES, Shape(2048, 2048, 2048))
GPU = {
    "name": "Test GPU",
    "multiprocessors": 132,
    "max_clock_mhz": 1980.0,
    "fp32_peak_gflops": 66900.0,
    "bandwidth_gb_s": 4800.0,
    "driver": "580.1",
    "cuda_driver_api": "13.0",
}
ENVIRONMENT = {
    "date": "2026-11-21T03:00:00+00:00",
    "command": "python bench.py",
    "seed": 1,
    "simulator": False,
    "commit": "0123456789ab",
    "gpu": GPU,
    "versions": {"numba-cuda": "0.30.4"},
    "python": "3.12.1",
}


def gpu_row(stage, shape, median, **changes):
    gflops = 2e-3 * math.prod(shape) / median
    row = dict.fromkeys(("m", "n", "k")) | dict(zip("mnk", shape))
    row |= {"stage": stage, "precision": "ieee", "layout": "nn", "cache": "hot", "median_us": median}
    row |= {"min_us": 0.98 * median, "p10_us": 0.99 * median, "mean_us": median, "p90_us": 1.01 * median}
    row |= {"max_us": 1.02 * median, "gflops": gflops, "percent_of_peak": gflops / 669, "status": "ok"}
    row |= {"ratio_to_cublas": SPEEDS["cublas"] / SPEEDS[stage], "error_in_bounds": 0.25, "host_us": 5.0}
    return row | changes


def gpu_frame(**medians):
    """A run; a keyword scales the times of one stage."""
    return results.frame_of(
        gpu_row(stage, shape, speed * math.prod(shape) / 1e9 * medians.get(stage, 1.0))
        for shape in SHAPES
        for stage, speed in SPEEDS.items()
    )


class TestCommandLine:
    def test_tiny_run(self, tmp_path, on_gpu):
        shape = (256, 192, 64) if on_gpu else (16, 12, 9)
        done = bench(
            "--stages=naive,coalesced,auto,cpu", "--shape", ",".join(map(str, shape)), "--out", tmp_path, "--seed", 7
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("timings mean nothing" in done.stdout) is not on_gpu
        assert "Stage summary" in done.stdout

        header = (tmp_path / "results.csv").read_text().splitlines()[0].split(",")
        assert header[: len(REQUIRED_COLUMNS)] == REQUIRED_COLUMNS
        frame, environment = results.load(tmp_path)
        assert list(frame["stage"]) == ["naive", "coalesced", "auto", "cpu"]
        assert set(frame["status"]) == {"ok"}
        assert set(zip(frame["m"], frame["n"], frame["k"])) == {shape}
        assert set(frame["precision"]) == {"ieee"}
        assert set(frame["cache"]) == {"hot"}
        assert frame["error_in_bounds"].between(0, 1).all()
        assert (frame["median_us"] > 0).all()
        spread = frame[["min_us", "p10_us", "median_us", "p90_us", "max_us"]].to_numpy()
        assert (np.diff(spread, axis=1) >= 0).all()
        np.testing.assert_allclose(frame["gflops"], 2e-3 * math.prod(shape) / frame["median_us"], rtol=1e-4)

        assert environment["seed"] == 7
        assert environment["simulator"] is not on_gpu
        assert (environment["gpu"] is not None) is on_gpu
        assert environment["versions"]["numpy"] == np.__version__
        assert str(tmp_path) not in json.dumps(environment)
        text = (tmp_path / "report.md").read_text()
        assert f"{shape[0]}x{shape[1]}x{shape[2]}" in text
        assert "| naive |" in text

    def test_list(self):
        done = bench("--list")
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()] == list(STAGES)
        assert all(len(line.split()) > 1 for line in done.stdout.splitlines())

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--shape", "16,16"], "is not M,N,K"),
            (["--shape", "16,x,16"], "is not M,N,K"),
            (["--shape", "0,16,16"], "every extent must be at least 1"),
            (["--sizes", "huge"], "invalid choice"),
            (["--rounds", "0"], "is not at least 1"),
            (["--hot", "--cold"], "not allowed with"),
            (["--stages", "naive,fast"], "unknown stage fast; known are naive, coalesced"),
            (["--stages", ","], "names no stage"),
            (["--seed", "-1"], "must not be negative"),
            (["--compare", "no/such/folder"], "no results at"),
        ],
    )
    def test_errors(self, arguments, says, capsys):
        try:
            status = cli.main(arguments)
        except SystemExit as stopped:
            status = stopped.code
        assert status == 2
        assert says in " ".join(capsys.readouterr().err.split())

    @pytest.mark.simulator
    def test_large_shape_is_refused_in_the_simulator(self, capsys):
        assert cli.main(["--shape", "4096,4096,4096"]) == 2
        assert "too large for the simulator: 4096x4096x4096" in capsys.readouterr().err

    def test_recorded_command_names_no_folder(self):
        line = cli.command_line(["--out", "/a/b", "--seed", "3", "--compare=/c", "--plot", "--out=/d"])
        assert line == "python bench.py --seed 3 --plot"


class TestCases:
    def test_seed_sizes(self):
        assert len(cases.ON_GPU["seed"]) == 15
        assert {shape.k for shape in cases.ON_GPU["seed"]} == {1024}
        assert all(shape.m == shape.n for shape in cases.ON_GPU["seed"])
        assert (cases.ON_GPU["seed"][0].m, cases.ON_GPU["seed"][-1].m) == (128, 16384)

    def test_default_runs_each_shape_once(self):
        shapes = cases.default_shapes(simulated=False)
        assert len(shapes) == 15 + 6 - 1  # 1024 cubed is in both
        assert len(set(shapes)) == len(shapes)

    def test_simulated_sets_are_small(self):
        assert list(cases.SIMULATED) == list(cases.ON_GPU)
        for shapes in cases.SIMULATED.values():
            cases.check_simulated(shapes)


def never(_stage_or_name):
    raise AssertionError("a product that is wrong was timed")


@cuda.jit
def off_by_one(alpha, a, b, beta, c):
    row, col = cuda.blockIdx.y, cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < c.shape[0] and col < c.shape[1]:
        total = alpha * 0
        for k in range(a.shape[1] - 1):
            total += a[row, k] * b[k, col]
        c[row, col] = alpha * total


@cuda.jit
def leaves_an_edge(alpha, a, b, beta, c):
    row, col = cuda.blockIdx.y, cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < c.shape[0] and col < c.shape[1] - 1:
        total = alpha * 0
        for k in range(a.shape[1]):
            total += a[row, k] * b[k, col]
        c[row, col] = alpha * total


def refuses_to_build(config, aligned):
    raise ValueError("this stage\ncannot be built")


BROKEN = {
    "off_by_one": (lambda config, aligned: off_by_one, "wrong", "of the bound"),
    "leaves_an_edge": (lambda config, aligned: leaves_an_edge, "wrong", "11] is nan"),
    "refuses_to_build": (refuses_to_build, "error", "ValueError: this stage cannot be built"),
}


class TestVerdicts:
    """Stages that are broken on purpose, among right ones, through the whole program."""

    @pytest.mark.parametrize("name", BROKEN)
    def test_broken_stage(self, name, monkeypatch, tmp_path, capsys):
        build, status, says = BROKEN[name]
        config = dataclasses.replace(STAGES["coalesced"].test_config, BM=1, BN=32)
        broken = dataclasses.replace(
            STAGES["coalesced"],
            name=name,
            build=build,
            configs=(config,),
            test_config=config,
            block=lambda config: (32, 1),
        )
        monkeypatch.setitem(STAGES, name, broken)
        code = cli.main([f"--stages=coalesced,{name}", "--shape=16,12,9", f"--out={tmp_path}", "--seed=1"])
        printed = " ".join(capsys.readouterr().out.split())
        assert code == 1
        assert f"NOT RIGHT: {name}" in printed
        assert f"{status.upper()}, not timed." in printed
        frame = results.load(tmp_path)[0].set_index("stage")
        assert frame.loc["coalesced", "status"] == "ok"
        assert frame.loc["coalesced", "median_us"] > 0
        assert frame.loc[name, "status"] == status
        assert says in frame.loc[name, "note"]
        assert math.isnan(frame.loc[name, "median_us"])
        assert math.isnan(frame.loc[name, "gflops"])
        if status == "wrong":
            assert frame.loc[name, "error_in_bounds"] > 1
            assert "worst element [" in printed

    def test_output_is_nan_before_every_call(self):
        """A contender that writes nothing is wrong, also after one that was right."""
        right = contenders.Contender("right", bound)
        lazy = contenders.Contender("lazy", lambda buffers: contenders.Bound(lambda stream: None))
        plan = host_plan(right, lazy)
        (frame,) = run.run(plan)
        assert list(frame["status"]) == ["ok", "wrong"]
        assert list(frame["median_us"].notna()) == [True, False]
        assert frame["error_in_bounds"].iloc[1] == math.inf

    def test_unsupported_stage_is_no_failure(self):
        new = contenders.Contender("new", lambda buffers: never("bind"), min_cc=(9, 0))
        plan = dataclasses.replace(host_plan(new), simulated=False, cc=(8, 0))
        (frame,) = run.run(plan)
        assert list(frame["status"]) == ["unsupported"]
        assert "compute capability 9.0" in frame["note"].iloc[0]

    def test_fastest_cublas_is_the_row(self):
        def slowly(buffers):
            return contenders.Bound(lambda stream: [multiply(buffers) for _ in range(200)])

        one = contenders.Contender("cublas", slowly, via="one")
        two = contenders.Contender(
            "cublas", lambda buffers: contenders.Bound(lambda stream: multiply(buffers)), via="two"
        )
        slow = contenders.Contender("slow", slowly)
        (frame,) = run.run(dataclasses.replace(host_plan(slow, one, two), rounds=5))
        assert list(frame["via"]) == ["", "two"]
        assert frame["ratio_to_cublas"].iloc[0] == pytest.approx(
            frame["median_us"].iloc[1] / frame["median_us"].iloc[0]
        )
        frame = frame.iloc[1:]
        assert frame["note"].iloc[0].startswith("through one: ")
        assert frame["ratio_to_cublas"].iloc[0] == pytest.approx(1)
        assert frame["rounds"].iloc[0] == 5

    def test_one_that_cannot_be_timed_does_not_stop_the_rest(self, monkeypatch):
        """As when one library refuses to be captured into a graph."""

        def interleaved(calls, *, stream, rounds, round_up_to, **_options):
            if any(name.startswith("refuses") for name in calls):
                raise RuntimeError("operation not permitted while capturing")
            for call in calls.values():
                call(stream)
            return {name: Samples(np.full(rounds, 50.0)) for name in calls}

        monkeypatch.setattr(run, "time_interleaved", interleaved)
        names = ("first", "refuses", "last")
        plan = host_plan(*(contenders.Contender(name, bound) for name in names))
        (frame,) = run.run(dataclasses.replace(plan, simulated=False, rounds=6, peak=1e9))
        frame = frame.set_index("stage")
        assert list(frame["status"]) == ["ok", "error", "ok"]
        assert "not permitted" in frame.loc["refuses", "note"]
        assert list(frame["median_us"].notna()) == [True, False, True]
        assert frame.loc["last", "rounds"] == 6
        assert frame.loc["last", "host_us"] > 0
        assert frame.loc["last", "percent_of_peak"] == pytest.approx(100 * 2 * 16 * 12 * 9 / 50e-6 / 1e9)

    def test_same_seed_same_operands(self):
        def operands(seed, index=0):
            return DeviceBuffers.random(HostLibrary(), Shape(5, 6, 7), seed, index).a

        assert np.array_equal(operands(1), operands(1))
        assert not np.array_equal(operands(1), operands(2))
        assert not np.array_equal(operands(1), operands(1, index=1))
        assert -1 <= operands(1).min() < 0 < operands(1).max() < 1

    @pytest.mark.parametrize(
        ("row", "col", "value"),
        [(0, 0, math.nan), (40, 3, 7.5), (63, 16, math.inf), (20, 16, -math.inf)],
    )
    def test_worst_element_across_panels(self, row, col, value, monkeypatch):
        """The judge on panels names the same element as the one on whole matrices."""
        monkeypatch.setattr(verify, "PANEL_ELEMENTS", 17 * 13)
        buffers = DeviceBuffers.random(HostLibrary(), Shape(64, 17, 9), 3)
        reference = verify.Reference(buffers)
        assert len(reference.panels) > 3
        product = buffers.a @ buffers.b
        expected, scale = accuracy.reference(1.0, buffers.a, buffers.b)
        whole = accuracy.compare(product, expected, scale, 9)
        assert reference.compare(product).ok
        assert reference.compare(product).in_bounds == pytest.approx(whole.in_bounds, rel=1e-5)
        product[row, col] = value
        worst = reference.compare(product)
        assert not worst.ok
        assert (worst.row, worst.col) == (row, col)

    def test_cold_rotates_past_twice_the_cache(self):
        plan = dataclasses.replace(host_plan(), cold=True, l2_bytes=1_000_000)
        shape = plan.shapes[0]
        bytes_a_set = 4 * (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n)
        assert (plan.sets(shape) - 1) * bytes_a_set >= 2_000_000
        assert dataclasses.replace(plan, cold=False).sets(shape) == 1
        seen = []
        bound = [contenders.Bound(lambda stream, index=index: seen.append(index)) for index in range(3)]
        call = contenders.rotating(bound)
        for _ in range(7):
            call(0)
        assert seen == [0, 1, 2, 0, 1, 2, 0]

    def test_rounds_fit_the_budget(self):
        assert run.affordable_rounds([1e-5] * 12) == run.MOST_ROUNDS
        assert run.affordable_rounds([1.0, 1e-5]) == run.FEWEST_ROUNDS
        assert run.FEWEST_ROUNDS < run.affordable_rounds([0.1]) < run.MOST_ROUNDS


def multiply(buffers):
    buffers.c[...] = buffers.a @ buffers.b


def bound(buffers):
    return contenders.Bound(lambda stream: multiply(buffers))


def host_plan(*contending):
    """A plan for contenders that are plain NumPy."""
    return run.Plan([Shape(16, 12, 9)], contending, HostLibrary(), seed=1, simulated=True)


class TestCompare:
    @pytest.mark.parametrize(
        ("factor", "verdict"),
        [(1.0, "same"), (1.015, "same"), (1.05, "slower"), (0.985, "same"), (0.9, "faster")],
    )
    def test_verdict_needs_disjoint_spreads(self, factor, verdict):
        compared = compare.compare(gpu_frame(warp_tiled=factor), gpu_frame())
        verdicts = compared.set_index("stage")["verdict"]
        assert set(verdicts["warp_tiled"]) == {verdict}
        assert set(verdicts.drop("warp_tiled")) == {"same"}
        assert len(compared) == len(gpu_frame())
        assert len(compare.regressions(compared)) == (len(SHAPES) if verdict == "slower" else 0)

    def test_a_change_below_a_percent_is_none(self):
        old, new = gpu_frame(), gpu_frame(warp_tiled=1.009)
        for frame in (old, new):
            frame["p10_us"] = frame["p90_us"] = frame["median_us"]
        assert compare.regressions(compare.compare(new, old)).empty

    def test_a_stage_that_broke_is_a_regression(self):
        new = gpu_frame()
        hit = (new["stage"] == "naive") & (new["m"] == 8192)
        new.loc[hit, ["min_us", "median_us", "p10_us", "p90_us", "gflops"]] = math.nan
        new.loc[hit, "status"] = "wrong"
        found = compare.regressions(compare.compare(new, gpu_frame()))
        assert list(found["stage"]) == ["naive"]
        assert list(found["verdict"]) == ["broken"]
        assert "broken" in report.changes_table(found).markdown()

    def test_only_what_the_new_run_covers_counts(self):
        new = gpu_frame()
        new = new[(new["stage"] == "naive") & (new["m"] == 4096)].reset_index(drop=True)
        compared = compare.compare(new, gpu_frame())
        assert len(compared) == 1
        assert compare.compare(new, gpu_frame().assign(cache="cold")).empty

    def test_the_fastest_configuration_stands_for_a_stage(self):
        extra = gpu_frame(warp_tiled=1.5).query("stage == 'warp_tiled'").assign(config="other")
        both = pd.concat([extra, gpu_frame()], ignore_index=True)
        assert set(compare.compare(both, gpu_frame())["verdict"]) == {"same"}

    def test_through_a_file(self, tmp_path):
        results.save(gpu_frame(), ENVIRONMENT, tmp_path)
        old, environment = results.load(tmp_path / "results.csv")
        assert environment == ENVIRONMENT
        assert set(compare.compare(gpu_frame(), old)["verdict"]) == {"same"}
        (tmp_path / "other.csv").write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match="no results file: it has no column stage"):
            results.load(tmp_path / "other.csv")

    @pytest.mark.simulator
    def test_marked_by_the_program(self, tmp_path, capsys):
        arguments = ["--stages=coalesced", "--shape=4,4,4", "--seed=1"]
        assert cli.main([*arguments, f"--out={tmp_path / 'old'}"]) == 0
        frame, environment = results.load(tmp_path / "old")
        frame[TIMES] /= 1000
        results.save(frame, environment, tmp_path / "old")
        assert cli.main([*arguments, f"--out={tmp_path / 'new'}", f"--compare={tmp_path / 'old'}"]) == 0
        assert "slower" in capsys.readouterr().out
        assert "slower" in (tmp_path / "new" / "report.md").read_text()


class TestReport:
    def test_summary_stands_beside_the_earlier_figures(self):
        frame = results.frame_of(gpu_row("naive", SHAPES[0], 100.0) | {"stage": stage} for stage in (*STAGES, "cublas"))
        rows = {row[0]: row for row in report.summary_table(frame).rows}
        assert list(rows) == [*STAGES, "cublas"]
        for stage, figure in {
            "vectorized": 54.5,
            "conflict_free": 68.6,
            "double_buffered": 75.7,
            "cublas": 83.9,
        }.items():
            assert rows[stage][-1] == f"{figure} %"
        assert rows["naive"][1] == str(SHAPES[0])

    def test_best_size(self):
        frame = gpu_frame()
        frame.loc[(frame["stage"] == "naive") & (frame["m"] == 4096), "gflops"] *= 2
        (row,) = (row for row in report.summary_table(frame).rows if row[0] == "naive")
        assert row[1] == "4096x4096x4096"

    def test_wide_table_folds(self):
        table = report.speed_table(gpu_frame())
        parts = list(report.folded(table, 40))
        assert len(parts) > 1
        assert [header for part in parts for header in part.headers[1:]] == list(table.headers[1:])
        assert all(part.headers[0] == table.headers[0] for part in parts)

    def test_markdown_names_the_source(self):
        text = report.markdown(gpu_frame(), ENVIRONMENT)
        for word in ("Test GPU", "580.1", "0.30.4", "0123456789ab", "2026-11-21", "python bench.py", "seed 1"):
            assert word in text

    def test_throttling_in_words(self):
        seen = nvml.ClockSamples([1980, 1900, 1700], 0x1 | 0x4 | 0x40)
        assert seen.median_mhz == 1900
        assert seen.throttle == "power cap; thermal, hardware"


class TestPlots:
    @pytest.mark.parametrize(
        ("frame", "environment"),
        [(gpu_frame(), ENVIRONMENT), (gpu_frame().query("m == 4096"), {"simulator": True, "gpu": None})],
        ids=["several sizes on a GPU", "one shape in the simulator"],
    )
    def test_pictures_show_something(self, frame, environment, tmp_path):
        image = pytest.importorskip("matplotlib.image")
        paths = plots.draw(frame, environment, tmp_path)
        assert [path.name for path in paths] == ["gflops_vs_size.png", "roofline.png"]
        for path in paths:
            pixels = image.imread(path)
            assert pixels.shape[0] > 300
            assert pixels.shape[1] > 500
            assert np.ptp(pixels[..., :3], axis=(0, 1)).min() > 0.5
            assert (pixels[..., 0] != pixels[..., 2]).any(), "no colour but grey"

    def test_every_stage_has_its_own_look(self):
        pytest.importorskip("matplotlib")
        looks = plots.styles([*STAGES, "auto", "cublas", "cpu"])
        assert len({(str(look["color"]), look["marker"]) for look in looks.values()}) == len(STAGES) + 3


class TestReadme:
    TEXT = "# T\n\n<!-- results:begin {0} -->\n{1}<!-- results:end {0} -->\n\nafter\n"

    @pytest.fixture
    def folder(self, tmp_path):
        results.save(gpu_frame(), ENVIRONMENT, tmp_path / "latest")
        return tmp_path

    def run(self, folder, *arguments, text=None):
        path = folder / "README.md"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        return readme.main([f"--readme={path}", f"--results={folder / 'latest'}", *arguments])

    @pytest.mark.parametrize("block", readme.GENERATORS)
    def test_check_follows_the_results(self, block, folder, capsys):
        assert self.run(folder, "--check", text=self.TEXT.format(block, "")) == 1
        assert "differs" in capsys.readouterr().err
        assert (folder / "README.md").read_text() == self.TEXT.format(block, "")
        assert self.run(folder) == 0
        assert self.run(folder, "--check") == 0
        made = (folder / "README.md").read_text(encoding="utf-8")
        assert made.startswith("# T\n\n<!--")
        assert made.endswith("\n\nafter\n")
        for word in ("Test GPU", "580.1", "2026-11-21", "python bench.py", "`warp_tiled`", "0.25"):
            assert word in made
        results.save(gpu_frame(warp_tiled=0.9), ENVIRONMENT, folder / "latest")
        assert self.run(folder, "--check") == 1

    def test_ladder_gains(self, folder):
        assert self.run(folder, text=self.TEXT.format("ladder", "")) == 0
        lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
        (line,) = (line for line in lines if line.startswith("| `warp_tiled` |"))
        assert [cell.strip() for cell in line.split("|")[2:6]] == ["20.0", "29.9 %", "1.050", "40.00x"]

    @pytest.mark.parametrize(
        ("spoil", "says"),
        [
            (lambda folder: (folder / "latest" / "results.csv").unlink(), "no results at"),
            (lambda folder: (folder / "latest" / "environment.json").unlink(), "no environment.json"),
            (lambda folder: (folder / "README.md").unlink(), "there is no"),
            (lambda folder: (folder / "README.md").write_text("no block"), "no block between"),
            (
                lambda folder: (folder / "README.md").write_text("<!-- results:begin x -->\n<!-- results:end x -->"),
                "unknown block x",
            ),
            (
                lambda folder: results.save(gpu_frame(), ENVIRONMENT | {"simulator": True}, folder / "latest"),
                "not measured on a GPU",
            ),
            (
                lambda folder: results.save(gpu_frame().assign(status="wrong"), ENVIRONMENT, folder / "latest"),
                "wrong or failed",
            ),
            (
                lambda folder: results.save(gpu_frame().query("m == 2048"), ENVIRONMENT, folder / "latest"),
                "no rung at 4096x4096x4096",
            ),
        ],
    )
    def test_errors(self, spoil, says, folder, capsys):
        (folder / "README.md").write_text(self.TEXT.format("ladder", ""))
        spoil(folder)
        assert self.run(folder, "--check") == 1
        assert says in capsys.readouterr().err

    def test_needs_no_numba(self):
        code = "import sys, numba_gemm.bench.readme; sys.exit('numba' in sys.modules or 'rich' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
