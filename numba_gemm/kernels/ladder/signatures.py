"""Numba types of the parameters of the ladder's kernels."""

from __future__ import annotations

from typing import Any

from .stage import ANY, Variant


def signature(variant: int | Variant) -> tuple[Any, ...]:
    """Return the Numba types of a kernel's parameters."""
    from ...device.matrix import kernel_signature, variant_signature

    return variant_signature(variant) if isinstance(variant, Variant) else kernel_signature(variant != ANY)


def plain_signature(fit: int) -> tuple[Any, ...]:
    """Return the Numba types of the parameters of a stage that is `LadderStage.plain`."""
    from ...device.matrix import kernel_signature

    return kernel_signature(fit != ANY, partition=True)
