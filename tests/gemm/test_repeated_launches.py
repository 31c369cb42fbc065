"""Launches of repeated calls: those of the full check, in as few Python calls as possible."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.array_libraries import Tensor, on_boundary
from support.operands import filled

from numba_gemm import plan, tiled_sgemm
from numba_gemm.gemm import autotune_cache
from numba_gemm.gemm import product as products
from numba_gemm.kernels.tensor_core import stage as tensor_core
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import tensor_maps
from numba_gemm.runtime.tensor_maps import TensorMaps

TESTS = Path(__file__).parents[1]
M, N, K, MATRICES = 64, 128, 96, 5
PRECISIONS = ("ieee", "bf16x6", "bf16x9", "fp16x3", "tf32x3", "tf32", "bf16")


def shift(value, row, col, bias):
    return value + bias[col]


def shift_two(value, row, col, bias, other):
    return value + bias[col] - other[col]


EPILOGUES = (None, shift, shift_two)  # by the number of vectors


def by_rows(rows, cols, seed, batch):
    return Tensor(on_boundary(np.stack([filled(rows, cols, seed + i) for i in range(batch)])))


def by_columns(rows, cols, seed, batch):
    made = by_rows(cols, rows, seed, batch)
    made.x = made.x.swapaxes(-1, -2)
    return made


def one(made):
    made.x = made.x[0]
    return made


class Case:
    """A call that can be repeated with operands at other addresses.

    Parameters
    ----------
    batch : int
        Matrices; 0 for one product.
    layout : str
        Layouts of A and B.
    vectors : int
        Vectors of the epilogue.
    planned : bool
        True if the call is a plan's.
    pieces : bool
        True if the memory for decomposed operands is limited to two matrices of a batch at a time; they are then
        decomposed in all precisions of tensor cores but "tf32".
    """

    def __init__(self, batch=0, layout="NN", vectors=0, planned=False, pieces=False):
        self.batch, self.layout, self.vectors, self.planned, self.pieces = batch, layout, vectors, planned, pieces
        self.stage, self._plan = "auto", None

    def prepare(self, precision, stage="auto"):
        self.precision, self.stage = precision, stage
        if self.planned:
            options = {"epilogue": EPILOGUES[self.vectors], "batch": (self.batch,) if self.batch else ()}
            self._plan = plan(M, N, K, precision=precision, stage=stage, layout=self.layout, **options)

    def arrays(self, seed):
        make = {"N": by_rows, "T": by_columns}
        batch = self.batch or 1
        a, b = make[self.layout[0]](M, K, seed, batch), make[self.layout[1]](K, N, seed, batch)
        out = by_rows(M, N, seed, batch)
        made = (a, b, out) if self.batch else (one(a), one(b), one(out))
        return made, tuple(Tensor(on_boundary(filled(1, N, seed + i)[0])) for i in range(self.vectors))

    def __call__(self, arrays, vectors, *, out=True, **options):
        a, b, c = arrays
        if self.vectors:
            options |= {"epilogue_args": vectors}
        if self._plan is not None:
            return self._plan(a, b, c if out else None, **options)
        if self.vectors:
            options |= {"epilogue": EPILOGUES[self.vectors]}
        decomposing = self.pieces and self.precision not in ("ieee", "tf32")
        stage = "persistent" if decomposing else self.stage
        return tiled_sgemm(a, b, c if out else None, precision=self.precision, stage=stage, **options)

    def forget(self):
        products.forget()
        if self._plan is not None:
            self._plan._calls.clear()
            self._plan._repeat, self._plan._repeated = None, False


CASES = {
    "plain": Case(),
    "epilogue": Case(vectors=1),
    "two vectors": Case(vectors=2),
    "batch": Case(batch=MATRICES),
    "batch, epilogue": Case(batch=MATRICES, vectors=1),
    "NT": Case(layout="NT"),
    "TN": Case(layout="TN"),
    "TT": Case(layout="TT"),
    "plan": Case(planned=True),
    "plan, epilogue": Case(planned=True, vectors=1),
    "plan, batch": Case(planned=True, batch=MATRICES),
    "pieces": Case(batch=MATRICES, pieces=True),
}


@pytest.fixture(autouse=True)
def only_recorded(gpu):
    gpu.computes = False


def limit_parts(gpu, call, monkeypatch):
    """Leave room for the decomposed operands of two matrices of a batch, as read from the launches of all."""
    call(*call.arrays(0))
    for did in gpu.launches:
        if "a_parts" in did.arguments:
            half = len(did.steps) // 2  # for each operand: bytes to the next matrix, then to that of its parts
            each = sum(did.steps[1:half]) + sum(did.steps[half + 1 :])
            monkeypatch.setattr(tensor_core, "MAX_PARTS_BYTES", 2 * each + each // 2)
    call.forget()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_repeated_call_launches_what_the_full_check_launches(torch, gpu, checked, monkeypatch, precision, case):
    call = CASES[case]
    call.prepare(precision)
    if call.pieces:
        limit_parts(gpu, call, monkeypatch)
        checked.clear()
    kept = [call.arrays(seed) for seed in range(2)]
    with gpu.recording() as first:
        call(*kept[0])
    assert len(checked) == 1
    torch.current.cuda_stream = 50
    with gpu.recording() as repeated:
        call(*kept[1], alpha=-1.5, beta=0.25)
    assert len(checked) == 1, "the second call was checked in full"
    call.forget()
    with gpu.recording() as full:
        call(*kept[1], alpha=-1.5, beta=0.25)
    assert len(checked) == 2
    assert repeated == full
    assert [(did.handle, did.grid, did.overlaps) for did in first] == [
        (did.handle, did.grid, did.overlaps) for did in full
    ]
    # The values are those of the call, and none of the first one's is left.
    multiplications = [did for did in full if "alpha" in did.arguments]
    assert {(did.alpha, did.beta, did.stream) for did in multiplications} == {(-1.5, 0.25, 50)}
    assert len(multiplications) == (3 if call.pieces and precision not in ("ieee", "tf32") else 1)
    begins = range(0, MATRICES, 2) if len(multiplications) > 1 else [0]
    arrays, vectors = kept[1]
    a, b, c = ([x.data_ptr() + i * x.x.strides[0] for i in begins] for x in arrays)
    assert [did.c[0] for did in multiplications] == c
    if precision == "ieee":
        assert [(did.a[0], did.b[0]) for did in multiplications] == list(zip(a, b))
    elif "x" in multiplications[0].arguments:
        assert [(did.x[0], did.y[0]) for did in multiplications] == list(zip(a, b))
        decomposed = [did for did in full if "alpha" not in did.arguments]
        assert {(did.a[0], did.b[0]) for did in decomposed} == set(zip(a, b))
    for did in multiplications:
        assert [did.arguments[f"vector{i}"][4] for i in range(call.vectors)] == [x.data_ptr() for x in vectors]


@pytest.mark.parametrize("case", [case for case in CASES if case != "pieces"])
@pytest.mark.parametrize(
    ("precision", "k"), [*((one, 9002) for one in PRECISIONS if one not in ("ieee", "tf32")), ("bf16x6", 9000)]
)
def test_repeated_call_of_divided_sums(torch, gpu, checked, monkeypatch, precision, k, case):
    """Partial sums lie behind the parts of the operands; the last launch takes all else.

    In bf16x6, `rows_in_registers` reads A or, without an epilogue, the transpose of B; so it may for fp16x3 and tf32x3.
    """
    monkeypatch.setattr(sys.modules[__name__], "K", k)
    call = CASES[case]
    call.prepare(precision, "persistent" if precision in ("fp16x3", "tf32x3") else "auto")
    kept = [call.arrays(seed) for seed in range(2)]
    call(*kept[0])
    with gpu.recording() as repeated:
        call(*kept[1], alpha=-1.5, beta=0.25)
    assert len(checked) == 1, "the second call was checked in full"
    call.forget()
    with gpu.recording() as full:
        call(*kept[1], alpha=-1.5, beta=0.25)
    assert repeated == full
    *before, multiplies, adds = full
    assert [did.overlaps for did in full] == [False] + [True] * (len(full) - 1)
    assert len(before) == (2 if precision == "fp16x3" else 1)
    by_rows = multiplies.kernel.startswith(f"rows_in_registers_{precision}_")
    assert by_rows or multiplies.kernel.startswith(f"persistent_{precision}_")
    assert by_rows == (precision == "bf16x6" and (k == 9000 or not call.vectors or case == "batch, epilogue"))
    assert adds.kernel.startswith("add_partials")
    assert (multiplies.alpha, multiplies.beta) == (1.0, 0.0)
    (a, b, c), vectors = kept[1]
    assert (adds.alpha, adds.beta, adds.c[0]) == (-1.5, 0.25, c.data_ptr())
    swapped = adds.a[0] == b.data_ptr()
    assert not swapped or (by_rows and not call.vectors)
    assert (adds.a[0], adds.b[0]) == ((b.data_ptr(), a.data_ptr()) if swapped else (a.data_ptr(), b.data_ptr()))
    assert multiplies.c == adds.partials
    decomposes = before[-1]
    assert multiplies.a == adds.a_parts == decomposes.a_parts
    assert multiplies.b == adds.b_parts == decomposes.b_parts
    pointer, rows, cols, *_ = adds.partials
    shares, batch = adds.words[6], max(call.batch, 1)
    assert shares > 1
    m, n = (N, M) if swapped else (M, N)
    assert (rows % shares, rows // shares >= m, cols >= n) == (0, True, True)
    assert adds.words[5] == 4 * rows * cols
    ends = [words[0] + 4 * words[1] * words[2] * batch for words in (adds.a_parts, adds.b_parts)]
    assert pointer >= max(ends)
    assert multiplies.steps[2:5] == [adds.words[5], *adds.words[3:5]]
    assert [adds.arguments[f"vector{i}"][4] for i in range(call.vectors)] == [x.data_ptr() for x in vectors]


@pytest.mark.parametrize("case", ["plain", "epilogue", "batch", "plan"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_repeated_call_without_out_launches_the_same(torch, gpu, checked, monkeypatch, precision, case):
    """The result is other memory each time."""
    call = CASES[case]
    call.prepare(precision)
    arrays, made = call.arrays(0), []
    for _ in range(2):
        made.append(call(*arrays, out=False))
    assert len(checked) == 1
    half = len(gpu.launches) // 2
    assert gpu.launches[half:] != gpu.launches[:half]
    for did, other in zip(gpu.launches[:half], gpu.launches[half:], strict=True):
        if "c" in did.arguments:
            assert [did.c[0], other.c[0]] == [x.data_ptr() for x in made]
            other.arguments["c"] = did.c
        assert did == other


@pytest.mark.parametrize("batch", [0, MATRICES])
def test_tf32_by_tensor_maps_has_maps_of_the_new_operands(torch, gpu, checked, monkeypatch, batch):
    """A map is made once per address; a call with addresses that are known makes none."""
    call = Case(batch=batch)
    call.prepare("tf32")
    kept, made = [call.arrays(seed) for seed in range(2)], []
    for turn in (0, 1, 0, 1):
        call(*kept[turn])
        made.append(len(devices.get_device(0).tensor_maps._places))
    assert made == [2, 4, 4, 4]
    assert len(checked) == 1
    found = {(did.u_map[0], did.v_map[0]) for did in gpu.launches}
    places = {place: key[0] for key, place in devices.get_device(0).tensor_maps._places.items()}
    # "NN" is computed as the transpose: the first map is of B.
    assert {(places[u], places[v]) for u, v in found} == {(b.data_ptr(), a.data_ptr()) for (a, b, _), _ in kept}


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("batch", [0, MATRICES])
def test_tf32_with_one_operand_that_is_decomposed(torch, gpu, checked, batch, planned, out):
    """One map is made per address of B, which is larger, and the part of A is where the launch before leaves it."""
    call = Case(layout="TN", batch=batch, planned=planned)
    call.prepare("tf32", "tf32_tma")
    kept = [call.arrays(seed) for seed in range(2)]
    for turn in (0, 1, 0, 1):
        call(*kept[turn], out=out)
    assert len(checked) == 1
    maps = devices.get_device(0).tensor_maps._places
    places = {place: key[0] for key, place in maps.items()}
    decomposed, multiplied = gpu.launches[::2], gpu.launches[1::2]
    for turn, before, did in zip((0, 1, 0, 1), decomposed, multiplied, strict=True):
        ((a, b, _), _) = kept[turn]
        assert (before.kernel.partition("_")[0], did.kernel[:8]) == ("decompose", "tf32_tma")
        assert (places[did.u_map[0]], did.v_map) == (b.data_ptr(), [0])
        assert before.a[0] == a.data_ptr()
        assert before.a_parts == did.v_part
        assert did.v_part[0] > 0
        assert (did.overlaps, before.overlaps) == (True, False)
    assert len(places) == 2


@pytest.mark.parametrize("planned", [False, True])
def test_both_operands_are_decomposed_without_room_for_one_map(torch, gpu, checked, room, planned):
    call = Case(layout="TN", planned=planned)
    call.prepare("tf32", "tf32_tma")
    room.append(True)
    kept = [call.arrays(turn) for turn in range(3)]
    for arrays in kept:
        call(*arrays)
    found = [did.kernel.partition("_")[0] for did in gpu.launches]
    assert found == ["decompose", "tf32", *["decompose", "persistent"] * 2]


def words_of(argument):
    return argument if isinstance(argument, list) else [argument]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch", [0, MATRICES])
def test_repeated_call_of_a_plan_launches_the_same_in_memory_of_its_own(torch, gpu, checked, precision, batch):
    call = Case(planned=True, batch=batch)
    call.prepare(precision)
    kept = [call.arrays(seed) for seed in range(2)]
    call(*kept[0])
    with gpu.recording() as cached:
        call(*kept[1], alpha=-1.5, beta=0.25)
    assert call._plan._repeat is not None
    for stream in (40, 40, 50, 40):
        torch.current.cuda_stream = stream
        call(*kept[0])
        with gpu.recording() as private:
            call(*kept[1], alpha=-1.5, beta=0.25)
        assert [did.stream for did in private] == [stream] * len(cached)
        assert [(did.handle, did.grid, did.overlaps) for did in private] == [
            (did.handle, did.grid, did.overlaps) for did in cached
        ]
        moved = {
            one - other
            for own, did in zip(private, cached, strict=True)
            for name in did.arguments
            for one, other in zip(words_of(own.arguments[name]), words_of(did.arguments[name]), strict=True)
        }
        assert len(moved - {0}) <= 2, "more has moved than scratch memory and counters"
    assert len(checked) == 1


def test_plan_gives_its_memory_back(torch, gpu):
    call = Case(planned=True)
    call.prepare("bf16")
    arrays = call.arrays(0)
    for _ in range(4):
        call(*arrays)
    free = devices.get_device(0).workspaces._free
    before = sum(map(len, free.values()))
    call._plan = None
    gc.collect()
    assert sum(map(len, free.values())) == before + 1


# ----------------------------------------------------------------------------------------------------- function calls


def in_a_stand_in(frame):
    """Return True if a frame belongs to a stand-in for a compiled function, or to a function that a stand-in calls."""
    while frame.f_code is not Case.__call__.__code__:
        if frame.f_code.co_filename.startswith(str(TESTS)):
            return True
        frame = frame.f_back
    return False


@contextmanager
def counting_calls():
    """Collect the names of the Python functions that a call inside calls."""
    found, inside = [], False

    def count(frame, event, _):
        nonlocal inside
        if frame.f_code is Case.__call__.__code__:
            inside = event == "call"
        elif event == "call" and inside and not in_a_stand_in(frame):
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # whose callbacks, such as Hypothesis', would be counted
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


# Calls of Python functions in a repeated product, at most: with an out, and without.
BUDGETS = {
    ("plain", "ieee"): (10, 10),
    ("epilogue", "ieee"): (18, 18),
    ("two vectors", "ieee"): (20, 20),
    ("batch", "ieee"): (10, 10),
    ("plan", "ieee"): (6, 9),
    ("plain", "bf16x6"): (16, 16),
    ("plain", "fp16x3"): (16, 16),
    ("plain", "tf32"): (13, 13),
    ("epilogue", "bf16x6"): (24, 24),
    ("plan", "bf16x6"): (7, 15),
}


@pytest.mark.parametrize(("case", "precision"), BUDGETS)
@pytest.mark.parametrize("out", [True, False])
def test_repeated_call_takes_few_function_calls(torch, checked, monkeypatch, case, precision, out):
    call, allowed = CASES[case], BUDGETS[case, precision][not out]
    call.prepare(precision)
    arrays = call.arrays(0)
    for _ in range(3):  # the second call of a plan prepares the others
        call(*arrays, out=out)
    with counting_calls() as calls:
        call(*arrays, out=out)
    assert len(checked) == 1
    listed = "\n".join(calls)
    assert len(calls) <= allowed, f"{len(calls)} calls, and {allowed} are allowed:\n{listed}"


# Calls of Python functions in a product of a new shape, at most: for 64 terms, and for 4096, whose sums may be divided.
NEW_SHAPE_BUDGETS = {"ieee": (120, 175), "tf32": (113, 158), "bf16x6": (123, 153), "fp16x3": (128, 150)}


@pytest.mark.parametrize("precision", NEW_SHAPE_BUDGETS)
@pytest.mark.parametrize("k", [64, 4096])
def test_new_shape_takes_few_function_calls(torch, checked, monkeypatch, precision, k):
    """A kernel is chosen and launched; the checks are an earlier product's, and nothing was measured."""
    monkeypatch.setattr(autotune_cache, "_entries", lambda device: {})
    b = Tensor(on_boundary(np.zeros((k, 64), np.float32)))

    def call(m):
        a, c = (Tensor(on_boundary(np.zeros((m, cols), np.float32))) for cols in (k, 64))
        plain = Case()
        plain.precision = precision
        with counting_calls() as calls:
            plain((a, b, c), ())
        return calls

    for m in (164, 228, 292):  # all by one kernel
        call(m)
    calls = [name for name in call(356) if not name.endswith(">")]  # comprehensions are calls in some versions alone
    assert len(checked) == 1
    listed = "\n".join(calls)
    allowed = NEW_SHAPE_BUDGETS[precision][k > 64]
    assert len(calls) <= allowed, f"{len(calls)} calls, and {allowed} are allowed:\n{listed}"


# --------------------------------------------------------------------------------------------- without room for a map


@pytest.fixture
def room(monkeypatch):
    """A list: while it is not empty, each new tensor map takes one element, and there is no room for others."""
    left, next_place = [], TensorMaps._next_place

    def limited(self):
        if not left:
            return None
        left.pop()
        return next_place(self)

    monkeypatch.setattr(TensorMaps, "_next_place", limited)
    return left


@pytest.mark.parametrize("case", ["plain", "epilogue", "batch", "TT", "plan", "plan, epilogue"])
@pytest.mark.parametrize("maps", [0, 1])
def test_operands_are_decomposed_without_room_for_maps(torch, gpu, checked, monkeypatch, room, case, maps):
    call = CASES[case]
    call.prepare("tf32")
    kept = [call.arrays(seed) for seed in range(3)]
    room += [True] * maps
    with gpu.recording() as made:
        call(*kept[0])
    assert [did.kernel.partition("_")[0] for did in made] == ["decompose", "persistent"], "the first attempt launched"
    assert made[-1].c[0] == kept[0][0][2].data_ptr()
    with gpu.recording() as made:
        call(*kept[1])
    assert (len(checked), len(made)) == (1, 2), "the call with decomposed operands is repeated"
    assert made[-1].c[0] == kept[1][0][2].data_ptr()


@pytest.mark.parametrize("case", ["plain", "epilogue", "batch", "TT", "plan", "plan, epilogue"])
@pytest.mark.parametrize("maps", [0, 1])
@pytest.mark.parametrize("out", [True, False])
def test_repeated_call_without_room_for_maps_is_checked_in_full(
    torch, gpu, checked, monkeypatch, room, case, maps, out
):
    """The first call had room for its maps."""
    call = CASES[case]
    call.prepare("tf32")
    kept = [call.arrays(seed) for seed in range(3)]
    room += [True] * 2
    call(*kept[0], out=out)
    call(*kept[0], out=out)
    assert [did.kernel.partition("_")[0] for did in gpu.launches] == ["tf32"] * 2
    room += [True] * maps
    with gpu.recording() as made:
        result = call(*kept[1], alpha=2.0, out=out)
    assert len(checked) == 2
    assert [did.kernel.partition("_")[0] for did in made] == ["decompose", "persistent"]
    assert (made[-1].alpha, made[-1].c[0]) == (2.0, result.data_ptr())
    assert result.version == out
    with gpu.recording() as made:
        call(*kept[2], out=out)
    assert (len(checked), len(made)) == (2, 2)


def test_map_that_the_driver_refuses(torch, gpu, checked, monkeypatch):
    monkeypatch.setattr(tensor_maps, "_encode", lambda pointer, wanted: None)
    call = Case()
    call.prepare("tf32")
    for seed in range(2):
        call(*call.arrays(seed))
    assert [did.kernel.partition("_")[0] for did in gpu.launches] == ["decompose", "persistent"] * 2
    assert len(checked) == 1
    assert len(devices.get_device(0).tensor_maps._free) == tensor_maps.PAGE, "places of the maps are kept"
