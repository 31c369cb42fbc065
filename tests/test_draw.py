"""Pictures of traces: that they show what was recorded, and what cannot be drawn."""

from __future__ import annotations

import io

import numpy as np
import pytest

from numba_gemm.inspect import trace

pytestmark = pytest.mark.simulator
draw = pytest.importorskip("numba_gemm.inspect.draw")


@pytest.fixture(scope="module")
def found():
    a, c = np.ones((64, 64), np.float32), np.zeros((64, 64), np.float32)
    return trace("vectorized", None, None, 1.0, a, a.copy(), 0.0, c, config="test", blocks=[(0, 0, 0)])


def pixels(figure):
    from matplotlib.image import imread

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=60)
    file.seek(0)
    return imread(file)


def image_of(figure):
    return np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)


def test_who_stores_a_tile(found):
    figure = draw.thread_map(found, "a_tile", "store")
    values = image_of(figure)
    assert values.shape == (32, 8)
    assert values[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]  # vectors of four, neighbouring threads along a row
    assert len(np.unique(pixels(figure).reshape(-1, 4), axis=0)) > 32, "not blank"


def test_warps_are_outlined(found):
    a = np.ones((8, 64), np.float32)
    c = np.zeros((8, 64), np.float32)
    figure = draw.thread_map(
        trace("coalesced", None, None, 1.0, a[:, :8].copy(), a.copy(), 0.0, c), "c", "store", width=64
    )
    assert {line.get_color() for line in figure.axes[0].lines} == {"red"}


def test_reuse(found):
    values = image_of(draw.reuse_map(found, "b_tile"))
    assert values.shape == (8, 16)
    assert (values == 64).all()  # eight rows of threads, in eight k-tiles


def test_banks(found):
    table = found.requests
    row = int(table.index[(table["array"] == "b_tile") & (table["op"] == "load")][0])
    figure = draw.bank_map(found, row)
    assert f"{table.loc[row, 'wavefronts']} wavefronts" in figure.axes[0].get_title()
    assert image_of(figure).shape == (table.loc[row, "wavefronts"], 32)
    assert len(np.unique(pixels(figure).reshape(-1, 4), axis=0)) > 8


def test_what_cannot_be_drawn(found):
    with pytest.raises(ValueError, match="does not store b; what it does is load"):
        draw.thread_map(found, "b", "store")
    with pytest.raises(ValueError, match="has no array 'z'"):
        draw.reuse_map(found, "z")
    with pytest.raises(ValueError, match="expected a row of requests, from 0 to"):
        draw.bank_map(found, -1)
    with pytest.raises(ValueError, match="in global memory, which has no banks"):
        draw.bank_map(found, 0)
