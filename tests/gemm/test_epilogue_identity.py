"""Epilogues of repeated calls: a change of anything that an epilogue finds is seen, and equal ones are known again."""

from __future__ import annotations

import enum
import math
import types
from typing import NamedTuple

import numpy as np
import pytest
from numba import cuda
from support.array_libraries import tensor
from support.host_gpu import HostGpu

from numba_gemm import plan, tiled_sgemm
from numba_gemm.runtime import epilogue as epilogues

ONES = np.ones((4, 4), np.float32)


def space_of(source, **names):
    """Return the globals of a module with this source, which finds these names."""
    space = {"__name__": "module", **names}
    exec(source, space)
    return space


def module(**names):
    made = types.ModuleType("settings")
    vars(made).update(names)
    return made


@pytest.fixture(params=["function", "plan"])
def took_fast_path(request, torch, checked):
    """Compute a product with an epilogue, compare with the epilogue's Python function; return if it was fast."""
    plans = {}

    def multiply(a, b, epilogue):
        if request.param == "function":
            return tiled_sgemm(a, b, epilogue=epilogue)
        if id(epilogue) not in plans:
            plans[id(epilogue)] = plan(4, 4, 4, epilogue=epilogue), epilogue
        return plans[id(epilogue)][0](a, b)

    def took(epilogue):
        before = len(checked)
        result = multiply(tensor(ONES), tensor(ONES), epilogue)
        function = getattr(epilogue, "py_func", epilogue)
        expected = [[np.float32(function(np.float32(4), row, col)) for col in range(4)] for row in range(4)]
        np.testing.assert_array_equal(result.x, expected)
        return len(checked) == before

    took.planned = request.param == "plan"
    return took


def assign(name, value):
    return lambda space: space.__setitem__(name, value)


def set_attribute(path, value):
    """Return a function that sets an attribute of a module's global, as in "settings.scale"."""

    def change(space):
        first, *middle, last = path.split(".")
        owner = space[first]
        for name in middle:
            owner = getattr(owner, name)
        setattr(owner, last, value)

    return change


def set_cell(name, value):
    def change(space):
        space[name].__closure__[0].cell_contents = value

    return change


SCALED = "def epilogue(value, row, col): return value * scale"
REPR = "def epilogue(value, row, col): return value + len(repr(scale))"  # tells 1 from 1.0, and 0.0 from -0.0
DEFAULT = "def epilogue(value, row, col, scale=2): return value + len(repr(scale))"
CLOSURE = """
def make(scale):
    def epilogue(value, row, col): return value + len(repr(scale))
    return epilogue
epilogue = make(2)
"""
NESTED = """
def epilogue(value, row, col):
    def inner(x): return x * scale
    return inner(value)
"""
HELPER = "def helper(x): return x * scale\ndef epilogue(value, row, col): return helper(value)"
HELPER_OF_HELPER = "def last(x): return x * scale\ndef helper(x): return last(x)\n" + HELPER.splitlines()[1]
HELPER_DEFAULT = "def helper(x, scale=2.0): return x * scale\ndef epilogue(value, row, col): return helper(value)"
HELPER_CLOSURE = """
def make(scale):
    def helper(x): return x * scale
    return helper
helper = make(2.0)
def epilogue(value, row, col): return helper(value)
"""
BUILTIN = "def epilogue(value, row, col): return value + abs(-2.0)"
RECURSIVE = """
def helper(x, depth): return x if depth == 0 else other(x * scale, depth - 1)
def other(x, depth): return helper(x, depth)
def epilogue(value, row, col): return helper(value, 2)
"""
SETTINGS = "def epilogue(value, row, col): return value * settings.scale"
INNER = "def epilogue(value, row, col): return value * settings.inner.scale"
TWO_ATTRIBUTES = """
def helper(x): return x + settings.bias
def epilogue(value, row, col): return helper(value * settings.gain)
"""
LIMITED = "def epilogue(value, row, col): return limits[0] * value if value > limits.low else value + Kind.second"


def package(**names):
    """A module whose function finds the module by its name, and other attributes of it than its caller."""
    made = module(inner=module(**names))
    made.helper = space_of("def helper(x): return x * settings.inner.scale", settings=made)["helper"]
    return made


class Limits(NamedTuple):
    low: float
    high: float


class Kind(enum.IntEnum):
    first = 1
    second = 2


class OtherKind(enum.IntEnum):
    first = 1
    second = 3


OTHER = space_of("def helper(x): return x * 7.0\ndef with_default(x, scale=9.0): return x * scale")

# Source of a module with `epilogue`, names that it finds, and a change.
CHANGES = {
    "global": (SCALED, {"scale": 2.0}, assign("scale", 3.0)),
    "global of NumPy's": (SCALED, {"scale": np.float32(2)}, assign("scale", np.float32(3))),
    "1 to 1.0": (REPR, {"scale": 1}, assign("scale", 1.0)),
    "1 to True": (REPR, {"scale": 1}, assign("scale", True)),
    "1.0 to True": (REPR, {"scale": 1.0}, assign("scale", True)),
    "1 to NumPy's": (REPR, {"scale": 1}, assign("scale", np.int64(1))),
    "0.0 to -0.0": (REPR, {"scale": 0.0}, assign("scale", -0.0)),
    "tuple": ("def epilogue(value, row, col): return value * s[1]", {"s": (1.0, 2.0)}, assign("s", (1.0, 3.0))),
    "attribute": (SETTINGS, {"settings": module(scale=2.0)}, set_attribute("settings.scale", 3.0)),
    "attribute, 1 to 1.0": (
        "def epilogue(value, row, col): return value + len(repr(settings.scale))",
        {"settings": module(scale=1)},
        set_attribute("settings.scale", 1.0),
    ),
    "module": (SETTINGS, {"settings": module(scale=2.0)}, assign("settings", module(scale=3.0))),
    "attribute of a module's module": (
        INNER,
        {"settings": module(inner=module(scale=2.0))},
        set_attribute("settings.inner.scale", 3.0),
    ),
    "module of a module": (
        INNER,
        {"settings": module(inner=module(scale=2.0))},
        set_attribute("settings.inner", module(scale=3.0)),
    ),
    "attribute that only a helper names": (
        TWO_ATTRIBUTES,
        {"settings": module(bias=1.0, gain=2.0)},
        set_attribute("settings.bias", 9.0),
    ),
    "attribute that a helper does not name": (
        TWO_ATTRIBUTES,
        {"settings": module(bias=1.0, gain=2.0)},
        set_attribute("settings.gain", 9.0),
    ),
    "attribute that a module's function names": (
        "def epilogue(value, row, col): return settings.helper(value)",
        {"settings": package(scale=2.0)},
        set_attribute("settings.inner.scale", 3.0),
    ),
    "attribute with the name of a global": (
        SETTINGS,
        {"settings": module(scale=2.0), "scale": [1]},
        set_attribute("settings.scale", 3.0),
    ),
    "named tuple": (LIMITED, {"limits": Limits(2.0, 4.0), "Kind": Kind}, assign("limits", Limits(3.0, 4.0))),
    "limits of a named tuple": (
        LIMITED,
        {"limits": Limits(2.0, 4.0), "Kind": Kind},
        assign("limits", Limits(5.0, 4.0)),
    ),
    "enumeration": (LIMITED, {"limits": Limits(5.0, 4.0), "Kind": Kind}, assign("Kind", OtherKind)),
    "global of a nested function": (NESTED, {"scale": 2.0}, assign("scale", 3.0)),
    "global of a helper": (HELPER, {"scale": 2.0}, assign("scale", 3.0)),
    "global of a helper's helper": (HELPER_OF_HELPER, {"scale": 2.0}, assign("scale", 3.0)),
    "global of helpers that name each other": (RECURSIVE, {"scale": 2.0}, assign("scale", 3.0)),
    "helper": (HELPER, {"scale": 2.0}, assign("helper", OTHER["helper"])),
    "helper's helper": (HELPER_OF_HELPER, {"scale": 2.0}, assign("last", OTHER["helper"])),
    "helper's code": (HELPER, {"scale": 2.0}, set_attribute("helper.__code__", OTHER["helper"].__code__)),
    "helper's default": (HELPER_DEFAULT, {}, set_attribute("helper.__defaults__", (3.0,))),
    "helper's closure": (HELPER_CLOSURE, {}, set_cell("helper", 3.0)),
    "helper in a module": (
        "def epilogue(value, row, col): return settings.helper(value)",
        {"settings": module(helper=space_of("def helper(x): return -x")["helper"])},
        set_attribute("settings.helper", OTHER["helper"]),
    ),
    "default": (DEFAULT, {}, set_attribute("epilogue.__defaults__", (333,))),
    "default, 1 to 1.0": (DEFAULT.replace("=2", "=1"), {}, set_attribute("epilogue.__defaults__", (1.0,))),
    "default, 1 to True": (DEFAULT.replace("=2", "=1"), {}, set_attribute("epilogue.__defaults__", (True,))),
    "default, 0.0 to -0.0": (DEFAULT.replace("=2", "=0.0"), {}, set_attribute("epilogue.__defaults__", (-0.0,))),
    "default, number to string": (
        DEFAULT.replace("=2", "=1"),
        {},
        set_attribute("epilogue.__defaults__", ("1",)),
    ),
    "closure": (CLOSURE, {}, set_cell("epilogue", 333)),
    "closure, 1 to 1.0": (CLOSURE.replace("(2)", "(1)"), {}, set_cell("epilogue", 1.0)),
    "closure, 1 to True": (CLOSURE.replace("(2)", "(1)"), {}, set_cell("epilogue", True)),
    "closure, 0.0 to -0.0": (CLOSURE.replace("(2)", "(0.0)"), {}, set_cell("epilogue", -0.0)),
    "code": (SCALED, {"scale": 2.0}, set_attribute("epilogue.__code__", space_of(REPR)["epilogue"].__code__)),
    "builtin that is hidden": (BUILTIN, {}, assign("abs", OTHER["helper"])),
    "builtin that is hidden by a number": (
        "def epilogue(value, row, col): return value + len(repr(credits))",
        {},
        assign("credits", 7),
    ),
    "builtin that was hidden": (BUILTIN, {"abs": OTHER["helper"]}, lambda space: space.__delitem__("abs")),
    "helper's builtin that is hidden": (
        "def helper(x): return abs(x)\ndef epilogue(value, row, col): return helper(-value)",
        {},
        assign("abs", OTHER["helper"]),
    ),
    "function of a library": (
        "def epilogue(value, row, col): return f(value + 0.5)",
        {"f": math.floor},
        assign("f", math.ceil),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_call_after_a_change_uses_the_new_content(took_fast_path, case):
    source, names, change = CHANGES[case]
    before = {name: dict(vars(x)) for name, x in names.items() if isinstance(x, types.ModuleType)}
    inner = {name: dict(vars(x.inner)) for name, x in names.items() if hasattr(x, "inner")}
    space = space_of(source, **names)
    try:
        took_fast_path(space["epilogue"])
        assert took_fast_path(space["epilogue"])
        change(space)
        assert not took_fast_path(space["epilogue"])
        assert took_fast_path(space["epilogue"])
    finally:
        for name, saved in before.items():
            vars(names[name]).clear()
            vars(names[name]).update(saved)
        for name, saved in inner.items():
            vars(names[name].inner).update(saved)


@pytest.mark.parametrize("values", [(2.0, 3.0), (1, 1.0, True), (0.0, -0.0), (2.0, 3.0, 4.0, 5.0)])
def test_global_that_toggles_is_fast_the_second_time(took_fast_path, values):
    space = space_of(REPR, scale=values[0])
    for turn in range(3):
        for value in values:
            space["scale"] = value
            assert took_fast_path(space["epilogue"]) == (turn > 0)


@pytest.mark.parametrize("make", ["closure", "default"])
def test_values_of_an_epilogue_s_own_are_known_again(torch, checked, make):
    """Also if it is another function, of the same expression."""

    def closure(scale):
        return lambda value, row, col: value + len(repr(scale))

    def default(scale):
        return lambda value, row, col, scale=scale: value + len(repr(scale))

    values = (1, 1.0, True, 0.0, -0.0, 2.5, (1, 2), (1, 2.0), "x", None)
    for turn in range(3):
        for i, value in enumerate(values):
            epilogue = (closure if make == "closure" else default)(value)
            result = tiled_sgemm(tensor(ONES), tensor(ONES), epilogue=epilogue)
            assert (result.x == 4 + len(repr(value))).all()
            assert len(checked) == (len(values) if turn else i + 1)


def test_same_expression_evaluated_again_takes_the_fast_path(torch, checked):
    for _ in range(4):
        result = tiled_sgemm(tensor(ONES), tensor(ONES), epilogue=lambda value, row, col: value * 2.0)
        assert (result.x == 8).all()
    assert len(checked) == 1


def test_same_code_with_other_globals_is_another_epilogue(torch, checked):
    first = space_of(SCALED, scale=2.0)["epilogue"]
    second = types.FunctionType(first.__code__, {"scale": 3.0})
    for turn in range(2):
        for epilogue, expected in ((first, 8), (second, 12)):
            assert (tiled_sgemm(tensor(ONES), tensor(ONES), epilogue=epilogue).x == expected).all()
        assert len(checked) == 2, turn


NAMES_OF_LIBRARIES = {
    "math": ("def epilogue(value, row, col): return value + math.erf(0.5)", {"math": math}),
    "a function of math": ("def epilogue(value, row, col): return erf(value)", {"erf": math.erf}),
    "numpy": ("def epilogue(value, row, col): return np.float32(value) + np.pi", {"np": np}),
    "float32": ("def epilogue(value, row, col): return float32(value)", {"float32": np.float32}),
    "a function of numpy": ("def epilogue(value, row, col): return exp(value)", {"exp": np.exp}),
    "builtins": ("def epilogue(value, row, col): return max(value, 0.0) + abs(row) + min(col, 2)", {}),
}


@pytest.mark.parametrize("case", NAMES_OF_LIBRARIES)
def test_names_of_libraries_take_the_fast_path(took_fast_path, case):
    source, names = NAMES_OF_LIBRARIES[case]
    space = space_of(source, **names)
    took_fast_path(space["epilogue"])
    assert took_fast_path(space["epilogue"])


FIRST = "def epilogue(value, row, col): return value + table[col]"
ARRAYS = {
    "global": (FIRST, lambda table: {"table": table}),
    "tuple": (FIRST.replace("table[col]", "table[0][col]"), lambda table: {"table": (table, 1.0)}),
    "module": (FIRST.replace("table", "settings.table"), lambda table: {"settings": module(table=table)}),
    "global of a helper": (
        "def helper(x): return x + table[1]\ndef epilogue(value, row, col): return helper(value)",
        lambda table: {"table": table},
    ),
    "closure": (
        "def make(table):\n  def epilogue(value, row, col): return value + table[col]\n  return epilogue\n"
        "epilogue = make(given)",
        lambda table: {"given": table},
    ),
    "default": (
        "def epilogue(value, row, col, table=given): return value + table[col]",
        lambda table: {"given": table},
    ),
    "closure of a helper": (
        "def make(table):\n  def helper(x, col): return x + table[col]\n  return helper\n"
        "helper = make(given)\ndef epilogue(value, row, col): return helper(value, col)",
        lambda table: {"given": table},
    ),
    "default of a helper": (
        "def helper(x, col, table=given): return x + table[col]\n"
        "def epilogue(value, row, col): return helper(value, col)",
        lambda table: {"given": table},
    ),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_array_never_takes_the_fast_path(took_fast_path, case):
    """Its elements may change in place."""
    source, names = ARRAYS[case]
    table = np.arange(4, dtype=np.float32)
    epilogue = space_of(source, **names(table))["epilogue"]
    for turn in range(3):
        table[:] = turn
        assert not took_fast_path(epilogue)


@pytest.mark.parametrize("case", ARRAYS)
def test_kernel_keeps_the_array_that_was_found(gpu, case):
    """It may be compiled later, for operands of another layout, and its key tells the content at the call."""
    source, names = ARRAYS[case]
    table = np.arange(4, dtype=np.float32) + 10
    made = epilogues.prepared(space_of(source, **names(table))["epilogue"], 0)
    table[:] = 0
    assert getattr(made, "py_func", made)(1.0, 1, 1) == 12


def test_default_of_a_helper_by_name_never_takes_the_fast_path(took_fast_path):
    """Its dictionary may change in place."""
    space = space_of("def helper(x, *, s=2.0): return x * s\ndef epilogue(value, row, col): return helper(value)")
    for value in (2.0, 3.0, 3.0):
        space["helper"].__kwdefaults__["s"] = value
        assert not took_fast_path(space["epilogue"])


class DeviceFunction:
    """The attributes of a device function of Numba's that are looked at."""

    def __init__(self, function, options):
        self.py_func, self.targetoptions, self.__name__ = function, options, function.__name__

    def __call__(self, *arguments):
        return self.py_func(*arguments)


@pytest.fixture
def jit(monkeypatch):
    """`cuda.jit(device=True)` that compiles nothing."""

    def jit(function=None, **options):
        return (lambda one: DeviceFunction(one, options)) if function is None else DeviceFunction(function, options)

    monkeypatch.setattr(cuda, "jit", jit)
    return jit


def test_device_function_that_is_rebound(took_fast_path, jit):
    space = space_of("def epilogue(value, row, col): return helper(value)")
    space["helper"] = jit(device=True)(lambda x: x * 2.0)
    took_fast_path(space["epilogue"])
    assert took_fast_path(space["epilogue"])
    space["helper"] = jit(device=True)(lambda x: x * 3.0)
    assert not took_fast_path(space["epilogue"])
    assert took_fast_path(space["epilogue"])


def test_global_of_a_device_function(took_fast_path, jit):
    space = space_of("def helper(x): return x * scale\ndef epilogue(value, row, col): return helper(value)", scale=2.0)
    space["helper"] = jit(device=True)(space["helper"])
    took_fast_path(space["epilogue"])
    assert took_fast_path(space["epilogue"])
    space["scale"] = 3.0
    assert not took_fast_path(space["epilogue"])
    assert took_fast_path(space["epilogue"])


def test_epilogue_that_is_a_device_function(took_fast_path, jit):
    space = space_of(SCALED, scale=2.0)
    one, other = (jit(device=True, fastmath=fast)(space["epilogue"]) for fast in (True, False))
    took_fast_path(one)
    assert took_fast_path(one)
    assert not took_fast_path(other), "options count"
    assert not took_fast_path(space["epilogue"]), "and a function has none"
    assert [took_fast_path(epilogue) for epilogue in (one, other, space["epilogue"])] == [True] * 3
    space["scale"] = 3.0
    assert not took_fast_path(one)
    assert took_fast_path(one)


def test_epilogue_that_changes_while_it_is_checked_is_not_remembered(torch, checked, monkeypatch):
    """The kernel has the content that the full check found; the tag was of the content before."""
    space = space_of(SCALED, scale=2.0)
    prepared = epilogues.prepared

    def changing(epilogue, vectors):
        space["scale"] = 3.0
        return prepared(epilogue, vectors)

    monkeypatch.setattr(epilogues, "prepared", changing)
    assert (tiled_sgemm(tensor(ONES), tensor(ONES), epilogue=space["epilogue"]).x == 12).all()
    monkeypatch.setattr(epilogues, "prepared", prepared)
    space["scale"] = 2.0
    assert (tiled_sgemm(tensor(ONES), tensor(ONES), epilogue=space["epilogue"]).x == 8).all()
    assert len(checked) == 2


def test_number_of_guards_is_bounded(torch, checked, monkeypatch):
    monkeypatch.setattr(epilogues, "MAX_MADE", 3)
    kept = [space_of(SCALED, scale=float(i)) for i in range(8)]
    for turn in range(2):
        for space in kept:
            expected = 4 * space["scale"]
            assert (tiled_sgemm(tensor(ONES), tensor(ONES), epilogue=space["epilogue"]).x == expected).all(), turn
            assert len(epilogues._guards) <= 3
    space = kept[-1]
    for i in range(3 * epilogues.MAX_GUARDS):
        space["scale"] = float(i)
        assert (tiled_sgemm(tensor(ONES), tensor(ONES), epilogue=space["epilogue"]).x == 4 * i).all()
    assert max(map(len, epilogues._guards.values())) == epilogues.MAX_GUARDS


def test_stand_in_applies_the_epilogue_of_the_kernel(gpu: HostGpu, torch):
    """Without that, none of the above would prove anything."""
    epilogue = space_of(SCALED, scale=2.0)["epilogue"]
    tiled_sgemm(tensor(ONES), tensor(ONES), epilogue=epilogue)
    epilogue.__globals__["scale"] = 3.0
    kernel = gpu.kernels[gpu.launches[-1].handle]
    function = getattr(kernel.epilogue, "py_func", kernel.epilogue)
    assert function(1.0, 0, 0) == 2.0
