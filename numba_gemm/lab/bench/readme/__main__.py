"""``python -m numba_gemm.lab.bench.readme`` writes the blocks generated from committed results; ``--check`` compares.

These are the blocks of the pages in `PAGES`, and in each stage's docstring the paragraph that begins with
``Measured: ``.

A generated block is enclosed by ``<!-- results:begin NAME -->`` and ``<!-- results:end NAME -->``. NAME is one of

headline
    the public function and cuBLAS at a few sizes;
precision_summary
    speeds of a few precisions at one size, the effect of the power cap, and the cost of NaN and infinities;
ladder
    one line per stage at 4096 x 4096 x 4096;
targets
    the measurements of `numba_gemm.lab.bench.targets`, compared with the targets;
precisions, precision_targets
    the measurements of ``bench.py --precisions`` and `numba_gemm.lab.bench.accuracy`, from the folder `precisions` of
    the results, per shape and compared with the targets;
tensor_ladder, special_values
    the measurements of `numba_gemm.lab.bench.tensor_ladder`, from the same folder;
streamed
    the measurements of `numba_gemm.lab.bench.streamed`.

The paragraph of a stage gives its speed at that shape and, if the files of `numba_gemm.lab.bench.counters` are beside
the results, the GPU's counters. That of `thin`, a stage for a C with few columns, gives measurements of
`numba_gemm.lab.bench.targets`. The paragraph precedes ``Limits: ``, which is written by hand.

Neither numba nor a GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from numba_gemm.lab.bench.readme.blocks import generate
from numba_gemm.lab.bench.readme.docstrings import generate_docstrings, generate_tensor_docstrings
from numba_gemm.lab.bench.readme.published import ReadmeError, read_results
from numba_gemm.lab.harness.command import command, write_files

ROOT = Path(__file__).resolve().parents[4]
PAGES = tuple(ROOT / name for name in ("README.md", "docs/benchmarks.md", "docs/benchmarks_precision.md"))
LADDER_FOLDER = ROOT / "numba_gemm" / "kernels" / "ladder"
TENSOR_FOLDER = ROOT / "numba_gemm" / "kernels" / "tensor_core"
RESULTS_FOLDER = ROOT / "results" / "h200" / "latest"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all generated text is up to date, or was brought up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m numba_gemm.lab.bench.readme", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file would change")
    parser.add_argument(
        "--pages", type=Path, nargs="+", default=PAGES, metavar="FILE", help="the files whose blocks to write"
    )
    parser.add_argument(
        "--ladder", type=Path, default=LADDER_FOLDER, help="folder with the stages whose docstrings to write"
    )
    parser.add_argument("--tensor-core", type=Path, default=TENSOR_FOLDER, help="the same, of the tensor cores' stages")
    parser.add_argument(
        "--results", type=Path, default=RESULTS_FOLDER, help="folder with results.csv and environment.json"
    )
    options = parser.parse_args(arguments)
    try:
        frame, environment = read_results(options.results)
        made = {page: generate(page, frame, environment, options.results) for page in options.pages}
        made |= generate_docstrings(options.ladder, frame, environment, options.results)
        made |= generate_tensor_docstrings(options.tensor_core, options.results)
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
