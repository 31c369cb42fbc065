"""Preparation of a streamed product: its division, and each device with its memory, products and operands."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver

from ..gemm.request import Request
from ..runtime.driver import device_scope, failure
from ..simulator.switch import SIMULATOR
from . import blocking as dividing
from .blocking import Blocking
from .host import HostMatrix
from .pipeline import Run
from .prediction import Prediction, Rates, predict
from .products import Products
from .queues import Device, open_device
from .rates import measured_rates
from .sharing import Account, Deal, Done, Stop, at_once

__all__ = ["Ready", "divided", "prepared"]

SHARE_OF_MEMORY = 0.75  # of the device's memory, the most that a product takes by default
SHARE_OF_FREE = 0.9
MOST_THREADS = 8  # per direction and device; more do not copy faster

SIMULATED_MEMORY = 1 << 30


class _Member(NamedTuple):
    """Device that computes a share of a product, and what it computes it with."""

    gpu: Device
    memory: Any
    products: Products
    operands: tuple[HostMatrix, HostMatrix, HostMatrix]


@dataclass
class Ready:
    """Product whose device memory is allocated."""

    blocking: Blocking
    members: list[_Member]
    wanted: Request

    def expected(self, stop: Stop) -> Prediction:
        """Measure rates on all devices at once, and predict the product's time."""
        rates: dict[int, Rates] = {}
        together, threads = threading.Barrier(len(self.members)), host_threads(len(self.members))

        def measure(number: int, member: _Member) -> None:
            found = (member.gpu, member.memory, self.blocking.device_bytes, *member.operands, member.products)
            rates[number] = measured_rates(*found, threads, stop.event, together.wait)

        stop.follow(together.abort)
        try:
            at_once([partial(measure, *numbered) for numbered in enumerate(self.members)], stop)
        finally:
            stop.leave(together.abort)
        return predict(self.blocking, [rates[number] for number in sorted(rates)], self.wanted.beta != 0)

    def run(self, tell: Callable[[Done], object], stop: Stop) -> None:
        """Compute the product; `tell` is called with each part of C that is complete, one call at a time."""
        count, report = len(self.members), Account(self.blocking, tell)
        deal, threads = Deal(self.blocking.count, count), host_threads(count)
        runs = []
        for number, (gpu, memory, products, operands) in enumerate(self.members):
            found = (gpu, memory, self.blocking, products, operands, self.wanted.alpha, self.wanted.beta)
            runs.append(Run(*found, deal, number, report, threads, stop))
        at_once(runs, stop)


@contextmanager
def prepared(
    wanted: Request,
    devices: Sequence[int],
    operands: tuple[np.ndarray, np.ndarray, np.ndarray],
    memory_limit: int | None,
) -> Iterator[Ready]:
    """Divide a product and allocate its device memory until the context ends; C is not stored by columns.

    Devices for which there is no block are not used.
    """
    x, y, z = operands
    by_columns = HostMatrix.lies_by_columns(x), HostMatrix.lies_by_columns(y)
    blocking, products = divided(wanted, devices, z.shape, by_columns, memory_limit)
    with ExitStack() as opened:
        members = []
        for own in products[: blocking.count]:
            gpu = opened.enter_context(open_device(own.device))
            matrices = (HostMatrix(x, gpu), HostMatrix(y, gpu), HostMatrix(z, gpu))
            members.append(_Member(gpu, gpu.allocate(blocking.device_bytes), own, matrices))
        yield Ready(blocking, members, wanted)


def divided(
    wanted: Request,
    devices: Sequence[int],
    shape: tuple[int, ...],
    by_columns: tuple[bool, bool],
    memory_limit: int | None,
) -> tuple[Blocking, list[Products]]:
    """Return the division of a product and the products of each device.

    Parameters
    ----------
    wanted, devices
        Product, and ordinals of the devices.
    shape, by_columns
        Shape of C as it is computed, and whether A and B are stored by columns then.
    memory_limit : int, optional
        Bytes of memory of each device; by default, what the smallest one offers.
    """
    products = [Products(device, wanted.precision, *by_columns) for device in devices]
    return _divided(products, (*shape, wanted.k), memory_limit), products  # type: ignore[arg-type]


def _divided(products: Sequence[Products], extents: tuple[int, int, int], memory_limit: int | None) -> Blocking:
    """Return the division for a memory limit, or for the memory of the device that has least."""
    m, n, k = extents

    def needs(shapes: set[dividing.Shape]) -> int:
        return max(own.workspace_bytes(shapes) for own in products)

    limit, free, fullest = memory_limit, None, None
    if limit is None:
        found_free, totals = zip(*(_memory(own.device) for own in products))
        free, fullest = min(zip(found_free, (own.device for own in products)))
        limit = int(SHARE_OF_MEMORY * min(totals))
    found = dividing.choose(m, n, k, limit, needs, len(products))
    if found is not None and free is not None and found.device_bytes > SHARE_OF_FREE * free:
        found = dividing.choose(m, n, k, int(SHARE_OF_FREE * free), needs, len(products))
    if found is not None:
        return found
    least = dividing.smallest(m, n, k, needs, len(products))
    if memory_limit is None:
        where = "the device" if len(products) == 1 else f"device {fullest}"
        raise MemoryError(f"{where} has {free:,} bytes left; expected {least:,} at least; free some of its memory")
    raise ValueError(
        f"memory_limit is {memory_limit:,} bytes; expected at least {least:,} for M={m}, N={n} and K={k}; pass that, "
        "or more"
    )


def _memory(device: int) -> tuple[int, int]:
    """Bytes of a device's memory: free, and total."""
    if SIMULATOR:
        return SIMULATED_MEMORY, SIMULATED_MEMORY
    with device_scope(device):
        status, free, total = driver.cuMemGetInfo()
    if status != driver.CUresult.CUDA_SUCCESS:
        raise failure("cuMemGetInfo", status)
    return int(free), int(total)


def host_threads(devices: int) -> tuple[int, int]:
    """Numbers of host threads that copy to each of some devices, and from it."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, min(MOST_THREADS, able // (2 * devices)))
    return each, each
