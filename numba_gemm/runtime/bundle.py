"""Bundles: kernels that were compiled on another machine, in one file, as ``.pyc`` files travel beside modules.

Kernels are named by the sources, what they are built for and the compute capability (`kernel_key.portable_key`). A
bundle of other sources has none that would be found, so it is refused. Bundles are looked up after the user's own
files, in this order: the one that NUMBA_GEMM_BUNDLE names, the one that was imported into the cache directory, and the
one that came with the package.

A bundle is a line that says so, a line of JSON with the digest of the sources, and offset and size of each kernel, and
the kernels, as `kernel_files.packed` makes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

from . import kernel_files
from .compiler import Cubin
from .kernel_files import IMPORTED, About, packed, unpacked
from .kernel_key import versions
from .private_files import PrivateDirectory, Refused, refusal
from .sources import SOURCES

__all__ = ["PACKAGED", "contents_of", "export", "import_bundle", "look_up", "read"]

MAGIC = b"numba_gemm bundle\n"
MAX_BYTES = 1 << 30
PACKAGED = Path(__file__).parents[1] / "kernels.bundle"  # put there by the build, see `hatch_build.py`


def export(path: Path, kernels: Iterable[tuple[str, str, Cubin, float]]) -> int:
    """Write a bundle; return its size in bytes.

    Parameters
    ----------
    path : Path
        File to write.
    kernels : iterable of (str, str, Cubin, float)
        Portable key, name, compiled kernel, and seconds that it took. The assembler's output is left out.
    """
    made_with, parts = versions(), {}
    for key, kernel, cubin, seconds in kernels:
        parts[key] = packed(key, replace(cubin, ptx="", log=""), About(kernel, seconds, made_with))
    sizes = list(map(len, parts.values()))
    starts = accumulate(sizes, initial=0)
    places = {name: [start, size] for name, start, size in zip(parts, starts, sizes)}
    index = {"sources": SOURCES, "kernels": places}
    whole = MAGIC + json.dumps(index).encode() + b"\n" + b"".join(parts.values())
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(whole)
    temporary.chmod(0o644)  # a bundle that others can write is refused
    temporary.replace(path)
    return len(whole)


class _Opened(NamedTuple):
    """An open bundle: the file, the places of its kernels, and the offset from which they count."""

    file: BinaryIO
    places: dict[str, tuple[int, int]]
    begin: int

    def kernel(self, name: str) -> Cubin:
        """Return the kernel of a portable key that it has."""
        start, size = self.places[name]
        self.file.seek(self.begin + start)
        return unpacked(name, self.file.read(size))[0]


# By path: modification and size of a bundle, its index, and the offset from which places count.
_known: dict[Path, tuple[tuple[int, int, int], dict[str, tuple[int, int]], int]] = {}


@contextmanager
def _opened(path: Path) -> Iterator[_Opened]:
    """Open a bundle; raises OSError or ValueError as `read` does."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if path != PACKAGED and (problem := refusal(path, status)) is not None:  # that one is as safe as the sources
            raise Refused(path, problem)
        state = status.st_ino, status.st_mtime_ns, status.st_size
        known = _known.get(path)
        if known is None or known[0] != state:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"{path} is not a bundle of kernels")
            index = json.loads(file.readline())
            if not isinstance(index, dict) or not isinstance(places := index.get("kernels"), dict):
                raise ValueError(f"{path} has no index; export it again")
            if index.get("sources") != SOURCES:
                raise ValueError(f"{path} was made from other sources of numba_gemm; export it again with these")
            known = state, {str(name): (int(start), int(size)) for name, (start, size) in places.items()}, file.tell()
            _known[path] = known
        yield _Opened(file, *known[1:])


def read(path: Path, name: str) -> Cubin | None:
    """Return a kernel of a bundle by its portable key; None if it is not there.

    Raises
    ------
    OSError, ValueError
        if the bundle cannot be read, is broken, or of other sources of this package, or others can change it.
    """
    with _opened(path) as opened:
        return opened.kernel(name) if name in opened.places else None


def contents_of(path: Path) -> dict[str, Cubin]:
    """Return all kernels of a bundle by their portable keys; raises as `read` does."""
    with _opened(path) as opened:
        return {name: opened.kernel(name) for name in opened.places}


def look_up(name: str | None) -> Cubin | None:
    """Return a kernel by its portable key from the first bundle that has it; None if there is none."""
    if name is None:
        return None
    for path, advice in _places():
        try:
            if (found := read(path, name)) is not None:
                return found
        except Exception as error:  # whatever a parser says of contents that may be anything
            if advice != NAMED and isinstance(error, FileNotFoundError | NotADirectoryError):
                continue
            kernel_files.warn(path, f"the bundle of kernels {path} cannot be used", error, advice, FROM_OTHERS)
    return None


NAMED, FROM_OTHERS = "Correct or unset NUMBA_GEMM_BUNDLE", "taken from other bundles, or compiled,"


def _places() -> Iterator[tuple[Path, str]]:
    """Yield the bundles to look up, and the advice for one that cannot be read."""
    if named := os.environ.get("NUMBA_GEMM_BUNDLE"):
        path = Path(named)
        with suppress(RuntimeError):  # of a user who does not exist
            path = path.expanduser()
        yield path, NAMED
    if (place := kernel_files.place()) is not None:
        yield place / IMPORTED, "Import a bundle again, or delete this one"
    yield PACKAGED, "Install numba_gemm again"


def import_bundle(path: Path) -> int:
    """Copy a bundle into the cache directory, in place of an earlier one; return its number of kernels.

    Raises
    ------
    RuntimeError
        if the cache is switched off.
    OSError, ValueError
        if the file is no bundle, is broken, or of other sources of this package, or the directory cannot be written.
    """
    place = kernel_files.directory()
    if place is None:
        raise RuntimeError(
            "NUMBA_GEMM_CACHE_DIR switches the kernel cache off; expected a directory to copy the bundle to; name one"
        )
    count = len(contents_of(path))
    with PrivateDirectory(place, create=True) as opened:
        opened.write(IMPORTED, path.read_bytes(), MAX_BYTES)
    return count
