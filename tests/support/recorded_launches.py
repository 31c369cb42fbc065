"""Launches that are recorded instead of compiled and enqueued, for tests without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from numba_gemm.kernels.step import Launches
from numba_gemm.runtime import device
from numba_gemm.runtime import launch as launching
from numba_gemm.runtime.workspace import Workspace


class Recorded:
    """Stand-in for `BoundProduct`.

    Attributes
    ----------
    launches : Launches
        Steps of the product.
    workspace : Workspace or None
        Memory that it was given.
    calls : list of tuple
        Arguments of each call: alpha, A, B, beta, C, stream and vectors.
    """

    def __init__(self, launches: Launches, workspace: Workspace | None) -> None:
        self.launches, self.workspace, self.calls = launches, workspace, []

    def enqueue(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    @property
    def kernel(self) -> Any:
        """The kernel that multiplies."""
        return self.launches.multiplication.kernel


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Record what `runtime.launch` enqueues, on any number of devices; return the list that grows."""
    made: list[Recorded] = []
    owners: dict[int, device.Device] = {}

    def loaded(
        self: device.Device, launches: Launches, workspace: Workspace | None = None, before_compiling: object = None
    ) -> Recorded:
        made.append(Recorded(launches, workspace))
        return made[-1]

    monkeypatch.setattr(device.Device, "loaded", loaded)
    monkeypatch.setattr(device, "device_properties", lambda ordinal: device.SIMULATED_DEVICE)
    monkeypatch.setattr(launching, "get_device", lambda ordinal: owners.setdefault(ordinal, device.Device(ordinal)))
    monkeypatch.setattr(launching, "SIMULATOR", False)
    return made
