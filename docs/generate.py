"""``python docs/generate.py`` writes the blocks generated from committed results; ``--check`` compares.

A block is enclosed by ``<!-- results:begin NAME -->`` and ``<!-- results:end NAME -->``; `GENERATORS` has the names. In
the docstring of a stage, the paragraph that begins with ``Measured: `` is generated; it precedes ``Limits: ``, which is
written by hand. No GPU is needed.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from blocks import energy_page, memory_page, random_shapes, several_gpus, tables, torch_tables, tracer_page
from blocks.docstrings import generate_docstrings, generate_tensor_docstrings
from blocks.published import Published, ReadmeError
from numba_gemm.lab.harness.command import command, write_files
from numba_gemm.lab.registry import MEMORY

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(
    ROOT / name
    for name in (
        *("README.md", "docs/benchmarks.md", "docs/benchmarks_precision.md", "docs/how_to/pytorch.md"),
        "docs/how_to/distributed.md",
        *("docs/memory_lab.md", "docs/tracing.md"),
    )
)
LADDER_FOLDER = ROOT / "numba_gemm" / "kernels" / "ladder"
TENSOR_FOLDER = ROOT / "numba_gemm" / "kernels" / "tensor_core"
RESULTS_FOLDER = ROOT / "results" / "h200" / "latest"

BLOCK = re.compile(
    r"(?P<begin><!-- results:begin (?P<name>\w+) -->\n)(?P<body>.*?)(?P<end><!-- results:end (?P=name) -->)", re.DOTALL
)
GENERATORS: dict[str, Callable[[Published], str]] = {
    "headline": tables.headline,
    "precision_summary": tables.precision_summary,
    "ladder": tables.ladder,
    "targets": tables.targets,
    "precisions": tables.precisions,
    "precision_targets": tables.precision_targets,
    "tensor_ladder": tables.tensor_ladder,
    "special_values": tables.special_values,
    "energy": energy_page.energy,
    "streamed": tables.streamed,
    "random_products": random_shapes.random_products,
    "batches": random_shapes.batches,
    "choices": random_shapes.choices,
    "router_gates": random_shapes.router_gates,
    "distributed": several_gpus.distributed,
    "distributed_h100": several_gpus.distributed_h100,
    "distributed_four": several_gpus.distributed_four,
    "distributed_65536": several_gpus.distributed_65536,
    "distributed_weak": several_gpus.distributed_weak,
    "streamed_four": several_gpus.streamed_four,
    "streamed_devices": several_gpus.streamed_devices,
    "torch_step": torch_tables.torch_step,
    "training": torch_tables.training,
    "torch_calls": torch_tables.torch_calls,
    "tracer": tracer_page.tracer,
    "memory_lab": memory_page.provenance,
    **{name: functools.partial(memory_page.section, name) for name in MEMORY},
}


def generate(page: Path, found: Published) -> str:
    """Return the text of a page with every block generated again."""
    if not page.is_file():
        raise ReadmeError(f"there is no {page}")
    text = page.read_text(encoding="utf-8")
    names = [match["name"] for match in BLOCK.finditer(text)]
    if not names:
        raise ReadmeError(f"{page} has no block between <!-- results:begin NAME --> and <!-- results:end NAME -->")
    if unknown := sorted(set(names) - set(GENERATORS)):
        raise ReadmeError(f"{page}: unknown block {', '.join(unknown)}: known are {', '.join(GENERATORS)}")

    def replaced(match: re.Match[str]) -> str:
        return f"{match['begin']}{GENERATORS[match['name']](found)}\n{match['end']}"

    return BLOCK.sub(replaced, text)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all generated text is up to date, or was brought up to date."""
    parser = argparse.ArgumentParser(prog="python docs/generate.py", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing; exit 1 when a file would change")
    add("--pages", type=Path, nargs="+", default=PAGES, metavar="FILE", help="the files whose blocks to write")
    add("--ladder", type=Path, default=LADDER_FOLDER, help="folder with the stages whose docstrings to write")
    add("--tensor-core", type=Path, default=TENSOR_FOLDER, help="the same, of the tensor cores' stages")
    add("--results", type=Path, default=RESULTS_FOLDER, help="folder with results.csv and environment.json")
    options = parser.parse_args(arguments)
    try:
        found = Published(options.results)
        made = {page: generate(page, found) for page in options.pages}
        made |= generate_docstrings(options.ladder, found) | generate_tensor_docstrings(options.tensor_core, found)
    except ReadmeError as error:
        print(f"cannot generate tables and docstrings: {error}", file=sys.stderr)
        return 1
    changed = {path: text for path, text in made.items() if path.read_text(encoding="utf-8") != text}
    if changed and options.check:
        names = ", ".join(path.name for path in changed)
        print(f"out of date with {options.results}: {names}; run {parser.prog}", file=sys.stderr)
        return 1
    for path, text in changed.items():
        write_files(path.parent, {path.name: text})
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
