"""``numba-gemm lab NAME``, also ``python -m numba_gemm.lab NAME``: the laboratory's measurements."""

from __future__ import annotations

import importlib
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from ..terminal import Parser, command

# Name, module whose `main` measures, and help.
MEASUREMENTS = {
    "accuracy": ("bench.accuracy", "errors of the precisions against K"),
    "ceilings": ("bench.ceilings", "highest FP32, DRAM, L2 and shared-memory throughput of the GPU"),
    "counters": ("bench.counters", "Nsight Compute's counters of every stage"),
    "first_products": ("bench.first_products.__main__", "duration of a process's first products"),
    "memory": ("memory.__main__", "experiments on memory"),
    "orders": ("bench.orders", "orders of the products of a k-step"),
    "streamed": ("bench.streamed", "products of operands in host memory"),
    "targets": ("bench.targets.__main__", "the public function against its targets"),
    "tensor_ladder": ("bench.tensor_ladder", "the tensor-core stages one by one"),
    "tracer": ("bench.tracer", "counters beside the tracer's counts"),
}


def parser() -> Parser:
    """Return the parser of what precedes the measurement's own arguments."""
    listed = listing()
    made = Parser(
        formatter_class=RawDescriptionHelpFormatter,
        prog="numba-gemm lab",
        usage="numba-gemm lab [-h] [--list] NAME ...",
        description="Run a measurement of the laboratory.",
        epilog=f"names:\n{listed}\n\nnumba-gemm lab NAME --help describes a measurement and its exit status; status 2 "
        "stands\nfor arguments or a machine that it cannot use.",
    )
    made.add_argument("--list", action="store_true", help="print the names and stop")
    made.add_argument("name", choices=MEASUREMENTS, nargs="?", metavar="NAME", help="one of the names below")
    return made


def listing() -> str:
    """Return one line per measurement."""
    width = max(map(len, MEASUREMENTS))
    return "\n".join(f"  {name:{width}}  {said}" for name, (_, said) in MEASUREMENTS.items())


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a measurement; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given[:1])
    if options.list:
        print(listing())
        return 0
    if options.name is None:
        parser().error("name one or more experiments; --list shows all")
    module, _ = MEASUREMENTS[options.name]
    return int(importlib.import_module(f"numba_gemm.lab.{module}").main(given[1:]))


if __name__ == "__main__":
    sys.exit(main())
