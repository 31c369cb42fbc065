"""The command ``numba-gemm``: kernels compiled ahead of time, bundles of kernels, and the cache."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..runtime import bundle, kernel_files
from ..runtime.compilation import Task, compile_all
from ..runtime.compiler import Cubin, machine_code
from ..runtime.kernel_key import portable_key
from .precompile import fetch_with_progress, kernels_of, require_cache

__all__ = ["check_bundle", "main"]

DONE, DIFFERS, UNUSABLE = 0, 1, 2


def check_bundle(path: Path, tasks: Sequence[Task], jobs: int | None = None) -> list[str]:
    """Compile kernels of a bundle again; return the names of those that differ, or are not in the bundle.

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


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="numba-gemm", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    ahead = commands.add_parser(
        "precompile",
        help="compile kernels into the cache, or into a bundle for other machines",
        description="Compile kernels into the cache on disk, with or without a GPU; see numba_gemm.precompile.",
    )
    ahead.add_argument("--stages", default="auto", metavar="NAMES", help="separated by commas (default: auto)")
    ahead.add_argument("--precision", default="ieee", metavar="NAMES", help="separated by commas (default: ieee)")
    ahead.add_argument("--cc", metavar="CCS", help="compute capabilities, such as 8.0,9.0 (default: those present)")
    ahead.add_argument("--shapes", nargs="+", metavar="MxNxK", help="only the kernels chosen for these products")
    ahead.add_argument("--layouts", default="NN", metavar="NAMES", help="of --shapes, such as NN,NT,TN (default: NN)")
    ahead.add_argument("--recorded", action="store_true", help="the kernels that autotune chose here, too")
    ahead.add_argument("--jobs", type=int, metavar="N", help="processes (default: the number of cores, at most 16)")
    files = ahead.add_mutually_exclusive_group()
    files.add_argument("--export", type=Path, metavar="FILE", help="write the kernels to a bundle")
    files.add_argument("--check", type=Path, metavar="FILE", help="compile some kernels of a bundle again, and compare")
    files.add_argument("--import", type=Path, metavar="FILE", dest="brought", help="copy a bundle into the cache")
    ahead.add_argument("--sample", type=int, default=8, metavar="N", help="kernels that --check compiles (default: 8)")
    cache = commands.add_parser("cache", help="list the cache's kernels", description="List the kernels in the cache.")
    cache.add_argument("--clear", action="store_true", help="delete them")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if a bundle differs from its sources, 2 if the command fails."""
    options = parser().parse_args(arguments)
    try:
        return _cache(options.clear) if options.command == "cache" else _precompile(options)
    except BrokenPipeError:  # whoever reads the list has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (OSError, RuntimeError, ValueError) as error:
        print(f"numba-gemm: {error}", file=sys.stderr)
        return UNUSABLE


def _precompile(options: argparse.Namespace) -> int:
    if options.brought is not None:
        print(f"{bundle.import_bundle(options.brought)} kernels imported into {kernel_files.directory()}")
        return DONE
    begin = time.perf_counter()
    if options.export is None and options.check is None:
        require_cache()
    wanted = kernels_of(
        options.stages.split(","),
        None if options.cc is None else [_pair(word) for word in options.cc.split(",")],
        options.precision.split(","),
        shapes=None if options.shapes is None else [_shape(word) for word in options.shapes],
        layouts=options.layouts.split(","),
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


def _cache(clear: bool) -> int:
    place = kernel_files.directory()
    if place is None:
        print("the cache is switched off (NUMBA_GEMM_CACHE_DIR)")
        return DONE
    if clear:
        print(f"{kernel_files.clear_cache()} kernels deleted from {place}")
        return DONE
    found = kernel_files.entries()
    if found:
        print(f"{'kernel':72} {'cc':>5} {'compiled in':>11} {'size':>9} {'used':10} made with")
    for one in found:
        used, cc = time.strftime("%Y-%m-%d", time.localtime(one.used)), f"{one.cc[0]}.{one.cc[1]}"
        made_with = " ".join(f"{package}={version}" for package, version in one.made_with.items())
        print(f"{one.kernel:72} {cc:>5} {one.seconds:9.1f} s {one.size / 1000:6.1f} KB {used:10} {made_with}")
    if (place / kernel_files.IMPORTED).is_file():
        brought = len(bundle.contents_of(place / kernel_files.IMPORTED))
        print(f"{brought} kernels more in the bundle that was imported, {place / kernel_files.IMPORTED}")
    total = sum(one.size for one in found)
    print(f"{len(found)} kernels, {total / 1e6:.1f} MB of at most {kernel_files.size_limit() / 1e6:.0f} MB, in {place}")
    return DONE


def _pair(word: str) -> tuple[int, int]:
    major, dot, minor = word.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"--cc has {word!r}; expected compute capabilities such as 8.0,9.0; pass these")
    return int(major), int(minor)


def _shape(word: str) -> tuple[int, int, int]:
    extents = word.lower().split("x")
    if len(extents) != 3 or not all(extent.isdecimal() for extent in extents):
        raise ValueError(f"--shapes has {word!r}; expected M, N and K, such as 4096x6144x2048; pass these")
    m, n, k = map(int, extents)
    return m, n, k
