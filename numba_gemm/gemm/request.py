"""Check the arguments of a product; the result is a `Request`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from .. import arrays
from ..arrays import Operand, streams
from ..device.units import FLOAT32_BYTES
from ..kernels import STAGES
from ..kernels.ladder import STAGES as LADDER
from ..kernels.product import DTYPES, Product
from ..kernels.scalars import real
from ..kernels.stage import IEEE, MAX_K
from ..runtime import device as devices
from ..runtime import epilogue as epilogues
from ..runtime.launch import product_of
from ..runtime.matrix import Matrix, Vector
from ..typing import PrecisionName
from . import autotune_cache, batches, heuristics
from .fp32_auto import product_for, resolved
from .heuristics import Choice
from .ladder_heuristics import rated
from .precision import FP32_AUTO, canonical, check_precision, tensor_stage
from .stage_names import ANY_GPU, check_stage_precision, resolve

LOG = logging.getLogger("numba_gemm.choices")

Chooser = Callable[[Product], Choice]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a product that is chosen for and launched by itself.

    Attributes
    ----------
    a, b, c : Matrix
        Operands; of a batch, the first matrices.
    vectors : tuple of Vector
        The epilogue's vectors, and parts of prepared operands.
    product : Product
        Layouts, batch and epilogue.
    """

    a: Matrix
    b: Matrix
    c: Matrix
    vectors: tuple[Vector, ...]
    product: Product


@dataclass(frozen=True, slots=True)
class Request:
    """A product that has been checked.

    Attributes
    ----------
    a, b : Operand
        Operands; with K = 0 where alpha is 0, since they are not read.
    out : Operand or None
        C, if the caller gave one.
    addend : Operand or None
        Array to copy into C beforehand.
    vectors : list of Operand
        The epilogue's vectors, then the parts of prepared operands.
    epilogue : callable or None
        The epilogue, as kernels are built with it.
    given : tuple
        Shapes of a and b as the caller gave them.
    shape : tuple of int
        Shape of C; without the axis of rows if a is a vector, and without that of columns if b is one.
    k : int
        Terms of each sum.
    alpha, beta : float
        Scalars, rounded to float32.
    stage : str
        Name of a stage, or "auto".
    precision : str
        Precision; not "fp32_auto", but what it stands for, and "ieee" for sums without terms.
    device : int
        Ordinal of the device to run on.
    stream : Stream or None
        The caller's.
    prepared : tuple of bool
        See `Product`.
    """

    a: Operand
    b: Operand
    out: Operand | None
    addend: Operand | None
    vectors: list[Operand]
    epilogue: Callable[..., Any] | None
    given: tuple[tuple[int, ...], tuple[int, ...]]
    shape: tuple[int, ...]
    k: int
    alpha: float
    beta: float
    stage: str
    precision: str
    device: int
    stream: streams.Stream | None
    prepared: tuple[bool, bool] = (False, False)

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns of C; 1 for an axis that its shape lacks."""
        a, b = self.given
        return a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1

    def choose(self, product: Product) -> Choice:
        """Return the kernel for a part of the product: the stage that was named, the one measured, or the model's."""
        wanted = heuristics.problem(product, devices.device_properties(self.device), self.precision)
        return chosen(self.stage, self.device, wanted)

    def parts(self, a: Operand, b: Operand, c: Operand, vectors: list[Operand]) -> Iterator[Part]:
        """Yield the parts of the product, for operands and vectors in memory that kernels can read."""
        if 0 in self.shape:
            return
        if len(b.shape) == 1:
            b, c = b.as_columns(), c.as_columns()
        if len(a.shape) == 1:
            a, c = a.as_rows(), c.as_rows()
        places, count = tuple(one.vector() for one in vectors), len(vectors) - sum(self.prepared)  # the epilogue's
        at_once = batch_dimensions(self.stage, self.precision, devices.device_properties(self.device).cc)
        for x, y, z, batch in batches.products(a, b, c, self.device, at_once=at_once, fold=self.epilogue is None):
            yield Part(x, y, z, places, product_of(x, y, z, batch, self.epilogue, places[:count], self.prepared))


@cache
def batch_dimensions(stage: str, precision: str, cc: tuple[int, int]) -> int:
    """Return the batch dimensions that one launch of a stage takes, or of all stages that "auto" may mean."""
    if stage != "auto":
        return STAGES[stage].batch_dimensions
    found = rated(cc)[0][0] if precision == IEEE else tensor_stage(cc)
    assert found is not None, "the precision was checked"
    return found.batch_dimensions


def chosen(stage: str, device: int | None, wanted: heuristics.Problem) -> Choice:
    """Return the choice for a problem: of a stage's name, or of "auto", as measured on a device or by the model."""
    choice = autotune_cache.choose(device, wanted) if stage == "auto" else heuristics.named(stage, wanted)
    if device is not None and LOG.isEnabledFor(logging.DEBUG):
        _log(choice, device, wanted)
    return choice


def _log(choice: Choice, device: int, wanted: heuristics.Problem) -> None:
    batch = f" x {wanted.matrices}" if wanted.matrices > 1 else ""
    LOG.debug(
        "M=%d N=%d K=%d%s, %s, device %d: stage %s, configuration %s: %s",
        *(wanted.m, wanted.n, wanted.k, batch, choice.precision, device, choice.stage.name, choice.config.name),
        choice.reason or heuristics.choose(wanted).reason,
    )


def checked(
    a: Any,
    b: Any,
    out: Any,
    alpha: Any,
    beta: Any,
    stream: Any,
    stage: str,
    epilogue: Callable[..., Any] | None,
    epilogue_args: Sequence[Any],
    home: int | None = None,
    precision: str = IEEE,
    c: Any = None,
) -> Request:
    """Check everything that can be checked without compiling; parameters are those of `checked_product`."""
    alpha, beta = real("alpha", alpha), real("beta", beta)
    if beta != 0 and out is None and c is None:
        raise ValueError(f"beta is {beta:g} and out is None; expected an array C; pass out, beta=0 or tiled_sgemm's c")
    precision = check_names(stage, precision)  # this needs no GPU
    check_takes_epilogue(stage, precision, ANY_GPU, epilogue)
    if isinstance(epilogue_args, str) or not isinstance(epilogue_args, Sequence):
        raise TypeError(
            f"epilogue_args is of type {type(epilogue_args).__qualname__}; expected a tuple or list of vectors; "
            "pass (vector,) for one"
        )
    given = tuple(epilogue_args)
    if epilogue is None and given:
        raise ValueError(f"epilogue is None and epilogue_args has {len(given)}; expected none; pass an epilogue")
    last_step = None if epilogue is None else epilogues.prepared(epilogue, len(given))
    queue = None if stream is None else streams.Stream.of(stream)

    left, right = arrays.describe("a", a, queue), arrays.describe("b", b, queue)
    target = None if out is None else arrays.describe("out", out, queue)
    addend = None if c is None else arrays.describe("c", c, queue)
    vectors = [arrays.describe(f"epilogue_args[{i}]", one, queue) for i, one in enumerate(given)]
    operands = [one for one in (left, right, target, addend) if one is not None]
    for operand in operands:
        check_elements(operand)
    if left.kind.family != right.kind.family:
        raise TypeError(
            f"a is of kind {left.kind.name} and b of kind {right.kind.name}; expected both of one kind; "
            "convert one of them"
        )
    for operand in (left, right):
        if not operand.shape:
            raise ValueError(f"{operand.name} has 0 dimensions; expected 2, or 1 for a vector; pass a number as alpha")
    *rows, k = left.shape[-2:]
    terms, *cols = right.shape[-2:]
    if terms != k:
        raise ValueError(
            f"a has shape {left.shape} and b has shape {right.shape}: {k} {'columns' if rows else 'elements'} of a "
            f"against {terms} {'rows' if cols else 'elements'} of b; expected shapes (M, K) and (K, N)"
            f"{'' if rows and cols else ', or (K,) for a vector'}; pass a transpose or slice that fits"
        )
    batch = batches.broadcast(left.shape[:-2], right.shape[:-2])
    if batch is None:
        raise ValueError(
            f"a has shape {left.shape} and b has shape {right.shape}: batch dimensions {left.shape[:-2]} and "
            f"{right.shape[:-2]}; expected equal ones, or 1, counted from the last; pass arrays whose batches fit"
        )
    shape, shapes = (*batch, *rows, *cols), (tuple(left.shape), tuple(right.shape))
    for vector in vectors:
        _check_vector(vector, left)
    check_size("out", shape)
    if target is not None:
        _check_out(target, shape, left, right, vectors)
    if addend is not None:
        _check_addend(addend, shape, left, target)
        if beta == 0 or (target is not None and addend.is_same(target)):
            addend = None
    device = _common_device([*operands, *vectors], home)
    streams.check_device(queue, device)
    gpu = devices.device_properties(device)
    if stage != "auto":
        resolve(stage, gpu.cc)
    check_precision(precision, gpu.cc, stage)
    empty = alpha == 0 or k == 0 or 0 in shape
    if precision == FP32_AUTO:
        precision = IEEE if empty else resolved(precision, product_for(left, right, epilogue), gpu)
    check_takes_epilogue(stage, precision, gpu.cc, epilogue)
    if empty:
        # Sums without terms: a and b are not read, and alpha = 0 keeps an infinite or NaN alpha out of beta * C.
        alpha, k, left, right = 0.0, 0, left.emptied(len(left.shape) - 1), right.emptied(max(len(right.shape) - 2, 0))
        stage, precision = (stage if stage in LADDER else "auto"), IEEE
    check_terms(precision, k, epilogue)
    return Request(
        left, right, target, addend, vectors, last_step, shapes, shape, k, alpha, beta, stage, precision, device, queue
    )


def check_size(name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a float32 array of this shape has more bytes than can be addressed."""
    if FLOAT32_BYTES * prod(extent or 1 for extent in shape) > sys.maxsize:
        raise ValueError(
            f"{name} has shape {shape}, which is more than {sys.maxsize} bytes; expected a size that can be addressed; "
            "use smaller extents"
        )


def check_terms(precision: str, k: int, epilogue: Any = None) -> None:
    """Raise ValueError if sums are too long for a precision of the tensor cores, or for an epilogue."""
    if k > MAX_K and (precision != IEEE or epilogue is not None):
        given = "an epilogue is given" if precision == IEEE else f"precision is {precision!r}"
        raise ValueError(f"K is {k} and {given}, which takes up to {MAX_K}; expected less")


def check_names(stage: Any, precision: Any) -> PrecisionName:
    """Return the package's name of a precision.

    Raises
    ------
    TypeError, ValueError
        Unless these are a stage and a precision that it computes in.
    """
    if not isinstance(stage, str):
        raise TypeError(
            f"stage is of type {type(stage).__qualname__}; expected a str; pass 'auto' or the name of a stage"
        )
    precision = canonical(precision)
    if stage == "auto":
        return precision
    found = resolve(stage, ANY_GPU)
    if precision == FP32_AUTO:
        raise ValueError(
            f"precision is {precision!r} and stage is {stage!r}; expected stage 'auto', which leaves a choice; name "
            f"the precision, one of {', '.join(found.precisions)}, or leave out the stage"
        )
    check_stage_precision(found, precision)
    return precision


def _taking_epilogues(precision: str, cc: tuple[int, int]) -> list[str]:
    """Return the names of the stages that take an epilogue, on a GPU of a compute capability."""
    found = [stage for stage in STAGES.values() if stage.takes_epilogue and (cc == ANY_GPU or stage.runs_on(cc))]
    return [stage.name for stage in found if precision == FP32_AUTO or precision in stage.precisions]


def check_takes_epilogue(stage: str, precision: str, cc: tuple[int, int], epilogue: Any) -> None:
    """Raise ValueError if an epilogue is given, and the stage, or the GPU, takes none."""
    if epilogue is None:
        return
    able = _taking_epilogues(precision, cc)
    if not able:
        raise ValueError(
            f"epilogue is given, and this GPU has compute capability {cc[0]}.{cc[1]}; expected a GPU that one of "
            f"{', '.join(_taking_epilogues(precision, ANY_GPU))} runs on; apply it to the result"
        )
    if stage != "auto" and stage not in able:
        raise ValueError(
            f"stage is {stage!r}, which takes no epilogue; expected 'auto' or one of {', '.join(able)}; pass one"
        )


def _check_family(operand: Operand, left: Operand) -> None:
    if operand.kind.family != left.kind.family:
        raise TypeError(
            f"{operand.name} is of kind {operand.kind.name} and a of kind {left.kind.name}; expected one kind; convert "
            f"{operand.name}"
        )


def _check_vector(operand: Operand, left: Operand) -> None:
    _check_family(operand, left)
    if len(operand.shape) != 1:
        raise ValueError(
            f"{operand.name} has {len(operand.shape)} dimensions, shape {operand.shape}; expected 1; "
            f"pass {operand.name}.reshape(-1)"
        )
    check_elements(operand)


# A converted copy would take the result with it, unless the caller keeps it.
OTHER_OUT = "allocate another array, copy out into it if beta is not 0, and pass it"


def check_elements(operand: Operand) -> None:
    """Raise TypeError for a dtype that products do not take, and ValueError for elements that are not aligned."""
    name, is_out = operand.name, operand.name == "out"
    accepted = DTYPES if name in ("a", "b") else DTYPES[:1]
    if operand.dtype not in accepted:
        raise TypeError(
            f"{name} has dtype {operand.dtype}; expected {' or '.join(accepted)}, and nothing is cast silently; "
            + (OTHER_OUT if is_out else f"pass {operand.kind.cast.format(name)}")
        )
    size = operand.itemsize
    if operand.device is not None and not operand.is_aligned:
        raise ValueError(
            f"{name} has elements off the {size}-byte boundaries that a GPU reads {operand.dtype} at (address "
            f"{operand.pointer:#x}, strides {operand.strides}); expected aligned elements; "
            + (OTHER_OUT if is_out else f"pass a contiguous copy of {name}")
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
        raise ValueError(f"out is read-only; expected an array that can be written; {OTHER_OUT}")
    for other in (left, right, *vectors):
        if target.overlaps(other):
            raise ValueError(
                f"out shares memory with {other.name}; expected an array apart from all operands, which are read "
                f"while it is written; pass another out, or a copy of {other.name}"
            )
    if target.overlaps_itself():
        raise ValueError(
            f"out, of shape {target.shape} and strides {target.strides} bytes, has elements that share memory; "
            f"expected distinct ones; {OTHER_OUT}"
        )


def _check_addend(addend: Operand, shape: tuple[int, ...], left: Operand, target: Operand | None) -> None:
    _check_family(addend, left)
    if addend.broadcast(shape) is None:
        raise ValueError(f"c has shape {addend.shape}; expected {shape}, or a shape that broadcasts to it; reshape c")
    if target is not None and not addend.is_same(target) and target.overlaps(addend):
        raise ValueError("out shares memory with c, and is not the same array; pass out=c for both, or another out")


def _common_device(operands: list[Operand], home: int | None = None) -> int:
    places = {operand.name: operand.device for operand in operands if operand.device is not None}
    if not places:
        return devices.current_device() if home is None else home
    if len(set(places.values())) > 1:
        described = ", ".join(f"{name} on device {device}" for name, device in places.items())
        raise ValueError(f"operands lie on several devices: {described}; expected one; copy them to one device")
    return next(iter(places.values()))
