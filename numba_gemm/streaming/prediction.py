"""Prediction of a streamed product's time, copy by copy and product by product, from the rates of both.

Copies to the device, products, and copies to the host each run in order, concurrently with the other two. The
dependencies are those of the run itself. Nothing is fitted: the rates are those of single copies and products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..device.units import FLOAT32_BYTES
from .blocking import Blocking, Shape

__all__ = ["Prediction", "Rates", "predict"]


@dataclass(frozen=True)
class Rates:
    """Rates of a machine.

    Attributes
    ----------
    seconds : callable
        Returns the seconds of a product.
    a_bytes, b_bytes : float
        Bytes per second of A and of B from host memory to the device.
    c_bytes : float
        Bytes per second of C from the device to host memory.
    """

    seconds: Callable[[Shape], float]
    a_bytes: float
    b_bytes: float
    c_bytes: float


@dataclass(frozen=True)
class Prediction:
    """Seconds that a streamed product takes, and seconds that each of its parts takes by itself."""

    seconds: float
    to_device: float
    products: float
    to_host: float

    @property
    def bound_by(self) -> str:
        """Name of the part that takes longest."""
        parts = {"copies to the device": self.to_device, "products": self.products, "copies to the host": self.to_host}
        return max(parts, key=lambda name: parts[name])

    def __str__(self) -> str:
        return (
            f"{self.seconds:.3g} s predicted: products {self.products:.3g} s, copies to the device "
            f"{self.to_device:.3g} s, to the host {self.to_host:.3g} s; bound by {self.bound_by}"
        )


def predict(blocking: Blocking, rates: Rates, reads_out: bool = False) -> Prediction:
    """Predict the time of a streamed product by following its copies and products."""
    up = now = down = 0.0  # when each of the three is free
    busy_up = busy = busy_down = 0.0
    used: list[float] = []  # when the products of each panel are done
    gone: dict[int, float] = {}  # when each strip of the previous block has left the device
    for block in range(blocking.count):
        rows, cols = blocking.block(block)
        strips = blocking.strips(block)
        for panel, inner in enumerate(blocking.panels):
            if len(used) >= blocking.slots:
                up = max(up, used[-blocking.slots])
            if panel == 0 and reads_out:
                for number, strip in enumerate(strips):
                    took = FLOAT32_BYTES * strip.extent * cols.extent / rates.c_bytes
                    up = max(up, gone.get(number, 0.0)) + took
                    busy_up += took
            took = FLOAT32_BYTES * inner.extent * (rows.extent / rates.a_bytes + cols.extent / rates.b_bytes)
            up, busy_up = up + took, busy_up + took
            now = max(now, up)
            for piece in blocking.pieces(block, panel):
                if piece.first:
                    now = max([now, *(gone.get(number, 0.0) for number in piece.strips)])
                took = rates.seconds(blocking.shape(piece))
                now, busy = now + took, busy + took
                if piece.last:
                    took = FLOAT32_BYTES * piece.rows.extent * piece.cols.extent / rates.c_bytes
                    down = max(down, now) + took
                    busy_down += took
                    gone[piece.strips[0]] = down
            used.append(now)
    return Prediction(max(now, down), busy_up, busy, busy_down)
