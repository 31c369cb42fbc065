"""Operands that are decomposed once and multiplied many times."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple

from .. import arrays
from ..arrays import Operand, streams
from ..device.units import FLOAT32_BYTES
from ..kernels import STAGES
from ..kernels.product import FLOAT32
from ..kernels.tensor_core.decomposition import preparation, prepared_parts
from ..kernels.tensor_core.stage import TensorStage
from ..runtime import device as devices
from ..runtime.bound_product import BoundProduct
from ..typing import ArrayT, PrecisionName
from .fp32_auto import AUTO_K, AUTO_PRECISION, product_for, resolved
from .heuristics import TF32_TMA
from .precision import FP32_AUTO, IEEE, canonical, check_precision, tensor_stage
from .request import Request, check_elements, check_terms

__all__ = ["PreparedOperand", "Unwrapped", "prepare", "unwrapped"]

SIDES = ("a", "b")


def prepare(
    array: ArrayT, precision: PrecisionName, *, side: Literal["a", "b"] = "b", stream: Any = None
) -> PreparedOperand[ArrayT]:
    """Decompose an operand that several products have in common, such as a layer's weights, once for all of them.

    The tensor-core precisions decompose both operands of each product into narrow parts. A product with a prepared
    operand uses these parts, unless it is faster without them. The result has the same bits as without, unless the
    product without it is computed in a more accurate precision, as thin ones may be (docs/precision.md).

    Parameters
    ----------
    array : array of shape (K, N) or, for side "a", (M, K); float32
        A matrix in device memory, with any strides. It is not copied: products read it where sums are NaN, or 2**126 or
        more in magnitude, so it must stay as it is.
    precision : str
        Precision of the products, see `tiled_sgemm`. There are no parts for "ieee", for "fp32_auto" where that always
        stands for "ieee", and for "tf32" on compute capability 9.0, which reads most operands as they are: products
        then take the array itself.
    side : str
        Operand of the products that it will be: "b" or "a".
    stream : optional
        Stream to run on, see `tiled_sgemm`.

    Returns
    -------
    PreparedOperand
        To be passed to `tiled_sgemm`, a `Plan` or `explain` in place of the operand.

    Raises
    ------
    TypeError, ValueError
        For arrays and precisions that `tiled_sgemm` refuses; for other dtypes than float32, and other dimensions than
        two; for arrays in host memory, if there are to be parts.
    GpuUnavailable
        As for `tiled_sgemm`.

    Notes
    -----
    The parts are a copy. After a change of the array, call `PreparedOperand.update`. They are in memory of the array's
    library, in the order of the stream on which they are made: a product on another stream must be ordered after that
    by the caller, as for the array itself. Work can be captured into CUDA graphs, which then need the prepared operand
    for as long as they exist.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_gemm import prepare, tiled_sgemm
    >>> weights = prepare(np.ones((3, 4), np.float32), "ieee")
    >>> tiled_sgemm(np.ones((2, 3), np.float32), weights)
    array([[3., 3., 3., 3.],
           [3., 3., 3., 3.]], dtype=float32)
    """
    return PreparedOperand(array, precision, side, stream)


class PreparedOperand(Generic[ArrayT]):
    """An operand with its parts; made by `prepare`.

    Attributes
    ----------
    array : array
        The operand.
    precision : str
        Precision of products with it.
    side : str
        "a" or "b", the operand that it may be.
    shape : tuple of int
        Its extents in elements.
    device : int
        Ordinal of its device.
    nbytes : int
        Bytes of the parts; 0 if it has none.
    """

    def __init__(self, array: ArrayT, precision: str, side: str, stream: Any) -> None:
        self.array, self.precision, self.side = array, canonical(precision), side
        if side not in SIDES:
            raise ValueError(f"side is {side!r}; expected 'a' or 'b'; pass the operand that the array will be")
        operand = self._described(None if stream is None else streams.Stream.of(stream))
        self.shape = operand.shape
        self.device = devices.current_device() if operand.device is None else operand.device
        cc = devices.device_properties(self.device).cc
        check_precision(self.precision, cc)
        # The precision whose parts it has.
        self.narrow = _narrow(self.precision, self._extents[1], cc) if min(self.shape) else IEEE
        check_terms(self.narrow, self._extents[1])
        self.parts: Any = None
        self._parts: Operand | None = None
        self._bound: tuple[Hashable, BoundProduct] | None = None
        self.update(stream)

    @property
    def _extents(self) -> tuple[int, int]:
        """Rows of A, or columns of B, and terms of the sums."""
        first, second = self.shape
        return (first, second) if self.side == "a" else (second, first)

    @property
    def nbytes(self) -> int:
        """Bytes of the parts; 0 if it has none."""
        return 0 if self._parts is None else FLOAT32_BYTES * self._parts.shape[0]

    def __repr__(self) -> str:
        return (
            f"<PreparedOperand side={self.side} shape={self.shape} precision={self.precision} device={self.device} "
            f"nbytes={self.nbytes}>"
        )

    def update(self, stream: Any = None) -> None:
        """Decompose the array again, after it has changed.

        The parts keep their address, so captured graphs use the new ones. Products enqueued before on other streams
        must be ordered before this by the caller.

        Parameters
        ----------
        stream : optional
            Stream to run on, see `tiled_sgemm`.
        """
        queue = None if stream is None else streams.Stream.of(stream)
        operand = self._described(queue)
        kind, device = operand.kind, self.device
        if operand.shape != self.shape or operand.device not in (None, device):
            raise ValueError(
                f"the array has shape {operand.shape} on device {operand.device}, and was prepared with shape "
                f"{self.shape} on device {device}; expected the same; prepare it again"
            )
        streams.check_device(queue, device)
        if self.narrow != IEEE:
            self._decompose(operand, queue)
        self._kind, self._version = kind, kind.version(self.array)

    def _decompose(self, operand: Operand, queue: streams.Stream | None) -> None:
        if operand.device is None:
            raise TypeError(
                f"{operand.name} is a {operand.kind.name}, which each product copies; expected an array in device "
                f"memory; copy it there, for instance with numba.cuda.to_device({operand.name})"
            )
        kind, owner = operand.kind, devices.get_device(self.device)
        stage = tensor_stage(owner.properties.cc)
        assert stage is not None, "the precision was checked"
        mn, k = self._extents
        precision = stage.precision_for(self.narrow, k)
        followed = kind.streams([operand], self.device)
        own = followed[0] if queue is None else queue
        if self._parts is None:
            layout = prepared_parts(precision, mn, k)
            # On the operand's stream, not on another that is passed here: products then run where they would anyway.
            self._parts = kind.empty((layout.rows * layout.cols,), self.device, followed[0])
            self.parts = self._parts.array
        for producer in followed:
            streams.wait_for(own, producer, self.device)
        matrix = operand.matrix(self.device, operand.pointer, operand.shape, operand.strides)
        x = matrix.layout if self.side == "a" else matrix.layout.transposed
        if self._bound is None or self._bound[0] != x:
            self._bound = x, owner.loaded(preparation(precision, x, owner.properties.gpu))
        self._bound[1].enqueue(1.0, matrix.pointer, 0, 0.0, 0, own.handle, [self._parts.pointer])
        kind.keep([operand, self._parts], self.device, own, [*followed, *kind.streams([self._parts], self.device)])

    def _described(self, queue: streams.Stream | None) -> Operand:
        found = arrays.describe("array", self.array, queue)
        if found.dtype != FLOAT32:
            raise TypeError(
                f"{found.name} has dtype {found.dtype}; expected {FLOAT32}; pass {found.kind.cast.format(found.name)}"
            )
        check_elements(found)
        if len(found.shape) != 2:
            raise ValueError(
                f"{found.name} has {len(found.shape)} dimensions, shape {found.shape}; expected 2; prepare each matrix "
                "of a batch by itself"
            )
        return found

    def check_current(self) -> None:
        """Raise ValueError if the array is known to have changed since it was decomposed."""
        if self.narrow != IEEE and self._kind.version(self.array) != self._version:
            raise ValueError(
                f"{self.side} has changed since it was prepared; expected parts that are up to date; call update() of "
                "the prepared operand after each change"
            )


def _narrow(precision: str, k: int, cc: tuple[int, int]) -> str:
    """Return the precision whose parts products in a precision read; "ieee" if they read none."""
    stage = tensor_stage(cc)
    if precision == FP32_AUTO:
        precision = AUTO_PRECISION if k >= AUTO_K and stage is not None and stage.only_cc == cc else IEEE
    if stage is None or (precision in TF32_TMA.precisions and TF32_TMA.runs_on(cc)):
        return IEEE
    return precision


class Unwrapped(NamedTuple):
    """Operands of a product of which at least one was prepared.

    Attributes
    ----------
    a, b : array
        The operands themselves.
    precision : str
        Precision of the product.
    arithmetic : str
        What that stands for, if there are parts.
    prepared : tuple of bool
        True for A, and for B, if the product uses its parts.
    parts : tuple of array
        These.
    """

    a: Any
    b: Any
    precision: str
    arithmetic: str
    prepared: tuple[bool, bool]
    parts: tuple[Any, ...]

    def of(self, request: Request) -> Request:
        """Return a request for the operands with the parts of those that were prepared."""
        if request.precision != self.arithmetic:  # there are no terms
            return request
        memory = [arrays.describe("parts", one, request.stream) for one in self.parts]
        return replace(request, vectors=[*request.vectors, *memory], prepared=self.prepared)


def unwrapped(
    a: Any, b: Any, stage: str, precision: str | None, epilogue: Callable[..., Any] | None
) -> Unwrapped | None:
    """Return what prepared operands of a product stand for; None if neither A nor B is one.

    Parameters
    ----------
    a, b, stage, precision, epilogue
        Those of `tiled_sgemm`.

    Raises
    ------
    ValueError
        For an operand of the other side, of another precision, or with parts that are known to be out of date.
    """
    of_a, of_b = type(a) is PreparedOperand, type(b) is PreparedOperand
    if not of_a and not of_b:
        return None
    if of_a is not of_b:  # usual calls, in few steps
        one, side = (a, "a") if of_a else (b, "b")
        wanted = one.precision
        if one.side == side and (precision is None or precision == wanted) and wanted != FP32_AUTO:
            one.check_current()
            uses = one.parts is not None and one.narrow == wanted and _decomposes(stage)
            x, y = (one.array, b) if of_a else (a, one.array)
            return Unwrapped(x, y, wanted, wanted, (uses and of_a, uses and of_b), (one.parts,) if uses else ())
    given = [one for one in (a, b) if type(one) is PreparedOperand]
    for name, one in zip(SIDES, (a, b)):
        if type(one) is PreparedOperand and one.side != name:
            raise ValueError(
                f"{name} was prepared as {one.side}; expected an operand that was prepared as {name}; pass it as "
                f"{one.side}, or call prepare(array, precision, side={name!r})"
            )
    named: dict[str, None] = dict.fromkeys(one.precision for one in given)
    if len(named) > 1:
        named.pop(FP32_AUTO, None)  # it goes with what it may stand for
    if len(named) > 1:
        raise ValueError(
            f"a was prepared for {a.precision!r} and b for {b.precision!r}; expected the same; prepare one of them "
            "again"
        )
    wanted = next(iter(named)) if precision is None else canonical(precision)
    for one in given:
        if wanted != one.precision and not (one.precision == FP32_AUTO and wanted in (IEEE, AUTO_PRECISION)):
            raise ValueError(
                f"precision is {wanted!r} and {one.side} was prepared for {one.precision!r}; expected the same; ask "
                f"for {one.precision!r}, or call prepare(array, {wanted!r}, side={one.side!r})"
            )
        one.check_current()
    x, y = (one.array if type(one) is PreparedOperand else one for one in (a, b))
    kept = [one for one in given if one.parts is not None] if _decomposes(stage) else []
    arithmetic: str = wanted
    if kept and wanted == FP32_AUTO:
        left, right = (arrays.describe(name, one, None) for name, one in zip(SIDES, (x, y)))
        if left.shape and right.shape and 0 not in (*left.shape, *right.shape):  # else there are no sums
            gpu = devices.device_properties(kept[0].device)
            arithmetic = resolved(wanted, product_for(left, right, epilogue), gpu)
    kept = [one for one in kept if one.narrow == arithmetic]
    of_a, of_b = (any(one is operand for one in kept) for operand in (a, b))
    return Unwrapped(x, y, wanted, arithmetic, (of_a, of_b), tuple(one.parts for one in kept))


def _decomposes(stage: str) -> bool:
    """Return True for a stage that multiplies prepared parts, and for "auto"; other stages read operands themselves."""
    return stage == "auto" or stage in [
        one.name for one in STAGES.values() if isinstance(one, TensorStage) and one.complete
    ]
