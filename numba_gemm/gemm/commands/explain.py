"""``numba-gemm explain``: describe what `tiled_sgemm` does for a shape, without arrays."""

from __future__ import annotations

from collections.abc import Sequence

from ...terminal import Parser, compute_capability
from .options import add_product, gemm_command


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="numba-gemm explain",
        description="Describe what tiled_sgemm does for dense operands in device memory, and why. Nothing is allocated "
        "or launched; a kernel may be compiled if the number of blocks depends on its registers.",
        epilog="Exit status: 0; 2 for arguments that are wrong, or without a GPU and without --cc.",
    )
    add_product(made)
    made.add_argument("--stage", default="auto", metavar="NAME", help="as in tiled_sgemm (default: auto)")
    made.add_argument(
        "--cc",
        type=compute_capability,
        metavar="X.Y",
        help="compute capability; without such a GPU, a model of one decides (default: that of the current GPU)",
    )
    return made


@gemm_command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the description; return the exit status."""
    options = parser().parse_args(arguments)
    from ...runtime.driver import advising
    from ..explain import explain_shape

    with advising("Pass --cc 9.0 for a model of a GPU"):
        explanation = explain_shape(
            *options.shape,
            batch=options.batch,
            layout=options.layout,
            stage=options.stage,
            precision=options.precision,
            dtype=options.dtype,
            cc=options.cc,
        )
    print(explanation)
    return 0
