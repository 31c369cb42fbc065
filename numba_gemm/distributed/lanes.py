"""The two streams of a distributed product: products on the current one, communication on a second one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["Lanes", "second_stream"]


@cache
def second_stream(device: torch.device) -> Any:
    """Return the second stream of a GPU, None for a CPU.

    There is one per GPU, since PyTorch keeps freed memory apart for each stream, and since communicators of NCCL expect
    an order of their operations.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class Lanes:
    """Two streams of a device and events between them; without streams on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._products = self._line = None
        if device.type == "cuda":
            self._products, self._line = torch.cuda.current_stream(device), second_stream(device)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Order the second stream after what the current one has so far, and the current one after the second."""
        if self._line is None or self._products is None:
            yield
            return
        self._line.wait_stream(self._products)
        try:
            yield
        finally:
            self._products.wait_stream(self._line)

    def multiply(self, action: Callable[[], None]) -> None:
        """Send work to the current stream."""
        action()

    def communicate(self, action: Callable[[], None]) -> None:
        """Send work to the second stream."""
        with torch.cuda.stream(self._line):
            action()

    def after_products(self) -> Any:
        """Return an event after all products so far."""
        return None if self._products is None else self._products.record_event()

    def after_line(self) -> Any:
        """Return an event after all communication so far."""
        return None if self._line is None else self._line.record_event()

    def record_products(self, event: Any) -> None:
        """Record an event after all products so far."""
        if event is not None:
            event.record(self._products)

    def record_line(self, event: Any) -> None:
        """Record an event after all communication so far."""
        if event is not None:
            event.record(self._line)

    def let_products_wait(self, event: Any) -> None:
        """Let products that are sent from now on wait for an event."""
        if event is not None and self._products is not None:
            self._products.wait_event(event)

    def let_line_wait(self, event: Any) -> None:
        """Let communication that is sent from now on wait for an event."""
        if event is not None and self._line is not None:
            self._line.wait_event(event)

    def finish(self) -> None:
        """Wait on the host for all work so far."""
        if self._products is not None and self._line is not None:
            self._products.synchronize()
            self._line.synchronize()
