"""Choices that `autotune` measured, kept on disk from one process to the next, which precede the model's.

They are stored beside the compiled kernels (see `kernel_files`), in one JSON file per kind of device (name, compute
capability, number of SMs) and version of the kernels' sources: measurements of others do not apply. Files are replaced
whole; a process adds its choices to those that others have written meanwhile, under a lock. Each file is read once per
process. A directory or file that others can change is refused (see `private_files`). Every problem is a `CacheWarning`,
and the model chooses.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import warnings
from contextlib import suppress
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..device.units import FLOAT32_BYTES
from ..kernels.product import ITEM_BYTES, ONE, Batch, Product, dense
from ..kernels.stage import Partition
from ..runtime import device as devices
from ..runtime import kernel_files, kernel_key
from ..runtime.device import DeviceProperties
from ..runtime.private_files import CacheWarning, PrivateDirectory, Refused, warn_once
from . import heuristics
from .heuristics import Choice, Problem

__all__ = ["choose", "clear", "forget", "keep", "recorded"]

FORMAT = 2  # of a file; another one gives every file another name
FILE_NAME = re.compile(r"[\w-]+-cc\d+\.\d+-sm\d+-[0-9a-f]{16}\.choices\.json", re.ASCII)  # that `_name` gives
LOCK = "choices.lock"
OF_DEVICE = {"cc", "sm_count", "clock_hz", "memory_bandwidth"}  # fields of a problem that the file's name stands for

Entries = dict[str, Any]  # entries of the file, by `key`

_lock = threading.Lock()
_known: dict[str, Entries] = {}  # by file name


def key(wanted: Problem) -> str:
    """Return a problem as text, without its device."""
    return " ".join(f"{name}={value}" for name, value in wanted._asdict().items() if name not in OF_DEVICE)


def choose(device: int | None, wanted: Problem) -> Choice:
    """Return the choice that was measured for a problem on a device; without one, the model's, without a reason."""
    entries = None if device is None else _entries(device)
    if entries and (entry := entries.get(key(wanted))) is not None:
        try:
            text = json.dumps(entry)
        except RecursionError:
            text = "[]"  # no choice
        if (found := _restored(device, wanted, text)) is not None:
            return found
    return heuristics.best(wanted)


def keep(device: int, wanted: Problem, choice: Choice, microseconds: float, candidates: int) -> Path | None:
    """Use a choice from now on, and keep it on disk.

    Parameters
    ----------
    device, wanted, choice
        The choice for a problem on a device.
    microseconds : float
        Its time.
    candidates : int
        Number of candidates among which it is the fastest.

    Returns
    -------
    Path or None
        The file that it is in; None if it is known to this process only.
    """
    partition = None if choice.partition is None else [choice.partition.blocks, choice.partition.whole]
    entry = {
        "stage": choice.stage.name,
        "config": choice.config.name,
        "partition": partition,
        "swapped": choice.swapped,
        "microseconds": microseconds,
        "candidates": candidates,
        "date": time.strftime("%Y-%m-%d"),
    }
    name, place, made = _name(devices.device_properties(device)), _directory(), {key(wanted): entry}
    with _lock:
        known = _known.get(name)
        if known is None and place is not None:  # no later call reads the file, should the write fail
            with suppress(Exception), PrivateDirectory(place) as opened:
                known = _read(opened, name)
        _known[name] = (known or {}) | made
        if place is None:
            return None
        try:
            with PrivateDirectory(place, create=True) as opened, opened.locked(LOCK):
                try:
                    others = _read(opened, name)
                    contents = _packed(others | made)
                except Exception:  # the file may hold anything, and is replaced
                    others, contents = {}, _packed(made)
                opened.write(name, contents)
                _known[name] = _known[name] | others | made
        except (OSError, ValueError) as error:
            _warn(f"{place} cannot be written ({error}); what autotune chose is known to this process only", error)
            return None
    return place / name


def recorded(device: int) -> list[tuple[Product, Choice]]:
    """Return products without epilogues, of dense operands, and what was measured for them on a device."""
    gpu, found = devices.device_properties(device), []
    for text in _entries(device):
        product = _product_of(text)
        if product is not None:
            wanted = heuristics.problem(product, gpu, _values(text).get("precision", ""))
            if key(wanted) == text:
                found.append((product, choose(device, wanted)))
    return found


def _values(text: str) -> dict[str, str]:
    """Return the fields of a problem as text; raises ValueError for another text."""
    return dict(word.split("=", 1) for word in text.split(" "))


def _product_of(text: str) -> Product | None:
    """Return a product of dense operands that has this problem as text; None if no product has."""
    try:
        of = _values(text)
        m, n, k, matrices = (int(of[name]) for name in ("m", "n", "k", "matrices"))
        if of["epilogue"] != "False" or min(m, n, k, matrices) < 1:
            return None
        a, b = (
            dense("N" if of["a_along"] == "True" else "T", m, k, of["a_dtype"]),
            dense("T" if of["b_along"] == "True" else "N", k, n, of["b_dtype"]),
        )
        c = dense("T" if of["by_columns"] == "True" else "N", m, n)
        sizes = ITEM_BYTES[a.dtype], ITEM_BYTES[b.dtype]
        steps = ((0, 0, sizes[0] * m * k), (0, 0, sizes[1] * k * n), (0, 0, FLOAT32_BYTES * m * n))
        batch = Batch((1, 1, matrices), *steps) if matrices > 1 else ONE
        return Product(a, b, c, batch)
    except (KeyError, ValueError):  # the file may hold anything
        return None


def clear(device: int | None = None) -> int:
    """Delete the choices for a device, or for all, and return how many there were on disk.

    Raises
    ------
    OSError
        if the directory cannot be written, or others can change it.
    """
    prefix = "" if device is None else _prefix(devices.device_properties(device))
    count = 0
    with _lock:
        place = _directory()
        names = [name for name in _files(place) if name.startswith(prefix)]
        if place is not None and names:
            with PrivateDirectory(place) as opened, opened.locked(LOCK):
                for name in names:
                    with suppress(Exception):  # a broken one is deleted, too
                        count += len(_read(opened, name))
                    opened.delete(name)
        for name in [name for name in _known if name.startswith(prefix)]:  # not if an error left them on disk
            _known[name] = {}
    return count


def forget() -> None:
    """Read the files again when they are next needed: another process may have written them."""
    with _lock:
        _known.clear()
        _restored.cache_clear()
        _name.cache_clear()


# ------------------------------------------------------------------------------------------------------------ the file


def _warn(problem: str, error: Exception | None = None) -> None:
    if isinstance(error, Refused):
        warn_once(error.path, problem)
    else:
        warnings.warn(problem, CacheWarning, stacklevel=2)


def _directory() -> Path | None:
    try:
        return kernel_files.directory()
    except RuntimeError:  # of which the kernel cache warns
        return None


def _prefix(gpu: DeviceProperties) -> str:
    words = re.sub(r"\W+", "-", gpu.name, flags=re.ASCII)
    return f"{words}-cc{gpu.cc[0]}.{gpu.cc[1]}-sm{gpu.sm_count}-"


@cache
def _name(gpu: DeviceProperties) -> str:
    version = hashlib.sha256(repr((FORMAT, kernel_key.SOURCES)).encode()).hexdigest()
    return f"{_prefix(gpu)}{version[:16]}.choices.json"


def _files(place: Path | None) -> list[str]:
    if place is None or not place.is_dir():
        return []
    return [path.name for path in place.iterdir() if FILE_NAME.fullmatch(path.name)]


def _entries(device: int) -> Entries:
    name = _name(devices.device_properties(device))
    known = _known.get(name)
    if known is not None:
        return known
    found: Entries = {}
    if (place := _directory()) is not None:
        try:
            with PrivateDirectory(place) as opened:
                found = _read(opened, name)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            _warn(f"{place / name} cannot be read ({error}); the choices in it are not used", error)
        except Exception as error:  # whatever a parser says of contents that may be anything
            _warn(f"{place / name} is broken ({error}); the choices in it are not used; autotune again replaces it")
    with _lock:
        return _known.setdefault(name, found)


def _read(place: PrivateDirectory, name: str) -> Entries:
    """Return the entries of a file; raises an exception of any kind if it has another form."""
    try:
        contents = json.loads(place.read(name))
    except FileNotFoundError:
        return {}
    choices = contents.get("choices") if isinstance(contents, dict) else None
    if not isinstance(choices, dict):
        raise ValueError("it has no choices")
    return choices


def _packed(entries: Entries) -> bytes:
    return (json.dumps({"choices": entries}, indent=1) + "\n").encode()


@lru_cache(maxsize=4096)
def _restored(device: int, wanted: Problem, entry: str) -> Choice | None:
    """Return the choice of an entry; None, after a warning, unless the model would consider it."""
    try:
        kept = json.loads(entry)
        said = kept["stage"], kept["config"], kept["partition"] and Partition(*kept["partition"]), kept["swapped"]
        microseconds, gpu = float(kept["microseconds"]), devices.device_properties(device)
        if not 0 < microseconds < 1e15:  # nor NaN
            raise ValueError(f"it takes {microseconds} us")
        for choice in heuristics.ranked(wanted):
            if (choice.stage.name, choice.config.name, choice.partition, choice.swapped) == said:
                when, candidates = date.fromisoformat(kept["date"]), int(kept["candidates"])
                return choice._replace(
                    clocks=microseconds * 1e-6 * gpu.clock_hz,
                    measured=True,
                    reason=f"measured by autotune on {gpu.name}, {when}: {microseconds:.1f} us, the least of "
                    f"{candidates} candidates",
                )
        raise ValueError("no candidate is like it")
    except Exception as error:  # the entry may hold anything
        _warn(
            f"what autotune chose for {key(wanted)} is no longer valid ({error!r}); the model chooses; autotune again"
        )
        return None
