"""Description of a product's launches, as `explain` returns it."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Copies
from ..kernels.product import FLOAT32
from .precision import IEEE

__all__ = ["Explanation"]


@dataclass(frozen=True)
class Explanation:
    """Description of a call of `tiled_sgemm`; if the product is divided into parts, of the first part.

    Attributes
    ----------
    stage, config : str
        Names of the stage that would run and its configuration; empty if there is nothing to compute.
    precision : str
        Precision that the product is computed in: for "fp32_auto" the one that it stands for, and for some products
        "bf16x6" or "ieee" in place of a less accurate one.
    tile : tuple of int
        Rows and columns of a block tile of C, and terms of the sums that a block takes at a time.
    blocks : int
        Blocks of the multiplication's launch; of the second one, if one computes whole tiles and one divided ones.
    whole_tiles : int
        Tiles of C that one block each computes.
    split : int
        Largest number of blocks that share a tile; 1 if none is shared.
    a_access, b_access : str
        Access by which tiles of A and of B are loaded: one of `numba_gemm.device.tile_loader.ACCESSES`; "whole",
        "aligned" or "any" in stages without a schedule. On tensor cores "decomposed", "prepared" or "tensor map", or
        the access by which a stage reads the operand itself. If the transpose is computed, they refer to its operands.
    c_vectors : bool
        True if C is written in vectors of 128 bits.
    swapped : bool
        True if the transpose is computed, ``C.T = B.T @ A.T``.
    copies : Copies
        Bytes copied for NumPy arrays, `to_device`, `to_host` and `on_host`; 0 for arrays in device memory.
    workspace_bytes : int
        Device memory that the launches need beside the operands.
    launches : int
        Number of kernel launches.
    microseconds : float or None
        Expected duration of all launches together, without copies; None where the model has no expectation.
    reason : str
        Reason for the choice.
    dtypes : tuple of str
        Data types of A and B.
    converted : str
        Names of the operands that the first launch copies to float32, in the workspace: "A", "B", "AB" or empty.
    copies_c : bool
        True if the argument `c` is copied to the result before the launches.
    """

    stage: str
    config: str
    precision: str
    tile: tuple[int, int, int]
    blocks: int
    whole_tiles: int
    split: int
    a_access: str
    b_access: str
    c_vectors: bool
    swapped: bool
    copies: Copies
    workspace_bytes: int
    launches: int
    microseconds: float | None
    reason: str
    dtypes: tuple[str, str] = (FLOAT32, FLOAT32)
    converted: str = ""
    copies_c: bool = False

    def __str__(self) -> str:
        if not self.launches:
            return f"Nothing is launched: {self.reason}."
        rows, cols, terms = self.tile
        precision = "" if self.precision == IEEE else f" and precision {self.precision}"
        sentences = [
            f"Stage {self.stage} in configuration {self.config}{precision}, blocks: {self.blocks}, tiles of C: "
            f"{rows}x{cols}, {terms} terms of the sums at a time",
            f"Up to {self.split} blocks share a tile, in a workspace of {self.workspace_bytes:,} bytes"
            if self.split > 1
            else "One block computes each tile",
            *([f"{self.whole_tiles} tiles have one block each"] if self.split > 1 and self.whole_tiles else []),
            f"{'B as A' if self.swapped else 'A'} is loaded with access {self.a_access}, "
            f"{'A as B' if self.swapped else 'B'} with access {self.b_access}, "
            f"and C is written {'in vectors' if self.c_vectors else 'element by element'}",
        ]
        if self.copies_c:
            sentences.append("First c is copied to the result")
        if converted := [f"{name} from {dtype}" for name, dtype in zip("AB", self.dtypes) if name in self.converted]:
            sentences.append(f"The first launch converts {' and '.join(converted)} to {FLOAT32}")
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
