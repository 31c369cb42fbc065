"""``numba-gemm cache``: list or delete the cached kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...runtime import bundle, kernel_files
from ...terminal import Parser
from .options import gemm_command


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="numba-gemm cache",
        description="List the cached kernels: name, compute capability, time of compilation, size, last use, compiler.",
        epilog="Exit status: 0; 2 for arguments that are wrong, or if the cache cannot be read or written.",
    )
    made.add_argument("--clear", action="store_true", help="delete them")
    return made


@gemm_command
def main(arguments: Sequence[str] | None = None) -> int:
    """List the cache, or clear it; return the exit status."""
    options = parser().parse_args(arguments)
    place = kernel_files.directory()
    if place is None:
        print("the cache is switched off (NUMBA_GEMM_CACHE_DIR)")
        return 0
    if options.clear:
        print(f"{kernel_files.clear_cache()} kernels deleted from {place}")
        return 0
    limit, found = kernel_files.size_limit(), kernel_files.entries()
    if found:
        print(f"{'kernel':72} {'cc':>5} {'compiled in':>11} {'size':>9} {'used':10} made with")
    for one in found:
        used, cc = time.strftime("%Y-%m-%d", time.localtime(one.used)), f"{one.cc[0]}.{one.cc[1]}"
        made_with = " ".join(f"{package}={version}" for package, version in one.made_with.items())
        print(f"{one.kernel:72} {cc:>5} {one.seconds:9.1f} s {one.size / 1000:6.1f} KB {used:10} {made_with}")
    if (imported := place / kernel_files.IMPORTED).is_file():
        try:
            print(f"{len(bundle.contents_of(imported))} kernels more in the bundle that was imported, {imported}")
        except Exception as error:  # whatever a parser says of contents that may be anything
            print(f"the bundle that was imported, {imported}, cannot be used ({error}); import one again, or delete it")
    total = sum(one.size for one in found)
    count = f"{len(found)} kernel{'' if len(found) == 1 else 's'}"
    print(f"{count}, {total / 1e6:.1f} MB of at most {limit / 1e6:.0f} MB, in {place}")
    return 0
