"""Calls of functions in a process that has a compiler: the tests' own may be on the simulator, which has none.

A child process serves all calls of a test process, since starting one costs more than compiling a kernel.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from numba_gemm.simulator.probe import gpu_environment


class CompilerProcess:
    """A child process without the simulator that calls functions of the tests, whose results are JSON."""

    def __init__(self, **variables: str) -> None:
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = gpu_environment() | variables | {"PYTHONPATH": os.pathsep.join(paths)}
        # Installed packages have bytecode beside them, and would be compiled anew for another place.
        if environment.pop("PYTHONPYCACHEPREFIX", None):
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.offline"],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return a function's result."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps([function.__module__, function.__name__, arguments]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BaseException:  # of a test that is stopped: the answer would be the next call's
            self.close()
            raise
        if not answer:
            self._errors.seek(0)
            raise AssertionError(f"the compiling process has ended:\n{self._errors.read()}")
        result, error = json.loads(answer)
        assert error is None, error
        return result

    @property
    def ended(self) -> bool:
        """True if it answers no more."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


_started: list[CompilerProcess] = []


def offline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that is called where there is a compiler."""
    if not _started or _started[-1].ended:
        _started.append(CompilerProcess())
        atexit.register(_started[-1].close)
    return _started[-1](function, *arguments)


def run_command(module: str, arguments: list[str]) -> tuple[int, str, str]:
    """Run the `main` of a module; return its status and what it prints, on standard output and as errors."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            status = importlib.import_module(module).main(arguments)
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), errors.getvalue()


def main() -> None:
    """Answer calls until the input ends."""
    # Numba keeps what it has compiled, and the collector would look at all of it again and again. Half of what is made
    # can be dropped: so many objects, of some eighty kernels, take 1.5 GB.
    gc.set_threshold(8_000_000)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what functions print is no answer
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        try:
            answer = getattr(importlib.import_module(module), name)(*arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
