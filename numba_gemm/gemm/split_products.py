"""Products on tensor cores: operands are split into narrow parts, and these multiplied, on one stream.

Beside `launch`, it decides which tiles a product is divided into, and what memory its parts need; it knows no array
library. Kernels are compiled, cached and loaded as the ladder's are. Every launch decomposes its operands anew, into
memory borrowed from `numba_gemm.runtime.workspace`, so a caller may write operands between any two. TF32 needs no parts
of most operands (`numba_gemm.gemm.direct_products`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

from ..kernels.ladder.stage import ONE, Batch
from ..kernels.tensor_core import (
    MODES,
    SHORT_SUMS,
    Mode,
    TensorForm,
    TensorStage,
    WarpgroupConfig,
    direct,
    persistent,
    split,
    warp_mma,
)
from ..kernels.tensor_core.stage import BATCH_STEPS, ROW_WORDS, SPLIT_ROWS, TensorConfig, fastest, split_shape
from ..models.roofline import FLOAT32_BYTES
from ..runtime import compiler, epilogue, kernel_cache
from ..runtime import workspace as workspaces
from ..runtime.driver import Frame, device_scope, load_kernel
from ..runtime.fingerprint import fingerprint
from ..runtime.launch import MAX_EPILOGUES, MAX_K, PLAIN, Extra, Matrix, device_properties
from ..runtime.workspace import ALIGNMENT, Workspace
from ..simulator.switch import SIMULATOR
from . import direct_products

__all__ = [
    "FP32_AUTO",
    "IEEE",
    "PRECISIONS",
    "Division",
    "check_precision",
    "choose",
    "configs_of",
    "divide",
    "extremes_cubin",
    "launch",
    "prepare",
    "product_cubin",
    "resolved",
    "runnable",
    "split_cubin",
    "stage_for",
    "stage_on",
    "tiles_for",
]

IEEE, FP32_AUTO = "ieee", "fp32_auto"
PRECISIONS = (IEEE, *MODES)
KNOWN = (*PRECISIONS, FP32_AUTO)

# What `FP32_AUTO` stands for, on compute capability 9.0, and from where on: its error is stated to be no larger than
# float32's from this K on, and it was measured to be faster from so many multiply-adds on, of a C that has so many
# elements and is no thinner.
AUTO_MODE = "bf16x6"
AUTO_K, AUTO_TERMS, AUTO_ELEMENTS, AUTO_EXTENT = 256, 1 << 27, 1 << 18, 256
AUTO_SHORT_TERMS = 1 << 29  # where sums are short

STAGES = (persistent.STAGE, warp_mma.STAGE)  # the first that a GPU can run is run
OVERLAPPING = (9, 0)  # the compute capability from which on a kernel can let the next one start before it has ended

# TFLOP/s of an H200 that has tiles of one size for all its multiprocessors, by the products of a mode: one, several, or
# several with a compensated sum. Ratios alone matter.
RATES: dict[str, dict[tuple[int, int], float]] = {
    "one": {(128, 256): 600.0, (128, 128): 480.0, (64, 128): 330.0, (64, 96): 270.0, (64, 64): 220.0},
    "several": {(128, 128): 230.0, (64, 128): 168.0, (64, 96): 140.0, (64, 64): 115.0},
    "compensated": {(128, 128): 116.0, (64, 128): 89.0, (64, 96): 80.0, (64, 64): 73.0},
}
# TFLOP/s of an H200 at 16384 cubed, splitting included; of short sums at 4096x4096x768.
SPEEDS = {
    "bf16x6_stepwise": 61.0,
    "tf32x3": 107.0,
    "bf16x6": 108.0,
    "bf16x9": 80.0,
    "fp16x3": 212.0,
    "tf32": 351.0,
    "bf16": 669.0,
}
H200_MULTIPROCESSORS = 132
LONG_SUM = 1024  # terms from which on a mode makes its products itself, not by `SHORT_SUMS`
MAX_BLOCKS = (1 << 31) - 1  # along x
MAX_MATRICES = (1 << 16) - 1  # along y
MOST_PARTS_BYTES = 1 << 30  # of several matrices of a batch, about; the others are the next launch's


def stage_for(cc: tuple[int, int]) -> TensorStage | None:
    """What runs the modes on a GPU of this compute capability, None if nothing does."""
    return None if SIMULATOR else next((stage for stage in STAGES if stage.runs_on(cc)), None)


def runnable(cc: tuple[int, int]) -> tuple[str, ...]:
    """Precisions that a GPU of this compute capability can run."""
    return (IEEE,) if stage_for(cc) is None else PRECISIONS


def resolved(precision: str, m: int, n: int, k: int, cc: tuple[int, int]) -> str:
    """The precision itself; of `FP32_AUTO` the fastest whose errors and range are no worse than float32's."""
    if precision != FP32_AUTO:
        return precision
    terms = AUTO_SHORT_TERMS if k < LONG_SUM else AUTO_TERMS
    pays = k >= AUTO_K and min(m, n) >= AUTO_EXTENT and m * n >= AUTO_ELEMENTS and m * n * k >= terms
    return AUTO_MODE if pays and stage_for(cc) is persistent.STAGE else IEEE


def check_precision(precision: Any, cc: tuple[int, int] | None = None) -> None:
    """Raise TypeError or ValueError unless this is a precision, and one for this compute capability if given."""
    if not isinstance(precision, str):
        raise TypeError(
            f"precision is a {type(precision).__qualname__}; expected a str; pass one of {', '.join(KNOWN)}"
        )
    if precision not in KNOWN:
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(KNOWN)}; pass one of these")
    if cc is not None and precision != FP32_AUTO and precision not in (able := runnable(cc)):
        where = (
            "the simulator, which has no matrix instructions" if SIMULATOR else f"compute capability {cc[0]}.{cc[1]}"
        )
        raise ValueError(
            f"precision is {precision!r}, and this is {where}; expected one of {', '.join(able)}; pass one of these"
        )


def made_as(mode: Mode, k: int) -> Mode:
    """What makes a mode's products of sums of `k` terms: itself, but for short sums in `bf16x6`."""
    return SHORT_SUMS.get(mode.name, mode) if k < LONG_SUM else mode


def tile_rates(mode: Mode) -> dict[tuple[int, int], float]:
    """Throughput in TFLOP/s by the tiles' extents."""
    return RATES["one" if len(mode.products) == 1 else "compensated" if mode.compensated else "several"]


def configs_of(mode: Mode, stage: TensorStage = persistent.STAGE) -> list[TensorConfig]:
    """The tiles that a stage has for a mode."""
    return [config for config in stage.configs if (config.BM, config.BN) in tile_rates(mode)]


def choose(
    mode: Mode, m: int, n: int, k: int, sm_count: int, stage: TensorStage = persistent.STAGE, matrices: int = 1
) -> TensorConfig:
    """The tiles that take the least time."""
    return fastest(configs_of(mode, stage), tile_rates(mode), m, n, max(k, mode.slot_k), sm_count, matrices)


def tiles_for(mode: Mode, a: Matrix, b: Matrix, sm_count: int) -> TensorConfig:
    """The tiles of a product of A and B, on their device."""
    found = direct_products.arrange(a, b, device_properties(a.device).cc) if mode == direct.MODE else None
    if found is not None:
        return direct_products.choose(found, sm_count)
    return choose(mode, a.rows, b.cols, a.cols, sm_count, stage_on(a.device))


@dataclass(frozen=True)
class Division:
    """How a product is divided.

    Attributes
    ----------
    mode : Mode
        Precision.
    config : WarpgroupConfig or WarpConfig
        Tiles.
    blocks : int
        Blocks of the product's launch.
    split_blocks, extreme_blocks : int
        Blocks of the launch that splits both operands, and of the one before that looks for their largest elements; 0
        if there is none.
    parts : tuple of (int, int)
        Rows and columns of the words of A's parts and B's, and of their largest elements if the mode is scaled.
    offsets : tuple of int
        Where each of them begins in the workspace, in bytes.
    steps : tuple of int
        Bytes to where the next matrix of a batch has its own; 0 of what all share.
    matrices : int
        Matrices of the batch.
    workspace_bytes : int
        What all of them take.
    """

    mode: Mode
    config: TensorConfig
    blocks: int
    split_blocks: int
    extreme_blocks: int
    parts: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    steps: tuple[int, ...]
    matrices: int
    workspace_bytes: int


def divide(
    mode: Mode,
    m: int,
    n: int,
    k: int,
    sm_count: int,
    config: TensorConfig | None = None,
    stage: TensorStage = persistent.STAGE,
    batch: Batch = ONE,
) -> Division:
    """Divide products of these extents, into tiles of a configuration or of the one that `choose` finds.

    Of the batch only the last dimension counts.
    """
    matrices = batch.extents[-1]
    mode = made_as(mode, k)
    config = choose(mode, m, n, k, sm_count, stage, matrices) if config is None else config
    shapes = [split_shape(mode, m, k, config.BM), split_shape(mode, n, k, config.BN)]
    split_blocks = sum(rows // mode.parts * (words // (ROW_WORDS * SPLIT_ROWS)) for rows, words in shapes)
    extreme_blocks = 0
    if mode.scaled:
        spans = max(1, min(split.SPANS, -(-k // split.SPAN)))
        shapes += [(spans, words // ROW_WORDS) for _, words in shapes]
        extreme_blocks = sum(rows * (cols // SPLIT_ROWS) for rows, cols in shapes[2:])
    offsets, steps, end = [], [], 0
    for (rows, cols), own in zip(shapes, (batch.a[-1], batch.b[-1]) * 2, strict=False):
        size = -(-FLOAT32_BYTES * rows * cols // ALIGNMENT) * ALIGNMENT
        offsets.append(end)
        steps.append(size if own else 0)
        end += size * (matrices if own else 1)
    tiles = -(-m // config.BM) * -(-n // config.BN)
    # Blocks of warpgroups fill a multiprocessor, and stay; of others it holds several, and there is one for each tile.
    blocks = min(tiles, sm_count if isinstance(config, WarpgroupConfig) else MAX_BLOCKS)
    return Division(
        mode, config, blocks, split_blocks, extreme_blocks, tuple(shapes), tuple(offsets), tuple(steps), matrices, end
    )


# ------------------------------------------------------------------------------------------------------------- kernels


def _matrix_types() -> tuple[Any, Any]:
    from ..device.matrix import MatrixType

    return MatrixType(True), MatrixType(False)


def _steps_type(count: int) -> Any:
    from numba.cuda import types

    return types.UniTuple(types.int64, count)


def compile_product(stage: TensorStage, config: TensorConfig, form: TensorForm, cc: tuple[int, int]) -> compiler.Cubin:
    """Compile a stage of the tensor cores; needs no GPU."""
    from numba.cuda import types

    words, matrix = _matrix_types()
    signature = [types.float32, words, words, types.float32, matrix]
    if stage.complete:
        signature += [matrix, matrix, _steps_type(BATCH_STEPS)]
    if form.vectors:
        signature.append(types.UniTuple(types.Array(types.float32, 1, "A"), form.vectors))
    if form.epilogue is not None:
        epilogue.check_result(form.epilogue, form.vectors, cc)
    name = f"{stage.name}_{form.mode.name}_{config.name}"
    whole = config.claim > 0
    return compiler.compile_cubin(stage.build(config, form), signature, cc, name=name, whole_program=whole)


def compile_split(mode: Mode, cc: tuple[int, int], batched: bool = False) -> compiler.Cubin:
    """Compile what splits the operands of a mode; needs no GPU."""
    words, matrix = _matrix_types()
    operand = (matrix, words, words) if mode.scaled else (matrix, words)
    kernel = split.build(mode, cc >= OVERLAPPING, batched)
    steps = _steps_type(2 * len(operand))
    return compiler.compile_cubin(kernel, (*operand, *operand, steps), cc, name=f"split_{mode.name}")


def compile_extremes(cc: tuple[int, int], batched: bool = False) -> compiler.Cubin:
    """Compile what finds the largest elements of rows; needs no GPU."""
    words, matrix = _matrix_types()
    kernel = split.build_extremes(cc >= OVERLAPPING, batched)
    return compiler.compile_cubin(kernel, (matrix, words, matrix, words, _steps_type(4)), cc, name="extremes")


def product_cubin(
    config: TensorConfig, form: TensorForm, cc: tuple[int, int], stage: TensorStage = persistent.STAGE
) -> compiler.Cubin:
    """The kernel of a product, compiled or from the cache on disk; needs no GPU."""
    described = None if form.epilogue is None else fingerprint(form.epilogue)
    name = None
    if form.epilogue is None or described is not None:
        name = (stage.name, repr(config), repr(form.mode), described, form.vectors, form.batched, cc)
    return kernel_cache.kept(name, partial(compile_product, stage, config, form, cc))


def split_cubin(mode: Mode, cc: tuple[int, int], batched: bool = False) -> compiler.Cubin:
    """The kernel that splits, likewise."""
    return kernel_cache.kept(("split", repr(mode), batched, cc), partial(compile_split, mode, cc, batched))


def extremes_cubin(cc: tuple[int, int], batched: bool = False) -> compiler.Cubin:
    """The kernel that finds the largest elements, likewise."""
    return kernel_cache.kept(("extremes", batched, cc), partial(compile_extremes, cc, batched))


_lock = threading.RLock()


def stage_on(device: int) -> TensorStage:
    """What runs the modes on a device; one that can run them."""
    stage = stage_for(device_properties(device).cc)
    assert stage is not None, "the precision was checked"
    return stage


@lru_cache(maxsize=MAX_EPILOGUES)
def _product_kernel(config: TensorConfig, form: TensorForm, device: int) -> int:
    cubin = product_cubin(config, form, device_properties(device).cc, stage_on(device))
    return load_kernel(cubin, device, config.dynamic_shared(form.mode))


@cache
def _split_kernel(mode: Mode, batched: bool, device: int) -> int:
    return load_kernel(split_cubin(mode, device_properties(device).cc, batched), device)


@cache
def _extremes_kernel(batched: bool, device: int) -> int:
    return load_kernel(extremes_cubin(device_properties(device).cc, batched), device)


# -------------------------------------------------------------------------------------------------------------- launch


def expected_seconds(mode: Mode, m: int, n: int, k: int, sm_count: int) -> float:
    """About how long a large product takes: at the speed of `SPEEDS`, by the number of multiprocessors."""
    return 2.0 * m * n * k / (SPEEDS[made_as(mode, k).name] * 1e12 * sm_count / H200_MULTIPROCESSORS)


def prepare(division: Division, device: int) -> None:
    """Compile and load what one product without an epilogue needs, if that has not been done."""
    with _lock:
        _product_kernel(division.config, TensorForm(division.mode), device)
        _split_kernel(division.mode, False, device)
        if division.mode.scaled:
            _extremes_kernel(False, device)


class _Launch:
    """The launches of a product of operands of fixed extents and strides; safe from several threads."""

    def __init__(self, division: Division, a: Matrix, b: Matrix, c: Matrix, extra: Extra) -> None:
        self.device, self.division = c.device, division
        mode, config = division.mode, division.config
        batched = division.matrices > 1
        form = TensorForm(mode, extra.epilogue, len(extra.vectors), batched)
        with _lock:
            self._product = _product_kernel(config, form, c.device)
            self._split = _split_kernel(mode, batched, c.device)
            self._extremes = _extremes_kernel(batched, c.device) if mode.scaled else 0
        self._a, self._b, self._c = a.packed[1:], b.packed[1:], c.packed[1:]
        self._across = b.transposed.packed[1:]
        self._words = tuple((rows, cols, FLOAT32_BYTES * cols, FLOAT32_BYTES) for rows, cols in division.parts)
        self._vectors = tuple(vector.words for vector in extra.vectors)
        self._batch = (extra.batch.a[-1], extra.batch.b[-1], extra.batch.c[-1])
        self._frames: list[list[Frame]] = []

    def _make(self) -> list[Frame]:
        """Frames with zeros for all addresses and scalars, which move."""
        division, config = self.division, self.division.config
        x, y = (0, *self._a), (0, *self._across)
        parts = [(0, *words) for words in self._words]
        (a_step, b_step, c_step), own = self._batch, division.steps
        steps: tuple[int, ...]
        frames: list[Frame] = []
        values: list[Any]

        def add(kernel: int, blocks: int, threads: int, shared: int, values: list[Any], moving: list[int]) -> None:
            arguments = compiler.KernelArguments(values, moving)
            grid, block = (blocks, division.matrices, 1), (threads, 1, 1)
            # Only what waits for the kernel before it may start while that runs.
            overlapping = bool(frames) and stage_on(self.device) is persistent.STAGE
            frames.append(Frame(self.device, kernel, grid, block, shared, arguments, overlapping))

        if division.mode.scaled:
            values = [x, parts[2], y, parts[3], (a_step, own[2], b_step, own[3])]
            add(self._extremes, division.extreme_blocks, split.THREADS, 0, values, [0, 5, 10, 15])
            steps = (a_step, own[0], own[2], b_step, own[1], own[3])
            values = [x, parts[0], parts[2], y, parts[1], parts[3], steps]
            add(self._split, division.split_blocks, split.THREADS, 0, values, [0, 5, 10, 15, 20, 25])
        else:
            values = [x, parts[0], y, parts[1], (a_step, own[0], b_step, own[1])]
            add(self._split, division.split_blocks, split.THREADS, 0, values, [0, 5, 10, 15])
        operands = [(0, *self._c), (0, *self._a), (0, *self._b)]
        steps = (own[0], own[1], c_step, a_step, b_step)
        values = [0.0, parts[0], parts[1], 0.0, *operands, steps, *self._vectors]
        vectors = [27 + BATCH_STEPS + 7 * i + 4 for i in range(len(self._vectors))]
        moving = [0, 1, 6, 11, 12, 17, 22, *vectors]
        shared = config.dynamic_shared(division.mode)
        add(self._product, division.blocks, config.threads, shared, values, moving)
        return frames

    def __call__(
        self, alpha: float, a: int, b: int, beta: float, c: int, stream: int, memory: int | None, vectors: list[int]
    ) -> None:
        """Enqueue the product of operands, and vectors, at these addresses; parts at `memory`, or in borrowed one."""
        with device_scope(self.device):
            if memory is not None:
                self._enqueue(alpha, a, b, beta, c, stream, memory, vectors)
                return
            loan = workspaces.borrow(self.device, stream, self.division.workspace_bytes)
            try:
                self._enqueue(alpha, a, b, beta, c, stream, loan.pointer, vectors)
            finally:
                workspaces.give_back(loan)

    def _enqueue(
        self, alpha: float, a: int, b: int, beta: float, c: int, stream: int, memory: int, vectors: list[int]
    ) -> None:
        # Frames are one call's alone, and taken and put back in one step each.
        try:
            frames = self._frames.pop()
        except IndexError:
            frames = self._make()
        places = [memory + offset for offset in self.division.offsets]
        if self.division.mode.scaled:
            a_parts, b_parts, a_large, b_large = places
            frames[0].launch(stream, a, a_large, b, b_large)
            frames[1].launch(stream, a, a_parts, a_large, b, b_parts, b_large)
        else:
            a_parts, b_parts = places
            frames[0].launch(stream, a, a_parts, b, b_parts)
        frames[-1].launch(stream, alpha, a_parts, b_parts, beta, c, a, b, *vectors)
        self._frames.append(frames)


def _last_dimension(batch: Batch) -> tuple[int, tuple[int, int, int]]:
    """How many matrices there are, and the bytes from one of A, B and C to the next."""
    return batch.extents[-1], (batch.a[-1], batch.b[-1], batch.c[-1])


def _at_once(mode: Mode, a: Matrix, b: Matrix, batch: Batch, config: TensorConfig | None, device: int) -> int:
    """Matrices of a batch that a launch takes: as many as the grid's y counts, and whose parts are not too large."""
    count = min(batch.extents[-1], MAX_MATRICES)
    sm_count, stage = device_properties(device).sm_count, stage_on(device)
    some = replace(batch, extents=(1, 1, count))
    each = sum(divide(mode, a.rows, b.cols, a.cols, sm_count, config, stage, some).steps)
    return max(1, min(count, MOST_PARTS_BYTES // max(each, 1)))


MAX_KEPT = 1024
_kept_launches: dict[tuple[Any, ...], _Launch] = {}


def launch(
    mode: Mode,
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    *,
    stream: int = 0,
    workspace: Workspace | None = None,
    extra: Extra = PLAIN,
    config: TensorConfig | None = None,
) -> None:
    """Enqueue ``C = alpha * A @ B + beta * C`` in a mode's precision on a stream of the device that holds C.

    Parameters
    ----------
    mode : Mode
        One that the device can run (`runnable`).
    alpha, beta : float
        Scalars, rounded to float32. C is not read if beta is 0.
    a, b, c : Matrix
        Operands of shapes (m, k), (k, n), (m, n).
    stream : int
        Handle of a stream of C's device; 0 is the default stream.
    workspace : Workspace, optional
        Memory of the `Division.workspace_bytes` of this product, whose calls must follow each other. By default it is
        borrowed.
    extra : Extra
        Epilogue, vectors, and a batch of one dimension, the last.
    config : WarpgroupConfig or WarpConfig, optional
        Tiles for split operands. By default the ones that `choose` finds, unless they need not be split
        (`direct_products`).

    Raises
    ------
    ValueError
        for a K beyond what kernels count; for a workspace that is too small.
    """
    if c.rows == 0 or c.cols == 0:
        return
    if a.cols > MAX_K:
        raise ValueError(f"K is {a.cols}, beyond the {MAX_K} that this precision takes; expected less")
    if mode == direct.MODE and config is None and direct_products.launch(alpha, a, b, beta, c, stream, extra):
        return
    batch, (count, steps) = extra.batch, _last_dimension(extra.batch)
    assert batch.extents[:-1] == (1, 1), "one launch takes one dimension"
    most = count if count == 1 else _at_once(mode, a, b, batch, config, c.device)
    if count > most:
        for begin in range(0, count, most):
            x, y, z = (
                replace(matrix, pointer=matrix.pointer + begin * step)
                for matrix, step in zip((a, b, c), steps, strict=True)
            )
            some = replace(batch, extents=(1, 1, min(most, count - begin)))
            piece = replace(extra, batch=some)
            launch(mode, alpha, x, y, beta, z, stream=stream, workspace=workspace, extra=piece, config=config)
        return
    beside = (extra.epilogue, count, *steps, *((vector.size, vector.stride) for vector in extra.vectors))
    key = (mode, id(config), c.device, beside, *a.packed[1:], *b.packed[1:], *c.packed[1:])
    found = _kept_launches.get(key)
    if found is None or (config is not None and found.division.config != config):
        sm_count, stage = device_properties(c.device).sm_count, stage_on(c.device)
        division = divide(mode, c.rows, c.cols, a.cols, sm_count, config, stage, batch)
        found = _Launch(division, a, b, c, extra)
        if len(_kept_launches) >= MAX_KEPT:
            _kept_launches.clear()
        _kept_launches[key] = found
    needed = found.division.workspace_bytes
    if workspace is not None and not workspace.holds(needed, 0):
        raise ValueError(
            f"workspace holds {workspace.size} bytes; expected {needed}; pass an array of that size, or none"
        )
    memory = None if workspace is None else workspace.pointer
    vectors = [vector.pointer for vector in extra.vectors]
    found(alpha, a.pointer, b.pointer, beta, c.pointer, stream, memory, vectors)
