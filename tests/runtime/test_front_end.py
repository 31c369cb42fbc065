"""Compilation with the changes to Numba's front end: the same machine code, fewer steps, and Numba as it was."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import compile_stages
from support.covering import others_exhaustive

from numba_gemm.runtime import collector

SCRIPT = Path(compile_stages.__file__).with_name("compile_twice.py")
CALLS = 192_000  # of Python functions that a compilation of `coalesced` may take

ERRORS = """
import contextlib
from numba import cuda, float32
from numba_gemm.runtime import front_end

def of_attribute(x):
    return x.nothing

def of_name(x):
    return x + nothing

def of_call(x):
    return (x, x) @ x

def of_lowering(x):
    return [x]

def error(function, context):
    with context:
        try:
            cuda.compile_ptx(function, (float32,), device=True, cc=(9, 0, "a"))
        except Exception as found:
            return type(found), str(found).split()

for function in (of_attribute, of_name, of_call, of_lowering):
    expected = error(function, contextlib.nullcontext())
    assert expected is not None
    assert error(function, front_end.faster()) == expected, function
"""

MISSING = """
from numba.cuda.core.postproc import PostProcessor
from numba_gemm.runtime import front_end

del PostProcessor._insert_var_dels
run = PostProcessor.run
with front_end.faster():
    assert PostProcessor.run is run, "a change without the names that it needs"
    assert front_end._unneeded_passes()[0][0].define_pipelines.__module__ == front_end.__name__
"""

LIBRARIES = """
from pathlib import Path
from numba_gemm.kernels import STAGES
from numba_gemm.runtime.compilation import compile_kernel

stage = STAGES["naive"]
compile_kernel(stage.kernel_of(stage.configs[0], True), (9, 0))
loaded = Path("/proc/self/maps").read_text()
assert "libnvvm" in loaded
assert "libnvrtc" not in loaded
"""

COLLECTOR = """
import gc, weakref
from numba_gemm.runtime import collector, front_end

class Node:
    pass

made = []

def compiled():
    with front_end.faster():
        assert not gc.isenabled()
        node = Node()
        node.node = node
        made.append([[] for _ in range(10_000)])
        return weakref.ref(node)

gc.disable()
compiled()
assert not gc.isenabled(), "the program had switched it off"
gc.enable()
gc.collect()  # Python 3.12 would do it later
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
left = [compiled() for _ in range(collector.UNCOLLECTED)]
assert not collections
gc.collect(1)
assert all(node() for node in left), "they are not in the oldest generation"
late = compiled()
gc.collect(1)
assert not late(), "that of later compilations is collected soon"
gc.collect()
assert not any(node() for node in left)
collector._compilations = 0
own = Node()
gc.freeze()
compiled()
assert not any(one is own for one in gc.get_objects()), "the program's own objects were thawed"
"""


def run(*arguments):
    command, environment = [sys.executable, *arguments], compile_stages.compiler_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    others_exhaustive(
        ("naive", "coalesced", "decompose", "whole", "thin", "epilogue", "persistent", "unaligned", "four columns"),
        ("naive", "coalesced", "decompose", "whole"),
    ),
)
def test_machine_code_is_the_same_in_fewer_steps(name):
    # Numba walks sets of objects in the order of their addresses. Some orders take 2 % more calls, and rarely 6 %.
    for _ in range(3):
        same, sections, calls, calls_without = json.loads(run(str(SCRIPT), name))
        assert same
        assert sections >= 2
        if calls < CALLS:
            break
    assert calls < CALLS
    assert calls < 0.75 * calls_without or (name != "coalesced" and not calls_without)


def test_errors_are_those_of_numba():
    run("-c", ERRORS)


def test_changes_whose_names_are_missing_are_left_out():
    run("-c", MISSING)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the libraries of a process")
def test_no_library_is_loaded_that_is_not_needed():
    run("-c", LIBRARIES)


def test_the_collector_passes_over_the_first_compilations():
    run("-c", COLLECTOR)


def test_the_collector_is_off_until_the_last_compilation_has_ended():
    assert gc.isenabled()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:  # of two threads, which overlap
        first.enter_context(collector.without_collections())
        second.enter_context(collector.without_collections())
        first.close()
        assert not gc.isenabled()
    assert gc.isenabled()
