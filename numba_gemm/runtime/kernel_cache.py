"""Compiled kernels, kept on disk from one process to the next.

A kernel lies in one file, named by a hash of all that shapes its code: this package's sources, the stage, its
configuration and variant, an epilogue that is compiled into it, the compute capability, the compiler and its settings.
So a file is right or not found; none is ever out of date. Files are replaced whole and checked when they are read.

The environment variable NUMBA_GEMM_CACHE_DIR names the directory; "off" (or "0", "no", "none", "false", or nothing, in
upper or lower case) keeps no kernels. Unset, it is ``numba_gemm`` in XDG_CACHE_HOME or ~/.cache. A directory or file
that others can change is refused (see `private_files`). Every problem is a `CacheWarning`, one per directory or file,
and the kernel is compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from cuda.pathfinder import load_nvidia_dynamic_lib
from numba.core import config as numba_config

from ..kernels import STAGES
from ..kernels.step import Kernel
from ..kernels.tensor_core.stage import build_decompose, build_row_maxima
from . import epilogue as epilogues
from .compiler import Cubin, compile_cubin
from .fingerprint import Part, fingerprint
from .private_files import CacheWarning, PrivateDirectory, Refused, warn_once

__all__ = ["CacheWarning", "clear_cache", "compile_kernel", "directory", "fetch", "fetch_named", "key", "name_of"]

FORMAT = 1  # of a file; another one gives every kernel another name
OFF = {"", "0", "false", "no", "none", "off"}  # values of NUMBA_GEMM_CACHE_DIR, in lower case
MAX_FILES = 512  # kept, the latest used; a kernel takes 10 to 50 KB
MAX_EXPANDED = 64 << 20  # bytes of a file's contents, decompressed
HOUR, DAY = 3600.0, 86400.0

MAGIC = b"numba_gemm kernel\n"
FILE_NAME = re.compile(r"[0-9a-f]{64}\.kernel|\.[0-9a-f]{16}\.tmp")

# Files of this package that can change what a kernel compiles to.
SOURCE_PATTERNS = (
    "device/*.py",
    "simulator/switch.py",
    "kernels/**/*.py",
    "runtime/*.py",
)
PACKAGES = ("numba", "numba-cuda", "llvmlite", "numpy", "cuda-bindings", "cuda-core")
# Libraries of the compiler, and the packages that they come in, if they do not come with a toolkit.
LIBRARIES = {
    "nvvm": ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"),
    "nvJitLink": ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
}
# Settings of Numba's, from NUMBA_... or its configuration file, that change code.
SETTINGS = ("OPT", "BOUNDSCHECK", "CUDA_DEBUGINFO_DEFAULT", "CUDA_ENABLE_NRT", "DEBUG_ARRAY_OPT")


def _warn(path: Path, problem: str, error: Exception) -> None:
    advice = '. Set NUMBA_GEMM_CACHE_DIR to a directory that only you can write to, or to "off"'
    if isinstance(error, Refused):  # it says what to do
        path, advice = error.path, ""
    warn_once(path, f"{problem} ({error}); kernels are compiled instead, and this is said once{advice}")


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


# ------------------------------------------------------------------------------------------------------------- the key


def _hash_of_sources(package: Path) -> str | None:
    """Names and contents of the package's files that matter; None if it was installed without them."""
    digest, count = hashlib.sha256(), 0
    for pattern in SOURCE_PATTERNS:
        for path in sorted(package.glob(pattern)):
            contents = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(contents)}\n".encode() + contents)
            count += 1
    return digest.hexdigest() if count else None


# Read at the import, like the sources themselves: they may be edited before the first kernel is compiled.
try:
    SOURCES = _hash_of_sources(Path(__file__).parents[1])
except OSError:
    SOURCES = None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _library(name: str, packages: tuple[str, ...]) -> Part:
    """Return the identity of a compiler library's release: the version of its package, else the ends of its file."""
    versions = tuple(_version(package) for package in packages)
    if any(versions):
        return versions
    try:
        path = load_nvidia_dynamic_lib(name).abs_path
        with open(path, "rb") as file:
            begin = file.read(1 << 16)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - (1 << 16), 0))
            return size, hashlib.sha256(begin + file.read()).hexdigest()
    except (OSError, RuntimeError):
        pass
    try:
        return driver.cuDriverGetVersion()[1]  # without nvJitLink the driver links
    except RuntimeError:
        return None


@cache
def _toolchain() -> Part:
    machine = os.uname().machine if hasattr(os, "uname") else sys.platform
    return (
        (sys.implementation.cache_tag, machine),
        tuple((package, _version(package)) for package in PACKAGES),
        tuple((name, _library(name, packages)) for name, packages in LIBRARIES.items()),
    )


def _checked(part: Any) -> Part:
    """A part of a key as it is, if its repr tells it from all others, in this process and the next."""
    if isinstance(part, tuple):
        return tuple(map(_checked, part))
    if part is None or type(part) in (bool, int, float, str, bytes):
        return part
    raise TypeError(
        f"a kernel's key has {part!r}, a {type(part).__qualname__}; expected numbers, strings, bytes and tuples of them"
    )


# The functions of this package that build kernels: the sources that are hashed determine what they build.
BUILDS = {build_decompose, build_row_maxima, *(stage.build for stage in STAGES.values())}
PACKAGE = __name__.partition(".")[0]


class _Unknown(Exception):
    """Something that cannot be told from another of its kind."""


def _own_name(function: Callable[..., Any]) -> Part:
    """Return the name of a function of this package; raises `_Unknown` for others."""
    module = getattr(function, "__module__", "")
    if module.partition(".")[0] != PACKAGE:
        raise _Unknown
    return module, function.__qualname__


def _described(value: Any) -> Part:
    """Return a configuration or variant as values; raises `_Unknown` for an epilogue that cannot be told."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, tuple((one.name, _described(getattr(value, one.name))) for one in fields(value))
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    if callable(value):
        if (found := fingerprint(value)) is None:
            raise _Unknown
        return found
    return _checked(value)


def key(kernel: Kernel, cc: tuple[int, int], extra: tuple[Any, ...] = ()) -> str | None:
    """Return the name of a kernel: a hash of all that shapes its code; None if that cannot be told.

    `extra` may hold numbers, strings, bytes, None and tuples of them, which shape the code as well.
    """
    extra = tuple(map(_checked, extra))
    if kernel.build not in BUILDS:
        return None
    try:
        functions = _own_name(kernel.build), _own_name(kernel.signature)
        config, variant = _described(kernel.config), _described(kernel.variant)
    except _Unknown:
        return None
    return name_of(kernel.name, functions, config, variant, kernel.whole_program, tuple(cc), extra)


def compile_kernel(kernel: Kernel, cc: tuple[int, int], *, keep_ptx: bool = True) -> Cubin:
    """Compile a kernel for a compute capability; needs no GPU. `keep_ptx` is that of `compiler.compile_cubin`.

    Raises
    ------
    TypeError
        for an epilogue that does not compile, or returns no real number.
    """
    if kernel.epilogue is not None:
        epilogues.check_result(kernel.epilogue, kernel.vectors, cc)
    built, signature = kernel.build(kernel.config, kernel.variant), kernel.signature(kernel.variant)
    return compile_cubin(built, signature, cc, name=kernel.name, whole_program=kernel.whole_program, keep_ptx=keep_ptx)


def name_of(*parts: Part) -> str | None:
    """Return the name of a kernel that this package's sources and these parts describe; None without sources."""
    if SOURCES is None:
        return None
    settings = tuple((name, repr(getattr(numba_config, name, None))) for name in SETTINGS)
    return hashlib.sha256(repr((FORMAT, SOURCES, _toolchain(), settings, *parts)).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------ the file


def _pack(name: str, cubin: Cubin) -> bytes:
    """The contents of a kernel's file: magic, checksum of name and body, body."""
    described = asdict(cubin)
    code = described.pop("code")
    body = zlib.compress(json.dumps(described).encode() + b"\n" + code, 6)
    return MAGIC + hashlib.sha256(name.encode() + body).digest() + body


def _unpack(name: str, contents: bytes) -> Cubin:
    """The kernel of a file; raises an exception of any kind if `_pack` did not make the file."""
    start = len(MAGIC) + hashlib.sha256().digest_size
    magic, checksum, body = contents[: len(MAGIC)], contents[len(MAGIC) : start], contents[start:]
    if magic != MAGIC or hashlib.sha256(name.encode() + body).digest() != checksum:
        raise ValueError("its checksum is wrong")
    expander = zlib.decompressobj()
    described, _, code = expander.decompress(body, MAX_EXPANDED).partition(b"\n")
    if not expander.eof:
        raise ValueError(f"it is cut off, or expands to more than {MAX_EXPANDED:,} bytes")
    fields = json.loads(described)
    cubin = Cubin(code=code, **fields | {"cc": tuple(fields["cc"])})
    for field in ("name", "ptx", "log"):
        getattr(cubin, field).encode()  # text, and no half of a surrogate pair
    numbers = (cubin.registers, cubin.shared, cubin.local, cubin.spill_stores, cubin.spill_loads, *cubin.cc)
    if len(cubin.cc) != 2 or not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
        raise ValueError("a number in it is wrong")
    return cubin


def _read(place: Path, name: str) -> Cubin | None:
    file = f"{name}.kernel"
    try:
        with PrivateDirectory(place) as opened:
            cubin = _unpack(name, opened.read(file))
            with suppress(OSError):  # a cache that can only be read is as good
                opened.touch(file, DAY)
            return cubin
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write(place: Path, name: str, cubin: Cubin) -> None:
    contents = _pack(name, cubin)
    if _unpack(name, contents) != cubin:
        raise ValueError("it would not be read as it was written")
    with PrivateDirectory(place, create=True) as opened:
        opened.write(f"{name}.kernel", contents)


def _files(place: Path) -> tuple[list[Path], list[Path]]:
    """The kept kernels, the latest used first, and what writers left who died; whatever else lies there is not ours."""
    kept, left = [], []
    for path in place.iterdir() if place.is_dir() else ():
        if FILE_NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another process prunes, too
                written = path.lstat().st_mtime
                if path.suffix == ".kernel":
                    kept.append((written, path))
                elif time.time() - written > HOUR:
                    left.append(path)
    return [path for _, path in sorted(kept, reverse=True)], left


def _prune(place: Path) -> None:
    kept, left = _files(place)
    for path in kept[MAX_FILES:] + left:
        path.unlink(missing_ok=True)


def fetch(kernel: Kernel, cc: tuple[int, int]) -> tuple[Cubin, bool]:
    """Return a compiled kernel, and whether it came from the cache; otherwise it is compiled and kept.

    Safe from several threads and processes, which at worst compile the same kernel. Kernels of other packages' stages
    are compiled each time, and so are kernels with an epilogue that finds more than `fingerprint` can describe.
    """
    return fetch_named(partial(compile_kernel, kernel, cc, keep_ptx=False), key(kernel, cc))


def kept(name: tuple[Part, ...] | None, compile_kernel: Callable[[], Cubin]) -> Cubin:
    """The kernel that these parts describe, compiled or from its file; of None it is compiled."""
    return fetch_named(compile_kernel, None if name is None else name_of(*name))[0]


def fetch_named(compile_kernel: Callable[[], Cubin], name: str | None) -> tuple[Cubin, bool]:
    """`fetch` for a kernel of this name (`name_of`), or of none."""
    try:
        place = directory() if name else None
    except RuntimeError as error:
        _warn(Path("~"), "there is no place for a kernel cache", error)
        place = None
    if name is None or place is None:
        return compile_kernel(), False

    try:
        found = _read(place, name)
    except OSError as error:
        _warn(place, f"the kernel cache in {place} cannot be read", error)
        found = None
    except Exception as error:  # whatever a parser says of contents that may be anything
        _warn(place / f"{name}.kernel", f"the kernel cache in {place} has a broken file, {name}.kernel", error)
        found = None
    if found is not None:
        return found, True

    cubin = compile_kernel()
    try:
        _write(place, name, cubin)
        _prune(place)
    except (OSError, ValueError, TypeError) as error:
        _warn(place, f"the kernel cache in {place} cannot be written", error)
    return cubin, False


def clear_cache() -> int:
    """Delete all kernels that are kept on disk, and return how many; those in use stay in their processes.

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
    for path in kept + left:
        path.unlink(missing_ok=True)
    return len(kept)
