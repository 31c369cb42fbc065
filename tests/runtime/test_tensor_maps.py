"""Tensor maps: made once, kept for good, limited in number."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from types import SimpleNamespace

import pytest

from numba_gemm.kernels.product import Layout
from numba_gemm.kernels.step import MapOf, Slot
from numba_gemm.runtime import tensor_maps
from numba_gemm.runtime.tensor_maps import TensorMaps

ADDRESS = 1 << 20
LAYOUT = Layout(8, 16, 64, 4)


def wanted(box=(8, 16), matrices=1, step=0, slot=Slot.A, layout=LAYOUT):
    return MapOf(slot, layout, box, matrices, step)


class Driver:
    """Stand-in for the driver: memory from 1 MiB on, numbered maps, and the record of what was copied where."""

    CUresult = tensor_maps.driver.CUresult

    def __init__(self, monkeypatch):
        self.allocated, self.encoded, self.written, self.copies = 0, [], {}, 0
        self.status = self.refusal = self.CUresult.CUDA_SUCCESS
        for name in (
            "cuMemAlloc",
            "cuTensorMapEncodeTiled",
            "cuStreamCreate",
            "cuMemcpyHtoDAsync",
            "cuStreamSynchronize",
        ):
            monkeypatch.setattr(tensor_maps.driver, name, getattr(self, name))
        monkeypatch.setattr(tensor_maps, "relaxed_capture", contextlib.nullcontext)
        monkeypatch.setattr(tensor_maps, "call", lambda function, *arguments: function(*arguments))

    def cuMemAlloc(self, size):
        self.allocated += 1
        return self.status, self.allocated << 20

    def cuTensorMapEncodeTiled(self, kind, rank, pointer, extents, strides, box, *rest):
        self.encoded.append((pointer, *([int(value) for value in values] for values in (extents, strides, box))))
        memory = (ctypes.c_uint64 * 16)(*[len(self.encoded)] * 16)
        return self.refusal, SimpleNamespace(getPtr=lambda: ctypes.addressof(memory))

    def cuStreamCreate(self, flags):
        return 7

    def cuMemcpyHtoDAsync(self, place, data, size, stream):
        assert (len(data), size % 128, stream) == (size, 0, 7)
        self.copies += 1
        for begin in range(0, size, 128):
            assert place + begin not in self.written, "none is overwritten"
            self.written[place + begin] = data[begin : begin + 128]

    def cuStreamSynchronize(self, stream):
        assert stream == 7


def place(maps, pointer, one):
    """Return the place of one map; None if there is none."""
    found = maps.places([(pointer, one)])
    return found and found[0]


@pytest.fixture
def fake(monkeypatch):
    return Driver(monkeypatch)


def test_a_map_is_made_once_and_stays(fake):
    maps = TensorMaps()
    first = place(maps, ADDRESS, wanted())
    assert place(maps, ADDRESS, wanted(matrices=5)) == first, "all five are one"
    assert place(maps, ADDRESS, wanted(slot=Slot.B)) == first, "a map serves either operand"
    others = {place(maps, ADDRESS + 64 * i, wanted()) for i in range(1, 600)}
    others |= {place(maps, ADDRESS, wanted(box=(16, 16))), place(maps, ADDRESS, wanted(matrices=5, step=64))}
    others.add(place(maps, ADDRESS, wanted(layout=Layout(8, 12, 64, 4))))
    assert (len(others), len(fake.encoded), fake.allocated) == (602, 603, 2)
    assert set(fake.written) == others | {first}


@pytest.mark.parametrize(
    ("one", "extents", "strides", "box"),
    [
        (wanted(), [16, 8, 1], [64, 64], [16, 8, 1]),
        (wanted(matrices=5), [16, 8, 1], [64, 64], [16, 8, 1]),
        (wanted(matrices=5, step=4096, box=(64, 32)), [16, 8, 5], [64, 4096], [32, 64, 1]),
        (wanted(layout=Layout(1, 17, 4, 4)), [17, 1, 1], [80, 80], [16, 8, 1]),
    ],
)
def test_what_a_map_describes(fake, one, extents, strides, box):
    """Columns before rows; the stride of a single row does not count."""
    place(TensorMaps(), ADDRESS, one)
    assert fake.encoded == [(ADDRESS, extents, strides, box)]


def test_maps_end_where_their_places_do(fake):
    maps = TensorMaps()
    fake.status = fake.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert place(maps, ADDRESS, wanted()) is None
    fake.status = fake.CUresult.CUDA_SUCCESS
    maps._pages = set(range(tensor_maps.MAX_MAPS // tensor_maps.PAGE))
    assert place(maps, ADDRESS, wanted()) is None
    assert not fake.written


def test_a_map_that_the_driver_refuses_takes_no_place(fake):
    maps = TensorMaps()
    fake.refusal = fake.CUresult.CUDA_ERROR_INVALID_VALUE
    assert place(maps, ADDRESS, wanted()) is None
    fake.refusal = fake.CUresult.CUDA_SUCCESS
    assert place(maps, ADDRESS, wanted()) is not None
    assert (fake.allocated, len(fake.written), len(maps._free)) == (1, 1, tensor_maps.PAGE - 1)


def test_maps_of_both_operands_are_written_together(fake, monkeypatch):
    maps, waits = TensorMaps(), []
    monkeypatch.setattr(tensor_maps.driver, "cuStreamSynchronize", waits.append)
    both = [(ADDRESS, wanted()), (ADDRESS + 64, wanted(slot=Slot.B))]
    found = maps.places(both)
    assert found == [place(maps, *one) for one in both]
    assert (len(set(found)), len(fake.encoded), len(waits)) == (2, 2, 1)
    assert maps.places([both[0], both[0]]) == [found[0]] * 2, "a product of a matrix with itself"


def test_maps_that_are_neighbours_are_copied_together(fake):
    """The first place of a page is handed out before the others."""
    maps, copies, found = TensorMaps(), [], []
    for turn in range(3):
        found += maps.places([(ADDRESS + 256 * turn, wanted()), (ADDRESS + 256 * turn + 64, wanted())])
        copies.append(fake.copies)
    assert copies == [2, 3, 4]
    assert [fake.written[place] for place in found] == [struct.pack("<Q", number) * 16 for number in range(1, 7)]


def test_no_copy_spans_two_pages(fake):
    maps, page = TensorMaps(), 1 << 20
    maps._pages, maps._free = {page}, [page, page - 128]
    assert maps.places([(ADDRESS, wanted()), (ADDRESS + 64, wanted())]) == [page - 128, page]
    assert fake.copies == 2


def test_if_one_of_two_maps_is_refused_neither_takes_a_place(fake):
    maps = TensorMaps()
    fake.refusal = fake.CUresult.CUDA_ERROR_INVALID_VALUE
    assert maps.places([(ADDRESS, wanted()), (ADDRESS + 64, wanted())]) is None
    assert (len(fake.written), len(maps._free), len(maps._places)) == (0, tensor_maps.PAGE, 0)
