"""Documentation page of the laboratory, generated from the experiments' docstrings and recorded results.

``python -m numba_gemm.lab.memory.report`` writes `docs/memory_lab.md`, ``--check`` verifies that it is up to date.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from numba_gemm.lab.harness.command import command, write_files
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.registry import MEMORY, load

PAGE, RECORDED = Path("docs") / "memory_lab.md", Path("results") / "h200" / "memory_lab"
INTRODUCTION = """# The memory laboratory

<!-- Written by python -m numba_gemm.lab.memory.report; not to be edited. -->

What each path of data costs on a GPU: predicted, measured, drawn. The experiments follow the memory chapter of the
CUDA C++ Best Practices Guide, whose sections number them; each is a file in
[numba_gemm/lab/memory/](../numba_gemm/lab/memory/) with its kernels, a function that returns a pandas DataFrame, and
the sentences of its lesson that numbers decide.

```bash
numba-gemm lab --list
numba-gemm lab strided_copy bank_conflicts
```

With `NUMBA_ENABLE_CUDASIM=1` and no GPU, most run small: their counts mean something then, not their times. Below is
what an H200 said, on {date}, at commit {commit}, with driver {driver}: {count} sentences, {held} of which it bears out.
Numbers and environments are in [results/h200/memory_lab/](../results/h200/memory_lab/). In the pictures, solid is
measured and dashed is predicted.
"""
FAILED = "**does not hold here:** "


def section(experiment: Experiment) -> str:
    """Return the section of an experiment."""
    name = experiment.name
    text = inspect.getdoc(inspect.getmodule(experiment.run)) or ""
    lesson, *paragraphs = text.split("\n\n")
    body = "\n\n".join(one for one in paragraphs if not one.startswith("One module because"))
    frame = pd.read_csv(RECORDED / f"{name}.csv")
    held = [
        f"- {'' if holds else '**does not hold here:** '}{sentence}"
        for sentence, holds in experiment.claims(frame).items()
    ]
    picture = f"![{name}](../{(RECORDED / name).as_posix()}.png)"
    title = f"## {experiment.section} [{name}](../numba_gemm/lab/memory/{name}.py)"
    return "\n\n".join([title, f"**{' '.join(lesson.split())}**", body, picture, "The numbers say:", "\n".join(held)])


def page() -> str:
    """Return the whole page."""
    experiments = [load(name) for name in MEMORY]
    described = [json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8")) for name in MEMORY]
    sections = [section(experiment) for experiment in experiments]
    count = sum(len(load(name).claims(pd.read_csv(RECORDED / f"{name}.csv"))) for name in MEMORY)
    failed = sum(text.count(FAILED) for text in sections)
    words = INTRODUCTION.format(
        date=max(one["date"] for one in described)[:10],
        commit=", ".join(sorted({one["commit"][:12] for one in described})),
        driver=", ".join(sorted({one["gpu"]["driver"] or "unknown" for one in described})),
        count=count,
        held="all" if not failed else count - failed,
    )
    return "\n\n".join([words.rstrip(), *sections]) + "\n"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it; return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    made = page()
    if given == ["--check"]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made:
            print(f"{PAGE} is not what python -m numba_gemm.lab.memory.report writes", file=sys.stderr)
            return 1
        return 0
    if given:
        print(f"unknown arguments {given}; expected none, or --check", file=sys.stderr)
        return 2
    write_files(PAGE.parent, {PAGE.name: made})
    return 0


if __name__ == "__main__":
    sys.exit(main())
