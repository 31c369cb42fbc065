"""Private interfaces of Numba's simulator that the scheduler and `numba_kernel` build on.

This module uses `numba.cuda.simulator.kernelapi` (`FakeCUDAModule`, `Dim3`), `numba.cuda.simulator.kernel`
(`FakeCUDAKernel.fn`, `_kernel_context`, `BlockThread`, and `FakeCUDAModule`, which a launch looks up there), and the
array in a `FakeWithinKernelCUDAArray`. If they change, simulated launches fail. It also replaces `Type.__call__` of
Numba's numbers by a faster function with the same results.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from .switch import SIMULATOR

# Placeholders for names that exist only in the simulator. On hardware the scheduler can be imported but not run.
SimulatedModule: Any = object
Dim3: Any = tuple
NumbaThread: Any = ()  # of Numba's own simulator
NumbaKernel: Any = object
NumbaType: Any = ()


def _make_casts_fast() -> None:
    """Let ``uint32(value)`` and the like call NumPy's type at once.

    Kernels cast at every step, and Numba first tells a cast from a signature, which takes much of some launches' time.
    """
    from numba import types

    names = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)] + ["float32", "float64"]
    numpy_types = {name: getattr(np, name) for name in names}
    zeros = {name: numpy_types[name](0) for name in names if "int" in name}
    numbers = {int, float, bool, np.bool_, *numpy_types.values()}
    cast_or_signature = types.Type.__call__

    def call(self: Any, *args: Any) -> Any:
        if len(args) == 1 and (numpy_type := numpy_types.get(self.name)) is not None:
            value = args[0]
            given = type(value)
            if given is numpy_type:
                return value
            if given is int and (zero := zeros.get(self.name)) is not None:
                return zero + value  # the same number, or the same error, in a fraction of the time
            if given in numbers:
                return numpy_type(value)
        return cast_or_signature(self, *args)

    types.Integer.__call__ = types.Float.__call__ = call


if SIMULATOR:
    from numba.cuda.simulator import kernel as numba_simulator
    from numba.cuda.simulator import kernelapi

    SimulatedModule, Dim3 = kernelapi.FakeCUDAModule, kernelapi.Dim3
    from numba.cuda.types import abstract

    NumbaThread, NumbaKernel = numba_simulator.BlockThread, numba_simulator.FakeCUDAKernel
    NumbaType = abstract.Type
    _make_casts_fast()


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a Numba type, or of anything that NumPy accepts as a dtype."""
    return _dtype_of(dtype) if isinstance(dtype, NumbaType) else np.dtype(dtype)


@functools.lru_cache(maxsize=64)
def _dtype_of(numba_type: Any) -> np.dtype[Any]:
    from numba.np import numpy_support

    return np.dtype(numpy_support.as_dtype(numba_type))


def python_function(kernel: Any) -> Callable[..., Any]:
    """Return the Python function of a kernel made by `cuda.jit` in the simulator; return a plain function unchanged."""
    function = getattr(kernel, "py_func", kernel)
    if not isinstance(function, FunctionType):
        raise TypeError(f"expected a kernel made by cuda.jit or a Python function, got {kernel!r}")
    return function


def plain_array(argument: Any) -> np.ndarray[Any, Any]:
    """Return the NumPy array behind an array argument of a kernel; only Numba's own simulator wraps it."""
    array: np.ndarray[Any, Any] = argument if isinstance(argument, np.ndarray) else argument._item._ary
    return array


# Functions of these packages never look up `cuda` in their own module on behalf of a kernel.
_LEAVES = {"numpy", "numba", "llvmlite", "math", "builtins", "operator"}


def _names(code: CodeType) -> set[str]:
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*nested)


def _reachable(kernel: Callable[..., Any]) -> tuple[list[dict[str, Any]], list[CellType], Counter[CodeType]]:
    """Return the module dictionaries and closure cells in which `kernel` or its callees may find `cuda`.

    Also count those functions by their code.

    The search follows names of globals, attributes of modules, closures, tuples and lists. Of functions inside other
    containers, only those made by `cuda.jit(device=True)` and those in `numba_gemm.device` work.
    """
    namespaces: dict[int, dict[str, Any]] = {}
    cells: dict[int, CellType] = {}
    codes: Counter[CodeType] = Counter()
    seen: set[int] = set()
    pending: list[Any] = [kernel]
    while pending:
        found = pending.pop()
        function = getattr(found, "py_func", found)
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        if (function.__module__ or "").partition(".")[0] in _LEAVES:
            continue
        seen.add(id(function))
        codes[function.__code__] += 1
        namespaces[id(function.__globals__)] = function.__globals__
        names = _names(function.__code__)
        values = [function.__globals__[name] for name in names if name in function.__globals__]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                values.append(cell.cell_contents)
                cells[id(cell)] = cell
        for value in values:
            if isinstance(value, (tuple, list)):
                pending += value
            elif isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _LEAVES:
                pending += [vars(value)[name] for name in names if name in vars(value)]
            else:
                pending.append(value)
    return list(namespaces.values()), list(cells.values()), codes


class SimulatedCuda:
    """Replacement of `numba.cuda` in a kernel and all its callees; one is installed at a time per process.

    The replacement is not limited to the name `cuda`: every global or closure variable that holds `numba.cuda` then
    holds the simulated module, also for host code in the same Python modules.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def install(self, kernel: Callable[..., Any], module: Any) -> None:
        """Replace `numba.cuda` with `module` until `restore`."""
        if numba_simulator._kernel_context is not None:
            raise RuntimeError("a kernel is running on Numba's own simulator, which runs one at a time")
        self._set(numba_simulator, "_kernel_context", module)  # for user functions made by cuda.jit(device=True)
        self._replace(kernel, module)

    def install_at_launch(self, kernel: Callable[..., Any], make: Callable[..., Any]) -> None:
        """Let the next launch of Numba's own simulator use ``make(grid, block, dynamic_bytes)`` until `restore`."""

        def made(*launch: Any) -> Any:
            module = make(*launch)
            self._replace(kernel, module)
            return module

        self._set(numba_simulator, "FakeCUDAModule", made)

    def _set(self, module: ModuleType, name: str, value: Any) -> None:
        # Each undo is recorded before its change: a KeyboardInterrupt may arrive between any two calls.
        self._undo.append(functools.partial(setattr, module, name, getattr(module, name)))
        setattr(module, name, value)

    def _replace(self, kernel: Callable[..., Any], module: Any) -> None:
        import numba
        from numba import cuda

        package = ModuleType(numba.__name__)  # for kernels that write `numba.cuda`
        vars(package).update(vars(numba), cuda=module)
        namespaces, cells, module.shared.functions = _reachable(kernel)
        namespaces += [vars(m) for name, m in list(sys.modules.items()) if name.startswith("numba_gemm.device.")]
        held = [cell for cell in cells if cell.cell_contents is cuda or cell.cell_contents is numba]
        for namespace in {id(namespace): namespace for namespace in namespaces}.values():
            # Numba's own `swapped_cuda_module` is unsuitable: it leaves the module in while a device function runs.
            found = {name: value for name, value in namespace.items() if value is cuda or value is numba}
            self._undo.append(functools.partial(namespace.update, found))
            namespace.update({name: module if value is cuda else package for name, value in found.items()})
        for cell in held:
            own = cell.cell_contents
            self._undo.append(functools.partial(setattr, cell, "cell_contents", own))
            cell.cell_contents = module if own is cuda else package

    def restore(self) -> None:
        """Restore `numba.cuda`. May be called again after an interrupt, or without `install`."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
