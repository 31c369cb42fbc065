"""Streamed products of small matrices in many blocks: limits, layouts, delays, and products to compare with."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from numba_gemm import streaming, tiled_sgemm
from numba_gemm.streaming import Blocking, blocking, pipeline, preparation

BLOCKS = {
    "EDGE": 8,
    "SMALLEST_EDGE": 8,
    "THINNEST": 4,
    "THIN_START": 4,
    "DEEPEST": 16,
    "GRANULARITY": 256,
    "WHOLE_ROWS": 16,
}
BUFFERS = {"BUFFER_ELEMENTS": 100, "BUFFERS_COPIED": 1}
LAYOUTS = {
    "by rows": lambda x: x,
    "by columns": lambda x: np.asfortranarray(x),
    "every second column": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "rows reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "a slice": lambda x: np.pad(x, 3)[3:-3, 3:-3],
}

rng = np.random.default_rng(5)


def integers(*shape: int) -> np.ndarray:
    """Return small integers; sums of their products are exact in float32."""
    return rng.integers(-4, 5, shape).astype(np.float32)


@contextlib.contextmanager
def tiny_blocks() -> Iterator[None]:
    """Make blocks, panels, strips and buffers hold a few elements, so that small products have many of each."""
    with (
        mock.patch.multiple(blocking, **BLOCKS),
        mock.patch.multiple(pipeline, **BUFFERS),
        mock.patch.object(preparation, "host_threads", return_value=(2, 2)),
    ):
        yield


def least_memory(a: Any, b: Any, **options: Any) -> int:
    """Return the smallest `memory_limit` that a product takes, as its error message names it."""
    with pytest.raises(ValueError, match="expected at least") as caught:
        streaming.blocking_of(a, b, memory_limit=1, **options)
    found = re.search(r"at least ([\d,]+)", str(caught.value))
    assert found
    return int(found[1].replace(",", ""))


class Slow:
    """Random delay before each piece of a queue's work; no result may depend on it."""

    def __init__(self, seed: int, scale: float = 0.004) -> None:
        self._random, self._scale = random.Random(seed), scale

    def __get__(self, instance: Any, owner: Any) -> float:
        return self._scale * self._random.random()


def multiplied(x: Any, y: Any, beta: float, z: Any, alpha: float) -> None:
    """Replace the products by NumPy's, exact for integers, in tests of copies and their order."""
    np.copyto(z, np.float32(alpha) * (x @ y) + (np.float32(beta) * z if beta else np.float32(0)))


def threads_of_runs() -> list[threading.Thread]:
    """Return the threads of streamed products that have not ended."""
    names = ("bring", "take", "to-device", "to-host", "queue", "streamed_sgemm")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


def piece_by_piece(a: np.ndarray, b: np.ndarray, division: Blocking, precision: str) -> np.ndarray:
    """Compute the products of a division by `tiled_sgemm` on the current GPU, from operands that lie as given."""
    from numba import cuda

    orders = ["C" if array.flags.c_contiguous else "F" for array in (a, b)]
    expected = np.empty((division.m, division.n), np.float32)
    for block in range(division.count):
        rows, cols = division.block(block)
        whole = cuda.device_array((division.rows, division.cols), np.float32)
        c = whole[: rows.extent, : cols.extent]
        for piece in division.all_pieces():
            if piece.block != block:
                continue
            x = cuda.to_device(np.copy(a[rows.slice, piece.inner.slice], order=orders[0]))
            y = cuda.to_device(np.copy(b[piece.inner.slice, cols.slice], order=orders[1]))
            own = slice(piece.rows.begin - rows.begin, piece.rows.end - rows.begin)
            tiled_sgemm(x[own], y, out=c[own], beta=0.0 if piece.first else 1.0, precision=precision)
        expected[rows.slice, cols.slice] = whole.copy_to_host()[: rows.extent, : cols.extent]
    return expected
