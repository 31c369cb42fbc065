"""The public functions: everything is checked here, before anything is launched."""

from __future__ import annotations

import ctypes
import numbers
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from . import arrays
from .arrays import Known, Operand, Seen, streams
from .gemm import autotune_cache, batches, heuristics, split_products
from .gemm.heuristics import Choice, Problem
from .gemm.split_products import IEEE
from .kernels.ladder import STAGES
from .kernels.ladder.stage import Stage
from .kernels.tensor_core import MODES, Mode
from .runtime import epilogue as epilogues
from .runtime import launch
from .runtime.launch import Extra, Matrix
from .runtime.workspace import Workspace

ANY_GPU = (99, 0)  # a compute capability that no stage finds too low

Pick = Callable[[Problem], Choice]

_seen: Seen = {}


def forget() -> None:
    """Let the next call of each kind be checked in full, and chosen for, again."""
    _seen.clear()


def stages() -> tuple[Stage, ...]:
    """Return the stages of the ladder, in climbing order; their names are what `tiled_sgemm` takes as `stage`."""
    return tuple(STAGES.values())


def tiled_sgemm(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    stage: str = "auto",
    precision: str = IEEE,
    stream: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
) -> Any:
    """Compute ``C = alpha * A @ B + beta * C`` in float32 on the GPU, for matrices or batches of them.

    Parameters
    ----------
    a, b : array of shape (..., M, K), array of shape (..., K, N); float32
        Both of one library: NumPy, Numba, CuPy, PyTorch (on CUDA), or any object that offers
        ``__cuda_array_interface__`` or ``__dlpack__``. Any M, N, K from 0 on, and any strides: transposed, sliced,
        reversed, broadcast. Dimensions before the last two are a batch's, of which each operand may have any number;
        they are broadcast as in NumPy. Arrays in device memory are read where they are, never copied. NumPy arrays are
        copied to the GPU and the result back; one that is not contiguous, with its matrices by rows or by columns, is
        first copied on the host, and a broadcast one in full.
    out : array of shape (..., M, N), float32, optional
        C, of the same library as `a` and `b`, and of the batch dimensions that theirs are broadcast to; overwritten. It
        may have any strides under which its elements are distinct, and may interleave with `a` and `b` in memory as
        long as it shares no element with them. A NumPy one that is not contiguous is filled through a host copy. For
        PyTorch's autograd it counts as modified in place.
    alpha, beta : real number
        Rounded to float32. Where `beta` is 0, C is not read and may hold anything, NaN too; where `alpha` is 0, neither
        `a` nor `b` is read.
    stage : str
        A name in `stages()`, to run that stage, in its first configuration unless it has a schedule; or "auto", to have
        stage and configuration chosen by shape, layout and device, or as `autotune` measured them. `explain` tells what
        is chosen.
    precision : str
        "ieee", float32's multiply-adds, on any GPU; or, from compute capability 8.0 on, how tensor cores are to make do
        with narrower numbers. "bf16x6" and "bf16x9" split each element into three BF16, and have smaller errors than
        float32's own sums, in float32's range: the former from K = 256 on, the latter from 1024 on. "tf32x3" splits it
        into two TF32, and "fp16x3" into two F16 of which each row of A and column of B has a scale: both are less
        accurate for sums of one sign. "tf32" and "bf16" round elements. docs/precision.md says what each guarantees.
        All but "tf32", of most operands, read them once more and need memory for the parts, which each stream keeps.
        "fp32_auto" is the fastest whose stated error and range are no worse than those of "ieee", if no element but 0
        is below 2^-109: "bf16x6" on compute capability 9.0, from K = 256 on and for products large enough that it pays,
        else "ieee".
    stream : optional
        Stream to run on: a stream of Numba, CuPy or PyTorch, an object with ``__cuda_stream__``, or a handle. By
        default the current stream of the arrays' library; for Numba arrays and ``__cuda_array_interface__`` the first
        stream that `a`, `b` or `out` is bound to; else the default stream.
    epilogue : function, optional
        Compiled into the kernel, and applied to each element on its way out: C's element becomes
        ``epilogue(value, row, column, *epilogue_args)``, rounded to float32, where `value` is the element of
        ``alpha * A @ B + beta * C`` and `row` and `column` say where in its matrix it is. A Python function that Numba
        can compile, or one made by ``@cuda.jit(device=True)``. What it finds in globals, closures and modules is
        compiled in as it is at the call, if it is numbers, strings, arrays of up to 64 KB, tuples of these, and
        functions made by ``@cuda.jit`` without signatures that find no more than that. If there is anything else, all
        of it is compiled in as it is at the first call with this very function, and once in every process; Numba's
        simulator, which compiles nothing, sees such contents as they are at each call. Each content is a kernel of its
        own that stays loaded until the process ends: pass numbers that change as `epilogue_args`. Stages without a
        schedule take none.
    epilogue_args : sequence of arrays of shape (elements,), float32
        Vectors for it, of the same library as `a` and `b`, with any strides; not `out`'s memory. It may only read
        them, within their bounds; a GPU checks neither. On Numba's simulator, writing to a read-only array raises
        ValueError.

    Returns
    -------
    array of shape (..., M, N), float32
        `out` if given, else a new array of the library of `a` and `b`, in row order; a Numba device array if `a` and
        `b` are known by ``__cuda_array_interface__`` or ``__dlpack__`` only. (DLPack objects in host memory count as
        NumPy arrays.) A NumPy result is complete at the return; others are complete in the order of the stream.

    Raises
    ------
    TypeError
        For an operand that is no array, has another dtype than float32 (nothing is cast silently), is not of the same
        library as the others, or has no memory of its own (PyTorch's fake and meta tensors, for example); for an
        `alpha`, `beta` or `stream` that is none; for an epilogue that is no function, does not take these arguments,
        does not compile, or returns no real number; for `epilogue_args` that are no sequence.
    ValueError
        For shapes that do not fit; an `out` that is read-only, overlaps `a`, `b`, a vector or itself; ``beta != 0``
        without `out`; operands on several devices; a PyTorch tensor that requires grad while grad mode is enabled, or
        has a forward-mode tangent; an unknown stage, or one that the GPU cannot run, or that takes no epilogue; vectors
        without an epilogue; with one, a K beyond 2**30; an unknown precision, one that the GPU cannot run, or another
        than "ieee" together with a stage or a K beyond 2**30.
    GpuUnavailable
        Without a GPU, unless Numba's simulator is on (NUMBA_ENABLE_CUDASIM=1).

    Notes
    -----
    The product runs on the device that holds the operands (NumPy's: on the current one), and the current device stays
    as it was. It waits, on the GPU, for the work sent so far to the stream that the operands' library works on, or
    that they name. Operands on another stream than their library's, or known by a protocol only, are kept alive until
    the stream has passed the product, and let go by a later call. While the stream is captured into a CUDA graph,
    neither is done: the graph's owner orders and keeps them. Calls are safe from several host threads.

    A call like an earlier one (the same library, shapes, strides, device and stage, no epilogue) skips what the earlier
    one checked.

    A batch is one launch of a stage that has a schedule if its dimensions come down to three: those of extent 1 do not
    count, neighbours that lie behind each other in all operands count as one, and without an epilogue, matrices that
    share B and lie behind each other in A and C count as one matrix; and likewise those that share A. Of more than
    three, the outermost take a launch each; precisions other than "ieee" take one dimension of the three at a time.
    Stages without a schedule take a launch for each matrix that is left.
    """
    if type(alpha) is not float:
        alpha = real("alpha", alpha)
    if type(beta) is not float:
        beta = real("beta", beta)
    # Other stages may not be hashable, and of other vectors it may not be told whether there are any.
    plain = epilogue is None and type(epilogue_args) is tuple and not epilogue_args
    if plain and type(stage) is str and type(precision) is str and precision == IEEE:
        done = arrays.again(_seen, stage, a, b, out, alpha, beta, stream)
        if done is not None:
            return done
    return checked_product(
        a,
        b,
        out,
        alpha,
        beta,
        stream,
        stage=stage,
        precision=precision,
        seen=_seen,
        epilogue=epilogue,
        epilogue_args=epilogue_args,
    )


def checked_product(
    a: Any,
    b: Any,
    out: Any,
    alpha: float,
    beta: float,
    stream: Any,
    *,
    stage: str,
    seen: Seen,
    precision: str = IEEE,
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    home: int | None = None,
    picking: Callable[[Request], Pick] | None = None,
    workspace: Workspace | None = None,
) -> Any:
    """Check everything, launch, and remember the call.

    Parameters
    ----------
    a, b, out, alpha, beta, stream, stage, precision, epilogue, epilogue_args
        Those of `tiled_sgemm`.
    seen : dict
        Where to remember the call.
    home : int, optional
        The device for operands that lie on none. By default the current one.
    picking : callable, optional
        What chooses for a request, or raises. By default its stage.
    workspace : Workspace, optional
        As in `launch.bind`.
    """
    wanted = checked(a, b, out, alpha, beta, stream, stage, epilogue, epilogue_args, home, precision)
    pick, gpu = (wanted.pick if picking is None else picking(wanted)), launch.device_properties(wanted.device)
    left, launches, known = wanted.a, 0, None
    with left.kind.product(
        left,
        wanted.b,
        wanted.out,
        shape=wanted.shape,
        vectors=wanted.vectors,
        reads_out=wanted.beta != 0,
        device=wanted.device,
        stream=wanted.stream,
    ) as product:
        queue, place = product.stream.handle, product.c.pointer
        for x, y, z, extra in wanted.pieces(product.a, product.b, product.c, product.vectors):
            if wanted.mode is not None:
                split_products.launch(
                    wanted.mode, wanted.alpha, x, y, wanted.beta, z, stream=queue, workspace=workspace, extra=extra
                )
                continue
            choice = pick(heuristics.problem(x, y, z, extra, gpu))
            x, y, z, extra = arranged(choice, x, y, z, extra)
            run, share = (choice.stage, choice.config), choice.share
            memory = workspace if precision == IEEE else None  # which is for a mode's parts, and may be too small
            launch.launch(
                *run, wanted.alpha, x, y, wanted.beta, z, stream=queue, workspace=memory, share=share, extra=extra
            )
            launches += 1
    glance = arrays.glance_of(left.kind, a) if launches == 1 and wanted.k and epilogue is None else None
    if glance is not None and launch.takes_one_launch(*run, z.rows, z.cols, x.cols):
        known = Known(launch.bind(*run, x, y, z, workspace, share, extra), wanted.shape, choice.swapped)
        arrays.remember(seen, stage, glance, (a, b, out), place, known)
    return product.result if out is None else out


def arranged(choice: Choice, a: Matrix, b: Matrix, c: Matrix, extra: Extra) -> tuple[Matrix, Matrix, Matrix, Extra]:
    """The operands as a choice wants them."""
    return launch.exchanged(a, b, c, extra) if choice.swapped else (a, b, c, extra)


@dataclass(frozen=True, slots=True)
class Request:
    """A product that has been checked.

    Attributes
    ----------
    a, b : Operand
        Where there are no terms to sum up, or alpha is 0, of K = 0: they are not read.
    out : Operand or None
        C, if the caller gave one.
    vectors : list of Operand
        The epilogue's.
    epilogue : callable or None
        What a kernel is built with.
    given : tuple
        Shapes of a and b as the caller gave them.
    shape : tuple of int
        Of C.
    k : int
        Terms of each sum.
    alpha, beta : float
        Rounded to float32.
    stage : str
        A name, or "auto".
    mode : Mode or None
        Of the tensor cores; None for float32's own arithmetic, and for sums without terms.
    device : int
        Ordinal of the device to run on.
    stream : Stream or None
        The caller's.
    """

    a: Operand
    b: Operand
    out: Operand | None
    vectors: list[Operand]
    epilogue: Callable[..., Any] | None
    given: tuple[tuple[int, ...], tuple[int, ...]]
    shape: tuple[int, ...]
    k: int
    alpha: float
    beta: float
    stage: str
    mode: Mode | None
    device: int
    stream: streams.Stream | None

    @property
    def pick(self) -> Pick:
        """What chooses by its stage."""
        auto = self.stage == "auto"
        return partial(autotune_cache.choose, self.device) if auto else partial(heuristics.named, self.stage)

    def pieces(
        self, a: Operand, b: Operand, c: Operand, vectors: list[Operand]
    ) -> Iterator[tuple[Matrix, Matrix, Matrix, Extra]]:
        """What to launch, for operands and vectors that lie where kernels find them."""
        if 0 in self.shape:
            return
        able = _scheduled(launch.device_properties(self.device).cc)
        scheduled = self.mode is None and (self.stage in able or (self.stage == "auto" and bool(able)))
        at_once = batches.AT_ONCE if scheduled else 0 if self.mode is None else 1
        places = tuple(vector.vector() for vector in vectors)
        for x, y, z, batch in batches.products(a, b, c, self.device, at_once=at_once, fold=self.epilogue is None):
            yield x, y, z, Extra(batch, self.epilogue, places)


def checked(
    a: Any,
    b: Any,
    out: Any,
    alpha: float,
    beta: float,
    stream: Any,
    stage: str,
    epilogue: Callable[..., Any] | None,
    epilogue_args: Sequence[Any],
    home: int | None = None,
    precision: str = IEEE,
) -> Request:
    """Check everything that can be checked without compiling; parameters are those of `checked_product`."""
    alpha, beta = real("alpha", alpha), real("beta", beta)
    if beta != 0 and out is None:
        raise ValueError(f"beta is {beta:g} and out is None; expected an array C to scale; pass it as out, or beta=0")
    _check_stage(stage, ANY_GPU, epilogue)  # whether it is known at all: that needs no GPU to say
    check_precision(precision, stage)
    if isinstance(epilogue_args, str) or not isinstance(epilogue_args, Sequence):
        raise TypeError(
            f"epilogue_args is a {type(epilogue_args).__qualname__}; expected a tuple or list of vectors; "
            "pass (vector,) for one"
        )
    given = tuple(epilogue_args)
    if epilogue is None and given:
        raise ValueError(f"epilogue is None and epilogue_args has {len(given)}; expected none; pass an epilogue")
    last_step = None if epilogue is None else epilogues.prepared(epilogue, len(given))
    queue = None if stream is None else streams.Stream.of(stream)

    left, right = arrays.describe("a", a, queue), arrays.describe("b", b, queue)
    target = None if out is None else arrays.describe("out", out, queue)
    vectors = [arrays.describe(f"epilogue_args[{i}]", one, queue) for i, one in enumerate(given)]
    operands = [left, right] if target is None else [left, right, target]
    for operand in operands:
        _check_matrix(operand)
    if left.kind.family != right.kind.family:
        raise TypeError(
            f"a is of kind {left.kind.name} and b of kind {right.kind.name}; expected both of one kind; "
            "convert one of them"
        )
    (m, k), n = left.shape[-2:], right.shape[-1]
    if right.shape[-2] != k:
        raise ValueError(
            f"a has shape {left.shape} and b has shape {right.shape}: {k} columns of a against {right.shape[-2]} rows "
            "of b; expected shapes (M, K) and (K, N); pass a transpose or slice that fits"
        )
    batch = batches.broadcast(left.shape[:-2], right.shape[:-2])
    if batch is None:
        raise ValueError(
            f"a has shape {left.shape} and b has shape {right.shape}: batch dimensions {left.shape[:-2]} and "
            f"{right.shape[:-2]}; expected equal ones, or 1, counted from the last; pass arrays whose batches fit"
        )
    shape, shapes = (*batch, m, n), (tuple(left.shape), tuple(right.shape))
    for vector in vectors:
        _check_vector(vector, left)
    check_size("out", shape)
    if target is not None:
        _check_out(target, shape, left, right, vectors)
    device = _common_device([*operands, *vectors], home)
    if queue is not None and launch.device_count() > 1 and streams.device_of(queue) not in (None, device):
        raise ValueError(
            f"stream belongs to device {streams.device_of(queue)} and the operands lie on device {device}; expected "
            "one device; pass a stream of the operands' device"
        )
    cc = launch.device_properties(device).cc
    _check_stage(stage, cc, epilogue)
    split_products.check_precision(precision, cc)
    precision = split_products.resolved(precision, m, n, k, cc)
    if precision != IEEE and k > launch.MAX_K:
        raise ValueError(f"K is {k} and precision is {precision!r}, which takes up to {launch.MAX_K}; expected less")
    if alpha == 0 or k == 0 or 0 in shape:
        # Sums without terms: a and b are not read, and alpha = 0 keeps an infinite or NaN alpha out of beta * C.
        alpha, k, left, right = 0.0, 0, left.resized(m, 0), right.resized(0, n)
    mode = None if k == 0 else MODES.get(precision)
    return Request(left, right, target, vectors, last_step, shapes, shape, k, alpha, beta, stage, mode, device, queue)


def check_size(name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a float32 array of this shape has more bytes than can be addressed."""
    if arrays.ITEM * prod(extent or 1 for extent in shape) > sys.maxsize:
        raise ValueError(
            f"{name} has shape {shape}, which is more than {sys.maxsize} bytes; expected a size that can be addressed; "
            "use smaller extents"
        )


def check_precision(precision: Any, stage: str) -> None:
    """Raise TypeError or ValueError unless this is a precision, and the stage leaves it a choice."""
    split_products.check_precision(precision)
    if precision != IEEE and stage != "auto":
        raise ValueError(
            f"precision is {precision!r} and stage is {stage!r}, whose arithmetic is float32's; expected one of the "
            "two; leave out the other"
        )


def _scheduled(cc: tuple[int, int]) -> list[str]:
    """Names of the stages that take batches and epilogues, on a GPU."""
    return [stage.name for stage in STAGES.values() if stage.schedule is not None and cc >= stage.min_cc]


def _check_stage(stage: Any, cc: tuple[int, int], epilogue: Any) -> None:
    if not isinstance(stage, str):
        raise TypeError(f"stage is a {type(stage).__qualname__}; expected a str; pass 'auto' or the name of a stage")
    if stage != "auto":
        heuristics.resolve(stage, cc)
    if epilogue is None:
        return
    able = _scheduled(cc)
    if not able:
        raise ValueError(
            f"epilogue is given, and this GPU has compute capability {cc[0]}.{cc[1]}; expected a GPU that one of "
            f"{', '.join(_scheduled(ANY_GPU))} runs on; apply it to the result"
        )
    if stage != "auto" and stage not in able:
        raise ValueError(
            f"stage is {stage!r}, which takes no epilogue; expected 'auto' or one of {', '.join(able)}; pass one of "
            "these"
        )


def real(name: str, value: Any) -> float:
    """A scalar, rounded to float32.

    Raises
    ------
    TypeError, ValueError
        if it is no real number.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    # NumPy registers timedelta64 as an Integral.
    if isinstance(value, np.timedelta64) or not isinstance(value, numbers.Real | np.bool_):
        raise TypeError(
            f"{name} is {value!r}, a {type(value).__qualname__}; expected a real number; pass float({name}) if it is "
            "one"
        )
    try:
        return ctypes.c_float(float(value)).value  # rounds to nearest, and to infinity beyond float32's range
    except OverflowError:
        raise ValueError(f"{name} is an integer beyond the range of a float; expected less; pass a float") from None


def _check_matrix(operand: Operand) -> None:
    name = operand.name
    if len(operand.shape) < 2:
        raise ValueError(
            f"{name} has {len(operand.shape)} dimensions, shape {operand.shape}; expected 2, or more for a batch; "
            f"pass {name}.reshape(rows, columns)"
        )
    _check_elements(operand)


def _check_vector(operand: Operand, left: Operand) -> None:
    if operand.kind.family != left.kind.family:
        raise TypeError(
            f"{operand.name} is of kind {operand.kind.name} and a of kind {left.kind.name}; expected one kind; convert "
            f"{operand.name}"
        )
    if len(operand.shape) != 1:
        raise ValueError(
            f"{operand.name} has {len(operand.shape)} dimensions, shape {operand.shape}; expected 1; "
            f"pass {operand.name}.reshape(-1)"
        )
    _check_elements(operand)


def _check_elements(operand: Operand) -> None:
    name = operand.name
    if operand.dtype != "float32":
        raise TypeError(
            f"{name} has dtype {operand.dtype}; expected float32, and nothing is cast silently; "
            f"pass {operand.kind.cast.format(name)}"
        )
    if operand.device is not None and any(value % arrays.ITEM for value in (operand.pointer, *operand.strides)):
        raise ValueError(
            f"{name} has elements off the 4-byte boundaries that a GPU reads float32 at (address {operand.pointer:#x}, "
            f"strides {operand.strides}); expected aligned elements; pass a contiguous copy of {name}"
        )


def _check_out(
    target: Operand, expected: tuple[int, ...], left: Operand, right: Operand, vectors: list[Operand]
) -> None:
    if target.kind.family != left.kind.family:
        raise TypeError(
            f"out is of kind {target.kind.name} and a and b of kind {left.kind.name}; expected out of the same kind; "
            "pass such an array, or no out"
        )
    if target.shape != expected:
        raise ValueError(
            f"out has shape {target.shape}; expected {expected}, for a of shape {left.shape} and b of shape "
            f"{right.shape}; pass an array of that shape, or no out"
        )
    if target.readonly:
        raise ValueError("out is read-only; expected an array that can be written; pass a copy of it")
    for other in (left, right, *vectors):
        if target.overlaps(other):
            raise ValueError(
                f"out shares memory with {other.name}; expected an array apart from all operands, which are read "
                f"while it is written; pass another out, or a copy of {other.name}"
            )
    if target.overlaps_itself():
        raise ValueError(
            f"out, of shape {target.shape} and strides {target.strides} bytes, has elements that share memory; "
            "expected distinct ones; pass a copy of it"
        )


def _common_device(operands: list[Operand], home: int | None = None) -> int:
    places = {operand.name: operand.device for operand in operands if operand.device is not None}
    if not places:
        return launch.current_device() if home is None else home
    if len(set(places.values())) > 1:
        described = ", ".join(f"{name} on device {device}" for name, device in places.items())
        raise ValueError(f"operands lie on several devices: {described}; expected one; copy them to one device")
    return next(iter(places.values()))
