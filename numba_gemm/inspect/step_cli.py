"""``numba-gemm step STAGE``: step through a thread of a stage on the simulator, as text or as a player."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..simulator.probe import choose
from ..terminal import Parser, UsageError, command, output_ended


def integers(text: str) -> tuple[int, ...]:
    """Parse one to three integers from 0 on, separated by commas; the type of an option."""
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} given; expected x, y and z, such as 2,0")
    return tuple(map(int, parts))


def extents(text: str) -> tuple[int, int, int]:
    """Parse M, N and K, separated by commas or by "x"; the type of an option."""
    parts = text.lower().replace("x", ",").split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} given; expected M, N and K, from 1 on, such as 16,16,16")
    m, n, k = map(int, parts)
    return m, n, k


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="numba-gemm step",
        description="Step through a thread of a stage, in a small product on the simulator, which needs no GPU: print "
        "each line with the variables that have changed, or write a page in which a browser plays the steps.",
        epilog="Exit status: 0; 2 for arguments that are wrong.",
    )
    made.add_argument(
        "stage",
        metavar="STAGE",
        help="a stage of the FP32 ladder, one_warp or fused_decomposition",
    )
    made.add_argument(
        "--thread",
        type=integers,
        action="append",
        metavar="X,Y,Z",
        help="the thread within block (0, 0, 0); repeatable with --html (default: 0,0,0)",
    )
    made.add_argument(
        "--shape", type=extents, default=(16, 16, 16), metavar="M,N,K", help="the product (default: 16,16,16)"
    )
    made.add_argument(
        "--config", default="test", metavar="NAME", help="a configuration of the stage (default: test, a small one)"
    )
    made.add_argument("--html", metavar="FILE", help="write a player to this file instead of printing the steps")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the steps or write the page; return the exit status."""
    options = parser().parse_args(arguments)
    threads = options.thread or [(0, 0, 0)]
    if len(threads) > 1 and options.html is None:
        raise UsageError("several threads are for --html; pass one --thread")
    if "numba" not in sys.modules:
        choose(simulator=True)
    import numpy as np

    from ..kernels import STAGES
    from .stepping import step

    if options.stage not in STAGES:
        names = ", ".join(name for name, stage in STAGES.items() if stage.test_config is not None)
        raise UsageError(f"stage is {options.stage!r}; expected one of {names}; pass one of these")
    m, n, k = options.shape
    a, b = (np.arange(rows * cols, dtype=np.float32).reshape(rows, cols) % 10 for rows, cols in ((m, k), (k, n)))
    c = np.zeros((m, n), np.float32)
    try:
        steps = step(options.stage, None, None, 1, a, b, 0, c, config=options.config, thread=threads[0])
        if options.html is None:
            with steps:
                for one in steps:
                    if output_ended():
                        break
                    print(one)
        else:
            player = steps.player(threads)
            player.save(options.html)
            print(f"{options.html}: {player.title}")
    except (NotImplementedError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0
