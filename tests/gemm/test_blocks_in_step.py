"""The counter by which blocks keep in step: plans in given workspaces, and calls that are repeated."""

import numpy as np
import pytest
from support.array_libraries import Tensor

from numba_gemm import plan, tiled_sgemm
from numba_gemm.simulator.switch import SIMULATOR

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="the driver is a stub")


def memory(nbytes):
    """Return zeros that begin at a multiple of 256 bytes."""
    whole = np.zeros(nbytes // 4 + 65, np.float32)
    skip = -(whole.ctypes.data // 4) % 64
    return Tensor(whole[skip : skip + nbytes // 4 + 1])


def zeros(*shape):
    return Tensor(np.zeros(shape, np.float32))


def counters(gpu):
    """Return the addresses of the counters of the launches so far, 0 where blocks do not keep in step."""
    return [did.steps[-2] for did in gpu.launches if did.kernel.startswith(("persistent", "tf32_tma"))]


@pytest.mark.parametrize("precision", ["bf16x6", "fp16x3", "bf16", "tf32"])
def test_a_batch_that_is_folded_has_no_counter_in_a_workspace_without_one(torch, gpu, precision):
    gpu.computes = False
    arguments = {"batch": 4, "precision": precision}
    needs = plan(1024, 2048, 1024, **arguments).workspace_bytes
    made = plan(1024, 2048, 1024, workspace=memory(needs), **arguments)
    made(zeros(4, 1024, 1024), zeros(4, 1024, 2048))
    made(zeros(4, 1024, 1024), zeros(1024, 2048))
    assert set(counters(gpu)) == {0}


def test_the_last_piece_of_a_batch_has_no_counter_in_a_workspace_without_one(torch, gpu):
    gpu.computes = False
    n = 5632  # the parts of two of three matrices fit
    needs = plan(n, n, n, batch=3, precision="bf16x6").workspace_bytes
    made = plan(n, n, n, batch=3, precision="bf16x6", workspace=memory(needs))
    made(zeros(3, n, n), zeros(3, n, n))
    assert counters(gpu) == [0, 0]


@pytest.mark.parametrize(("precision", "k"), [("tf32", 256), ("bf16x6", 1024)])
def test_repeated_calls_have_the_counter_of_their_stream(torch, gpu, precision, k):
    gpu.computes = False
    a, b, c = zeros(2304, k), zeros(k, 2304), zeros(2304, 2304)
    for _ in range(4):
        tiled_sgemm(a, b, c, precision=precision)
    made = plan(2304, 2304, k, precision=precision)
    for _ in range(3):
        made(a, b, c)
    found = counters(gpu)
    assert len(found) == 7
    assert len(set(found)) == 1
    assert found[0] != 0
