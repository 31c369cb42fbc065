"""``numba-gemm doctor``: report on this machine, problems found, and the commands that fix them.

Facts are gathered first, each kind in a child process with a time limit, so that a broken installation or a library
that crashes is reported like any other problem. `diagnose` then derives the findings from the facts alone. A small
matrix multiplication on the GPU, or else on Numba's simulator, confirms the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

from numba_gemm.doctor.checks import diagnose
from numba_gemm.doctor.gather import SECTIONS, answer, gather, with_trial
from numba_gemm.doctor.report import report, trial_line, verdict
from numba_gemm.terminal import Parser, command, positive_seconds


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="numba-gemm doctor",
        description="Report this machine, the problems found and the commands that fix them; then multiply matrices.",
        epilog="Exit status: 0 if kernels run, on a GPU or the simulator; 1 if there is something to fix; 2 for "
        "arguments that are wrong.",
    )
    made.add_argument(
        "--timeout",
        type=positive_seconds,
        default=300.0,
        metavar="S",
        help="seconds that the product may take (default: 300)",
    )
    made.add_argument(
        "--section", choices=SECTIONS, help="gather one kind of facts, and print it with its errors (default: all)"
    )
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Report the facts, run the trial and print the findings; return the exit status."""
    options = parser().parse_args(arguments)
    if options.section:
        return answer(options.section)
    facts = gather()
    print("\n".join(report(facts)), flush=True)
    facts = with_trial(facts, options.timeout)
    assert facts.trial is not None
    print(trial_line(facts.trial))
    findings = diagnose(facts)
    for finding in findings:
        print(f"\n{finding.level}: {finding.problem}\nfix: {finding.fix}")
    text, status = verdict(facts, findings)
    print(f"\n{text}")
    return status
