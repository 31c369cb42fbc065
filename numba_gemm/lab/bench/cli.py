"""``numba-gemm bench``, also ``python bench.py``: the benchmark, compared with an older run and with a model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from numba_gemm.lab.bench.experiment import EXPERIMENT, Report
from numba_gemm.lab.harness.command import add_result_options, command
from numba_gemm.lab.harness.experiment import add_parameters
from numba_gemm.simulator import probe
from numba_gemm.terminal import Parser

RIGHT, WRONG = 0, 1


def parser() -> Parser:
    """Return the parser of the command line; imports no numba."""
    made = Parser(
        prog="numba-gemm bench",
        description="Verify, then time, every stage of the ladder and cuBLAS. Without a GPU, Numba's simulator runs "
        "small products: they are verified, and not timed.",
        epilog="Exit status: 0 if every product is correct, precisions reach their targets, and nothing is slower than "
        "in the results of --compare beyond the spread; 1 otherwise; 2 for arguments that are wrong, or an output that "
        "cannot be written; 130 if interrupted, which keeps the shapes that were measured.",
    )
    made.add_argument("--list", action="store_true", help="list the stages, one per line, and stop")
    add_parameters(made, [EXPERIMENT])
    made.add_argument("--hot", action="store_true", help="one set of operands, in the L2 cache if it fits (default)")
    add_result_options(made)
    made.add_argument("--compare", type=Path, metavar="OLD", help="an older results folder or CSV; report what changed")
    made.add_argument(
        "--model", action="store_true", help="also predict times from bytes and the device's ceilings, and compare"
    )
    made.add_argument(
        "--ceilings",
        type=Path,
        metavar="FILE",
        help="ceilings.json for --model (default: that of results/h200/latest for the same GPU, else theoretical ones)",
    )
    made.add_argument("--plot", action="store_true", help="also draw gflops_vs_size.png, roofline.png and ladder.png")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, without a GPU on Numba's simulator; return the exit status."""
    made = parser()
    options = vars(made.parse_args(arguments))
    if options.pop("hot") and "cold" in options:
        made.error("argument --cold: not allowed with argument --hot")
    if probe.driver_error() is not None:
        probe.choose(simulator=True)  # before anything imports Numba
    if options.pop("list"):
        from numba_gemm.api import stages

        print(stages())
        return RIGHT
    from numba_gemm.lab.harness.runner import run

    out, commit = options.pop("out"), options.pop("commit")
    report = Report(options.pop("compare"), options.pop("model"), options.pop("ceilings"), options.pop("plot"))
    EXPERIMENT.run(**options)  # checks them; nothing is measured before the first result is asked for
    experiment = replace(EXPERIMENT, report=report, claims=report.claims)
    return RIGHT if run(experiment, options, out=out, commit=commit) else WRONG
