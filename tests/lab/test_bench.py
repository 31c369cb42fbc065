"""bench.py: command line, verdicts, timing, comparisons and pictures."""

import dataclasses
import io
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from cuda.bindings import driver
from numba import cuda
from support import compile_lab
from support.offline import offline
from support.results import ENVIRONMENT, SHAPES, gpu_frame, gpu_row, save

import numba_gemm
from numba_gemm import kernels
from numba_gemm.inspect import sass
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.lab.__main__ import main as lab_main
from numba_gemm.lab.bench import (
    cases,
    ceilings,
    cli,
    contenders,
    experiment,
    model,
    plots,
    report,
    results,
    run,
)
from numba_gemm.lab.bench.buffers import NORMAL, UNIFORM, DeviceBuffers, HostLibrary, NumbaLibrary, Reference
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.harness import command, environment, nvml, runner
from numba_gemm.models import accuracy
from numba_gemm.runtime import timing
from numba_gemm.runtime.device import SIMULATED_DEVICE
from numba_gemm.runtime.timing import Samples

ROOT = Path(__file__).resolve().parents[2]

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


def never(*_, **__):
    raise AssertionError("this must not be reached")


class TestCommandLine:
    def test_tiny_run(self, tmp_path, on_gpu):
        shape = (256, 192, 64) if on_gpu else (16, 12, 9)
        done = bench(
            "--stages=naive,coalesced,auto,cpu", "--shape", ",".join(map(str, shape)), "--out", tmp_path, "--seed", 7
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("No GPU was used" in done.stdout) is not on_gpu
        assert ("Verdicts" in done.stdout) is not on_gpu
        assert ("Stage summary" in done.stdout) is on_gpu
        assert ("GFLOP/s" in done.stdout) is on_gpu

        header = (tmp_path / "results.csv").read_text().splitlines()[0].split(",")
        assert header[: len(REQUIRED_COLUMNS)] == REQUIRED_COLUMNS
        frame, described = results.load(tmp_path)
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

        assert described["seed"] == 7
        assert described["simulator"] is not on_gpu
        assert (described["gpu"] is not None) is on_gpu
        assert described["timing"] == ("graphs" if on_gpu else None)
        assert described["versions"]["numpy"] == np.__version__
        assert str(tmp_path) not in json.dumps(described)
        text = (tmp_path / "report.md").read_text()
        assert f"{shape[0]}x{shape[1]}x{shape[2]}" in text
        assert "| naive |" in text

    def test_list(self):
        done = bench("--list")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{numba_gemm.stages()}\n"
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["stage", *kernels.STAGES]
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
            (["--stages", "naive,fast"], "invalid choice: 'fast'; expected one of naive, coalesced"),
            (["--stages", ","], "',' names nothing"),
            (["--seed", "-1"], "is not from 0 to"),
            (["--compare", "no/such/folder"], "no results at"),
            (["--commit", "main"], "'main' is no commit"),
            (["--ceilings", "no.json"], "--ceilings says what --model predicts by: give both"),
            (["--model", "--ceilings", "no.json"], "no ceilings at no.json; write them with: numba-gemm lab"),
            (["--shape", "16,16,16", "--ou", "here"], "unrecognized arguments: --ou"),
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

    def test_recorded_command_names_parameters_alone(self, monkeypatch):
        """It repeats the run, in any folder, if it is given as it stands."""
        given = []
        monkeypatch.setattr(runner, "run", lambda experiment, options, **_: given.append(options) or True)
        arguments = ["--stages=naive,cpu", "--shape=4,4,4", "--shape", "16,12,9", "--cold", "--seed=3"]
        assert cli.main([*arguments, "--out=/a", "--commit=0123456", "--model"]) == 0
        line = runner.command_line(experiment.EXPERIMENT, given[0])
        assert line.split()[:2] == ["numba-gemm", "bench"]
        assert not any(word in line for word in ("--out", "--commit", "--model", "--hot"))
        assert cli.main(line.split()[2:]) == 0
        assert given[1] == given[0]

    def test_few_rounds_are_refused_on_a_gpu(self, monkeypatch, capsys):
        monkeypatch.setattr("numba_gemm.simulator.switch.SIMULATOR", False)
        monkeypatch.setattr("numba_gemm.runtime.device.current_device", lambda: never("current_device"))
        assert cli.main(["--rounds", "4"]) == 2
        assert "--rounds: 4 is too few to tell a spread: give five or more" in capsys.readouterr().err
        with pytest.raises(AssertionError):
            cli.main(["--rounds", "5"])

    def test_out_is_made_before_anything_is_measured(self, monkeypatch, tmp_path, capsys):
        arguments = ["--stages=naive", "--shape=4,4,4"]
        (tmp_path / "file").touch()
        monkeypatch.setattr(run, "run", never)
        for folder in ("file", "file/below"):
            assert cli.main([*arguments, f"--out={tmp_path / folder}"]) == 2
            assert "results cannot be written there: " in capsys.readouterr().err
        with pytest.raises(AssertionError):
            cli.main([*arguments, f"--out={tmp_path / 'new' / 'folder'}"])
        assert list((tmp_path / "new" / "folder").iterdir()) == []

    @pytest.mark.parametrize(
        ("file", "content", "says"),
        [
            ("results.csv", b"", "No columns"),
            ("results.csv", b"\xff\xfe", "can't decode"),
            ("results.csv", {"median_us": "fast"}, "could not convert string to float: 'fast'"),
            ("results.csv", {"m": "many"}, "invalid literal for int"),
            ("results.csv", {"n": math.nan}, "non-finite values"),
            ("environment.json", b"{", "JSONDecodeError"),
            ("environment.json", b"[" * 100_000, "RecursionError"),
            ("environment.json", b"\xff", "UnicodeDecodeError"),
            ("environment.json", b"[]", "expected an object"),
            ("environment.json", b'{"gpu": ["H200"]}', "TypeError"),
        ],
    )
    def test_what_cannot_be_compared_is_refused_at_once(self, file, content, says, monkeypatch, tmp_path, capsys):
        save(gpu_frame(), ENVIRONMENT, tmp_path)
        if isinstance(content, bytes):
            (tmp_path / file).write_bytes(content)
        else:
            gpu_frame().assign(**content).to_csv(tmp_path / file, index=False)
        monkeypatch.setattr(run, "run", never)
        assert cli.main(["--stages=naive", "--shape=4,4,4", f"--out={tmp_path / 'out'}", f"--compare={tmp_path}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {tmp_path / file} ")
        assert says in said
        assert said.count("\n") == 1

    def test_an_interrupt_keeps_what_was_measured(self, monkeypatch, tmp_path, capsys):
        def interrupted(*_):
            yield gpu_frame()
            raise KeyboardInterrupt

        monkeypatch.setattr(run, "run", interrupted)
        assert cli.main(["--stages=naive", "--shape=4,4,4", f"--out={tmp_path}"]) == 130
        assert capsys.readouterr().err == "interrupted\n"
        assert len(results.load(tmp_path)[0]) == len(gpu_frame())

    @pytest.mark.parametrize(
        "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
    )
    def test_any_encoding(self, variables, tmp_path):
        done = bench("--stages=naive", "--precisions=tf32", "--shape=16,12,9", "--out", tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        assert "results in" in done.stdout
        assert "–" in (tmp_path / "report.md").read_text(encoding="utf-8")

    @pytest.mark.simulator
    @pytest.mark.parametrize(
        ("stage", "says"), [("cublas", "only on a GPU; name another"), ("thin", "pass a shape such as 64,4,64")]
    )
    def test_reason_for_nothing(self, tmp_path, capsys, stage, says):
        assert cli.main([f"--stages={stage}", "--shape=64,64,64", f"--out={tmp_path}"]) == 2
        assert says in capsys.readouterr().err

    @pytest.mark.simulator
    def test_stage_that_takes_no_shape_is_named(self, tmp_path, capsys):
        assert cli.main(["--stages=thin,naive", "--shape=8,8,8", f"--out={tmp_path}"]) == 0
        assert "thin is left out: thin is for up to 4 columns of C; pass a shape such as" in capsys.readouterr().out

    @pytest.mark.simulator
    def test_nothing_that_can_run(self, tmp_path, capsys):
        assert cli.main(["--stages=persistent", "--shape=8,8,8", f"--out={tmp_path}"]) == 2
        assert "nothing to measure: persistent/bf16x6" in capsys.readouterr().err

    @pytest.mark.simulator
    def test_simulated_tensor_core_stages(self, tmp_path):
        stages = ["one_warp", "fused_decomposition"]
        assert cli.main([f"--stages={','.join(stages)}", "--shape=8,8,8", f"--out={tmp_path}"]) == 0
        frame = results.load(tmp_path)[0]
        assert [*frame["stage"]] == stages
        assert set(frame["status"]) == {"ok"}

    def test_no_folder_for_nothing(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(contenders, "CPU_TERMS", 1)
        assert cli.main(["--stages=cpu", "--shape=4,4,4", f"--out={tmp_path / 'new'}"]) == 2
        assert "nothing to measure: the shapes have more than 1 multiply-adds" in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


class TestCommand:
    def test_a_full_disk_leaves_the_previous_files(self, tmp_path):
        """A limit on file sizes stands in for a full disk."""
        save(gpu_frame()[:1], ENVIRONMENT, tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(map(len, before.values())), hard))
        try:
            with pytest.raises(command.UsageError, match=r"results\.csv, environment\.json cannot be written"):
                save(gpu_frame(), {"seed": 2}, tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    @pytest.mark.parametrize(
        ("where", "status", "says"),
        [
            ("> /dev/full", 2, "error: standard output cannot be written: No space left on device\n"),
            (">&-", 0, ""),
            ("| true", 0, ""),
            ("> out", 0, ""),
        ],
    )
    def test_output_that_fails_does_not_end_a_command(self, where, status, says, tmp_path):
        line = f"set -o pipefail; {sys.executable} -c '{PRINTS}' {where}"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout, done.stderr) == (status, "", says)
        assert (tmp_path / "done").read_bytes() == "–".encode()


PRINTS = """
import sys
from pathlib import Path
from numba_gemm.lab.harness.command import command, write_files
@command
def main():
    for _ in range(5000):
        print("a line of output")
    write_files(Path(), {"done": "–"})
    return 0
sys.exit(main())
"""


class TestCases:
    def test_seed_sizes(self):
        assert len(cases.ON_GPU["seed"]) == 15
        assert {shape.k for shape in cases.ON_GPU["seed"]} == {1024}
        assert all(shape.m == shape.n for shape in cases.ON_GPU["seed"])
        assert (cases.ON_GPU["seed"][0].m, cases.ON_GPU["seed"][-1].m) == (128, 16384)

    def test_default_runs_each_shape_once(self):
        shapes = cases.chosen_shapes((), (), simulated=False)
        assert len(shapes) == 15 + 6 - 1  # 1024 cubed is in both
        assert len(set(shapes)) == len(shapes)

    def test_simulated_sets_are_small(self):
        assert list(cases.SIMULATED) == list(cases.ON_GPU)
        for shapes in cases.SIMULATED.values():
            cases.check_simulated(shapes)


class TestProvenance:
    @pytest.mark.parametrize(("git", "recorded"), [(None, "0123456789ab"), ("fedcba987654", "fedcba987654")])
    def test_commit_where_git_does_not_answer(self, git, recorded, monkeypatch, tmp_path):
        monkeypatch.setattr(environment, "commit", lambda: git)
        assert cli.main(["--stages=naive", "--shape=4,4,4", "--commit=0123456789ab", f"--out={tmp_path}"]) == 0
        described = results.load(tmp_path)[1]
        assert described["commit"] == recorded
        drawn = described["seed"]
        assert described["command"] == f"numba-gemm bench --stages naive --shape 4,4,4 --seed {drawn}"

    def test_digest_is_of_the_code_alone(self, monkeypatch, tmp_path):
        def digest(text, name="module.py"):
            (tmp_path / name).write_text(text, encoding="utf-8")
            made = environment.source_digest()
            (tmp_path / name).unlink()
            return made

        monkeypatch.setattr(environment, "PACKAGE", tmp_path)
        code = (
            '"""{0}"""\nclass A:\n    """{0}"""\n    x = "{1}"\n    def f():\n        """{0}"""\n        return 1{2}\n'
        )
        first = digest(code.format("Old.", "text", ""))
        assert digest(code.format("Measured: 20.0.", "text", "  # why")) == first
        assert digest(code.format("Old.", "text", " + 0")) != first
        assert digest(code.format("Old.", "other", "")) != first
        assert digest(code.format("Old.", "text", ""), "another.py") != first

    @pytest.mark.parametrize(
        ("how", "says"),
        [("graphs", "timed by replays of CUDA graphs"), ("launches", "timed by plain launches"), (None, None)],
    )
    def test_footer_says_how_it_was_timed(self, how, says):
        text = report.text_of(gpu_frame(), ENVIRONMENT | {"timing": how})
        assert ("timed by" in text) is (says is not None)
        assert says is None or says in text


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


class TestContenders:
    """The contenders that a command line names."""

    @staticmethod
    def labels(line, simulated=False):
        names, precisions = line
        selected = contenders.select_contenders(
            names or experiment.DEFAULT_STAGES, simulated=simulated, precisions=experiment.precision_names(precisions)
        )
        return [(one.stage, one.precision, one.config) for one in selected]

    def test_stage_in_the_precisions_named(self):
        config = kernels.STAGES["one_warpgroup"].configs[0].name
        assert self.labels((["one_warpgroup"], ["bf16x6", "tf32x3"])) == [
            ("one_warpgroup", "bf16x6", config),
            ("one_warpgroup", "tf32x3", config),
            ("auto", "bf16x6", ""),
            ("auto", "tf32x3", ""),
        ]

    @pytest.mark.parametrize("name", kernels.STAGES)
    def test_every_stage_can_be_named(self, name):
        stage = kernels.STAGES[name]
        ((chosen, precision, config),) = self.labels(([name], ()))
        assert chosen == name
        assert precision == next(one for one in ("ieee", "bf16x6", "tf32", "bf16") if one in stage.precisions)
        assert config in [one.name for one in stage.configs]
        (contender,) = contenders.select_contenders([name], simulated=False)
        assert (contender.min_cc, contender.only_cc) == (stage.min_cc, stage.only_cc)

    def test_labels_are_distinct(self):
        selected = contenders.select_contenders(
            (*kernels.STAGES, *results.NOT_STAGES),
            simulated=True,
            all_configs=True,
            precisions=experiment.precision_names(["all"]),
        )
        labels = [one.label for one in selected]
        assert len(labels) == len(set(labels))
        for stage in kernels.STAGES.values():
            computed = {one.precision for one in selected if one.stage == stage.name}
            assert computed == ({"ieee"} if stage.name in STAGES else set(stage.precisions))


class TestVerdicts:
    """Stages that are broken on purpose, among correct ones, through the whole program."""

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
        monkeypatch.setitem(kernels.STAGES, name, broken)
        monkeypatch.setitem(experiment.EXPERIMENT.allowed, "stages", kernels.STAGES)
        code = cli.main([f"--stages=coalesced,{name}", "--shape=16,12,9", f"--out={tmp_path}", "--seed=1"])
        printed = " ".join(capsys.readouterr().out.split())
        assert code == 1
        assert f"NOT CORRECT: {name}" in printed
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
        """A contender that writes nothing is wrong, even after a correct one."""
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
        """An example is a library that refuses every call on this stream."""

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

    @pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("CUDA out of memory. Tried to allocate")])
    @pytest.mark.parametrize("place", ["operands", "reference", "timing"])
    def test_a_shape_without_memory_does_not_stop_the_rest(self, place, error, monkeypatch, tmp_path, capsys):
        large = Shape(33, 12, 9)

        def refuse(shape):
            if shape == large:
                raise error

        class Library(HostLibrary):
            def empty(self, rows, cols):
                if place == "operands":
                    refuse((rows, cols, 9))
                return super().empty(rows, cols)

            def float64(self, array):
                if place == "reference":
                    refuse((*array.shape[:1], 12, 9))
                return super().float64(array)

        def time_on_host(candidates, plan, stream):
            if place == "timing":
                refuse(candidates[0].bound[0].call.shape)
            return timed(candidates, plan, stream)

        def shaped(buffers):
            def call(stream):
                multiply(buffers)

            call.shape = buffers.shape
            return contenders.Bound(call)

        timed = run.time_on_host
        monkeypatch.setattr(run, "time_on_host", time_on_host)
        right = contenders.Contender("right", shaped)
        plan = dataclasses.replace(host_plan(right), shapes=[large, Shape(16, 12, 9)], library=Library())
        whole = run.run
        monkeypatch.setattr(run, "run", lambda _plan: whole(plan))
        assert cli.main(["--stages=naive", "--shape=16,12,9", "--seed=1", f"--out={tmp_path}"]) == 1
        assert "33x12x9: 0 correct, NOT CORRECT: right" in capsys.readouterr().out
        frame = results.load(tmp_path)[0].set_index("m")
        assert list(frame["status"]) == ["error", "ok"]
        assert str(error) in frame.loc[33, "note"]
        assert list(frame["median_us"].notna()) == [False, True]

    def test_without_memory_what_is_unsupported_stays_so(self):
        class Library(HostLibrary):
            def empty(self, rows, cols):
                raise MemoryError("no room")

        new, old = contenders.Contender("new", bound, min_cc=(9, 0)), contenders.Contender("old", bound)
        plan = dataclasses.replace(host_plan(new, old), simulated=False, cc=(8, 0), library=Library())
        (frame,) = run.run(plan)
        assert list(frame["status"]) == ["unsupported", "error"]

    def test_other_errors_at_a_shape_are_raised(self):
        class Library(HostLibrary):
            def empty(self, rows, cols):
                raise RuntimeError("an illegal memory access was encountered")

        with pytest.raises(RuntimeError, match="illegal memory access"):
            list(run.run(dataclasses.replace(host_plan(contenders.Contender("any", bound)), library=Library())))

    def test_same_seed_same_operands(self):
        def operands(seed, index=0):
            return DeviceBuffers.random(HostLibrary(), Shape(5, 6, 7), seed, index, UNIFORM).a

        assert np.array_equal(operands(1), operands(1))
        assert not np.array_equal(operands(1), operands(2))
        assert not np.array_equal(operands(1), operands(1, index=1))
        assert -1 <= operands(1).min() < 0 < operands(1).max() < 1

    @pytest.mark.parametrize(("distribution", "deviation"), [(NORMAL, 1.0), (UNIFORM, 3**-0.5)])
    def test_distributions(self, distribution, deviation):
        values = DeviceBuffers.random(HostLibrary(), Shape(200, 6, 200), 1, distribution=distribution).a
        assert values.dtype == np.float32
        assert values.std() == pytest.approx(deviation, rel=0.02)
        assert values.mean() == pytest.approx(0, abs=0.02)

    @pytest.mark.parametrize(
        ("row", "col", "value"),
        [(0, 0, math.nan), (40, 3, 7.5), (63, 16, math.inf), (20, 16, -math.inf)],
    )
    def test_worst_element_across_panels(self, row, col, value, monkeypatch):
        """The judge on panels names the same element as the one on whole matrices."""
        monkeypatch.setattr("numba_gemm.lab.bench.buffers.PANEL_ELEMENTS", 17 * 13)
        buffers = DeviceBuffers.random(HostLibrary(), Shape(64, 17, 9), 3)
        reference = Reference(buffers.library, buffers.a, buffers.b)
        assert len(reference.panels) > 3
        product = buffers.a @ buffers.b
        expected, scale = accuracy.reference(1.0, buffers.a, buffers.b)
        whole = accuracy.compare(product, expected, scale, 9)
        assert reference.judge(product, "ieee")[0].ok
        assert reference.judge(product, "ieee")[0].in_bounds == pytest.approx(whole.in_bounds, rel=1e-5)
        product[row, col] = value
        worst = reference.judge(product, "ieee")[0]
        assert not worst.ok
        assert (worst.row, worst.col) == (row, col)

    def test_numba_arrays_are_judged_on_the_host(self):
        """The library that allocates if neither CuPy nor PyTorch is installed."""
        buffers = DeviceBuffers.random(NumbaLibrary(), Shape(6, 5, 7), 3)
        a, b = (buffers.library.to_host(array) for array in (buffers.a, buffers.b))
        reference = Reference(buffers.library, buffers.a, buffers.b)
        product = a @ b
        assert reference.judge(cuda.to_device(product), "ieee")[0].ok
        product[4, 2] += 1
        worst = reference.judge(cuda.to_device(product), "ieee")[0]
        assert not worst.ok
        assert (worst.row, worst.col) == (4, 2)

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
        assert run.affordable_rounds([2e-6] * 47) == int(run.ROUNDS_BUDGET_S / (47 * 2e-6 * run.MIN_SPAN_US))

    @pytest.mark.parametrize(("us", "calls"), [(5.0, 100), (400.0, 50), (3000.0, 10), (49_000.0, 10), (51_000.0, None)])
    def test_host_time_takes_ten_calls_or_none(self, us, calls, monkeypatch):
        monkeypatch.setattr(run, "host_time_us", lambda enqueue, *, batch, rounds, synchronize: float(batch))
        candidate = run.Candidate([contenders.Bound(never)], contender=contenders.Contender("any", bound))
        candidate.samples = Samples(np.full(5, us))
        taken = run.host_time(candidate, 0)
        assert math.isnan(taken) if calls is None else taken == calls


def multiply(buffers):
    buffers.c[...] = buffers.a @ buffers.b


def bound(buffers):
    return contenders.Bound(lambda stream: multiply(buffers))


def in_bf16(array):
    """Return an array with its elements rounded to BF16."""
    bits = np.asarray(array).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Tensor(np.ndarray):
    """A tensor of `Torch` in FP32, or in BF16."""

    torch, narrow = None, False

    def bfloat16(self):
        made = in_bf16(self).view(Tensor)
        made.torch, made.narrow = self.torch, True
        return made

    def assign(self, other):
        self[...] = in_bf16(other) if self.narrow else other

    def copy_(self, other):
        self.torch.copies += 1
        self.assign(other)


class Torch:
    """The part of PyTorch that cuBLAS in narrow precisions needs, on arrays of NumPy.

    `refusal` is the error of products of BF16 tensors with an FP32 result.
    """

    __name__ = "torch"
    float32 = np.float32

    def __init__(self, refusal=None):
        self.refusal, self.copies = refusal, 0
        self.switches, self.allowed = 0, None  # changes of `allow_tf32`; its value in the last product
        torch = self

        class Matmul:
            def __setattr__(self, name, value):
                torch.switches += 1
                super().__setattr__(name, value)

        self.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=Matmul()))
        self.backends.cuda.matmul.allow_tf32 = False

    def as_tensor(self, array, device):
        made = array.view(Tensor)
        made.torch = self
        return made

    def mm(self, a, b, out_dtype, out):
        if self.refusal is not None:
            raise self.refusal("out_dtype")
        np.matmul(a, b, out=out)

    def matmul(self, a, b, out):
        self.allowed = self.backends.cuda.matmul.allow_tf32
        out.assign(np.matmul(a, b))


def host_plan(*contending):
    """A plan for contenders that are plain NumPy."""
    return run.Plan([Shape(16, 12, 9)], contending, HostLibrary(), seed=1, simulated=True)


def refused_by_cupy():
    raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")


class Device:
    """The part of the driver that timing needs: one stream, an idle host, and a launch that takes host time."""

    CUstreamCaptureMode = driver.CUstreamCaptureMode
    LAUNCH_US = 7.0

    def __init__(self):
        self.host_us = self.device_us = 0.0
        self.captured = None  # captured calls, during a capture
        self.spoils = False
        self.graphs, self.stamps, self.log = {}, {}, []

    def product(self, name, us, in_capture=lambda: None, plainly=lambda: None):
        def enqueue(stream):
            if self.captured is None:
                plainly()
                self.work([(name, us)])
            else:
                in_capture()
                self.captured.append((name, us))

        return enqueue

    def work(self, calls):
        self.host_us += self.LAUNCH_US
        self.device_us = max(self.device_us, self.host_us) + sum(us for _, us in calls)
        self.log.append(calls)
        return (driver.CUresult.CUDA_SUCCESS,)

    def new(self, table, value):
        key = len(table)
        table[key] = value
        return driver.CUresult.CUDA_SUCCESS, key

    def cuStreamBeginCapture(self, stream, mode):
        assert self.captured is None
        self.captured = []
        return (driver.CUresult.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream):
        calls, self.captured = self.captured, None
        if self.spoils:
            return driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
        return self.new(self.graphs, calls)

    def cuGraphInstantiate(self, graph, flags):
        return self.new(self.graphs, self.graphs[graph])

    def cuGraphDestroy(self, graph):
        self.graphs[graph] = None
        return (driver.CUresult.CUDA_SUCCESS,)

    cuGraphExecDestroy = cuGraphDestroy

    def cuGraphLaunch(self, graph, stream):
        return self.work(self.graphs[graph])

    def cuEventCreate(self, flags):
        return self.new(self.stamps, math.nan)

    def cuEventRecord(self, event, stream):
        self.device_us = self.stamps[event] = max(self.device_us, self.host_us)
        return (driver.CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream):
        self.host_us = max(self.host_us, self.device_us)
        return (driver.CUresult.CUDA_SUCCESS,)

    cuEventSynchronize = cuStreamSynchronize

    def cuEventElapsedTime(self, begin, end):
        return driver.CUresult.CUDA_SUCCESS, (self.stamps[end] - self.stamps[begin]) / 1e3

    def cuEventDestroy(self, event):
        self.stamps[event] = None
        return (driver.CUresult.CUDA_SUCCESS,)

    @property
    def clean(self):
        """Return True if nothing is held and nothing is captured."""
        held = [*self.graphs.values(), *self.stamps.values()]
        return self.captured is None and all(value is None for value in held)


class TestTiming:
    """Timing against a stand-in for the driver, whose times are known."""

    @pytest.fixture
    def device(self, monkeypatch):
        monkeypatch.setattr(timing, "SIMULATOR", False)
        monkeypatch.setattr(timing, "driver", made := Device())
        return made

    def time(self, calls, **options):
        return timing.time_interleaved(calls, stream=1, **{"rounds": 5} | options)

    @pytest.mark.parametrize("us", [3.0, 40.0, 1500.0, 30_000.0])
    def test_graphs_leave_launching_out(self, us, device):
        timed = self.time({"any": device.product("any", us)})["any"]
        assert timed.captured
        assert len(timed.us) == 5
        # In spans of ten milliseconds and more, one launch remains.
        assert timed.us == pytest.approx(np.full(5, us), rel=1e-9 if us < timing.SHORT_SPAN_US else 1e-3)
        assert device.clean

    @pytest.mark.parametrize(("us", "replays"), [(100.0, 2), (9_900.0, 2), (10_100.0, 1)])
    def test_short_spans_have_a_lead(self, us, replays, device):
        self.time({"any": device.product("any", us)}, rounds=0)
        before = len(device.log)
        self.time({"any": device.product("any", us)}, rounds=4)
        assert len(device.log) - 2 * before == 4 * replays

    @pytest.mark.parametrize("spoils", [False, True])
    @pytest.mark.parametrize("us", [30.0, 1500.0])
    def test_what_cannot_be_captured_is_launched(self, spoils, us, device):
        """This holds beside other contenders, and even if the refusal invalidates the capture."""

        def refuse():
            device.spoils = spoils
            refused_by_cupy()

        def plainly():
            device.spoils = False

        calls = {"cupy": device.product("cupy", us, refuse, plainly), "torch": device.product("torch", us)}
        timed = self.time(calls)
        assert {name: samples.captured for name, samples in timed.items()} == {"cupy": False, "torch": True}
        for samples in timed.values():
            assert samples.us == pytest.approx(np.full(5, us))
        assert device.clean

    def test_a_capture_that_only_ends_badly(self, device):
        def spoil():
            device.spoils = True

        timed = self.time({"any": device.product("any", 30.0, spoil)})["any"]
        assert not timed.captured
        assert device.clean

    def test_launches_count_for_all_alike(self, device):
        calls = {"short": device.product("short", 2.0), "long": device.product("long", 70.0)}
        timed = self.time(calls, graphs=False)
        assert not any(samples.captured for samples in timed.values())
        assert timed["short"].median == pytest.approx(device.LAUNCH_US, rel=0.01)
        assert timed["long"].median == pytest.approx(70.0)
        assert not device.graphs

    @pytest.mark.parametrize("spoils", [False, True])
    def test_error_of_the_capture_is_kept_if_launching_fails_as_well(self, spoils, device):
        def refuse():
            device.refused, device.spoils = True, spoils
            refused_by_cupy()

        def plainly():
            if hasattr(device, "refused"):
                raise RuntimeError("the stream is broken")

        with pytest.raises(NotImplementedError, match="during stream capture") as raised:
            self.time({"first": device.product("first", 30.0), "any": device.product("any", 30.0, refuse, plainly)})
        assert "the stream is broken" in str(raised.value.__cause__)
        assert device.clean

    def test_interruption_ends_the_capture(self, device):
        def interrupt():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.time({"any": device.product("any", 30.0, interrupt)})
        assert device.clean

    @pytest.mark.parametrize(("us", "graphs"), [(3.0, True), (1500.0, True), (30_000.0, True), (70.0, False)])
    def test_alone_for_as_long_as_the_caller_asks(self, us, graphs, device):
        spans = timing.time_alone(device.product("any", us), stream=1, graphs=graphs)
        for _ in range(5):
            took, captured = next(spans)
            assert took == pytest.approx(us, rel=5e-3)
            assert captured == graphs
        spans.close()
        assert device.clean

    def test_order_is_shuffled(self, device):
        def orders(seed):
            start = len(device.log)
            self.time({name: device.product(name, 20_000.0) for name in "abcd"}, rounds=20, seed=seed)
            names = "".join(calls[0][0] for calls in device.log[start:])[-4 * 20 :]
            return [names[at : at + 4] for at in range(0, len(names), 4)]

        first = orders(1)
        assert all(sorted(order) == list("abcd") for order in first)
        assert len({order[order.index("a") :] + order[: order.index("a")] for order in first}) > 1, "only rotated"
        assert orders(1) == first
        assert orders(2) != first


class TestTimingOfBaselines:
    """cuBLAS through a library whose calls can be captured, and through one whose calls cannot."""

    def baselines(self, *names):
        return [contenders.Contender("cublas", bound, via=name, capturable=name != "cupy") for name in names]

    def test_cupy_cannot_be_captured(self, monkeypatch):
        class Library:
            @staticmethod
            def set_float32_matmul_precision(precision):
                assert precision == "highest"

        monkeypatch.setattr(contenders, "optional", lambda module: Library)
        assert {found.via: found.capturable for found in contenders.cublas()} == {"torch": True, "cupy": False}

    @pytest.mark.parametrize(("refusal", "copies"), [(None, 2), (TypeError, 3), (NotImplementedError, 3)])
    def test_bf16_converts_no_result_that_pytorch_writes_in_fp32(self, refusal, copies, monkeypatch):
        """Versions of PyTorch that cannot do that refuse ``out_dtype``."""
        torch = Torch(refusal)
        monkeypatch.setattr(contenders, "optional", lambda module: torch)
        _, widening, given = contenders.narrow_cublas()
        buffers = DeviceBuffers.random(HostLibrary(), Shape(16, 12, 9), seed=1)
        narrow_a, narrow_b = (in_bf16(one) for one in (buffers.a, buffers.b))
        found = {}
        for contender in (widening, given):
            made = contender.bind(buffers)
            buffers.c[...] = np.nan
            torch.copies = 0
            made.call(0)
            found[contender.stage] = torch.copies
            made.deliver()
            exact = refusal is None and contender is widening
            expected = narrow_a @ narrow_b
            np.testing.assert_array_equal(buffers.c, expected if exact else in_bf16(expected))
        assert found == {"cublas": copies, results.GIVEN_BF16: 0}

    def test_tf32_is_switched_on_for_many_calls_at_once(self, monkeypatch):
        """Plain calls and host time have no switch inside; contenders in turns each have their own setting."""
        torch, switched, seen = Torch(), [], []
        monkeypatch.setattr(contenders, "optional", lambda module: torch)
        (tf32,) = (one for one in contenders.narrow_cublas() if one.precision == "tf32")

        def interleaved(calls, *, rounds, **_options):
            for call in calls.values():
                call(0)
                seen.append((torch.allowed, torch.backends.cuda.matmul.allow_tf32))
            return {name: Samples(np.full(rounds, 50.0), True) for name in calls}

        def plainly(call):
            switched.append(torch.switches)
            for _ in range(100):
                call()
            switched.append(torch.switches)
            seen.append((torch.allowed, torch.backends.cuda.matmul.allow_tf32))
            return 50.0

        def alone(call, stream, *_arguments, **_options):
            return {"steady_us": plainly(lambda: call(stream)), "call_us": 50.0}

        monkeypatch.setattr(run, "time_interleaved", interleaved)
        monkeypatch.setattr(run, "host_time_us", lambda call, **_options: plainly(call))
        monkeypatch.setattr(run.steady_state, "measure", alone)
        (frame,) = run.run(dataclasses.replace(host_plan(tf32), simulated=False))
        assert list(frame["status"]) == ["ok"]
        assert seen == [(True, False), (True, True), (True, True)]
        assert len(set(switched)) == 1
        assert not torch.backends.cuda.matmul.allow_tf32

    @pytest.mark.parametrize(
        ("names", "how"),
        [([], "graphs"), (["torch"], "graphs"), (["torch", "cupy"], "graphs"), (["cupy"], "launches")],
    )
    def test_launches_only_for_cupy_alone(self, names, how, monkeypatch):
        asked = []

        def interleaved(calls, *, rounds, graphs, seed, **_options):
            asked.append((graphs, seed))
            return {name: Samples(np.full(rounds, 50.0), graphs and "cupy" not in name) for name in calls}

        monkeypatch.setattr(run, "time_interleaved", interleaved)
        plan = host_plan(contenders.Contender("stage", bound), *self.baselines(*names))
        plan = dataclasses.replace(plan, simulated=False)
        (frame,) = run.run(plan)
        assert asked == [(how == "graphs", plan.seed)], "contenders were not timed once, together"
        assert plan.timing == how
        assert set(frame["status"]) == {"ok"}
        assert frame["note"].iloc[0] == ""

    @pytest.mark.parametrize(
        ("cupy", "note"), [(49.0, "{0}; through torch: 50 us"), (51.0, "through cupy: 51 us, {0}")]
    )
    def test_fastest_is_the_row_and_says_how(self, cupy, note, monkeypatch):
        def interleaved(calls, *, rounds, **_options):
            return {
                name: Samples(np.full(rounds, cupy if "cupy" in name else 50.0), "cupy" not in name) for name in calls
            }

        monkeypatch.setattr(run, "time_interleaved", interleaved)
        (frame,) = run.run(dataclasses.replace(host_plan(*self.baselines("torch", "cupy")), simulated=False))
        assert list(frame["median_us"]) == [min(cupy, 50.0)]
        assert frame["note"].iloc[0] == note.format(run.NOT_CAPTURED)


class TestCompare:
    @pytest.mark.parametrize(
        ("factor", "verdict"),
        [(1.0, "same"), (1.015, "same"), (1.05, "slower"), (0.985, "same"), (0.9, "faster")],
    )
    def test_verdict_needs_disjoint_spreads(self, factor, verdict):
        compared = results.compare(gpu_frame(warp_tiled=factor), gpu_frame())
        verdicts = compared.set_index("stage")["verdict"]
        assert set(verdicts["warp_tiled"]) == {verdict}
        assert set(verdicts.drop("warp_tiled")) == {"same"}
        assert len(compared) == len(gpu_frame())
        assert compared["verdict"].isin(results.REGRESSIONS).sum() == (len(SHAPES) if verdict == "slower" else 0)

    def test_a_change_below_a_percent_is_none(self):
        old, new = gpu_frame(), gpu_frame(warp_tiled=1.009)
        for frame in (old, new):
            frame["p10_us"] = frame["p90_us"] = frame["median_us"]
        assert not results.compare(new, old)["verdict"].isin(results.REGRESSIONS).any()

    @pytest.mark.parametrize(
        ("factor", "cublas", "verdict"),
        [
            (1.1, 1.1, "same"),
            (1.1, 1.092, "same"),
            (1.1, 1.08, "slower"),
            (1.1, 1.2, "same"),
            (1.1, math.nan, "slower"),
            (0.9, 0.9, "same"),
            (0.9, 0.92, "faster"),
            (0.9, math.nan, "faster"),
        ],
    )
    def test_a_change_that_cublas_shares_is_of_the_clocks(self, factor, cublas, verdict):
        new = gpu_frame(warp_tiled=factor, cublas=cublas)
        for other, expected in (
            (gpu_frame(), verdict),
            (gpu_frame().assign(ratio_to_cublas=math.nan), "slower" if factor > 1 else "faster"),
        ):
            changed = results.compare(new, other).set_index("stage")["verdict"]
            assert set(changed["warp_tiled"]) == {expected}

    def test_a_stage_that_broke_is_a_regression(self):
        new = gpu_frame()
        hit = (new["stage"] == "naive") & (new["m"] == 8192)
        new.loc[hit, ["min_us", "median_us", "p10_us", "p90_us", "gflops"]] = math.nan
        new.loc[hit, "status"] = "wrong"
        found = results.compare(new, gpu_frame())
        found = found[found["verdict"].isin(results.REGRESSIONS)]
        assert list(found["stage"]) == ["naive"]
        assert list(found["verdict"]) == ["broken"]
        assert "broken" in report.changes_table(found).markdown()

    def test_only_what_the_new_run_covers_counts(self):
        new = gpu_frame()
        new = new[(new["stage"] == "naive") & (new["m"] == 4096)].reset_index(drop=True)
        compared = results.compare(new, gpu_frame())
        assert len(compared) == 1
        assert results.compare(new, gpu_frame().assign(cache="cold")).empty

    def test_the_fastest_configuration_stands_for_a_stage(self):
        extra = gpu_frame(warp_tiled=1.5).query("stage == 'warp_tiled'").assign(config="other")
        both = pd.concat([extra, gpu_frame()], ignore_index=True)
        assert set(results.compare(both, gpu_frame())["verdict"]) == {"same"}

    def test_through_a_file(self, tmp_path):
        save(gpu_frame(), ENVIRONMENT, tmp_path)
        old, described = results.load(tmp_path / "results.csv")
        assert described == ENVIRONMENT
        assert set(results.compare(gpu_frame(), old)["verdict"]) == {"same"}
        (tmp_path / "other.csv").write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match="no results file: it has no column stage"):
            results.load(tmp_path / "other.csv")

    @pytest.mark.simulator
    def test_the_simulator_compares_verdicts_alone(self, monkeypatch, tmp_path, capsys):
        arguments = ["--stages=coalesced,naive", "--shape=4,4,4", "--seed=1"]
        assert cli.main([*arguments, f"--out={tmp_path / 'old'}"]) == 0
        frame, described = results.load(tmp_path / "old")
        frame[TIMES] /= 1000
        save(frame, described, tmp_path / "old")
        against = [f"--out={tmp_path / 'new'}", f"--compare={tmp_path / 'old'}"]
        assert cli.main([*arguments, *against]) == 0
        assert "0 of 2 verdicts changed" in capsys.readouterr().out
        monkeypatch.setattr(run, "verify", lambda candidate, *_: candidate.fail(ValueError("broken on purpose")))
        assert cli.main([*arguments, *against]) == 1
        out = capsys.readouterr().out
        text = (tmp_path / "new" / "report.md").read_text()
        for said in (out, text):
            assert "2 of 2 verdicts changed" in said
            assert "broken on purpose" in said
            assert "slower" not in said
            assert "GFLOP/s" not in said

    def test_changes_are_in_the_report(self):
        compared = results.compare(gpu_frame(warp_tiled=1.05), gpu_frame())
        text = report.text_of(gpu_frame(warp_tiled=1.05), ENVIRONMENT, compared)
        assert f"{len(SHAPES)} of {len(compared)} measurements changed" in text
        assert text.count("+5.0 % | slower |") == len(SHAPES)


class TestReport:
    def test_summary_has_a_line_per_stage(self):
        frame = results.frame_of(gpu_row("naive", SHAPES[0], 100.0) | {"stage": stage} for stage in (*STAGES, "cublas"))
        rows = {row[0]: row for row in report.summary_table(frame).rows}
        assert list(rows) == [*STAGES, "cublas"]
        assert rows["naive"][1] == str(SHAPES[0])

    def test_the_simulator_has_verdicts_and_no_times(self):
        shapes = [Shape(16, 12, 9), Shape(8, 8, 8)]
        frame = results.frame_of(
            [
                gpu_row("naive", shapes[0], 100.0, status="ok", error_in_bounds=0.2),
                gpu_row("naive", shapes[1], 100.0, status="ok", error_in_bounds=0.1),
                gpu_row("auto", shapes[0], math.nan, status="wrong", error_in_bounds=7.0, note="too large"),
                gpu_row("auto", shapes[0], 100.0, status="ok", config="other"),
                gpu_row("auto", shapes[1], math.nan, status="unsupported", precision="tf32", error_in_bounds=math.nan),
            ]
        ).assign(steady_us=math.nan)
        table = report.verdict_table(frame)
        assert list(table.headers) == ["stage", "16x12x9", "8x8x8", "error"]
        assert table.rows == [
            ["naive", "correct", "correct", "0.2"],
            ["auto", "wrong", "–", "7"],
            ["auto tf32", "–", "unsupported", "–"],
        ]
        text = report.text_of(frame, ENVIRONMENT | {"simulator": True, "gpu": None})
        assert "too large" in text
        for word in ("GFLOP/s", "cuBLAS", "of peak"):
            assert word not in text

    def test_best_size(self):
        frame = gpu_frame()
        frame.loc[(frame["stage"] == "naive") & (frame["m"] == 4096), "gflops"] *= 2
        (row,) = (row for row in report.summary_table(frame).rows if row[0] == "naive")
        assert row[1] == "4096x4096x4096"

    def test_wide_table_folds(self):
        table = next(report.tables(gpu_frame(), simulated=False, compared=None, model=None))
        assert table.title == "GFLOP/s, in turns"
        lines = table.plain(50).splitlines()
        assert max(map(len, lines)) <= 50
        assert [line.startswith(table.headers[0]) for line in lines].count(True) > 1
        assert set(table.headers[1:]) < set(" ".join(lines).split())
        assert dataclasses.replace(table, rows=[]).plain(50) == ""

    def test_times_of_each_stage_and_shape(self):
        frame = gpu_frame()
        table = report.times_table(frame)
        assert len(table.rows) == len(frame)
        shape, stage, precision, low, mean, high, *_ = table.rows[1]
        assert (shape, stage, precision) == (str(SHAPES[0]), "warp_tiled", "ieee")
        assert float(low) < float(mean) < float(high)
        assert table.title in report.text_of(frame, ENVIRONMENT)

    def test_a_terminal_has_times_of_the_public_function_and_of_cublas(self, monkeypatch):
        frame = gpu_frame()
        title = f"{report.times_table(frame).title}; other stages are in report.md"
        assert title not in report.text_of(frame, ENVIRONMENT, width=400)
        monkeypatch.setattr(report, "MOST_LINES", len(frame) - 1)
        shown = report.text_of(frame, ENVIRONMENT, width=400)
        lines = shown.partition(title)[2].split("\n\n")[0].splitlines()[2:]
        assert {line.split()[1] for line in lines} == {"auto", "cublas"}
        assert len(lines) == 2 * len(SHAPES)
        assert title not in report.text_of(frame, ENVIRONMENT)

    def test_steady_states_are_a_table_of_their_own(self):
        frame = gpu_frame().assign(steady_us=math.nan)
        title = report.steady_table(frame).title
        assert title not in report.text_of(frame, ENVIRONMENT)
        alone = {"steady_us": 10.0, "steady_gflops": 5e4, "steady_ratio_to_cublas": 1.05, "steady_watts": 698.0}
        at = (frame["stage"] == "auto") & (frame["m"] == SHAPES[0].m)
        frame.loc[at, list(alone)] = list(alone.values())
        (row, *_) = report.steady_table(frame).rows
        assert row[:5] == [str(SHAPES[0]), "auto", "ieee", "50,000", "1.050"]
        assert row[6] == "698"
        assert title in report.text_of(frame, ENVIRONMENT)

    def test_markdown_names_the_source(self):
        text = report.text_of(gpu_frame(), ENVIRONMENT)
        for word in ("Test GPU", "580.1", "0.30.4", "0123456789ab", "2026-11-21", "python bench.py", "seed 1"):
            assert word in text
        assert "operands" not in text
        assert "operands standard normal" in report.text_of(gpu_frame(), ENVIRONMENT | {"operands": "standard normal"})

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
    def test_pictures_show_something(self, frame, environment):
        image = pytest.importorskip("matplotlib.image")
        found = plots.pictures(frame, environment)
        assert list(found) == ["gflops_vs_size.png", "roofline.png", "ladder.png"]
        for picture in found.values():
            pixels = image.imread(io.BytesIO(picture))
            assert pixels.shape[0] > 300
            assert pixels.shape[1] > 500
            assert np.ptp(pixels[..., :3], axis=(0, 1)).min() > 0.5
            assert (pixels[..., 0] != pixels[..., 2]).any(), "no colour but grey"

    def test_every_stage_has_its_own_look(self):
        pytest.importorskip("matplotlib")
        looks = plots.styles([*STAGES, "auto", "cublas", "cpu"])
        assert len({(str(look["color"]), look["marker"]) for look in looks.values()}) == len(STAGES) + 3


LIMITS = {"fp32": 60e12, "dram": 4e12, "l2": 8e12, "shared": 30e12}


def written(folder, name="Test GPU", **changes):
    path = folder / ceilings.FILE
    path.write_text(json.dumps({"ceilings": LIMITS | changes, "gpu": {"name": name}}))
    return path


class TestCeilings:
    @pytest.mark.simulator
    @pytest.mark.parametrize(("name", "rows"), [("dram", 4), ("l2", 8), ("shared", 0), ("fp32", 0)])
    def test_kernels_do_what_is_counted(self, name, rows):
        """Every thread stores the number of floats that it read, or of multiply-adds, from memory that holds ones."""
        from numba_gemm.simulator import scheduler

        probe = ceilings.Probe(name, threads=3 * 32, turns=5, rows=rows)
        one, turns, out = np.float32(1), np.float32(probe.turns), np.full((1, probe.threads), np.nan, np.float32)
        memory = np.ones((rows, 4 * probe.threads), np.float32)
        arguments = {"fp32": (turns, one, one, out), "shared": (turns, one, out)}.get(name, (turns, memory, out))
        scheduler.run(ceilings.KERNELS[name], (3, 1, 1), (32, 1, 1), arguments)
        assert set(out[0]) == {probe.expected}
        each = probe.expected - 120 if name == "fp32" else probe.expected  # its chains begin at 0 to 15
        assert probe.work == probe.threads * each * (2 if name == "fp32" else 4)

    @pytest.mark.simulator
    def test_a_block_reads_on_where_another_began(self):
        from numba_gemm.simulator import scheduler

        memory = np.repeat(np.arange(3, dtype=np.float32), 4 * 32)[None] * np.ones((4, 1), np.float32)
        out = np.zeros((1, 3 * 32), np.float32)
        scheduler.run(ceilings.read_global, (3, 1, 1), (32, 1, 1), (np.float32(2), memory, out))
        assert list(out[0, ::32]) == [16 * (0 + 1), 16 * (1 + 2), 16 * (2 + 0)]

    def test_loops_hold_what_is_measured(self):
        """The compiled kernels read 128 bits at a time, or multiply and add, and do little else."""
        found = offline(compile_lab.compiled, "ceilings", (9, 0))
        assert {ceilings.KERNELS[name] for name in found} == set(ceilings.KERNELS.values())
        for name, made in found.items():
            (instructions,) = sass.functions(sass.disassemble(bytes.fromhex(made["code"]))).values()
            bodies = [one.instructions for one in sass.loops(instructions) if len(one.instructions) > 50]
            body = min(bodies, key=len)
            mix, widths = sass.instruction_mix(body), list(sass.access_widths(body))
            assert made["local"] == 0
            if name == "fp32":
                assert (mix["FFMA"], widths) == (ceilings.CHAINS * ceilings.LINKS, [])
                assert len(body) <= mix["FFMA"] + 4
            else:
                load = "LDS" if name == "shared" else "LDG"
                assert widths == [(load, 128)]
                assert mix["FADD"] == 4 * mix[load]
                assert len(body) <= 9 * mix[load]  # an SM issues these in half the time of the load

    def test_probes_of_an_h200(self):
        found = {probe.name: probe for probe in ceilings.probes(132, 60 << 20)}
        assert {probe.threads for probe in found.values()} == {132 * 1024}
        assert found["dram"].work > 30 * (60 << 20)
        assert 16 * found["l2"].rows * found["l2"].threads <= 30 << 20
        assert all(probe.expected < 1 << 24 for probe in found.values())
        assert all(probe.rows % ceilings.ROWS_AT_ONCE == 0 for probe in found.values())

    def test_record_is_read_back(self, tmp_path):
        found = {name: ceilings.Probe(name, 1000, 10, 4) for name in ceilings.KERNELS}
        samples = dict.fromkeys(found, Samples(np.array([1.0, 2.0, 4.0])))
        frame = ceilings.rates(found, samples, ceilings.Ceilings(**LIMITS))
        content = ENVIRONMENT | ceilings.facts(frame)
        (tmp_path / ceilings.FILE).write_text(json.dumps(content))
        read, name = ceilings.load(tmp_path / ceilings.FILE)
        assert name == "Test GPU"
        assert read.fp32 == found["fp32"].work * 1e6
        assert content["medians"]["dram"] == found["dram"].work * 1e6 / 2
        assert content["theoretical"] == LIMITS
        assert ceilings.summary(frame)["fastest"][0] == pytest.approx(read.fp32 / 1e12)

    @pytest.mark.parametrize(
        ("text", "says"),
        [("{", "JSONDecodeError"), ("{}", "KeyError"), ('{"ceilings": 3}', "TypeError"), (None, "expected positive")],
    )
    def test_what_is_no_ceilings(self, text, says, tmp_path):
        path = written(tmp_path, dram=-1)
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=f"holds no ceilings .*{says}.*write it anew"):
            ceilings.load(path)

    @pytest.mark.gpu
    def test_measured_on_a_gpu(self, tmp_path):
        assert lab_main(["ceilings", "--rounds=5", "--out", str(tmp_path)]) == 0
        content = json.loads((tmp_path / ceilings.FILE).read_text())
        for name, most in (("fp32", 1.02), ("dram", 1.02), ("l2", 1.5), ("shared", 1.02)):
            assert 0 < content["medians"][name] <= content["ceilings"][name] <= most * content["theoretical"][name]


class TestModel:
    def test_in_the_whole_program(self, tmp_path, capsys, on_gpu):
        path = written(tmp_path)
        arguments = ["--stages=naive,shared_tile,auto", "--shape=16,12,9", "--model", f"--ceilings={path}"]
        assert cli.main([*arguments, f"--out={tmp_path}"]) == 0
        printed, text = " ".join(capsys.readouterr().out.split()), (tmp_path / "report.md").read_text()
        for said in (printed, text):
            assert "Model: microseconds by ceilings measured on Test GPU, which is not this device" in said
            assert ("ratio is measured over predicted" in said) is on_gpu
            assert "predicted is the longest" in said
        assert [line.split(" | ")[0] for line in text.partition("Model:")[2].splitlines()[4:6]] == [
            "| naive",
            "| shared_tile",
        ]

    def test_no_model_unless_asked(self, tmp_path):
        assert cli.main(["--stages=naive", "--shape=4,4,4", f"--out={tmp_path}"]) == 0
        assert "Model" not in (tmp_path / "report.md").read_text()

    def test_ceilings_of_this_device_else_theory(self, tmp_path, monkeypatch):
        device = dataclasses.replace(SIMULATED_DEVICE, name="Test GPU")
        monkeypatch.setattr(model, "DEFAULT", tmp_path / ceilings.FILE)
        theory, source = model.choose_ceilings(None, device)
        assert source == "theoretical ceilings of Test GPU"
        assert theory.shared == 128 * 132 * 1.98e9
        path = written(tmp_path)
        assert model.choose_ceilings(None, device) == (ceilings.Ceilings(**LIMITS), "ceilings measured on Test GPU")
        assert model.choose_ceilings(path, device)[1] == "ceilings measured on Test GPU"
        assert model.choose_ceilings(None, dataclasses.replace(device, name="Other GPU"))[0] == theory

    def test_stages_have_predictions(self):
        frame = gpu_frame().assign(config=lambda frame: frame["stage"].map(lambda name: default_config(name)))
        device = dataclasses.replace(SIMULATED_DEVICE, name="Test GPU")
        table = model.model_table(frame, ceilings.Ceilings(**LIMITS), "theory", device, simulated=False)
        assert table.title == "Model: microseconds by theory; ratio is measured over predicted"
        assert {row[0] for row in table.rows} == {"naive", "warp_tiled"}
        rows = {tuple(row[:2]): dict(zip(table.headers, row)) for row in table.rows}
        row = rows["warp_tiled", "4096x4096x4096"]
        flop_us = 2 * 4096**3 / 60e6 * (4 * 132 / 512)  # four rounds of 512 tiles
        assert row["bound by"] == "FP32"
        assert float(row["predicted"].replace(",", "")) == pytest.approx(flop_us, abs=0.1)
        assert float(row["DRAM"].replace(",", "")) == pytest.approx(3 * 4 * 4096**2 / 4e6, rel=0.01)
        measured = 100 * 4096**3 / 1e9
        assert float(row["measured"].replace(",", "")) == pytest.approx(measured, abs=0.1)
        assert float(row["ratio"]) == pytest.approx(measured / flop_us, rel=0.01)
        assert rows["naive", "2048x2048x2048"]["DRAM"] == "0"  # 48 MB stay in the L2 cache

    @pytest.mark.parametrize(
        ("size", "cache", "kept"), [(2048, "hot", True), (2048, "cold", False), (4096, "hot", False)]
    )
    def test_what_the_l2_cache_keeps(self, size, cache, kept):
        row = gpu_row("naive", Shape(size, size, size), 1.0, cache=cache, config=default_config("naive"))
        made = model.predicted(row, ceilings.Ceilings(**LIMITS), 60 << 20, 132)
        assert (made.dram == 0) is kept


def default_config(name):
    return STAGES[name].configs[0].name if name in STAGES else ""
