"""Rates at which this machine copies and multiplies, measured in milliseconds, as input of a prediction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..device.units import FLOAT32_BYTES
from .blocking import Part, divided
from .host import Flag, HostMatrix
from .pipeline import bring_in, ring_of, take_out
from .prediction import Rates
from .products import Products
from .queues import Device, Queue

__all__ = ["measured_rates"]

SAMPLE = 64 << 20  # elements (256 MB) copied per matrix; for C, of another array of its kind
WIDTH = 8192  # elements per row that are copied together, as for a panel of A


def measured_rates(
    device: Device,
    memory: Any,
    room: int,
    a: HostMatrix,
    b: HostMatrix,
    c: HostMatrix,
    products: Products,
    threads: tuple[int, int],
    stop: Flag,
    meet: Callable[[], object] = lambda: None,
) -> Rates:
    """Measure rates: copy some of A and B to the device, and some of it back.

    Parameters
    ----------
    device, memory, room
        Device and memory to copy to, and bytes of that memory.
    a, b, c : HostMatrix
        Operands; C is not touched.
    products : Products
        Predicts the seconds of products.
    threads, stop
        As for `pipeline.ring_of`, for copies in either direction.
    meet : callable
        Called before each copy that is timed; several devices wait for each other there, so that they copy at once.
    """
    queue = device.queue()
    with (
        device.scope(),
        ring_of(device, threads[0], "to-device", stop) as up,
        ring_of(device, threads[1], "to-host", stop) as down,
    ):

        def to_device(matrix: HostMatrix) -> float:
            parts = samples(matrix.lying.shape, room // FLOAT32_BYTES)
            return _rate(
                queue,
                parts,
                lambda rows, cols: bring_in(
                    queue, up, place(rows, cols), matrix.lying[rows.slice, cols.slice], matrix.direct
                ),
                meet,
            )

        def to_host(matrix: HostMatrix) -> float:
            parts = samples(matrix.lying.shape, room // FLOAT32_BYTES)
            shape = parts[0][0].extent, parts[0][1].extent
            target = device.pinned(shape[0] * shape[1]).reshape(shape) if matrix.direct else np.empty(shape, np.float32)
            return _rate(
                queue,
                parts,
                lambda rows, cols: take_out(
                    queue, down, target[: rows.extent, : cols.extent], place(rows, cols), matrix.direct
                ),
                meet,
            )

        def place(rows: Part, cols: Part) -> Any:
            return device.matrix(memory, 0, rows.extent, cols.extent)

        return Rates(products.seconds, to_device(a), to_device(b), to_host(c))


def samples(shape: tuple[int, ...], most: int) -> list[tuple[Part, Part]]:
    """Rows and columns of parts of a matrix, of at most `most` elements each and about `SAMPLE` together."""
    cols = min(shape[1], WIDTH, most)
    rows = min(shape[0], max(1, min(SAMPLE, most) // cols))
    across = divided(shape[1], cols)
    found = [(down, part) for down in divided(shape[0], rows) for part in across[: max(1, SAMPLE // cols)]]
    return found[: max(1, SAMPLE // (rows * cols))]


def _rate(
    queue: Queue,
    parts: list[tuple[Part, Part]],
    copy: Callable[[Part, Part], list[Any]],
    meet: Callable[[], object],
) -> float:
    """Return bytes per second of the second run, when the buffers have been allocated."""
    for _ in range(2):
        meet()
        begin = time.perf_counter()
        for job in [job for part in parts for job in copy(*part)]:
            job.result()
        queue.record().wait()
        took = time.perf_counter() - begin
    return FLOAT32_BYTES * sum(rows.extent * cols.extent for rows, cols in parts) / took
