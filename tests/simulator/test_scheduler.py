"""The scheduler of simulated threads: order, memory, barriers, failures."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings

import numba
import numba.cuda as renamed_cuda
import numpy as np
import pytest
from numba import cuda, float32, float64, int32, types
from support import threads

from numba_gemm.device.units import MAX_GRID_X, MAX_GRID_Y, STATIC_SHARED_BYTES
from numba_gemm.simulator import launch, scheduler
from numba_gemm.simulator.switch import device_function

pytestmark = pytest.mark.simulator

SEEDS = [None, 0, 1, 2, 3]


@pytest.fixture(autouse=True)
def _no_thread_survives():
    before = threads.count()
    yield
    assert not threads.more_than(before)
    with pytest.raises(RuntimeError, match="no simulated thread"):
        scheduler.current_thread()


# ---------------------------------------------------------------------------------------------------------- kernels


@device_function
def plain_helper():
    return cuda.threadIdx.x


@cuda.jit(device=True)
def jitted_helper():
    return plain_helper() + 0


def closure_helper():
    from numba import cuda as hidden  # a closure variable, not a global

    def helper():
        return hidden.threadIdx.x

    return helper


in_closure = closure_helper()


@cuda.jit(device=True)
def renamed_helper():
    return renamed_cuda.threadIdx.x


HELPERS = {"plain": plain_helper, "jitted": jitted_helper, "closure": in_closure, "renamed": renamed_helper}


def reversing_kernel(helper):
    @cuda.jit
    def kernel(source, target):
        tile = cuda.shared.array(64, float32)
        x = helper()
        i = cuda.grid(1)
        tile[x] = source[i]
        cuda.syncthreads()
        target[i] = tile[cuda.blockDim.x - 1 - x]

    return kernel


@cuda.jit
def racing(source, target):
    tile = cuda.shared.array(64, float32)
    x = cuda.threadIdx.x
    tile[x] = source[x]
    target[x] = tile[cuda.blockDim.x - 1 - x]  # the barrier before this line is missing


@cuda.jit
def logging(log, intervals):
    for interval in range(intervals):
        log.append((cuda.blockIdx.x, interval, cuda.threadIdx.x))
        cuda.syncthreads()


# ------------------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("helper", HELPERS)
def test_right_kernels_are_right_in_any_order(helper, seed):
    source = np.arange(128, dtype=np.float32)
    target = np.full(128, np.nan, np.float32)
    scheduler.run(reversing_kernel(HELPERS[helper]), 2, 64, (source, target), seed=seed)
    np.testing.assert_array_equal(target, source.reshape(2, 64)[:, ::-1].ravel())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_reads_nan(seed):
    target = np.zeros(64, np.float32)
    scheduler.run(racing, 1, 64, (np.ones(64, np.float32), target), seed=seed)
    assert np.isnan(target).any()


def test_a_missing_barrier_gives_different_results_for_different_seeds():
    results = set()
    for seed in SEEDS:
        target = np.zeros(64, np.float32)
        scheduler.run(racing, 1, 64, (np.ones(64, np.float32), target), seed=seed)
        results.add(target.tobytes())
    assert len(results) == len(SEEDS)


def _log(seed, blocks=2, intervals=3, threads=40):
    log = []
    scheduler.run(logging, blocks, threads, (log, intervals), seed=seed)
    return log


def test_without_a_seed_threads_run_by_index_from_barrier_to_barrier():
    assert _log(None) == [(block, interval, x) for block in range(2) for interval in range(3) for x in range(40)]


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_a_seed_permutes_every_interval_of_every_block(seed):
    log = _log(seed)
    assert log == _log(seed)
    assert log != _log(seed + 100)
    parts = [log[start : start + 40] for start in range(0, len(log), 40)]
    assert [{entry[:2] for entry in part} for part in parts] == [{(b, i)} for b in range(2) for i in range(3)]
    orders = {tuple(x for _, _, x in part) for part in parts}
    assert len(orders) == 6
    assert all(sorted(order) == list(range(40)) for order in orders)


def test_a_block_runs_alike_whichever_blocks_run_before_it():
    whole, part = [], []
    scheduler.run(logging, (3, 1), 8, (whole, 2), seed=5)
    scheduler.run(logging, (3, 1), 8, (part, 2), seed=5, blocks=[(2, 0, 0)])
    assert part == whole[-16:]


@cuda.jit
def describe(rows):
    rows.append(
        (
            *(cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z),
            *(cuda.threadIdx.x, cuda.threadIdx.y, cuda.threadIdx.z),
            cuda.grid(3),
            cuda.gridsize(3),
            cuda.laneid,
            cuda.warpsize,
            scheduler.current_thread().thread_index,
            scheduler.current_thread().warp,
        )
    )


def test_indices_follow_cuda():
    rows = []
    scheduler.run(describe, (2, 3), (8, 3, 2), (rows,))
    assert len(rows) == len(set(rows)) == 2 * 3 * 48
    assert rows[:2] == [
        (0, 0, 0, 0, 0, 0, (0, 0, 0), (16, 9, 2), 0, 32, (0, 0, 0), 0),
        (0, 0, 0, 1, 0, 0, (1, 0, 0), (16, 9, 2), 1, 32, (1, 0, 0), 0),
    ]
    assert rows[-1] == (1, 2, 0, 7, 2, 1, (15, 8, 1), (16, 9, 2), 15, 32, (7, 2, 1), 1)


# ----------------------------------------------------------------------------------------------------------- memory


def _allocating_kernel(dtype, alignment=None):
    def shared(arrays):
        arrays.append(cuda.shared.array((3, 5), dtype, alignment=alignment))

    def local(arrays):
        arrays.append(cuda.local.array((3, 5), dtype, alignment=alignment))

    def dynamic(arrays):
        arrays.append(cuda.shared.array(0, dtype, alignment=alignment))

    return {"shared": shared, "local": local, "dynamic": dynamic}


SPACES = ["shared", "local", "dynamic"]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("dtype", [float32, float64, np.float16, np.complex64])
def test_fresh_memory_is_nan(space, dtype):
    arrays = []
    scheduler.run(_allocating_kernel(dtype)[space], 1, 1, (arrays,), dynamic_shared=120)
    assert arrays[0].size >= 15
    assert np.isnan(arrays[0]).all()


@pytest.mark.parametrize("space", SPACES)
def test_fresh_integers_are_no_index(space):
    arrays = []
    scheduler.run(_allocating_kernel(int32)[space], 1, 1, (arrays,), dynamic_shared=60)
    assert (arrays[0] > 2**30).all()


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("alignment", [None, 16, 64, 128, 1024])
def test_alignment_is_real(space, alignment):
    arrays = []
    kernel = _allocating_kernel(float32, alignment)[space]
    if space == "dynamic" and alignment == 1024:
        with pytest.raises(ValueError, match="aligned to 128"):
            scheduler.run(kernel, 1, 9, (arrays,), dynamic_shared=60)
        return
    scheduler.run(kernel, 3, 3, (arrays,), dynamic_shared=60)
    assert {array.ctypes.data % (alignment or 16) for array in arrays} == {0}


@pytest.mark.parametrize("alignment", [0, -16, 24])
def test_an_alignment_is_a_power_of_two(alignment):
    with pytest.raises(ValueError, match="power of two"):
        scheduler.run(_allocating_kernel(float32, alignment)["shared"], 1, 1, ([],))


@pytest.mark.parametrize("size", [0, 3, 4, 61, 4096])
def test_dynamic_memory_is_as_large_as_asked(size):
    arrays = []
    scheduler.run(_allocating_kernel(float32)["dynamic"], 1, 1, (arrays,), dynamic_shared=size)
    assert arrays[0].size == size // 4


@device_function
def allocate():
    return cuda.shared.array(4, float32)


@cuda.jit(device=True)
def allocate_jitted():
    return cuda.shared.array(4, float32)


@cuda.jit
def many_arrays(found):
    # Two on one line; two calls of one helper, and one in a loop, which are one array, as in PTX: each function has its
    # own, however often it is called or inlined.
    a, b = cuda.shared.array(4, float32), cuda.shared.array(4, float32)
    c, d = allocate(), allocate()
    e, f = allocate_jitted(), allocate_jitted()
    loop = [cuda.shared.array(4, float32) for _ in range(2)]
    found.append((a, b, c, d, e, f, *loop))
    cuda.syncthreads()


def test_a_shared_array_belongs_to_its_place_in_the_source():
    found = []
    scheduler.run(many_arrays, 2, 3, (found,))
    addresses = [[array.ctypes.data for array in arrays] for arrays in found]
    assert addresses[0] == addresses[1] == addresses[2]
    assert addresses[3] == addresses[4] == addresses[5]
    a, b, c, d, e, f, *loop = addresses[0]
    assert c == d
    assert e == f
    assert loop[0] == loop[1]
    assert len({a, b, c, e, loop[0]}) == 5
    assert not set(addresses[0]) & set(addresses[3])


def allocator(extent):
    return device_function(lambda: cuda.shared.array(extent, float32))


first, *others = (allocator(4) for _ in range(3))


@cuda.jit
def arrays_of_one_factory(found):
    found.append((first(), others[0](), others[1]()))
    cuda.syncthreads()


def test_functions_of_one_factory_have_arrays_of_their_own():
    """Their code is the same object, whether the kernel finds them by name or in a list."""
    found = []
    scheduler.run(arrays_of_one_factory, 1, 2, (found,))
    one, other = ([array.ctypes.data for array in arrays] for arrays in found)
    assert one == other
    assert len(set(one)) == 3


@pytest.mark.parametrize("name", ["int8", "int64", "uint8", "uint32", "float32", "float64"])
@pytest.mark.parametrize("value", [3, True, 2.75, np.int16(7), np.float32(0.1), np.bool_(True), np.ones(2)])
def test_casts_are_numpys(name, value):
    kind, expected = getattr(types, name), getattr(np, name)(value)
    assert type(kind(value)) is type(expected)
    np.testing.assert_array_equal(kind(value), expected)
    assert kind(types.int32).return_type is kind, "a signature"
    if name.startswith("uint"):
        with pytest.raises(OverflowError):
            kind(-1)


@cuda.jit
def dynamic_twice(found):
    found.append((cuda.shared.array(0, float32), cuda.shared.array(0, int32)))


def test_dynamic_arrays_of_a_block_are_one_memory():
    found = []
    scheduler.run(dynamic_twice, 2, 2, (found,), dynamic_shared=64)
    addresses = [{array.ctypes.data for array in arrays} for arrays in found]
    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[3]
    assert [len(a) for a in addresses] == [1] * 4
    assert addresses[0] != addresses[2]


@cuda.jit
def leave_a_mark(seen):
    shared, dynamic = cuda.shared.array(1, float32), cuda.shared.array(0, float32)
    seen.append((float(shared[0]), float(dynamic[0])))
    shared[0] = dynamic[0] = 1


def test_blocks_share_nothing():
    seen = []
    scheduler.run(leave_a_mark, 3, 1, (seen,), dynamic_shared=4)
    assert np.isnan(seen).all()


@cuda.jit
def scratch(seen):
    local = cuda.local.array(1, float32)
    state = scheduler.current_thread().state
    state["count"] = state.get("count", 0) + 1
    cuda.syncthreads()
    local[0] = cuda.threadIdx.x
    state["count"] += cuda.threadIdx.x
    cuda.syncthreads()
    seen.append((float(local[0]), state["count"]))


def test_local_memory_and_state_belong_to_a_thread():
    seen = []
    scheduler.run(scratch, 2, 4, (seen,))
    assert seen == [(x, 1 + x) for x in range(4)] * 2


# --------------------------------------------------------------------------------------------------------- barriers


def leaves_early(x):
    if x >= 3:
        return
    cuda.syncthreads()


def last_one_leaves(x):
    if x != 7:
        cuda.syncthreads()


def two_barriers(x):
    if x < 5:
        cuda.syncthreads()
    else:
        cuda.syncthreads()


def two_barriers_on_a_line(x):
    _ = (x < 5 and cuda.syncthreads()) or (x >= 5 and cuda.syncthreads())


@device_function
def barrier():
    cuda.syncthreads()


def one_helper_two_places(x):
    if x < 5:
        barrier()
    else:
        barrier()


def one_more_iteration(x):
    for _ in range(2 if x < 5 else 3):
        cuda.syncthreads()


def warp_or_block(x):
    if x < 5:
        cuda.syncthreads()
    else:
        cuda.syncwarp()


# Kernel, number of threads that wait at each place, number that have exited.
DIVERGENT = [
    (leaves_early, [3], 5),
    (last_one_leaves, [7], 1),
    (two_barriers, [5, 3], 0),
    (two_barriers_on_a_line, [8], 0),  # one line, so one place in the report
    (one_helper_two_places, [5, 3], 0),
    (one_more_iteration, [3], 5),
    (warp_or_block, [5, 3], 0),
]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("body", "waiting", "exited"), DIVERGENT, ids=lambda v: getattr(v, "__name__", None))
def test_divergent_barriers_are_reported(body, waiting, exited, seed):
    def kernel():
        body(cuda.threadIdx.x)

    with pytest.raises(scheduler.DivergentBarrier) as caught:
        scheduler.run(kernel, 2, 8, (), seed=seed)
    error = caught.value
    assert error.block_index == (0, 0, 0)
    assert [len(threads) for threads in sorted(error.waiting.values())] == waiting
    assert len(error.exited) == exited
    assert len({*error.exited, *(thread for threads in error.waiting.values() for thread in threads)}) == 8


def test_a_divergent_barrier_names_lines_and_threads():
    def kernel():
        x = cuda.threadIdx.x
        if x == 2:
            cuda.syncthreads()
        if x == 1:
            cuda.syncthreads()

    first = kernel.__code__.co_firstlineno
    with pytest.raises(scheduler.DivergentBarrier) as caught:
        scheduler.run(kernel, 1, 3, ())
    assert caught.value.waiting == {f"{__file__}:{first + 5}": [(1, 0, 0)], f"{__file__}:{first + 3}": [(2, 0, 0)]}
    assert caught.value.exited == [(0, 0, 0)]
    for part in [f"thread (1, 0, 0) at {__file__}:{first + 5}", "exited have thread (0, 0, 0)"]:
        assert part in str(caught.value)


@cuda.jit
def voting(results, votes):
    x = cuda.threadIdx.x
    results[x, 0] = cuda.syncthreads_count(votes[x])
    results[x, 1] = cuda.syncthreads_and(votes[x])
    results[x, 2] = cuda.syncthreads_or(votes[x])


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("yes", [0, 1, 7, 8])
def test_votes(yes, seed):
    results = np.full((8, 3), -1)
    scheduler.run(voting, 1, 8, (results, np.arange(8) < yes), seed=seed)
    np.testing.assert_array_equal(results, [[yes, yes == 8, yes > 0]] * 8)


@cuda.jit
def warps_alone(target, rounds):
    tile = cuda.shared.array(64, float32)
    x = cuda.threadIdx.x
    if x == 40:
        return  # a lane that has exited is not waited for
    for step in range(rounds * (1 + x // 32)):  # warps may wait different numbers of times
        tile[x] = x + step
        cuda.syncwarp()
        target[x] = tile[x ^ 1] - step
        cuda.syncwarp()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warp_waits_for_itself_only(seed):
    target = np.zeros(64, np.float32)
    scheduler.run(warps_alone, 1, 64, (target, 3), seed=seed)
    expected = (np.arange(64) ^ 1).astype(np.float32)
    expected[40] = 0
    kept = np.arange(64) != 41  # its partner has exited
    np.testing.assert_array_equal(target[kept], expected[kept])


@cuda.jit
def half_warp(target):
    x = cuda.threadIdx.x
    if x < 16:
        cuda.syncwarp(0xFFFF)
        target[x] = 1
    cuda.syncthreads()


def test_a_warp_barrier_waits_for_the_lanes_of_its_mask():
    target = np.zeros(32)
    scheduler.run(half_warp, 1, 32, (target,))
    np.testing.assert_array_equal(target, np.arange(32) < 16)


# --------------------------------------------------------------------------------------------------------- failures


class TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


def _raise(error):
    raise error


FAILURES = [
    (lambda: _raise(ValueError("odd")), ValueError, "odd"),
    (lambda: _raise(AssertionError()), AssertionError, ""),
    (lambda: _raise(KeyError("k")), KeyError, "k"),
    (lambda: _raise(TwoArguments(1, 2)), RuntimeError, "TwoArguments"),
    (lambda: np.zeros(3)[5], IndexError, "out of bounds"),
    (lambda: _raise(SystemExit("stop")), SystemExit, "stop"),
]


@pytest.mark.parametrize("after_barrier", [False, True])
@pytest.mark.parametrize(("fail", "kind", "words"), FAILURES)
def test_an_exception_names_its_thread(fail, kind, words, after_barrier):
    def kernel():
        if after_barrier:
            cuda.syncthreads()
        if cuda.blockIdx.x == 1 and cuda.threadIdx.y == 2 and cuda.threadIdx.x == 1:
            fail()
        cuda.syncthreads()

    with pytest.raises(kind) as caught:
        scheduler.run(kernel, (2, 1), (4, 4), (), seed=1)
    assert "thread (1, 2, 0) of block (1, 0, 0)" in str(caught.value)
    assert words in str(caught.value)
    assert any(entry.name == "kernel" for entry in caught.traceback)
    scheduler.run(logging, 1, 4, ([], 1))  # a failure has no later effect


def test_the_module_gets_its_cuda_back():
    def kernel():
        assert cuda is renamed_cuda is not sys.modules["numba.cuda"]
        raise ValueError

    with pytest.raises(ValueError, match="thread"):
        scheduler.run(kernel, 1, 1, ())
    assert cuda is renamed_cuda is sys.modules["numba.cuda"]
    assert in_closure.__closure__[0].cell_contents is cuda


def test_an_access_to_no_dynamic_memory_is_told_the_argument():
    def kernel(x):
        tile = cuda.shared.array(0, float32)
        tile[0] = x[0]

    with pytest.raises(IndexError, match=r"dynamic shared memory has 0 bytes: pass dynamic_shared$"):
        scheduler.run(kernel, 1, 1, (np.zeros(1),))
    with pytest.raises(IndexError, match=r"axis 0 with size 0$"):
        scheduler.run(kernel, 1, 1, (np.zeros(0),), dynamic_shared=4)


def test_an_unsigned_difference_below_zero_is_told():
    def kernel(x, by):
        x[types.uint32(cuda.threadIdx.x) - by] = 1

    with pytest.raises(IndexError, match=r"index 4294967295 is out .* difference of uint32.*: convert to int32 first$"):
        scheduler.run(kernel, 1, 1, (np.zeros(4), 1))
    with pytest.raises(IndexError, match=r"size 0$"):
        scheduler.run(kernel, 1, 1, (np.zeros(0), 0))


@pytest.mark.parametrize(
    ("use", "name"), [(lambda: cuda.shfl_down_sync(-1, 0, 1), "shfl_down_sync"), (lambda: cuda.cg.this_grid(), "cg")]
)
def test_names_that_the_simulator_lacks(use, name):
    with pytest.raises(AttributeError, match=rf"cuda has no attribute '{name}' in the simulator \(docs/tracing\.md\)$"):
        scheduler.run(use, 1, 1, ())


def test_cuda_may_be_an_attribute_of_numba():
    local_numba = numba

    def kernel(x):
        x[numba.cuda.threadIdx.x] = numba.float32(local_numba.cuda.blockDim.x)

    x = np.zeros(3)
    scheduler.run(kernel, 1, 3, (x,))
    assert x.tolist() == [3, 3, 3]
    assert numba.cuda is cuda
    assert local_numba is sys.modules["numba"]


def test_float_warnings_are_off_inside_threads():
    def kernel(x):
        x[0] = np.float32(3e38) * np.float32(10)
        x[1] = np.uint32(2) - np.uint32(3)

    x = np.zeros(2)
    scheduler.run(kernel, 1, 1, (x,))
    assert x[0] == np.inf
    assert x[1] == 2**32 - 1


BAD_LAUNCHES = [
    ({"grid": 0}, "grid must be"),
    ({"grid": (1, -1)}, "grid must be"),
    ({"block": 1.5}, "block must be"),
    ({"block": (1, 1, 1, 1)}, "block must be"),
    ({"block": (32, 33)}, "at most 1024"),
    ({"block": (1, 1, 65)}, r"a block is at most \(1024, 1024, 64\) in x, y, z, got \(1, 1, 65\)"),
    ({"grid": (1, 65536), "blocks": [(0, 0, 0)]}, "a grid is at most"),
    ({"grid": (1, 1, 65536), "blocks": [(0, 0, 0)]}, "a grid is at most"),
    ({"grid": 2**31, "blocks": [(0, 0, 0)]}, "a grid is at most"),
    ({"blocks": [(2, 0, 0)]}, "outside the grid"),
    ({"dynamic_shared": 227 * 1024 + 1}, "expected 0 to 232448 bytes"),
    ({"dynamic_shared": -1}, "expected 0 to 232448 bytes"),
]


@pytest.mark.parametrize(("wrong", "words"), BAD_LAUNCHES)
def test_impossible_launches_are_refused(wrong, words):
    launch = {"grid": 2, "block": 2} | wrong
    log = []
    with pytest.raises(ValueError, match=words):
        scheduler.run(logging, launch.pop("grid"), launch.pop("block"), (log, 1), **launch)
    assert log == []


def test_the_largest_extents_are_launched():
    largest = [((MAX_GRID_X, 1, 1), (1, 1, 64)), ((1, MAX_GRID_Y, 65535), (1024, 1, 1)), (1, (1, 1024, 1))]
    for grid, block in largest:
        scheduler.run(lambda: None, grid, block, (), blocks=[(0, 0, 0)], dynamic_shared=227 * 1024)


def test_more_than_48_kb_of_static_shared_memory_are_refused():
    def kernel(sums, size):
        first = cuda.shared.array(6 * 1024, float32)
        second = cuda.shared.array(size, float64)
        sums[cuda.blockIdx.x] = first.nbytes + second.nbytes

    sums = np.zeros(2)
    scheduler.run(kernel, 2, 4, (sums, 3 * 1024))
    assert sums.tolist() == [STATIC_SHARED_BYTES] * 2
    with pytest.raises(ValueError, match=r"have 49160 bytes.*dynamic shared memory, cuda\.shared\.array\(0"):
        scheduler.run(kernel, 2, 4, (sums, 3 * 1024 + 1))


def test_a_kernel_cannot_launch():
    def kernel():
        scheduler.run(logging, 1, 1, ([], 1))

    with pytest.raises(RuntimeError, match="running already"):
        scheduler.run(kernel, 1, 1, ())


def test_a_barrier_in_a_function_is_placed_by_the_calls_that_lead_to_it():
    @cuda.jit(device=True)
    def inner():
        barrier()

    def kernel():
        if cuda.threadIdx.x == 0:
            inner()

    with pytest.raises(scheduler.DivergentBarrier) as caught:
        scheduler.run(kernel, 1, 2, ())
    lines = [kernel.__code__.co_firstlineno + 2, inner.py_func.__code__.co_firstlineno + 2]
    lines.append(barrier.__code__.co_firstlineno + 2)
    assert list(caught.value.waiting) == [" > ".join(f"{__file__}:{line}" for line in lines)]


def test_only_functions_are_kernels():
    with pytest.raises(TypeError, match="a kernel made by"):
        scheduler.run(7, 1, 1, ())


INTERRUPTED = """
import signal, sys, threading
from numba import cuda
from support import threads
from numba_gemm.simulator import scheduler

begun = threading.Event()

@cuda.jit
def endless(waits):
    begun.set()
    while waits or cuda.threadIdx.x == 2:
        if waits:
            cuda.syncthreads()
    cuda.syncthreads()

def interrupt():
    begun.wait()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

thread = threading.Thread(target=interrupt)
thread.start()
try:
    scheduler.run(endless, 1, 4, (len(sys.argv) > 1,))
except KeyboardInterrupt:
    thread.join()
    print("interrupted", threads.more_than(0))
"""


@pytest.mark.parametrize("waits", [[], ["yes"]], ids=["spins", "waits"])
def test_an_endless_kernel_can_be_interrupted(waits):
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", INTERRUPTED, *waits]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["interrupted", "False"], done.stderr
    assert done.stderr == ""


# Python calls functions of these when an object is freed, and then ignores what they raise.
CALLBACKS = {"_weakrefset", "weakref", "hypothesis"}


@pytest.mark.parametrize("ends", ["interrupted", "finished"])
def test_an_interrupt_at_any_point_of_the_clean_up_leaves_the_simulator_usable(ends):
    """A profiler raises KeyboardInterrupt where CPython handles signals: at the start of functions and after calls."""
    waiting = reversing_kernel(plain_helper)
    array = np.ones(4, np.float32)

    class Ends:
        def __init__(self, point):
            self.point, self.seen, self.raised, self.began = point, 0, False, False

        def barrier(self, block_index, number):
            sys.setprofile(self.profile)
            if ends == "interrupted":
                raise KeyboardInterrupt

        def profile(self, frame, event, arg):
            # Clean-up begins when `run_block`, which the first interrupt goes through, has returned.
            self.began |= event == "return" and frame.f_code is launch.Launch.run_block.__code__
            if frame.f_globals["__name__"].partition(".")[0] in CALLBACKS:
                return
            if self.began and event in ("call", "c_return") and not self.raised:
                self.seen += 1
                if self.seen == self.point:
                    self.raised = True
                    raise KeyboardInterrupt

    for point in itertools.count(1):
        observer = Ends(point)
        before = threads.count()
        try:
            scheduler.run(waiting, 1, 4, (array, np.empty_like(array)), observer=observer)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not threads.more_than(before), f"after an interrupt at call {point}"
        assert cuda is sys.modules["numba.cuda"], f"after an interrupt at call {point}"
        target = np.empty_like(array)
        scheduler.run(waiting, 1, 4, (array, target))
        np.testing.assert_array_equal(target, array, err_msg=f"after an interrupt at call {point}")
        if not observer.raised:
            break
    assert point > 20


def test_a_forked_child_can_launch_while_another_thread_of_the_parent_does():
    running, end = threading.Event(), threading.Event()

    def waits():
        if cuda.threadIdx.x == 0:
            running.set()
            end.wait()

    def launches(seen):
        seen[cuda.threadIdx.x] = cuda.blockDim.x

    host = threading.Thread(target=scheduler.run, args=(waits, 1, 1, ()))
    host.start()
    assert running.wait(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that would wait forever
        seen = np.zeros(2)
        with contextlib.suppress(BaseException):
            scheduler.run(launches, 1, 2, (seen,))
        os._exit(0 if seen.tolist() == [2, 2] else 1)
    status = os.waitpid(child, 0)[1]
    end.set()
    host.join()
    assert os.waitstatus_to_exitcode(status) == 0


# -------------------------------------------------------------------------------------------------------- observers


class Recorder:
    def __init__(self):
        self.barriers, self.starts, self.ends, self.on = [], [], [], set()

    def barrier(self, block_index, number):
        self.barriers.append((block_index, number))
        self.on.add(threading.current_thread())

    def thread_start(self, thread):
        assert thread is scheduler.current_thread()
        self.starts.append((thread.block_index, thread.thread_index))

    def thread_end(self, thread):
        self.ends.append((thread.block_index, thread.thread_index))


def test_an_observer_sees_barriers_and_threads():
    recorder = Recorder()
    scheduler.run(logging, 2, 3, ([], 2), observer=recorder)
    assert recorder.barriers == [((b, 0, 0), n) for b in range(2) for n in range(2)]
    assert recorder.starts == recorder.ends == [((b, 0, 0), (x, 0, 0)) for b in range(2) for x in range(3)]
    assert recorder.on == {threading.current_thread()}


def test_an_observer_may_end_the_launch():
    class Stops:
        def barrier(self, block_index, number):
            if number == 1:
                raise KeyboardInterrupt

    log = []
    with pytest.raises(KeyboardInterrupt):
        scheduler.run(logging, 2, 3, (log, 4), observer=Stops())
    assert len(log) == 6


def test_launches_from_several_host_threads_take_turns():
    kernel, source = reversing_kernel(plain_helper), np.arange(64, dtype=np.float32)
    targets = [np.full(64, np.nan, np.float32) for _ in range(4)]

    def launch(target):
        scheduler.run(kernel, 1, 64, (source, target), seed=1)

    hosts = [threading.Thread(target=launch, args=(target,)) for target in targets]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    for target in targets:
        np.testing.assert_array_equal(target, source[::-1])


@pytest.mark.parametrize("distance", [1, 4, 31])
def test_lanes_exchange_values(distance):
    found = np.zeros(64, np.int64)

    def kernel():
        thread = cuda.threadIdx.x
        for factor in (1, 10):
            found[thread] += cuda.shfl_xor_sync(0xFFFFFFFF, factor * thread, distance)

    scheduler.run(kernel, 1, 64, (), seed=3)
    np.testing.assert_array_equal(found, 11 * (np.arange(64) ^ distance))


def test_lanes_vote():
    found = np.zeros((64, 2), bool)

    def kernel():
        thread = cuda.threadIdx.x
        found[thread] = [cuda.all_sync(0xFFFFFFFF, thread != 40), cuda.all_sync(0xFFFFFFFF, thread >= 0)]

    scheduler.run(kernel, 1, 64, (), seed=3)
    assert found.tolist() == [[True, True]] * 32 + [[False, True]] * 32


def test_an_exchange_needs_the_whole_warp():
    def kernel(mask, threads):
        if cuda.threadIdx.x < threads:
            cuda.shfl_xor_sync(mask, 1.0, 1)

    def vote(mask, threads):
        cuda.all_sync(mask, True)

    for function in (kernel, vote):
        with pytest.raises(
            NotImplementedError, match="mask is 0xffff; the simulator exchanges values of whole warps: pass"
        ):
            scheduler.run(function, 1, 32, (0xFFFF, 32))
    with pytest.raises(RuntimeError, match="needs all 32 lanes of a warp"):
        scheduler.run(kernel, 1, 32, (0xFFFFFFFF, 16))
