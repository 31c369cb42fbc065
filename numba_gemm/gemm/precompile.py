"""Compilation of kernels into the cache on disk ahead of the first product, with or without a GPU."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels import STAGES
from ..kernels.conversion import conversion_kernel
from ..kernels.ladder.stage import FITS, LadderStage, Variant
from ..kernels.product import FLOAT32, LAYOUTS, Product, check_dtypes, dense
from ..kernels.scalars import index
from ..kernels.stage import Gpu, Partition, Stage
from ..kernels.step import Kernel
from ..kernels.tensor_core.fused_stage import FusedStage
from ..kernels.tensor_core.stage import LONG_SUM
from ..kernels.tensor_core.tma_stage import LAYOUTS as TMA_LAYOUTS
from ..kernels.tensor_core.tma_stage import TmaStage
from ..models.gpu_names import compute_capabilities, dotted
from ..runtime import device as devices
from ..runtime import kernel_files
from ..runtime.compiler import supported_ccs
from ..runtime.driver import advising, without_gpu
from ..runtime.private_files import PrivateDirectory
from ..simulator.switch import SIMULATOR
from ..typing import ComputeCapability, DeviceLike, DType, Layout, PrecisionName, StageChoice
from . import autotune_cache, heuristics
from .compile_progress import fetch_with_progress
from .fp32_auto import AUTO_PRECISION, resolved
from .heuristics import Choice
from .precision import FP32_AUTO, IEEE, canonical, tensor_stage
from .request import check_size, chosen
from .stage_names import ANY_GPU, resolve
from .tensor_heuristics import configs_for, may_divide

__all__ = ["MODELS", "Precompiled", "kernels_of", "model_of", "precompile", "require_cache"]


Shape = tuple[int, int, int]  # m, n and k, in elements

# Models for whose properties kernels are chosen where no GPU of a compute capability is present, by vendor's data
# sheets: multiprocessors, boost clock and bandwidth of device memory. For other capabilities, the last one below.
MODELS = {
    (7, 5): ("T4", 40, 1.59e9, 3.2e11),
    (8, 0): ("A100", 108, 1.41e9, 2.04e12),
    (8, 6): ("GeForce RTX 3090", 82, 1.70e9, 9.36e11),
    (8, 9): ("GeForce RTX 4090", 128, 2.52e9, 1.01e12),
    (9, 0): ("H200", 132, 1.98e9, 4.8e12),
    (10, 0): ("B200", 148, 1.97e9, 8.0e12),
    (12, 0): ("GeForce RTX 5090", 170, 2.41e9, 1.79e12),
}


BOTH_FLOAT32 = FLOAT32, FLOAT32


def _dense(a: str, b: str, m: int, k: int, n: int, dtypes: tuple[str, str] = BOTH_FLOAT32) -> Product:
    """Return the product of dense operands in these orders; of "*", one that no tensor map describes."""
    x, y = (
        dense("N", *extents, dtype)._replace(offset=FLOAT32_BYTES) if order == "*" else dense(order, *extents, dtype)
        for order, extents, dtype in zip((a, b), ((m, k), (k, n)), dtypes)
    )
    return Product(x, y, dense("N", m, n))


# Extents of usual products: whole vectors, and others.
WHOLE = sorted({768, 3072, *(1 << i for i in range(6, 15))})
ANY = (1, 16, 33, 64, 100, 101, 1000, 1001, 4096, 4099, 20000)


def usual_products(layouts: Iterable[str], dtypes: tuple[str, str] = BOTH_FLOAT32) -> list[Product]:
    """Return products of whole vectors in all layouts, and of other extents in some."""
    whole = itertools.product(WHOLE, WHOLE, (64, 256, 1024, 4096, 16384))
    others = ((m, n, k) for m, n, k in itertools.product(ANY, ANY, (64, 1023, 1024, 20000)) if max(m, n) >= 64)
    return _products(whole, LAYOUTS, dtypes) + _products(others, layouts, dtypes)


class Precompiled(NamedTuple):
    """One kernel that `precompile` compiled or found.

    Attributes
    ----------
    stage, config : str
        Names of the stage and its configuration; the configuration is empty for kernels that prepare operands.
    variant : str
        "aligned" for operands that allow 128-bit accesses, "whole" if they also consist of whole tiles, or "any". For a
        scheduled stage, how tiles of A and of B are loaded, and "aligned", "partial" or "any" for C
        (`numba_gemm.kernels.ladder.stage.Variant`). On tensor cores, the precision.
    cc : tuple of int
        Compute capability, (major, minor).
    seconds : float
        Time that it took.
    origin : str
        "compiler", or "cache" or "bundle" if it was there already.
    """

    stage: str
    config: str
    variant: str
    cc: tuple[int, int]
    seconds: float
    origin: str


def precompile(
    stages: StageChoice | Iterable[StageChoice] = "auto",
    cc: ComputeCapability | Iterable[ComputeCapability] | None = None,
    precision: PrecisionName | Iterable[PrecisionName] = IEEE,
    *,
    device: DeviceLike | None = None,
    shapes: Iterable[Shape] | None = None,
    layouts: Layout | Iterable[Layout] = "NN",
    dtype: DType | tuple[DType, DType] = FLOAT32,
    recorded: bool = False,
    jobs: int | None = None,
    progress: bool | None = None,
) -> list[Precompiled]:
    """Compile kernels into the cache on disk, so that a process's first product need not wait for the compiler.

    Parameters
    ----------
    stages : str or iterable of str
        Names of stages as `tiled_sgemm` takes them. "auto" stands for the kernels that are chosen for usual products,
        with extents from a few rows or columns to 20,000. The name of a stage stands for the kernels of its first
        configuration or, if it divides products among blocks, for those with which it is chosen. Other kernels, and
        those with epilogues, are compiled when a product first needs them.
    cc : tuple of int, float, int or str, or iterable of them, optional
        Compute capabilities: (9, 0), 9.0, 90, "9.0" or "sm_90" for one; then no GPU is needed. By default those of the
        GPUs that are present.
    precision : str or iterable of str
        Precisions, as `tiled_sgemm` takes them. Stages that do not compute in one of them are left out for it.
    device : int, str or device object, optional
        GPU to compile for instead: 0, "cuda:0", or an object of PyTorch, CuPy, Numba or cuda.core.
    shapes : iterable of (int, int, int), optional
        M, N and K of products. Then only the kernels that these stages choose for dense operands of such shapes are
        compiled. Without a GPU of a compute capability, the choice is that for a model of it, see `MODELS`.
    layouts : str or iterable of str
        Layouts of A and B in `shapes`: "NN", "NT", "TN" or "TT"; T is a matrix stored by columns. Without `shapes`,
        the layouts of the usual products with few rows or columns, or with extents that are not multiples of four;
        other usual products are compiled in all four layouts.
    dtype : str or tuple of str
        Data type of A and B, or one of each: "float32", "float16" or "bfloat16". Operands of 16 bits have a kernel that
        converts them.
    recorded : bool
        True to compile the kernels that `autotune` chose on the GPUs that are present, too.
    jobs : int, optional
        Processes that compile in parallel. By default NUMBA_GEMM_JOBS, or the number of cores, at most 16 and
        one more than the GB of available memory.
    progress : bool, optional
        True to print each kernel to the standard error stream, or, on a terminal, how many are done. By default, on
        a terminal only.

    Returns
    -------
    list of Precompiled
        One per kernel: stage, config, variant, cc, seconds, origin.

    Raises
    ------
    TypeError
        For arguments of other types.
    ValueError
        For an unknown stage, or one that a compute capability is too low for; for a compute capability that no stage
        runs on, or that the compiler does not know; if no stage computes in one of the precisions; for extents or
        `jobs` that are not positive, or an unknown layout.
    GpuUnavailable
        Without a GPU, if `cc` is not given or `recorded` is.
    RuntimeError
        Under Numba's simulator; without the compiler's libraries; if NUMBA_GEMM_CACHE_DIR switches the cache off
        or cannot be written to.

    Examples
    --------
    For the products of a training step, in a container without a GPU:

    >>> precompile(cc=(9, 0), shapes=[(4096, 6144, 2048)], layouts=["NT", "NN", "TN"])  # doctest: +SKIP
    """
    require_cache()
    jobs = None if jobs is None else index("jobs", jobs, 1)
    with advising(without_gpu(cc, device=device, recorded=recorded or None)):
        wanted = kernels_of(
            stages, cc, precision, device=device, shapes=shapes, layouts=layouts, dtype=dtype, recorded=recorded
        )
    fetched = fetch_with_progress([(kernel, target) for *_, kernel, target in wanted], jobs, progress)
    return [
        Precompiled(stage, config, variant, target, one.seconds, one.origin)
        for (stage, config, variant, _, target), one in zip(wanted, fetched, strict=True)
    ]


def require_cache() -> None:
    """Create the directory that kernels are kept in; raise RuntimeError if there is none."""
    place = kernel_files.directory()
    if place is None:
        raise RuntimeError(
            "NUMBA_GEMM_CACHE_DIR switches the kernel cache off; expected a directory to keep kernels in; unset it, or "
            "name one"
        )
    try:
        with PrivateDirectory(place, create=True):
            pass
    except OSError as error:
        raise kernel_files.unusable(place, error) from None


def kernels_of(
    stages: StageChoice | Iterable[StageChoice] = "auto",
    cc: ComputeCapability | Iterable[ComputeCapability] | None = None,
    precision: PrecisionName | Iterable[PrecisionName] = IEEE,
    *,
    device: DeviceLike | None = None,
    shapes: Iterable[Shape] | None = None,
    layouts: Layout | Iterable[Layout] = "NN",
    dtype: DType | tuple[DType, DType] = FLOAT32,
    recorded: bool = False,
) -> list[tuple[str, str, str, Kernel, tuple[int, int]]]:
    """Return the kernels of `precompile`: stage, configuration, variant, kernel and compute capability, each once.

    A kernel is followed by itself for the next compute capability, which takes less time to compile.
    """
    names, precisions = _several("stages", stages), [canonical(one) for one in _several("precision", precision)]
    for name in names:
        if name != "auto":
            resolve(name, ANY_GPU)
    both, dtypes = _several("layouts", layouts), check_dtypes(dtype)
    given = None if shapes is None else _products(shapes, both, dtypes)
    if SIMULATOR:
        raise RuntimeError(
            "this process runs Numba's simulator, which compiles nothing; expected the compiler; unset "
            "NUMBA_ENABLE_CUDASIM before Python starts, and without a GPU pass a compute capability, cc=(9, 0)"
        )
    ccs = [] if cc is None else compute_capabilities(cc)
    present = [] if device is None else [devices.ordinal_of(device)]
    if device is None and (cc is None or recorded):
        present = _all_devices()
    if cc is None:
        ccs = [devices.device_properties(ordinal).cc for ordinal in present]
    elif device is not None:
        ccs = [devices.capability_of(one, device) for one in ccs]
    found: list[tuple[Named, tuple[int, int]]] = []
    products = usual_products(both, dtypes) if given is None else given
    for target in dict.fromkeys(ccs):
        _check_target(target)
        for name in names:
            for one in precisions:
                choose = _kernels if shapes is None else _chosen
                found += [(kernel, target) for kernel in choose(name, one, target, products)]
    for ordinal in present if recorded else ():
        gpu = devices.device_properties(ordinal)
        for product, choice in autotune_cache.recorded(ordinal):
            found += [(kernel, gpu.cc) for kernel in _launched(choice, product, gpu)]
    if not found and names and precisions and ccs and products:
        targets = ", ".join(map(dotted, ccs))
        raise ValueError(
            f"stages are {', '.join(names)}, precisions {', '.join(precisions)}, and compute capabilities {targets}; "
            "expected a stage that computes in one of the precisions there; change one of them"
        )
    order = {kernel[-1]: i for i, (kernel, _) in reversed(list(enumerate(found)))}
    unique: dict[tuple[Kernel, tuple[int, int]], tuple[str, str, str, Kernel, tuple[int, int]]] = {}
    for kernel, target in found:
        unique.setdefault((kernel[-1], target), (*kernel, target))
    return sorted(unique.values(), key=lambda one: order[one[3]])


def _several(name: str, given: str | Iterable[str]) -> list[str]:
    """Return the strings of a parameter that takes one or several; raise TypeError for anything else."""
    found = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for one in found:
        if not isinstance(one, str):
            raise TypeError(
                f"{name} has an object of type {type(one).__qualname__}; expected a str, or several; pass such"
            )
    return found


def _check_target(cc: tuple[int, int]) -> None:
    """Raise ValueError unless kernels can be compiled for a compute capability."""
    known = [one for one in supported_ccs() if any(stage.runs_on(one) for stage in STAGES.values())]
    if cc not in known:
        raise ValueError(
            f"cc is {cc}; expected one that stages run on and the compiler knows, of "
            f"{', '.join(f'({major}, {minor})' for major, minor in known)}; pass one of these"
        )


def _products(shapes: Iterable[Shape], layouts: Iterable[str], dtypes: tuple[str, str]) -> list[Product]:
    """Return products of dense operands."""
    both = list(layouts)
    for layout in both:
        if layout not in LAYOUTS:
            raise ValueError(f"layouts has {layout!r}; expected some of {', '.join(LAYOUTS)}; pass some of these")
    given = []
    for shape in shapes if isinstance(shapes, Iterable) else (shapes,):
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"shapes has {shape!r}; expected tuples of M, N and K; pass [(4096, 4096, 4096)]")
        try:
            m, n, k = map(operator.index, shape)
        except (TypeError, ValueError):
            m = n = k = 0
        if min(m, n, k) < 1:
            raise ValueError(f"shapes has {shape!r}; expected M, N and K, from 1 on; pass [(4096, 4096, 4096)]")
        check_size("out", (m, n))
        given.append((m, n, k))
    return [_dense(layout[0], layout[1], m, k, n, dtypes) for m, n, k in given for layout in both]


def _chosen(name: str, precision: str, cc: tuple[int, int], products: Iterable[Product]) -> Iterator[Named]:
    """Yield the kernels that are chosen for products."""
    device = next((i for i in range(devices.device_count()) if devices.device_properties(i).cc == cc), None)
    gpu = model_of(cc) if device is None else devices.device_properties(device)
    for product in products:
        choice = chosen(name, device, heuristics.problem(product, gpu, resolved(precision, product, gpu)))
        yield from _launched(choice, product, gpu)


def model_of(cc: tuple[int, int]) -> devices.DeviceProperties:
    """Return the properties of a model of a compute capability, see `MODELS`."""
    name, sm_count, clock_hz, bandwidth = MODELS[max((one for one in MODELS if one <= cc), default=min(MODELS))]
    return devices.DeviceProperties(name, cc, sm_count, clock_hz, 0, 1 << 20, bandwidth)


def _launched(choice: Choice, product: Product, gpu: devices.DeviceProperties) -> Iterator[Named]:
    """Yield the kernels that a choice launches for a product."""
    for kernel in choice.kernels(product, gpu.gpu):
        yield _named(choice.stage, choice.precision, kernel)


def _all_devices() -> list[int]:
    devices.current_device()  # raises GpuUnavailable with the reason
    return list(range(devices.device_count()))


Named = tuple[str, str, str, Kernel]  # stage, configuration, variant


def _kernels(name: str, precision: str, cc: tuple[int, int], usual: list[Product]) -> Iterator[Named]:
    """Yield the kernels of a stage, or of all that may be chosen, in a precision."""
    stage = None if name == "auto" else resolve(name, cc)
    for one in (IEEE, AUTO_PRECISION) if precision == FP32_AUTO else (precision,):
        if stage is not None and one not in stage.precisions:
            continue
        if stage is None or (isinstance(stage, LadderStage) and stage.takes_partition):
            if stage is not None or one == IEEE or tensor_stage(cc) is not None:
                yield from _chosen(name, one, cc, usual)
        elif isinstance(stage, LadderStage):
            yield from (_named(stage, one, stage.kernel_of(stage.configs[0], fit)) for fit in stage.fits)
            yield from _converting(one, usual[0])
        else:
            yield from _tensor_kernels(stage, one, cc)
            yield from _converting(one, usual[0])


def _converting(precision: str, product: Product) -> Iterator[Named]:
    """Yield the kernel that converts the operands of a product, if they must be converted."""
    if halves := [x.dtype for x in (product.a, product.b) if x.dtype != FLOAT32]:
        kernel = conversion_kernel(halves[0], halves[-1])
        yield kernel.name, "", precision, kernel


def _named(stage: Stage, precision: str, kernel: Kernel) -> Named:
    """Return a kernel with the names of its stage, configuration and variant."""
    if isinstance(kernel.config, int | None):
        return kernel.name, "", precision, kernel
    variant = kernel.variant
    word = variant.name if isinstance(variant, Variant) else precision
    if precision == IEEE and not isinstance(variant, Variant):
        word = FITS[variant]
    return stage.name, kernel.config.name, word, kernel


def _tensor_kernels(stage: Stage, precision: str, cc: tuple[int, int]) -> Iterator[Named]:
    """Yield the kernels of all steps of single products, for short sums and long ones, and for divided ones."""
    gpu, extent = Gpu(cc, 1), 256
    for k in (LONG_SUM // 2, 2 * LONG_SUM + 4):  # rows of as many floats begin at sectors of memory, and within them
        for config in configs_for(stage, precision, k):
            layouts = (
                TMA_LAYOUTS if isinstance(stage, TmaStage) else LAYOUTS[: None if isinstance(stage, FusedStage) else 1]
            )
            tiles = ceil_div(extent, config.BM) * ceil_div(extent, config.BN)
            partitions = [None, Partition(2 * tiles, 0)] if may_divide(stage, config) else [None]
            for layout, partition in itertools.product(layouts, partitions):
                product = _dense(layout[0], layout[1], extent, k, extent)
                for step in stage.launches(config, product, precision, partition, gpu).steps:
                    yield _named(stage, precision, step.kernel)
