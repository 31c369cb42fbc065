"""Generated blocks of docs/memory_lab.md: each experiment's lesson, and its picture and claims if it is recorded.

``python -m numba_gemm.lab.memory.report`` writes them, ``--check`` verifies that they are up to date. The text between
them is written by hand.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from numba_gemm.lab.harness.command import UsageError, command, write_files
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.registry import MEMORY, load

PAGE, RECORDED = Path("docs") / "memory_lab.md", Path("results") / "h200" / "memory_lab"
BLOCK = re.compile(r"(<!-- memory_lab:begin (\w+) -->\n).*?(<!-- memory_lab:end \2 -->)", re.DOTALL)
FAILED = "**does not hold here:** "


def is_recorded(experiment: Experiment) -> bool:
    """Return True if there is a recorded run of an experiment."""
    return (RECORDED / f"{experiment.name}.csv").is_file()


def claims_of(experiment: Experiment) -> Mapping[str, bool]:
    """Return the claims of an experiment, decided by its recorded run."""
    return experiment.claims(pd.read_csv(RECORDED / f"{experiment.name}.csv"))


def section(experiment: Experiment) -> str:
    """Return the heading and lesson of an experiment, with the picture and the claims of a recorded run."""
    name = experiment.name
    parts = [f"## {experiment.section} [{name}](../numba_gemm/lab/memory/{name}.py)", f"**{experiment.lesson}**"]
    if is_recorded(experiment):
        held = "\n".join(f"- {'' if holds else FAILED}{sentence}" for sentence, holds in claims_of(experiment).items())
        parts += [f"![{name}](../{(RECORDED / name).as_posix()}.png)", "The numbers say:", held]
    else:
        parts.append(f"No run is recorded; `numba-gemm lab {name}` measures it.")
    return "\n\n".join(parts) + "\n"


def provenance(experiments: Sequence[Experiment]) -> str:
    """Return the sentence on GPU, date, commit and claims of the recorded runs."""
    experiments = [experiment for experiment in experiments if is_recorded(experiment)]
    described = [json.loads((RECORDED / f"{one.name}.json").read_text(encoding="utf-8")) for one in experiments]
    held = [holds for experiment in experiments for holds in claims_of(experiment).values()]
    gpus = ", ".join(sorted({one["gpu"]["name"] for one in described}))
    commits = ", ".join(sorted({one["commit"][:12] for one in described}))
    drivers = ", ".join(sorted({one["gpu"]["driver"] or "unknown" for one in described}))
    return (
        f"Recorded on {gpus}, {max(one['date'] for one in described)[:10]}, commit {commits}, driver {drivers}: "
        f"{sum(held)} of {len(held)} claims hold.\n"
    )


def page(text: str) -> str:
    """Return the page with its generated blocks renewed; raise UsageError unless it has one per experiment."""
    experiments = [load(name) for name in MEMORY]
    blocks = {"provenance": provenance(experiments)} | {one.name: section(one) for one in experiments}
    found = [name for _, name, _ in BLOCK.findall(text)]
    if found != list(blocks):
        raise UsageError(f"{PAGE} has the blocks {found}; expected {list(blocks)}")
    return BLOCK.sub(lambda match: match[1] + blocks[match[2]] + match[3], text)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the blocks, or check them; return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given not in ([], ["--check"]):
        print(f"unknown arguments {given}; expected none, or --check", file=sys.stderr)
        return 2
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if given:
        if made != text:
            print(f"{PAGE} is not what python -m numba_gemm.lab.memory.report writes", file=sys.stderr)
        return int(made != text)
    write_files(PAGE.parent, {PAGE.name: made})
    return 0


if __name__ == "__main__":
    sys.exit(main())
