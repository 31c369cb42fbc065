"""Lazy references to kernel factories: a factory's module, which imports Numba, is imported at its first call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Code"]


class Code:
    """A function of a module with kernels, which is imported at the first call.

    A record of a stage names its kernel's function in this way, so that launching a kernel that is compiled already
    needs no Numba. Two of them are equal if they name the same function.

    Parameters
    ----------
    module : str
        Name of the module within this folder, such as "ladder.stream_k".
    name : str
        Name of the function.
    """

    def __init__(self, module: str, name: str = "build") -> None:
        self.__module__, self.__name__, self.__qualname__ = f"{__package__}.{module}", name, name

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return getattr(import_module(self.__module__), self.__name__)(*arguments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Code) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.__module__, self.__name__))

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.__name__}"
