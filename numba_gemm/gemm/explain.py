"""What `tiled_sgemm` would do for some operands, and why, without doing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from .. import arrays
from ..arrays import ITEM, ArrayKind, Copies, Operand
from ..device.partition import FIELDS
from ..kernels.ladder.stage import Form, Schedule
from ..runtime import launch
from ..runtime import workspace as workspaces
from . import heuristics
from .product import arranged
from .request import checked

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """What a call of `tiled_sgemm` would do; of several launches, what it says of one is the first one's.

    Attributes
    ----------
    stage, config : str
        Names of what would run; empty if there is nothing to compute.
    tile : tuple of int
        Rows and columns of a block's tile of C, and terms of the sums that it takes at a time.
    blocks : int
        Blocks of a launch.
    whole_tiles : int
        Tiles of C that are one block's each.
    split : int
        Most blocks that share a tile; 1 where none is shared.
    a_mode, b_mode : str
        How tiles of A and of B travel to shared memory: a mode of `numba_gemm.device.tile_loader`; in stages without a
        schedule, "aligned" or "any". They are A's and B's of the transpose if that is what is computed.
    c_vectors : bool
        Whether C is written four elements at a time.
    swapped : bool
        Whether the transpose is computed, as the transpose of B by that of A.
    copies : Copies
        Bytes copied for NumPy arrays, `to_device`, `to_host` and `on_host`; 0 for arrays in device memory.
    workspace_bytes : int
        Device memory that a launch needs beside the operands.
    launches : int
        Kernels launched, as far as one covers its product: beyond K = 2**30, or what a grid of a stage without a
        schedule reaches, there are more.
    microseconds : float or None
        What the selection expects of all launches together, without copies; None where it has no expectation.
    reason : str
        Why, in words.
    """

    stage: str
    config: str
    tile: tuple[int, int, int]
    blocks: int
    whole_tiles: int
    split: int
    a_mode: str
    b_mode: str
    c_vectors: bool
    swapped: bool
    copies: Copies
    workspace_bytes: int
    launches: int
    microseconds: float | None
    reason: str

    def __str__(self) -> str:
        if not self.launches:
            return f"Nothing is launched: {self.reason}."
        rows, cols, terms = self.tile
        sentences = [
            f"Stage {self.stage} in configuration {self.config}, blocks: {self.blocks}, tiles of C: {rows}x{cols}, "
            f"{terms} terms of the sums at a time",
            f"Up to {self.split} blocks share a tile, in a workspace of {self.workspace_bytes:,} bytes"
            if self.split > 1
            else "Every tile is one block's",
            f"{'B as A' if self.swapped else 'A'} is loaded in mode {self.a_mode}, {'A as B' if self.swapped else 'B'} "
            f"in mode {self.b_mode}, and C is written {'in vectors' if self.c_vectors else 'element by element'}",
        ]
        if self.launches > 1:
            sentences.append(f"There are {self.launches} launches")
        if self.copies != Copies():
            sentences.append(
                f"{self.copies.to_device:,} bytes are copied to the device, {self.copies.to_host:,} back, and "
                f"{self.copies.on_host:,} on the host"
            )
        if self.microseconds is not None:
            sentences.append(f"Expected: {self.microseconds:.1f} microseconds")
        return ". ".join([*sentences, f"Why: {self.reason}"]) + "."


def explain(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    stage: str = "auto",
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
) -> Explanation:
    """Tell what `tiled_sgemm` would do with these arguments; nothing is launched or copied.

    Parameters and errors are those of `tiled_sgemm`. A kernel may be compiled, where it depends on its registers how
    many blocks there will be.

    Returns
    -------
    Explanation
        Its text is a paragraph to read.
    """
    wanted = checked(a, b, out, alpha, beta, None, stage, epilogue, epilogue_args)
    kind, gpu = wanted.a.kind, launch.device_properties(wanted.device)
    strides = arrays.row_major(wanted.shape, ITEM)
    result = wanted.out or Operand("out", kind, None, "float32", wanted.shape, strides, 0, wanted.device)
    given = [wanted.a, wanted.b, *wanted.vectors]
    x, y, *vectors = (_described(kind.placed(one)) for one in given)
    z = _described(result if wanted.out is None else kind.placed(result))
    pieces = list(wanted.pieces(x, y, z, vectors))
    copies = kind.copies(given, result, reads_out=wanted.beta != 0)
    if not pieces:
        reason = f"the result, of shape {wanted.shape}, has no elements"
        return Explanation("", "", (0, 0, 0), 0, 0, 1, "", "", False, False, copies, 0, 0, 0.0, reason)

    choices = [wanted.pick(heuristics.problem(*piece, gpu)) for piece in pieces]
    choice, config = choices[0], choices[0].config
    operands = arranged(choice, *pieces[0])
    grid, schedule = launch.schedule(choice.stage, config, *operands[:3], choice.share, operands[3])
    variant = launch.variant_of(choice.stage, config, *operands)
    needed = (0, 0) if schedule is None else (schedule.workspace_bytes, schedule.counters)
    blocks = prod(grid)
    clocks = sum(one.clocks for one in choices) if all(one.clocks for one in choices) else None
    return Explanation(
        stage=choice.stage.name,
        config=config.name,
        tile=(config.BM, config.BN, config.BK),
        blocks=blocks,
        whole_tiles=blocks if schedule is None else dict(zip(FIELDS[2:], schedule.words))["whole"],
        split=1 if schedule is None else _split(schedule, blocks),
        a_mode=variant.a if isinstance(variant, Form) else "aligned" if variant else "any",
        b_mode=variant.b if isinstance(variant, Form) else "aligned" if variant else "any",
        c_vectors=variant.c_aligned if isinstance(variant, Form) else variant and choice.stage.vectorized,
        swapped=choice.swapped,
        copies=copies,
        workspace_bytes=workspaces.total_bytes(*needed),
        launches=len(pieces),
        microseconds=None if clocks is None else clocks / gpu.clock_hz * 1e6,
        reason=choice.reason,
    )


def _described(operand: Operand) -> Operand:
    """An operand without its array, which is neither read nor kept."""
    return replace(operand, kind=ArrayKind(), array=None)


def _split(schedule: Schedule, blocks: int) -> int:
    """Most blocks that have a piece of one tile of C."""
    words = dict(zip(FIELDS[2:], schedule.words))
    if not schedule.counters:
        return 1
    pieces = np.arange(blocks + 1, dtype=np.int64)
    begins = pieces * words["base"] + np.minimum(pieces, words["extra"])
    tiles = np.arange(schedule.counters + 1, dtype=np.int64) * words["k_tiles"]
    first, last = (np.searchsorted(begins, at, side="right") - 1 for at in (tiles[:-1], tiles[1:] - 1))
    return int((last - first).max()) + 1
