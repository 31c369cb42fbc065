"""Description of an experiment, the parameters that it takes, and their options of a command line."""

from __future__ import annotations

import argparse
import functools
import inspect
import math
import re
import types
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from numba_gemm.lab.harness.command import MOST_SEED, UsageError
from numba_gemm.terminal import refusing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Result = pd.DataFrame | Iterator[pd.DataFrame] | Iterator[Row]
COMMON_HELP = {
    "rounds": "Samples of each measurement.",
    "shape": "M, N and K.",
    "stages": "Stages; all by default.",
    "precision": "Precision of the tensor cores.",
    "precisions": "Precisions of the products that are computed here.",
    "seed": "Seed of the operands.",
    "extent": "M and N, and K if it is not a parameter.",
}
Values = int | Collection[Any] | Callable[[str], Any]
SEPARATOR = re.compile(r",(?! )")  # a value may contain a comma and a space


class Unavailable(UsageError):
    """An experiment cannot run on this machine; the message says what it lacks."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of an experiment, from the signature and the docstring of its function."""

    parse: Callable[[str], Any]  # converts the text of a command line option
    default: Any
    help: str
    many: bool = False  # True for a sequence, whose option may be repeated


@dataclass(frozen=True)
class Experiment:
    """An experiment: how to run it, to plot it, and to interpret its result."""

    # Returns a DataFrame with one row per measurement; or yields its rows, or the DataFrame so far after each part, so
    # that an interrupted run keeps them. Results are verified before they are timed. Column names contain units; those
    # that begin with `predicted` hold predictions. All parameters have defaults, those of the recorded run.
    run: Callable[..., Result]
    name: str = ""  # on the command line, and the stem of its files; by default that of `run`
    lesson: str = ""  # one line; by default the first line of the docstring of the module of `run`
    # Maps sentences about such a DataFrame to booleans, several of which must all be true; a sentence without any is
    # left out.
    claims: Callable[[pd.DataFrame], Mapping[str, Any]] = lambda frame: {}
    claims_of_times: bool = True  # False if claims hold in the simulator too; it need not be set if `needs` names it
    # Plots such a DataFrame, fresh or read back from CSV, into an empty figure.
    plot: Callable[[pd.DataFrame, Figure], None] | None = None
    needs: tuple[str, ...] = ("gpu",)  # of a machine without the simulator: keys of `runner.CHECKS`
    small: Mapping[str, Any] = field(default_factory=dict)  # defaults in the simulator, for which it takes seconds
    unavailable: str = ""  # reason why the simulator cannot run it; empty if it can
    # Allowed values of parameters, or of their items: a collection, a number whose multiples they are, or a function
    # that reads one. Other whole numbers are at least 1, or 0 if the default is.
    allowed: Mapping[str, Values] = field(default_factory=dict)
    # Describes the result so far in one line, after each part; by default, only its number of rows now and then.
    progress: Callable[[pd.DataFrame], str] | None = None
    summary: Callable[[pd.DataFrame], pd.DataFrame] | None = None  # table to print instead of the DataFrame
    summary_file: str = ""  # file to which the summary is written as CSV; empty for none
    # Prints a complete result, instead of the table, and returns further files.
    report: Callable[[pd.DataFrame, Mapping[str, Any]], Mapping[str, str | bytes]] | None = None
    facts: Callable[[pd.DataFrame], Mapping[str, Any]] = lambda frame: {}  # of the JSON file, beside `DataFrame.attrs`
    seed: int = 0  # to record without a parameter of this name; one whose default is None gets a random seed
    cache: str = "as the experiment says"  # state of the caches, to record
    operands: str = ""  # distribution of the elements, to record, unless `DataFrame.attrs` has it
    timing: str | None = None  # `environment.GRAPHS` or `LAUNCHES`, to record
    own_clocks: bool = False  # True if rows have `sm_clock_mhz` and `throttle`; otherwise the harness samples clocks
    command: str = ""  # words after `numba-gemm`; by default `lab NAME`
    table: str = ""  # CSV file; by default NAME.csv
    record: str = ""  # JSON file; by default NAME.json
    figure: tuple[float, float] = (9.0, 5.0)  # size of the plot in inches
    section: str = ""  # of the memory chapter of the CUDA C++ Best Practices Guide, such as "9.2.1.3"
    # Kernels by name, with their parameters' types such as "float32[::1], int64", for compilation without a GPU.
    kernels: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.run.__name__)
        if not self.lesson:
            doc = inspect.getdoc(inspect.getmodule(self.run)) or ""
            object.__setattr__(self, "lesson", doc.partition("\n")[0])
        object.__setattr__(self, "claims", decided(self.claims))

    @property
    def files(self) -> tuple[str, ...]:
        """Files that a run writes: the table, its environment, and perhaps a summary and, as the last one, a plot."""
        picture = f"{self.name}.png" if self.plot else ""
        table, record = self.table or f"{self.name}.csv", self.record or f"{self.name}.json"
        return tuple(filter(None, (table, record, self.summary_file, picture)))

    def frame(self, **parameters: Any) -> pd.DataFrame:
        """Run the experiment with these parameters, and return its whole result."""
        return deque(self.frames(**parameters), maxlen=1)[0]

    def frames(self, **parameters: Any) -> Iterator[pd.DataFrame]:
        """Run the experiment with these parameters, and yield the result so far after each part."""
        found = self.run(**parameters)
        rows: list[Row] = []
        for part in [found] if isinstance(found, pd.DataFrame) else found:
            if isinstance(part, pd.DataFrame):
                yield part
            else:
                rows.append(part)
                yield pd.DataFrame(rows)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters of `run` by name."""
        described = COMMON_HELP | _descriptions(inspect.getdoc(self.run) or "")
        found = inspect.signature(self.run, eval_str=True).parameters
        return {
            name: Parameter(
                _parser(one.annotation, self._item(name), least=int(0 not in np.ravel(one.default))),
                one.default,
                described.get(name, ""),
                many=typing.get_origin(_without_none(one.annotation)) is Sequence,
            )
            for name, one in found.items()
        }

    def _item(self, name: str) -> Callable[[str], Any] | None:
        """Return the function that reads a value of a parameter, or an item of it; None to go by its annotation."""
        values: Any = self.allowed.get(name, number(int, most=MOST_SEED) if name == "seed" else None)
        if isinstance(values, int):
            return number(int, step=values)
        return values if values is None or callable(values) else one_of(values)


def _descriptions(doc: str) -> dict[str, str]:
    """Read the section Parameters of a docstring, with one line ``name: text`` per parameter."""
    found: dict[str, str] = {}
    names: list[str] = []
    section = re.search(r"^Parameters\n-+\n(.*?)(?:\n\n\w+\n-+\n|\Z)", doc, re.DOTALL | re.MULTILINE)
    for line in section[1].splitlines() if section else ():
        text = line.strip()
        if not line.startswith(" "):
            named, _, text = line.partition(": ")
            names = named.split(", ")
        found |= {name: f"{found.get(name, '')} {text}".strip() for name in names}
    return found


def _without_none(annotation: Any) -> Any:
    """Return the type of an annotation that also allows None."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation
    return next(kind for kind in typing.get_args(annotation) if kind is not type(None))


def _parser(annotation: Any, item: Callable[[str], Any] | None, least: int) -> Callable[[str], Any]:
    """Return the function that reads a value of an annotated type; sequences are separated by commas."""
    annotation = _without_none(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Sequence, tuple):
        if origin is Sequence and (own := getattr(arguments[0], "parse", None)):
            return lambda text: (own(text),)  # a text has commas of its own; the option is repeated
        one = _parser(arguments[0], item, least)

        def several(text: str) -> tuple[Any, ...]:
            if not text.strip(", "):
                raise ValueError(f"{text!r} names nothing")
            found = tuple(one(part.strip()) for part in SEPARATOR.split(text) if part.strip())
            if origin is tuple and len(found) != len(arguments):
                raise ValueError(f"{text!r} has {len(found)} values; expected {len(arguments)}")
            return found

        return several
    if item or origin is typing.Literal:
        return item or one_of(arguments)
    if hasattr(annotation, "parse"):
        return typing.cast("Callable[[str], Any]", annotation.parse)
    if annotation not in (bool, float, int, str, Path):
        raise TypeError(f"no option can be made of {annotation}: give the type a class method `parse`")
    if annotation in (int, float):
        return number(annotation, least if annotation is int else 0)
    return typing.cast("Callable[[str], Any]", annotation)


def one_of(values: Collection[Any]) -> Callable[[str], Any]:
    """Return the function that reads one of some values."""
    known = {str(value): value for value in values}

    def choice(text: str) -> Any:
        if text not in known:
            raise ValueError(f"invalid choice: {text!r}; expected one of {', '.join(known)}")
        return known[text]

    return choice


def number(
    kind: type[int] | type[float], least: float = 0, step: int = 1, most: float = math.inf
) -> Callable[[str], float]:
    """Return the function that reads a number; Python's own errors name its functions."""

    def parsed(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None
        if step > 1 and (value < step or value % step):
            raise ValueError(f"{text} is no multiple of {step}")
        if not least <= value <= most:
            limits = f"from {least} to {most:.10g}" if most < math.inf else f"at least {least}"
            raise ValueError(f"{text} is not {limits}")
        return value

    return parsed


def decided(claims: Callable[[pd.DataFrame], Mapping[str, Any]]) -> Callable[[pd.DataFrame], dict[str, bool]]:
    """Return claims with one boolean per sentence: True if all of its values are; without values it is left out."""

    @functools.wraps(claims)
    def as_bools(frame: pd.DataFrame) -> dict[str, bool]:
        found = {said: list(holds) if isinstance(holds, Iterator) else holds for said, holds in claims(frame).items()}
        return {sentence: bool(np.all(holds)) for sentence, holds in found.items() if np.size(holds)}

    return as_bools


def last_row(frame: pd.DataFrame) -> str:
    """Describe the last row of a result in one line, without what it lacks."""
    row = frame.iloc[-1].dropna()
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


def add_parameters(parser: argparse.ArgumentParser, experiments: Sequence[Experiment]) -> None:
    """Add the parameters that all of the experiments have, with defaults in the help of a single one."""
    taken = [experiment.parameters for experiment in experiments]
    for name, parameter in taken[0].items() if taken else ():
        if any(name not in others for others in taken):
            continue
        option: dict[str, Any] = {"default": argparse.SUPPRESS, "help": parameter.help.replace("%", "%%")}
        if parameter.parse is bool:
            option["action"] = "store_true"
        else:
            option |= {"action": "extend" if parameter.many else "store", "type": refusing(parameter.parse)}
            option["metavar"] = name.upper()
            if len(taken) == 1 and parameter.default not in (None, (), "") and "Default:" not in parameter.help:
                option["help"] += f" Default: {spelled(parameter.default)}."
        parser.add_argument(f"--{name.replace('_', '-')}", **option)


def spelled(value: Any) -> str:
    """Format a value as it is written in an option."""
    if isinstance(value, range) and len(value) > 2:
        return f"{value.start},...,{value[-1]}"
    return ",".join(map(str, value)) if isinstance(value, list | tuple | range) else str(value)
