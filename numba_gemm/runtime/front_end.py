"""Numba's front end with less work per kernel: it remembers what it would compute again, and skips what finds nothing.

Most of the time that a kernel takes to compile is spent in Numba's own Python: 30 to 50 nested device functions
go through 26 passes each. `faster` makes that cheaper for one compilation, which holds Numba's compiler lock. The
machine code is the same, which `tests/runtime/test_front_end.py` verifies. Each change uses private names of Numba and
is left out if one of them is missing. Those of passes and of constants apply to functions of this package alone: an
epilogue, and Numba's own functions, are compiled as ever.

- `BaseFunction.get_call_type` remembers the types of calls of builtin functions with numbers and arrays. Numba asks for
  the same sums and elements thousands of times. Rejected templates are described in words only if none applies.
- `resolve_value_type` remembers the types of functions, and `get_abi_sizeof` the sizes of types, for which LLVM parses
  a module each.
- `BaseContext.refresh` looks for new declarations where a registry has grown.
- `TargetConfig.__eq__` and `__hash__` compare the options that were set, instead of making a dict of all. Options are
  compared at each look-up of a compiled function.
- `CUDADispatcher.compile_device` takes constant integers as integers: a device function that is called with several
  constants is compiled once instead of once for each. A constant that must stay one is a default or a closure's. It
  also finds device functions with the same content, which other kernels had (`kept_functions`).
- `Inst._rec_list_vars` looks at types of a statement's values instead of trying each, `_find_singly_assigned_variable`
  at each statement once, and `_has_loc` at the signature of each function once.
- `_run_block_rewrite`, which renames one variable after the other, leaves alone blocks that do not name it.
- `ByteCode` and `Flow` decode and follow the bytecode of a function once, whatever its closures hold.
- `peep_hole_delete_with_exit` and `peep_hole_fuse_dict_add_updates` do nothing: there are no contexts and dicts.
- `find_closest_arch` knows usual compute capabilities without NVRTC, and `get_libdevice` looks for one file instead of
  all that a toolkit has: NVRTC's library, of 140 MB, is not loaded.
- `CUDACodeLibrary.modules` has each module once, whose text `llvm_strs` keeps for the next kernel that links it;
  `new_error_context` is a class instead of a generator, and `TypeInferer` does not catch warnings for each statement.
- `PostProcessor.run` leaves out the variables that live at the entry of each block, which only generators need.
- `PassManager._runPass` runs a pass without events, timers, checks of its result and repairs after it.
- `CUDACompiler.define_pipelines` leaves out passes that do nothing for functions without closures, literal unrolling,
  context managers and array expressions.
- `_compile_pyfunc_with_fixup` keeps the last kernel's LLVM IR for another compute capability (`kept_library`).
- The garbage collector is off meanwhile (`collector`).

One module because each change is a few lines, and no other module but `compiler` may use Numba's private names.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from .collector import without_collections
from .kept_functions import KeptFunctions
from .kept_library import KEPT

PACKAGE = __name__.partition(".")[0] + "."
# Passes that do nothing for functions without closures, literal unrolling, context managers and array expressions.
UNNEEDED = (
    "AnnotateTypes",
    "FindLiterallyCalls",
    "InlineClosureLikes",
    "InlineInlinables",
    "InlineOverloads",
    "LiteralPropagationSubPipelinePass",
    "LiteralUnroll",
    "MakeFunctionToJitFunction",
    "NopythonRewrites",
    "RewriteDynamicRaises",
    "WithLifting",
)

KNOWN_CCS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0))  # compute capabilities of every toolkit from CUDA 12 on

Change = tuple[Any, str, Any]  # an object, the name of an attribute, and its value for the time of a compilation


@contextlib.contextmanager
def faster() -> Iterator[None]:
    """Compile with less work in Numba's front end; for the thread that holds Numba's compiler lock."""
    with without_collections(), contextlib.ExitStack() as undo:
        for change in CHANGES:
            with contextlib.suppress(ImportError, AttributeError):
                for owner, name, value in change():
                    undo.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, value)
        yield


def _is_own(identity: Any) -> bool:
    """Return True if a function is one of this package."""
    return str(identity.func.__module__).startswith(PACKAGE)


def _once_per_key(compute: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose results are remembered by a key of its arguments; None is no key."""
    known: dict[Any, Any] = {}

    def find(*arguments: Any) -> Any:
        if (key := key_of(*arguments)) is None:
            return compute(*arguments)
        if key not in known:
            known[key] = compute(*arguments)
        return known[key]

    return find


@cache  # for the next kernel, too; a function for which more is declared is another object
def _types_of_calls() -> list[Change]:
    from numba.core import errors, types
    from numba.core.target_extension import get_local_target
    from numba.core.types.containers import UniTuple
    from numba.core.types.functions import BaseFunction
    from numba.core.types.misc import unliteral
    from numba.core.utils import order_by_target_specificity

    resolve, plain = BaseFunction.get_call_type, (types.Number, types.Boolean, types.Array, UniTuple)
    # By function, context and argument types, which are unique objects and kept alive here.
    known: dict[tuple[Any, ...], Any] = {}

    def match(function: Any, context: Any, args: Any) -> Any:
        """Return the signature of the first template that applies; others are described if there is none."""
        plain_args = tuple(unliteral(arg) for arg in args)
        target = get_local_target(context)
        for template_class in order_by_target_specificity(target, function.templates, fnkey=function.key[0]):
            template = template_class(context)
            for tried in (args, plain_args) if template.prefer_literal else (plain_args, args):
                with contextlib.suppress(errors.NumbaError):
                    if (signature := template.apply(tried, {})) is not None:
                        function._impl_keys[signature.args] = template.get_impl_key(signature)  # noqa: SLF001
                        return signature
        return resolve(function, context, args, {})

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws or not all(isinstance(arg, plain) for arg in args):
            return resolve(self, context, args, kws) if kws else match(self, context, args)
        key = (self, context, args)
        try:
            found = known.get(key)
        except TypeError:  # not hashable
            return resolve(self, context, args, kws)
        if found is None:
            try:
                found = known[key] = match(self, context, args)
            except errors.TypingError:
                self._depth = 0
                raise
        return found

    return [(BaseFunction, "get_call_type", get_call_type)]


def _comparisons_of_options() -> list[Change]:
    from numba.cuda.core.targetconfig import TargetConfig

    equal = TargetConfig.__eq__
    hashes: dict[type, int] = {}

    def __eq__(self: Any, other: Any) -> Any:
        if self is other or (type(self) is type(other) and self._values == other._values):
            return True
        return equal(self, other)

    def __hash__(self: Any) -> int:
        own = type(self)
        if own not in hashes:
            hashes[own] = hash(tuple(sorted(self.options)))  # as it is: of the names alone
        return hashes[own]

    return [(TargetConfig, "__eq__", __eq__), (TargetConfig, "__hash__", __hash__)]


@cache  # for the next kernel, too
def _device_functions() -> list[Change]:
    from numba.core import types
    from numba.cuda.dispatcher import CUDADispatcher

    compile_device = CUDADispatcher.compile_device
    kept = KeptFunctions(lambda function: str(function.__module__).startswith(PACKAGE))

    def compile_for_integers(self: Any, args: Any, return_type: Any = None) -> Any:
        if self.py_func.__module__.startswith(PACKAGE):
            args = tuple(arg.literal_type if isinstance(arg, types.IntegerLiteral) else arg for arg in args)
        if return_type is not None:
            return compile_device(self, args, return_type)
        return kept.find(self, args, lambda: compile_device(self, args))

    return [(CUDADispatcher, "compile_device", compile_for_integers)]


def _live_variables() -> list[Change]:
    from numba.cuda.core import transforms
    from numba.cuda.core.postproc import PostProcessor, VariableLifetime

    run, canonicalize = PostProcessor.run, transforms.canonicalize_cfg
    insert = PostProcessor._insert_var_dels  # noqa: SLF001

    def run_without_entries(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> Any:
        function = self.func_ir
        if function.is_generator or not _is_own(function.func_id):
            return run(self, emit_dels, extend_lifetimes)
        function.blocks = canonicalize(function.blocks)
        function.variable_lifetime = VariableLifetime(function.blocks)
        function.generator_info = None
        if emit_dels:
            insert(self, extend_lifetimes=extend_lifetimes)
        return None

    return [(PostProcessor, "run", run_without_entries)]


def _runs_of_passes() -> list[Change]:
    from numba.cuda.core.compiler_machinery import PassManager

    complete = PassManager._runPass  # noqa: SLF001

    def run_pass(self: Any, index: int, a_pass: Any, state: Any) -> None:
        if not _is_own(state.func_id):
            complete(self, index, a_pass, state)
            return
        a_pass.analysis = self._analysis
        a_pass.run_initialization(state)
        a_pass.run_pass(state)
        a_pass.run_finalizer(state)

    return [(PassManager, "_runPass", run_pass)]


def _unneeded_passes() -> list[Change]:
    from numba.cuda.compiler import CUDACompiler

    define = CUDACompiler.define_pipelines

    def define_pipelines(self: Any) -> Any:
        managers = define(self)
        if _is_own(self.state.func_id):
            for manager in managers:
                kept = [one for one in manager.passes if one[0].__name__ not in UNNEEDED]
                manager.passes[:] = kept
                manager.finalize()
        return managers

    return [(CUDACompiler, "define_pipelines", define_pipelines)]


def _contexts() -> list[Change]:
    from numba.cuda.core.base import BaseContext as TargetContext
    from numba.cuda.typing.context import BaseContext as TypingContext

    sizes: dict[tuple[int, int], int] = {}  # entries of a context's registries when they were installed, by their ids

    def grown(context: Any, registries: Iterable[Any]) -> list[Any]:
        """Return the registries with entries that the context has not."""
        found = []
        for one in registries:
            size = sum(len(entries) for entries in vars(one).values() if isinstance(entries, list))
            if sizes.get((id(context), id(one))) != size:
                sizes[id(context), id(one)] = size
                found.append(one)
        return found

    def refreshed_if_grown(refresh: Callable[[Any], None], of_intrinsics: bool) -> Callable[[Any], None]:
        def refresh_if_grown(self: Any) -> None:
            registries = list(self._registries)
            first = registries[:1]  # that of intrinsics, which are implemented when they are called first
            if of_intrinsics and first and (id(self), id(first[0])) in sizes and grown(self, first):
                self.install_registry(first[0])
            if not registries or grown(self, registries):
                refresh(self)
                grown(self, self._registries)

        return refresh_if_grown

    contexts = (TargetContext, True), (TypingContext, False)
    return [(one, "refresh", refreshed_if_grown(one.refresh, intrinsics)) for one, intrinsics in contexts]


def _signatures_of_lowering() -> list[Change]:
    from numba.cuda.core import base

    def code(function: Any) -> Any:
        return function if hasattr(function, "__wrapped__") else getattr(function, "__code__", function)

    return [(base, "_has_loc", _once_per_key(base._has_loc, code))]  # noqa: SLF001


def _types_of_globals() -> list[Change]:
    from types import BuiltinFunctionType, FunctionType

    from numba.cuda.target import CUDATypingContext

    def key(context: Any, value: Any) -> Any:
        return (context, value) if isinstance(value, (type, BuiltinFunctionType, FunctionType)) else None

    name = "resolve_value_type"
    return [(CUDATypingContext, name, _once_per_key(getattr(CUDATypingContext, name), key))]


def _sizes_of_types() -> list[Change]:
    from numba.cuda.core.base import BaseContext

    return [(BaseContext, "get_abi_sizeof", _once_per_key(BaseContext.get_abi_sizeof, lambda _, kind: str(kind)))]


def _lists_of_variables() -> list[Change]:
    from numba.cuda.core import ir

    find, atoms = ir.Inst._rec_list_vars, (str, int, bool, type(None), ir.Loc)  # noqa: SLF001

    def variables(self: Any, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            value = value.values()
        elif kind is not list and kind is not tuple:
            return find(self, value)
        found: list[Any] = []
        for one in value:
            kind = type(one)
            if kind is ir.Var:
                found.append(one)
            elif kind not in atoms:
                found += self._rec_list_vars(one)
        return found

    return [(ir.Inst, "_rec_list_vars", variables)]


@cache  # for the next kernel, too
def _flows_of_bytecode() -> list[Change]:
    from numba.cuda.core import bytecode, interpreter

    decode, flow_of = bytecode.ByteCode, interpreter.Flow
    codes: dict[Any, Any] = {}  # by the code object, since they do not depend on what a closure holds
    flows: dict[Any, Any] = {}

    def decoded(func_id: Any) -> Any:
        if not _is_own(func_id):
            return decode(func_id)
        if func_id.code not in codes:
            codes[func_id.code] = decode(func_id)
            codes[func_id.code].func_id = None
        found = copy(codes[func_id.code])
        found.func_id = func_id
        return found

    def flow(code: Any) -> Any:
        if not _is_own(code.func_id):
            return flow_of(code)
        if code.func_id.code not in flows:
            found = flow_of(code)
            found.run()
            vars(found).update(run=lambda: None, _bytecode=None)  # which names the function
            flows[code.func_id.code] = found
        return flows[code.func_id.code]

    return [(bytecode, "ByteCode", decoded), (interpreter, "Flow", flow)]


def _rewrites_of_bytecode() -> list[Change]:
    from numba.cuda.core import interpreter

    def for_others(name: str) -> Change:
        rewrite = getattr(interpreter, name)
        return interpreter, name, lambda func_ir: func_ir if _is_own(func_ir.func_id) else rewrite(func_ir)

    return [for_others("peep_hole_delete_with_exit"), for_others("peep_hole_fuse_dict_add_updates")]


def _blocks_of_ssa() -> list[Change]:
    from numba.cuda.core import ssa

    rewrite = ssa._run_block_rewrite  # noqa: SLF001
    names: dict[int, tuple[Any, set[str]]] = {}  # of a block's variables, by the block's id, with the block's body

    def named(block: Any) -> set[str]:
        found = names.get(id(block))
        if found is None or found[0] is not block.body:
            found = names[id(block)] = block.body, {var.name for one in block.body for var in one.list_vars()}
        return found[1]

    def rewrite_where_named(blocks: Any, states: Any, handler: Any) -> Any:
        name = states["varname"]
        return {
            label: rewrite({label: block}, states, handler)[label] if name in named(block) else block
            for label, block in blocks.items()
        }

    return [(ssa, "_run_block_rewrite", rewrite_where_named)]


def _variables_in_blocks() -> list[Change]:
    from numba.cuda.core import ir
    from numba.cuda.core.analysis import compute_use_defs, must_use_alloca
    from numba.cuda.lowering import Lower

    def find_singly_assigned(self: Any) -> None:
        blocks = {} if self.func_ir.func_id.is_generator else self.func_ir.blocks
        statements = (one for block in blocks.values() for one in block.body)
        assigned = Counter(one.target.name for one in statements if isinstance(one, ir.assign_types))
        use_defs = compute_use_defs(blocks)
        defined = set().union(*use_defs.defmap.values())
        shared = set().union(*use_defs.usemap.values()) | set(must_use_alloca(blocks))
        self._singly_assigned_vars = {name for name in defined - shared if assigned[name] == 1}
        self._blk_local_varmap = {}

    return [(Lower, "_find_singly_assigned_variable", find_singly_assigned)]


def _libraries() -> list[Change]:
    from numba.cuda import cuda_paths
    from numba.cuda.cudadrv import nvrtc, nvvm

    closest = nvrtc.find_closest_arch
    changes: list[Change] = [(nvrtc, "find_closest_arch", lambda cc: cc if cc in KNOWN_CCS else closest(cc))]
    if not hasattr(cuda_paths.get_cuda_paths, "_cached_result"):
        found = cuda_paths._get_libdevice_path().info  # noqa: SLF001
        changes += [(nvvm, "get_libdevice", lambda: found), (nvvm, "open_libdevice", lambda: Path(found).read_bytes())]
    return changes


@cache  # for the next kernel, too
def _modules() -> list[Change]:
    from numba.cuda.codegen import CUDACodeLibrary

    modules: Any = CUDACodeLibrary.modules
    get = modules.fget
    once = property(lambda self: list(dict.fromkeys(get(self))))
    texts: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of modules, which are complete when they are linked

    def text(module: Any) -> str:
        if module not in texts:
            texts[module] = str(module)
        return texts[module]

    def llvm_strs(self: Any) -> list[str]:
        if self._llvm_strs is None:
            self._llvm_strs = list(map(text, self.modules))
        return self._llvm_strs

    return [(CUDACodeLibrary, "modules", once), (CUDACodeLibrary, "llvm_strs", property(llvm_strs))]


def _kernels_of_several_targets() -> list[Change]:
    from numba.cuda import compiler

    name = "_compile_pyfunc_with_fixup"
    return [(compiler, name, KEPT.keeping(getattr(compiler, name)))]


def _contexts_of_errors() -> list[Change]:
    from numba.cuda import lowering
    from numba.cuda.core import errors, typeinfer

    class ErrorContext:
        """Add the place to an error of Numba, as `errors.new_error_context` does, which is a generator."""

        def __init__(self, text: str, *arguments: Any, **named: Any) -> None:
            self.text, self.arguments, self.named = text, arguments, named

        def __enter__(self) -> None:
            return

        def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
            if isinstance(error, errors.NumbaError):
                error.add_context(self.text.format(*self.arguments, **self.named))

    return [(one, "new_error_context", ErrorContext) for one in (lowering, typeinfer)]


def _warnings_of_typing() -> list[Change]:
    from numba.cuda.core.typeinfer import TypeInferer

    make = TypeInferer.__init__
    nothing = contextlib.nullcontext()
    direct = SimpleNamespace(catch_warnings=lambda **_: nothing)

    def __init__(self: Any, context: Any, func_ir: Any, warnings: Any) -> None:
        make(self, context, func_ir, direct if _is_own(func_ir.func_id) else warnings)

    return [(TypeInferer, "__init__", __init__)]


CHANGES: tuple[Callable[[], list[Change]], ...] = (
    _types_of_calls,
    _comparisons_of_options,
    _device_functions,
    _live_variables,
    _runs_of_passes,
    _unneeded_passes,
    _contexts,
    _signatures_of_lowering,
    _types_of_globals,
    _sizes_of_types,
    _lists_of_variables,
    _flows_of_bytecode,
    _rewrites_of_bytecode,
    _blocks_of_ssa,
    _variables_in_blocks,
    _libraries,
    _modules,
    _contexts_of_errors,
    _warnings_of_typing,
    _kernels_of_several_targets,
)
