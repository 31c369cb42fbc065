"""Device functions with the same content, compiled once."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import pytest

from numba_gemm.runtime import kept_functions
from numba_gemm.runtime.kept_functions import KeptFunctions


class Compiled:
    """A stand-in for what Numba makes of a function."""

    fndesc, library = "fndesc", "library"
    entry_point = property(id)

    def __init__(self, of, inserted):
        self.of, self.inserted = of, inserted
        self.target_context = SimpleNamespace(insert_user_function=lambda entry, *_: inserted.append(entry))

    def _replace(self, type_annotation=None):
        return Compiled(self.of, self.inserted)


class Dispatcher:
    """A stand-in for Numba's, which counts compilations."""

    compilations, inserted = 0, []

    def __init__(self, function, **options):
        self.py_func, self.targetoptions, self.overloads = function, {"device": True, "link": []} | options, {}

    def compiled(self, kept, *args):
        def compile_function():
            if args not in self.overloads:
                Dispatcher.compilations += 1
                self.overloads[args] = Compiled(self, Dispatcher.inserted)
            return self.overloads[args]

        return kept.find(self, args, compile_function)


def shift(by, *, inner=None, default=0):
    def shifted(x, y=default):
        return x + by if inner is None else inner(x + by + y)

    return shifted


SCALE = 1


def scaled(x):
    return [one * SCALE for one in x]


def second_shift(by):
    def shifted(x):
        return x + by

    return shifted


@pytest.fixture
def kept():
    Dispatcher.compilations, Dispatcher.inserted = 0, []
    return KeptFunctions(lambda function: function.__module__ == __name__)


def outer(by, default=0):
    return Dispatcher(shift(1, inner=Dispatcher(shift(by, default=default))))


EQUAL = [
    (lambda: Dispatcher(shift(1)), lambda: Dispatcher(shift(1))),
    (lambda: Dispatcher(shift((1, [2.0]))), lambda: Dispatcher(shift((1, [2.0])))),
    (lambda: Dispatcher(shift(len)), lambda: Dispatcher(shift(len))),
    (lambda: outer(2), lambda: outer(2)),
]
DIFFERENT = [
    *[(lambda one=one: Dispatcher(shift(1)), lambda one=one: Dispatcher(shift(one))) for one in (2, 1.0, True, "1")],
    (lambda: Dispatcher(shift(0.0)), lambda: Dispatcher(shift(-0.0))),
    (lambda: Dispatcher(shift((1, 2))), lambda: Dispatcher(shift([1, 2]))),
    (lambda: Dispatcher(shift((1, 1))), lambda: Dispatcher(shift((1, True)))),
    (lambda: Dispatcher(shift(1)), lambda: Dispatcher(shift(1, default=1))),
    (lambda: Dispatcher(shift(1)), lambda: Dispatcher(second_shift(1))),
    (lambda: Dispatcher(shift(1)), lambda: Dispatcher(shift(1), fastmath=True)),
    (lambda: Dispatcher(shift(object())), lambda: Dispatcher(shift(object()))),
    (lambda: Dispatcher(shift({})), lambda: Dispatcher(shift({}))),  # can change in place
    (lambda: outer(2), lambda: outer(3)),
    (lambda: outer(2), lambda: outer(2, default=1)),
]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_functions_with_the_same_content_are_compiled_once(kept, first, second):
    first, second = first(), second()
    one, two = first.compiled(kept, "int32"), second.compiled(kept, "int32")
    assert Dispatcher.compilations == 1
    assert one.of is two.of is first
    # Each has its own, since Numba forgets one with its dispatcher.
    assert one is not two
    assert Dispatcher.inserted == [two.entry_point]
    assert second.compiled(kept, "int32") is two
    second.compiled(kept, "int64")
    assert Dispatcher.compilations == 2


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_functions_with_other_content_are_not(kept, first, second):
    first, second = first(), second()
    assert first.compiled(kept, "int32").of is first
    assert second.compiled(kept, "int32").of is second


def test_functions_of_others_are_not():
    kept = KeptFunctions(lambda function: False)
    first, second = Dispatcher(shift(1)), Dispatcher(shift(1))
    assert first.compiled(kept, "int32").of is first
    assert second.compiled(kept, "int32").of is second


def test_functions_that_find_another_global_are_not(kept, monkeypatch):
    first, second = Dispatcher(scaled), Dispatcher(scaled)
    assert first.compiled(kept, "int32").of is first
    monkeypatch.setitem(globals(), "SCALE", 2)
    assert second.compiled(kept, "int32").of is second


def test_functions_that_find_a_function_of_others_are_not(kept):
    """An epilogue, with all that its closure holds, would be kept."""
    others = FunctionType(scaled.__code__, {"__name__": "others"})
    assert others.__module__ == "others"
    for epilogue in (others, Dispatcher(others)):
        for dispatcher in (Dispatcher(shift(epilogue)), Dispatcher(shift(epilogue))):
            assert dispatcher.compiled(kept, "int32").of is dispatcher
    assert others not in kept._objects.values()


def test_a_function_whose_closure_is_not_filled_yet_is_not(kept):
    def later():
        dispatcher = Dispatcher(lambda x: x + value)
        found = dispatcher.compiled(kept, "int32")
        value = 1
        return dispatcher, found, value

    for dispatcher, found, _ in (later(), later()):
        assert found.of is dispatcher


def test_their_number_is_limited(kept, monkeypatch):
    monkeypatch.setattr(kept_functions, "MOST", 2)
    dispatchers = [Dispatcher(shift(by)) for by in (1, 2, 3, 3, 1)]
    found = [dispatchers.index(dispatcher.compiled(kept, "int32").of) for dispatcher in dispatchers]
    assert found == [0, 1, 2, 2, 4]


def test_functions_that_do_not_compile_are_not_collected(kept, monkeypatch):
    monkeypatch.setattr(kept_functions, "MOST", 2)

    def fail():
        raise NotImplementedError

    for _ in range(50):
        with pytest.raises(NotImplementedError):
            kept.find(Dispatcher(shift(object())), "int32", fail)
    assert len(kept._objects) < 25
