"""``python -m numba_gemm.doctor``: report on this machine, problems found, and the commands that fix them.

Facts are gathered first, each kind in a child process with a time limit, so that a broken installation or a library
that crashes is reported like any other problem. `diagnose` then derives the findings from the facts alone. A small
matrix multiplication on the GPU, or else on Numba's simulator, confirms the verdict.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from numba_gemm.doctor.checks import diagnose
from numba_gemm.doctor.gather import SECTIONS, answer, gather, with_trial
from numba_gemm.doctor.report import report, trial_line, verdict


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m numba_gemm.doctor",
        description="Report this machine, the problems found and the commands that fix them; then multiply matrices.",
        epilog="Exit status: 0 if kernels run, on a GPU or the simulator; 1 if there is something to fix.",
    )
    made.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="S", help="seconds that the product may take (default: 300)"
    )
    made.add_argument(
        "--section", choices=SECTIONS, help="gather one kind of facts alone, and print it with its errors"
    )
    return made


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} given; expected a number of seconds above 0; pass 300, for instance"
        )
    return value


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
