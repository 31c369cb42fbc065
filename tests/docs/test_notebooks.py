"""The notebooks run from top to bottom, in processes of their own; and what they are made of, `lessons`."""

from __future__ import annotations

import ast
import base64
import fcntl
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.compile_stages import compiler_environment

from numba_gemm.course import notebook as lessons
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.models.occupancy import LIMITS
from numba_gemm.models.roofline import FP32_LANES_PER_SM

FOLDER = Path(__file__).parents[2] / "notebooks"
_spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)
NAMES = run.names()


def outputs(notebook, kind):
    """All outputs of a MIME type."""
    found = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return [out["data"][kind] for out in found if kind in out.get("data", {})]


def printed(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return "".join(out["text"] for cell in cells for out in cell.outputs if out["output_type"] == "stream")


def test_there_is_one_for_each_part_of_the_climb():
    assert [name[:2] for name in NAMES] == [f"{number:02}" for number in range(13)]
    text = "".join((FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in NAMES)
    for stage in STAGES:
        assert re.search(rf'(source\(|difference\("\w+", )"{stage}"', text), f"no notebook shows {stage}"


def test_the_first_notebook_runs():
    """In the environment that a reader's Jupyter has: without the simulator's switch, which the notebook chooses.

    ``.ci/run`` runs all notebooks, in an environment with the extras that a reader installs.
    """
    name = NAMES[0]
    command = [sys.executable, str(FOLDER / "run.py"), name]
    done = subprocess.run(command, env=compiler_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{name}: \d+ s$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "unknown notebook nope; known are 00_start_here, 01_"),
        (["--jobs=0"], "0 is not at least 1"),
        (["--write", "--sync"], "not allowed with argument"),
        (["--sync", "--refresh"], "not allowed with argument"),
    ],
)
def test_a_wrong_command_line(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.exhaustive
def test_a_failure_leaves_the_others_to_run(tmp_path):
    shutil.copy(FOLDER / "run.py", tmp_path)
    cells = {"00_dies": "import os; os._exit(1)", "01_sleeps": "import time; time.sleep(600)", "02_raises": "1 / 0"}
    for name, cell in (cells | {"03_works": "1 + 1"}).items():
        (tmp_path / f"{name}.py").write_text(cell + "\n")
    command = [sys.executable, str(tmp_path / "run.py"), "--seconds=10", "--write", "--jobs=2"]
    environment = compiler_environment() | {"PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.findall(r"^\* (\w+) failed:$", done.stdout, re.MULTILINE) == list(cells), done.stdout + done.stderr
    assert [path.stem for path in tmp_path.glob("*.ipynb")] == ["03_works"]


@pytest.mark.parametrize("name", NAMES)
def test_both_files_have_the_same_cells(name):
    """The outputs that are shown are of the code that is shown."""
    made, stored = run.read(name), run.stored(name)
    assert [(cell.cell_type, cell.source) for cell in made.cells] == [
        (cell.cell_type, cell.source) for cell in stored.cells
    ]
    for cell in stored.cells:
        if cell.cell_type == "code":
            assert cell.execution_count, f"a cell of {name} has never run: {cell.source}"
            if shown := run.listing(cell.source):
                assert cell.outputs[0]["data"]["text/markdown"] == shown._repr_markdown_(), (
                    "run.py --sync lists it anew"
                )


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_of_a_gpu(name):
    stored = run.stored(name)
    text = printed(stored)
    assert re.search(r"(Times are measured on|Kernels run on) this machine's GPU: NVIDIA H200", text)
    assert "NVIDIA H200" in stored.cells[0].source, "the first cell says whose outputs these are"
    assert outputs(stored, "image/png"), "a notebook without a picture"
    assert not [out for cell in stored.cells for out in cell.get("outputs", []) if out["output_type"] == "error"]


@pytest.mark.parametrize("name", NAMES)
def test_pictures_have_alternative_text(name):
    cells = run.stored(name).cells
    drawn = [out for cell in cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    assert drawn
    for output in drawn:
        text = output.metadata["image/png"]["alt"]
        assert len(text) > 40
        assert output.data["text/plain"] == text


def test_pictures_have_a_palette():
    drawn = np.full((90, 200, 3), 255, np.uint8)
    drawn[20:60, 10:170] = np.arange(160)[:, np.newaxis]
    whole = io.BytesIO()
    Image.fromarray(drawn).save(whole, "PNG")
    made = run.with_palette(base64.b64encode(whole.getvalue()).decode())
    with Image.open(io.BytesIO(base64.b64decode(made))) as opened:
        assert opened.mode == "P"
        np.testing.assert_array_equal(opened.convert("RGB"), drawn)
    assert run.with_palette(made) == made


@pytest.mark.parametrize("name", NAMES)
def test_stored_pictures_are_small(name):
    assert max(map(len, outputs(run.stored(name), "image/png"))) < 150_000


def test_a_player_is_stored_small():
    found = [text for text in outputs(run.stored(NAMES[0]), "text/html") if "<iframe srcdoc=" in text]
    assert len(found) == 1
    assert len(found[0]) < 40_000


def test_outputs_are_kept_by_what_a_cell_does(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "HERE", tmp_path)
    (tmp_path / "00_few.py").write_text("# %%\n1 + 1\n\n# %%\n2 + 2\n\n# %%\nmeasure(3)\n")
    made = run.read("00_few")
    for number, cell in enumerate(made.cells, 1):
        cell.execution_count, cell.outputs = number, [run.nbformat.v4.new_output("stream", text=f"{number}")]
    run.write("00_few", made)
    (tmp_path / "00_few.py").write_text("# %%\n# One.\n1  +  1\n\n# %%\n2 + 3\n\n# %%\nmeasure(3)\n")
    cells = run.synchronised("00_few").cells
    assert [[out.text for out in cell.outputs] for cell in cells] == [["1"], [], ["3"]]

    def executed(name, seconds=0):
        new = run.read(name)
        for number, cell in enumerate(new.cells, 1):
            cell.execution_count, cell.outputs = number, [run.nbformat.v4.new_output("stream", text="new")]
        return new

    monkeypatch.setattr(run, "execute", executed)
    for redraw, first in ((False, "1"), (True, "new")):
        cells = run.refreshed("00_few", redraw=redraw).cells
        assert [[out.text for out in cell.outputs] for cell in cells] == [[first], ["new"], ["3"]]
    (tmp_path / "00_few.py").write_text("# %%\nmeasure(4)\n")
    with pytest.raises(ValueError, match="a cell of 00_few that has changed measures"):
        run.refreshed("00_few")
    (tmp_path / "00_few.py").write_text("# %%\nnotebook.begin(on_gpu=True)\n")
    with pytest.raises(ValueError, match="kernels of 00_few run on a GPU"):
        run.refreshed("00_few", redraw=True)


def test_a_listing_is_the_file():
    text = Path(lessons.__file__).parents[1] / "kernels" / "ladder" / "naive.py"
    assert str(lessons.source("naive", doc=True)) == text.read_text(encoding="utf-8")
    code = lessons.source("naive")
    assert code.text.startswith("from numba import cuda")
    assert code._repr_markdown_().startswith("```python\nfrom numba")
    assert str(lessons.source("tile_loader", function="tile_loader")).startswith("@lru_cache")
    assert "class Prediction" in str(lessons.source("models/prediction", function="Prediction"))
    with pytest.raises(ValueError, match="neither a stage nor a module"):
        lessons.source("no such")
    with pytest.raises(ValueError, match=r"naive\.py has no function or class 'sum'"):
        lessons.source("naive", function="sum")


def test_a_difference_is_of_code_alone():
    lines = str(lessons.difference("naive", "coalesced")).splitlines()
    assert lines[:2] == ["--- naive.py", "+++ coalesced.py"]
    assert any(line.startswith("-    row = cuda.blockIdx.x") for line in lines)
    assert not any("Bottleneck" in line for line in lines)


def test_a_difference_can_be_of_device_code_alone():
    lines = str(lessons.difference("naive", "coalesced", device_only=True)).splitlines()
    assert [line[0] for line in lines if line[0] in "+-"] == ["-", "+", *"-+", *"--++"]
    whole = str(lessons.difference("vectorized", "conflict_free", device_only=True))
    assert "+def conflict_free(alpha" in whole
    assert "require" not in whole
    assert "def multiply_tile(" in str(lessons.difference("conflict_free", "double_buffered", device_only=True))


def test_a_prediction_is_compared(capsys):
    lessons.predict("sectors", 8, unit="per request").reveal(32, because="Rows.")
    lessons.predict("gain", 20).reveal(12.97, model=16.6)
    lessons.predict("gain", np.float32(13)).reveal(12.97, model=12.97)
    lessons.predict("races", 3).reveal(0)
    lessons.predict("latency", 500, unit="clocks").reveal(625, measured=True)
    lessons.predict("floats", 100).reveal(120, model=120, measured=False)
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        "sectors: you predict 8 per request",
        "sectors: you 8 | counted 32 per request | yours is 0.25 times that",
        "Rows.",
    ]
    ratios = "yours is 1.542 times that, the model's is 1.28 times that"
    assert said[4] == f"gain: you 20 | model 16.6 | measured 12.97 | {ratios}"
    assert said[6].endswith("measured 12.97 | yours is within 5%, the model's is correct")
    assert said[8].endswith("counted 0 | yours is not zero")
    assert said[10] == "latency: you 500 | measured 625 clocks | yours is 0.8 times that"
    assert said[12] == "floats: you 100 | model 120 | counted 120 | yours is 0.8333 times that, the model's is correct"


def test_a_notebook_runs_on_without_a_prediction(capsys):
    lessons.predict("sectors", ..., unit="per request").reveal(32)
    lessons.predict("gain", "a lot").reveal(12.97, model=16.6)
    lessons.predict("gain", True).reveal(1, tolerance=0)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "sectors: write your prediction (per request) in place of ...",
        "sectors: no prediction | counted 32 per request",
    ]
    assert said[2] == "gain: got 'a lot'; expected a number, such as 128, or ... for no prediction"
    assert said[3].startswith("gain: no prediction | model 16.6 | measured 12.97 | the model's is 1.28")
    assert said[4:] == [said[2].replace("'a lot'", "True"), "gain: no prediction | counted 1"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_asks_before_it_shows(name):
    cells = [cell.source for cell in run.read(name).cells if cell.cell_type == "code"]
    text = "\n".join(cells)
    guesses = re.findall(r"^(\w+) = notebook\.predict\(", text, re.MULTILINE)
    assert len(guesses) >= 3
    for guess in guesses:
        asked, shown = (
            next(i for i, cell in enumerate(cells) if found in cell) for found in (f"{guess} =", f"{guess}.reveal(")
        )
        assert asked < shown, guess
    assert text.count("notebook.predict(") == len(guesses)


@pytest.mark.parametrize("name", NAMES[:12])
def test_a_lesson_shows_the_model_beside_the_measurement(name):
    text = "\n".join(cell.source for cell in run.read(name).cells if cell.cell_type == "code")
    assert "model=" in text


@pytest.mark.parametrize("name", NAMES[1:9])
def test_a_lesson_has_the_same_in_numpy_and_one_whole_kernel(name):
    cells = [cell.source for cell in run.read(name).cells if cell.cell_type == "code"]
    assert re.search(r"assert np\.allclose\(.*@ ", "\n".join(cells))
    listed = [re.fullmatch(r'notebook\.source\("(\w+)"(, function="\w+")?\)', cell) for cell in cells]
    assert {match[1] for match in listed if match} & set(STAGES)
    for cell in cells:
        if "notebook.difference(" in cell:
            assert "device_only=True" in cell
        assert [line for line in cell.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_head_of_a_notebook_says_what_it_takes(name):
    head = run.read(name).cells[0].source
    assert re.match(r"# \d+\. .+\n\n\*Before this: (.|\n)+? Time: about (\d+) minutes\.", head)
    minutes = re.search(r"about (\d+) minutes", head)[1]
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| \[{name}\]\({name}\.ipynb\) \|.*\| {minutes} \|$", table, re.MULTILINE)


def test_the_course_takes_as_long_as_it_says():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    minutes = [int(found) for found in re.findall(r"^\| \[\d.*\| (\d+) \|$", table, re.MULTILINE)]
    assert len(minutes) == len(NAMES)
    assert f"about {sum(minutes) / 60:.0f} hours" in table
    assert sum(minutes[:5]) / 60 == pytest.approx(4, abs=0.5)


def test_the_ladder_is_not_shown_before_it_is_climbed():
    text = "\n".join(cell.source for cell in run.read(NAMES[0]).cells if cell.cell_type == "code")
    assert "ladder_chart" not in text
    assert re.findall(r"measure\((.*)\)", text) == ['"naive"']


def test_the_glossary_names_the_notebooks_of_its_terms():
    text = (FOLDER.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- (\*\*(?:.|\n(?!- |\n))+)", text, re.MULTILINE)
    assert len(entries) > 50
    books = [
        " ".join("".join(cell.source for cell in run.read(name).cells).replace("#", "").split()).lower()
        for name in NAMES
    ]
    for entry in entries:
        entry = " ".join(entry.split())
        for part in re.finditer(r"((?:(?!\(\d).)*)\((\d+(?:, \d+)*)\)", entry):
            terms = re.findall(r"\*\*(.+?)\*\*", part[1])
            for number in map(int, part[2].split(", ")):
                for term in terms[:1]:
                    word = term.split(",")[0].lower().rstrip("s")
                    assert word in books[number], f"{term} in notebook {number}"


def test_the_glossary_has_the_limits_of_the_models():
    text = (FOLDER.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    heads = next(row for row in rows if row[1:] and row[1] == "7.5")[1:]
    found = {row[0]: row[1:] for row in rows if len(row) == len(heads) + 1}
    for place, head in enumerate(heads):
        for cc in (tuple(map(int, one.split("."))) for one in head.split(", ")):
            limits = LIMITS[cc]
            expected = (str(FP32_LANES_PER_SM[cc]), str(limits.warps), str(limits.shared // 1024))
            assert tuple(row[place] for row in list(found.values())[1:4]) == expected, head


def test_a_cell_that_cannot_run_shows_its_recorded_output():
    texts = run.labelled(run.stored("11_in_use"))
    assert len(texts) > 8
    for label, text in texts.items():
        assert lessons.recorded_output("11_in_use", label) == text
    cell = run.nbformat.v4.new_code_cell('if can_run("some"):\n    pass', execution_count=1)
    cell.outputs = [run.nbformat.v4.new_output("stream", text="Not run: this machine has no GPU. On")]
    with pytest.raises(ValueError, match="cells of 00_few did not run here: some"):
        run.write("00_few", run.nbformat.v4.new_notebook(cells=[cell]))
    with pytest.raises(KeyError):
        lessons.recorded_output("11_in_use", "nothing")


def test_an_answer_is_checked(capsys):
    cases = [((1,), 2), ((2,), 4)]
    assert lessons.check(lambda x: 2 * x, *cases)
    assert not lessons.check(lambda x: None, *cases)
    assert not lessons.check(lambda x: x + 1, *cases)
    assert lessons.check(lambda x: np.float32(x) / 3, ((1,), 1 / 3))
    assert not lessons.check(lambda x: np.ones(2), ((1,), np.ones(3)))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Right, in all 2 cases."
    assert said[1] == "Not answered yet: <lambda>(1) is None."
    assert said[2] == "Not yet: <lambda>(2) is 3, and should be 4."
    assert not lessons.check(lambda: "line 7 races", ((), True))
    assert not lessons.check(lambda: "a", ((), "b"))
    said = capsys.readouterr().out.splitlines()
    assert said == ["Not yet: line 7 races", "Not yet: <lambda>() is 'a', and should be 'b'."]
    with pytest.raises(ValueError, match="needs a case"):
        lessons.check(abs)


BARRIER = "cuda.syncthreads()"


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("name", "exercise", "old", "new", "says"),
    [
        ("02_shared_tile", "smooth", "", "", "True"),
        ("02_shared_tile", "smooth", BARRIER, "pass", "a race: "),
        ("02_shared_tile", "smooth", "float32(0.5)", "float32(2)", "no race, but x[0] is "),
        (
            "02_shared_tile",
            "smooth",
            "    x[t] = tile[t]",
            f"    {BARRIER}\n    x[t] = tile[t]",
            "correct, but with 7 ",
        ),
        (
            "02_shared_tile",
            "smooth",
            "    x[t] = tile[t]",
            f"    x[t] = tile[t]\n    {BARRIER}",
            "correct, but with 7 ",
        ),
        ("02_shared_tile", "smooth", BARRIER, f"if t > 0: {BARRIER}", "DivergentBarrier: "),
        ("02_shared_tile", "smooth", "max(t - 1, 0)", "t + 1", "IndexError: "),
        ("03_thread_tiles", "fragments", "", "", "True"),
        ("03_thread_tiles", "fragments", BARRIER, "pass", "a race: "),
        ("03_thread_tiles", "fragments", BARRIER, f"if t > 0: {BARRIER}", "DivergentBarrier: "),
        ("03_thread_tiles", "fragments", "range(8)", "range(9)", "IndexError: "),
    ],
)
def test_an_exercise_names_the_fault(name, exercise, old, new, says, tmp_path):
    """The solutions of the notebooks, with one edit each."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    parts = {node.name: ast.get_source_segment(text, node) for node in functions}  # the last of each name
    assert old in parts[exercise]
    head = "import numpy as np\nfrom numba import cuda, float32\nfrom numba_gemm.inspect import trace\n"
    code = f"{head}FLOAT32_BYTES, T = 4, 4\n{parts['judge']}\n@cuda.jit\n{parts[exercise].replace(old, new, 1)}\n"
    path = tmp_path / "exercise.py"
    path.write_text(code, encoding="utf-8")
    scope = {}
    exec(compile(code, str(path), "exec"), scope)
    assert str(scope["judge"](scope[exercise])).startswith(says)


def test_what_was_recorded_says_where(monkeypatch, capsys):
    monkeypatch.setattr(lessons, "has_gpu", lambda: False)
    found = lessons.measure("naive", "coalesced")
    assert list(found["stage"]) == ["naive", "coalesced", "cublas"]
    assert re.fullmatch(r"recorded on NVIDIA H200, 20\d\d-\d\d-\d\d, commit \w{7}", found.attrs["source"])
    table = lessons.compare(found)
    assert table.loc["coalesced", "gain"] == pytest.approx(
        table.loc["naive", "measured ms"] / table.loc["coalesced", "measured ms"], abs=0.01
    )
    assert table.loc["coalesced", "predicted ms"] < table.loc["coalesced", "measured ms"]
    assert "recorded on NVIDIA H200" in lessons.recorded("memory_lab/transfers.csv").attrs["source"]
    with pytest.raises(ValueError, match="nothing was recorded of naive, cublas at"):
        lessons.measure("naive", shape=(5, 6, 7))
    with pytest.raises(FileNotFoundError, match="no recorded table"):
        lessons.recorded("latest/none.csv")
    with pytest.raises(ValueError, match="expected results of one shape, got 0"):
        lessons.compare(found[:0])


def test_a_stage_that_a_gpu_cannot_run_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(lessons, "has_gpu", lambda: False)
    found = lessons.measure("naive", "coalesced")
    lacking = found["stage"] == "coalesced"
    found.loc[lacking, ["median_us", "gflops", "ratio_to_cublas"]] = np.nan
    found.loc[lacking, ["config", "status", "note"]] = [np.nan, "unsupported", "needs compute capability 8.0"]
    assert list(lessons.compare(found).index) == ["naive", "cublas"]
    assert "coalesced was not timed: unsupported, needs compute capability 8.0" in capsys.readouterr().out


def test_a_measurement_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(lessons, "has_gpu", lambda: True)
    monkeypatch.setattr(lessons, "COMMAND", ("-c", "print('half'); raise SystemExit('no such GPU')"))
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 1.*half.*no such GPU"):
        lessons.measure("naive")


def test_a_measurement_is_read(monkeypatch, capsys):
    """The benchmark's own command line, as far as it can run here; its numbers are another's."""
    frame = lessons.recorded("latest/results.csv")
    environment = frame.attrs["environment"]
    code = (
        "import json, pathlib, sys\n"
        "options = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "assert options['--stages'] == 'naive,cublas' and options['--shape'] == '4096,4096,4096', options\n"
        "out = pathlib.Path(options['--out'])\n"
        f"out.joinpath('results.csv').write_text({frame[:2].to_csv(index=False)!r})\n"
        f"out.joinpath('environment.json').write_text({json.dumps(environment)!r})\n"
    )
    monkeypatch.setattr(lessons, "has_gpu", lambda: True)
    monkeypatch.setattr(lessons, "COMMAND", ("-c", code))
    found = lessons.measure("naive")
    assert found["median_us"].tolist() == frame["median_us"][:2].tolist()
    assert "measured now on NVIDIA H200" in capsys.readouterr().out


@pytest.mark.parametrize("wanted", [False, True])
def test_the_choice_is_made_before_numba(wanted):
    code = (
        "from numba_gemm.course import notebook as lessons\n"
        f"lessons.begin(on_gpu={wanted})\n"
        "from numba_gemm.simulator.switch import SIMULATOR\n"
        "print('simulated', SIMULATOR)\n"
        "lessons.begin()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=compiler_environment(), capture_output=True, text=True, check=False
    )
    on_gpu = wanted and lessons.has_gpu()
    assert f"simulated {not on_gpu}" in done.stdout, done.stderr
    assert ("restart the notebook's kernel" in done.stderr) == on_gpu


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "numba_gemm" / f"measure-{platform.node()}"


def test_measurements_of_one_user_exclude_each_other(lock):
    def is_held():
        folder = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(folder)
        return False

    with lessons._alone():
        assert is_held()
        assert lock.stat().st_mode & 0o777 == 0o700
    assert not is_held()


def link(path, victim):
    path.symlink_to(victim.parent)


def file(path, victim):
    path.write_text("mine")


def pipe(path, victim):
    os.mkfifo(path)


@pytest.mark.parametrize("put", [link, file, pipe], ids=lambda put: put.__name__)
def test_what_is_no_folder_is_left_alone(put, lock, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("important")
    lock.parent.mkdir()
    put(lock, victim)
    with pytest.warns(RuntimeWarning, match=lock.name), lessons._alone():
        pass
    assert victim.read_text() == "important"


def test_the_lock_of_measurements_is_not_in_a_shared_directory(lock, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    with lessons._alone():
        pass
    assert not list(shared.iterdir())
