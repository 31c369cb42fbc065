"""Generated blocks: README's tables, those of the benchmark pages, and the stages' measurements."""

import json
import math
import re
import shutil

import pandas as pd
import pytest
from support.results import ENVIRONMENT, SHAPES, gpu_frame, gpu_row, save

import generate
from blocks import published
from generate import BLOCK, GENERATORS
from numba_gemm.kernels.ladder import ASIDE, STAGES
from numba_gemm.lab.bench import counters, results, streamed
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.targets import case, groups, verdicts
from numba_gemm.lab.bench.targets.experiment import EXPERIMENT as TARGETS
from numba_gemm.lab.bench.tensor_ladder import DECOMPOSE
from numba_gemm.lab.harness import command


def save_targets(folder, environment=ENVIRONMENT, **changes):
    """Write the files of `bench.targets`: products with few columns, and one case that failed."""
    shapes = [Shape(64, few, 64) for few in (1, 4)] + [Shape(1, 64, 64)]
    rows = [
        {"group": "vector", "case": str(shape), **shape._asdict(), "us": 2.0, "baseline": baseline, "status": "ok"}
        | {"ratio": ratio + shape.n / 1000, "target": target}
        for shape in shapes
        for baseline, ratio, target in ((groups.COPY, 0.85, 0.85), (results.CUBLAS, 1.1, case.INFORMATION))
    ]
    for way, status in (("torch", "ok"), ("cupy", "error")):
        rows.append(
            {"group": "host", "case": f"{way} arrays, ieee", **Shape(64, 64, 64)._asdict(), "target": 1.0}
            | {"baseline": results.CUBLAS, "status": status, "us": 9.0, "ratio": 0.9 if status == "ok" else math.nan}
        )
    new = {"group": "host", "case": next(iter(verdicts.NEW_SHAPES)), **Shape(64, 64, 64)._asdict(), "target": 0.0}
    rows.append(new | {"baseline": results.CUBLAS, "status": "ok", "us": 140.0, "ratio": 0.1, "rounds": 48})
    frame = pd.DataFrame([row | changes for row in rows])
    files = (frame, verdicts.summary(frame, ("vector", "host"), 2048))
    texts = dict(zip(("targets.csv", TARGETS.summary_file), map(command.csv_text, files)))
    command.write_files(folder, {**texts, "targets.json": command.json_text(environment)})


class TestReadme:
    TEXT = "# T\n\n<!-- results:begin {0} -->\n{1}<!-- results:end {0} -->\n\nafter\n"

    @pytest.fixture
    def folder(self, tmp_path):
        save(gpu_frame(), ENVIRONMENT, tmp_path / "latest")
        (tmp_path / "ladder").mkdir()
        return tmp_path

    def run(self, folder, *arguments, text=None):
        path = folder / "README.md"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        places = [f"--pages={path}", f"--results={folder / 'latest'}", f"--ladder={folder / 'ladder'}"]
        return generate.main([*places, *arguments])

    @pytest.mark.parametrize(("block", "subject"), [("headline", "auto"), ("ladder", "warp_tiled")])
    def test_check_follows_the_results(self, block, subject, folder, capsys):
        assert self.run(folder, "--check", text=self.TEXT.format(block, "")) == 1
        assert "README.md; run python docs/generate.py" in capsys.readouterr().err
        assert (folder / "README.md").read_text() == self.TEXT.format(block, "")
        assert self.run(folder) == 0
        assert self.run(folder, "--check") == 0
        made = (folder / "README.md").read_text(encoding="utf-8")
        assert made.startswith("# T\n\n<!--")
        assert made.endswith("\n\nafter\n")
        for word in ("Test GPU", "580.1", "2026-11-21", "python bench.py", "`tiled_sgemm`"):
            assert word in made
        save(gpu_frame(**{subject: 0.9}), ENVIRONMENT, folder / "latest")
        assert self.run(folder, "--check") == 1

    def test_blocks_of_several_pages(self, folder):
        page = folder / "page.md"
        page.write_text(self.TEXT.format("headline", ""), encoding="utf-8")
        pages = ["--pages", str(folder / "README.md"), str(page)]
        assert self.run(folder, *pages, text=self.TEXT.format("ladder", "")) == 0
        assert "| `warp_tiled` |" in (folder / "README.md").read_text(encoding="utf-8")
        assert "`tiled_sgemm`" in page.read_text(encoding="utf-8")
        page.write_text("no block", encoding="utf-8")
        assert self.run(folder, *pages, "--check") == 1

    def test_every_block_is_published_once(self):
        texts = [page.read_text(encoding="utf-8") for page in generate.PAGES]
        assert sorted(match["name"] for text in texts for match in BLOCK.finditer(text)) == sorted(GENERATORS)

    def test_headline_is_of_the_steady_state(self, folder):
        frame = gpu_frame()
        public = frame["stage"].isin(("auto", "cublas"))
        frame.loc[public, "steady_us"] = frame["median_us"] * frame["stage"].map({"auto": 1.25, "cublas": 2.0})
        frame.loc[public, "steady_gflops"] = 12_340.0
        frame.loc[public, "steady_ratio_to_cublas"] = 1.777
        save(frame, ENVIRONMENT, folder / "latest")
        assert self.run(folder, text=self.TEXT.format("headline", "")) == 0
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert "each contender alone at its steady state" in text
        assert "| 12.3 | 12.3 | 1.777 |" in text
        frame["steady_us"] = math.nan
        save(frame, ENVIRONMENT, folder / "latest")
        assert self.run(folder) == 1

    def test_ratios_alone(self):
        rows = [
            gpu_row("auto", SHAPES[0], 9.0, precision="tf32", steady_us=10.0),
            gpu_row("cublas", SHAPES[0], 9.0, precision="tf32", steady_us=15.0),
            gpu_row("cublas", SHAPES[0], 9.0, steady_us=40.0),
            gpu_row("naive", SHAPES[0], 99.0),
        ]
        found = results.alone(results.frame_of(rows))
        assert list(found["median_us"]) == [10.0, 15.0, 40.0]
        assert list(found["ratio_to_same_precision"]) == [1.5, 1.0, 1.0]

    def test_ladder_gains(self, folder):
        assert self.run(folder, text=self.TEXT.format("ladder", "")) == 0
        lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
        (line,) = (line for line in lines if line.startswith("| `warp_tiled` |"))
        assert [cell.strip() for cell in line.split("|")[2:6]] == ["20.0", "29.9 %", "1.050", "40.00x"]

    def test_targets(self, folder):
        save_targets(folder / "latest")
        assert self.run(folder, text=self.TEXT.format("targets", "")) == 0
        text = (folder / "README.md").read_text(encoding="utf-8")
        table = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in text.splitlines() if line[:1] == "|"}
        cells = {what: [cell.strip() for cell in row] for what, row in table.items()}
        assert cells["matrix times vector, cold: share of a copy's bandwidth"] == (
            ["3", "least", "≥ 0.85", "0.851", "`64x1x64`"]
        )
        assert cells["host, torch arrays, ieee: torch.matmul's time over ours"] == (
            ["1", "least", "≥ 1", "**0.9**, missed", ""]
        )
        assert not any("cupy" in what for what in cells)
        assert "Of the same host times for CuPy and Numba arrays, 0 of " in text
        assert cells["host, new shape, ieee whose kernel is loaded: microseconds per call"] == (
            ["1", "median of 48", "≤ 150", "140", ""]
        )
        assert "Measured on Test GPU" in text
        assert self.run(folder, "--check") == 0
        save_targets(folder / "latest", ratio=0.99)
        assert self.run(folder, "--check") == 1

    def test_targets_are_called_what_they_call_themselves(self):
        assert TARGETS.files == ("targets.csv", "targets.json", TARGETS.summary_file)
        assert "vector" in groups.GROUPS
        assert set(published.STATISTICS) == set(verdicts.STATISTICS)
        assert set(ASIDE) < set(STAGES)

    def test_targets_that_cannot_be_shown(self, folder, capsys):
        assert self.run(folder, text=self.TEXT.format("targets", "")) == 1
        assert "targets_summary.csv: run numba-gemm lab targets --out" in capsys.readouterr().err
        save_targets(folder / "latest", environment={"simulator": True})
        assert self.run(folder) == 1
        assert "targets_summary.csv was not measured on a GPU" in capsys.readouterr().err

    def test_what_is_no_stage_stays_out_of_the_ladder(self, folder):
        frame = gpu_frame()
        others = [frame[frame["stage"] == "naive"].assign(stage=name) for name in ASIDE]
        save(pd.concat([frame, *others]), ENVIRONMENT, folder / "latest")
        assert self.run(folder, text=self.TEXT.format("ladder", "")) == 0
        shown = (folder / "README.md").read_text(encoding="utf-8")
        assert not any(name in shown for name in ASIDE)

    @pytest.mark.parametrize(
        ("spoil", "says"),
        [
            (lambda folder: (folder / "latest" / "results.csv").unlink(), "no results at"),
            (lambda folder: (folder / "latest" / "environment.json").unlink(), "no environment.json"),
            (lambda folder: (folder / "README.md").unlink(), "there is no"),
            (lambda folder: (folder / "ladder").rmdir(), "there is no"),
            (
                lambda folder: (folder / "ladder" / "naive.py").write_text("STAGE = 1\n"),
                "naive.py: a stage begins with a docstring",
            ),
            (
                lambda folder: (
                    (folder / "latest" / counters.COUNTERS).write_text("a\n1\n")
                    and (folder / "ladder" / "naive.py").write_text('"""naive: x."""\nSTAGE = 1\n')
                ),
                "counters.csv has no column stage",
            ),
            (lambda folder: (folder / "README.md").write_text("no block"), "no block between"),
            (
                lambda folder: (folder / "README.md").write_text("<!-- results:begin x -->\n<!-- results:end x -->"),
                "unknown block x",
            ),
            (
                lambda folder: save(gpu_frame(), ENVIRONMENT | {"simulator": True}, folder / "latest"),
                "not measured on a GPU",
            ),
            (
                lambda folder: save(gpu_frame().assign(status="wrong"), ENVIRONMENT, folder / "latest"),
                "wrong or failed",
            ),
            (
                lambda folder: save(gpu_frame().query("m == 2048"), ENVIRONMENT, folder / "latest"),
                "no stage at 4096x4096x4096",
            ),
        ],
    )
    def test_errors(self, spoil, says, folder, capsys):
        (folder / "README.md").write_text(self.TEXT.format("ladder", ""))
        spoil(folder)
        assert self.run(folder, "--check") == 1
        assert says in capsys.readouterr().err

    def test_streamed(self, folder, capsys):
        text = self.TEXT.format("streamed", "")
        assert self.run(folder, text=text) == 1
        assert "streamed.csv: run numba-gemm lab streamed --out" in capsys.readouterr().err
        row = {"size": 512, "precision": "ieee", "operands": streamed.ON_DEVICE, "seconds": 1.5, "tflops": 60.0}
        other = row | {"operands": "pageable", "memory_limit": 4e9, "seconds": 2.0, "predicted_s": 1.9}
        other |= {"bound_by": "products", "peak_bytes": 3.5e9, "of_in_memory": 0.75}
        frame = pd.DataFrame([row | {"of_in_memory": 1.0}, other])
        frame.to_csv(folder / "latest" / "streamed.csv", index=False)
        (folder / "latest" / "streamed.json").write_text(json.dumps(ENVIRONMENT), encoding="utf-8")
        assert self.run(folder, text=text) == 0
        made = (folder / "README.md").read_text(encoding="utf-8")
        assert "At 512 x 512 x 512:" in made
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.splitlines() if "| `ieee`" in line]
        assert lines[0] == ["`ieee`", streamed.ON_DEVICE, "–", "–", "1.50", "–", "–", "60.0", "1.00"]
        assert lines[1] == ["`ieee`", "pageable", "4 GB", "3.50 GB", "2.00", "1.90", "products", "60.0", "0.75"]

    @pytest.fixture
    def tensor_folder(self, folder):
        """Write the files of `bench.tensor_ladder` for four stages, and the sources of two."""
        place = folder / "latest" / published.PRECISIONS_FOLDER
        save(gpu_frame(), ENVIRONMENT, place)
        where = {"m": 64, "n": 64, "k": 64}
        rows = [{"stage": results.CUBLAS, "precision": "ieee", "tflops": 40.0, "ratio_to_cublas": 1.0}]
        rows += [{"stage": DECOMPOSE, "precision": "bf16x6", "ratio_to_cublas": 9.0}]
        rows += [{"stage": "one_warp", "precision": "bf16", "tflops": 4.0, "ratio_to_cublas": 0.1}]
        for i, name in enumerate(("one_warpgroup", "bulk_copies", "persistent")):
            speed = 80.0 * 1.25**i
            rows.append({"stage": name, "precision": "bf16x6", "tflops": speed, "ratio_to_cublas": speed / 40})
        errors = {"error_median": 1e-8, "error_max": 1e-7, "median_us": 100.0, "registers": 90.0}
        pd.DataFrame([where | errors | row for row in rows]).to_csv(place / "tensor_ladder.csv", index=False)
        special = [("bf16x6", "", "none", 0, 1.0)]
        special += [("bf16x6", *of, count, 1.5 * count) for of in (("A", "nan"), ("B", "inf")) for count in (1, 64)]
        frame = pd.DataFrame(special, columns=["precision", "operand", "value", "lines", "times_as_long"])
        frame.assign(**where).to_csv(place / "special_values.csv", index=False)
        for name in ("tensor_ladder", "special_values"):
            (place / f"{name}.json").write_text(json.dumps(ENVIRONMENT), encoding="utf-8")
        (folder / "tensor_core").mkdir()
        for name in ("one_warp", "bulk_copies", "decompose", "sums"):
            (folder / "tensor_core" / f"{name}.py").write_text(f'"""{name}: some.\n\nLimits: many.\n"""\n')
        return folder

    def test_tensor_ladder(self, tensor_folder):
        place = f"--tensor-core={tensor_folder / 'tensor_core'}"
        text = self.TEXT.format("tensor_ladder", "") + self.TEXT.format("special_values", "")
        assert self.run(tensor_folder, place, "--check", text=text) == 1
        assert self.run(tensor_folder, place) == 0
        assert self.run(tensor_folder, place, "--check") == 0
        made = (tensor_folder / "README.md").read_text(encoding="utf-8")
        cells = {line.split("|")[1].strip(): line for line in made.splitlines() if line.startswith("| `")}
        cells = {name: [cell.strip() for cell in line.split("|")[2:-1]] for name, line in cells.items()}
        assert cells["`bulk_copies`"] == ["100.0", "2.50", "1.25x", "1e-08", "1e-07"]
        assert cells["`one_warp` in `bf16`"] == ["4.0", "0.10", "–", "1e-08", "1e-07"]
        assert cells["`one_warpgroup`"] == ["80.0", "2.00", "–", "1e-08", "1e-07"]
        assert "100 us more, 50 % of both together" in made
        assert "| `bf16x6` | NaN in rows of A | 1.50 | 96.00 |" in made
        assert "| `bf16x6` | infinity in columns of B | 1.50 | 96.00 |" in made
        assert made.count("take at most 2 times as long") == 2
        stage = (tensor_folder / "tensor_core" / "bulk_copies.py").read_text()
        assert "100.0 TFLOP/s of bf16x6 at 64x64x64" in stage
        assert "1.25 times one_warpgroup" in " ".join(stage.split())
        assert "Measured on Test GPU" in made
        first = " ".join((tensor_folder / "tensor_core" / "one_warp.py").read_text().split())
        assert (
            "Measured: 4.0 TFLOP/s of bf16 at 64x64x64 on an NVIDIA Test GPU, 0.10 of cuBLAS SGEMM, in turns; 90"
            in first
        )
        for other in ("decompose", "sums"):
            assert "Measured" not in (tensor_folder / "tensor_core" / f"{other}.py").read_text()

    def test_precision_summary(self, tensor_folder, capsys):
        text, place = self.TEXT.format("precision_summary", ""), f"--tensor-core={tensor_folder / 'tensor_core'}"
        assert self.run(tensor_folder, place, text=text) == 1
        assert "holds no bf16x6, fp16x3, tf32 at 4096x4096x4096" in capsys.readouterr().err
        frame = gpu_frame()
        auto = frame[frame["stage"] == "auto"]
        others = [auto.assign(precision=name, steady_ratio_to_cublas=2.5) for name in ("bf16x6", "fp16x3", "tf32")]
        save(pd.concat([frame, *others]), ENVIRONMENT, tensor_folder / "latest" / published.PRECISIONS_FOLDER)
        assert self.run(tensor_folder, place) == 0
        made = (tensor_folder / "README.md").read_text(encoding="utf-8")
        assert made.count(" (2.50)") == 3
        assert "up to 96.00 times as long when rows of A contain NaN or an infinity, and up to 96.00 times" in made

    def test_precisions_alone(self, tmp_path):
        """The pages state ratios of contenders that were measured alone, and nothing about turns."""
        folder = tmp_path / "latest"
        shutil.copytree(generate.RESULTS_FOLDER, folder)
        table = folder / published.PRECISIONS_FOLDER / "results.csv"
        frame = pd.read_csv(table)
        public = frame["stage"].isin(("auto", "cublas")) & frame["median_us"].notna()
        slower = frame["precision"].map({"ieee": 1.0, "bf16x6": 1.25}).fillna(1.5)
        frame.loc[public, "steady_us"] = slower * frame["median_us"]
        frame.loc[public, "steady_gflops"] = frame["gflops"] / slower
        frame.loc[public, "steady_ratio_to_cublas"] = 3.0 / slower
        frame.to_csv(table, index=False)
        found = published.Published(folder)
        summary, shown, targets = (
            GENERATORS[name](found) for name in ("precision_summary", "precisions", "precision_targets")
        )
        for text in (summary, shown):
            assert "each contender alone at its steady state" in text
        assert "the first calls after a pause are faster" in shown
        assert re.findall(r"`(\w+)` [\d.]+ \(([\d.]+)\)", summary) == (
            [("bf16x6", "2.40"), ("fp16x3", "2.00"), ("tf32", "2.00")]
        )
        assert re.search(r"\| `bf16x6` \|( [\d.]+ \(2\.40\) \|){5}", shown)
        assert "| ≥ 2.3 | 2.4 | " in targets
        assert "| ≥ 3.6 | **2**, missed | " in targets
        for text in (generate.generate(generate.PAGES[0], found), shown, targets):
            assert not re.search("took turns|take turns|in turns with other|burst|flatter|given here", text)

    @pytest.mark.parametrize("block", ["tensor_ladder", "special_values"])
    def test_what_was_not_measured_is_named(self, block, folder, capsys):
        assert self.run(folder, text=self.TEXT.format(block, "")) == 1
        assert f"{block}.csv: run numba-gemm lab {block}" in capsys.readouterr().err


class TestDocstrings:
    """The paragraph `Measured: ` of a stage's docstring."""

    TEXT, run = TestReadme.TEXT, TestReadme.run
    HEAD = '"""{0}: a stage of a test.\n\nIdea: something that goes on\n    below. Limits: of a line, no paragraph.\n'
    LIMITS = "Limits: what a person\n    wrote.\n"
    CODE = '"""\n\nfrom .stage import Stage\n\nTEXT = """Limits: none."""\n\nSTAGE = Stage()\n'
    OLD = "Measured: long ago, in so many words\n    that they took a second line.\n"

    @pytest.fixture
    def folder(self, tmp_path):
        save(gpu_frame(), ENVIRONMENT, tmp_path / "latest")
        (tmp_path / "ladder").mkdir()
        for stage in ("naive", "warp_tiled"):
            self.stage(tmp_path, stage).write_text(self.HEAD.format(stage) + self.LIMITS + self.CODE)
        (tmp_path / "ladder" / "stage.py").write_text('"""No stage."""\n')
        (tmp_path / "README.md").write_text(self.TEXT.format("ladder", ""))
        return tmp_path

    def stage(self, folder, name):
        return folder / "ladder" / f"{name}.py"

    def count(self, folder, config=STAGES["warp_tiled"].configs[0].name, **changes):
        """Write counters of warp_tiled in the format of `bench.counters`."""
        frame = gpu_frame()
        here = (frame["stage"] == "warp_tiled") & (frame[["m", "n", "k"]] == 4096).all(axis=1)
        row = dict(zip(counters.KEY, ("warp_tiled", config, 4096, 4096, 4096)))
        row |= {"time_us": frame[here]["median_us"].iloc[0]} | changes
        pd.DataFrame([row | {"registers": 215, "fma_pipe_percent": 74.68}]).to_csv(
            folder / "latest" / counters.COUNTERS, index=False
        )
        kinds = [{"op": "LDS", "excess_percent": 50.0}, {"op": counters.TOTAL, "excess_percent": 0.04}]
        pd.DataFrame([row | kind for kind in kinds]).to_csv(folder / "latest" / counters.WAVEFRONTS, index=False)

    SLOWEST = "Measured: 0.50 TFLOP/s at 4096x4096x4096 on an NVIDIA Test GPU, 0.03 of cuBLAS SGEMM.\n"
    FASTEST = (
        "Measured: 20.0 TFLOP/s at 4096x4096x4096 on an NVIDIA Test GPU, 1.05 of cuBLAS SGEMM and 40.00 times naive"
    )

    @pytest.mark.parametrize(
        ("before", "after"),
        [("", LIMITS), (OLD, LIMITS), ("", ""), (OLD, ""), (LIMITS, OLD), (OLD + LIMITS, OLD)],
        ids=["new", "old", "new, no limits", "old, no limits", "old after limits", "twice"],
    )
    def test_place(self, before, after, folder):
        path = self.stage(folder, "naive")
        path.write_text(self.HEAD.format("naive") + before + after + self.CODE)
        assert self.run(folder) == 0
        limits = self.LIMITS if self.LIMITS in before + after else ""
        assert path.read_text() == self.HEAD.format("naive") + self.SLOWEST + limits + self.CODE
        assert self.run(folder, "--check") == 0

    def test_summary_alone(self, folder):
        path = self.stage(folder, "naive")
        path.write_text('"""naive: x."""\nSTAGE = 1\n')
        assert self.run(folder) == 0
        assert path.read_text() == f'"""naive: x.\n\n{self.SLOWEST}"""\nSTAGE = 1\n'
        assert self.run(folder, "--check") == 0

    @pytest.mark.parametrize("name", ["async_copy", "warp_tiled"])
    def test_what_was_not_measured_has_none(self, name, folder):
        """Neither a stage without a row, nor one whose configurations are others now."""
        frame = gpu_frame()
        frame.loc[frame["stage"] == "warp_tiled", "config"] = "another"
        save(frame, ENVIRONMENT, folder / "latest")
        path = self.stage(folder, name)
        path.write_text(self.HEAD.format(name) + self.OLD + self.LIMITS + self.CODE)
        assert self.run(folder) == 0
        assert path.read_text() == self.HEAD.format(name) + self.LIMITS + self.CODE
        path.write_text(f'"""{name}: x."""\nSTAGE = 1\n')
        assert self.run(folder) == 0
        assert path.read_text() == f'"""{name}: x."""\nSTAGE = 1\n'

    def test_check_sees_a_docstring(self, folder, capsys):
        assert self.run(folder) == 0
        assert (folder / "ladder" / "stage.py").read_text() == '"""No stage."""\n'
        path = self.stage(folder, "naive")
        for spoilt in (path.read_text().replace("0.50", "0.51"), path.read_text().replace(self.SLOWEST, "")):
            path.write_text(spoilt)
            capsys.readouterr()
            assert self.run(folder, "--check") == 1
            assert "naive.py; run python docs/generate.py" in capsys.readouterr().err
            assert path.read_text() == spoilt
            assert self.run(folder) == 0
        self.count(folder)
        assert self.run(folder, "--check") == 1

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({}, "; 215 registers per thread, 74.7 % of the FMA pipe, 0.0 % excess shared wavefronts."),
            ({"config": "another"}, "."),
            ({"k": 1024}, "."),
            ({"time_us": 1.0}, "."),
            (None, "."),
        ],
        ids=["counters", "of another configuration", "of another shape", "of another kernel", "none"],
    )
    def test_counters(self, changes, says, folder):
        if changes is not None:
            self.count(folder, **changes)
        assert self.run(folder) == 0
        text = self.stage(folder, "warp_tiled").read_text()
        paragraph = text[text.index("Measured: ") : text.index("Limits: what")]
        assert " ".join(paragraph.split()) == self.FASTEST + says
        first, *rest = paragraph.splitlines()
        assert max(map(len, (first, *rest))) <= 118
        assert all(line.startswith("    ") for line in rest)
        assert bool(rest) is (len(says) > 1)

    def test_stage_for_few_columns(self, folder, capsys):
        path = self.stage(folder, "thin")
        path.write_text(self.HEAD.format("thin") + self.OLD + self.LIMITS + self.CODE)
        assert self.run(folder) == 1
        assert "targets.csv: run numba-gemm lab targets --out" in capsys.readouterr().err
        save_targets(folder / "latest")
        assert self.run(folder) == 0
        text = path.read_text()
        assert " ".join(text[text.index("Measured: ") : text.index("Limits: what")].split()) == (
            "Measured: 64x64 times 1 and 4 columns on an NVIDIA Test GPU, by tiled_sgemm, A not in the cache: 0.85 and "
            "0.85 of a copy's bandwidth, 1.10 and 1.10 of cuBLAS SGEMM."
        )
        assert self.run(folder, "--check") == 0
        save_targets(folder / "latest", status="wrong")
        assert self.run(folder) == 1
        assert "holds no product of the group vector" in capsys.readouterr().err

    def save_random(self, folder, rows):
        texts = {"random_products.csv": command.csv_text(pd.DataFrame(rows))}
        command.write_files(folder / "latest", texts | {"random_products.json": command.json_text(ENVIRONMENT)})

    def test_stage_for_small_matrices(self, folder, capsys):
        path = self.stage(folder, "small_matrices")
        path.write_text(self.HEAD.format("small_matrices") + self.OLD + self.LIMITS + self.CODE)
        assert self.run(folder) == 1
        assert "batches.csv: run numba-gemm lab batches --out" in capsys.readouterr().err
        columns = "matrices", "m", "stage", "drawn", "ieee_ratio"
        rows = [
            *((65536, 2, "small_matrices", False, 42.0), (65536, 3, "small_matrices", False, 28.94)),
            *(
                (9999, 4, "small_matrices", False, 2.254),
                (50, 32, "thin", False, 1.1),
                (7, 5, "small_matrices", True, 3.0),
            ),
        ]
        self.save_batches(folder, pd.DataFrame(rows, columns=columns))
        assert self.run(folder) == 0
        text = path.read_text()
        assert " ".join(text[text.index("Measured: ") : text.index("Limits: what")].split()) == (
            "Measured: products of 3x3 and 4x4 matrices, 9,999 to 65,536 of them, on an NVIDIA Test GPU, by "
            "tiled_sgemm: 28.9 and 2.25 times as fast as cuBLAS SGEMM."
        )
        self.save_batches(folder, pd.DataFrame(rows[:1], columns=columns))
        assert self.run(folder) == 1
        assert "holds no square matrices that small_matrices multiplies" in capsys.readouterr().err

    def save_batches(self, folder, frame):
        texts = {"batches.csv": command.csv_text(frame), "batches.json": command.json_text(ENVIRONMENT)}
        command.write_files(folder / "latest", texts)

    def test_stage_for_short_sums(self, folder, capsys):
        path = self.stage(folder, "short_sums")
        path.write_text(self.HEAD.format("short_sums") + self.OLD + self.LIMITS + self.CODE)
        assert self.run(folder) == 1
        assert "random_products.csv: run numba-gemm lab random_products --out" in capsys.readouterr().err
        rows = [{"k": 33, "ieee_ratio": 0.5}, {"k": 32, "ieee_ratio": 0.8}, {"k": 1, "ieee_ratio": 1.8}]
        self.save_random(folder, rows)
        assert self.run(folder) == 0
        text = path.read_text()
        assert " ".join(text[text.index("Measured: ") : text.index("Limits: what")].split()) == (
            "Measured: 2 random products of up to 32 terms on an NVIDIA Test GPU, by tiled_sgemm: 1.20 of cuBLAS SGEMM "
            "in the geometric mean, 0.80 or more of it in each."
        )
        self.save_random(folder, rows[:1])
        assert self.run(folder) == 1
        assert "holds no product of up to 32 terms" in capsys.readouterr().err

    def test_regression_and_no_cublas(self, folder):
        frame = gpu_frame(warp_tiled=50.0).query("stage != 'cublas'").assign(ratio_to_cublas=math.nan)
        save(frame, ENVIRONMENT, folder / "latest")
        assert self.run(folder) == 0
        assert "0.40 TFLOP/s at 4096x4096x4096 on an NVIDIA Test GPU, 0.80 times naive." in (
            " ".join(self.stage(folder, "warp_tiled").read_text().split())
        )
        assert "on an NVIDIA Test GPU.\n" in self.stage(folder, "naive").read_text()
