"""``numba-gemm precompile``: compile kernels into the cache, or into a bundle for other machines."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from ...kernels.product import LAYOUTS
from ...runtime import bundle, kernel_files
from ...runtime.compilation import Task, compile_all
from ...runtime.compiler import Cubin, machine_code
from ...runtime.driver import advising
from ...runtime.kernel_key import portable_key
from ...terminal import Parser, UsageError, at_least_one, compute_capabilities
from .options import add_dtype, gemm_command, shape

__all__ = ["check_bundle", "main"]

DONE, DIFFERS = 0, 1


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="numba-gemm precompile",
        description="Compile kernels into the cache on disk, with or without a GPU; see numba_gemm.precompile.",
        epilog="Exit status: 0; 1 if --check's bundle has another kernel, or none, for a source; 2 for arguments that "
        "are wrong, or if nothing can be compiled here.",
    )
    made.add_argument("--stages", default="auto", metavar="NAMES", help="separated by commas (default: auto)")
    made.add_argument("--precision", default="ieee", metavar="NAMES", help="separated by commas (default: ieee)")
    made.add_argument(
        "--cc",
        type=compute_capabilities,
        metavar="CCS",
        help="compute capabilities, such as 8.0,9.0 (default: those present)",
    )
    made.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        metavar="MxNxK",
        help="only the kernels chosen for these products (default: for usual products)",
    )
    made.add_argument(
        "--layouts",
        type=layouts,
        default=["NN"],
        metavar="NAMES",
        help="of A and B in --shapes, or without it, in those usual products that are not compiled in all layouts: "
        "some of NN, NT, TN, TT, separated by commas (default: NN)",
    )
    add_dtype(made)
    made.add_argument("--recorded", action="store_true", help="the kernels that autotune chose here, too")
    made.add_argument(
        "--jobs",
        type=at_least_one,
        metavar="N",
        help="processes (default: NUMBA_GEMM_JOBS, or the number of cores, at most 16)",
    )
    files = made.add_mutually_exclusive_group()
    files.add_argument("--export", type=Path, metavar="FILE", help="write the kernels to a bundle")
    files.add_argument(
        "--check", type=Path, metavar="FILE", help="compile some of the kernels again, and compare them with a bundle's"
    )
    files.add_argument("--import", type=Path, metavar="FILE", dest="brought", help="copy a bundle into the cache")
    made.add_argument(
        "--sample", type=at_least_one, default=8, metavar="N", help="kernels that --check compiles (default: 8)"
    )
    return made


def layouts(text: str) -> list[str]:
    """Parse layouts separated by commas; the type of an option."""
    if unknown := [word for word in text.split(",") if word not in LAYOUTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} given; expected some of {', '.join(LAYOUTS)}")
    return text.split(",")


@gemm_command
def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, or copy or check a bundle; return the exit status."""
    options = parser().parse_args(arguments)
    from ..compile_progress import fetch_with_progress
    from ..precompile import kernels_of, require_cache  # imports Numba on the simulator

    if options.brought is not None:
        print(f"{bundle.import_bundle(options.brought)} kernels imported into {kernel_files.directory()}")
        return DONE
    if options.export is not None and (options.export.is_dir() or not options.export.absolute().parent.is_dir()):
        raise UsageError(f"--export {options.export}: expected a file in a directory that exists; name one")
    begin = time.perf_counter()
    if options.export is None and options.check is None:
        require_cache()
    with advising("Pass --cc 9.0, for which no GPU is needed" if not options.recorded else "Leave out --recorded"):
        wanted = kernels_of(
            options.stages.split(","),
            options.cc,
            options.precision.split(","),
            shapes=options.shapes,
            layouts=options.layouts,
            dtype=options.dtype,
            recorded=options.recorded,
        )
    tasks = [(kernel, cc) for *_, kernel, cc in wanted]
    if options.check is not None:
        drawn = random.sample(tasks, min(options.sample, len(tasks)))
        differing = check_bundle(options.check, drawn, options.jobs)
        for name in differing:
            print(name)
        print(f"{len(drawn)} kernels compiled again, {len(differing)} differ")
        return DIFFERS if differing else DONE
    fetched = fetch_with_progress(tasks, options.jobs, None)
    if options.export is not None:
        keys = [portable_key(*task) for task in tasks]
        made = [(key, task[0].name, one.cubin, one.seconds) for key, task, one in zip(keys, tasks, fetched) if key]
        size = bundle.export(options.export, made)
        print(f"{len(made)} kernels, {size / 1e6:.1f} MB, in {options.export}", end="")
    else:
        compiled = sum(one.origin == "compiler" for one in fetched)
        print(f"{len(fetched)} kernels, {compiled} of them compiled, in {kernel_files.directory()}", end="")
    print(f", after {time.perf_counter() - begin:.1f} s")
    return DONE


def check_bundle(path: Path, tasks: Sequence[Task], jobs: int | None = None) -> list[str]:
    """Compile kernels again; return the names of those that differ from a bundle's, or are not in the bundle.

    Kernels that another release of the compiler made may differ, too.
    """
    differing: list[str] = []

    def compare(i: int, cubin: Cubin, seconds: float) -> None:
        kernel, cc = tasks[i]
        found = bundle.read(path, portable_key(kernel, cc) or "")
        if found is None or machine_code(found) != machine_code(cubin):
            differing.append(f"{kernel.name} for {cc}" + (", missing" if found is None else ""))

    compile_all(tasks, compare, jobs)
    return sorted(differing)
