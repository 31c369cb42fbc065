"""Products of fixed extents, with everything but the operands' addresses decided beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from math import prod
from types import FunctionType
from typing import Any

from .. import arrays
from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.product import FLOAT32, ITEM_BYTES, LAYOUTS, Batch, Product, check_dtypes, dense
from ..kernels.scalars import index, real
from ..kernels.stage import Partition, check_grid
from ..kernels.step import Launches
from ..kernels.tensor_core.config import NarrowRowsConfig
from ..kernels.tensor_core.stage import TensorStage
from ..kernels.tensor_core.tma_stage import TmaStage, described_as, tma_operands
from ..runtime import device as devices
from ..runtime import epilogue as epilogues
from ..runtime import workspace as workspaces
from ..runtime.driver import device_scope
from ..runtime.workspace import ALIGNMENT, Workspace
from ..simulator.switch import SIMULATOR
from ..typing import Array, ArrayT, DeviceLike, DType, Layout, PrecisionName, Scalar, StageChoice
from . import fast_path, heuristics, product, request
from .fast_path import CallCache
from .fp32_auto import resolved
from .heuristics import Choice
from .launch_choice import decomposed
from .precision import IEEE, check_precision
from .prepare import PreparedOperand

NO_VECTORS: tuple[Any, ...] = ()  # the one empty tuple that CPython has


def plan(
    m: int,
    n: int,
    k: int,
    *,
    batch: int | Sequence[int] = (),
    like: Array | None = None,
    device: DeviceLike | None = None,
    stage: StageChoice = "auto",
    layout: Layout = "NN",
    precision: PrecisionName = IEEE,
    dtype: DType | tuple[DType, DType] = FLOAT32,
    epilogue: Callable[..., Any] | None = None,
    workspace: Array | None = None,
) -> Plan:
    """Decide how to compute ``C = alpha * A @ B + beta * C`` for given extents; compile and load the kernels.

    A plan keeps its decision, whatever `autotune` finds out later.

    Parameters
    ----------
    m, n, k : int
        Extents of A (m, k), B (k, n) and C (m, n), in elements; from 0 on.
    batch : int or sequence of int
        Batch dimensions of C, in front of the other two. By default none.
    like : array, optional
        An array on the device to plan for.
    device : int, str or device object, optional
        That device: 0, "cuda:0", or an object of PyTorch, CuPy, Numba or cuda.core. By default the current one.
    stage, precision, epilogue
        As for `tiled_sgemm`. The epilogue's vectors are passed to the plan.
    layout : str
        Expected layouts of A and B, one letter per matrix: "N" by rows, "T" by columns (a transpose of a matrix by
        rows). The stage is chosen and its kernel compiled for these. Others are computed correctly too, in
        general by the same stage: its kernel for them is compiled at the first call that passes such operands. If the
        stage does not take them, "auto" chooses another one, and a stage that was named raises a ValueError.
    dtype : str or tuple of str
        Expected data type of A and B, or one of each: "float32", "float16" or "bfloat16". Others that `tiled_sgemm`
        takes are computed correctly too. A `workspace` must then have room for their conversion.
    workspace : array of shape (elements,), float32, optional
        Contiguous device memory of at least `Plan.workspace_bytes` bytes, which the plan keeps and writes: then its
        calls must follow each other, on one stream, and nothing else may write it, another plan included. By default
        every stream has one, allocated when it is first needed.

    Returns
    -------
    Plan
        To be called with arrays.

    Raises
    ------
    TypeError, ValueError
        For other arguments; for a stage that is unknown, or that the GPU cannot run, or that does not compute in the
        precision or takes no epilogue; for a K beyond the limit that `tiled_sgemm` has.
    GpuUnavailable
        As for `tiled_sgemm`.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_gemm import plan
    >>> multiply = plan(64, 32, 16)
    >>> a, b = np.ones((64, 16), np.float32), np.ones((16, 32), np.float32)
    >>> float(multiply(a, b).max())
    16.0
    """
    m, n, k = index("m", m), index("n", n), index("k", k)
    extents = tuple(index("batch", extent) for extent in (batch if isinstance(batch, Iterable) else (batch,)))
    for name, shape in {"a": (*extents, m, k), "b": (*extents, k, n), "out": (*extents, m, n)}.items():
        request.check_size(name, shape)
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}; pass one of these")
    precision = request.check_names(stage, precision)
    dtypes = check_dtypes(dtype)
    return Plan(m, n, k, _place(like, device), stage, layout, workspace, precision, extents, epilogue, dtypes)


def _place(like: Any, device: Any) -> int:
    found = None if like is None else arrays.describe("like", like, None).device
    if device is None and found is not None:
        return found
    ordinal = devices.ordinal_of(device)
    if found not in (None, ordinal):
        raise ValueError(
            f"like lies on device {found} and device is {ordinal}; expected one device; pass one of the two"
        )
    return ordinal


class Plan:
    """A product of fixed extents on one device; made by `plan`, safe from several host threads.

    Attributes
    ----------
    m, n, k : int
        Extents in elements.
    batch : tuple of int
        Batch dimensions of C.
    device : int
        Ordinal of the device.
    stage : str
        Name of the stage that runs.
    config : TileConfig, WarpgroupConfig or WarpConfig
        Its configuration.
    precision : str
        Precision that was asked for; not "fp32_auto", but what it stands for.
    layout : str
        Layouts that the plan was made for.
    dtypes : tuple of str
        Data types of A and B that it was made for.
    grid, block : tuple of int
        Blocks of the multiplication's launch, and threads of a block, along x, y and z.
    workspace_bytes : int
        Most device memory that a call needs beside the operands. A plan keeps this much for each stream that it is
        called on, for as long as the plan exists.
    """

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        device: int,
        stage: str,
        layout: str,
        memory: Any,
        precision: str = IEEE,
        batch: tuple[int, ...] = (),
        epilogue: Callable[..., Any] | None = None,
        dtypes: tuple[str, str] = (FLOAT32, FLOAT32),
    ) -> None:
        self.m, self.n, self.k, self.batch, self.device, self.layout = m, n, k, batch, device, layout
        self.dtypes = dtypes
        gpu = devices.get_device(device).properties
        check_precision(precision, gpu.cc, stage)
        request.check_takes_epilogue(stage, precision, gpu.cc, epilogue)
        self._product = self._planned(epilogue)
        self.precision = resolved(precision, self._product, gpu)
        request.check_terms(self.precision, k, epilogue)
        self._epilogue, self._asked = epilogue, stage
        self._memory = memory  # keeps it alive
        self._repeat: fast_path.Repeated | None = None
        self._repeated = False
        self._calls, self._tag = CallCache(), (stage, self.precision)
        wanted = heuristics.problem(self._product, gpu, self.precision)
        self._choice = request.chosen(stage, device, wanted)
        launches = [self._prepared(self._choice)]
        self._decomposed: Choice | None = None  # for operands that the choice cannot read
        if isinstance(self._choice.stage, TmaStage) or isinstance(self._choice.config, NarrowRowsConfig):
            self._decomposed = decomposed(wanted)
            launches.append(self._decomposed.launches(self._product, gpu.gpu))
        self.stage, self.config = self._choice.stage.name, self._choice.config
        multiplies = launches[0].multiplication
        self.grid, self.block = multiplies.grid, multiplies.block
        check_grid(self.grid)
        self._room = max(one.scratch_bytes for one in launches), max(one.counters for one in launches)
        self.workspace_bytes = workspaces.total_bytes(*self._room)
        self._workspace = None if memory is None else self._given(memory, *self._room)

    def _planned(self, epilogue: Callable[..., Any] | None) -> Product:
        """Return the product that is planned for: dense operands."""
        # For a C without elements a kernel is chosen too, and never launched.
        m, n, k, count = max(self.m, 1), max(self.n, 1), self.k, max(prod(self.batch), 1)
        a, b = (dense(order, *shape, dtype) for order, shape, dtype in zip(self.layout, ((m, k), (k, n)), self.dtypes))
        c, sizes = dense("N", m, n), [ITEM_BYTES[dtype] for dtype in self.dtypes]
        steps = ((0, 0, sizes[0] * m * k), (0, 0, sizes[1] * k * n), (0, 0, FLOAT32_BYTES * m * n))
        batch = Batch((1, 1, count), *steps) if count > 1 else Batch()
        if epilogue is None:
            return Product(a, b, c, batch)
        vectors = _vectors_of(epilogue)
        return Product(a, b, c, batch, epilogues.prepared(epilogue, vectors), ((1, FLOAT32_BYTES),) * vectors)

    def _prepared(self, choice: Choice) -> Launches:
        """Compile and load the kernels of a choice; return its launches."""
        stage, config, precision = choice.stage, choice.config, choice.precision
        owner, oriented = devices.get_device(self.device), choice.oriented(self._product)
        owner.check(stage, config, stage.kernel(config, oriented, precision))
        if stage.takes_partition and choice.partition is None:
            # Once for all layouts: their kernels may differ in how many blocks the device holds.
            self._choice = choice = choice._replace(partition=owner.partition(stage, config, oriented))
        launches = choice.launches(self._product, owner.properties.gpu)
        if not SIMULATOR:
            owner.load_all([step.kernel for step in launches.steps])
        return launches

    def _given(self, memory: Any, size: int, counters: int) -> Workspace:
        described, elements = arrays.describe("workspace", memory, None), ceil_div(self.workspace_bytes, FLOAT32_BYTES)
        contiguous = described.shape[:1] in ((0,), (1,)) or described.strides == (FLOAT32_BYTES,)
        if described.dtype != "float32" or len(described.shape) != 1 or not contiguous:
            raise ValueError(
                f"workspace has dtype {described.dtype}, shape {described.shape} and strides {described.strides}; "
                f"expected contiguous float32 of one dimension; pass an array of {elements} elements"
            )
        if described.device not in (None, self.device):
            raise ValueError(
                f"workspace lies on device {described.device} and the plan is for device {self.device}; expected one "
                "device; pass memory of the plan's device"
            )
        room = FLOAT32_BYTES * described.shape[0]
        if room < self.workspace_bytes:
            raise ValueError(
                f"workspace has {room} bytes; expected at least {self.workspace_bytes}; "
                f"pass an array of {elements} elements"
            )
        if described.readonly:
            raise ValueError("workspace is read-only; expected memory that can be written; pass another array")
        if room and described.pointer % ALIGNMENT:
            raise ValueError(
                f"workspace is large enough but starts at address {described.pointer:#x}; expected alignment to "
                f"{ALIGNMENT} bytes; pass a newly allocated device array, not a slice of one"
            )
        if described.device is None and described.pointer and not SIMULATOR:
            raise TypeError(
                f"workspace is a {described.kind.name}; expected device memory; pass a device array of Numba, CuPy or "
                f"PyTorch, of {elements} elements"
            )
        made = Workspace(
            described.pointer, max(size, (room - FLOAT32_BYTES * counters) // ALIGNMENT * ALIGNMENT), counters
        )
        if counters and described.device is not None:
            with device_scope(self.device):
                workspaces.clear(made.words[1], counters, described.kind.streams([described], self.device)[0].handle)
        return made

    def __repr__(self) -> str:
        batch = f"batch={self.batch} " if self.batch else ""
        return (
            f"<Plan m={self.m} n={self.n} k={self.k} {batch}device={self.device} layout={self.layout} "
            f"precision={self.precision} stage={self.stage} "
            f"config={self.config.name} grid={self.grid} block={self.block} workspace_bytes={self.workspace_bytes}>"
        )

    def __call__(
        self,
        a: ArrayT | PreparedOperand[ArrayT],
        b: ArrayT | PreparedOperand[ArrayT],
        out: ArrayT | None = None,
        alpha: Scalar = 1.0,
        beta: Scalar = 0.0,
        stream: Any = None,
        epilogue_args: Sequence[Any] = NO_VECTORS,
        *,
        c: Array | None = None,
    ) -> ArrayT:
        """Compute ``C = alpha * A @ B + beta * C``, and the plan's epilogue.

        Parameters, result and errors are those of `tiled_sgemm`; a ValueError also for operands of other extents than
        the plan's, or on another device.
        """
        if type(alpha) is not float:
            alpha = real("alpha", alpha)
        if type(beta) is not float:
            beta = real("beta", beta)
        repeat = self._repeat
        if repeat is not None and stream is None and c is None and epilogue_args is NO_VECTORS:  # noqa: SIM102
            if repeat(a, b, out, alpha, beta):
                return out  # type: ignore[return-value]  # None is refused by `repeat`
        epilogue = self._epilogue
        tag: Any
        if c is not None:
            tag = None
        elif epilogue is None and type(epilogue_args) is tuple and not epilogue_args:
            tag = self._tag
        else:
            tag = fast_path.tag_of(self._asked, self.precision, epilogue, epilogue_args)
        if tag is not None:
            done = fast_path.try_fast(self._calls, tag, a, b, out, alpha, beta, stream, epilogue_args)
            if done is not None:
                if not self._repeated and epilogue is None:
                    self._repeated, self._repeat = True, self._calls.repeating(tag, a, b, out)
                return done
        return product.checked_product(
            a,
            b,
            out,
            alpha,
            beta,
            stream,
            stage=self._asked,
            precision=self.precision,
            cache=self._calls,
            tag=tag,
            epilogue=epilogue,
            epilogue_args=epilogue_args,
            home=self.device,
            chooser=self._chooser,
            workspace=self._workspace,
            c=c,
        )

    def _chooser(self, wanted: request.Request) -> request.Chooser:
        a, b = wanted.given
        if (a[-2:], b[-2:]) != ((self.m, self.k), (self.k, self.n)) or wanted.shape[:-2] != self.batch:
            batch = f" and a batch of {self.batch}" if self.batch else ""
            raise ValueError(
                f"a has shape {a} and b has shape {b}, and this plan is for shapes ({self.m}, {self.k}) "
                f"and ({self.k}, {self.n}){batch}; pass arrays of these shapes, or make another plan"
            )
        if wanted.device != self.device:
            raise ValueError(
                f"operands lie on device {wanted.device} and this plan is for device {self.device}; expected one "
                "device; pass arrays of the plan's device, or make another plan"
            )

        def choose(part: Product) -> Choice:
            choice, planned = self._choice, self._product
            if wanted.precision != self.precision:  # sums without terms
                return wanted.choose(part)
            same = (part.m, part.n, part.batch.matrices) == (planned.m, planned.n, planned.batch.matrices)
            narrow = isinstance(choice.config, NarrowRowsConfig) and not choice.oriented(part).narrow_a
            described = not isinstance(choice.stage, TmaStage) or described_as(
                tma_operands(part), tma_operands(planned)
            )
            if narrow or not described:
                return self._other(part, same and part.k == planned.k, wanted)
            if same and part.k in (0, planned.k):
                return choice
            return self._undivided(part) if choice.partition is None else self._divided(part)

        return choose

    def _other(self, part: Product, same: bool, wanted: request.Request) -> Choice:
        """Return a choice for operands that the plan's cannot read, for which the caller's memory is large enough."""
        decomposed = None if self._workspace is None else self._decomposed
        if decomposed is not None and same:
            return decomposed
        found = wanted.choose(part)
        return found if decomposed is None or self._holds(found, part) else decomposed._replace(partition=None)

    def _holds(self, choice: Choice, part: Product) -> bool:
        """Return True if the plan has the memory for a part."""
        launches, (size, counters) = choice.launches(part, devices.device_properties(self.device).gpu), self._room
        return launches.scratch_bytes <= size and (launches.counters <= counters or launches.paced)

    def _undivided(self, part: Product) -> Choice:
        """Return the plan's choice for a part of another shape, with one block per tile of C."""
        choice, partition = self._choice, None
        if choice.stage.takes_partition:  # whose default would be to divide the part
            tiles = ceil_div(part.m, choice.config.BM) * ceil_div(part.n, choice.config.BN) * part.batch.matrices
            partition = Partition(tiles, tiles)
        # Of the transpose of a tensor-core product, the other operand is decomposed: the plan has memory for that one.
        return choice._replace(partition=partition, swapped=choice.swapped and isinstance(choice.stage, TensorStage))

    def _divided(self, part: Product) -> Choice:
        """Return the plan's choice for a part of another shape, with sums divided as far as its memory allows."""
        choice, owner = self._choice, devices.get_device(self.device)
        wanted = heuristics.problem(part, owner.properties, choice.precision)
        ranked = [one for one in heuristics.ranked(wanted, choice.stage) if one.partition is not None]
        others = [one for one in ranked if (one.config, one.swapped) == (choice.config, choice.swapped)]
        if choice.stage.takes_partition:
            others.append(choice._replace(partition=owner.partition(choice.stage, choice.config, part), swapped=False))
        return next((other for other in others if self._holds(other, part)), self._undivided(part))


def _vectors_of(epilogue: Callable[..., Any]) -> int:
    """Return how many vectors an epilogue takes: its parameters without a default, behind the first three."""
    function = getattr(epilogue, "py_func", epilogue)
    if not isinstance(function, FunctionType):
        return 0  # `prepared` raises the error
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in parameters if one.kind in kinds and one.default is one.empty]
    return max(len(required) - 3, 0)
