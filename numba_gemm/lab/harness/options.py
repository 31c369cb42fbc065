"""Options of a command line from the parameters of experiments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from numba_gemm.lab.harness.experiment import Experiment, Parameter


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
            option |= {"action": "extend" if parameter.many else "store", "type": _type(parameter)}
            option["metavar"] = name.upper()
            if len(taken) == 1 and parameter.default not in (None, (), ""):
                option["help"] += f" Default: {spelled(parameter.default)}."
        parser.add_argument(f"--{name.replace('_', '-')}", **option)


def _type(parameter: Parameter) -> Callable[[str], Any]:
    """Return an option's type, whose errors are those of the parameter."""

    def convert(text: str) -> Any:
        try:
            return parameter.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def spelled(value: Any) -> str:
    """Format a value as it is written in an option."""
    if isinstance(value, range) and len(value) > 2:
        return f"{value.start},...,{value[-1]}"
    return ",".join(map(str, value)) if isinstance(value, list | tuple | range) else str(value)
