"""``numba-gemm autotune``: measure which stage is fastest for a shape, and keep the choice."""

from __future__ import annotations

from collections.abc import Sequence

from ...simulator.probe import simulator_requested
from ...terminal import Parser, UsageError, at_least_one, positive_seconds
from .options import add_product, gemm_command


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="numba-gemm autotune",
        description="Measure which stage and configuration is fastest on the current GPU, and keep the choice: "
        "tiled_sgemm follows it from then on for such operands. Device memory for A, B and C is allocated.",
        epilog="Exit status: 0; 2 for arguments that are wrong, without a GPU, or if no candidate can be run.",
    )
    add_product(made)
    made.add_argument(
        "--candidates", type=at_least_one, default=12, metavar="COUNT", help="most candidates (default: 12)"
    )
    made.add_argument(
        "--seconds", type=positive_seconds, default=30.0, metavar="S", help="approximate duration (default: 30)"
    )
    return made


@gemm_command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table; return the exit status."""
    options = parser().parse_args(arguments)
    if simulator_requested():
        raise UsageError("the simulator has no times: unset NUMBA_ENABLE_CUDASIM, on a GPU")
    import numpy as np

    from ...runtime.device import current_device
    from ...runtime.driver import advising
    from ..autotune import autotune
    from ..precision import canonical
    from ..request import check_size

    canonical(options.precision)
    if "bfloat16" in options.dtype:
        raise UsageError("NumPy has no bfloat16: call numba_gemm.autotune in Python, with tensors of PyTorch")
    with advising("Run this on a machine with a GPU"):
        current_device()
    m, n, k = options.shape
    batch = () if options.batch == 1 else (options.batch,)
    shapes = {"a": (*batch, m, k), "b": (*batch, k, n), "out": (*batch, m, n)}
    for name, shape in shapes.items():
        check_size(name, shape)
    # Only their shapes, strides and addresses are used.
    a, b = (
        np.empty(shape, dtype) if order == "N" else np.empty((*batch, *shape[:-3:-1]), dtype).swapaxes(-1, -2)
        for shape, order, dtype in zip((shapes["a"], shapes["b"]), options.layout, options.dtype)
    )
    print(autotune(a, b, precision=options.precision, candidates=options.candidates, seconds=options.seconds))
    return 0
