"""Functions for the notebooks: choice of GPU or simulator, stages' sources and differences, timings, exercises.

A notebook always steps through and traces kernels on Numba's simulator. On a machine with a GPU, times are measured on
it with the code of ``bench.py`` in a separate process; otherwise, times recorded on an H200 are shown and labelled as
such. Numba chooses between simulator and GPU once per process, so call `begin` before anything else.
"""

from __future__ import annotations

import ast
import datetime
import difflib
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..simulator.probe import choose, gpu_count, gpu_environment, simulator_requested
from .exercises import Guess, check, predict

if TYPE_CHECKING:
    import pandas as pd

    from ..models.prediction import Ceilings

__all__ = [
    "Guess",
    "Listing",
    "begin",
    "check",
    "compare",
    "difference",
    "gpu_name",
    "has_gpu",
    "measure",
    "predict",
    "recorded",
    "recorded_output",
    "source",
]

PACKAGE = Path(__file__).parents[1]
# An installed package contains copies of files of a checkout.
RECORDED = PACKAGE / "recorded" if (PACKAGE / "recorded").is_dir() else PACKAGE.parent / "results"
SHAPE = (4096, 4096, 4096)
COMMAND = ("-m", "numba_gemm")
SECONDS = 900  # time limit of a measurement
DOTS_PER_INCH = 100


def has_gpu() -> bool:
    """True if times can be measured on this machine."""
    return gpu_count() > 0


def gpu_name() -> str:
    """Return the name of the first GPU."""
    from cuda.bindings import driver

    from ..runtime.driver import call

    call(driver.cuInit, 0)
    name = call(driver.cuDeviceGetName, 100, call(driver.cuDeviceGet, 0))
    return str(name.split(b"\0")[0].decode())


def begin(on_gpu: bool = False) -> None:
    """Choose and print the device of this notebook's kernels, before Numba is imported.

    With `on_gpu` they run on the GPU if there is one. By default they run on the simulator, which can step and trace
    them, and only `measure` uses a GPU.
    """
    simulated = not (on_gpu and has_gpu())
    if "numba" in sys.modules and simulator_requested() != simulated:
        raise RuntimeError(
            f"Numba was imported with {'a GPU' if simulated else 'the simulator'} chosen, and this notebook needs "
            f"{'the simulator' if simulated else 'a GPU'}: restart the notebook's kernel and begin with this cell"
        )
    choose(simulator=simulated)
    _show_figures()
    print(f"numba_gemm {__version__}, Python {platform.python_version()}, {datetime.date.today().isoformat()}")
    if not simulated:
        print(f"Kernels run on this machine's GPU: {gpu_name()}.")
        return
    print("Kernels run on Numba's simulator, small.")
    if has_gpu():
        print(f"Times are measured on this machine's GPU: {gpu_name()}.")
    else:
        print("This machine has no GPU: times are those that were recorded on another, named beside them.")


def _show_figures() -> None:
    """Let a notebook display a Figure at the end of a cell without pyplot, with alternative text."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    from matplotlib.figure import Figure

    from ..inspect.draw import alt_text
    from ..lab.harness.pictures import png

    def described(figure: Any) -> tuple[bytes, dict[str, str]]:
        return png(figure, dpi=DOTS_PER_INCH), {"alt": alt_text(figure)}

    def told(figure: Any, printer: Any, cycle: bool) -> None:
        printer.text(alt_text(figure))

    formatters = shell.display_formatter.formatters
    formatters["image/png"].for_type(Figure, described)
    formatters["text/plain"].for_type(Figure, told)


class Listing:
    """Text that a notebook displays as code."""

    def __init__(self, text: str, language: str) -> None:
        self.text, self.language = text, language

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```{self.language}\n{self.text.rstrip()}\n```"


def _file(name: str) -> Path:
    places = [PACKAGE / folder / f"{name}.py" for folder in ("kernels/ladder", "kernels/tensor_core", "device", ".")]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise ValueError(f"{name!r} is neither a stage nor a module; stages are listed by numba_gemm.stages()")
    return found


def _code(name: str) -> str:
    """Return a module's source without its docstring."""
    text = _file(name).read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return "\n".join(text.splitlines()[first.end_lineno if is_docstring else 0 :]).strip() + "\n"


def source(name: str, function: str | None = None, doc: bool = False) -> Listing:
    """Return the source of a stage or another module, from its file.

    Parameters
    ----------
    name : str
        A stage, such as "naive"; a module of `numba_gemm.device`, such as "store"; or the path of another module of
        `numba_gemm` without its ending, such as "models/requests".
    function : str, optional
        Return only this function or class of the module.
    doc : bool
        Include the module's docstring, which explains the cost and gain of a stage.
    """
    text = _file(name).read_text(encoding="utf-8")
    if function is None:
        return Listing(text if doc else _code(name), "python")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == function:
            return Listing(_definition(text, node), "python")
    raise ValueError(f"{_file(name).name} has no function or class {function!r}")


def _definition(text: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the lines of a definition, with its decorators, moved to the left margin."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(line[node.col_offset :] for line in text.splitlines()[first - 1 : node.end_lineno]) + "\n"


def _device_code(name: str) -> str:
    """Return the kernels and device functions of a stage's file."""
    text = _file(name).read_text(encoding="utf-8")
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return "\n".join(_definition(text, node) for node in found if _is_device_code(node))


def _is_device_code(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith(("cuda.jit", "device_function")) for decorator in node.decorator_list)


def difference(before: str, after: str, context: int = 2, device_only: bool = False) -> Listing:
    """Return the unified diff of two stages' code, without docstrings of modules.

    Parameters
    ----------
    before, after : str
        Stages.
    context : int
        Number of unchanged lines around each change.
    device_only : bool
        Compare only kernels and device functions, without imports and configuration.
    """
    code = _device_code if device_only else _code
    old, new = (code(name).splitlines(keepends=True) for name in (before, after))
    changes = difflib.unified_diff(old, new, f"{before}.py", f"{after}.py", n=context)
    return Listing("".join(changes), "diff")


def recorded(name: str) -> pd.DataFrame:
    """Return a table that was recorded on an H200; ``attrs["source"]`` gives GPU, date and commit, if they are known.

    `name` is a file in ``results/h200``, such as "latest/results.csv" or "memory_lab/transfers.csv".
    """
    path = RECORDED / "h200" / name
    if not path.is_file():
        raise FileNotFoundError(f"no recorded table {name}: expected {path}")
    return _read(path, "recorded")


def recorded_output(name: str, cell: str) -> str:
    """Return the text that a cell of a notebook printed on an H200, for readers whose machine cannot run the cell.

    Parameters
    ----------
    name : str
        The notebook, such as "11_in_use".
    cell : str
        The cell's label in ``results/h200/notebooks/NAME.json``, which ``notebooks/run.py --write`` writes.
    """
    path = RECORDED / "h200" / "notebooks" / f"{name}.json"
    return str(json.loads(path.read_text(encoding="utf-8"))[cell]).rstrip()


def _read(path: Path, how: str) -> pd.DataFrame:
    """Read a table, and its source from the description beside it, if there is one."""
    import pandas as pd

    frame = pd.read_csv(path)
    described = next(filter(Path.is_file, (path.with_suffix(".json"), path.parent / "environment.json")), None)
    if described is not None:
        environment = json.loads(described.read_text(encoding="utf-8"))
        gpu, commit = environment.get("gpu") or {"name": "the simulator"}, str(environment.get("commit") or "")[:7]
        at = environment["date"][:10] + (f", commit {commit}" if commit else "")
        frame.attrs |= {"environment": environment, "source": f"{how} on {gpu['name']}, {at}"}
    return frame


def measure(*stages: str, shape: tuple[int, int, int] = SHAPE, precisions: Sequence[str] = ()) -> pd.DataFrame:
    """Time stages and cuBLAS on this machine's GPU; without one, return times recorded on an H200, if there are any.

    The table has the rows and columns of ``results.csv``; ``attrs["source"]`` gives their origin.

    Parameters
    ----------
    *stages : str
        Names of stages; "auto" is `tiled_sgemm` with its own choice.
    shape : tuple of int
        M, N and K.
    precisions : sequence of str
        Precisions of `tiled_sgemm` in addition to FP32; they apply to "auto".
    """
    names = [*stages, "cublas"]
    if has_gpu():
        options = ["--stages", ",".join(names), "--shape", ",".join(map(str, shape))]
        if precisions:
            options += ["--precisions", ",".join(precisions)]
        with tempfile.TemporaryDirectory() as folder:
            _run("bench", *options, "--out", folder)
            frame = _read(Path(folder) / "results.csv", "measured now")
    else:
        frame = recorded("latest/precisions/results.csv" if precisions else "latest/results.csv")
        wanted = frame["stage"].isin(names) & (frame[["m", "n", "k"]] == list(shape)).all(axis=1)
        wanted &= (frame["layout"] == "nn") & (frame["cache"] == "hot")
        wanted &= frame["precision"].isin(["ieee", *precisions])
        frame = frame[wanted].reset_index(drop=True)
        if frame.empty:
            raise ValueError(f"nothing was recorded of {', '.join(names)} at {shape}")
        if missing := [name for name in names if name not in set(frame["stage"])]:
            print(f"nothing was recorded of {', '.join(missing)} at {shape}")
    print(frame.attrs["source"])
    return frame


def _run(*arguments: str) -> None:
    """Run a command of the package in a process that uses the GPU."""
    line = [sys.executable, *COMMAND, *arguments]
    with _alone():
        done = subprocess.run(line, env=gpu_environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"the measurement ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other notebook of this user measures on this machine, and hold the lock of measurements."""
    # Not in /tmp, where another user could hold the lock. Opening a folder to lock it changes nothing in it.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        import fcntl

        path = (base if base.is_absolute() else Path.home() / ".cache") / "numba_gemm" / f"measure-{platform.node()}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, OSError, RuntimeError) as error:  # on Windows; without a home directory
        warnings.warn(f"measuring without waiting for other notebooks to finish: {error}", RuntimeWarning, stacklevel=2)
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@cache
def _ceilings(gpu: str) -> Ceilings:
    """Return measured ceilings of a GPU of this name: recorded for an H200, else measured now."""
    from ..lab.bench import ceilings

    found, name = ceilings.load(RECORDED / "h200" / "latest" / ceilings.FILE)
    if name == gpu or not has_gpu():
        return found
    with tempfile.TemporaryDirectory() as folder:
        _run("lab", "ceilings", "--out", folder)
        return ceilings.load(Path(folder) / ceilings.FILE)[0]


def compare(results: pd.DataFrame) -> pd.DataFrame:
    """Compare predicted and measured times of the stages in a table of `measure`, of one shape.

    Each stage has a row: bottleneck and milliseconds predicted by the model (`numba_gemm.models.prediction`) from
    measured ceilings, if it covers the stage; measured milliseconds, TFLOP/s, fractions of the FP32 peak and of
    cuBLAS's speed, and the gain over the previous row. Stages without times are printed with the reason.
    """
    import pandas as pd

    from ..kernels.ladder import STAGES
    from ..lab.bench.model import predicted
    from ..lab.bench.results import OK, records

    if (count := len(results[["m", "n", "k"]].drop_duplicates())) != 1:
        raise ValueError(f"expected results of one shape, got {count}")
    gpu = results.attrs["environment"]["gpu"]
    ceilings = _ceilings(gpu["name"])
    lines: list[tuple[Any, ...]] = []
    before, nan = None, float("nan")
    for row in records(results[results["precision"] == "ieee"]):
        if row["status"] != OK:
            print(f"{row['stage']} was not timed: {row['status']}, {row['note']}")
            continue
        stage, made = row["stage"] in STAGES, predicted(row, ceilings, gpu["l2_bytes"], gpu["multiprocessors"])
        model = (made.binding, round(1e3 * made.seconds, 3)) if made else ("", nan)
        speed = (round(row["gflops"] / 1e3, 1), f"{row['percent_of_peak']:.0f} %", round(row["ratio_to_cublas"], 2))
        gain = round(before / row["median_us"], 2) if before and stage else nan
        lines.append((row["stage"], *model, round(row["median_us"] / 1e3, 3), *speed, gain))
        before = row["median_us"] if stage else before
    columns = ["stage", "bound by", "predicted ms", "measured ms", "TFLOP/s", "of peak", "of cuBLAS", "gain"]
    table = pd.DataFrame(lines, columns=columns).set_index("stage")
    table.attrs.update(results.attrs)
    return table
