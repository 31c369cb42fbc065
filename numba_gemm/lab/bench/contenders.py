"""Contenders of a measurement: ladder stages, the public function, cuBLAS, and the triple loop on the CPU.

Every contender is bound to the same buffers and enqueues one product ``C = A @ B`` on the same stream.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numba_gemm.api import tiled_sgemm
from numba_gemm.gemm import autotune_cache
from numba_gemm.gemm.heuristics import problem
from numba_gemm.gemm.occupancy import LARGE
from numba_gemm.gemm.precision import IEEE
from numba_gemm.gemm.tensor_heuristics import configs_for
from numba_gemm.kernels import STAGES, Stage
from numba_gemm.kernels.ladder.cpu import cpu_sgemm
from numba_gemm.kernels.ladder.stage import LadderStage
from numba_gemm.lab.bench.buffers import DeviceBuffers, on_stream, optional
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import AUTO, CPU, CUBLAS, GIVEN_BF16
from numba_gemm.runtime.device import get_device
from numba_gemm.runtime.launch import launch, product_of
from numba_gemm.runtime.timing import Call, elapsed, no_wait
from numba_gemm.simulator.switch import SIMULATOR

CPU_TERMS = 256 * 256 * 1024  # multiply-adds; a tenth of a second


@dataclass(frozen=True)
class Bound:
    """A contender's call on one set of buffers; the argument of ``call`` is a stream handle.

    Calls are made within ``setting``. It is entered once for many calls whose host time counts, since entering it takes
    host time, too.
    """

    call: Call
    config: str = ""
    compile_s: float = math.nan
    deliver: Callable[[], object] = lambda: None  # copies a result from elsewhere into C; not part of the product
    setting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True)
class Contender:
    """An implementation of matrix multiplication, with the limits of its use."""

    stage: str
    bind: Callable[[DeviceBuffers], Bound]
    via: str = ""
    config: str = ""
    precision: str = IEEE
    on_host: bool = False
    min_cc: tuple[int, int] = (0, 0)
    only_cc: tuple[int, int] | None = None
    max_terms: float = math.inf
    max_columns: float = math.inf
    capturable: bool = True  # by a stream into a graph, as far as is known

    @property
    def label(self) -> str:
        """Unique name of the contender."""
        precision = "" if self.precision == IEEE else self.precision
        return "/".join(part for part in (self.stage, precision, self.config, self.via) if part)

    def takes(self, shape: Shape) -> bool:
        """Return True if the contender is measured at a shape."""
        return shape.m * shape.n * shape.k <= self.max_terms and shape.n <= self.max_columns


def stage_contender(stage: Stage, config: Any, precision: str = IEEE) -> Contender:
    """Return the contender for a stage in one configuration and precision."""

    def bind(buffers: DeviceBuffers) -> Bound:
        a, b, c = buffers.matrices
        product = product_of(a, b, c)
        device, kernel = get_device(c.device), stage.kernel(config, product, precision)
        device.check(stage, config, kernel)
        seconds = 0.0 if SIMULATOR else device.load(kernel).compile_s

        def call(stream: int) -> None:
            launch(stage, config, 1.0, a, b, 0.0, c, stream=stream, precision=precision)

        return Bound(call, config.name, seconds)

    # Configurations of `thin` are for a C no wider than a tile; they read A once per tile of columns.
    columns = config.BN if isinstance(stage, LadderStage) and config.in_lanes else math.inf
    limits: dict[str, Any] = {"min_cc": stage.min_cc, "only_cc": stage.only_cc, "max_columns": columns}
    return Contender(stage.name, bind, config=config.name, precision=precision, **limits)


def public_function(precision: Any = IEEE) -> Contender:
    """Return the contender for ``tiled_sgemm`` with its own choice of stage, on arrays of the allocating library."""

    def bind(buffers: DeviceBuffers) -> Bound:
        a, b, c = buffers.a, buffers.b, buffers.c
        product, device = product_of(*buffers.matrices), get_device(buffers.matrices[2].device)
        chosen = autotune_cache.choose(buffers.matrices[2].device, problem(product, device.properties, precision))
        kernel = chosen.stage.kernel(chosen.config, chosen.oriented(product), chosen.precision)
        seconds = 0.0 if SIMULATOR else device.load(kernel).compile_s
        name = f"{chosen.stage.name} {chosen.config.name}" if precision == IEEE else chosen.config.name
        # CuPy and PyTorch have a current stream, which the harness sets; Numba has none.
        multiply = functools.partial(tiled_sgemm, a, b, c, precision=precision)
        call = on_stream(multiply) if buffers.library.name != "numba" else lambda stream: multiply(stream=stream)
        return Bound(call, name, seconds)

    return Contender(AUTO, bind, precision=precision)


def triple_loop() -> Contender:
    """Return the contender for ``cpu_sgemm`` on copies of the operands, for small products only."""

    def bind(buffers: DeviceBuffers) -> Bound:
        a, b = (buffers.library.to_host(array) for array in (buffers.a, buffers.b))
        out = np.full((buffers.shape.m, buffers.shape.n), np.nan, np.float32)
        deliver = functools.partial(buffers.library.copy_from_host, out, buffers.c)
        return Bound(lambda _stream: cpu_sgemm(a, b, out), "", cpu_compile_seconds(), deliver)

    return Contender(CPU, bind, on_host=True, max_terms=CPU_TERMS)


@functools.cache
def cpu_compile_seconds() -> float:
    """Return the seconds that ``cpu_sgemm`` takes to compile."""
    one = np.ones((1, 1), np.float32)
    return elapsed(functools.partial(cpu_sgemm, one, one, one.copy()), no_wait)


def cublas() -> tuple[Contender, ...]:
    """Return the contenders for FP32 cuBLAS (TF32 off), through PyTorch and CuPy if they are available."""
    if (torch := optional("torch")) is not None:
        torch.set_float32_matmul_precision("highest")
    # CuPy refuses to call cuBLAS on a stream that is being captured.
    return tuple(
        Contender(CUBLAS, functools.partial(matmul, library), via=name, capturable=name != "cupy")
        for name in ("torch", "cupy")
        if (library := optional(name)) is not None
    )


def matmul(library: Any, buffers: DeviceBuffers) -> Bound:
    """Return the call of a library's product."""
    a, b, c = buffers.views(library)
    return Bound(lambda _stream: library.matmul(a, b, out=c))


def narrow_cublas() -> tuple[Contender, ...]:
    """Return the contenders for TF32 and BF16 of cuBLAS, through PyTorch.

    BF16 is measured on operands that are rounded in each call, with an FP32 result, and on operands that are BF16
    already. The latter has a BF16 result and reads half the bytes: not a fair comparison, but the fastest product
    available.
    """
    torch = optional("torch")
    if torch is None:
        return ()

    def tf32(buffers: DeviceBuffers) -> Bound:
        return replace(matmul(torch, buffers), setting=functools.partial(allowing_tf32, torch))

    def bf16(buffers: DeviceBuffers) -> Bound:
        a, b, c = buffers.views(torch)
        half_a, half_b = a.bfloat16(), b.bfloat16()
        multiply = widening_product(torch, half_a, half_b, c)

        def call(_stream: int) -> None:
            half_a.copy_(a)
            half_b.copy_(b)
            multiply()

        return Bound(call)

    def given_bf16(buffers: DeviceBuffers) -> Bound:
        a, b, c = buffers.views(torch)
        half_a, half_b, half_c = (x.bfloat16() for x in (a, b, c))
        multiply = functools.partial(torch.matmul, half_a, half_b, out=half_c)
        return Bound(lambda _stream: multiply(), deliver=functools.partial(c.copy_, half_c))

    return (
        Contender(CUBLAS, tf32, via="torch", precision="tf32"),
        Contender(CUBLAS, bf16, via="torch", precision="bf16"),
        Contender(GIVEN_BF16, given_bf16, via="torch", precision="bf16"),
    )


def widening_product(torch: Any, a: Any, b: Any, c: Any) -> Callable[[], object]:
    """Return the product of BF16 tensors with an FP32 result; older versions of PyTorch convert a BF16 result."""
    product = functools.partial(torch.mm, a, b, out_dtype=torch.float32, out=c)
    try:
        product()
    except (TypeError, RuntimeError):  # no such argument, or no kernel for it
        half_c = c.bfloat16()

        def convert() -> None:
            torch.matmul(a, b, out=half_c)
            c.copy_(half_c)

        return convert
    return product


@contextlib.contextmanager
def allowing_tf32(torch: Any) -> Iterator[None]:
    """Let PyTorch compute FP32 products in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def rotating(bound: Sequence[Bound]) -> Call:
    """Return a call that moves on to the next set of buffers each time."""
    if len(bound) == 1:
        return bound[0].call
    calls = itertools.cycle([one.call for one in bound])
    return lambda stream: next(calls)(stream)


def in_turns(bound: Sequence[Bound]) -> Call:
    """Return a call as `rotating` does that enters the setting by itself, for timing beside other contenders."""
    call, setting = rotating(bound), bound[0].setting
    if setting is contextlib.nullcontext:
        return call

    def enqueue(stream: int) -> None:
        with setting():
            call(stream)

    return enqueue


def select_contenders(
    names: Iterable[str], *, simulated: bool, all_configs: bool = False, precisions: Sequence[str] = ()
) -> tuple[Contender, ...]:
    """Return the contenders for some stages, in climbing order, and for the public function in some precisions.

    In the simulator, a stage runs its test configuration, the only one that is small enough, and cuBLAS is absent. A
    tensor core stage computes in those of the precisions that it supports; without any, in bf16x6, or else its first.
    """
    wanted = set(names)
    chosen: list[Contender] = []
    for stage in STAGES.values():
        if stage.name not in wanted:
            continue
        if isinstance(stage, LadderStage):
            configs = (stage.test_config,) if simulated else stage.configs if all_configs else stage.configs[:1]
            chosen += [stage_contender(stage, config) for config in configs]
            continue
        computes = [name for name in precisions if name in stage.precisions]
        for name in computes or ["bf16x6" if "bf16x6" in stage.precisions else stage.precisions[0]]:
            simulable = simulated and stage.test_config is not None
            found = (stage.test_config,) if simulable else configs_for(stage, name, LARGE)
            chosen += [stage_contender(stage, config, name) for config in (found if all_configs else found[:1])]
    if AUTO in wanted:
        chosen.append(public_function())
    if CUBLAS in wanted and not simulated:
        chosen += cublas()
    if CPU in wanted:
        chosen.append(triple_loop())
    chosen += [public_function(name) for name in precisions]
    if precisions and CUBLAS in wanted and not simulated:
        chosen += [contender for contender in narrow_cublas() if contender.precision in precisions]
    return tuple(chosen)
