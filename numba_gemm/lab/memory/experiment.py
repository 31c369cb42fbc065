"""Interface of an experiment, and the list of experiments."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NAMES", "Experiment", "Unavailable", "load"]

NAMES = (
    "transfers",
    "overlap",
    "zero_copy",
    "unified_addressing",
    "memory_spaces",
    "carve_out",
    "misaligned_copy",
    "strided_copy",
    "l2_persistence",
    "bank_conflicts",
    "narrow_product",
    "product_with_transpose",
    "barriers",
)
"""Modules of the experiments, in the order of the guide's sections."""

PREDICTED = "predicted"


class Unavailable(RuntimeError):
    """An experiment cannot run on this machine; the message says what it lacks."""


@dataclass(frozen=True)
class Experiment:
    """An experiment: how to run it, to plot it, and to interpret its result.

    Attributes
    ----------
    name : str
        Name of its module and of its function.
    section : str
        Section of the guide's memory chapter, such as "9.2.1.3".
    run : callable
        Returns a DataFrame with one row per measurement. Column names contain units, and those that begin with
        ``predicted`` hold predictions. All parameters have defaults, those of the recorded run.
    plot : callable
        Plots such a DataFrame, fresh or read back from CSV, into an empty figure.
    claims : callable
        Maps sentences about the results to booleans: True if such a DataFrame confirms the sentence.
    small : mapping
        Parameters for which the simulator takes seconds. Times mean nothing there.
    unavailable : str
        Reason why the simulator cannot run it; empty if it can.
    kernels : mapping
        Kernels by name, with their parameters' types such as "float32[::1], int64", for compilation without a GPU.
    """

    name: str
    section: str
    run: Callable[..., pd.DataFrame]
    plot: Callable[[pd.DataFrame, Figure], None]
    claims: Callable[[pd.DataFrame], dict[str, bool]]
    small: Mapping[str, Any] = field(default_factory=dict)
    unavailable: str = ""
    kernels: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def lesson(self) -> str:
        """First line of the module's docstring."""
        return (inspect.getdoc(inspect.getmodule(self.run)) or "").partition("\n")[0]


def load(name: str) -> Experiment:
    """Return an experiment by its name.

    Raises
    ------
    ValueError
        if there is no experiment of that name.
    """
    if name not in NAMES:
        raise ValueError(f"there is no experiment {name!r}; expected one of: {', '.join(NAMES)}")
    experiment = importlib.import_module(f".{name}", __package__).EXPERIMENT
    assert isinstance(experiment, Experiment)
    return experiment
