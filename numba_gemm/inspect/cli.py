"""``numba-gemm inspect STAGE``: compile a stage and print its resource usage, with or without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..models.gpu_names import dotted
from ..simulator.probe import simulator_requested
from ..terminal import Parser, UsageError, command, compute_capability, output_ended


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="numba-gemm inspect",
        description="Compile a stage, with or without a GPU, and print what each of its configurations uses: shared is "
        "shared memory in bytes per block, static and dynamic; local and spills are bytes per thread.",
        epilog="Exit status: 0; 2 for arguments that are wrong, or if nothing can be compiled here.",
    )
    made.add_argument("stage", metavar="STAGE", help="a stage of either ladder, such as double_buffered")
    made.add_argument(
        "--cc", type=compute_capability, default=(9, 0), metavar="X.Y", help="compute capability (default: 9.0)"
    )
    made.add_argument(
        "--precision", metavar="NAME", help="that the stage computes in, such as bf16x6 (default: the stage's first)"
    )
    made.add_argument("--config", metavar="NAME", help="only this configuration, such as 128x128x8-8x8 (default: all)")
    made.add_argument("--ptx", action="store_true", help="print the PTX of each")
    made.add_argument("--sass", action="store_true", help="print the SASS of each, and its main loop's instruction mix")
    made.add_argument(
        "--ffma",
        action="store_true",
        help="print a table of multiply-adds, register banks and loads instead, one row per order of the products",
    )
    return made


def run(arguments: argparse.Namespace) -> None:
    """Print the report; raise ValueError for an unknown stage or configuration."""
    from ..gemm.precision import canonical
    from ..gemm.stage_names import check_stage_precision
    from ..kernels import STAGES
    from ..kernels.ladder.stage import LadderStage
    from . import ffma, report

    if arguments.stage not in STAGES:
        raise ValueError(f"unknown stage {arguments.stage!r}; the stages are {', '.join(STAGES)}")
    stage = STAGES[arguments.stage]
    names = [config.name for config in stage.configs]
    if arguments.config is not None and arguments.config not in names:
        raise ValueError(f"{stage.name} has no configuration {arguments.config!r}; it has {', '.join(names)}")
    if arguments.precision is not None:
        check_stage_precision(stage, canonical(arguments.precision))
    if arguments.ffma:
        if not isinstance(stage, LadderStage):
            raise ValueError(f"{stage.name} has no multiply-adds of float32 to count")
        table = list(ffma.rows(stage, arguments.cc, arguments.config))
        print(f"{stage.name} for compute capability {dotted(arguments.cc)}, aligned operands")
        print(ffma.as_text(table))
        print(ffma.LEGEND)
        return
    for index, compiled in enumerate(report.variants(stage, arguments.cc, arguments.config, arguments.precision)):
        if output_ended():
            return
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


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    if simulator_requested():
        raise UsageError("the simulator runs kernels as Python and compiles nothing: unset NUMBA_ENABLE_CUDASIM")
    try:
        run(options)
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0
