"""Run a product: check it, choose a kernel, launch, and remember the call for the next one like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import arrays
from ..arrays import Known, Seen
from ..runtime import launch
from ..runtime.launch import Extra, Matrix
from ..runtime.workspace import Workspace
from . import heuristics, split_products
from .heuristics import Choice
from .request import Pick, Request, checked
from .split_products import IEEE

seen: Seen = {}  # calls of `tiled_sgemm`


def forget() -> None:
    """Let the next call of each kind be checked in full, and chosen for, again."""
    seen.clear()


def checked_product(
    a: Any,
    b: Any,
    out: Any,
    alpha: float,
    beta: float,
    stream: Any,
    *,
    stage: str,
    seen: Seen,
    precision: str = IEEE,
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    home: int | None = None,
    picking: Callable[[Request], Pick] | None = None,
    workspace: Workspace | None = None,
) -> Any:
    """Check everything, launch, and remember the call.

    Parameters
    ----------
    a, b, out, alpha, beta, stream, stage, precision, epilogue, epilogue_args
        Those of `tiled_sgemm`.
    seen : dict
        Where to remember the call.
    home : int, optional
        The device for operands that lie on none. By default the current one.
    picking : callable, optional
        What chooses for a request, or raises. By default its stage.
    workspace : Workspace, optional
        As in `launch.bind`.
    """
    wanted = checked(a, b, out, alpha, beta, stream, stage, epilogue, epilogue_args, home, precision)
    pick, gpu = (wanted.pick if picking is None else picking(wanted)), launch.device_properties(wanted.device)
    left, launches, known = wanted.a, 0, None
    with left.kind.product(
        left,
        wanted.b,
        wanted.out,
        shape=wanted.shape,
        vectors=wanted.vectors,
        reads_out=wanted.beta != 0,
        device=wanted.device,
        stream=wanted.stream,
    ) as product:
        queue, place = product.stream.handle, product.c.pointer
        for x, y, z, extra in wanted.pieces(product.a, product.b, product.c, product.vectors):
            if wanted.mode is not None:
                split_products.launch(
                    wanted.mode, wanted.alpha, x, y, wanted.beta, z, stream=queue, workspace=workspace, extra=extra
                )
                continue
            choice = pick(heuristics.problem(x, y, z, extra, gpu))
            x, y, z, extra = arranged(choice, x, y, z, extra)
            run, share = (choice.stage, choice.config), choice.share
            memory = workspace if precision == IEEE else None  # which is for a mode's parts, and may be too small
            launch.launch(
                *run, wanted.alpha, x, y, wanted.beta, z, stream=queue, workspace=memory, share=share, extra=extra
            )
            launches += 1
    glance = arrays.glance_of(left.kind, a) if launches == 1 and wanted.k and epilogue is None else None
    if glance is not None and launch.takes_one_launch(*run, z.rows, z.cols, x.cols):
        known = Known(launch.bind(*run, x, y, z, workspace, share, extra), wanted.shape, choice.swapped)
        arrays.remember(seen, stage, glance, (a, b, out), place, known)
    return product.result if out is None else out


def arranged(choice: Choice, a: Matrix, b: Matrix, c: Matrix, extra: Extra) -> tuple[Matrix, Matrix, Matrix, Extra]:
    """The operands as a choice wants them."""
    return launch.exchanged(a, b, c, extra) if choice.swapped else (a, b, c, extra)
