"""Blocks on a multiprocessor: known answers, errors, the stages as they are compiled, and the driver's own count."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from types import SimpleNamespace

import pytest
from support.compile_stages import compiler_environment

import numba_gemm
from numba_gemm import GpuUnavailable
from numba_gemm.gemm import occupancy as module
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import compensates
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES
from numba_gemm.models.occupancy import LIMITS, occupancy
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import kernel_cache

ALL = ("blocks", "warps", "registers", "shared memory")


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "cc", "limits", "limiters"),
    [
        # NVIDIA's cuda_occupancy.h of CUDA 13.0 says the same of all of these.
        (256, 32, 0, (9, 0), (32, 8, 8, 228), ("warps", "registers")),
        (1024, 32, 8192, (9, 0), (32, 2, 2, 25), ("warps", "registers")),
        (256, 128, 16384, (9, 0), (32, 8, 2, 13), ("registers",)),
        (256, 129, 0, (9, 0), (32, 8, 1, 228), ("registers",)),
        (256, 253, 50176, (9, 0), (32, 8, 1, 4), ("registers",)),
        (256, 128, 99840, (9, 0), (32, 8, 2, 2), ("registers", "shared memory")),
        (32, 16, 0, (9, 0), (32, 64, 128, 228), ("blocks",)),
        (33, 16, 0, (9, 0), (32, 32, 64, 228), ("blocks", "warps")),
        (64, 40, 232448, (9, 0), (32, 32, 24, 1), ("shared memory",)),
        (1024, 65, 0, (9, 0), (32, 2, 0, 228), ("registers",)),  # cannot be launched
        (160, 80, 0, (9, 0), (32, 12, 4, 228), ("registers",)),  # 24 warps of 2560 registers, 5 per block
        (256, 64, 16384, (8, 0), (32, 8, 4, 9), ("registers",)),
        (256, 64, 16384, (8, 6), (16, 6, 4, 5), ("registers",)),
        (32, 32, 0, (8, 6), (16, 48, 64, 100), ("blocks",)),
        (32, 32, 0, (8, 9), (24, 48, 64, 100), ("blocks",)),
        (256, 64, 16384, (7, 5), (16, 4, 4, 4), ("warps", "registers", "shared memory")),
        (256, 64, 16384, (10, 0), (32, 8, 4, 13), ("registers",)),
        (64, 32, 10000, (12, 0), (24, 24, 32, 9), ("shared memory",)),
    ],
)
def test_known_answers(threads, registers, shared, cc, limits, limiters):
    found = occupancy(threads, registers, shared, cc)
    assert found.limits == dict(zip(ALL, limits))
    assert found.blocks == min(limits)
    assert found.limiters == limiters
    warps = -(-threads // 32)
    assert found.warps == found.blocks * warps
    assert found.fraction == found.warps / LIMITS[cc].warps
    assert " and ".join(limiters) in str(found)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((256, 32, 0, (6, 1)), r"cc is \(6, 1\); expected one of 7\.5, 8\.0.*pass \(9, 0\)"),
        ((0, 32, 0, (9, 0)), "threads is 0; expected 1 to 1024"),
        ((1025, 32, 0, (9, 0)), "threads is 1025; expected 1 to 1024"),
        ((256, 256, 0, (9, 0)), "registers is 256; expected 1 to 255"),
        ((256, 32, 101377, (8, 6)), r"shared is 101377; expected 0 to 101376 on compute capability 8\.6"),
    ],
)
def test_what_no_block_can_have(arguments, says):
    with pytest.raises(ValueError, match=says):
        occupancy(*arguments)


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that were compiled, which all need 120 registers and 1024 bytes of static shared memory."""
    kernels = []
    monkeypatch.setattr(module, "SIMULATOR", False)
    fetched = SimpleNamespace(cubin=SimpleNamespace(registers=120, shared=1024))
    monkeypatch.setattr(kernel_cache, "fetch", lambda kernel, cc: kernels.append(kernel) or fetched)
    return kernels


@pytest.mark.parametrize("stage", TENSOR_STAGES.values(), ids=lambda stage: stage.name)
def test_precisions(stage, compiled):
    for precision in stage.precisions:
        found = numba_gemm.occupancy(stage.name, cc=(9, 0), precision=precision)
        (kernel,) = compiled
        compiled.clear()
        assert kernel.name.startswith(f"{stage.name}_")
        assert stage.name == "tf32_tma" or kernel.variant.precision is TENSOR_PRECISIONS[precision]
        assert kernel.config is stage.configs[0]
        assert found == occupancy(kernel.threads, 120, 1024 + kernel.dynamic_shared, (9, 0))
    for config in stage.configs:
        assert numba_gemm.occupancy(stage, config, cc=90) == numba_gemm.occupancy(stage, config.name, cc="9.0")
        first, second = compiled
        compiled.clear()
        assert first is second, "by default, in the stage's first precision"
        assert (first.config, first.name.count(stage.precisions[0])) == (config, 1)


@pytest.mark.parametrize("stage", ["thin", "stream_k"])
def test_default_configuration_has_compensated_sums(stage, compiled):
    numba_gemm.occupancy(stage, cc=(9, 0), precision="bf16x6")
    (kernel,) = compiled
    assert kernel.variant.compensated
    assert compensates(kernel.config)


@pytest.mark.usefixtures("compiled")
def test_stage_and_precision_have_to_agree():
    assert numba_gemm.occupancy("async_copy", cc="sm_90", precision="ieee").blocks == 2
    assert numba_gemm.occupancy("async_copy", cc="sm_90", precision="FP32").blocks == 2
    with pytest.raises(ValueError, match="precision is 'bf16' and stage is 'naive', which computes in ieee"):
        numba_gemm.occupancy("naive", cc=(9, 0), precision="bf16")
    with pytest.raises(ValueError, match="precision is 'fp16x3' and stage is 'one_warpgroup', which computes in tf32,"):
        numba_gemm.occupancy("one_warpgroup", cc=9.0, precision="fp16x3")
    with pytest.raises(ValueError, match=r"compute capability is 8\.0; expected one of 9\.0 for stage 'persistent'"):
        numba_gemm.occupancy("persistent", cc=(8, 0))


def test_advice_without_a_gpu_works(monkeypatch):
    def current_device():
        raise GpuUnavailable("none.")

    monkeypatch.setattr(module, "SIMULATOR", False)
    monkeypatch.setattr(devices, "current_device", current_device)
    with pytest.raises(GpuUnavailable, match=r"Pass a compute capability, cc=\(9, 0\)"):
        module.occupancy("naive")
    with pytest.raises(GpuUnavailable, match="Leave out device; then no GPU is needed"):
        module.occupancy("naive", cc=9.0, device=0)


@pytest.mark.simulator
def test_the_simulator_compiles_nothing():
    with pytest.raises(RuntimeError, match=r"unset NUMBA_ENABLE_CUDASIM, and without a GPU pass .* cc=\(9, 0\)"):
        numba_gemm.occupancy("naive")


def test_configuration_of_another_ladder():
    config = STAGES["warp_tiled"].configs[0]
    with pytest.raises(
        TypeError, match=r"config is TileConfig.*; expected a WarpgroupConfig, .* for stage 'persistent'"
    ):
        numba_gemm.occupancy("persistent", config)


CHILD = """
import json, sys
import numba_gemm
for arguments in json.loads(sys.stdin.read()):
    stage, config, cc = arguments
    try:
        found = numba_gemm.occupancy(stage, config, cc=cc)
        print(json.dumps([found.blocks, found.warps, found.shared, list(found.cc)]))
    except (TypeError, ValueError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""

# Stages that compile quickly.
COMPILED = [
    (("naive", None, (9, 0)), [2, 64, 0, [9, 0]]),
    (("coalesced", "2x128x1-1x1", (8, 6)), [6, 48, 0, [8, 6]]),
    (("shared_tile", "16x16x16-1x1", (9, 0)), [8, 64, 2048, [9, 0]]),
    (("none", None, (9, 0)), "ValueError: stage is 'none'; expected one of naive, "),
    ((3, None, (9, 0)), "TypeError: stage is 3; expected a Stage or its name"),
    (("naive", "8x8", (9, 0)), "ValueError: config is '8x8'; expected one of 32x32x1-1x1 for stage 'naive'"),
    (("naive", 8, (9, 0)), "TypeError: config is 8; expected a TileConfig, or the name of one"),
    (("async_copy", None, (7, 5)), "ValueError: the compute capability is 7.5; expected one of 8.0, "),
    (("naive", None, (6, 0)), "ValueError: the compute capability is 6.0; expected one of 7.5, "),
]


def test_stages_as_they_are_compiled():
    """In a process without the simulator, which has no compiler."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([arguments for arguments, _ in COMPILED]),
        env=compiler_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for (arguments, expected), line in zip(COMPILED, done.stdout.splitlines(), strict=True):
        got = json.loads(line)
        assert got.startswith(expected) if isinstance(expected, str) else got == expected, (arguments, got)


@pytest.mark.gpu
@pytest.mark.parametrize("name", STAGES)
def test_the_driver_counts_the_same(name):
    from cuda.bindings import driver

    from numba_gemm.runtime.device import current_device, get_device
    from numba_gemm.runtime.driver import call, device_scope

    stage, device = STAGES[name], get_device(current_device())
    if device.properties.cc < stage.min_cc:
        pytest.skip("needs a higher compute capability")
    for config in stage.configs:
        kernel = device.load(stage.usual_kernel(config))
        with device_scope(device.ordinal):
            counting = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            expected = int(
                call(counting, driver.CUfunction(kernel.handle), prod(stage.block(config)), config.dynamic_shared)
            )
        found = numba_gemm.occupancy(stage, config)
        assert (found.blocks, found.registers, found.shared) == (expected, kernel.registers, kernel.shared), config.name
