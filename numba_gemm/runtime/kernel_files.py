"""Files of compiled kernels, kept on disk from one process to the next.

Each kernel has one file, named by all that shapes its code (`kernel_key.key`). So a file is the one that is
wanted, or is not found; none is ever out of date. Files are replaced whole and checked when they are read.

The environment variable NUMBA_GEMM_CACHE_DIR names the directory; "off" (or "0", "no", "none", "false", or nothing, in
upper or lower case) keeps no kernels. Unset, it is ``numba_gemm`` in XDG_CACHE_HOME or ~/.cache. NUMBA_GEMM_CACHE_SIZE
limits the size of all files, by default to 2 GB: beyond that, those that were used longest ago are deleted. A directory
or file that others can change is refused (see `private_files`). Every problem is a `CacheWarning`, one per directory or
file, and the kernel is compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import zlib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from . import sources
from .compiler import Cubin
from .kernel_key import versions
from .private_files import CacheWarning, PrivateDirectory, Refused, warn_once

__all__ = [
    "About",
    "CacheWarning",
    "Entry",
    "clear_cache",
    "directory",
    "entries",
    "keep",
    "look_up",
    "packed",
    "place",
    "size_limit",
    "unpacked",
    "unusable",
    "warn",
]

IMPORTED = "imported.bundle"  # see `bundle`
OFF = {"", "0", "false", "no", "none", "off"}  # values of NUMBA_GEMM_CACHE_DIR, in lower case
SIZE_LIMIT = 2_000_000_000  # bytes of all files, unless NUMBA_GEMM_CACHE_SIZE names another limit
UNITS = {"": 1, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000}
MAX_EXPANDED = 64 << 20  # bytes of a file's contents, decompressed
HOUR, DAY = 3600.0, 86400.0

MAGIC = b"numba_gemm kernel\n"
FILE_NAME = re.compile(r"[0-9a-f]{64}\.kernel|\.[0-9a-f]{16}\.tmp")


ANOTHER_DIRECTORY = 'Set NUMBA_GEMM_CACHE_DIR to a directory that only you can write to, or to "off"'


def warn(
    path: Path, problem: str, error: Exception, advice: str = ANOTHER_DIRECTORY, instead: str = "compiled"
) -> None:
    """Warn, once about each path, that kernels are compiled, or found elsewhere, instead."""
    advice = f". {advice}"
    if isinstance(error, Refused):  # it says what to do
        path, advice = error.path, ""
    warn_once(path, f"{problem} ({error}); kernels are {instead} instead, and this is said once{advice}")


def unusable(place: Path, error: OSError) -> RuntimeError:
    """Return the error for a directory that cannot be opened, or that others can change."""
    advice = "" if isinstance(error, Refused) else "; set NUMBA_GEMM_CACHE_DIR to one"
    return RuntimeError(
        f"kernels cannot be kept in {place} ({error}); expected a directory that only you can write to{advice}"
    )


def directory() -> Path | None:
    """Return the directory of the cache, which need not exist; None if the cache is switched off.

    Raises
    ------
    RuntimeError
        if it depends on a home directory and there is none.
    """
    named = os.environ.get("NUMBA_GEMM_CACHE_DIR")
    if named is not None:
        if named.lower() in OFF:
            return None
        try:
            return Path(named).expanduser()
        except RuntimeError:
            raise RuntimeError(
                f"NUMBA_GEMM_CACHE_DIR is {named}, and there is no such home directory; expected a directory, or "
                '"off"; name one by its full path'
            ) from None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # then the specification has it ignored
        base = Path.home() / ".cache"
    if not base.is_absolute():
        raise RuntimeError("HOME is no absolute path")
    return base / "numba_gemm"


# ------------------------------------------------------------------------------------------------------------ the file


class About(NamedTuple):
    """Description of a kernel in its file, beside the code.

    Attributes
    ----------
    kernel : str
        Its name.
    seconds : float
        Time that compiling took.
    made_with : dict of str to str
        Releases of the packages that compiled it.
    """

    kernel: str
    seconds: float
    made_with: dict[str, str]


def packed(name: str, cubin: Cubin, about: About) -> bytes:
    """Return the contents of a kernel's file: magic, checksum of name and body, body."""
    described = asdict(cubin) | {"about": about}
    code = described.pop("code")
    body = zlib.compress(json.dumps(described).encode() + b"\n" + code, 6)
    return MAGIC + hashlib.sha256(name.encode() + body).digest() + body


def unpacked(name: str, contents: bytes) -> tuple[Cubin, About]:
    """Return the kernel of a file; raises an exception of any kind if `packed` did not make the file."""
    start = len(MAGIC) + hashlib.sha256().digest_size
    magic, checksum, body = contents[: len(MAGIC)], contents[len(MAGIC) : start], contents[start:]
    if magic != MAGIC or hashlib.sha256(name.encode() + body).digest() != checksum:
        raise ValueError("its checksum is wrong")
    expander = zlib.decompressobj()
    described, _, code = expander.decompress(body, MAX_EXPANDED).partition(b"\n")
    if not expander.eof:
        raise ValueError(f"it is cut off, or expands to more than {MAX_EXPANDED:,} bytes")
    fields = json.loads(described)
    kernel, seconds, made_with = fields.pop("about")
    cubin = Cubin(code=code, **fields | {"cc": tuple(fields["cc"])})
    for field in ("name", "ptx", "log"):
        getattr(cubin, field).encode()  # text, and no half of a surrogate pair
    numbers = (cubin.registers, cubin.shared, cubin.local, cubin.spill_stores, cubin.spill_loads, *cubin.cc)
    if len(cubin.cc) != 2 or not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
        raise ValueError("a number in it is wrong")
    return cubin, About(str(kernel), float(seconds), dict(made_with))


def _read(place: Path, name: str) -> Cubin | None:
    file = f"{name}.kernel"
    try:
        with PrivateDirectory(place) as opened:
            cubin, _ = unpacked(name, opened.read(file))
            with suppress(OSError):  # a cache that can only be read is as good
                opened.touch(file, DAY)
            return cubin
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write(place: Path, name: str, cubin: Cubin, about: About) -> None:
    contents = packed(name, cubin, about)
    if unpacked(name, contents)[0] != cubin:
        raise ValueError("it would not be read as it was written")
    with PrivateDirectory(place, create=True) as opened:
        opened.write(f"{name}.kernel", contents)


class Entry(NamedTuple):
    """A kernel in the cache.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    cc : tuple of int
        Compute capability, (major, minor).
    seconds : float
        Time that compiling took.
    size : int
        Bytes of the file.
    used : float
        Time of the last use, in seconds since the epoch, exact to a day.
    made_with : dict of str to str
        Releases of the packages that compiled it.
    """

    kernel: str
    cc: tuple[int, int]
    seconds: float
    size: int
    used: float
    made_with: dict[str, str]


class _File(NamedTuple):
    used: float
    size: int
    path: Path


def _files(place: Path) -> tuple[list[_File], list[Path]]:
    """Return the kept kernels, the latest used first, and files of writers that died; other files are left alone."""
    kept, left = [], []
    for path in place.iterdir() if place.is_dir() else ():
        if FILE_NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another process prunes, too
                status = path.lstat()
                if path.suffix == ".kernel":
                    kept.append(_File(status.st_mtime, status.st_size, path))
                elif time.time() - status.st_mtime > HOUR:
                    left.append(path)
    return sorted(kept, reverse=True), left


def size_limit() -> int:
    """Return the limit of the cache's size in bytes: NUMBA_GEMM_CACHE_SIZE, such as 500M or 4G, or 2 GB.

    Raises
    ------
    ValueError
        if NUMBA_GEMM_CACHE_SIZE is no size.
    """
    named = os.environ.get("NUMBA_GEMM_CACHE_SIZE", str(SIZE_LIMIT))
    found = re.fullmatch(r"(\d+)\s*([KMG]?)B?", named.strip().upper())
    if found is None:
        raise ValueError(f"NUMBA_GEMM_CACHE_SIZE is {named!r}; expected bytes, or a size such as 500M or 4G; set one")
    return int(found[1]) * UNITS[found[2]]


def _prune(place: Path) -> None:
    """Delete the kernels that were used longest ago if all take more than the limit, and what writers left who died."""
    try:
        limit, total = size_limit(), 0
    except ValueError as error:
        warn_once(place, f"{error}; until then, no kernels are deleted from {place}")
        return
    kept, left = _files(place)
    for one in kept:
        total += one.size
        if total > limit:
            left.append(one.path)
    for path in left:
        path.unlink(missing_ok=True)


def entries() -> list[Entry]:
    """Return the kernels in the cache, the latest used first; files that cannot be read are left out.

    Raises
    ------
    RuntimeError
        if the directory cannot be read, or others can change it.
    """
    where = place()
    found: list[Entry] = []
    if where is None:
        return found
    try:
        with PrivateDirectory(where) as opened:
            for one in _files(where)[0]:
                with suppress(Exception):  # whatever a parser says of contents that may be anything
                    cubin, about = unpacked(one.path.stem, opened.read(one.path.name))
                    found.append(Entry(about.kernel, cubin.cc, about.seconds, one.size, one.used, about.made_with))
    except FileNotFoundError:
        pass  # nothing has been kept
    except OSError as error:
        raise unusable(where, error) from None
    return found


def place() -> Path | None:
    """Return the directory; None, after a warning if that is a problem, if there is none."""
    try:
        return directory()
    except RuntimeError as error:
        warn(Path("~"), "there is no place for a kernel cache", error)
        return None


def look_up(place: Path, name: str) -> Cubin | None:
    """Return a kernel of this name; None, after a warning if that is a problem, if there is none."""
    try:
        return _read(place, name)
    except OSError as error:
        warn(place, f"the kernel cache in {place} cannot be read", error)
    except Exception as error:  # whatever a parser says of contents that may be anything
        warn(place / f"{name}.kernel", f"the kernel cache in {place} has a broken file, {name}.kernel", error)
    return None


def keep(place: Path | None, name: str | None, cubin: Cubin, kernel: str, seconds: float) -> None:
    """Write a kernel's file, unless it has no name, there is no place, or the sources have been edited meanwhile."""
    if place is None or name is None or not sources.unchanged():
        return
    try:
        _write(place, name, cubin, About(kernel, seconds, versions()))
        _prune(place)
    except (OSError, ValueError, TypeError) as error:
        warn(place, f"the kernel cache in {place} cannot be written", error)


def clear_cache() -> int:
    """Delete all kernels that are kept on disk, and return how many; those in use stay in their processes.

    An imported bundle is deleted, too.

    Raises
    ------
    OSError
        if the directory cannot be written.
    """
    try:
        place = directory()
    except RuntimeError:
        return 0
    kept, left = _files(place) if place else ([], [])
    for path in [one.path for one in kept] + left:
        path.unlink(missing_ok=True)
    if place is not None:
        (place / IMPORTED).unlink(missing_ok=True)
    return len(kept)
