"""A kernel's LLVM IR kept for another compute capability, or as LTO-IR: Numba types and lowers the kernel once.

The IR depends on neither, and Numba's libraries keep what NVVM makes of it for each. One library is kept, since each is
some MB: kernels are compiled for one compute capability after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["KEPT", "KeptLibrary"]

PACKAGE = __name__.partition(".")[0] + "."


class KeptLibrary:
    """Library of the kernel that was compiled last; for the thread that holds Numba's compiler lock."""

    def __init__(self) -> None:
        self._key: Any = None
        self._lto, self._found = False, None

    def keeping(self, compile_function: Callable[..., Any]) -> Callable[..., Any]:
        """Return Numba's ``_compile_pyfunc_with_fixup``, which finds the last kernel of this package again."""

        def compile_or_find(pyfunc: Any, sig: Any, **options: Any) -> Any:
            if options.get("device", True) or not str(pyfunc.__module__).startswith(PACKAGE):
                return compile_function(pyfunc, sig, **options)
            lto = bool(options.get("lto"))
            key = pyfunc, sig, {name: value for name, value in options.items() if name not in ("cc", "lto")}
            # A library for LTO-IR has an option that one for PTX has not, but not the other way round.
            if key != self._key or (self._lto and not lto):
                self._key = self._found = None
                self._found = compile_function(pyfunc, sig, **options)
                self._key, self._lto = key, lto
            return self._found

        return compile_or_find


KEPT = KeptLibrary()  # of the process, as the functions that `compilation` keeps
