"""``numba-gemm lab NAME...``, also ``python -m numba_gemm.lab``: run experiments, print and save their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba_gemm.lab.harness.command import UsageError, add_result_options, command
from numba_gemm.lab.harness.experiment import add_parameters
from numba_gemm.terminal import Parser

if TYPE_CHECKING:
    from numba_gemm.lab.harness.experiment import Experiment

RIGHT, WRONG, UNUSABLE = 0, 1, 2
DESCRIPTION = "Run experiments. On the simulator they are small, and times mean nothing."
USAGE = """%(prog)s --list
       %(prog)s NAME... [--out DIR] [--commit HASH] [--no-plot]
       %(prog)s NAME... [options that all of these experiments have]
       %(prog)s NAME --help"""


def parser(experiments: Sequence[Experiment]) -> Parser:
    """Return the parser of the options, with the parameters that all of the experiments have."""
    only = experiments[0] if len(experiments) == 1 else None
    prog = "numba-gemm lab"
    made = Parser(
        prog=f"{prog} {only.name}" if only else prog,
        usage=None if only else USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=only.lesson if only else DESCRIPTION,
        epilog="Exit status: 0; 1 if a result is wrong or a claim does not hold; 2 for unusable arguments, or if this "
        "machine cannot run\nany of the experiments; 130 if interrupted.",
    )
    if not experiments:
        made.add_argument("--list", action="store_true", help="list the experiments")
    add_result_options(made)
    made.add_argument("--no-plot", action="store_true", help="draw nothing")
    add_parameters(made, experiments)
    return made


def expanded(names: Iterable[str]) -> list[Experiment]:
    """Return the experiments of names and of groups of names."""
    from numba_gemm.lab.registry import GROUPS, load

    try:
        return [load(one) for name in names for one in GROUPS.get(name, (name,))]
    except ValueError as error:
        raise UsageError(str(error)) from None


def list_all() -> int:
    """Print the name and the lesson of each experiment, and the groups."""
    from numba_gemm.lab.registry import EXPERIMENTS, GROUPS, load

    width = max(map(len, EXPERIMENTS))
    for name in EXPERIMENTS:
        print(f"{name:{width}}  {load(name).lesson}")
    for name, members in GROUPS.items():
        print(f"{name:{width}}  all of: {', '.join(members)}")
    return RIGHT


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named experiments; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    count = next((place for place, word in enumerate(given) if word.startswith("-")), len(given))
    experiments = expanded(given[:count]) if count else []
    made = parser(experiments)
    options = vars(made.parse_args(given[count:]))
    if not experiments:
        if options["list"]:
            return list_all()
        made.error("name one or more experiments; --list shows all")
    out, commit, plot = options.pop("out"), options.pop("commit"), not options.pop("no_plot")
    return run_all(experiments, options, out, commit, plot)


def run_all(
    experiments: Sequence[Experiment], parameters: dict[str, Any], out: Path, commit: str | None, plot: bool
) -> int:
    """Run experiments one after the other; one that fails or is unavailable does not stop the others."""
    from numba_gemm.lab.harness.experiment import Unavailable
    from numba_gemm.lab.harness.runner import run
    from numba_gemm.runtime.driver import GpuUnavailable

    statuses = []
    for experiment in experiments:
        print(f"\n== {experiment.name}: {experiment.lesson}")
        try:
            statuses.append(RIGHT if run(experiment, parameters, out=out, commit=commit, plot=plot) else WRONG)
        except (Unavailable, GpuUnavailable, ModuleNotFoundError) as error:
            print(f"error: {experiment.name}: {error}", file=sys.stderr)
        except UsageError:
            raise
        except Exception as error:
            print(f"error: {experiment.name}: {type(error).__name__}: {error}", file=sys.stderr)
            statuses.append(WRONG)
    return max(statuses, default=UNUSABLE)


if __name__ == "__main__":
    sys.exit(main())
