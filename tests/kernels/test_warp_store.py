"""Stores of C by a warp whose lanes exchange sums."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32

from numba_gemm.kernels.tensor_core.warp_store import SECTOR_BYTES, warp_store
from numba_gemm.simulator import scheduler

pytestmark = pytest.mark.simulator

LANES = 32
ACROSS = 8  # groups of eight columns: those of two stores of 32 elements
HEIGHT, WIDTH = 24, 8 * ACROSS  # rows that hold all of a warp's, and columns
GUARD = np.float32(-77.25)
# How far below it the rows of a lane's other sums, and of the lanes 4, 8 and 16 further on, are: of `persistent` and of
# `tf32_tma`, whose warp has rows 0 to 7 and 16 to 23 of a panel.
PLACES = {"persistent": (8, (1, 2, 4)), "tf32_tma": (1, (2, 16, 4))}
WAYS = {"fours": (True, True), "pairs": (True, False), "alone": (False, False)}  # whether `together`, and in `fours`


@pytest.fixture
def stores(monkeypatch):
    """Addresses and numbers of floats of the stores of each lane, one after the other; None where nothing is stored."""
    found, functions = [[] for _ in range(LANES)], warp_store.__wrapped__.__globals__
    store1_if, store = functions["global_store1_if"], functions["global_store"]

    def recorded1_if(c, address, value, inside):
        found[cuda.threadIdx.x].append((address, 1) if inside else None)
        store1_if(c, address, value, inside)

    def recorded(c, address, values):
        found[cuda.threadIdx.x].append((address, len(values)))
        store(c, address, values)

    monkeypatch.setitem(functions, "global_store1_if", recorded1_if)
    monkeypatch.setitem(functions, "global_store", recorded)
    return found


def first_row(below, quad):
    return sum(rows for bit, rows in enumerate(below) if quad >> bit & 1)


def rows_of(places):
    down, below = PLACES[places]
    return sorted(first_row(below, quad) + lower for quad in range(8) for lower in (0, down))


def written(places, c, way, product, beta=0.0):
    """Write twice the product's elements of a warp's tile, and C times beta, to C."""
    down, below = PLACES[places]
    store = warp_store.__wrapped__(down, below, ACROSS, 1, *WAYS[way])
    inside = c.shape[0] >= HEIGHT and c.shape[1] >= WIDTH

    def kernel():
        quad, member = divmod(cuda.laneid, 4)
        row = first_row(below, quad)
        sums = np.empty((ACROSS, 4), np.float32)
        for j in range(ACROSS):
            for q in range(4):
                sums[j, q] = product[row + q // 2 * down, 8 * j + 2 * member + q % 2]
        store(c, row, 2 * member, float32(2), sums, float32(beta), inside)

    scheduler.run(kernel, 1, LANES, ())


def at_sector(rows, cols, pitch, floats=0):
    """Return rows of C that begin `floats` floats behind a multiple of a sector's bytes, and `pitch` floats apart."""
    memory = np.full(rows * pitch + 2 * SECTOR_BYTES, GUARD, np.float32)
    start = -memory.ctypes.data % SECTOR_BYTES // 4 + floats
    return memory, memory[start : start + rows * pitch].reshape(rows, pitch)[:, :cols]


def bytes_of(stores_of_lanes):
    """Return the bytes that lanes write together, one after the other."""
    return sorted(byte for at, floats in stores_of_lanes for byte in range(at, at + 4 * floats))


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("rows", "cols"), [(24, 64), (24, 63), (17, 33), (5, 31), (1, 1), (20, 2)])
@pytest.mark.parametrize("places", PLACES)
def test_every_element_of_c_is_written(places, rows, cols, order, way, beta, stores):
    rng = np.random.default_rng(0)
    product, old = (rng.integers(-99, 99, shape).astype(np.float32) for shape in ((HEIGHT, WIDTH), (rows, cols)))
    whole = np.full((rows + 2, cols + 3), GUARD, np.float32, order=order)
    c = whole[1:-1, 1:-2]
    c[...] = old if beta else np.nan
    expected = whole.copy(order="K")
    own = [row for row in rows_of(places) if row < rows]
    expected[1:-1, 1:-2][own] = 2 * product[own, :cols] + (np.float32(beta) * old[own] if beta else 0)
    written(places, c, way, product, beta)
    np.testing.assert_array_equal(whole, expected)
    count = sum(one is not None for lane in stores for one in lane)
    assert count == len(own) * cols, "each element is written once"


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("places", PLACES)
def test_rows_that_begin_at_sectors_are_written_in_vectors(places, way, beta, stores):
    rng = np.random.default_rng(1)
    product, old = (rng.integers(-99, 99, (HEIGHT, WIDTH)).astype(np.float32) for _ in range(2))
    memory, c = at_sector(HEIGHT, WIDTH, WIDTH + 8)
    c[...] = old if beta else np.nan
    expected, own = memory.copy(), rows_of(places)
    start = (c.ctypes.data - memory.ctypes.data) // 4
    of_c = expected[start : start + HEIGHT * (WIDTH + 8)].reshape(HEIGHT, WIDTH + 8)[:, :WIDTH]
    of_c[own] = 2 * product[own] + (np.float32(beta) * old[own] if beta else 0)
    written(places, c, way, product, beta)
    np.testing.assert_array_equal(memory, expected)
    for lanes in zip(*stores, strict=True):
        found = bytes_of(lanes)
        piece = 2 * SECTOR_BYTES if way == "fours" else SECTOR_BYTES  # of each of eight rows, which an exchange doubles
        assert len(set(found)) == 8 * piece
        for i in range(0, len(found), piece):
            assert found[i] % SECTOR_BYTES == 0
            assert found[i + piece - 1] == found[i] + piece - 1


@pytest.mark.parametrize(("pitch", "floats"), [(WIDTH + 8, 4), (WIDTH + 8, 1), (WIDTH + 4, 0), (WIDTH + 1, 0)])
@pytest.mark.parametrize("way", ["fours", "pairs"])
@pytest.mark.parametrize("places", PLACES)
def test_otherwise_a_warp_writes_adjacent_elements(places, way, pitch, floats, stores):
    _, c = at_sector(HEIGHT, WIDTH, pitch, floats)
    written(places, c, way, np.ones((HEIGHT, WIDTH), np.float32))
    for lanes in zip(*stores, strict=True):
        found = bytes_of(lanes)
        assert found == list(range(found[0], found[0] + 4 * LANES))


@pytest.mark.parametrize("way", WAYS)
def test_where_columns_are_contiguous_nothing_is_exchanged(way, stores):
    """Eight lanes then have adjacent elements, as they are."""
    c = np.zeros((HEIGHT, WIDTH), np.float32, order="F")
    written("persistent", c, way, np.ones((HEIGHT, WIDTH), np.float32))
    for lanes in zip(*stores, strict=True):
        first = min(at for at, _ in lanes)
        assert sum(first <= at < first + SECTOR_BYTES for at, _ in lanes) == 8
