"""Matrix multiplications within a streamed product: their launches, and the workspace that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..gemm import autotune_cache, heuristics, split_products
from ..gemm.heuristics import Choice, Problem
from ..gemm.product import arranged
from ..kernels.tensor_core import Mode
from ..runtime import launch
from ..runtime import workspace as workspaces
from ..runtime.launch import Matrix
from ..runtime.workspace import Workspace
from .blocking import ITEM, Shape

__all__ = ["Products"]


class Products:
    """Launches of matrix multiplications with dense operands on one device.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    mode : Mode or None
        Mode of the tensor cores; None for float32 arithmetic.
    a_by_columns, b_by_columns : bool
        Whether panels of A and B are stored by columns on the device.
    """

    def __init__(self, device: int, mode: Mode | None, a_by_columns: bool, b_by_columns: bool) -> None:
        self.device, self.mode = device, mode
        self._by_columns = a_by_columns, b_by_columns
        self._chosen: dict[Problem, Choice] = {}
        self._needs: dict[Shape, tuple[int, int]] = {}

    @cached_property
    def _gpu(self) -> launch.DeviceProperties:
        return launch.device_properties(self.device)

    def operands(
        self, shape: Shape, places: Sequence[tuple[int, Any]] = ((0, None),) * 3
    ) -> tuple[Matrix, Matrix, Matrix]:
        """Return A, B and C of a product, at addresses and with the objects that keep them alive."""
        (m, n, k), (a_by_columns, b_by_columns) = shape[:3], self._by_columns
        a_strides = (ITEM, ITEM * shape.block_rows) if a_by_columns else (ITEM * k, ITEM)
        b_strides = (ITEM, ITEM * k) if b_by_columns else (ITEM * n, ITEM)
        (a, a_owner), (b, b_owner), (c, c_owner) = places
        return (
            Matrix(a, m, k, *a_strides, self.device, a_owner),
            Matrix(b, k, n, *b_strides, self.device, b_owner),
            Matrix(c, m, n, ITEM * shape.pitch, ITEM, self.device, c_owner),
        )

    def needs(self, shape: Shape) -> tuple[int, int]:
        """Bytes and counters of the workspace that a product needs."""
        found = self._needs.get(shape)
        if found is None:
            found = self._needs[shape] = self._counted(*self.operands(shape))
        return found

    def _counted(self, a: Matrix, b: Matrix, c: Matrix) -> tuple[int, int]:
        if self.mode is not None:
            stage = split_products.stage_on(self.device)
            division = split_products.divide(self.mode, c.rows, c.cols, a.cols, self._gpu.sm_count, stage=stage)
            return division.workspace_bytes, 0
        choice = self._choice(a, b, c)
        a, b, c, _ = arranged(choice, a, b, c, launch.PLAIN)
        schedule = launch.schedule(choice.stage, choice.config, a, b, c, choice.share)[1]
        return (0, 0) if schedule is None else (schedule.workspace_bytes, schedule.counters)

    def workspace_bytes(self, shapes: set[Shape]) -> int:
        """Bytes of a workspace that serves products of all these shapes, including its counters."""
        made = self.workspace(0, shapes)
        return workspaces.total_bytes(made.size, made.counters)

    def _choice(self, a: Matrix, b: Matrix, c: Matrix) -> Choice:
        """Return the stage, configuration and share for operands like these; the choice is made once."""
        wanted = heuristics.problem(a, b, c, launch.PLAIN, self._gpu)
        found = self._chosen.get(wanted)
        if found is None:
            found = autotune_cache.choose(self.device, wanted)
            if found.share is None and found.stage.schedule is not None:
                x, y, z, _ = arranged(found, a, b, c, launch.PLAIN)
                found = replace(found, share=launch.share_of(found.stage, found.config, x, y, z))
            self._chosen[wanted] = found
        return found

    def workspace(self, pointer: int, shapes: set[Shape]) -> Workspace:
        """Return a workspace at an address that serves products of all these shapes."""
        needs = [self.needs(shape) for shape in shapes]
        return Workspace(pointer, max(size for size, _ in needs), max(counters for _, counters in needs))

    def seconds(self, shape: Shape) -> float:
        """Predict the seconds of a product by the models that choose its kernel."""
        a, b, c = self.operands(shape)
        if self.mode is None:
            wanted = heuristics.problem(a, b, c, launch.PLAIN, self._gpu)
            return heuristics.choose(wanted).clocks / self._gpu.clock_hz
        return split_products.expected_seconds(self.mode, *shape[:3], self._gpu.sm_count)

    def enqueue(
        self, alpha: float, a: Matrix, b: Matrix, beta: float, c: Matrix, stream: int, workspace: Workspace | None
    ) -> None:
        """Launch ``C = alpha * A @ B + beta * C``; products that share a workspace must follow each other."""
        if self.mode is not None:
            split_products.launch(self.mode, alpha, a, b, beta, c, stream=stream, workspace=workspace)
            return
        choice = self._choice(a, b, c)
        a, b, c, extra = arranged(choice, a, b, c, launch.PLAIN)
        run, share = (choice.stage, choice.config), choice.share
        launch.launch(*run, alpha, a, b, beta, c, stream=stream, workspace=workspace, share=share, extra=extra)
