"""Stepping through one thread of a kernel, and a debugger in one thread."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from numba import cuda, float32
from support import threads
from support.debugger import scripted

from numba_gemm.inspect.debugging import debug
from numba_gemm.inspect.stepping import Step, step
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.tensor_core import TENSOR_STAGES
from numba_gemm.simulator import scheduler

pytestmark = pytest.mark.simulator


@pytest.fixture(autouse=True)
def _nothing_survives():
    before, hook, module = threads.count(), sys.breakpointhook, cuda
    yield
    assert not threads.more_than(before), "a thread is left"
    assert sys.breakpointhook is hook
    assert cuda is module is sys.modules["numba.cuda"]
    with pytest.raises(RuntimeError, match="no simulated thread"):
        scheduler.current_thread()


# ---------------------------------------------------------------------------------------------------------- kernels


def square(x):
    y = x * x
    return y


@cuda.jit(device=True)
def twice(x):
    return 2 * x


@cuda.jit
def small(source, target):
    tile = cuda.shared.array(4, float32)
    kept = cuda.local.array(2, float32)
    x = cuda.threadIdx.x
    tile[x] = source[x]
    cuda.syncthreads()
    for i in range(2):
        kept[i] = tile[(x + i) % 4]
    target[x] = square(kept[0]) + twice(kept[1])


SMALL = small.py_func.__code__.co_firstlineno + 1  # of its def


def at(steps, source):
    """Return the steps whose lines begin with this text."""
    return [s for s in steps if s.kind == "line" and s.source.startswith(source)]


def small_steps(**options):
    source, target = np.arange(1, 5, dtype=np.float32), np.zeros(4, np.float32)
    steps = list(step(small, 1, 4, source, target, **({"thread": 1} | options)))
    np.testing.assert_array_equal(target, [1 + 4, 4 + 6, 9 + 8, 16 + 2])
    return steps


def product(m=9, n=7, k=10):
    """Return operands of small integers, whose products are exact, and a C full of NaN."""
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-4, 5, shape).astype(np.float32) for shape in ((m, k), (k, n)))
    return a, b, np.full((m, n), np.nan, np.float32)


def stage_steps(name, a, b, c, **options):
    return step(name, None, None, np.float32(1), a, b, np.float32(0), c, **({"config": "test"} | options))


# ------------------------------------------------------------------------------------------------------------ lines


def test_the_lines_of_one_thread_in_order():
    steps = small_steps(into=[])
    lines = [(s.kind, s.line - SMALL) for s in steps]
    loop = [("line", 6), ("line", 7)] * 2 + [("line", 6)]
    before = [("line", i) for i in range(1, 6)]
    assert lines == [*before, ("barrier", 5), *loop, ("line", 8), ("end", 8)]
    assert {(s.file, s.function, s.depth, s.thread, s.block) for s in steps} == {
        (__file__, "small", 0, (1, 0, 0), (0, 0, 0))
    }
    assert [s.interval for s in steps] == [0] * 6 + [1] * 7
    assert steps[0].source == "tile = cuda.shared.array(4, float32)"


def test_functions_of_the_same_file_are_stepped_into():
    called = [(s.function, s.source) for s in small_steps() if s.depth]
    assert called == [("square", "y = x * x"), ("square", "return y"), ("twice", "return 2 * x")]


@pytest.mark.parametrize(
    ("into", "called"),
    [
        ([], set()),
        (square, {"square"}),
        ((twice,), {"twice"}),
        (__name__, {"square", "twice"}),
        (sys.modules[__name__], {"square", "twice"}),
        ("numba_gemm", set()),
        (__name__[:-1], set()),
    ],
    ids=["nothing", "function", "kernels", "name", "module", "elsewhere", "part"],
)
def test_into_chooses_what_is_stepped_into(into, called):
    assert {s.function for s in small_steps(into=into) if s.depth} == called


def test_into_is_functions_or_modules():
    with pytest.raises(TypeError, match="into is 7; expected functions"):
        small_steps(into=[7])


@pytest.mark.parametrize(
    ("name", "into"),
    [
        ("shared_tile", None),
        ("shared_tile", ["numba_gemm", "numba", "numpy", "threading"]),
        ("thread_tile_2d", "numba_gemm.device"),
        ("stream_k", None),
    ],
)
def test_stepping_changes_no_result(name, into):
    """The result is unchanged even if functions of the simulator itself are followed."""
    a, b, c = product(m=3, n=5, k=4)
    kinds = [s.kind for s in stage_steps(name, a, b, c, into=into)]
    assert kinds.index("end") == len(kinds) - 1
    assert "barrier" in kinds
    np.testing.assert_array_equal(c, a @ b)


def test_only_the_chosen_block_runs():
    a, b, c = product()
    steps = list(stage_steps("shared_tile", a, b, c, block_index=(0, 1), thread=(2, 0)))
    assert {s.block for s in steps} == {(0, 1, 0)}
    assert np.isnan(c[:8]).all()
    np.testing.assert_array_equal(c[8:], (a @ b)[8:])


def test_a_seed_gives_the_same_steps_of_one_thread():
    lines = [[(s.kind, s.line) for s in small_steps(seed=seed)] for seed in (None, 0, 1)]
    assert lines[0] == lines[1] == lines[2]


# ----------------------------------------------------------------------------------------------------------- locals


def test_naive_sums_one_term_after_the_other():
    a, b, c = product()
    steps = stage_steps("naive", a, b, c, thread=(2, 3))
    sums = [s.locals["acc"] for s in at(steps, "acc +=")]
    expected = np.cumsum([0, *(a[2, :9] * b[:9, 3])])
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("thread", [(0, 0), (5, 2)])
def test_shared_tile_sums_from_the_tiles(thread):
    a, b, c = product()
    tx, ty = thread
    steps = list(stage_steps("shared_tile", a, b, c, thread=thread))
    padded = np.zeros((2, 16), np.float32)
    padded[0, :10], padded[1, :10] = a[ty], b[:, tx]
    sums = [s.locals["acc"] for s in at(steps, "acc +=")]
    np.testing.assert_array_equal(sums, np.cumsum([0, *(padded[0] * padded[1])])[:-1])
    end = steps[-1]
    assert (end.kind, end.locals["acc"]) == ("end", (a @ b)[ty, tx])
    assert end.locals["c"][ty, tx] == end.locals["acc"]


def test_warp_tiled_accumulates_a_thread_tile():
    a, b, c = product(m=32, n=32, k=16)
    steps = list(stage_steps("warp_tiled", a, b, c, into="numba_gemm.kernels.ladder"))
    sums = [s.locals["acc"] for s in at(steps, "k0 += BK")]
    parts = [a[:, :8] @ b[:8]]  # the last tile is multiplied after the loop
    rows = [i // 4 * 16 + i % 4 for i in range(8)]
    np.testing.assert_array_equal(sums, [part[rows, :4] for part in parts])
    frags = [s.locals["a_frag"] for s in at(steps, "values = load4(b_tile")][::4]
    assert len(frags) == 4
    assert not np.isnan(frags).any()


@pytest.mark.parametrize("lane", [0, 13, 31])
def test_one_warp_loads_fragments_and_sums_in_the_tensor_core(lane):
    a, b, c = product(m=16, n=8, k=40)
    turns = [s.locals for s in at(stage_steps("one_warp", a, b, c, thread=lane), "k += K")]
    group, member = divmod(lane, 4)
    assert [int(turn["k"]) for turn in turns] == [0, 16, 32]
    for i, turn in enumerate(turns):
        halves = np.array([*turn["left"], *turn["right"]], np.uint32).view(np.uint16).astype(np.uint32) << 16
        words = halves.view(np.float32).reshape(6, 2)
        padded_a, padded_b = (np.pad(x, padding) for x, padding in ((a, ((0, 0), (0, 8))), (b, ((0, 8), (0, 0)))))
        first = 16 * i + 2 * member
        for word, (row, k) in enumerate(((group, 0), (group + 8, 0), (group, 8), (group + 8, 8))):
            np.testing.assert_array_equal(words[word], padded_a[row, first + k : first + k + 2])
        for word, k in enumerate((0, 8)):
            np.testing.assert_array_equal(words[4 + word], padded_b[first + k : first + k + 2, group])
        sums = (a[:, : 16 * i + 16] @ b[: 16 * i + 16])[[group, group + 8], 2 * member : 2 * member + 2]
        np.testing.assert_array_equal(turn["acc"], sums.flat)


def test_locals_stay_as_they_were():
    steps = small_steps()
    kept = [s.locals["kept"] for s in steps if s.depth == 0 and "kept" in s.locals]
    told = [np.isnan(array).sum() for array in kept]
    assert told == sorted(told, reverse=True)
    assert set(told) == {0, 1, 2}
    first = at(steps, "cuda.syncthreads")[0]
    assert list(first.locals) == ["source", "target", "tile", "kept", "x"]
    assert first.locals["tile"][1] == 2
    assert np.isnan(first.locals["tile"][2:]).all()
    np.testing.assert_array_equal(steps[-1].locals["tile"], [1, 2, 3, 4])


def test_what_has_not_changed_is_not_copied_again():
    steps = [s for s in small_steps() if s.depth == 0]
    assert len({id(s.locals["tile"]) for s in steps[-6:]}) == 1


@pytest.mark.parametrize("name", ["source", "tile", "kept"])
def test_arrays_are_read_only(name):
    last = small_steps()[-1]
    with pytest.raises(ValueError, match="read-only"):
        last.locals[name][0] = 0
    with pytest.raises(TypeError):
        last.locals["x"] = 0


def test_global_arrays_are_views():
    source, target = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    first, *_, last = step(small, 1, 4, source, target)
    assert first.locals["target"] is last.locals["target"]
    assert np.shares_memory(first.locals["target"], target)
    assert target.flags.writeable


def test_changed_names_what_differs_from_the_step_before():
    steps = small_steps()
    assert [s.changed for s in steps] == [
        ("source", "target"),
        ("tile",),
        ("kept",),
        ("x",),
        ("tile",),
        ("tile",),  # by the others, before the barrier
        (),
        ("i",),
        ("kept",),
        ("i",),
        ("kept",),
        (),
        ("x",),  # of square
        ("y",),
        ("x",),  # of twice
        (),
    ]
    for s in steps:
        assert set(s.changed) <= set(s.locals)


@cuda.jit
def odd_locals(rows):
    nothing = float32("nan")
    pair = (cuda.threadIdx.x, cuda.local.array(2, float32))
    pair[1][0] = 1
    names = ["a"]
    names.append("b")
    rows.append(nothing != nothing)


def test_tuples_lists_and_nan():
    rows = []
    steps = list(step(odd_locals, 1, 1, rows))
    assert rows == [True]
    assert [s.changed for s in steps] == [
        ("rows",),
        ("nothing",),
        ("pair",),
        ("pair",),
        ("names",),
        ("names",),
        ("rows",),
    ]
    assert [np.isnan(s.locals["pair"][1]).sum() for s in steps if "pair" in s.locals][:2] == [2, 1]
    assert "names = ['a']" in str(steps[4])


@cuda.jit
def comprehends(x):
    squares = [i * i for i in range(3)]
    x[0] = sum(square(v) for v in squares)


def test_comprehensions_are_lines_of_their_function():
    """This holds in every release of Python, with or without a frame for comprehensions."""
    x = np.zeros(1)
    steps = list(step(comprehends, 1, 1, x))
    assert x[0] == 17
    assert {s.function for s in steps} == {"comprehends", "square"}
    assert steps[-1].locals["squares"] == [0, 1, 4]


# --------------------------------------------------------------------------------------------------------- barriers


def test_shared_arrays_at_a_barrier_are_the_operands_tiles():
    a, b, c = product()
    barriers = [s for s in stage_steps("shared_tile", a, b, c, thread=(3, 2)) if s.kind == "barrier"]
    assert [s.barrier for s in barriers] == [s.interval for s in barriers] == [0, 1, 2, 3]
    assert [s.source.split("#")[0].strip() for s in barriers] == ["cuda.syncthreads()"] * 4
    padded_a, padded_b = np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float32)
    padded_a[:9, :10], padded_b[:10, :7] = a, b
    for s in barriers:
        assert list(s.shared) == ["a_tile", "b_tile"]
        k0 = s.barrier // 2 * 8
        np.testing.assert_array_equal(s.shared["a_tile"], padded_a[:8, k0 : k0 + 8])
        np.testing.assert_array_equal(s.shared["b_tile"], padded_b[k0 : k0 + 8, :8])


def test_views_of_dynamic_shared_memory_have_their_names():
    a, b, c = product(m=32, n=32, k=8)
    first = next(s for s in stage_steps("warp_tiled", a, b, c) if s.kind == "barrier")
    assert list(first.shared) == ["tiles", "a_tile", "b_tile"]
    np.testing.assert_array_equal(first.shared["a_tile"][:8, :32], a.T)
    np.testing.assert_array_equal(first.shared["b_tile"][:8], b)


def put(line, x):
    line[x] = x
    cuda.syncthreads()


@cuda.jit
def barrier_below():
    tile = cuda.shared.array(2, float32)
    put(tile, cuda.threadIdx.x)


@pytest.mark.parametrize(("into", "names"), [(None, ["line", "tile"]), ([], ["tile"])])
def test_a_barrier_in_a_function_knows_both_names(into, names):
    found = [s for s in step(barrier_below, 1, 2, into=into) if s.kind == "barrier"]
    assert [sorted(s.shared) for s in found] == [names]
    assert found[0].function == ("barrier_below" if into == [] else "put")
    np.testing.assert_array_equal(found[0].shared["tile"], [0, 1])


# ------------------------------------------------------------------------------------------------------------- text


def test_a_step_is_told_in_a_few_lines():
    told = "\n".join(map(str, small_steps()))
    assert told.startswith(
        "    source = 4 float32 in global memory, target = 4 float32 in global memory\ntest_stepping"
    )
    for expected in [
        f"    tile = [1.0, nan, nan, nan]\ntest_stepping.py:{SMALL + 2}  kept = cuda.local.array(2, float32)\n",
        f"    x = 1\ntest_stepping.py:{SMALL + 4}  tile[x] = source[x]\n    tile[1] = 2.0\n",
        f"    tile[2] = 3.0, tile[3] = 4.0\ntest_stepping.py:{SMALL + 5}  -- barrier 0, all threads of "
        "block (0, 0, 0) -- shared: tile [1.0, 2.0, 3.0, 4.0]\n",
        f"    i = 1\ntest_stepping.py:{SMALL + 7}  kept[i] = tile[(x + i) % 4]\n    kept[1] = 3.0\n",
        "        y = 4.0\n",
        f"test_stepping.py:{SMALL + 8}  -- end of block (0, 0, 0) --",
    ]:
        assert expected in told
    a, b, c = product()
    assert "    a_tile: 63 of 64 elements" in "\n".join(map(str, stage_steps("shared_tile", a, b, c)))


def test_a_kernel_without_source_has_lines_without_text():
    namespace = {"cuda": cuda}
    exec("def kernel(x):\n    y = x[0]\n    x[0] = y + 1\n", namespace)
    x = np.zeros(1)
    steps = list(step(namespace["kernel"], 1, 1, x))
    assert [(s.line, s.source) for s in steps] == [(2, ""), (3, ""), (3, "")]
    assert x[0] == 1


# ---------------------------------------------------------------------------------------------------- ends and errors


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("end", ["close", "with", "forgotten", "raised"])
def test_an_early_end_leaves_nothing(taken, end):
    steps = step(small, 1, 4, np.zeros(4, np.float32), np.zeros(4, np.float32), thread=2)
    if end == "with":
        with steps as same:
            assert same is steps
            assert len(list(itertools.islice(steps, taken))) == taken
    else:
        assert all(isinstance(s, Step) for s in itertools.islice(steps, taken))
        if end == "raised":
            with contextlib.suppress(KeyError), steps:
                raise KeyError
        elif end == "close":
            steps.close()
            steps.close()
    if end == "forgotten":
        del steps
        gc.collect()
    else:
        assert list(steps) == []


def test_a_loop_that_is_left_ends_the_launch():
    before = threads.count()
    for s in step(small, 1, 4, np.zeros(4, np.float32), np.zeros(4, np.float32)):
        if s.kind == "barrier":
            break
    assert not threads.more_than(before)
    assert len(small_steps()) == 16


def test_the_kernels_module_has_its_cuda_between_steps():
    with step(small, 1, 4, np.zeros(4, np.float32), np.zeros(4, np.float32)) as steps:
        for _ in steps:
            assert cuda is sys.modules["numba.cuda"]
            one = np.zeros(1)
            comprehends[1, 1](one)  # by Numba's own simulator
            assert one[0] == 17


def test_two_at_a_time_are_refused():
    arguments = np.zeros(4, np.float32), np.zeros(4, np.float32)
    with step(small, 1, 4, *arguments) as first:
        next(first)
        with pytest.raises(RuntimeError, match="until its iterator ends or is closed"):
            next(step(small, 1, 4, *arguments))
        with pytest.raises(RuntimeError, match="until its iterator ends or is closed"):
            scheduler.run(small, 1, 4, arguments)
        next(first)  # which is unchanged
    assert len(small_steps()) == len(small_steps()) == 16


def test_steps_may_be_asked_for_by_several_threads():
    steps = step(small, 1, 4, np.zeros(4, np.float32), np.zeros(4, np.float32))
    found = [next(steps)]
    host = threading.Thread(target=lambda: found.extend(itertools.islice(steps, 7)))
    host.start()
    host.join()
    found += steps
    assert len(found) == 16


@cuda.jit
def failing(x, who):
    i = cuda.threadIdx.x
    cuda.syncthreads()
    if i == who:
        x[i + 5] = 1
    cuda.syncthreads()


@pytest.mark.parametrize("who", [1, 2])
def test_an_exception_comes_out(who):
    steps = step(failing, 1, 4, np.zeros(4), who, thread=1)
    with pytest.raises(IndexError, match=rf"thread \({who}, 0, 0\) of block \(0, 0, 0\).*out of bounds") as caught:
        list(steps)
    assert any(entry.name == "failing" for entry in caught.traceback)
    assert list(steps) == []


@cuda.jit
def cleaning(log):
    try:
        cuda.syncthreads()
        log.append("more")
        cuda.syncthreads()
    finally:
        log.append("end")
        log.append("of it")


@pytest.mark.parametrize("taken", range(1, 9))
@pytest.mark.parametrize("thread", [0, 1])
def test_what_a_kernel_does_at_its_end_is_not_stepped_through_any_more(taken, thread):
    with step(cleaning, 1, 2, [], thread=thread) as steps:
        assert len(list(itertools.islice(steps, taken))) == taken


@cuda.jit
def divergent():
    if cuda.threadIdx.x < 2:
        cuda.syncthreads()


@pytest.mark.parametrize("thread", [0, 3])
def test_a_divergent_barrier_comes_out(thread):
    seen = []
    with pytest.raises(scheduler.DivergentBarrier, match="exited have threads"):
        seen.extend(step(divergent, 1, 4, thread=thread))
    assert {s.kind for s in seen} <= {"line"}


ENDS = """
import signal, sys, threading
from numba import cuda
from support import threads
from numba_gemm.inspect.stepping import step

begun = threading.Event()

@cuda.jit
def endless():
    while cuda.threadIdx.x == 1:
        begun.set()
    cuda.syncthreads()

def interrupt():
    begun.wait()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

thread = threading.Thread(target=interrupt)
if sys.argv[1] == "interrupted":
    thread.start()
steps = step(endless, 1, 4, thread=0)
try:
    for s in steps:
        print(s.kind, s.line)
        if sys.argv[1] == "left" and s.source == "cuda.syncthreads()":
            break
except KeyboardInterrupt:
    thread.join()
    print(threads.more_than(0))
"""


@pytest.mark.parametrize(("how", "last"), [("interrupted", "False"), ("left", "line 13")])
def test_python_ends_whatever_is_under_way(how, last, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS, encoding="utf-8")
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == last


def test_a_tracer_that_was_there_before_is_there_afterwards():
    """An example is a coverage tool, which traces every operating-system thread."""
    seen = set()

    def tracer(frame, event, arg):
        if frame.f_code is small.py_func.__code__ and event == "call":
            seen.add(scheduler.current_thread().thread_index[0])

    threading.settrace(tracer)
    try:
        small_steps(thread=1)
    finally:
        threading.settrace(None)
    assert seen == {0, 2, 3}


A, B, C = product()
REFUSED = [
    ({"block_index": (1, 0)}, ValueError, r"block_index \(1, 0, 0\) is outside of the grid, .* \(1, 1, 1\)"),
    ({"thread": 4}, ValueError, r"thread \(4, 0, 0\) is outside of the block, whose extents are \(4, 1, 1\)"),
    ({"thread": (0, -1)}, ValueError, r"thread \(0, -1, 0\) is outside"),
    ({"thread": 1.5}, TypeError, "thread is 1.5; expected one to three integers"),
    ({"thread": (0, 0, 0, 0)}, TypeError, "expected one to three integers"),
    ({"grid": 0}, ValueError, "outside of the grid"),
    ({"block": 2048}, ValueError, "at most 1024 threads"),
    ({"kernel": 7}, TypeError, "a kernel made by"),
    ({"kernel": "fastest"}, ValueError, "stage is 'fastest'; expected one of naive"),
    ({"args": ()}, TypeError, "does not take these arguments"),
    (
        {"kernel": "wide_tiles"},
        NotImplementedError,
        "wide_tiles multiplies on tensor cores by instructions that the simulator lacks",
    ),
    ({"kernel": TENSOR_STAGES["warp_mma"]}, NotImplementedError, "warp_mma multiplies on tensor cores"),
    (
        {"kernel": STAGES["naive"], "args": (1, A, B, 0, C), "config": "huge"},
        ValueError,
        "config is 'huge'; expected one of 32x32x1-1x1",
    ),
]


@pytest.mark.parametrize("user", [step, debug])
@pytest.mark.parametrize(("wrong", "kind", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_stepped_through_is_refused(user, wrong, kind, words):
    given = {"kernel": small, "grid": 1, "block": 4, "args": (np.zeros(4, np.float32),) * 2} | wrong
    kernel, grid, block, args = (given.pop(name) for name in ("kernel", "grid", "block", "args"))
    with pytest.raises(kind, match=words):
        user(kernel, grid, block, *args, **given)


# ------------------------------------------------------------------------------------------------------------- debug


@cuda.jit
def with_breakpoint(x, y):
    i = cuda.grid(1)
    breakpoint()
    x[i] = i
    cuda.syncthreads()
    y[i] = x[i ^ 1]


@pytest.mark.parametrize("thread", [0, 3])
def test_a_breakpoint_stops_in_one_thread(monkeypatch, thread):
    frames = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: frames.append((sys._getframe(1).f_code, who())))

    def who():
        return scheduler.current_thread().block_index[0], scheduler.current_thread().thread_index[0]

    y = np.zeros(8)
    debug(with_breakpoint, 2, 4, np.zeros(8), y, block_index=1, thread=thread)
    assert frames == [(with_breakpoint.py_func.__code__, (1, thread))]
    np.testing.assert_array_equal(y, np.arange(8) ^ 1)


def test_the_debugger_is_in_the_kernel(monkeypatch):
    hook, said = scripted("p ('i', i)", *["n", "p ('written', [float(v) for v in x])"] * 4, "n", "n")
    monkeypatch.setattr(sys, "breakpointhook", hook)
    y = np.zeros(4)
    debug(with_breakpoint, 1, 4, np.zeros(4), y, thread=2)
    text = said.getvalue()
    assert "('i', 2)" in text
    assert "('written', [0.0, 1.0, 2.0, 3.0])" in text  # past the barrier: by the others, too
    assert {line.split("(")[0] for line in text.splitlines() if line.startswith("> ")} == {f"> {__file__}"}
    assert text.count("--Return--") <= 1
    np.testing.assert_array_equal(y, [1, 0, 3, 2])


@cuda.jit
def last_line_breaks(x):
    if cuda.threadIdx.x == 1:
        x[0] += 1
    breakpoint()


def test_a_debugger_leads_no_further_than_the_kernel(monkeypatch):
    hook, said = scripted(*["s"] * 20)
    monkeypatch.setattr(sys, "breakpointhook", hook)
    x = np.zeros(1)
    debug(last_line_breaks, 2, 4, x, thread=1)
    assert x[0] == 2
    places = {line.split("(")[0] for line in said.getvalue().splitlines() if line.startswith("> ")}
    assert places == {f"> {__file__}"}


def test_quitting_the_debugger_ends_the_launch(monkeypatch):
    hook, _ = scripted("q")
    monkeypatch.setattr(sys, "breakpointhook", hook)
    x = np.zeros(8)
    assert debug(with_breakpoint, 2, 4, x, x, thread=1) is None
    np.testing.assert_array_equal(x, 0)
    assert len(small_steps()) == 16


@pytest.mark.parametrize("off", [False, True])
def test_pythonbreakpoint_is_honoured(monkeypatch, off):
    noted = []
    module = types.ModuleType("test_stepping_noted")
    module.hook = lambda: noted.append(scheduler.current_thread().thread_index)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("PYTHONBREAKPOINT", "0" if off else f"{module.__name__}.hook")
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    debug(with_breakpoint, 1, 4, np.zeros(4), np.zeros(4), thread=3)
    assert noted == ([] if off else [(3, 0, 0)])


def test_other_threads_of_the_host_keep_their_breakpoints(monkeypatch):
    stopped = []

    def hook():
        stopped.append(threading.current_thread().name)

    @cuda.jit
    def kernel():
        breakpoint()
        if cuda.threadIdx.x == 1:
            host = threading.Thread(target=breakpoint, name="host")
            host.start()
            host.join()

    monkeypatch.setattr(sys, "breakpointhook", hook)
    debug(kernel, 1, 2, thread=0)
    assert len(stopped) == 2
    assert stopped[1] == "host"


def test_what_the_kernel_raises_comes_out_of_debug(monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", lambda: None)
    with pytest.raises(IndexError, match="thread \\(2, 0, 0\\)"):
        debug(failing, 1, 4, np.zeros(4), 2)


def test_a_debugger_stops_at_a_line(monkeypatch):
    hook, said = scripted("p ('i', i, 'x', float(x[i]))", "c")
    monkeypatch.setattr(sys, "breakpointhook", hook)
    x = np.zeros(4)
    debug(failing, 1, 4, x, 9, thread=2, line=failing.py_func.__code__.co_firstlineno + 4)
    text = said.getvalue()
    assert "-> if i == who:" in text
    assert "('i', 2, 'x', 0.0)" in text
    assert text.count("\n> ") + text.startswith("> ") == 1


def test_a_hook_that_is_no_debugger_is_called_at_a_line_once(monkeypatch):
    stopped = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(scheduler.current_thread().thread_index[0]))
    debug(small, 1, 4, np.zeros(4, np.float32), np.zeros(4, np.float32), thread=3, line=SMALL + 7)
    assert stopped == [3]


def test_a_line_of_a_function_that_the_kernel_calls(monkeypatch):
    hook, said = scripted("p ('x', float(x))", "c")
    monkeypatch.setattr(sys, "breakpointhook", hook)
    source = np.arange(4, dtype=np.float32)
    debug(small, 1, 4, source, np.zeros(4, np.float32), thread=3, line=square.__code__.co_firstlineno + 1)
    assert "('x', 3.0)" in said.getvalue()


def test_a_line_that_is_not_reached_is_told():
    with pytest.warns(RuntimeWarning, match=r"thread \(1, 0, 0\) of block \(0, 0, 0\) has not come to line 1 of "):
        debug(small, 1, 4, np.zeros(4, np.float32), np.zeros(4, np.float32), thread=1, line=1)
