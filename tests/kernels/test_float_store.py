"""Stores of single floats by a warp whose lanes exchange sums."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32

from numba_gemm.kernels.tensor_core.float_store import float_store
from numba_gemm.simulator import scheduler

pytestmark = pytest.mark.simulator

LANES = 32
ACROSS = 8  # groups of eight columns: those of two exchanges
GUARD = np.float32(-77.25)
# How far below it the rows of a lane's other sums, and of the lanes 4, 8 and 16 further on, are: of `persistent` and of
# `tf32_tma`, whose warp has rows 0 to 7 and 16 to 23 of a panel.
PLACES = {"persistent": (8, (1, 2, 4)), "tf32_tma": (1, (2, 16, 4))}


@pytest.fixture
def stores(monkeypatch):
    """Addresses of the stores of each lane, one after the other."""
    found = [[] for _ in range(LANES)]
    store1_if = float_store.__wrapped__.__globals__["global_store1_if"]

    def recorded(c, address, value, inside):
        found[cuda.threadIdx.x].append(address if inside else None)
        store1_if(c, address, value, inside)

    monkeypatch.setitem(float_store.__wrapped__.__globals__, "global_store1_if", recorded)
    return found


def first_row(below, quad):
    return sum(rows for bit, rows in enumerate(below) if quad >> bit & 1)


def written(places, c, together, product, alpha=2.0):
    """Write the product's elements of a warp's tile to C."""
    down, below = PLACES[places]
    store = float_store.__wrapped__(down, below, ACROSS, 1, together)

    def kernel():
        quad, member = divmod(cuda.laneid, 4)
        row = first_row(below, quad)
        sums = np.empty((ACROSS, 4), np.float32)
        for j in range(ACROSS):
            for q in range(4):
                sums[j, q] = product[row + q // 2 * down, 8 * j + 2 * member + q % 2]
        store(c, row, 2 * member, float32(alpha), sums)

    scheduler.run(kernel, 1, LANES, ())


def rows_of(places):
    down, below = PLACES[places]
    return sorted(first_row(below, quad) + lower for quad in range(8) for lower in (0, down))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("rows", "cols"), [(24, 64), (24, 63), (17, 33), (5, 31), (1, 1), (20, 2)])
@pytest.mark.parametrize("places", PLACES)
def test_every_element_of_c_is_written(places, rows, cols, order, together, stores):
    product = np.random.default_rng(0).integers(-99, 99, (24, 8 * ACROSS)).astype(np.float32)
    whole = np.full((rows + 2, cols + 3), GUARD, np.float32, order=order)
    c = whole[1:-1, 1:-2]
    written(places, c, together, product)
    own = [row for row in rows_of(places) if row < rows]
    expected = np.full_like(whole, GUARD)
    expected[1:-1, 1:-2][own] = 2 * product[own, :cols]
    np.testing.assert_array_equal(whole, expected)
    count = sum(address is not None for addresses in stores for address in addresses)
    assert count == len(own) * cols, "each element is written once"


@pytest.mark.parametrize("places", PLACES)
def test_a_warp_writes_adjacent_elements(places, stores):
    c = np.zeros((24, 8 * ACROSS + 1), np.float32)[:, :-1]
    written(places, c, True, np.ones((24, 8 * ACROSS), np.float32))
    for addresses in zip(*stores, strict=True):
        assert sorted(addresses) == list(range(min(addresses), min(addresses) + 4 * LANES, 4))


def test_where_columns_are_contiguous_nothing_is_exchanged(stores):
    """Eight lanes then have adjacent elements, as they are."""
    c = np.zeros((24, 8 * ACROSS), np.float32, order="F")
    written("persistent", c, True, np.ones((24, 8 * ACROSS), np.float32))
    for addresses in zip(*stores, strict=True):
        first = min(addresses)
        assert sum(first <= address < first + 32 for address in addresses) == 8
