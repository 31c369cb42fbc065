"""Names of compiled kernels: hashes of all that shapes their code.

There are two. `key` names what a compiler made on this machine: the package's sources, the stage, its configuration and
variant, an epilogue that is compiled into it, the compute capability, the compiler and its settings. `portable_key`
leaves out the releases of the compiler, and names what a bundle brings from another machine; it is None for kernels
with an epilogue.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from typing import Any

from cuda.bindings import driver
from cuda.pathfinder import load_nvidia_dynamic_lib

from ..kernels import STAGES, conversion
from ..kernels.ladder.stage import BUILD_ADD_PARTS
from ..kernels.step import Kernel
from ..kernels.tensor_core.decomposition import build_decompose, build_row_maxima
from ..kernels.tensor_core.stage import BUILD_ADD_PARTIALS
from .compilation import settings
from .fingerprint import Part, fingerprint
from .sources import SOURCES

__all__ = ["key", "portable_key", "versions"]

FORMAT = 2  # of a file; another one gives every kernel another name

PACKAGES = ("numba", "numba-cuda", "llvmlite", "numpy", "cuda-bindings", "cuda-core")
# Libraries of the compiler, and the packages that they come in, if they do not come with a toolkit.
LIBRARIES = {
    "nvvm": ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"),
    "nvJitLink": ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
}


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
    """Return a part of a key unchanged if its repr identifies it in all processes."""
    if isinstance(part, tuple):
        return tuple(map(_checked, part))
    if part is None or type(part) in (bool, int, float, str, bytes):
        return part
    raise TypeError(
        f"a kernel's key has {part!r}, a {type(part).__qualname__}; expected numbers, strings, bytes and tuples of them"
    )


# The functions of this package that build kernels: the sources that are hashed determine what they build.
OTHER_BUILDS = {conversion.BUILD, build_decompose, build_row_maxima, BUILD_ADD_PARTIALS, BUILD_ADD_PARTS}
BUILDS = OTHER_BUILDS | {stage.build for stage in STAGES.values()}
PACKAGE = __name__.partition(".")[0]


class _Unknown(Exception):
    """Object that cannot be distinguished from another of its kind."""


def _own_name(function: Callable[..., Any]) -> Part:
    """Return the name of a function of this package; raises `_Unknown` for others."""
    module = getattr(function, "__module__", "")
    if module.partition(".")[0] != PACKAGE:
        raise _Unknown
    return module, function.__qualname__


def _described(value: Any) -> Part:
    """Return a configuration or variant as values; raises `_Unknown` for an epilogue without a known content."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, tuple((one.name, _described(getattr(value, one.name))) for one in fields(value))
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    if callable(value):
        if (found := fingerprint(value)) is None:
            raise _Unknown
        return found
    return _checked(value)


def key(kernel: Kernel, cc: tuple[int, int]) -> str | None:
    """Return the name of a kernel: a hash of all that shapes its code; None if that is unknown."""
    described = _form(kernel, cc)
    return None if described is None or SOURCES is None else _digest(_toolchain(), *described)


def portable_key(kernel: Kernel, cc: tuple[int, int]) -> str | None:
    """Return the name of a kernel whichever releases of the compiler made it; None for those with an epilogue."""
    described = None if kernel.epilogue is not None else _form(kernel, cc)
    return None if described is None or SOURCES is None else _digest("portable", *described)


def _form(kernel: Kernel, cc: tuple[int, int]) -> tuple[Part, ...] | None:
    """Return all that a kernel is built from; None if that is unknown."""
    if kernel.build not in BUILDS:
        return None
    try:
        functions = _own_name(kernel.build), _own_name(kernel.signature)
        config, variant = _described(kernel.config), _described(kernel.variant)
    except _Unknown:
        return None
    return kernel.name, functions, config, variant, kernel.whole_program, tuple(cc)


def _digest(*parts: Part) -> str:
    options = tuple((name, repr(value)) for name, value in settings().items())
    return hashlib.sha256(repr((FORMAT, SOURCES, options, *parts)).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the releases of the packages that compile."""
    return {package: version for package in PACKAGES if (version := _version(package)) is not None}
