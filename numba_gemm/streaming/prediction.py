"""Prediction of a streamed product's time, copy by copy and product by product, from the rates of both.

Copies to the device, products, and copies to the host each run in order, concurrently with the other two. The
dependencies are those of the run itself. Nothing is fitted: the rates are those of single copies and products.

Several devices take blocks as in the run: the device that has room for its next block first takes it. Their copies have
the rates that were measured while all of them copied, throughout. So devices that share a link to the host share its
rate in the prediction, even at times when only one of them copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..device.units import FLOAT32_BYTES
from .blocking import Blocking, Shape

__all__ = ["Prediction", "Rates", "predict"]


@dataclass(frozen=True)
class Rates:
    """Rates of a device, while all devices of the product copy.

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
    """Seconds that a streamed product takes, and seconds that each of its parts takes by itself.

    Attributes
    ----------
    seconds : float
        Seconds of the product.
    to_device, products, to_host : float
        Seconds of the copies to the device, of the products, and of the copies to the host, of the device that ends
        last.
    to_device_rate : float
        Bytes per second that are copied to that device, while the others copy, too.
    devices : int
        Number of devices that compute.
    """

    seconds: float
    to_device: float
    products: float
    to_host: float
    to_device_rate: float
    devices: int = 1

    @property
    def bound_by(self) -> str:
        """Name of the part that takes longest."""
        parts = {"copies to the device": self.to_device, "products": self.products, "copies to the host": self.to_host}
        return max(parts, key=lambda name: parts[name])

    def __str__(self) -> str:
        where = "" if self.devices == 1 else f" on {self.devices} devices; of the device that ends last"
        return (
            f"{self.seconds:.3g} s predicted{where}: products {self.products:.3g} s, copies to the device "
            f"{self.to_device:.3g} s, to the host {self.to_host:.3g} s; bound by {self.bound_by}"
        )


class _Followed:
    """Copies and products of one device, followed in time."""

    def __init__(self, blocking: Blocking, rates: Rates, reads_out: bool) -> None:
        self._blocking, self._rates, self._reads_out = blocking, rates, reads_out
        self._up = self._now = self._down = 0.0  # when each of the three is free
        self.busy_up = self.busy = self.busy_down = 0.0
        self.bytes_up = 0
        self._used: list[float] = []  # when the products of each panel are done
        self._gone: dict[int, float] = {}  # when each strip of the previous block has left the device

    @property
    def room(self) -> float:
        """Time at which the device has room for the next panel."""
        slots = self._blocking.slots
        return max(self._up, self._used[-slots]) if len(self._used) >= slots else self._up

    @property
    def end(self) -> float:
        """Time at which everything is done."""
        return max(self._now, self._down)

    def _copy_up(self, size: int, rate: float) -> None:
        self._up, self.busy_up, self.bytes_up = self._up + size / rate, self.busy_up + size / rate, self.bytes_up + size

    def compute(self, block: int) -> None:
        """Follow the copies and products of a block."""
        blocking, rates, gone = self._blocking, self._rates, self._gone
        rows, cols = blocking.block(block)
        for panel, inner in enumerate(blocking.panels):
            self._up = self.room
            if panel == 0 and self._reads_out:
                for number, strip in enumerate(blocking.strips(block)):
                    self._up = max(self._up, gone.get(number, 0.0))
                    self._copy_up(FLOAT32_BYTES * strip.extent * cols.extent, rates.c_bytes)
            self._copy_up(FLOAT32_BYTES * inner.extent * rows.extent, rates.a_bytes)
            self._copy_up(FLOAT32_BYTES * inner.extent * cols.extent, rates.b_bytes)
            self._now = max(self._now, self._up)
            for piece in blocking.pieces(block, panel):
                if piece.first:
                    self._now = max([self._now, *(gone.get(number, 0.0) for number in piece.strips)])
                took = rates.seconds(blocking.shape(piece))
                self._now, self.busy = self._now + took, self.busy + took
                if piece.last:
                    took = FLOAT32_BYTES * piece.rows.extent * piece.cols.extent / rates.c_bytes
                    self._down = max(self._down, self._now) + took
                    self.busy_down += took
                    gone[piece.strips[0]] = self._down
            self._used.append(self._now)


def predict(blocking: Blocking, rates: Sequence[Rates], reads_out: bool = False) -> Prediction:
    """Predict the time of a streamed product by following the copies and products of each device, given its rates."""
    devices = [_Followed(blocking, one, reads_out) for one in rates]
    for block in range(blocking.count):
        min(devices, key=lambda one: one.room).compute(block)
    last = max(devices, key=lambda one: one.end)
    rate = last.bytes_up / last.busy_up
    return Prediction(last.end, last.busy_up, last.busy, last.busy_down, rate, len(devices))
