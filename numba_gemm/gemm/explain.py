"""Description of the choice that `tiled_sgemm` would make for given operands, without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from .. import arrays
from ..arrays import ArrayKind, Copies, Operand
from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.ladder.partitions import default_partition
from ..kernels.ladder.stage import ANY, FITS, LadderStage, Variant
from ..kernels.product import FLOAT32, ITEM_BYTES, LAYOUTS, Product, check_dtypes
from ..kernels.stage import Partition, Stage, check_grid
from ..kernels.step import Launches, Slot
from ..kernels.tensor_core.fused_stage import FusedStage
from ..kernels.tensor_core.stage import TensorStage, precision_for
from ..kernels.tensor_core.tma_stage import TmaOperands, TmaStage, tma_operands
from ..models.gpu_names import dotted
from ..models.occupancy import LIMITS
from ..runtime import device as devices
from ..runtime import workspace as workspaces
from ..runtime.device import DeviceProperties
from ..runtime.launch import product_of
from ..typing import Array, ArrayT, ComputeCapability, DeviceLike, DType, Layout, PrecisionName, Scalar, StageChoice
from . import batches, heuristics, tensor_heuristics
from .explanation import Explanation
from .fp32_auto import auto_reason, described, product_for, resolved
from .heuristics import Choice
from .occupancy import occupancy
from .precision import FP32_AUTO, IEEE, canonical, check_precision
from .precompile import model_of
from .prepare import PreparedOperand, unwrapped
from .request import batch_dimensions, check_names, check_size, check_terms, checked, chosen
from .stage_names import resolve

__all__ = ["Explanation", "explain", "explain_shape"]


def explain(
    a: ArrayT | PreparedOperand[ArrayT],
    b: ArrayT | PreparedOperand[ArrayT],
    out: ArrayT | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    c: Array | None = None,
    stage: StageChoice = "auto",
    precision: PrecisionName | None = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
) -> Explanation:
    """Describe what `tiled_sgemm` would do with these arguments; nothing is launched or copied.

    Parameters and errors are those of `tiled_sgemm`. A kernel may be compiled if the number of blocks depends on its
    registers.

    Returns
    -------
    Explanation
        Its text is a paragraph to read.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_gemm import explain
    >>> a, b = np.empty((512, 256), np.float32), np.empty((256, 128), np.float32)
    >>> explain(a, b, stage="naive").tile
    (32, 32, 1)
    """
    held = unwrapped(a, b, stage, precision, epilogue)
    x, y, named = (a, b, IEEE if precision is None else precision) if held is None else (held.a, held.b, held.precision)
    wanted = checked(x, y, out, alpha, beta, None, stage, epilogue, epilogue_args, precision=named, c=c)
    if held is not None:
        wanted = held.of(wanted)
    kind, device = wanted.a.kind, devices.get_device(wanted.device)
    strides = arrays.row_major(wanted.shape, FLOAT32_BYTES)
    result = wanted.out or Operand("out", ArrayKind(), None, FLOAT32, wanted.shape, strides, 0, wanted.device)
    given = [wanted.a, wanted.b, *wanted.vectors]
    x, y, *vectors = map(described, given)
    z = described(result)
    products = [part.product for part in wanted.parts(x, y, z, vectors)]
    copies, copies_c = kind.copies(given, result, reads_out=wanted.beta != 0), wanted.addend is not None
    if copies_c and copies != Copies():
        copies = replace(copies, on_host=copies.on_host + FLOAT32_BYTES * prod(result.shape))
    if not products:
        reason = f"the result, of shape {wanted.shape}, has no elements"
        return Explanation(
            "", "", wanted.precision, (0, 0, 0), 0, 0, 1, "", "", False, False, copies, 0, 0, 0.0, reason
        )
    choices = [wanted.choose(product) for product in products]
    words = _precision_words(canonical(named), product_for(x, y, wanted.epilogue), device.properties)
    words += _prepared_words(wanted.prepared, wanted.precision)
    told = _explanation(products, choices, device.properties, device.partition, wanted.precision, copies, words)
    return replace(told, copies_c=copies_c)


def explain_shape(
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    layout: Layout = "NN",
    stage: StageChoice = "auto",
    precision: PrecisionName = IEEE,
    dtype: DType | tuple[DType, DType] = FLOAT32,
    cc: ComputeCapability | None = None,
    device: DeviceLike | None = None,
) -> Explanation:
    """Describe what `tiled_sgemm` would do with dense operands in device memory, without arrays.

    Parameters
    ----------
    m, n, k : int
        Extents in elements.
    batch : int
        Number of products; each has its own A and B.
    layout : str
        Layouts of A and B, see `plan`.
    stage, precision : str
        As for `tiled_sgemm`.
    dtype : str or tuple of str
        Data type of A and B, or one of each: "float32", "float16" or "bfloat16".
    cc : tuple of int, float, int or str, optional
        Compute capability, (9, 0), 9.0, 90, "9.0" or "sm_90". Without a GPU that has it, the description is for a model
        of one, see `numba_gemm.gemm.precompile.MODELS`. By default, that of `device`.
    device : int, str or device object, optional
        GPU: 0, "cuda:0", or an object of PyTorch, CuPy, Numba or cuda.core. By default, the current one.

    Raises
    ------
    ValueError
        For extents that are not positive, and for arguments that `tiled_sgemm` refuses.
    GpuUnavailable
        Without a GPU and without `cc`.
    """
    precision = check_names(stage, precision)
    shapes = {"a": (batch, m, k), "b": (batch, k, n), "out": (batch, m, n)}
    for name, shape in shapes.items():
        if min(shape) < 1:
            raise ValueError(f"{name} has shape {shape}; expected extents from 1 on; pass such extents")
        check_size(name, shape)
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}; pass one of these")
    ordinal, gpu = _gpu(cc, device)
    if stage != "auto":
        resolve(stage, gpu.cc)
    check_precision(precision, gpu.cc, stage)
    dtypes = (*check_dtypes(dtype), FLOAT32)
    x, y, z = (_dense(name, shape, *how) for (name, shape), *how in zip(shapes.items(), (*layout, "N"), dtypes))
    whole = product_for(x, y)
    arithmetic = resolved(precision, whole, gpu)
    check_terms(arithmetic, k)
    at_once = batch_dimensions(stage, arithmetic, gpu.cc)
    products = [product_of(*parts) for parts in batches.products(x, y, z, 0, at_once=at_once, fold=True)]
    choices = [chosen(stage, ordinal, heuristics.problem(product, gpu, arithmetic)) for product in products]
    partition = _model_partition(gpu) if ordinal is None else devices.get_device(ordinal).partition
    words = _precision_words(precision, whole, gpu)
    if ordinal is None:
        words += f"modelled on the {gpu.name}; "
    return _explanation(products, choices, gpu, partition, arithmetic, Copies(), words)


Partitions = Callable[[Stage, Any, Product], Partition | None]


def _explanation(
    products: Sequence[Product],
    choices: Sequence[Choice],
    gpu: DeviceProperties,
    partition: Partitions,
    precision: str,
    copies: Copies,
    words: str,
) -> Explanation:
    """Describe the launches of a product's parts; `partition` divides products that a choice leaves undivided."""
    sequences = [
        sequence
        for product, choice in zip(products, choices)
        for sequence in _sequences(gpu, partition, choice, product)
    ]
    choice, config = choices[0], choices[0].config
    oriented, launches = choice.oriented(products[0]), sequences[0]
    grid = launches.multiplication.grid
    check_grid(grid)
    a_access, b_access, c_vectors = _accesses(choice.stage, config, oriented, choice.precision)
    (rows, cols), blocks = _block_tile(choice, oriented), prod(grid)
    tiles = ceil_div(oriented.m, rows) * ceil_div(oriented.n, cols)
    fields, shares, saved = _schedule_words(choice, launches), 1, 0.0
    if isinstance(choice.stage, TensorStage):
        saved = sum(_prepared_seconds(product, choice, gpu) for product in products)
        shares = choice.stage.shares(config, oriented, choice.precision, choice.partition)
    whole = choice.partition.whole if choice.partition and shares > 1 else tiles * oriented.batch.matrices
    converting = sum(heuristics.conversion_seconds(product, one, gpu) for product, one in zip(products, choices))
    clocks = sum(one.clocks for one in choices) if all(one.clocks for one in choices) else None
    reason = choice.reason or heuristics.choose(heuristics.problem(products[0], gpu, precision)).reason
    # A choice's reason states the time of one product, whose operands are neither converted nor prepared.
    words += f"the first of {len(products)} parts: " if len(products) > 1 else ""
    reason += f"; conversion takes {converting * 1e6:.1f} us" if converting else ""
    reason += f"; prepared operands save {saved * 1e6:.1f} us" if saved else ""
    return Explanation(
        stage=choice.stage.name,
        config=config.name,
        precision=choice.precision,
        tile=(rows, cols, _terms(choice, oriented.k)),
        blocks=blocks,
        whole_tiles=fields["whole"] if fields else whole,
        split=_split(fields, launches.counters or bool(fields["apart"]) * blocks, blocks) if fields else shares,
        a_access=a_access,
        b_access=b_access,
        c_vectors=c_vectors,
        swapped=choice.swapped,
        copies=copies,
        workspace_bytes=workspaces.total_bytes(launches.scratch_bytes, launches.counters),
        launches=sum(len(sequence.steps) for sequence in sequences),
        microseconds=None if clocks is None else (clocks / gpu.clock_hz + converting - saved) * 1e6,
        reason=words + reason,
        dtypes=(products[0].a.dtype, products[0].b.dtype),
        converted=_converted(choice, products[0]),
    )


def _converted(choice: Choice, product: Product) -> str:
    """Return the names of operands that are converted to float32."""
    given = choice.oriented(product)
    taken = choice.stage.taken(choice.config, given)
    names = "BA" if choice.swapped else "AB"
    changed = [name for name, x, y in zip(names, (given.a, given.b), (taken.a, taken.b)) if x.dtype != y.dtype]
    return "".join(sorted(changed))


def _prepared_seconds(product: Product, choice: Choice, gpu: DeviceProperties) -> float:
    """Return the expected seconds that prepared operands save."""
    if not any(product.prepared):
        return 0.0
    matrices = product.batch.matrices  # all are counted, as in the choice's time
    counted = matrices, matrices
    if isinstance(choice.stage, TensorStage) and choice.stage.reads_rows:  # the other operand is read as it is
        counted = (matrices, 0) if choice.swapped else (0, matrices)
    left = [0 if ready else count for ready, count in zip(product.prepared, counted)]
    extents, bandwidth = (product.m, product.n, product.k), gpu.memory_bandwidth

    def seconds(a: int, b: int) -> float:
        decomposing = tensor_heuristics.decomposition_seconds(choice.precision, *extents, a, b, bandwidth)
        return decomposing if a or b else 0.0

    return seconds(*counted) - seconds(*left)


def _precision_words(asked: str, product: Product, gpu: DeviceProperties) -> str:
    """Return the reason for the precision that "fp32_auto" stands for; empty for other precisions."""
    if asked != FP32_AUTO:
        return ""
    precision, reason = auto_reason(product, gpu)
    return f"{FP32_AUTO} stands for {precision}, since {reason}; "


def _prepared_words(prepared: tuple[bool, bool], precision: str) -> str:
    """Return the reason for a choice of a kernel for prepared operands; empty without one."""
    names = [name for name, ready in zip("AB", prepared) if ready]
    return f"chosen among the kernels of {precision} as if {' and '.join(names)} were not prepared: " if names else ""


def _gpu(cc: Any, device: Any) -> tuple[int | None, DeviceProperties]:
    """Return the ordinal and properties of a device, or of a GPU of a compute capability; None for a model of one."""
    wanted = devices.capability_of(cc, device)
    if cc is None or device is not None:
        ordinal = devices.ordinal_of(device)
        return ordinal, devices.device_properties(ordinal)
    for ordinal in range(devices.device_count()):
        if (found := devices.device_properties(ordinal)).cc == wanted:
            return ordinal, found
    if wanted not in LIMITS:
        known = ", ".join(map(dotted, LIMITS))
        raise ValueError(
            f"compute capability {dotted(wanted)} is not known; expected one of {known}; pass one of these as cc"
        )
    return None, model_of(wanted)


def _dense(name: str, shape: tuple[int, int, int], order: str, dtype: str) -> Operand:
    """Return a dense batch of matrices without memory, stored by rows, "N", or by columns, "T"."""
    _, rows, cols = shape
    size = ITEM_BYTES[dtype]
    within = (size * cols, size) if order == "N" else (size, size * rows)
    return Operand(name, ArrayKind(), None, dtype, shape, (size * rows * cols, *within), 0)


def _model_partition(gpu: DeviceProperties) -> Partitions:
    """Return how a GPU that is not present divides products; this compiles the kernel."""

    def partition(stage: Stage, config: Any, product: Product) -> Partition | None:
        if not isinstance(stage, LadderStage) or not stage.takes_partition:
            return None
        return default_partition(config, product, occupancy(stage, config, cc=gpu.cc).blocks * gpu.sm_count)

    return partition


def _sequences(gpu: DeviceProperties, partition: Partitions, choice: Choice, product: Product) -> list[Launches]:
    """Return the launches of each piece of a product."""
    stage, config = choice.stage, choice.config
    found = []
    for piece in stage.pieces(config, choice.oriented(product), choice.precision, gpu.gpu):
        divided = partition(stage, config, piece.product) if choice.partition is None else choice.partition
        found.append(stage.launches(config, piece.product, choice.precision, divided, gpu.gpu))
    return found


def _accesses(stage: Stage, config: Any, product: Product, precision: str) -> tuple[str, str, bool]:
    """Return how A and B are loaded, and whether C is written in vectors."""
    if not isinstance(stage, LadderStage):
        if isinstance(stage, FusedStage):
            return (*stage.accesses(product.converted), False)
        read = "tensor map" if isinstance(stage, TmaStage) else "any"
        words = ["prepared" if ready else "decomposed" for ready in product.prepared]
        a, b = words if isinstance(stage, TensorStage) else (read, read)
        if isinstance(stage, TmaStage) and _mapped(product).placed.decomposed:
            a, b = (words[0], b) if _mapped(product).v_slot is Slot.A else (a, words[1])
        if isinstance(stage, TensorStage) and stage.reads_rows:
            a = stage.rows_access(config, product)
        return a, b, False
    variant = stage.variant(config, product, precision)
    if isinstance(variant, Variant):
        return variant.a, variant.b, variant.c_aligned
    return FITS[variant], FITS[variant], variant != ANY and stage.vectorized


def _block_tile(choice: Choice, product: Product) -> tuple[int, int]:
    """Return the rows and columns of C in a block tile; a kernel of tensor maps may compute the transpose of C."""
    rows, cols = choice.config.BM, choice.config.BN
    swapped = isinstance(choice.stage, TmaStage) and _mapped(product).placed.swapped
    return (cols, rows) if swapped else (rows, cols)


def _mapped(product: Product) -> TmaOperands:
    """Return the operands of a product for which a stage that copies them by tensor maps was chosen."""
    operands = tma_operands(product)
    assert operands is not None, "the stage was chosen for them"
    return operands


def _terms(choice: Choice, k: int) -> int:
    """Return the terms of the sums that a block takes at a time."""
    if isinstance(choice.stage, TensorStage | TmaStage):
        return precision_for(choice.precision, k).slot_k
    return int(choice.config.BK)


def _schedule_words(choice: Choice, launches: Launches) -> dict[str, int]:
    """Return the arguments by which a scheduled stage divides its work; empty for other stages."""
    if not choice.stage.takes_partition:
        return {}
    from ..device.partition import FIELDS

    return dict(zip(FIELDS, launches.multiplication.arguments[5].words))  # type: ignore[arg-type]


def _split(words: dict[str, int], most: int, blocks: int) -> int:
    """Return the largest number of blocks that have a piece of one tile of C, of at most so many shared ones."""
    if not most:
        return 1
    pieces = np.arange(blocks + 1, dtype=np.int64)
    begins = pieces * words["base"] + np.minimum(pieces, words["extra"])
    tiles = np.arange(most + 1, dtype=np.int64) * words["k_tiles"]
    first, last = (np.searchsorted(begins, at, side="right") - 1 for at in (tiles[:-1], tiles[1:] - 1))
    return int((last - first).max()) + 1
