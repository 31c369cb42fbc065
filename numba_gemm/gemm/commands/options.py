"""Options that the subcommands share, and their errors."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

from ...kernels.product import FLOAT32, LAYOUTS, check_dtypes
from ...terminal import Parser, UsageError, at_least_one, command


def shape(text: str) -> tuple[int, int, int]:
    """Parse extents: "4096x6144x2048" becomes (4096, 6144, 2048); the type of an option."""
    extents = text.lower().split("x")
    if len(extents) != 3 or not all(extent.isdecimal() and int(extent) > 0 for extent in extents):
        raise argparse.ArgumentTypeError(f"{text!r} given; expected M, N and K, from 1 on, such as 4096x6144x2048")
    m, n, k = map(int, extents)
    return m, n, k


def dtypes(text: str) -> tuple[str, str]:
    """Parse one data type or two: "float16,float32" becomes a pair; the type of an option."""
    names = text.split(",")
    try:
        return check_dtypes(names * 2 if len(names) == 1 else names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_dtype(parser: Parser) -> None:
    """Add the option for the data types of A and B."""
    parser.add_argument(
        "--dtype",
        type=dtypes,
        default=(FLOAT32, FLOAT32),
        metavar="NAME[,NAME]",
        help="of A and B: float32, float16 or bfloat16, or one of each (default: float32)",
    )


def add_product(parser: Parser) -> None:
    """Add the options that describe a product: shape, layout, batch, data types and precision."""
    parser.add_argument("shape", type=shape, metavar="MxNxK", help="extents, such as 4096x6144x2048")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="NN",
        metavar="AB",
        help="layouts of A and B, N by rows and T by columns: NN, NT, TN or TT (default: NN)",
    )
    parser.add_argument(
        "--batch", type=at_least_one, default=1, metavar="COUNT", help="products of these extents (default: 1)"
    )
    add_dtype(parser)
    parser.add_argument("--precision", default="ieee", metavar="NAME", help="as in tiled_sgemm (default: ieee)")


def gemm_command(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Wrap the function of a subcommand: errors of arguments and of the machine are one line, with status 2."""

    @command
    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except ModuleNotFoundError:
            raise
        except (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(str(error)) from error

    return run
