"""Launches of a choice: without room for tensor maps, operands are decomposed."""

from __future__ import annotations

from support.recorded_launches import Recorded, record_launches

from numba_gemm.gemm import heuristics, precision
from numba_gemm.gemm.launch_choice import launch_choice
from numba_gemm.kernels.tensor_core import TENSOR_STAGES
from numba_gemm.runtime.bound_product import NoRoomForMaps
from numba_gemm.runtime.device import SIMULATED_DEVICE
from numba_gemm.runtime.launch import product_of
from numba_gemm.runtime.matrix import Matrix

SQUARE = Matrix(1 << 20, 16, 16, 64, 4, 0, None)


def test_operands_are_decomposed_if_there_is_no_room_for_tensor_maps(monkeypatch):
    launched = record_launches(monkeypatch)
    monkeypatch.setattr(precision, "SIMULATOR", False)
    monkeypatch.setattr("numba_gemm.gemm.launch_choice.device_properties", lambda ordinal: SIMULATED_DEVICE)
    product = product_of(SQUARE, SQUARE, SQUARE)
    choice = heuristics.named("tf32_tma", heuristics.problem(product, SIMULATED_DEVICE, "tf32"))

    def calls():
        launched.clear()
        done = launch_choice(product, choice, 1.0, SQUARE, SQUARE, 0.0, SQUARE, 0)
        assert [bound for bound, *_ in done] == [one for one in launched if one.calls]
        return [one.kernel.build for one in launched if one.calls]

    assert calls() == [TENSOR_STAGES["tf32_tma"].build]

    def call(self, *arguments):
        if self.launches.maps:
            raise NoRoomForMaps
        self.calls.append(arguments)

    monkeypatch.setattr(Recorded, "enqueue", call)
    assert calls() == [TENSOR_STAGES["persistent"].build]
