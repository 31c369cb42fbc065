"""Run the notebooks from top to bottom, each in a process of its own.

    python notebooks/run.py                     # all, and say how long each took
    python notebooks/run.py 01_naive_and_coalesced --write   # and store the outputs in its .ipynb

A notebook's text is its .py file (jupytext's percent format); the .ipynb beside it has the same cells, and outputs.
``--write`` is for the outputs that readers see: run it on a GPU. ``--sync`` brings the .ipynb's cells up to the .py
file's, keeps the outputs of those whose code has not changed but for its layout and comments, lists code as it is now,
and runs nothing. ``--refresh`` does the same, runs the notebook, and stores the outputs of cells that have changed, if
they are the same anywhere: traces, pictures, and times that were recorded. ``--redraw`` stores such outputs of all
cells, of notebooks whose kernels run on the simulator.
"""

from __future__ import annotations

import argparse
import ast
import base64
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

try:
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from PIL import Image
    from traitlets.config import Config

    from numba_gemm.course.notebook import Listing, difference, source
    from numba_gemm.lab.harness.command import command, json_text, write_files
    from numba_gemm.terminal import at_least_one
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: pip install -e '.[cu13,notebooks]' brings it")

HERE = Path(__file__).parent
SECONDS = 1200  # that a cell may take, at real sizes on a GPU
LISTS: dict[str, Callable[..., Listing]] = {"source": source, "difference": difference}
LABEL = re.compile(r'can_run\("(\w+)"|recorded_output\("\w+", "(\w+)"\)')
TEXTS = (
    HERE.parent / "results" / "h200" / "notebooks"
)  # of cells that not all machines can run
KEPT = {"jupyter", "mystnb", "tags"}  # of a cell's metadata
VOLATILE = {"execution", "language_info", "widgets"}


def names() -> list[str]:
    """All notebooks, in their order."""
    return sorted(path.stem for path in HERE.glob("[0-9][0-9]_*.py"))


def read(name: str) -> nbformat.NotebookNode:
    """A notebook as its .py file has it: no outputs, cells numbered."""
    made = jupytext.read(HERE / f"{name}.py")
    made.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            }
        }
    )
    made.nbformat, made.nbformat_minor = 4, 5
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.from_dict(
            {key: value for key, value in cell.metadata.items() if key in KEPT}
        )
    return made


def stored(name: str) -> nbformat.NotebookNode:
    """A notebook as its .ipynb file has it."""
    return nbformat.read(HERE / f"{name}.ipynb", as_version=4)


def execute(name: str, seconds: int = SECONDS) -> nbformat.NotebookNode:
    """Run a notebook, and return it with its outputs.

    Raises
    ------
    nbclient.exceptions.CellExecutionError, CellTimeoutError, DeadKernelError
        if a cell raises, takes too long, or ends the kernel.
    RuntimeError
        if the kernel does not start.
    """
    made = read(name)
    # Kernels that start at once may choose the same TCP ports; sockets in folders of their own have names of their own.
    with TemporaryDirectory() as sockets:
        local = {"transport": "ipc", "ip": str(Path(sockets) / "kernel")}
        NotebookClient(
            made,
            timeout=seconds,
            kernel_name="python3",
            resources={"metadata": {"path": str(HERE)}},
            record_timing=False,
            config=Config(KernelManager=local if os.name == "posix" else {}),
        ).execute()
    made.metadata = nbformat.from_dict(
        {key: value for key, value in made.metadata.items() if key not in VOLATILE}
    )
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return made


def joined(outputs: Iterable[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs of which neighbours of one stream are one: where a stream is cut is chance."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = found[-1] if found else None
        if (
            last
            and output.output_type == last.output_type == "stream"
            and output.name == last.name
        ):
            last.text += output.text
        else:
            found.append(output)
    return found


def listing(source: str) -> Listing | None:
    """What a cell shows that only lists code, by constant arguments of `LISTS`; None for other cells."""
    called = re.fullmatch(r"notebook\.(\w+)\((.+)\)", source.strip(), re.DOTALL)
    if called is None or called[1] not in LISTS:
        return None
    call = ast.parse(source.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    options = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    return LISTS[called[1]](*map(ast.literal_eval, call.args), **options)


def code_of(cell: nbformat.NotebookNode) -> str:
    """A cell's code without its layout and comments."""
    return ast.dump(ast.parse(cell.source))


def synchronised(name: str) -> nbformat.NotebookNode:
    """A notebook's cells, with the outputs of the stored ones that do the same, and code as it is now."""
    made, old = read(name), {}
    if (HERE / f"{name}.ipynb").is_file():
        cells = stored(name).cells
        old = {code_of(cell): cell for cell in cells if cell.cell_type == "code"}
    for cell in made.cells:
        if cell.cell_type == "code" and (same := old.get(code_of(cell))):
            cell.outputs, cell.execution_count = same.outputs, same.execution_count
    for number, cell in enumerate(
        (cell for cell in made.cells if cell.cell_type == "code"), 1
    ):
        if shown := listing(cell.source):
            cell.execution_count = cell.execution_count or number
            data = {
                "text/markdown": shown._repr_markdown_(),
                "text/plain": repr(shown).rstrip(),
            }
            cell.outputs = [
                nbformat.v4.new_output(
                    "execute_result",
                    data,
                    execution_count=cell.execution_count,
                    metadata={},
                )
            ]
    return made


def measures(cell: nbformat.NotebookNode) -> bool:
    """Return True if a cell's output depends on the machine."""
    words = ("measure(", "begin(", "has_gpu(", "on_gpu(")
    return (
        any(word in cell.source for word in words)
        or LABEL.search(cell.source) is not None
    )


def shows_recorded(cell: nbformat.NotebookNode) -> bool:
    """Return True if a cell that has run says that its times were recorded on a GPU."""
    return any(
        output.get("text", "").startswith("recorded on NVIDIA ")
        for output in cell.outputs
    )


def refreshed(
    name: str, seconds: int = SECONDS, redraw: bool = False
) -> nbformat.NotebookNode:
    """A notebook's cells with the outputs of the stored ones that read the same, and new outputs of the others.

    With `redraw`, all outputs that do not depend on the machine are new.
    """
    made = synchronised(name)
    if redraw and any("begin(on_gpu=True)" in cell.source for cell in made.cells):
        raise ValueError(f"kernels of {name} run on a GPU: --write it there")
    for cell, run in zip(made.cells, execute(name, seconds).cells, strict=True):
        if cell.cell_type != "code":
            continue
        settled = not measures(cell) or shows_recorded(run)
        if not cell.execution_count and not settled:
            raise ValueError(
                f"a cell of {name} that has changed measures: --write it on a GPU\n{cell.source}"
            )
        if not cell.execution_count or (redraw and settled):
            cell.outputs = run.outputs
        cell.execution_count = run.execution_count
    return made


def labelled(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Texts that cells print only where they can run, by the cells' labels."""
    texts: dict[str, str] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and (label := LABEL.search(cell.source)):
            found = [
                out.get("text") or out["data"]["text/plain"] for out in cell.outputs
            ]
            texts[label[1] or label[2]] = "\n".join(text.rstrip() for text in found)
    return texts


def with_palette(picture: str) -> str:
    """Return a PNG, in base64, in at most 256 colours, which takes a third of the bytes."""
    made = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as opened:
        if opened.mode == "P":
            return picture
        opened.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
            made, "PNG", optimize=True
        )
    return base64.b64encode(made.getvalue()).decode()


def write(name: str, notebook: nbformat.NotebookNode) -> None:
    """Store a notebook as .ipynb, and the texts of cells that not all machines can run."""
    nbformat.validate(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                output["data"]["image/png"] = with_palette(picture)
    texts = labelled(notebook)
    if absent := [label for label, text in texts.items() if "Not run: " in text]:
        raise ValueError(f"cells of {name} did not run here: {', '.join(absent)}")
    write_files(HERE, {f"{name}.ipynb": nbformat.writes(notebook) + "\n"})
    if texts:
        write_files(TEXTS, {f"{name}.json": json_text(texts)})


def attempt(
    name: str, make: Callable[[str], nbformat.NotebookNode], store: bool
) -> str:
    """Make a notebook, store it if asked to, and return a line about it; that of a failure begins with a star."""
    start = time.perf_counter()
    try:
        notebook = make(name)
        if store:
            write(name, notebook)
    except Exception as error:
        return f"* {name} failed:\n{type(error).__name__}: {error}"
    return f"{name}: {time.perf_counter() - start:.0f} s"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0, or 1 when a notebook failed, or 2 for a wrong command line.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="notebooks; by default all"
    )
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        default=1,
        metavar="N",
        help="notebooks at once (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        type=at_least_one,
        default=SECONDS,
        metavar="S",
        help=f"that a cell may take (default: {SECONDS})",
    )
    results = parser.add_mutually_exclusive_group()
    results.add_argument("--write", action="store_true", help="store the outputs")
    results.add_argument(
        "--sync",
        action="store_true",
        help="run nothing; bring the .ipynb files up to date",
    )
    results.add_argument(
        "--refresh",
        action="store_true",
        help="store the outputs of cells that have changed",
    )
    results.add_argument(
        "--redraw",
        action="store_true",
        help="store all outputs that do not depend on the machine",
    )
    options = parser.parse_args(arguments)
    chosen = [Path(given).stem for given in options.names] or names()
    if unknown := [name for name in chosen if name not in names()]:
        parser.error(
            f"unknown notebook {', '.join(unknown)}; known are {', '.join(names())}"
        )
    make: Callable[[str], nbformat.NotebookNode] = partial(
        execute, seconds=options.seconds
    )
    if options.refresh or options.redraw:
        make = partial(refreshed, seconds=options.seconds, redraw=options.redraw)
    elif options.sync:
        make = synchronised
    task = partial(
        attempt,
        make=make,
        store=options.write or options.sync or options.refresh or options.redraw,
    )
    failed = False
    with ProcessPoolExecutor(options.jobs) as pool:
        for said in pool.map(task, chosen):
            print(said, flush=True)
            failed |= said.startswith("*")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
