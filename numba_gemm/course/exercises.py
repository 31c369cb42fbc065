"""Predictions and exercises of the notebooks: a number is asked for before it is shown, and answers are checked."""

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Guess", "check", "predict"]


class Guess:
    """A reader's prediction, made by `predict` and compared with the value by `reveal`.

    Attributes
    ----------
    question, unit : str
        As given to `predict`.
    value : float or None
        The number that the reader wrote; None without one.
    """

    def __init__(self, question: str, value: float | None, unit: str = "") -> None:
        self.question, self.value, self.unit = question, value, unit

    def reveal(
        self,
        value: float,
        *,
        model: float | None = None,
        measured: bool | None = None,
        because: str = "",
        tolerance: float = 0.05,
    ) -> None:
        """Print the prediction beside the value, and the ratio of the two, in one line.

        Parameters
        ----------
        value : float
            The counted value, or the measured one.
        model : float, optional
            A model's prediction, printed beside the reader's.
        measured : bool, optional
            True if the value was measured, False if it was counted. By default, a value with a model was measured.
        because : str
            A second line that explains the value.
        tolerance : float
            Relative difference up to which the prediction is called correct.
        """
        kind = "measured" if (model is not None if measured is None else measured) else "counted"
        parts = ["no prediction" if self.value is None else f"you {_number(self.value)}"]
        parts += [] if model is None else [f"model {_number(model)}"]
        parts.append(f"{kind} {_number(value)}{' ' * bool(self.unit)}{self.unit}")
        verdicts = [] if self.value is None else [_verdict("yours", self.value, value, tolerance)]
        verdicts += [] if model is None else [_verdict("the model's", model, value, tolerance)]
        print(f"{self.question}: {' | '.join(parts)}{' | ' * bool(verdicts)}{', '.join(verdicts)}")
        if because:
            print(because)


def predict(question: str, guess: object = ..., unit: str = "") -> Guess:
    """Take the reader's prediction of a number that a later cell reveals.

    Parameters
    ----------
    question : str
        Name of the number, such as "sectors per request".
    guess : float, optional
        The prediction. The default, ``...``, is none; the notebook runs on without it. Anything else prints one line
        and counts as none, too.
    unit : str
        Unit of the number.

    Returns
    -------
    Guess
        The prediction; its method `reveal` compares it with the value.

    Examples
    --------
    >>> from numba_gemm.course.exercises import predict
    >>> sectors = predict("sectors per request", 8)
    sectors per request: you predict 8
    >>> sectors.reveal(32, because="Each lane reads another row.")
    sectors per request: you 8 | counted 32 | yours is 0.25 times that
    Each lane reads another row.
    """
    if guess is ...:
        print(f"{question}: write your prediction{f' ({unit})' * bool(unit)} in place of ...")
        return Guess(question, None, unit)
    if isinstance(guess, bool) or not isinstance(guess, int | float | np.number):
        print(f"{question}: got {_short(guess)}; expected a number, such as 128, or ... for no prediction")
        return Guess(question, None, unit)
    value = float(guess)
    print(f"{question}: you predict {_number(value)}{' ' * bool(unit)}{unit}")
    return Guess(question, value, unit)


def _number(value: float) -> str:
    return f"{float(value):,.4g}" if abs(value) < 10_000 else f"{float(value):,.0f}"


def _verdict(whose: str, guess: float, value: float, tolerance: float) -> str:
    if abs(guess - value) <= tolerance * abs(value):
        return f"{whose} is correct" if guess == value else f"{whose} is within {tolerance:.0%}"
    return f"{whose} is {_number(guess / value)} times that" if value else f"{whose} is not zero"


def check(answer: Callable[..., Any], *cases: tuple[tuple[Any, ...], Any]) -> bool:
    """Check the answer to an exercise, and print the first case that fails; return True if none does.

    Parameters
    ----------
    answer : callable
        The reader's function. None as its result means that it is not answered yet. A string where another type is
        expected is printed as a description of the fault.
    *cases : tuple of (arguments, expected)
        Arguments and the expected result. Floats and arrays must agree within 1e-5, other results must be equal.
    """
    if not cases:
        raise ValueError("check needs a case or more: tuples of arguments, and what is expected")
    for arguments, expected in cases:
        found = answer(*arguments)
        call = f"{getattr(answer, '__name__', 'answer')}({', '.join(map(_short, arguments))})"
        if found is None:
            print(f"Not answered yet: {call} is None.")
            return False
        if isinstance(found, str) and not isinstance(expected, str):
            print(f"Not yet: {found}")
            return False
        exact = not isinstance(expected, float | np.ndarray)
        right = (
            found == expected if exact else np.shape(found) == np.shape(expected) and np.allclose(found, expected, 1e-5)
        )
        if not right:
            print(f"Not yet: {call} is {_short(found)}, and should be {_short(expected)}.")
            return False
    print(f"Right, in {'all ' if len(cases) > 1 else ''}{len(cases)} case{'s' * (len(cases) > 1)}.")
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}..."
