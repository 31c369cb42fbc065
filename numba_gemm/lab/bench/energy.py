"""Energy per product of `bf16x6` and cuBLAS, each alone at its steady state, and of kernels that leave something out.

The kernels are `persistent` without copies (slots are filled once per tile), without the additions of sums outside the
tensor cores, without both, and without matrix instructions. Their results are wrong, and their speed is not a claim:
what each of them saves is the energy of what it leaves out. cuBLAS SGEMM, `ieee` and `bf16x6` are verified against
float64 first.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
import pandas as pd
from numba import uint32

from numba_gemm.device import mbarrier, wgmma
from numba_gemm.kernels.tensor_core import TENSOR_STAGES, TensorStage
from numba_gemm.kernels.tensor_core.accumulate import slot_tiles, steps
from numba_gemm.kernels.tensor_core.persistent import build
from numba_gemm.kernels.tensor_core.pipeline import alternation, give_back_to_all, ring, slot_copies, slot_products
from numba_gemm.lab.bench import steady
from numba_gemm.lab.bench.buffers import NORMAL, DeviceBuffers, Reference, call_on_nan, on_device
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.contenders import cublas, narrow_cublas, public_function
from numba_gemm.lab.bench.results import CUBLAS, GIVEN_BF16
from numba_gemm.lab.bench.tensor_ladder import PreparedStage
from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.environment import GRAPHS
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.harness.nvml import ClockSamples, Nvml
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime import ahead
from numba_gemm.runtime.timing import Call, time_alone
from numba_gemm.simulator.switch import device_function

PRECISION: Final = "bf16x6"
PRODUCTS: Final = 6  # BF16 products that one of `bf16x6` takes
GOAL: Final = 2.4  # times as fast as cuBLAS SGEMM
SEED, WARM_UP_S = 1, 1.0
SHAPES = (Shape(8192, 8192, 8192), Shape(16384, 16384, 16384))

# Contenders beside PRECISION, CUBLAS, GIVEN_BF16 and "ieee".
IDLE, ZEROS, PREPARED = "idle", "of zeros", "decomposed before"
NO_COPIES, NO_ADDITIONS, ONLY_INSTRUCTIONS = "without copies", "without additions", "matrix instructions alone"
ONLY_COPIES = "copies alone"


def first_copies(config: Any, precision: Any, shared: bool) -> Any:
    """Make a device function that fills each slot only at the start of a tile, in place of `slot_copies`."""
    fetch, SLOTS = slot_copies(config, precision, shared), config.slots(precision)

    @device_function
    def fetch_first(at, a, b, s, k_slots, block_row, block_col, full):  # type: ignore[no-untyped-def]
        if s < uint32(SLOTS):
            fetch(at, a, b, s, k_slots, block_row, block_col, full)
        else:
            mbarrier.arrive(full)

    return fetch_first


def bare_sums(multiplies: bool, config: Any, precision: Any) -> Any:
    """Make a device function without additions, in place of `tile_sums`.

    If it `multiplies`, all sums stay in the tensor cores. Otherwise it gives all slots back unread. Unlike
    `running_sums`, it gives a slot back before the products of the next one, as `tile_sums` does.
    """
    clear, *_ = steps(config.BN)
    await_slot, following = ring(config.slots(precision))
    tiles, wait = slot_tiles(config.slot_bytes(precision)), wgmma.waiting(config.BN)
    products = slot_products(config, precision, precision.products, fresh=False)
    _, take, hand_over, _ = alternation(config, precision)

    @device_function
    def sum_tile(total, start, full, emptied, i, parity, k_slots, group):  # type: ignore[no-untyped-def]
        clear(total)
        s = uint32(0)
        while s < k_slots:
            await_slot(full, i, parity)
            if multiplies:
                a_tile, b_tile = tiles(start, i, group)
                take(group)
                products(total, a_tile, b_tile, True)
                hand_over(group)
                wait(total, 0)
            give_back_to_all(emptied, i)
            s = uint32(s + 1)
            i, parity = following(i, parity)
        return i, parity

    return sum_tile


BUILDS: dict[str, Callable[[Any, Any], Any]] = {
    NO_COPIES: functools.partial(build, copies=first_copies),
    NO_ADDITIONS: functools.partial(build, sums=functools.partial(bare_sums, True)),
    ONLY_INSTRUCTIONS: functools.partial(build, copies=first_copies, sums=functools.partial(bare_sums, True)),
    ONLY_COPIES: functools.partial(build, sums=functools.partial(bare_sums, False)),
}
"""Kernels that leave something out; those without additions keep all sums in the tensor cores."""


def energy(shapes: Sequence[Shape] = SHAPES, seconds: float = 2.0) -> Iterator[dict[str, Any]]:
    """Measure the steady speed, power and energy per product of all contenders; one row each per shape.

    Parameters
    ----------
    shapes: Extents of the products.
    seconds: Length of a measurement, after a second to warm up.
    """
    with on_device() as (library, stream):
        nvml = environment.current_nvml()
        for shape in shapes:
            buffers = DeviceBuffers.random(library, shape, SEED)
            a, b = (library.from_host(np.zeros(of, np.float32)) for of in ((shape.m, shape.k), (shape.k, shape.n)))
            zeros = DeviceBuffers(library, shape, a, b, buffers.c)
            stage = TENSOR_STAGES["persistent"]
            assert isinstance(stage, TensorStage)
            prepared = PreparedStage(stage, PRECISION, buffers)
            prepared.decompose(stream)
            theirs, (*_, bf16) = cublas()[0], narrow_cublas()
            own = public_function(PRECISION).bind(buffers)
            checked: dict[str, Call] = {
                CUBLAS: theirs.bind(buffers).call,
                "ieee": public_function().bind(buffers).call,
                PRECISION: own.call,
                PREPARED: prepared.multiply,
            }
            verify(library, buffers, checked, stream)
            calls = checked | {
                GIVEN_BF16: bf16.bind(buffers).call,
                ZEROS: public_function(PRECISION).bind(zeros).call,
                **{name: prepared.multiply_with(made) for name, made in BUILDS.items()},
            }
            ahead.wait_until_idle()
            row = {**shape._asdict(), "config": own.config}
            cublas_us = math.nan
            for name, call in calls.items():
                found = row | {"contender": name} | alone(call, stream, shape, seconds, nvml)
                cublas_us = found["us"] if name == CUBLAS else cublas_us
                yield found | {"ratio_to_cublas": cublas_us / found["us"]}
            _, clocks = steady.window(sleeping(), seconds, nvml)
            yield row | {"contender": IDLE} | of_clocks(clocks)


def verify(library: Any, buffers: DeviceBuffers, calls: Mapping[str, Call], stream: int) -> None:
    """Compare the results of calls with float64; raise RuntimeError if one is wrong."""
    reference = Reference(library, buffers.a, buffers.b)
    for name, call in calls.items():
        call_on_nan(library, buffers.c, call, stream)
        verdict, *_ = reference.judge(buffers.c, PRECISION if name in (PRECISION, PREPARED) else "ieee")
        if not verdict.ok:
            raise RuntimeError(f"{name} at {buffers.shape}: {verdict}")


def alone(call: Call, stream: int, shape: Shape, seconds: float, nvml: Nvml | None) -> dict[str, Any]:
    """Run a call for a second, then measure it."""
    with closing(time_alone(call, stream=stream)) as spans:
        steady.window(spans, WARM_UP_S)
        us, clocks = steady.window(spans, seconds, nvml)
    flops, watts = gemm_flops(*shape), clocks.watts
    return {
        "us": us,
        "tflops": flops / us * 1e-6,
        **of_clocks(clocks),
        "joules": watts * us * 1e-6,
        "pj_per_flop": watts * us * 1e6 / flops,
    }


def of_clocks(clocks: ClockSamples) -> dict[str, Any]:
    """Return the columns of power and clocks."""
    return {"watts": clocks.watts, "sm_clock_mhz": clocks.median_mhz, "throttle": clocks.throttle}


def sleeping() -> Iterator[tuple[float, bool]]:
    """Yield spans in which nothing runs."""
    while True:
        time.sleep(0.01)
        yield math.nan, False


def account(frame: pd.DataFrame) -> dict[str, float]:
    """Divide the joules of a product of `bf16x6` among its parts, given the rows of one shape.

    What the idle GPU takes in that time is static. What is left of a contender is dynamic, and falls with each part
    that is left out in turn: decomposition, copies, additions. The rest belongs to the matrix instructions.
    """
    columns = (frame[name].tolist() for name in ("contender", "us", "watts", "joules"))
    rows = {name: (us * 1e-6, watts, joules) for name, us, watts, joules in zip(*columns)}
    idle = rows[IDLE][1]
    dynamic = {name: joules - idle * seconds for name, (seconds, _, joules) in rows.items()}
    return {
        "static": idle * rows[PRECISION][0],
        "matrix instructions, with their reads of shared memory": dynamic[ONLY_INSTRUCTIONS],
        "copies to shared memory": dynamic[PREPARED] - dynamic[NO_COPIES],
        "additions outside the tensor cores": dynamic[NO_COPIES] - dynamic[ONLY_INSTRUCTIONS],
        "decomposition": dynamic[PRECISION] - dynamic[PREPARED],
    }


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    """Compare `bf16x6` with cuBLAS SGEMM."""
    own = frame[frame["contender"] == PRECISION]
    return {f"bf16x6 has {GOAL} of cuBLAS SGEMM's steady speed": own["ratio_to_cublas"] >= GOAL}


EXPERIMENT = Experiment(
    run=energy,
    claims=claims,
    needs=("gpu", "hopper", "torch"),
    unavailable="the simulator takes no energy worth reading, and there is no cuBLAS",
    operands=NORMAL,
    seed=SEED,
    timing=GRAPHS,
    cache="hot",
    own_clocks=True,
)
