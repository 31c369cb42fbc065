"""Launch a product as chosen."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.product import Product
from ..runtime.bound_product import NoRoomForMaps
from ..runtime.device import device_properties
from ..runtime.launch import Launched, launch_product
from ..runtime.matrix import Matrix, Vector
from ..runtime.workspace import Workspace
from . import heuristics
from .heuristics import Choice, Problem
from .precision import tensor_stage


def decomposed(wanted: Problem) -> Choice:
    """Return the choice for a problem whose operands are decomposed, even if they could be read as they are."""
    stage = tensor_stage(wanted.cc)
    assert stage is not None, "the precision was checked"
    return heuristics.named(stage.name, wanted._replace(tma="", a_narrow=False, b_narrow=False))


def launch_choice(
    product: Product,
    choice: Choice,
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    stream: int,
    vectors: Sequence[Vector] = (),
    workspace: Workspace | None = None,
) -> list[Launched]:
    """Enqueue a product as chosen; return its parts, see `runtime.launch.launch_product`.

    If the device has no room for another tensor map, the operands are decomposed.
    """
    operands = alpha, a, b, beta, c
    try:
        return launch_product(product, choice.selected, *operands, stream, vectors, workspace)
    except NoRoomForMaps:  # nothing was launched
        choice = decomposed(heuristics.problem(product, device_properties(c.device), choice.precision))
        return launch_product(product, choice.selected, *operands, stream, vectors, workspace)
