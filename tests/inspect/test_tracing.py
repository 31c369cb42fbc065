"""The tracer: requests, sectors, wavefronts and races of kernels with known results."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, float32, float64
from support.mutants import BARRIER, SLICED, STAGED, barriers, mutant

from numba_gemm.device import async_copy
from numba_gemm.device.address import shared_address, shared_load2
from numba_gemm.device.vector import load4, store4
from numba_gemm.inspect import step, trace
from numba_gemm.inspect.recording import TracedArray
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.stage import Partition
from numba_gemm.models import requests
from numba_gemm.runtime.launch import simulated
from numba_gemm.runtime.matrix import Matrix
from numba_gemm.simulator.switch import SIMULATOR

simulator = pytest.mark.simulator
LANES = np.arange(32)
DATA = Path(__file__).parents[1] / "data"


def lanes(addresses, active=None):
    return [(lane, int(at)) for lane, at in enumerate(addresses) if active is None or active[lane]]


# ------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("addresses", "active", "expected"),
    [
        (4 * LANES, None, 4),
        (4 * (LANES ^ 5), None, 4),  # permuted within segments
        (4 * LANES, LANES % 8 == 3, 4),  # one lane in each
        (4 * LANES, LANES < 8, 1),
        (4 * (LANES + 1), None, 5),
        (8 * LANES, None, 8),
        (16 * LANES, None, 16),
        (32 * LANES, None, 32),
        (400 * LANES, None, 32),
        (0 * LANES, None, 1),
        (4 * LANES, LANES < 0, 0),
    ],
)
def test_sectors(addresses, active, expected):
    assert requests.sectors(lanes(addresses, active), 4) == expected


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16)])
def test_sectors_by_width(size, expected):
    assert requests.sectors(lanes(size * LANES), size) == requests.fewest_sectors(lanes(size * LANES), size) == expected


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (4 * LANES, 1),
        (0 * LANES, 1),  # the same word
        (4 * (LANES // 4), 1),  # several broadcasts
        (4 * (LANES // 4 * 33), 1),
        (8 * LANES, 2),
        (12 * LANES, 1),  # with odd strides, no bank is used twice
        (16 * LANES, 4),
        (128 * LANES, 32),
        (128 * (LANES // 2), 16),
        (132 * LANES, 1),
    ],
)
def test_wavefronts_of_words(addresses, expected):
    assert requests.wavefronts(lanes(addresses), 4) == requests.wavefronts(lanes(addresses), 4, write=True) == expected


@pytest.mark.parametrize(
    ("size", "addresses", "load", "store"),
    [
        (8, 8 * LANES, 2, 2),
        (8, 0 * LANES, 1, 2),
        (8, 8 * (LANES // 2), 1, 2),
        (8, 8 * (LANES % 2), 1, 2),
        (8, 8 * (LANES % 4), 2, 2),
        (16, 16 * LANES, 4, 4),
        (16, 0 * LANES, 2, 4),
        (16, 16 * (LANES // 4), 2, 4),
        (16, 128 * LANES, 32, 32),
    ],
)
def test_wavefronts_of_vectors(size, addresses, load, store):
    assert requests.wavefronts(lanes(addresses), size) == load
    assert requests.wavefronts(lanes(addresses), size, write=True) == store


def test_an_h200_counts_the_same_wavefronts():
    """Nsight Compute counted `l1tex__data_pipe_lsu_wavefronts_mem_shared` of these 305 requests."""
    counted = json.loads((DATA / "shared_wavefronts_h200.json").read_text())
    assert len(counted) == 305
    for name, size, write, addresses, wavefronts in counted:
        active = [(lane, at) for lane, at in enumerate(addresses) if at >= 0]
        assert requests.wavefronts(active, size, write=write) == wavefronts, name


def test_an_h200_counts_the_same_of_copies():
    """150 asynchronous copies: sectors, and wavefronts, of which there may be one more from seven or more cache lines.

    Those of 4 bytes are Nsight Compute's count of all wavefronts, less the kernel's other six; those of 16 its count of
    the instruction's.
    """
    counted = json.loads((DATA / "copy_wavefronts_h200.json").read_text())
    assert len(counted) == 150
    more = 0
    for name, size, sources, targets, wavefronts, sectors in counted:
        reads = {lane: at for lane, at in enumerate(sources) if at >= 0}
        assert requests.copy_sectors(reads.items(), size, dict(enumerate(targets))) == sectors, name
        found = requests.copy_wavefronts(lanes(targets), size, reads)
        if found != wavefronts:
            assert found + 1 == wavefronts, name
            assert len({at // 128 for at in reads.values()}) >= 7, name
            more += 1
    assert more == 7


def test_the_count_by_instruction_of_copies_that_zero_depends_on_a_register():
    """Copies of 16 bytes per lane to 512 contiguous bytes, in which some lanes write zeros: three counts of an H200.

    Each row has the lanes that read; the wavefronts that Nsight Compute counts of the instruction where the other lanes
    are named by the predicate register P0, and where by another one; and how many more than with all lanes reading the
    hardware's own counter, `l1tex__data_pipe_lsu_wavefronts_mem_shared`, has in both cases.
    """
    counted = json.loads((DATA / "zeroed_copies_h200.json").read_text())
    assert len(counted) == 19
    for name, reads, by_p0, by_another, hardware in counted:
        targets = [(lane, 16 * lane) for lane in range(32)]
        sources = {lane: 16 * lane for lane in range(32) if reads[lane]}
        assert requests.copy_wavefronts(targets, 16, sources) == by_p0, name
        assert (by_another > by_p0) == (0 < sum(reads) < 32), name
        assert len(requests.passes([at for at in targets if not reads[at[0]]], 16, write=True)) == hardware, name


def test_words_of_each_bank():
    (words,) = requests.bank_map([(0, 0), (1, 4), (2, 128), (3, 128)], 4)
    assert words == {0: {0, 32}, 1: {1}}


@pytest.mark.parametrize(
    ("request_lanes", "size", "complaint"),
    [
        ([(0, 0)], 3, "size is 3"),
        ([(0, 2)], 4, "no multiple of 4"),
        ([(0, 0), (0, 4)], 4, "different numbers"),
        ([(32, 0)], 4, "from 0 to 31"),
    ],
)
def test_requests_that_are_none(request_lanes, size, complaint):
    for cost in (requests.sectors, requests.wavefronts):
        with pytest.raises(ValueError, match=complaint):
            cost(request_lanes, size)


# ----------------------------------------------------------------------------------------------------------- requests


@cuda.jit
def copy_by(x, y, offset, stride):
    i = cuda.grid(1)
    y[i] = x[i * stride + offset]


@cuda.jit
def grid_stride(x, y):
    i = cuda.grid(1)
    while i < x.size:
        if i % 3:
            y[i] = x[i]
        i += cuda.gridsize(1)


@cuda.jit
def skipping(x, y):
    t = cuda.threadIdx.x
    for turn in range(4):
        if (t + turn) % 2:
            y[turn, t] = x[turn, t]


@cuda.jit
def one_line(x, y):
    t = cuda.threadIdx.x
    for turn in range(3): y[turn, t] = x[turn, t]  # fmt: skip  # noqa: E701


def floats(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@simulator
@pytest.mark.parametrize(
    ("offset", "stride", "expected"), [(0, 1, 4), (1, 1, 5), (8, 1, 4), (0, 2, 8), (0, 8, 32), (3, 20, 32)]
)
def test_sectors_of_a_copy(offset, stride, expected):
    x, y = floats(2048), floats(64)
    found = trace(copy_by, 2, 32, x, y, offset, stride)
    loads = found.requests[found.requests["array"] == "x"]
    assert list(loads["lanes"]) == [32, 32]
    assert list(loads["sectors"]) == [expected, expected]
    np.testing.assert_array_equal(y, x[offset::stride][:64])


@simulator
def test_a_view_begins_where_its_allocation_says():
    found = trace(copy_by, 1, 32, floats(64)[1:], floats(64), 0, 1)
    assert list(found.requests.set_index("array")["sectors"]) == [5, 4]


@simulator
def test_a_block_that_is_no_whole_number_of_warps():
    found = trace(copy_by, 2, 40, floats(80), floats(80), 0, 1)
    loads = found.requests[found.requests["op"] == "load"]
    assert list(loads["lanes"]) == [32, 8, 32, 8]
    assert list(loads["sectors"]) == [4, 1, 4, 1]


@simulator
@pytest.mark.parametrize("kernel", [skipping, one_line])
def test_lanes_that_skip_a_turn_are_not_in_it(kernel):
    found = trace(kernel, 1, 32, floats(4, 32), floats(4, 32))
    loads = found.requests[found.requests["op"] == "load"]
    if kernel is skipping:
        assert list(loads["lanes"]) == [16] * 4
        assert list(loads["sectors"]) == [4] * 4
    else:
        assert list(loads["lanes"]) == [32] * 3


@cuda.jit
def endless(x, n):
    t, turn = cuda.threadIdx.x, 0
    while True:
        if (turn + t) % 2:
            x[turn, t] = 1
        turn += 1
        if turn == 4:
            break


@cuda.jit
def endless_around(x, n):
    t, turn = cuda.threadIdx.x, 0
    while True:
        for j in range(n[t]):
            x[j, t] += 1
        x[3, t] = turn
        turn += 1
        if turn == 2:
            break


@cuda.jit
def nested(x, n):
    t = cuda.threadIdx.x
    for i in range(2):
        j = 0
        while j < n[t]:
            j += 1
            if j == 1:
                continue
            x[j, t] = i
        x[3, t] = i


@simulator
@pytest.mark.parametrize(
    ("kernel", "stores"),
    [(endless, [16] * 4), (endless_around, [32, 16, 32, 32, 16, 32]), (nested, [16, 32, 16, 32])],
)
def test_turns_of_other_loops(kernel, stores):
    n = np.where(LANES % 2, 2, 1).astype(np.int32)
    found = trace(kernel, 1, 32, floats(4, 32), n).requests
    assert sorted(found[(found["array"] == "x") & (found["op"] == "store")]["lanes"]) == sorted(stores)


@simulator
def test_turns_are_counted_where_counters_differ():
    found = trace(grid_stride, 2, 32, floats(256), floats(256))
    loads = found.requests[found.requests["op"] == "load"]
    assert len(loads) == 8
    assert loads["lanes"].sum() == sum(1 for i in range(256) if i % 3)
    assert set(loads["sectors"]) == {4}


@cuda.jit
def vectors(x, y):
    t = cuda.threadIdx.x
    tile = cuda.shared.array((32, 4), float32, alignment=16)
    store4(tile, t, 0, load4(x, 0, 4 * t))
    cuda.syncthreads()
    store4(y, 0, 4 * t, load4(tile, 31 - t, 0))
    pair = shared_load2(tile.reshape(128), shared_address(tile) + 8 * t)
    y[1, t] = pair[0] + pair[1]


@simulator
def test_vectors_are_one_access():
    x, y = floats(1, 128), floats(2, 128)
    found = trace(vectors, 1, 32, x, y)
    table = found.requests[["array", "op", "bits", "lanes", "sectors", "wavefronts"]]
    assert [tuple(row) for row in table.to_numpy().tolist()] == [
        ("x", "load", 128, 32, 16, 0),
        ("tile", "store", 128, 32, 0, 4),
        ("tile", "load", 128, 32, 0, 4),
        ("y", "store", 128, 32, 16, 0),
        ("tile", "load", 64, 32, 0, 2),
        ("y", "store", 32, 32, 4, 0),
    ]
    assert list(found.accesses["element"][:3]) == [(0, 0), (0, 0), (0, 4)]
    assert found.traffic.set_index("array").loc["tile", ["read", "written", "moved", "different"]].tolist() == [
        512 + 256,
        512,
        0,
        512,
    ]
    assert found.lanes(0) == [(lane, 16 * lane) for lane in range(32)]


@cuda.jit
def doubles(x, y):
    y[cuda.grid(1)] = x[cuda.grid(1)]


@cuda.jit
def rows_of_three(y):
    y[cuda.threadIdx.x, :] = 0


@cuda.jit
def by_flat(x, y):
    y.flat[cuda.threadIdx.x] = x.flat[cuda.threadIdx.x]


@cuda.jit
def nothing_at_all(x):
    tile = cuda.shared.array(4, float32)  # noqa: F841


@cuda.jit(device=True)
def through(value):
    tile = cuda.shared.array(64, float32)
    tile[cuda.threadIdx.x] = value
    cuda.syncthreads()
    return tile[63 - cuda.threadIdx.x]


@cuda.jit
def twice(y):
    y[0, cuda.threadIdx.x] = through(1.0)
    y[1, cuda.threadIdx.x] = through(2.0)


@cuda.jit
def two_on_a_line(y):
    t = cuda.threadIdx.x
    a, b = cuda.shared.array(32, float32), cuda.shared.array(64, float32)
    c = cuda.shared.array(8, float32); d = cuda.shared.array(16, float32)  # fmt: skip  # noqa: E702
    a[t] = b[t] = c[t % 8] = d[t % 16] = 0


@simulator
def test_lanes_of_each_request():
    found = trace(rows_of_three, 1, 32, floats(32, 3))
    assert len(found.requests) == 3
    for request in range(3):
        assert found.lanes(request) == [(lane, 4 * (3 * lane + request)) for lane in range(32)]
    with pytest.raises(ValueError, match="from 0 to 2"):
        found.lanes(3)


@simulator
def test_flat_is_seen():
    found = trace(by_flat, 1, 32, floats(4, 8), floats(4, 8))
    assert found.requests[["array", "op", "lanes"]].to_numpy().tolist() == [["x", "load", 32], ["y", "store", 32]]


@simulator
def test_a_copy_of_an_array_is_told():
    def kernel(x, y):
        y[cuda.threadIdx.x] = x.ravel()[cuda.threadIdx.x]

    with pytest.raises(IndexError, match="x that are not in its memory"):
        trace(kernel, 1, 32, floats(8, 16)[:, ::2], floats(32))


def reads_whole(y, read):
    tile = cuda.shared.array(32, float32)
    tile[cuda.threadIdx.x] = 1
    y[cuda.threadIdx.x] = read(tile)


@simulator
@pytest.mark.parametrize(
    "read",
    [
        lambda tile: tile.sum(),
        lambda tile: tile[4:8].max(),
        lambda tile: np.mean(tile),
        lambda tile: (tile[:4] + tile[4:8])[0],
        lambda tile: tile @ tile,
        lambda tile: np.dot(tile, tile),
        lambda tile: tile.argmin(),
        lambda tile: tile.item(3),
    ],
)
def test_reads_that_cannot_be_seen_are_refused(read):
    with pytest.raises(TypeError, match="a whole array or slice is not traced: write a loop over its elements"):
        trace(reads_whole, 1, 32, floats(32), read)


def copies_slices(x, y):
    tile = cuda.shared.array((2, 32), float32)
    tile[:] = x[:32]  # each element of `x` is read for both rows
    y[:] = tile[1, ::2]


@simulator
def test_a_slice_that_is_assigned_is_read():
    x, y = np.arange(64, dtype=np.float32), floats(16)
    found = trace(copies_slices, 1, 2, x, y)
    own = found.accesses[found.accesses["thread"] == 0]
    assert own.groupby(["array", "op"]).size().to_dict() == {
        ("tile", "load"): 16,
        ("tile", "store"): 64,
        ("x", "load"): 64,
        ("y", "store"): 16,
    }
    loads = own[(own["array"] == "tile") & (own["op"] == "load")]
    assert loads["element"].tolist() == [(1, i) for i in range(0, 32, 2)]
    np.testing.assert_array_equal(y, x[:32:2])
    assert [(race.first.split()[0], race.second.split()[0]) for race in found.races] == [
        ("write", "write"),
        ("write", "read"),
    ]


@simulator
@pytest.mark.parametrize(("dtype", "size"), [(np.int8, 1), (np.float16, 2), (float32, 4), (float64, 8)])
def test_elements_of_dynamic_shared_memory_are_those_of_its_first_view(dtype, size):
    def kernel():
        first, words = cuda.shared.array(0, dtype), cuda.shared.array(0, float32)
        t = cuda.threadIdx.x
        first[t] = 1
        cuda.syncthreads()
        words[t] = words[t]

    found = trace(kernel, 1, 16, dynamic_shared=133)
    (tile,) = found.arrays
    assert (tile.itemsize, tile.strides) == (size, (size,))
    stored = found.accesses[found.accesses["bytes"].eq(size) & found.accesses["interval"].eq(0)]
    assert stored["element"].tolist() == [(t,) for t in range(16)]
    assert found.accesses["element"].tolist()[-2:] == [(60 // size,)] * 2
    assert found.traffic["different"].tolist() == [16 * max(size, 4)]


@simulator
def test_no_access_at_all():
    found = trace(nothing_at_all, 1, 32, floats(4))
    assert found.requests.empty
    assert found.lines.empty
    assert found.races == []
    assert str(found) == "nothing_at_all: no access"
    assert set(found.traffic["read"]) == {0}


@simulator
def test_a_function_has_one_shared_array_however_often_it_is_called():
    found = trace(twice, 1, 64, floats(2, 64))
    assert [array.name for array in found.arrays] == ["y", "tile"]
    (race,) = found.races  # the second call's store, and the first one's load
    assert race.count == 64


def factory(size):
    def made(value):
        tile = cuda.shared.array(size, float32)
        tile[cuda.threadIdx.x] = value
        cuda.syncthreads()
        return tile[31 - cuda.threadIdx.x]

    return made


small, large = factory(32), factory(64)


def of_a_factory(y):
    y[0, cuda.threadIdx.x] = small(1.0)
    y[1, cuda.threadIdx.x] = large(2.0)


@simulator
def test_functions_of_a_factory_have_arrays_of_their_own():
    found = trace(of_a_factory, 1, 32, floats(2, 32))
    assert {array.name: array.shape for array in found.arrays} == {"y": (2, 32), "tile": (32,), "tile_2": (64,)}
    assert found.races == []


@cuda.jit
def through_a_copy(x, y):
    tile = cuda.shared.array((1, 32), float32, alignment=16)
    async_copy.cp_async4(tile, 0, cuda.threadIdx.x, True, x, 0, cuda.threadIdx.x)
    async_copy.commit_group()
    async_copy.wait_group(0)
    y[0, cuda.threadIdx.x] = tile[0, cuda.threadIdx.x]


@simulator
def test_a_copy_reads_global_memory_and_writes_shared_memory():
    traffic = trace(through_a_copy, 1, 32, floats(1, 32), floats(1, 32)).traffic.set_index("array")
    assert traffic[["read", "written"]].to_dict("index") == {
        "x": {"read": 128, "written": 0},
        "y": {"read": 0, "written": 128},
        "tile": {"read": 128, "written": 128},
    }


@simulator
def test_blocks_may_be_numbers():
    assert trace(copy_by, 2, 32, floats(64), floats(64), 0, 1, blocks=[1]).blocks == [(1, 0, 0)]
    with pytest.raises(ValueError, match="expected each once"):
        trace(copy_by, 2, 32, floats(64), floats(64), 0, 1, blocks=[1, (1, 0)])
    for one in (0, (1, 0, 0), (1, 0)):
        with pytest.raises(
            TypeError, match=rf"^blocks is {re.escape(f'{one}; expected several indices of blocks; pass [{one}]')}$"
        ):
            trace(copy_by, 2, 32, floats(64), floats(64), 0, 1, blocks=one)


@simulator
def test_arrays_of_one_name_are_numbered():
    found = trace(two_on_a_line, 1, 32, floats(4))
    line = found.accesses["line"].min() - 2
    assert {array.name: array.shape for array in found.arrays} == {
        "y": (4,),
        f"shared_{line}": (32,),
        f"shared_{line}_2": (64,),
        "c": (8,),
        "d": (16,),
    }


@simulator
def test_a_file_that_has_changed(tmp_path, monkeypatch):
    import importlib

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    place, source = tmp_path / "changing.py", "def kernel(x):\n    for i in range(2):\n        x[i] = 1\n"
    place.write_text(source)
    module = importlib.import_module("changing")
    assert len(trace(module.kernel, 1, 1, floats(4)).requests) == 2
    place.write_text("# moved\n\n" + source.replace("2", "3"))
    importlib.reload(module)
    assert len(trace(module.kernel, 1, 1, floats(4)).requests) == 3


@simulator
def test_lines_of_a_file_that_has_changed(tmp_path, monkeypatch):
    """Without a loop, whose lines are looked up anew in any case."""
    import importlib

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    place = tmp_path / "edited.py"
    place.write_text("def kernel(x):\n    x[0] = 1\n")
    module = importlib.import_module("edited")
    assert "x[0] = 1\n" in str(trace(module.kernel, 1, 1, floats(4)))
    place.write_text("# moved\n\n\ndef kernel(x):\n    x[1] = 2\n")
    importlib.reload(module)
    assert next(line.source for line in step(module.kernel, 1, 1, floats(4))) == "x[1] = 2"
    place.write_text("# moved\n\n\n# again\ndef kernel(x):\n    x[2] = 3\n")
    importlib.reload(module)
    assert "    6     x[2] = 3\n" in str(trace(module.kernel, 1, 1, floats(4)))


@simulator
def test_other_elements():
    found = trace(doubles, 1, 32, floats(32).astype(np.float64), np.zeros(32, np.int16))
    assert found.requests.set_index("array")[["bits", "sectors"]].to_numpy().tolist() == [[64, 8], [16, 2]]


# -------------------------------------------------------------------------------------------------------------- stages


def matrix(array):
    return Matrix(array.ctypes.data, *array.shape, *array.strides, 0, array)


def traced(stage, shape=(40, 36, 20), **options):
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    c = np.full((m, n), np.nan, np.float32)
    found = trace(stage, None, None, 1.0, a, b, 0.0, c, config="test", **options)
    if "blocks" not in options:
        np.testing.assert_allclose(c, a @ b, atol=1e-4)
    return found


@simulator
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_has_no_races(name):
    """Two tiles with edges, or four that blocks share."""
    config = STAGES[name].test_config
    m = max(config.BM - 4, 4) if STAGES[name].schedule is None else min(config.BM + 8, 40)
    found = traced(name, (m, min(config.BN + 4, 36), 20))
    assert found.races == []
    assert not found.requests.empty


@simulator
def test_accesses_of_one_warp():
    """Lanes of a group of four read neighbours: two sectors of A per row hold 16 terms, each read by two requests."""
    m, n, k = 16, 8, 32
    found = trace("one_warp", None, None, 1.0, floats(m, k), floats(k, n), 0.0, np.zeros((m, n), np.float32))
    assert found.races == []
    counts = {row.array: (row.op, row.requests, row.sectors) for row in found.lines.itertuples()}
    turns = k // 16
    assert counts == {
        "a": ("load", 8 * turns, 8 * 8 * turns),
        "b": ("load", 4 * turns, 4 * 4 * turns),
        "c": ("store", 4, 32),
    }


PARTIAL = {("basic_stream_k", 1), ("stream_k", 3), ("thin", 4)}  # barriers that order partial sums in global memory
REMOVABLE = [
    (name, i)
    for name in STAGES
    if name not in ("naive", "coalesced", "snake_order")  # the last has the kernel of moving_addresses
    for i in range(barriers(name))
    if (name, i) not in PARTIAL
]


@simulator
@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(name, which, marks=[pytest.mark.exhaustive] * (name == "stream_k" and which > 0))
        for name, which in REMOVABLE
    ],
)
def test_a_stage_without_one_of_its_barriers_races(name, which):
    """One block runs, with two tiles if the stage has a schedule."""
    stage = mutant(name, "stage", BARRIER, "pass", which)
    check_that_it_races(stage, STAGED if name == "stream_k" else stage.test_config)


@simulator
@pytest.mark.parametrize("which", [0, 1])
def test_slices_without_one_of_their_barriers_race(which):
    check_that_it_races(mutant("stream_k", "warp_tile", BARRIER, "pass", which), SLICED)


def check_that_it_races(stage, config):
    name = stage.name
    # The last chunk of `thin` lies where its sums are stored.
    m, n, k = config.BM + 1, config.BN, {"stream_k": 1, "thin": 3}.get(name, 2) * config.BK + 3
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(extents, np.float32) for extents in ((m, k), (k, n), (n, m)))
    partition = Partition(1, 2) if stage.takes_partition else None
    made = simulated(stage, config, 1.0, matrix(a), matrix(b), 0.0, matrix(c.T), partition)
    found = trace(
        made.kernel, made.grid, made.block, *made.arguments, dynamic_shared=made.dynamic_shared, blocks=[(0, 0, 0)]
    )
    assert found.races
    for race in found.races:
        assert race.first_line[0] == race.second_line[0]
        assert race.threads[0] != race.threads[1]


@simulator
def test_naive_reads_as_the_closed_form_says():
    m, n, k = 16, 8, 10
    found = traced("naive", (m, n, k))
    traffic = found.traffic.set_index("array")
    assert traffic.loc["a", "read"] + traffic.loc["b", "read"] == 4 * 2 * m * n * k
    assert traffic.loc["c", "written"] == 4 * m * n
    assert found.intensity(2 * m * n * k)["requested"] == 2 * m * n * k / (4 * (2 * m * n * k + m * n))


@simulator
def test_only_the_blocks_that_were_asked_for():
    found = traced("shared_tile", blocks=[(1, 0, 0)])
    assert found.blocks == [(1, 0, 0)]
    assert set(found.accesses["block"]) == {(1, 0, 0)}
    with pytest.raises(ValueError, match="expected each once"):
        traced("shared_tile", blocks=[(0, 0, 0), (0, 0, 0)])
    with pytest.raises(ValueError, match="outside the grid"):
        traced("shared_tile", blocks=[(99, 0, 0)])


@simulator
def test_printed_traces_say_where_races_are_looked_for():
    def kernel(x, total):
        total[0] += x[cuda.grid(1)]

    total = floats(1)
    total[0] = 0
    found = trace(kernel, 2, 128, np.ones(256, np.float32), total)
    assert (total[0], found.races) == (256, [])
    assert str(found).endswith("\nraces in shared memory: none; races in global memory are not looked for")
    racing = trace(reversed_with, 1, 64, floats(64), 0)
    assert f"\nraces in shared memory: 1, such as {racing.races[0]}; races in global memory" in str(racing)


@simulator
def test_source_is_annotated():
    text = str(traced("coalesced", (8, 32, 4)))
    assert "c[row, col] = axpby(" in text
    assert "load b" in text
    assert "4.00 sectors each" in text


@simulator
def test_any_order_of_threads_makes_the_same_requests():
    one, other = traced("warp_tiled"), traced("warp_tiled", seed=3)
    columns = ["line", "array", "op", "bits", "requests", "bytes", "sectors", "wavefronts"]
    assert one.lines[columns].equals(other.lines[columns])


# --------------------------------------------------------------------------------------------------------------- races


@cuda.jit
def reversed_with(y, barrier):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = t
    if barrier == 1:
        cuda.syncthreads()
    if barrier == 2:
        cuda.syncwarp()
    y[t] = tile[63 - t] if barrier < 2 else tile[t ^ 1]


@cuda.jit
def counting(y):
    total = cuda.shared.array(1, float64)
    if cuda.threadIdx.x == 0:
        total[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(total, 0, 1.0)
    cuda.syncthreads()
    y[cuda.threadIdx.x] = total[0]


@cuda.jit
def all_write(y):
    tile = cuda.shared.array(1, float32)
    tile[0] = cuda.threadIdx.x
    cuda.syncthreads()
    y[cuda.threadIdx.x] = tile[0]


@simulator
def test_a_race_names_both_lines():
    (race,) = trace(reversed_with, 1, 64, floats(64), 0).races
    lines = inspect_lines(reversed_with)
    assert {race.first_line[1], race.second_line[1]} == {lines["tile[t] = t"], lines["y[t] ="]}
    assert race.count == 64
    assert {race.first.split()[0], race.second.split()[0]} == {"read", "write"}
    assert "after 0 barriers" in str(race)


def inspect_lines(kernel):
    import inspect

    function = getattr(kernel, "py_func", kernel) if not hasattr(kernel, "fn") else kernel.fn
    source, first = inspect.getsourcelines(function)
    starts = ("tile[t] = t", "y[t] =")
    return {start: first + i for i, line in enumerate(source) for start in starts if line.strip().startswith(start)}


@simulator
@pytest.mark.parametrize("barrier", [1, 2])
def test_barriers_order(barrier):
    assert trace(reversed_with, 1, 64, floats(64), barrier).races == []


@simulator
def test_a_warps_barrier_orders_a_warp_only():
    @cuda.jit
    def across(y):
        tile = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        tile[t] = t
        cuda.syncwarp()
        y[t] = tile[63 - t]

    assert trace(across, 1, 64, floats(64)).races


@simulator
def test_atomics_do_not_race():
    y = floats(64)
    found = trace(counting, 1, 64, y)
    assert (y == 64).all()
    assert found.races == []
    assert set(found.requests[found.requests["array"] == "total"]["op"]) == {"store", "atomic", "load"}


@simulator
@pytest.mark.parametrize("name", ["add", "max", "exch", "cas"])
def test_an_atomic_is_one_access(name):
    def kernel(x):
        if name == "cas":
            cuda.atomic.cas(x, cuda.threadIdx.x % 4, 0, 1)
        elif name == "add":
            cuda.atomic.add(x, cuda.threadIdx.x % 4, 1)
        elif name == "max":
            cuda.atomic.max(x, cuda.threadIdx.x % 4, 1)
        else:
            cuda.atomic.exch(x, cuda.threadIdx.x % 4, 1)

    (request,) = trace(kernel, 1, 32, np.zeros(8, np.int32)).requests.to_dict("records")
    assert (request["op"], request["lanes"], request["sectors"]) == ("atomic", 32, 1)


@simulator
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "float64"])
def test_races_of_other_elements(dtype):
    def kernel(y):
        tile = cuda.shared.array(64, dtype)
        tile[cuda.threadIdx.x] = 1
        y[cuda.threadIdx.x] = tile[63 - cuda.threadIdx.x]

    def neighbours(y):
        tile = cuda.shared.array(64, dtype)
        tile[cuda.threadIdx.x] = 1
        y[cuda.threadIdx.x] = tile[cuda.threadIdx.x]

    (race,) = trace(kernel, 1, 64, floats(64)).races
    assert race.count == 64
    assert trace(neighbours, 1, 64, floats(64)).races == []


@simulator
def test_many_that_race_are_found_soon():
    def kernel(y):
        total = cuda.shared.array(1, float32)
        total[0] = 1
        cuda.atomic.add(total, 0, 1)

    begin = time.process_time()
    found = trace(kernel, 1, 1024, floats(1))
    assert {race.count for race in found.races} == {1}
    assert time.process_time() - begin < 20


def copies(wait_before_barrier, barrier):
    def kernel(x, y):
        tile = cuda.shared.array((1, 64), float32, alignment=16)
        t = cuda.threadIdx.x
        async_copy.cp_async4(tile, 0, t, True, x, 0, t)
        async_copy.commit_group()
        if wait_before_barrier:
            async_copy.wait_group(0)
        if barrier == "block":
            cuda.syncthreads()
        elif barrier == "warp":
            cuda.syncwarp()
        y[0, t] = tile[0, t ^ 1]
        if wait_before_barrier is False:
            async_copy.wait_group(0)

    return kernel


@simulator
@pytest.mark.parametrize("barrier", ["block", "warp", None])
@pytest.mark.parametrize("waits", [True, False, None])
def test_a_copy_writes_until_it_has_landed(waits, barrier):
    found = trace(copies(waits, barrier), 1, 64, floats(1, 64), floats(1, 64))
    assert bool(found.races) == (not waits or barrier is None)
    in_flight = [(read.array, read.element, read.thread) for read in found.unwritten if read.in_flight]
    # Without a barrier thread 1 starts its copy when thread 0 has read the element.
    assert in_flight == ([] if waits or barrier is None else [("tile", (0, 1), 0)])
    assert bool(found.unwritten) == (not waits or barrier is None)


def shifted(y, by, whole):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    if t % 2 == 0 or whole:
        tile[t] = y[t]
    cuda.syncthreads()
    if whole:
        cuda.syncthreads()
    y[t] = tile[(t + by) % 64]
    y[t] = tile[(t + by) % 64]


@simulator
def test_reads_of_shared_memory_that_nobody_has_written():
    first = shifted.__code__.co_firstlineno
    reads = trace(shifted, 2, 64, floats(64), 1, False).unwritten
    assert [(read.line - first, read.thread, read.element, read.block) for read in reads] == [
        (8, 0, (1,), (0, 0, 0)),
        (9, 0, (1,), (0, 0, 0)),
    ]
    assert not any(read.in_flight for read in reads)
    assert trace(shifted, 2, 64, floats(64), 1, True).unwritten == []


@simulator
def test_shared_memory_of_another_block_does_not_count():
    def kernel(y):
        tile = cuda.shared.array(1, float32)
        if cuda.blockIdx.x == 0:
            tile[0] = y[0]
        y[0] = tile[0]

    (read,) = trace(kernel, 2, 1, floats(1)).unwritten
    assert read.block == (1, 0, 0)


@simulator
def test_barriers_of_blocks():
    first = shifted.__code__.co_firstlineno
    found = trace(shifted, 2, 64, floats(64), 1, True).barriers
    assert [(block, line - first) for block, line in found] == [
        (block, line) for block in [(0, 0, 0), (1, 0, 0)] for line in (5, 7)
    ]
    assert trace(copy_by, 1, 32, floats(64), floats(64), 0, 1).barriers == []


@simulator
def test_barriers_that_are_not_needed():
    """One of two in a row is not, and the only one is."""
    assert trace(shifted, 2, 64, floats(64), 1, True).unneeded_barriers == [0, 1]
    assert trace(shifted, 2, 64, floats(64), 1, False).unneeded_barriers == []
    assert trace(shifted, 1, 64, floats(64), 0, False).unneeded_barriers == [0]  # each thread reads its own


@simulator
@pytest.mark.parametrize("stage", ["shared_tile", "double_buffered", "async_copy"])
def test_every_barrier_of_a_stage_is_needed_but_for_the_last(stage):
    """No write follows that a barrier after the last tile would have to hold back."""
    a, b, c = floats(8, 32), floats(32, 8), floats(8, 8)
    found = trace(stage, None, None, 1, a, b, 0, c, config="test", blocks=[(0, 0, 0)])
    count = len(found.barriers)
    assert count > 1
    assert set(found.unneeded_barriers) <= {count - 1}
    assert found.races == []


@simulator
def test_writes_race_with_each_other():
    (race,) = trace(all_write, 1, 32, floats(32)).races
    assert race.first == race.second


# -------------------------------------------------------------------------------------------------------------- errors


@simulator
@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        (("no_such", None, None), ValueError, "stage is 'no_such'; expected one of naive"),
        (("naive", None, None, 1.0), TypeError, "five arguments"),
        (("naive", None, None, 1.0, [[1.0]], floats(2, 2), 0.0, floats(2, 2)), TypeError, "a is a list"),
        (("naive", None, None, 1.0, floats(2, 3), floats(2, 2), 0.0, floats(2, 2)), ValueError, "shapes do not match"),
        ((copy_by, None, None, floats(2)), TypeError, "grid and block must be given"),
        ((copy_by, 1, 1, floats(2)), TypeError, "does not take these arguments"),
        ((copy_by, 2.0, 1, floats(2), floats(2), 0, 1), TypeError, r"^grid is 2.0; expected integers: divide with //"),
        ((copy_by, 1, (1.0, 2), floats(2), floats(2), 0, 1), TypeError, r"^block is \(1.0, 2\); expected integers"),
        ((3, 1, 1), TypeError, "expected a kernel"),
        ((copy_by, 1, 1, floats(2).astype(np.complex64), floats(2), 0, 1), TypeError, "x holds complex64"),
        ((lambda *xs: None, 1, 1, floats(2)), TypeError, "any number of arguments"),
        (("persistent", None, None), NotImplementedError, "by instructions that the simulator lacks"),
    ],
)
def test_what_cannot_be_traced(arguments, error, complaint):
    with pytest.raises(error, match=complaint):
        trace(*arguments)


@simulator
def test_an_unknown_configuration_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="config is '1x1'; expected one of 128x128x8"):
        trace("vectorized", None, None, 1.0, floats(2, 2), floats(2, 2), 0.0, floats(2, 2), config="1x1")


@simulator
def test_arrays_by_name():
    found = trace(copy_by, 1, 32, floats(64), floats(64), 0, 1)
    assert found.array("x").shape == (64,)
    with pytest.raises(ValueError, match="has no array 'z'; it has x, y"):
        found.array("z")
    untouched = trace(copy_by, 1, 32, floats(64), floats(64), 0, 1, blocks=[])
    with pytest.raises(ValueError, match="never touches x"):
        untouched.array("x")


@simulator
def test_a_kernel_without_source_is_refused():
    names = {"cuda": cuda}
    exec("def hidden(x):\n    for i in range(2):\n        x[i] = 1\n", names)
    with pytest.raises(ValueError, match="source of hidden"):
        trace(names["hidden"], 1, 1, floats(4))


@pytest.mark.skipif(SIMULATOR, reason="the simulator can")
def test_tracing_needs_the_simulator():
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        trace("naive", None, None, 1.0, floats(2, 2), floats(2, 2), 0.0, floats(2, 2))


@pytest.mark.parametrize("view", [np.s_[:, :], np.s_[::-1, :], np.s_[1:, ::-2], np.s_[:, 1:2]])
def test_indices_of_offsets(view):
    whole = np.zeros((5, 8), np.float32)
    x = whole[view]
    array = TracedArray("x", "global", x.shape, x.strides, 4, 0, x.dtype)
    places = list(np.ndindex(x.shape))
    offsets = np.array([i * x.strides[0] + j * x.strides[1] for i, j in places])
    assert [tuple(place) for place in array.indices(offsets).tolist()] == places
