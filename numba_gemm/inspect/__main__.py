"""``python -m numba_gemm.inspect STAGE``: compile a stage and print its resource usage, with or without a GPU."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from ..simulator.probe import simulator_requested


def compute_capability(text: str) -> tuple[int, int]:
    """Parse a compute capability for argparse: "9.0" becomes (9, 0)."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"not a compute capability: {text!r}; write it as 9.0")
    return int(major), int(minor)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m numba_gemm.inspect",
        description="Compile a stage without a GPU and print what each of its configurations uses.",
        epilog="shared counts static and dynamic shared memory in bytes a block, local and spills bytes a thread.",
    )
    made.add_argument("stage", metavar="STAGE", help="a stage of either ladder, such as double_buffered")
    made.add_argument(
        "--cc", type=compute_capability, default=(9, 0), metavar="X.Y", help="compute capability (default: 9.0)"
    )
    made.add_argument("--precision", metavar="NAME", help="of a stage of the tensor cores, such as bf16x6")
    made.add_argument("--config", metavar="NAME", help="only this configuration, such as 128x128x8-8x8")
    made.add_argument("--ptx", action="store_true", help="print the PTX of each")
    made.add_argument("--sass", action="store_true", help="print the SASS of each, and its main loop's instruction mix")
    made.add_argument(
        "--ffma",
        action="store_true",
        help="print a table of multiply-adds, register banks and loads instead, a row for each order of the products",
    )
    return made


def run(arguments: argparse.Namespace) -> None:
    """Print the report; raise ValueError for an unknown stage or configuration."""
    from ..kernels import STAGES
    from ..kernels.ladder.stage import LadderStage
    from . import ffma, report

    if arguments.stage not in STAGES:
        raise ValueError(f"unknown stage {arguments.stage!r}; the stages are {', '.join(STAGES)}")
    stage = STAGES[arguments.stage]
    names = [config.name for config in stage.configs]
    if arguments.config is not None and arguments.config not in names:
        raise ValueError(f"{stage.name} has no configuration {arguments.config!r}; it has {', '.join(names)}")
    if arguments.ffma:
        if not isinstance(stage, LadderStage):
            raise ValueError(f"{stage.name} has no multiply-adds of float32 to count")
        table = list(ffma.rows(stage, arguments.cc, arguments.config))
        print(f"{stage.name} for compute capability {report.dotted(arguments.cc)}, aligned operands")
        print(ffma.as_text(table))
        print(ffma.LEGEND)
        return
    for index, compiled in enumerate(report.variants(stage, arguments.cc, arguments.config, arguments.precision)):
        if index:
            print()
        print(f"config: {compiled.label}")
        print(f"registers: {compiled.registers}")
        print(f"shared: {compiled.shared}")
        print(f"local: {compiled.local}")
        print(f"spills: {compiled.spills}", flush=True)
        if arguments.ptx:
            print(compiled.cubin.ptx)
        if arguments.sass:
            print("main loop:", ", ".join(f"{count} {name}" for name, count in compiled.mix.most_common()) or "none")
            print(compiled.sass)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 if it cannot compile, 2 if the command line is invalid."""
    arguments = parser().parse_args(argv)
    if simulator_requested():
        print(
            "error: the simulator runs kernels as Python and compiles nothing: unset NUMBA_ENABLE_CUDASIM",
            file=sys.stderr,
        )
        return 1
    try:
        run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when a pipe closes, for example to head
    sys.exit(main())
