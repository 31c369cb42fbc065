"""LLVM IR of the kernel that was compiled last, kept for another compute capability and for LTO-IR."""

from __future__ import annotations

import pytest

from numba_gemm.runtime.kept_library import KeptLibrary


def function_of(module):
    def function():
        pass

    function.__module__ = module
    return function


KERNEL, OTHER = function_of("numba_gemm.kernels.ladder.naive"), function_of("numba_gemm.kernels.ladder.thin")
USUAL = {"cc": (9, 0, "a"), "device": False, "opt": None, "launch_bounds": 256, "lto": False}


@pytest.fixture
def compiled():
    """A function that compiles, and the compilations that Numba is left with."""
    made = []

    def compile_function(pyfunc, sig, **options):
        made.append((pyfunc, sig, options))
        return object(), None

    keeping = KeptLibrary().keeping(compile_function)
    return (lambda pyfunc=KERNEL, sig=(1, 2), **changes: keeping(pyfunc, sig, **USUAL | changes)), made


def test_a_kernel_for_several_compute_capabilities_and_as_lto_ir(compiled):
    compile_one, made = compiled
    first = compile_one()
    assert compile_one(cc=(8, 0)) is compile_one(cc=(12, 0, "a")) is compile_one(lto=True) is first
    assert made == [(KERNEL, (1, 2), USUAL)]


@pytest.mark.parametrize(
    "other",
    [{"pyfunc": OTHER}, {"sig": (1, 3)}, {"launch_bounds": 128}, {"opt": False}, {"lineinfo": True}],
    ids=lambda other: next(iter(other)),
)
def test_whatever_else_differs_is_compiled(compiled, other):
    compile_one, made = compiled
    assert compile_one() is not compile_one(**other)
    compile_one()
    assert len(made) == 3, "one library is kept"


def test_ptx_is_not_made_of_a_library_for_lto_ir(compiled):
    compile_one, made = compiled
    first = compile_one(lto=True)
    assert compile_one(lto=True) is first
    assert compile_one() is not first
    assert [options["lto"] for *_, options in made] == [True, False]


@pytest.mark.parametrize("changes", [{"pyfunc": function_of("user")}, {"device": True}], ids=["user's", "device"])
def test_functions_of_others_and_device_functions_are_left_alone(compiled, changes):
    compile_one, made = compiled
    assert compile_one(**changes) is not compile_one(**changes)
    assert len(made) == 2


def test_what_did_not_compile_is_not_found(compiled):
    calls = []

    def fail(pyfunc, sig, **options):
        calls.append(pyfunc)
        if len(calls) == 2:
            raise TypeError
        return object(), None

    keeping = KeptLibrary().keeping(fail)
    first = keeping(KERNEL, (), **USUAL)
    with pytest.raises(TypeError):
        keeping(OTHER, (), **USUAL)
    assert keeping(KERNEL, (), **USUAL) is not first
    assert len(calls) == 3
