"""Errors of distributed products."""

from __future__ import annotations

__all__ = ["OthersFailed"]


class OthersFailed(RuntimeError):
    """Another rank has failed, and all ranks know."""
