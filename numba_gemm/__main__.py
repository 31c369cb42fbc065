"""The command ``numba-gemm``, also ``python -m numba_gemm``: its subcommands, each imported when it is chosen."""

from __future__ import annotations

import importlib
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from . import __version__
from .terminal import USAGE, Parser, command

# Name, module whose ``main(arguments)`` runs the subcommand and returns the exit status, and help.
SUBCOMMANDS = {
    "bench": ("numba_gemm.lab.bench.cli", "verify and time every stage and cuBLAS"),
    "explain": ("numba_gemm.gemm.commands.explain", "describe what tiled_sgemm does for a shape, and why"),
    "autotune": ("numba_gemm.gemm.commands.autotune", "measure the fastest stage for a shape, and keep the choice"),
    "precompile": ("numba_gemm.gemm.commands.precompile", "compile kernels into the cache, or into a bundle"),
    "cache": ("numba_gemm.gemm.commands.cache", "list or delete the cached kernels"),
    "inspect": ("numba_gemm.inspect.cli", "compile a stage; print its registers, PTX and SASS"),
    "step": ("numba_gemm.inspect.step_cli", "step through a thread of a stage on the simulator"),
    "puzzle": ("numba_gemm.puzzles.cli", "write the kernels of the ladder yourself, checked on the simulator"),
    "doctor": ("numba_gemm.doctor.cli", "report problems of this installation and the commands that fix them"),
    "lab": ("numba_gemm.lab.__main__", "run an experiment or a measurement of the laboratory"),
}


def parser() -> Parser:
    """Return the parser of what precedes the subcommand's own arguments."""
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"  {name:{width}}  {said}" for name, (_, said) in SUBCOMMANDS.items())
    made = Parser(
        formatter_class=RawDescriptionHelpFormatter,
        prog="numba-gemm",
        usage="numba-gemm [-h] [--version] COMMAND ...",
        description="Matrix multiplication in float32 on NVIDIA GPUs, with kernels written in Numba-CUDA.",
        epilog=f"commands:\n{listed}\n\nnumba-gemm COMMAND --help describes a command and its exit status. Status 2 "
        "stands for\narguments or a machine that a command cannot use, 130 for an interrupt.",
    )
    made.add_argument("--version", action="version", version=f"numba-gemm {__version__}")
    made.add_argument("command", choices=SUBCOMMANDS, metavar="COMMAND", help="one of the commands below")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser().print_help(sys.stderr)
        return USAGE
    module, _ = SUBCOMMANDS[parser().parse_args(given[:1]).command]
    return int(importlib.import_module(module).main(given[1:]))


if __name__ == "__main__":
    sys.exit(main())
