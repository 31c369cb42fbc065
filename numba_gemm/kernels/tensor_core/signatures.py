"""Numba types of the parameters of the tensor cores' kernels."""

from __future__ import annotations

from typing import Any

from ...simulator.switch import SIMULATOR
from .config import TensorVariant
from .decomposition import DecomposeVariant
from .fused_stage import FusedVariant
from .stage import AddPartialsVariant
from .tma_stage import TmaVariant

if not SIMULATOR:
    from numba.cuda import types

    from ...device.matrix import MatrixType

COMPLETE_WORDS = 7
ADD_PARTIALS_WORDS = 12
FUSED_STEPS = 3
TMA_STEPS = 6


def _steps_type(count: int) -> Any:
    return types.UniTuple(types.int64, count)


def vector_types(count: int) -> tuple[Any, ...]:
    """Return the Numba type of the epilogue's vectors, as a tuple of one type, or of none."""
    return (types.UniTuple(types.Array(types.float32, 1, "A"), count),) if count else ()


def decompose_signature(variant: DecomposeVariant) -> tuple[Any, ...]:
    """Return the Numba types of the decomposing kernel's parameters."""
    words, matrix = MatrixType(True), MatrixType(False)
    assert variant.precision is not None
    operand = (matrix, words, words) if variant.precision.scaled else (matrix, words)
    return (*operand, *operand, _steps_type(2 * len(operand)))


def row_maxima_signature(variant: DecomposeVariant) -> tuple[Any, ...]:
    """Return the Numba types of the parameters of the kernel that finds row maxima."""
    words, matrix = MatrixType(True), MatrixType(False)
    return (matrix, words, matrix, words, _steps_type(4))


def direct_signature(variant: TensorVariant) -> tuple[Any, ...]:
    """Return the Numba types of the parameters (alpha, a, b, beta, c) for operands that are not decomposed."""
    matrix = MatrixType(False)
    return (types.float32, matrix, matrix, types.float32, matrix)


def fused_signature(variant: FusedVariant) -> tuple[Any, ...]:
    """Return the Numba types of the parameters (alpha, a, b, beta, c, steps, vectors)."""
    matrix, vectors = MatrixType(False), types.UniTuple(types.Array(types.float32, 1, "A"), variant.vectors)
    return (types.float32, matrix, matrix, types.float32, matrix, _steps_type(FUSED_STEPS), vectors)


def teaching_signature(variant: TensorVariant) -> tuple[Any, ...]:
    """Return the Numba types of the parameters (alpha, a, b, beta, c)."""
    words, matrix = MatrixType(True), MatrixType(False)
    return (types.float32, words, words, types.float32, matrix)


def complete_signature(variant: TensorVariant) -> tuple[Any, ...]:
    """Return the Numba types of the parameters (alpha, a, b, beta, c, x, y, steps, vectors)."""
    matrix = MatrixType(False)
    return (*teaching_signature(variant), matrix, matrix, _steps_type(COMPLETE_WORDS), *vector_types(variant.vectors))


def add_partials_signature(variant: AddPartialsVariant) -> tuple[Any, ...]:
    """Return the Numba types of the parameters (alpha, a, b, beta, c, x, y, partials, words, vectors)."""
    words, matrix = MatrixType(True), MatrixType(False)
    own = (types.float32, words, words, types.float32, matrix, matrix, matrix, words, _steps_type(ADD_PARTIALS_WORDS))
    return (*own, *vector_types(variant.vectors))


def tma_signature(variant: TmaVariant) -> tuple[Any, ...]:
    """Return the Numba types of the parameters (alpha, u_map, v_map, v_part, beta, c, k, steps, vectors)."""
    operands = (types.int64, types.int64, MatrixType(True))
    vectors = vector_types(variant.tensor_variant.vectors)
    return (types.float32, *operands, types.float32, MatrixType(False), types.int64, _steps_type(TMA_STEPS), *vectors)
