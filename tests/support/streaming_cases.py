"""Streamed products of small matrices in many blocks: limits that make them so."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from numba_gemm import streaming
from numba_gemm.streaming import blocking, pipeline

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


@contextlib.contextmanager
def tiny_blocks() -> Iterator[None]:
    """Make blocks, panels, strips and buffers hold a few elements, so that small products have many of each."""
    with (
        mock.patch.multiple(blocking, **BLOCKS),
        mock.patch.multiple(pipeline, **BUFFERS),
        mock.patch.object(streaming.streamed, "host_threads", return_value=(2, 2)),
    ):
        yield


def least_memory(a: Any, b: Any, **options: Any) -> int:
    """Return the smallest `memory_limit` that a product takes, as its error message names it."""
    with pytest.raises(ValueError, match="expected at least") as caught:
        streaming.blocking_of(a, b, memory_limit=1, **options)
    found = re.search(r"at least ([\d,]+)", str(caught.value))
    assert found
    return int(found[1].replace(",", ""))
