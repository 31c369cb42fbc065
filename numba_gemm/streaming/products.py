"""Matrix multiplications within a streamed product: their launches, and the workspace that they need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..device.units import FLOAT32_BYTES
from ..gemm import autotune_cache, heuristics
from ..gemm.heuristics import Choice, Problem
from ..gemm.launch_choice import decomposed, launch_choice
from ..gemm.precision import IEEE
from ..gemm.tensor_heuristics import expected_seconds
from ..kernels.product import Product
from ..runtime import workspace as workspaces
from ..runtime.device import DeviceProperties, get_device
from ..runtime.launch import product_of
from ..runtime.matrix import Matrix
from ..runtime.workspace import Workspace
from .blocking import Shape

__all__ = ["Products"]


class Products:
    """Launches of matrix multiplications with dense operands on one device.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    precision : str
        Precision of the multiplications.
    a_by_columns, b_by_columns : bool
        True if panels of A and B are stored by columns on the device.
    """

    def __init__(self, device: int, precision: str, a_by_columns: bool, b_by_columns: bool) -> None:
        self.device, self.precision = device, precision
        self._by_columns = a_by_columns, b_by_columns
        self._chosen: dict[Problem, Choice] = {}
        self._needs: dict[Shape, tuple[int, int]] = {}

    @cached_property
    def _gpu(self) -> DeviceProperties:
        return get_device(self.device).properties

    def operands(
        self, shape: Shape, places: Sequence[tuple[int, Any]] = ((0, None),) * 3
    ) -> tuple[Matrix, Matrix, Matrix]:
        """Return A, B and C of a product, at addresses and with the objects that keep them alive."""
        (m, n, k), (a_by_columns, b_by_columns) = shape[:3], self._by_columns
        a_strides = (
            (FLOAT32_BYTES, FLOAT32_BYTES * shape.block_rows) if a_by_columns else (FLOAT32_BYTES * k, FLOAT32_BYTES)
        )
        b_strides = (FLOAT32_BYTES, FLOAT32_BYTES * k) if b_by_columns else (FLOAT32_BYTES * n, FLOAT32_BYTES)
        (a, a_owner), (b, b_owner), (c, c_owner) = places
        return (
            Matrix(a, m, k, *a_strides, self.device, a_owner),
            Matrix(b, k, n, *b_strides, self.device, b_owner),
            Matrix(c, m, n, FLOAT32_BYTES * shape.pitch, FLOAT32_BYTES, self.device, c_owner),
        )

    def needs(self, shape: Shape) -> tuple[int, int]:
        """Bytes and counters of the workspace that a product needs."""
        found = self._needs.get(shape)
        if found is None:
            found = self._needs[shape] = self._counted(*self.operands(shape))
        return found

    def _counted(self, a: Matrix, b: Matrix, c: Matrix) -> tuple[int, int]:
        product = product_of(a, b, c)
        choices = [self._choice(product)]
        if self.precision != IEEE:  # a device without room for another tensor map decomposes the operands
            choices.append(decomposed(heuristics.problem(product, self._gpu, self.precision)))
        found = []
        for choice in choices:
            oriented, gpu = choice.oriented(product), self._gpu.gpu
            found.append(choice.stage.launches(choice.config, oriented, choice.precision, choice.partition, gpu))
        return max(one.scratch_bytes for one in found), max(one.counters for one in found)

    def workspace_bytes(self, shapes: set[Shape]) -> int:
        """Bytes of a workspace that serves products of all these shapes, including its counters."""
        made = self.workspace(0, shapes)
        return workspaces.total_bytes(made.size, made.counters)

    def _choice(self, product: Product) -> Choice:
        """Return the kernel for a product; the choice is made once."""
        wanted = heuristics.problem(product, self._gpu, self.precision)
        found = self._chosen.get(wanted)
        if found is None:
            found = autotune_cache.choose(self.device, wanted)
            if found.partition is None and found.stage.takes_partition:
                partition = get_device(self.device).partition(found.stage, found.config, found.oriented(product))
                found = found._replace(partition=partition)
            self._chosen[wanted] = found
        return found

    def workspace(self, pointer: int, shapes: set[Shape]) -> Workspace:
        """Return a workspace at an address that serves products of all these shapes."""
        needs = [self.needs(shape) for shape in shapes]
        return Workspace(pointer, max(size for size, _ in needs), max(counters for _, counters in needs))

    def seconds(self, shape: Shape) -> float:
        """Predict the seconds of a product by the models that choose its kernel."""
        if self.precision != IEEE:
            return expected_seconds(self.precision, *shape[:3], self._gpu.sm_count)
        wanted = heuristics.problem(product_of(*self.operands(shape)), self._gpu)
        return heuristics.choose(wanted).clocks / self._gpu.clock_hz

    def enqueue(
        self, alpha: float, a: Matrix, b: Matrix, beta: float, c: Matrix, stream: int, workspace: Workspace | None
    ) -> None:
        """Launch ``C = alpha * A @ B + beta * C``; products that share a workspace must follow each other."""
        product = product_of(a, b, c)
        launch_choice(product, self._choice(product), alpha, a, b, beta, c, stream, workspace=workspace)
