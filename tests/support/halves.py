"""Operands of 16 bits for tests: BF16, which NumPy lacks, and the float32 numbers that operands stand for."""

from __future__ import annotations

import numpy as np

from numba_gemm.arrays.protocols import Dlpack

BFLOAT = 4  # DLPack's type code


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Return the BF16 bits of float32 numbers, cut off, in the same order of memory."""
    return (np.asarray(x).view(np.uint32) >> 16).astype(np.uint16)


class Bfloat16:
    """A BF16 array in host memory that is known by DLPack only; its bits are an array of uint16."""

    dtype = "bfloat16"

    def __init__(self, bits: np.ndarray) -> None:
        self.bits, self.shape = bits, bits.shape

    def __getitem__(self, index):
        return Bfloat16(self.bits[index])

    @property
    def T(self):
        return Bfloat16(self.bits.T)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        capsule = self.bits.__dlpack__(**options)
        tensor, _ = Dlpack._tensor(capsule)
        tensor.code = BFLOAT
        return capsule


def widened(x) -> np.ndarray:
    """Return the float32 numbers of an operand of any dtype."""
    if isinstance(x, Bfloat16):
        return (x.bits.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(x).astype(np.float32)
