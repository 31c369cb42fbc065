"""The kernel cache: what it keeps comes back as it was, what it cannot keep is compiled, and nothing else is found."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import itertools
import json
import math
import os
import stat
import subprocess
import sys
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from numba.core import config as numba_config
from support.compile_stages import compiler_environment
from support.compiled import CUBIN
from support.refused_paths import REFUSED_DIRECTORIES, REFUSED_FILES

import numba_gemm
from numba_gemm.gemm import heuristics, precompile
from numba_gemm.gemm import precision as precisions
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.ladder.stage import LadderStage, Variant
from numba_gemm.kernels.ladder.tile_config import TileConfig
from numba_gemm.kernels.product import Product, dense
from numba_gemm.kernels.step import Kernel
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TensorVariant
from numba_gemm.kernels.tensor_core.decomposition import preparing_kernels
from numba_gemm.runtime import compilation, kernel_cache, kernel_files, kernel_key, private_files, sources
from numba_gemm.runtime import device as devices
from numba_gemm.runtime.fingerprint import fingerprint, frozen
from numba_gemm.simulator.probe import gpu_count

NAIVE = STAGES["naive"]
CONFIG = NAIVE.configs[0]
CC = (9, 0)
KERNEL = (NAIVE.kernel_of(CONFIG, True), CC)
OTHER = dataclasses.replace(CUBIN, code=b"other")
ABOUT = kernel_files.About("k", 1.5, {"numba": "0.1"})


def build_elsewhere(config, aligned):
    raise NotImplementedError


def signature_elsewhere(variant):
    raise NotImplementedError


def never():
    raise AssertionError("compiled what is in the cache")


def numbered(i):
    """Return the name of one of several kernels."""
    return kernel_key.key(dataclasses.replace(NAIVE.kernel_of(CONFIG, True), name=f"k{i}"), CC)


def fetch(make, kernel, cc, i=None):
    """Return the kernel, or one of several, with `make` for the compiler, and whether it was in the cache."""
    name, place = kernel_key.key(kernel, cc) if i is None else numbered(i), kernel_files.place()
    if name is not None and place is not None and (cubin := kernel_files.look_up(place, name)) is not None:
        return cubin, True
    cubin = make()
    kernel_files.keep(place, name, cubin, cubin.name, 1.0)
    return cubin, False


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty cache, and a process that has not warned yet."""
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(private_files, "_warned", set())
    return tmp_path / "cache"


def path_of(place: Path) -> Path:
    return place / f"{kernel_key.key(*KERNEL)}.kernel"


# -------------------------------------------------------------------------------------------------- what is kept


def test_round_trip(place):
    assert fetch(lambda: CUBIN, *KERNEL) == (CUBIN, False)
    assert fetch(never, *KERNEL) == (CUBIN, True)
    assert [path.name for path in place.iterdir()] == [path_of(place).name]  # no temporary file stays


def test_a_kernel_is_compiled_once(place, monkeypatch):
    compiled = []

    def compile_all(tasks, done, jobs):
        compiled.extend(tasks)
        for i in range(len(tasks)):
            done(i, CUBIN, 1.5)

    monkeypatch.setattr(kernel_cache, "compile_all", compile_all)
    first, second = (kernel_cache.fetch(*KERNEL) for _ in range(2))
    assert first == (CUBIN, "compiler", 1.5)
    assert second[:2] == (CUBIN, "cache")
    assert compiled == [KERNEL]
    assert fetch(never, *KERNEL) == (CUBIN, True)


def test_kernels_of_edited_sources_are_not_kept(place, monkeypatch):
    """A file of a kernel is imported when it is compiled: it may no longer be what the key stands for."""
    monkeypatch.setattr(sources, "hash_of", lambda package: "edited")
    assert fetch(lambda: CUBIN, *KERNEL) == (CUBIN, False)
    assert not place.exists()
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(place))
    assert fetch(lambda: OTHER, *KERNEL) == (OTHER, False)
    assert fetch(never, *KERNEL) == (OTHER, True)


def test_compiler_errors_pass_and_leave_nothing(place):
    with pytest.raises(AssertionError, match="compiled"):
        fetch(never, *KERNEL)
    assert not place.exists()


@pytest.mark.parametrize("value", ["", "off", "OFF", "0", "no", "None", "false"])
def test_switched_off(place, monkeypatch, value):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    for _ in range(2):
        assert fetch(lambda: CUBIN, *KERNEL) == (CUBIN, False)
    assert not place.exists()
    assert kernel_files.clear_cache() == 0
    with pytest.raises(RuntimeError, match="NUMBA_GEMM_CACHE_DIR switches the kernel cache off"):
        precompile.precompile("naive", (9, 0))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NUMBA_GEMM_CACHE_DIR": "/named", "XDG_CACHE_HOME": "/xdg"}, "/named"),
        ({"NUMBA_GEMM_CACHE_DIR": "~/named"}, "/home/someone/named"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/numba_gemm"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/numba_gemm"),
        ({}, "/home/someone/.cache/numba_gemm"),
    ],
)
def test_directory(monkeypatch, variables, expected):
    for name in ("NUMBA_GEMM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"HOME": "/home/someone"}).items():
        monkeypatch.setenv(name, value)
    assert kernel_files.directory() == Path(expected)


def test_directory_of_a_user_who_is_not_there(monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "~no-such-user/kernels")
    with pytest.raises(RuntimeError, match="NUMBA_GEMM_CACHE_DIR is ~no-such-user/kernels, and there is no such home"):
        kernel_files.directory()


# ---------------------------------------------------------------------------------------------------- the key


@pytest.mark.parametrize(
    "kernel",
    [
        (STAGES["coalesced"].kernel_of(CONFIG, True), CC),
        (NAIVE.kernel_of(CONFIG, False), CC),
        (KERNEL[0], (8, 9)),
        (*KERNEL, ("lambda x: x",)),
        (*KERNEL, (b"lambda x: x",)),
        (*KERNEL, (1,)),
        (*KERNEL, (1.0,)),
        (*KERNEL, ((1,),)),
        (*KERNEL, (None,)),
    ],
    ids=lambda kernel: "-".join([kernel[0].name, *map(repr, kernel[1:])]),
)
def test_another_kernel_is_not_found(place, kernel):
    fetch(lambda: CUBIN, *KERNEL)
    assert fetch(lambda: OTHER, *kernel) == (OTHER, False)
    assert fetch(never, *kernel) == (OTHER, True)
    assert fetch(never, *KERNEL) == (CUBIN, True)


def increment(value, row, col):
    return value + 1


def changes(value):
    """Yield values that differ from a part of a kernel in one place; some are no valid configurations."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            for changed in changes(getattr(value, field.name)):
                copied = copy.copy(value)
                object.__setattr__(copied, field.name, changed)
                yield copied
    elif isinstance(value, tuple):
        yield (*value, 1)
        for i, part in enumerate(value):
            yield from ((*value[:i], changed, *value[i + 1 :]) for changed in changes(part))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, str):
        yield value + "x"
    elif value is None or callable(value):
        yield increment
    else:
        yield value * 2 + 3


STREAM_K = STAGES["stream_k"]
DECOMPOSE, ROW_MAXIMA = preparing_kernels(TENSOR_PRECISIONS["fp16x3"], False)
TILED = TileConfig(BM=64, BN=64, BK=16, TM=8, TN=4, WM=32, WN=32, slots=4, pad=4, dynamic=True)
DIFFERENT = [
    NAIVE.kernel_of(TILED, True),
    STREAM_K.kernel_of(STREAM_K.configs[0], Variant("along4", "across4", True)),
    STAGES["persistent"].kernel_of(STAGES["persistent"].configs[0], TensorVariant(TENSOR_PRECISIONS["bf16x6"])),
    STAGES["tf32_tma"].kernel(STAGES["tf32_tma"].configs[0], Product(*[dense("N", 64, 64)] * 3)),
    STAGES["warp_mma"].kernel_of(STAGES["warp_mma"].configs[0], TensorVariant(TENSOR_PRECISIONS["tf32"])),
    DECOMPOSE,
    ROW_MAXIMA,
]


@pytest.mark.parametrize("kernel", DIFFERENT, ids=lambda kernel: kernel.name)
def test_every_part_of_a_kernel_counts(kernel):
    """Every field of the configuration and of the variant too, though most are in the name as well."""
    others = [
        dataclasses.replace(kernel, **{name: changed})
        for name in ("name", "config", "variant", "whole_program")
        for changed in changes(getattr(kernel, name))
    ]
    others += [dataclasses.replace(kernel, build=build) for build in kernel_key.BUILDS - {kernel.build}]
    others += [dataclasses.replace(kernel, signature=one) for one in {k.signature for k in DIFFERENT}]
    keys = {kernel_key.key(other, CC) for other in others}  # one of them has the kernel's own signature
    assert len(keys) == len(others)
    assert None not in keys
    assert kernel_key.key(kernel, CC) in keys
    assert kernel_key.key(kernel, (10, 0)) not in keys


def test_every_kernel_has_a_key_of_its_own():
    keys = {kernel_key.key(kernel, CC) for kernel in DIFFERENT}
    assert len(keys) == len(DIFFERENT)
    assert None not in keys
    for stage in STAGES.values():
        assert stage.build in kernel_key.BUILDS


def test_what_does_not_shape_the_code_does_not_count():
    described = dataclasses.replace(NAIVE, summary="another", configs=())
    assert kernel_key.key(described.kernel_of(CONFIG, True), CC) == kernel_key.key(*KERNEL)
    launched = dataclasses.replace(KERNEL[0], threads=1, dynamic_shared=1)
    assert kernel_key.key(launched, CC) == kernel_key.key(*KERNEL)


def test_another_compiler_or_setting_has_another_key(monkeypatch):
    keys = {kernel_key.key(*KERNEL)}

    def changed(target, name, value):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            kernel_key._toolchain.cache_clear()
            keys.add(kernel_key.key(*KERNEL))
        kernel_key._toolchain.cache_clear()

    changes = [(kernel_key, "FORMAT", 0), (kernel_key, "SOURCES", "0")]
    changes += [(sys.implementation, "cache_tag", "cpython-0")]
    changes += [(numba_config, name, -1) for name in compilation.SETTINGS]
    packages = [*kernel_key.PACKAGES, *(names[0] for names in kernel_key.LIBRARIES.values())]
    version = kernel_key.metadata.version
    for package in packages:
        changes.append(
            (kernel_key.metadata, "version", lambda name, p=package: "0" if name == p else version(name)),
        )
    for change in changes:
        changed(*change)
    assert len(keys) == 1 + len(changes)
    assert kernel_key.key(*KERNEL) in keys


@pytest.mark.parametrize(
    "setting", ["OPT", "BOUNDSCHECK", "CUDA_DEBUGINFO_DEFAULT", "CUDA_ENABLE_NRT", "DEBUG_ARRAY_OPT"]
)
def test_a_setting_that_changes_code_changes_the_key(monkeypatch, setting):
    before = kernel_key.key(*KERNEL)
    monkeypatch.setattr(numba_config, setting, -1)
    assert kernel_key.key(*KERNEL) != before


def test_a_toolkit_s_library_is_told_by_its_contents(tmp_path, monkeypatch):
    """A library that no package brings is told from another release, wherever it lies."""
    found = set()
    loaded = type("LoadedDL", (), {})()
    monkeypatch.setattr(kernel_key, "load_nvidia_dynamic_lib", lambda name: loaded)
    for i, contents in enumerate([b"", b"a" * 200_000, b"a" * 199_999 + b"b", b"b" + b"a" * 199_999, b"a" * 200_000]):
        loaded.abs_path = tmp_path / str(i)
        loaded.abs_path.write_bytes(contents)
        found.add(kernel_key._library("nvvm", ("no-such-package",)))
    assert len(found) == 4
    loaded.abs_path = tmp_path / "missing"
    kernel_key._library("nvvm", ("no-such-package",))  # does not raise


def test_sources_that_count(tmp_path):
    for name in ("device/a.py", "kernels/ladder/b.py", "runtime/epilogue.py", "simulator/switch.py", "api.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    hashes = [sources.hash_of(tmp_path)]
    for name in ("device/a.py", "kernels/ladder/b.py", "runtime/epilogue.py", "simulator/switch.py", "kernels/new.py"):
        (tmp_path / name).write_text("changed")
        hashes.append(sources.hash_of(tmp_path))
    (tmp_path / "device/a.py").rename(tmp_path / "device/c.py")
    hashes.append(sources.hash_of(tmp_path))
    assert len(set(hashes)) == 7
    (tmp_path / "api.py").write_text("changed")
    (tmp_path / "device/notes.txt").write_text("new")
    assert sources.hash_of(tmp_path) == hashes[-1]
    assert sources.hash_of(tmp_path / "device" / "none") is None


def test_every_source_of_the_device_code_counts():
    package = Path(numba_gemm.__file__).parent
    counted = {path for pattern in sources.PATTERNS for path in package.glob(pattern)}
    folders = (path for name in ("device", "kernels", "runtime") for path in package.glob(f"{name}/**/*.py"))
    assert {*folders, package / "simulator" / "switch.py"} == counted
    assert sources.hash_of(package) is not None


@pytest.mark.parametrize(
    "changes",
    [{"build": build_elsewhere}, {"build": lambda config, aligned: None}, {"signature": signature_elsewhere}, {}],
    ids=["build", "lambda", "signature", "sources"],
)
def test_what_cannot_be_told_is_not_kept(place, monkeypatch, changes):
    """Nothing that is hashed would change with the source of a function of another package."""
    kernel = dataclasses.replace(KERNEL[0], **changes)
    if not changes:
        monkeypatch.setattr(kernel_key, "SOURCES", None)
    for _ in range(2):
        assert fetch(lambda: CUBIN, kernel, CC) == (CUBIN, False)
    assert not place.exists()


def test_a_stage_that_was_added_is_not_kept(place, monkeypatch):
    stage = dataclasses.replace(NAIVE, name="mine", build=build_elsewhere)
    monkeypatch.setitem(STAGES, "mine", stage)
    assert fetch(lambda: CUBIN, stage.kernel_of(CONFIG, True), CC) == (CUBIN, False)
    assert not place.exists()


# ------------------------------------------------------------------------------------------ variants and epilogues

SLOPE, TABLE, TERMS = 0.5, [1.0], (1, (2.0, None))
SETTINGS, LAZY = types.ModuleType("settings"), types.ModuleType("lazy")
SETTINGS.FACTOR, SETTINGS.unused, SETTINGS.itself, LAZY.__getattr__ = 0.5, object(), SETTINGS, math.exp


def with_global(value, row, col):
    return value * SLOPE


def with_global_of_an_inner_function(value, row, col):
    def times(value):
        return value * SLOPE

    return times(value)


def with_list(value, row, col):
    return value * TABLE[0]


def with_modules(value, row, col):
    return math.exp(value) + np.float32(TERMS[0]) + sqrt(value)


def with_module(value, row, col):
    return value * SETTINGS.itself.FACTOR


def with_lazy_module(value, row, col):
    return value * LAZY.SLOPE


@functools.wraps(np.maximum)
def under_another_name(value, row, col):
    return value + 1


@functools.wraps(np.maximum)
def under_the_same_name(value, row, col):
    return value + 2


def calling_itself(value, row, col):
    return calling_itself(value, row, col) if row else value


def scaled(slope):
    return lambda value, row, col: value * slope


def record(*names, kind="f4", second=2.0):
    """A structured scalar; those of the same size have the same dtype.str, and may have the same bytes."""
    return np.array([(0.0, second)], [(name, kind) for name in names])[0]


def variant_kernel(variant: Variant) -> Kernel:
    """Return a kernel whose name does not depend on the variant."""
    return dataclasses.replace(DIFFERENT[1], variant=variant)


def variant_key(epilogue=None, vectors=0, a="along4", b="across4", c_aligned=True):
    return kernel_key.key(variant_kernel(Variant(a, b, c_aligned, epilogue, vectors)), CC)


def test_every_field_of_a_form_counts():
    keys = {
        variant_key(),
        variant_key(a="along1"),
        variant_key(b="any"),
        variant_key(c_aligned=False),
        variant_key(with_modules),
        variant_key(with_modules, 1),
        variant_key(with_global),
        variant_key(scaled(0.5)),
        variant_key(scaled(0.25)),
        variant_key(scaled(1)),
        variant_key(scaled(1.0)),
        variant_key(scaled(np.float32(1.0))),
        variant_key(scaled((1.0, 2.0))),
        variant_key(scaled(np.arange(4.0))),
        variant_key(scaled(np.arange(4))),
        variant_key(scaled(np.arange(4.0).reshape(2, 2))),
        variant_key(scaled(np.arange(4.0).reshape(2, 2, order="F"))),
        variant_key(scaled(np.ones(4))),
        variant_key(scaled(record("gain", "bias"))),
        variant_key(scaled(record("bias", "gain"))),
        variant_key(scaled(record("bias", "gain", second=3.0))),
        variant_key(scaled(record("bias", "gain", kind="i4"))),
        variant_key(with_module),
        variant_key(scaled(under_another_name)),
        variant_key(scaled(under_the_same_name)),
        variant_key(scaled(np.maximum)),
        variant_key(lambda value, row, col: value * 0.5),
        variant_key(lambda value, row, col: value * 0.25),
        variant_key(lambda value, row, col: value + 0.25),
        variant_key(lambda value, row, col, slope=1.0: value * slope),
        variant_key(lambda value, row, col, slope=2.0: value * slope),
        variant_key(lambda value, row, col: scaled(value)),
        variant_key(calling_itself),
    }
    assert len(keys) == 33
    assert None not in keys
    assert variant_key() != kernel_key.key(dataclasses.replace(DIFFERENT[1], variant=True), CC)


def test_functions_of_the_same_content_are_the_same(monkeypatch):
    for make in (lambda: scaled(0.5), lambda: calling_itself, lambda: scaled(np.ones(3)), lambda: with_module):
        assert variant_key(make()) == variant_key(make()) is not None
    before = variant_key(with_global), variant_key(with_module), variant_key(with_global_of_an_inner_function)
    monkeypatch.setitem(globals(), "SLOPE", 0.75)
    monkeypatch.setattr(SETTINGS, "unused", 1)
    assert variant_key(with_global) != before[0], "the global is another now"
    assert variant_key(with_module) == before[1]
    assert variant_key(with_global_of_an_inner_function) not in (before[2], None)
    monkeypatch.setattr(SETTINGS, "FACTOR", 0.75)
    assert variant_key(with_module) != before[1]


def test_a_copy_stays_as_it_is(monkeypatch):
    array = np.ones(2)
    factors = np.ones(1, [("gain", "f4")])
    of_records = scaled(factors[0]), scaled((factors[0],))  # they are views of the array
    for function in (with_global, with_module, scaled(array), scaled((array,)), calling_itself, *of_records):
        copy, told = frozen(function), fingerprint(function)
        assert fingerprint(copy) == told is not None
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "SLOPE", 0.75)
            patch.setitem(globals(), "calling_itself", with_global)
            patch.setattr(SETTINGS, "FACTOR", 0.75)
            array += 1
            factors["gain"] += 1
            assert fingerprint(copy) == told != fingerprint(function)
    assert frozen(with_global)(3.0, 0, 0) == 1.5
    assert frozen(scaled((1, [2]))).__closure__[0].cell_contents[1] == [2]


def test_functions_that_find_other_attributes_of_the_same_module():
    """Each counts with its own, also if it is found in the module while that is described."""
    settings, inner = types.ModuleType("settings"), types.ModuleType("inner")
    settings.inner, inner.low, inner.high = inner, 1.0, 2.0
    space = {"settings": settings}
    exec("def clip(x): return min(x, settings.inner.high)", space)
    exec("def both(value, row, col): return settings.clip(max(value, settings.inner.low))", space)
    settings.clip, both = space["clip"], space["both"]
    copy, found = frozen(both), {fingerprint(both)}
    for name in ("low", "high"):
        setattr(inner, name, 1.5)
        found.add(fingerprint(both))
    assert len(found) == 3
    assert None not in found
    assert (copy(0.0, 0, 0), copy(5.0, 0, 0)) == (1.0, 2.0)
    assert (both(0.0, 0, 0), both(5.0, 0, 0)) == (1.5, 1.5)


def test_enumerations_count_by_kind_and_value():
    """Members of a Flag may have no name, and those of an Enum are not equal to numbers."""
    flags = (
        enum.IntFlag("Kind", "one two", boundary=enum.KEEP)
        if hasattr(enum, "KEEP")
        else enum.IntFlag("Kind", "one two")
    )
    kinds = [flags, enum.IntEnum("Kind", {"one": 1, "two": 2}), enum.Enum("Kind", {"one": 1, "two": 2})]
    members = [flags(0), flags(16), flags(32), *(kind.one for kind in kinds), kinds[1].two]
    keys = [variant_key(scaled(one)) for one in (*kinds, *members)]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert variant_key(scaled(enum.IntEnum("Kind", {"one": 1, "two": 2}))) == keys[1]


class Scale:
    slope = 2.0


@pytest.mark.parametrize(
    "epilogue",
    [
        with_list,
        with_lazy_module,
        scaled([1.0]),
        scaled(Scale()),
        scaled(np.ones(10_000)),
        scaled(np.array([None])),
        scaled(np.array([(None,)], [("x", "O")])[0]),
        scaled((1, [2])),
        scaled(np.frompyfunc(max, 2, 1)),
    ],
    ids=["global list", "lazy module", "list", "object", "large array", "objects", "record", "nested list", "ufunc"],
)
def test_epilogues_of_which_not_all_can_be_told_are_not_kept(place, epilogue):
    assert variant_key(epilogue) is None
    kernel = STREAM_K.kernel_of(STREAM_K.configs[0], Variant("any", "any", False, epilogue))
    for _ in range(2):
        assert fetch(lambda: CUBIN, kernel, CC) == (CUBIN, False)
    assert not place.exists()


class Dispatcher:
    """As much of what cuda.jit makes as is looked at."""

    def __init__(self, py_func, complete=False, **options):
        self.py_func, self.targetoptions = py_func, {"device": True, "debug": False, "link": []} | options
        self._can_compile = not complete

    def __call__(self):
        """Kernels are called with a grid, device functions by other device functions."""


def test_device_functions_count_by_what_they_are_made_of(monkeypatch):
    one = Dispatcher(with_global)
    keys = {variant_key(one), variant_key(Dispatcher(with_global, fastmath=True)), variant_key(with_global)}
    assert len(keys) == 3
    assert variant_key(Dispatcher(with_global)) in keys
    assert variant_key(scaled(one)) == variant_key(scaled(Dispatcher(with_global)))
    assert variant_key(Dispatcher(with_global, complete=True)) is None, "compiled of other globals than now, perhaps"
    assert variant_key(Dispatcher(with_global, link=["library.ptx"])) is None
    before = variant_key(scaled(one))
    monkeypatch.setitem(globals(), "SLOPE", 0.75)
    assert variant_key(one) not in keys
    assert variant_key(scaled(one)) != before


COMPILE_EPILOGUES = """
import types
import numpy as np
from numba import cuda, float32, int64
from numba_gemm.runtime import epilogue as epilogues
from numba_gemm.runtime import compiler as internals

SLOPE, TABLE = np.float32(3), np.full(2, 3, np.float32)
module = types.ModuleType("module")
module.SLOPE = np.float32(3)

def with_global(value, row, col):
    return value * SLOPE

def with_module(value, row, col):
    return value * module.SLOPE

def with_array(value, row, col):
    return value * TABLE[0]

@cuda.jit(device=True)
def device(value, row, col):
    return value * SLOPE

@cuda.jit(device=True)
def times(value, turns):
    return times(value * SLOPE, turns - 1) if turns > 0 else value

def with_device(value, row, col):
    return device(value, row, col)

def calling_itself(value, row, col):
    return times(value, row)

def in_closure():
    slope = SLOPE
    return lambda value, row, col: value * slope

def constants(prepared):
    with internals._compiling_for((9, 0, "a")):
        function = getattr(prepared, "py_func", prepared)
        text, _ = cuda.compile_ptx(function, (float32, int64, int64), device=True, cc=(9, 0, "a"))
    return [word in text for word in ("40400000", "40A00000", "0, 0, 64, 64", "0, 0, 160, 64")]

for get in (
    lambda: with_global, lambda: with_module, lambda: with_array, lambda: device, lambda: with_device,
    lambda: calling_itself, in_closure,
):
    before = epilogues.prepared(get(), 0)
    SLOPE = module.SLOPE = np.float32(5)
    TABLE[:] = 5
    after = epilogues.prepared(get(), 0)
    was, now = constants(before), constants(after)  # compiled only now
    SLOPE = module.SLOPE = np.float32(3)
    TABLE[:] = 3
    assert any(was) and was[::2] == now[1::2] and not any(was[1::2]) and not any(now[::2]), (get(), was, now)
    assert epilogues.prepared(get(), 0) is before
"""


def test_what_is_compiled_is_what_was_found_at_the_call():
    in_a_compiling_process(COMPILE_EPILOGUES)


FETCH_WITH_EPILOGUE = """
import json
from numba_gemm.runtime import epilogue as epilogues, kernel_cache
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import Variant

def fetch(slope):
    epilogue = epilogues.prepared(lambda value, row, col, bias: value * slope + bias[col], 1)
    stage = STAGES["thin"]
    kernel = stage.kernel_of(stage.configs[0], Variant("along4", "along1", False, epilogue, 1))
    cubin, origin, _ = kernel_cache.fetch(kernel, (9, 0))
    return origin == "cache", cubin.code.hex()

print(json.dumps([fetch(2.0), fetch(3.0), fetch(2.0)]))
"""


def test_epilogues_are_found_by_another_process(place):
    compiled = json.loads(in_a_compiling_process(FETCH_WITH_EPILOGUE))
    found = json.loads(in_a_compiling_process(UNABLE + FETCH_WITH_EPILOGUE))
    assert [cached for cached, _ in compiled] == [False, False, True]
    assert [cached for cached, _ in found] == [True, True, True]
    codes = [code for _, code in compiled]
    assert codes == [code for _, code in found]
    assert codes[0] == codes[2] != codes[1]


def test_kept_kernels_with_an_epilogue_need_no_numba(place):
    in_a_compiling_process(FETCH_WITH_EPILOGUE)
    found = in_a_compiling_process(FETCH_WITH_EPILOGUE + "import sys; print('numba' in sys.modules)")
    fetched, imported = found.splitlines()
    assert [cached for cached, _ in json.loads(fetched)] == [True, True, True]
    assert imported == "False"


# ------------------------------------------------------------------------------------------------ what goes wrong

HEADER = len(kernel_files.MAGIC)
DAMAGE = {
    "empty": lambda contents: b"",
    "garbage": lambda contents: b"garbage" * 99,
    "magic": lambda contents: b"x" + contents[1:],
    "checksum": lambda contents: contents[:HEADER] + bytes([contents[HEADER] ^ 1]) + contents[HEADER + 1 :],
    "body's first byte": lambda contents: contents[: HEADER + 32] + b"\0" + contents[HEADER + 33 :],
    "last byte": lambda contents: contents[:-1] + bytes([contents[-1] ^ 1]),
    "cut in the magic": lambda contents: contents[:5],
    "cut in the checksum": lambda contents: contents[: HEADER + 9],
    "no body": lambda contents: contents[: HEADER + 32],
    "cut by a byte": lambda contents: contents[:-1],
    "longer": lambda contents: contents + b"\0",
    "another kernel's": lambda contents: kernel_files.packed("another", OTHER, ABOUT),
    "checked but not compressed": lambda contents: checked(b"no zlib"),
    "checked but not JSON": lambda contents: checked(kernel_files.zlib.compress(b"{\nELF")),
    "checked but not all fields": lambda contents: checked(kernel_files.zlib.compress(b'{"cc": [9, 0]}\nELF')),
    "checked but nested too deep": lambda contents: checked(kernel_files.zlib.compress(b"[" * 100_000)),
    "checked but a huge number": lambda contents: with_field("registers", 10**400),
    "checked but no number": lambda contents: with_field("shared", float("nan")),
    "checked but a fraction": lambda contents: with_field("shared", 0.5),
    "checked but a negative number": lambda contents: with_field("local", -1),
    "checked but a number for a name": lambda contents: with_field("name", 5),
    "checked but a name that is no text": lambda contents: with_field("name", "\ud800"),
    "checked but no compute capability": lambda contents: with_field("cc", []),
    "checked but nothing about it": lambda contents: with_field("about", []),
    "checked but no releases": lambda contents: with_field("about", ["k", 1.0, 5]),
    "checked but cut off": lambda contents: checked(contents[HEADER + 32 : -9]),
    "checked but expands without end": lambda contents: with_field("registers", 1, b"\0" * (64 << 20)),
    "larger than any kernel": lambda contents: with_field("registers", 1, os.urandom(16 << 20)),
}


def checked(body: bytes) -> bytes:
    digest = kernel_files.hashlib.sha256(kernel_key.key(*KERNEL).encode() + body).digest()
    return kernel_files.MAGIC + digest + body


def with_field(name: str, value: object, code: bytes = CUBIN.code) -> bytes:
    """A kernel's file whose checksum is correct, with one field replaced."""
    described = dataclasses.asdict(CUBIN) | {"about": ABOUT, name: value}
    del described["code"]
    return checked(kernel_files.zlib.compress(json.dumps(described).encode() + b"\n" + code, 1))


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_file_is_replaced(place, damage):
    fetch(lambda: CUBIN, *KERNEL)
    path_of(place).write_bytes(DAMAGE[damage](path_of(place).read_bytes()))
    with pytest.warns(kernel_files.CacheWarning, match="broken file"):
        assert fetch(lambda: OTHER, *KERNEL) == (OTHER, False)
    assert fetch(never, *KERNEL) == (OTHER, True)


def test_any_single_byte_counts(place):
    whole = kernel_files.packed("k", CUBIN, ABOUT)
    for i in range(len(whole)):
        with pytest.raises(ValueError, match="checksum"):
            kernel_files.unpacked("k", whole[:i] + bytes([whole[i] ^ 255]) + whole[i + 1 :])


def blocked_parent(place, monkeypatch):
    place.write_text("a file where the directory should be")


def no_such_parent(place, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "/proc/numba_gemm/cache")


def read_only(place, monkeypatch):
    place.mkdir()
    place.chmod(0o500)
    if os.access(place, os.W_OK):
        pytest.skip("this user writes everywhere")


def full(place, monkeypatch):
    def replace(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)


def relative_home(place, monkeypatch):
    monkeypatch.delenv("NUMBA_GEMM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")


def no_home(place, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    relative_home(place, monkeypatch)
    monkeypatch.setattr(Path, "home", home)


def directory_for_a_file(place, monkeypatch):
    path_of(place).mkdir(parents=True)


def not_what_it_was(place, monkeypatch):
    monkeypatch.setattr(kernel_files, "packed", lambda *_: b"")


UNUSABLE = (
    blocked_parent,
    no_such_parent,
    read_only,
    full,
    relative_home,
    no_home,
    directory_for_a_file,
    not_what_it_was,
)


@pytest.mark.parametrize("spoil", UNUSABLE, ids=lambda spoil: spoil.__name__)
def test_unusable_cache_warns_once(place, monkeypatch, spoil):
    spoil(place, monkeypatch)
    with pytest.warns(kernel_files.CacheWarning, match="NUMBA_GEMM_CACHE_DIR") as caught:
        fetched = [fetch(lambda: CUBIN, *KERNEL) for _ in range(3)]
    assert fetched == [(CUBIN, False)] * 3
    assert len(caught) == 1
    assert not list(place.glob("*.tmp") if place.is_dir() else ())


@pytest.mark.parametrize("link", [False, True], ids=["", "link"])
@pytest.mark.parametrize("case", REFUSED_DIRECTORIES)
def test_directory_that_others_can_change_is_refused(place, tmp_path, monkeypatch, case, link):
    spoil, words = REFUSED_DIRECTORIES[case]
    if link:
        (tmp_path / "link").symlink_to(place)
        monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "link"))
    fetch(lambda: CUBIN, *KERNEL) if not link else place.mkdir(mode=0o700)
    fetch(lambda: CUBIN, *KERNEL)
    assert fetch(never, *KERNEL) == (CUBIN, True)
    spoil(place)
    with pytest.warns(kernel_files.CacheWarning, match=words) as caught:
        fetched = [fetch(lambda: OTHER, *KERNEL, i) for i in (None, None, 1)]
    assert fetched == [(OTHER, False)] * 3
    assert len(caught) == 1
    assert list(place.iterdir()) == [path_of(place)], "nothing is kept there"


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_file_that_others_can_change_is_refused_and_replaced(place, case):
    spoil, words = REFUSED_FILES[case]
    fetch(lambda: CUBIN, *KERNEL)
    (place / "elsewhere").write_bytes(path_of(place).read_bytes())
    spoil(path_of(place))
    with pytest.warns(kernel_files.CacheWarning, match=words) as caught:
        assert fetch(lambda: OTHER, *KERNEL) == (OTHER, False)
    assert len(caught) == 1
    assert fetch(never, *KERNEL) == (OTHER, True)


@pytest.mark.parametrize(("uid", "trusted"), [(1000, True), (0, True), (1001, False), (65534, False)])
@pytest.mark.parametrize("kind", [stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644])
def test_owners_who_are_trusted(monkeypatch, kind, uid, trusted):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    problem = private_files.refusal(Path("x"), os.stat_result((kind, 0, 0, 1, uid, 0, 0, 0, 0, 0)))
    assert (problem is None) == trusted


def test_what_is_made_is_private(place):
    before = os.umask(0)
    try:
        fetch(lambda: CUBIN, *KERNEL)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place, path_of(place))] == [0o700, 0o600]


def test_kernels_are_found_where_nothing_can_be_written(place, monkeypatch):
    fetch(lambda: CUBIN, *KERNEL)
    old = time.time() - 3 * kernel_files.DAY
    os.utime(path_of(place), (old, old))
    place.chmod(0o500)
    monkeypatch.setattr(os, "utime", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert fetch(never, *KERNEL) == (CUBIN, True)
    place.chmod(0o700)


# ---------------------------------------------------------------------------------- how much, and by how many


NOT_TO_TOUCH = {"notes.txt", ".1111111111111111.tmp"}


def clutter(place: Path) -> None:
    """Write files that are not the cache's, one that another process is writing, and one that a process left behind."""
    for name in (*NOT_TO_TOUCH, ".0000000000000000.tmp"):
        (place / name).write_text("")
    for name in ("notes.txt", ".0000000000000000.tmp"):
        os.utime(place / name, (0, 0))


def test_latest_files_stay(place, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_SIZE", str(3 * len(kernel_files.packed("k" * 64, CUBIN, ABOUT)) + 400))
    place.mkdir(mode=0o700)
    clutter(place)
    for i in range(5):
        fetch(lambda: CUBIN, *KERNEL, i)
        written = time.time() - 100 * kernel_files.DAY + i
        os.utime(place / f"{numbered(i)}.kernel", (written, written))
        if i == 2:  # the first one is used, and so outlives the second
            fetch(never, *KERNEL, 0)
    assert [i for i in range(5) if (place / f"{numbered(i)}.kernel").exists()] == [0, 3, 4]
    assert {path.name for path in place.iterdir() if path.suffix != ".kernel"} == NOT_TO_TOUCH


def test_without_a_limit_nothing_is_deleted(place, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_SIZE", "much")
    with pytest.warns(kernel_files.CacheWarning, match="is 'much'; expected bytes, .*no kernels are deleted from"):
        fetch(lambda: CUBIN, *KERNEL, 0)
    fetch(never, *KERNEL, 0)  # it has been kept


def test_clear_cache(place):
    assert kernel_files.clear_cache() == 0
    for i in (None, 1):
        fetch(lambda: CUBIN, *KERNEL, i)
    clutter(place)
    assert numba_gemm.clear_cache() == 2
    assert {path.name for path in place.iterdir()} == NOT_TO_TOUCH
    assert fetch(lambda: OTHER, *KERNEL) == (OTHER, False)


def test_threads_share_it(place):
    def use(i):
        cubin, _ = fetch(lambda: CUBIN, *KERNEL, i % 5)
        return cubin == CUBIN

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(use, range(200)))
    assert len(list(place.iterdir())) == 5


WRITER = """
import sys, warnings
from numba_gemm.runtime import kernel_files, kernel_key
from test_kernel_cache import ABOUT, CUBIN, KERNEL, fetch
warnings.simplefilter("error")
kernel_files.SIZE_LIMIT = 1500  # so that they delete one another's files, too
place, name = kernel_files.directory(), kernel_key.key(*KERNEL)
print("ready", flush=True)
sys.stdin.readline()
for i in range(300):
    kernel_files._write(place, name, CUBIN, ABOUT)
    fetch(lambda: CUBIN, *KERNEL, i % 4)
    kernel_files._prune(place)
    assert kernel_files._read(place, name) in (CUBIN, None)
print("done", fetch(lambda: CUBIN, *KERNEL)[0] == CUBIN)
"""


def test_processes_share_it(place):
    folders = os.pathsep.join(map(str, Path(__file__).parents[:2]))  # of this file, and of the package support
    environment = os.environ | {"PYTHONPATH": folders, "NUMBA_ENABLE_CUDASIM": "1"}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        out, err = writer.communicate()
        assert writer.returncode == 0, err
        assert out == "done True\n"


# ------------------------------------------------------------------------------------------------- precompile

COMPILE = """
import dataclasses, json
import numba_gemm
from numba_gemm.runtime import kernel_cache
from numba_gemm.kernels.ladder import STAGES
stage = STAGES["naive"]
report = numba_gemm.precompile(["naive"], (9, 0))
kernels = [stage.usual_kernel(stage.configs[0], aligned) for aligned in (True, False)]
cubins = [dataclasses.asdict(kernel_cache.fetch(kernel, (9, 0)).cubin) for kernel in kernels]
for cubin in cubins:
    cubin["code"] = cubin["code"].hex()
print(json.dumps([report, cubins]))
"""
# In a process that cannot compile.
UNABLE = (
    "from numba_gemm.runtime import compilation, compiler\ncompilation.compile_cubin = compiler.result_type = None\n"
)


def in_a_compiling_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        env=compiler_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_precompiled_kernels_are_what_the_launcher_finds(place):
    report, compiled = json.loads(in_a_compiling_process(COMPILE))
    again, found = json.loads(in_a_compiling_process(UNABLE + COMPILE))
    expected = [["naive", CONFIG.name, variant, [9, 0]] for variant in ("aligned", "any")]
    assert [row[:4] for row in report] == [row[:4] for row in again] == expected
    assert [row[5] for row in report] == ["compiler", "compiler"]
    assert [row[5] for row in again] == ["cache", "cache"]
    assert all(row[4] > 0 for row in report + again)
    assert found == compiled
    assert found[0]["registers"] > 0
    assert not found[0]["ptx"], "PTX is not kept"


WITHOUT_NUMBA = """
import sys
from numba_gemm import plan, tiled_sgemm
from numba_gemm.gemm import heuristics, precompile
from numba_gemm.runtime import kernel_cache

kernel, cc = precompile.kernels_of("auto", (9, 0), shapes=[(64, 64, 64)])[0][3:]
fetched = kernel_cache.fetch(kernel, cc)
print(fetched.origin, *sorted({"numba", "llvmlite", "pandas"}.intersection(sys.modules)))
"""


def test_a_process_that_compiles_nothing_does_not_import_numba(place):
    assert in_a_compiling_process(WITHOUT_NUMBA) == "compiler llvmlite numba\n"
    assert in_a_compiling_process(WITHOUT_NUMBA) == "cache\n"


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU to ask")
def test_precompile_asks_for_the_gpu_unless_told(place):
    code = "import numba_gemm\ntry:\n numba_gemm.precompile()\nexcept RuntimeError as e: print(type(e).__name__)"
    assert in_a_compiling_process(code) == "GpuUnavailable\n"


@pytest.fixture
def pretend(place, monkeypatch):
    """Compiling takes no time, and works in the simulator."""

    def compile_all(tasks, done, jobs):
        for i in range(len(tasks)):
            done(i, CUBIN, 0.0)

    monkeypatch.setattr(precompile, "SIMULATOR", False)
    monkeypatch.setattr(kernel_cache, "compile_all", compile_all)


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0)])
def test_precompile_covers_what_auto_chooses(pretend, cc):
    done = {row[:3] for row in precompile.precompile(cc=cc)}
    gpu = precompile.model_of(cc)
    extents = (1, 16, 33, 64, 100, 101, 1000, 1001, 4096, 20000)
    for m, n, k in itertools.product(extents, extents, (64, 1023, 1024, 20000)):
        if max(m, n) < 64:
            continue  # nothing that a process would wait for
        product = Product(dense("N", m, k), dense("N", k, n), dense("N", m, n))
        choice = heuristics.choose(heuristics.problem(product, gpu))
        variant = choice.stage.variant(choice.config, choice.oriented(product))
        name = variant.name if isinstance(variant, Variant) else "aligned" if variant else "any"
        assert (choice.stage.name, choice.config.name, name) in done, (m, n, k, choice.swapped)
    assert all(cc >= STAGES[name].min_cc for name, *_ in done if not name.startswith("add_parts"))


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
def test_precompile_covers_what_is_launched_on_tensor_cores(pretend, monkeypatch, cc, precision):
    """Kernels on tensor cores are compiled for all layouts, those of float32 multiply-adds for the layouts named."""
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    layouts = ("NN", "NT", "TT")
    usual, for_layouts = (
        {kernel_key.key(kernel, cc) for *_, kernel, _ in precompile.kernels_of("auto", cc, precision, layouts=of)}
        for of in ("NN", layouts)
    )
    gpu = dataclasses.replace(devices.SIMULATED_DEVICE, cc=cc)
    for m, n, k, (a, b) in itertools.product((64, 1000, 4099), (16, 4096), (64, 1023, 1024, 20000), layouts):
        product = Product(dense(a, m, k), dense(b, k, n), dense("N", m, n))
        choice = heuristics.choose(heuristics.problem(product, gpu, precision))
        assert choice.precision == precision or (choice.precision in ("bf16x6", "ieee") and cc == (9, 0))
        launches = choice.stage.launches(
            choice.config, choice.oriented(product), choice.precision, choice.partition, gpu.gpu
        )
        compiled = for_layouts if isinstance(choice.stage, LadderStage) and (a, b) != ("N", "N") else usual
        assert {kernel_key.key(step.kernel, cc) for step in launches.steps} <= compiled, (m, n, k, a, b)


@pytest.mark.parametrize(
    ("of", "most", "most_compensated"),
    [(["ieee"], 108, 0), (["bf16"], 8, 0), (["bf16x3"], 5, 50), (["bf16x6"], 26, 50), ([*TENSOR_PRECISIONS], 64, 50)],
    ids=["ieee", "bf16", "bf16x3", "bf16x6", "tensor cores"],
)
def test_usual_products_take_few_kernels(pretend, monkeypatch, of, most, most_compensated):
    """Those that other precisions share are counted apart: kernels of float32 multiply-adds, and those of bf16x6."""
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    stages = [(stage, kernel) for stage, *_, kernel, _ in precompile.kernels_of("auto", (9, 0), of)]
    kernels = [kernel for _, kernel in stages]
    assert len({*kernels}) == len(kernels), "each once"
    multiply_add = [
        kernel for stage, kernel in stages if "ieee" not in of and isinstance(STAGES.get(stage), LadderStage)
    ]
    compensated = sum(kernel.name.endswith("_compensated") for kernel in multiply_add)
    shared = 0 if "bf16x6" in of else sum("bf16x6" in kernel.name for kernel in kernels)
    assert shared <= 18
    assert len(multiply_add) - compensated <= 50
    assert most / 2 < len(kernels) - len(multiply_add) - shared <= most
    assert most_compensated / 2 <= compensated <= most_compensated


def test_precompile_does_each_kernel_once(pretend):
    rows = precompile.precompile(["naive", "auto", "naive", "async_copy"], [(8, 0), (9, 0), (8, 0)])
    assert len({row[:4] for row in rows}) == len(rows)
    assert {row.cc for row in rows} == {(8, 0), (9, 0)}
    assert all(row.origin == "compiler" for row in rows)
    assert [row[:4] for row in rows[:2]] == [("naive", CONFIG.name, "aligned", cc) for cc in ((8, 0), (9, 0))]
    assert all(row.origin == "cache" for row in precompile.precompile("naive", (9, 0)))


@pytest.mark.parametrize(
    ("stages", "cc", "error", "match"),
    [
        ("fastest", (9, 0), ValueError, "expected 'auto' or one of naive"),
        ("async_copy", (7, 5), ValueError, "needs compute capability 8.0"),
        ("naive", (9,), ValueError, "cc is 9; expected a compute capability"),
        ("naive", "9", ValueError, "cc is '9'; expected a compute capability"),
        ("naive", [None], TypeError, "cc is None; expected a compute capability"),
    ],
)
def test_precompile_refuses(pretend, stages, cc, error, match):
    with pytest.raises(error, match=match):
        precompile.precompile(stages, cc)


@pytest.mark.simulator
def test_precompile_needs_the_compiler(place):
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM"):
        precompile.precompile("naive", (9, 0))
