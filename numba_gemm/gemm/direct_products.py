"""Products in TF32 of operands as they lie in memory, which nothing lays out anew (`tensor_core.direct`).

That takes compute capability 9.0, two operands that tensor maps can describe (contiguous rows or columns, 16 bytes the
measure of addresses and strides), and one of them at least contiguous along k. `launch` says whether it was so.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache, partial

from ..kernels.ladder.stage import ONE, Batch
from ..kernels.tensor_core import TensorForm, WarpgroupConfig, direct
from ..kernels.tensor_core.stage import fastest
from ..runtime import compiler, epilogue, kernel_cache, tensor_maps
from ..runtime.driver import Frame, device_scope, load_kernel
from ..runtime.fingerprint import fingerprint
from ..runtime.launch import MAX_EPILOGUES, Extra, Matrix, device_properties

__all__ = ["Arrangement", "arrange", "blocks", "choose", "compile_kernel", "kernel_cubin", "launch", "prepare"]

CC = (9, 0)
# TFLOP/s of an H200 that has tiles of one size for all its multiprocessors. Ratios alone matter.
RATES = {(128, 256): 415.0, (128, 192): 420.0, (128, 128): 345.0, (64, 128): 275.0, (64, 64): 165.0}
EXTENT_END = 1 << 30  # coordinates, up to a tile beyond the edge, are 32-bit integers
MAX_MATRICES = (1 << 16) - 1  # along a grid's y


@dataclass(frozen=True)
class Arrangement:
    """Operands as the kernel takes them.

    Attributes
    ----------
    letters : str
        Which of `direct.LAYOUTS` they have.
    u, v : Matrix
        What the tensor maps describe: each with contiguous rows.
    rows, cols : int
        Extents of ``U @ V.T``.
    k : int
        Terms of a sum.
    matrices : int
        Of a batch.
    u_step, v_step : int
        Bytes to the next one's; 0 if all share it.
    """

    letters: str
    u: Matrix
    v: Matrix
    rows: int
    cols: int
    k: int
    matrices: int
    u_step: int
    v_step: int


def arrange(a: Matrix, b: Matrix, cc: tuple[int, int], batch: Batch = ONE) -> Arrangement | None:
    """Arrange A (m, k) and B (k, n) for a GPU of this compute capability; None if they must be laid out anew.

    Of the batch only the last dimension counts.
    """
    m, n, k = a.rows, b.cols, a.cols
    count, a_step, b_step = batch.extents[-1], batch.a[-1], batch.b[-1]
    if cc != CC or max(m, n, k) >= EXTENT_END or count > MAX_MATRICES:
        return None
    down, across = a.transposed, b.transposed
    if tensor_maps.describable(a, a_step) and tensor_maps.describable(b, b_step):
        return Arrangement("NN", b, a, n, m, k, count, b_step, a_step)
    if not tensor_maps.describable(across, b_step):
        return None
    if tensor_maps.describable(a, a_step):
        return Arrangement("NT", a, across, m, n, k, count, a_step, b_step)
    if tensor_maps.describable(down, a_step):
        return Arrangement("TT", down, across, m, n, k, count, a_step, b_step)
    return None


def choose(found: Arrangement, sm_count: int) -> WarpgroupConfig:
    """The tiles that take the least time."""
    config = fastest(direct.CONFIGS, RATES, found.rows, found.cols, found.k, sm_count, found.matrices)
    assert isinstance(config, WarpgroupConfig)
    return config


def blocks(found: Arrangement, config: WarpgroupConfig, sm_count: int) -> int:
    """Blocks of a launch: one for each multiprocessor, or tile if there are less."""
    return min(-(-found.rows // config.BM) * -(-found.cols // config.BN), sm_count)


def compile_kernel(config: WarpgroupConfig, form: TensorForm, letters: str) -> compiler.Cubin:
    """Compile a kernel; needs no GPU."""
    from numba.cuda import types

    from ..device.matrix import MatrixType

    if form.epilogue is not None:
        epilogue.check_result(form.epilogue, form.vectors, CC)
    maps, steps = (types.int64, types.int64), types.UniTuple(types.int64, 3)
    signature = [types.float32, *maps, types.float32, MatrixType(False), types.int64, steps]
    if form.vectors:
        signature.append(types.UniTuple(types.Array(types.float32, 1, "A"), form.vectors))
    kernel = direct.build(config, form, direct.LAYOUTS[letters])
    name = f"direct_{config.name}_{letters}"
    return compiler.compile_cubin(kernel, signature, CC, name=name, whole_program=config.claim > 0)


def kernel_cubin(config: WarpgroupConfig, form: TensorForm, letters: str) -> compiler.Cubin:
    """The kernel, compiled or from the cache on disk; needs no GPU."""
    described = None if form.epilogue is None else fingerprint(form.epilogue)
    name = None
    if form.epilogue is None or described is not None:
        name = ("direct", repr(config), letters, described, form.vectors, CC)
    return kernel_cache.kept(name, partial(compile_kernel, config, form, letters))


@lru_cache(maxsize=MAX_EPILOGUES)
def _kernel(config: WarpgroupConfig, form: TensorForm, letters: str, device: int) -> int:
    return load_kernel(kernel_cubin(config, form, letters), device, config.dynamic_shared(direct.MODE))


_lock = threading.RLock()


def prepare(config: WarpgroupConfig, letters: str, device: int) -> None:
    """Compile and load what a product without an epilogue needs, if that has not been done."""
    with _lock:
        _kernel(config, TensorForm(direct.MODE), letters, device)


class _Launch:
    """The launch of a product of fixed extents and strides; safe from several threads."""

    def __init__(self, found: Arrangement, config: WarpgroupConfig, c: Matrix, extra: Extra) -> None:
        form = TensorForm(direct.MODE, extra.epilogue, len(extra.vectors))
        with _lock:
            self._kernel = _kernel(config, form, found.letters, c.device)
        self._config, self._device, self._k, self._c = config, c.device, found.k, c.packed[1:]
        self._blocks = blocks(found, config, device_properties(c.device).sm_count)
        self._boxes = direct.boxes(config, direct.LAYOUTS[found.letters])
        self._matrices, self._steps = found.matrices, (int(found.u_step > 0), int(found.v_step > 0), extra.batch.c[-1])
        self._vectors = tuple(vector.words for vector in extra.vectors)
        self._frames: list[Frame] = []

    def _make(self) -> Frame:
        """A frame with zeros for all addresses and scalars, which move."""
        values: list[float | tuple[int, ...]] = [
            0.0,
            (0,),
            (0,),
            0.0,
            (0, *self._c),
            (self._k,),
            self._steps,
            *self._vectors,
        ]
        moving = [0, 1, 2, 3, 4, *(13 + 7 * i + 4 for i in range(len(self._vectors)))]
        grid, block = (self._blocks, self._matrices, 1), (self._config.threads, 1, 1)
        arguments = compiler.KernelArguments(values, moving)
        shared = self._config.dynamic_shared(direct.MODE)
        return Frame(self._device, self._kernel, grid, block, shared, arguments)

    def __call__(self, alpha: float, found: Arrangement, beta: float, c: int, stream: int, vectors: list[int]) -> bool:
        """Enqueue the product; return False if there is no place for tensor maps."""
        with device_scope(self._device):
            (u_rows, u_cols), (v_rows, v_cols) = self._boxes
            u_map = tensor_maps.place(found.u, u_rows, u_cols, found.matrices, found.u_step)
            v_map = tensor_maps.place(found.v, v_rows, v_cols, found.matrices, found.v_step)
            if u_map is None or v_map is None:
                return False
            try:
                frame = self._frames.pop()  # in one step: a frame is one call's alone
            except IndexError:
                frame = self._make()
            frame.launch(stream, alpha, u_map, v_map, beta, c, *vectors)
            self._frames.append(frame)
        return True


MAX_KEPT = 1024
_kept_launches: dict[tuple[object, ...], _Launch] = {}


def launch(
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    stream: int,
    extra: Extra,
    config: WarpgroupConfig | None = None,
) -> bool:
    """Enqueue ``C = alpha * A @ B + beta * C`` in TF32 if the operands are such; return whether it was.

    Parameters are those of `split_products.launch`; tiles are by default the ones that `choose` finds.
    """
    gpu = device_properties(c.device)
    found = arrange(a, b, gpu.cc, extra.batch)
    if found is None:
        return False
    batch = (found.matrices, found.u_step, found.v_step, extra.batch.c[-1])
    beside = (extra.epilogue, *batch, *((vector.size, vector.stride) for vector in extra.vectors))
    key = (config, c.device, beside, found.letters, *found.u.packed[1:], *found.v.packed[1:], *c.packed[1:])
    kept = _kept_launches.get(key)
    if kept is None:
        kept = _Launch(found, choose(found, gpu.sm_count) if config is None else config, c, extra)
        if len(_kept_launches) >= MAX_KEPT:
            _kept_launches.clear()
        _kept_launches[key] = kept
    vectors = [vector.pointer for vector in extra.vectors]
    return kept(alpha, found, beta, c.pointer, stream, vectors)
