"""Strided copies, products through shared memory, and barriers: counts and predictions."""

from __future__ import annotations

import inspect
import linecache
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numba import cuda
from support import compile_lab
from support.compile_stages import compiler_environment
from support.offline import offline

from numba_gemm.inspect import sass
from numba_gemm.inspect import trace as tracing
from numba_gemm.lab import registry as lab
from numba_gemm.lab.memory import (
    barriers,
    machine,
    misaligned_copy,
    narrow_product,
    product_with_transpose,
    strided_copy,
)
from numba_gemm.models.prediction import Ceilings
from numba_gemm.simulator import patches, probe

simulator = pytest.mark.simulator
W, LINE = 32, 128
V100 = {"strided": 12.8, "coalesced": 140.2, "padded": 199.4}  # the guide's table, in GB/s
H200 = Ceilings(fp32=65.1e12, dram=4.62e12, l2=9.35e12, shared=33.0e12)


def machine_results(name):
    """Return the recorded results of an experiment."""
    return Path(__file__).parents[2] / "results" / "h200" / "memory_lab" / f"{name}.csv"


def fails_on(claims, frame, sentence_part):
    """Return True if exactly the claims that contain this text are rejected."""
    return {sentence for sentence, holds in claims(frame).items() if not holds} == {
        sentence for sentence in claims(frame) if sentence_part in sentence
    }


# --------------------------------------------------------------------------------------------------- misaligned copies


@simulator
@pytest.mark.parametrize(("block", "offset"), [(64, 0), (64, 1), (64, 8), (64, 31), (33, 0), (50, 3), (100, 0)])
def test_sectors_of_small_blocks_and_offsets_are_those_of_the_kernel(block, offset):
    idata = np.arange(8 * block + offset, dtype=np.float32)
    found = tracing(misaligned_copy.offset_copy, 8, block, np.zeros_like(idata), idata, offset)
    loads = found.requests[found.requests["op"] == "load"]
    assert loads["sectors"].sum() / (8 * block) == misaligned_copy.sectors_a_float(block, offset)


def test_sectors_of_a_misaligned_warp():
    assert misaligned_copy.sectors_a_float(256, 0) == 1 / 8
    assert misaligned_copy.sectors_a_float(256, 3) == 5 / 32
    assert misaligned_copy.sectors_a_float(256, 16) == 1 / 8


def test_claims_of_misaligned_copies_can_fail():
    frame = pd.read_csv(machine_results("misaligned_copy"))
    slow, fast = frame.copy(), frame.copy()
    slow.loc[slow["offset"] == 5, "gb_s"] *= 0.7
    assert fails_on(misaligned_copy.EXPERIMENT.claims, slow, "every misaligned copy")
    fast.loc[fast["offset"] == 5, "gb_s"] *= 1.2
    assert fails_on(misaligned_copy.EXPERIMENT.claims, fast, "no copy is faster")
    wide = frame.copy()
    wide.loc[wide["block"] == 33, "gb_s"] *= 4
    assert fails_on(misaligned_copy.EXPERIMENT.claims, wide, "blocks of 33")
    assert fails_on(misaligned_copy.EXPERIMENT.claims, frame.assign(sectors=4.0), "asks for five")


# ------------------------------------------------------------------------------------------------------ strided copies


@simulator
@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (3, 12), (7, 28), (8, 32), (9, 32), (32, 32)])
def test_sectors_of_a_stride_are_those_of_the_kernel(stride, sectors):
    idata, odata = np.zeros(64 * stride, np.float32), np.zeros(64 * stride, np.float32)
    requests = tracing(strided_copy.stride_copy, 2, 32, odata, idata, stride).requests
    assert set(requests["op"]) == {"load", "store"}
    assert (requests["sectors"] == sectors).all()
    assert strided_copy.sectors_a_warp(stride) == sectors


@pytest.mark.parametrize(
    ("stride", "fetch", "moved"),
    [
        (1, 64, 128 + 0 + 128),  # whole sectors are not completed
        (2, 64, 256 + 256 + 256),
        (8, 32, 1024 + 1024 + 1024),
        (8, 64, 1024 + 1024 + 1024),
        (16, 64, 2048 + 2048 + 1024),  # each float takes a separate fetch
        (32, 64, 2048 + 2048 + 1024),
        (32, 32, 1024 + 1024 + 1024),
    ],
)
def test_what_device_memory_moves_for_a_stride(stride, fetch, moved):
    assert strided_copy.moved_a_warp(stride, fetch) == moved


@simulator
def test_predictions_of_strides_begin_at_what_stride_1_reaches():
    frame = strided_copy.strided_copy(strides=(2, 8), elements=256, rounds=1).set_index("stride")
    assert list(frame.index) == [1, 2, 8]
    first = frame["gb_s"][1]
    assert frame["predicted_by_sectors_gb_s"].to_list() == pytest.approx([first, first / 2, first / 8])
    assert frame["predicted_by_fetches_gb_s"].to_list() == pytest.approx([first, first / 3, first / 12])
    assert frame["efficiency"].to_list() == [1, 1 / 2, 1 / 8]


@simulator
@pytest.mark.parametrize("wrong", ["odata[x] = idata[x - 1]", "odata[x] = idata[x]; odata[x - x % 7] = 0"])
def test_a_wrong_copy_is_seen(monkeypatch, wrong):
    monkeypatch.setattr(
        strided_copy, "stride_copy", changed(strided_copy.stride_copy, "odata[x] = idata[x]", wrong, strided_copy)
    )
    with pytest.raises(AssertionError):
        strided_copy.strided_copy(strides=(3,), elements=256, rounds=1)


def test_claims_of_strides_can_fail():
    frame = pd.DataFrame({"stride": range(1, 33)})
    frame["sectors"] = frame["stride"].map(strided_copy.sectors_a_warp)
    frame["predicted_by_sectors_gb_s"] = 2700 * 4 / frame["sectors"]
    frame["predicted_by_fetches_gb_s"] = (
        2700 * 256 / frame["stride"].map(lambda stride: strided_copy.moved_a_warp(stride, 64))
    )
    frame["gb_s"] = frame["predicted_by_sectors_gb_s"] * (1 - frame["stride"] / 100)
    assert all(strided_copy.EXPERIMENT.claims(frame).values())
    for stride, gb_s, sentence in (
        (32, 300.0, "at stride 32"),
        (4, 500.0, "up to stride 8"),
        (16, 140.0, "by fetches"),
    ):
        wrong = frame.assign(gb_s=frame["gb_s"].where(frame["stride"] != stride, gb_s))
        assert fails_on(strided_copy.EXPERIMENT.claims, wrong, sentence)


# ------------------------------------------------------------------------------------------------------------ products


def changed(kernel, old, new, module, **names):
    """Return a kernel with a part of its source replaced."""
    function = patches.python_function(kernel)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source
    source, place = source.replace(old, new), f"<{function.__name__} with {new}>"
    linecache.cache[place] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        place,
    )  # where the tracer finds the source
    namespace = {**vars(module), **names}
    exec(compile(source, place, "exec"), namespace)
    return namespace[function.__name__]


def operands(m, n):
    a, b = narrow_product.integers(m, W, 0), narrow_product.integers(W, n, 1)
    return a, b, np.full((m, n), np.nan, np.float32)


def traced_cost(found, warp):
    """Return sectors, wavefronts and passes of a warp, from a trace of the kernel."""
    own = found.requests[found.requests["warp"] == warp]
    lines = [len({address // LINE for _, address in found.lanes(row)}) for row in own[own["space"] == "global"].index]
    wavefronts = int(own["wavefronts"].sum())
    return {
        "global_sectors": int(own["sectors"].sum()),
        "shared_wavefronts": wavefronts,
        "passes": sum(lines) + wavefronts,
    }


@simulator
@pytest.mark.parametrize("kernel", narrow_product.KERNELS)
def test_cost_of_a_narrow_product_is_that_of_the_kernel(kernel):
    a, b, c = operands(32, 64)
    found = tracing(narrow_product.KERNELS[kernel], (2, 1), (W, W), a, b, c, blocks=[(1, 0)])
    predicted = narrow_product.cost(narrow_product.ACCESSES[kernel])
    assert traced_cost(found, 1) == traced_cost(found, 31) == predicted
    assert not found.races
    assert np.array_equal(c[:, 32:], (a @ b)[:, 32:])


@simulator
@pytest.mark.parametrize("kernel", product_with_transpose.KERNELS)
def test_cost_of_a_product_with_the_transpose_is_that_of_the_kernel(kernel):
    a, c = narrow_product.integers(64, W, 0), np.full((64, 64), np.nan, np.float32)
    found = tracing(product_with_transpose.KERNELS[kernel], (2, 2), (W, W), a, c, blocks=[(1, 0)])
    predicted = narrow_product.cost(product_with_transpose.ACCESSES[kernel])
    assert traced_cost(found, 1) == traced_cost(found, 31) == predicted
    assert not found.races
    assert np.array_equal(c[:32, 32:], (a @ a.T)[:32, 32:])


def test_passes_predict_the_ratios_of_the_guides_table():
    passes = {
        name: narrow_product.cost(product_with_transpose.ACCESSES[name])["passes"]
        for name in product_with_transpose.KERNELS
    }
    assert passes == {"strided": 1057, "coalesced": 100, "padded": 69}
    for name, gb_s in V100.items():
        assert passes["strided"] / passes[name] == pytest.approx(gb_s / V100["strided"], rel=0.05)


def test_bounds_of_a_narrow_product(monkeypatch):
    monkeypatch.setattr(machine, "ceilings", lambda: (H200, "an H200's"))
    m = n = 8192
    moved = 4 * (m * W + W * n + m * n)
    found = {
        name: narrow_product.bounds(m, n, narrow_product.cost(narrow_product.ACCESSES[name]), moved)
        for name in narrow_product.KERNELS
    }
    warps = m * n / W
    assert found["simple"][0] == pytest.approx(1e6 * warps * 65 * 128 / 33.0e12)
    assert found["simple"][1] == pytest.approx(1e6 * warps * 164 * 32 / 9.35e12)
    assert found["shared_ab"][0] == found["shared_ab"][1] == pytest.approx(1e6 * warps * 69 * 128 / 33.0e12)


@simulator
def test_a_warp_is_a_row_of_the_block():
    """A warp reads only the part of the tile of A that it has written, so its own barrier suffices."""

    @cuda.jit
    def rows(out):
        out[cuda.threadIdx.y, cuda.threadIdx.x] = cuda.laneid

    out = np.zeros((W, W), np.int32)
    accesses = tracing(rows, 1, (W, W), out).accesses
    assert (accesses["warp"] == [y for y, _ in accesses["element"]]).all()
    assert (accesses["lane"] == [x for _, x in accesses["element"]]).all()


@simulator
@pytest.mark.parametrize(
    ("name", "barrier", "weaker"),
    [("shared_a", "cuda.syncwarp()", "pass"), ("shared_ab", "cuda.syncthreads()", "cuda.syncwarp()")],
)
def test_no_weaker_barrier_would_do(name, barrier, weaker):
    a, b, c = operands(32, 32)
    weak = changed(narrow_product.KERNELS[name], barrier, weaker, narrow_product, of_block=False)
    assert tracing(weak, 1, (W, W), a, b, c).races


@simulator
def test_the_transposed_tile_needs_the_barrier_of_the_block():
    a, c = narrow_product.integers(32, W, 0), np.full((32, 32), np.nan, np.float32)
    padded = product_with_transpose.KERNELS["padded"]
    weak = changed(padded, "cuda.syncthreads()", "cuda.syncwarp()", product_with_transpose, name="padded", width=W + 1)
    assert tracing(weak, 1, (W, W), a, c).races


@simulator
def test_wrong_products_are_seen(monkeypatch):
    simple = changed(narrow_product.simple, "b[i, col]", "b[col, i]", narrow_product)
    monkeypatch.setattr(narrow_product, "KERNELS", {"simple": simple})
    with pytest.raises(AssertionError, match="simple"):
        narrow_product.narrow_product(m=32, n=32, rounds=1)


def of_products(accesses, gb_s):
    costs = [narrow_product.cost(requests) for requests in accesses.values()]
    frame = pd.DataFrame(costs).add_suffix("_a_warp").assign(kernel=list(accesses), gb_s=gb_s)
    return frame.assign(predicted_by_hits_gb_s=33_000 / frame["passes_a_warp"], predicted_by_misses_gb_s=200)


def test_claims_of_products_can_fail():
    frame = of_products(narrow_product.ACCESSES, [400, 380, 450])
    assert all(narrow_product.EXPERIMENT.claims(frame).values())
    assert fails_on(narrow_product.EXPERIMENT.claims, frame.assign(gb_s=[452, 380, 450]), "both tiles in shared memory")
    assert fails_on(narrow_product.EXPERIMENT.claims, frame.assign(gb_s=[330, 380, 450]), "the tile of A alone")
    assert fails_on(narrow_product.EXPERIMENT.claims, frame.assign(gb_s=[400, 380, 420]), "both tiles reach")
    frame = of_products(product_with_transpose.ACCESSES, [30, 300, 410])
    assert all(product_with_transpose.EXPERIMENT.claims(frame).values())
    assert fails_on(
        product_with_transpose.EXPERIMENT.claims, frame.assign(gb_s=[30, 310, 310]), "without bank conflicts"
    )


# What ptxas makes of the kernels: as many loads as the kernels have, none wider than a float, and of a barrier of
# converged warps nothing.
LISTED = {
    ("narrow_product", "simple"): {"LDG.E": 64, "LDS": 0, "STS": 0, "BAR": 0},
    ("narrow_product", "shared_a"): {"LDG.E": 33, "LDS": 32, "STS": 1, "BAR": 0},
    ("narrow_product", "shared_ab"): {"LDG.E": 2, "LDS": 64, "STS": 2, "BAR": 1},
    ("product_with_transpose", "strided"): {"LDG.E": 64, "LDS": 0, "STS": 0, "BAR": 0},
    ("product_with_transpose", "coalesced"): {"LDG.E": 2, "LDS": 64, "STS": 2, "BAR": 1},
    ("product_with_transpose", "padded"): {"LDG.E": 2, "LDS": 64, "STS": 2, "BAR": 1},
    ("barriers", "shared_a_syncthreads"): {"LDG.E": 33, "LDS": 32, "STS": 1, "BAR": 1},
    ("barriers", "loop_syncwarp"): {"BAR": 0, "WARPSYNC": 0},
    ("barriers", "rounds_syncwarp"): {"BAR": 0, "WARPSYNC": 0},
    ("strided_copy", "stride_copy"): {"LDG.E": 1, "STG.E": 1},
}


@pytest.mark.exhaustive
@pytest.mark.skipif(sass.find_tool("nvdisasm") is None, reason="needs nvdisasm")
def test_instructions_are_those_that_are_counted():
    found = {}
    for name in ("narrow_product", "product_with_transpose", "barriers", "strided_copy"):
        for kernel, made in offline(compile_lab.compiled, name, (9, 0)).items():
            assert made["local"] == 0
            (instructions,) = sass.functions(sass.disassemble(bytes.fromhex(made["code"]))).values()
            found[name, kernel] = [one.opcode for one in instructions]
    for key, counts in LISTED.items():
        for opcode, count in counts.items():
            same = [own for own in found[key] if own == opcode or own.partition(".")[0] == opcode]
            assert len(same) == count, (key, opcode)
    loop = found["barriers", "loop_syncthreads"]
    assert sum(own.startswith("BAR") for own in loop) % barriers.UNROLLED == 0
    assert sum(own.startswith("BAR") for own in loop) == sum(own == "FFMA" for own in loop)


# ------------------------------------------------------------------------------------------------------------ barriers


@pytest.mark.parametrize(
    ("barrier", "block", "clocks"),
    [
        ("none", 32, 4),
        ("none", 1024, 8),
        ("syncwarp", 128, 4),
        ("syncwarp", 1024, 16),
        ("syncthreads", 32, 4),
        ("syncthreads", 128, 8),
        ("syncthreads", 1024, 64),
    ],
)
def test_least_clocks_of_a_turn(barrier, block, clocks):
    assert barriers.least_clocks(barrier, block) == clocks


def test_rounds_last_as_long_as_the_slowest_or_as_a_warps_sum():
    steps = barriers.uneven(8, 1, 10)
    assert (steps.sum(axis=0) == 2 * 10 + 6).all()
    assert (steps.max(axis=1) == 10).all()
    assert barriers.critical("syncthreads", steps) == 80
    assert barriers.critical("syncwarp", steps) == 26


SAID = {
    "block_barrier_after_return": "DivergentBarrier: 32 wait, 32 have returned",
    "block_barrier_in_branch": "DivergentBarrier: 32 wait, 32 wait",
    "block_barrier_in_both_branches": "DivergentBarrier: 32 wait, 32 wait",
    "warp_barrier_of_absent_lanes": "DivergentBarrier: 32 wait, 32 wait",
    "warp_barrier_after_return": "completes: 32 threads have written",
    "warp_barrier_in_both_branches": "completes: 64 threads have written",
    "masked_barrier_in_branch": "completes: 32 threads have written",
}


@simulator
def test_what_the_scheduler_says_of_divergent_barriers():
    assert barriers.outcomes() == SAID


def test_a_child_process_asks_the_scheduler(monkeypatch):
    """This is the case on a GPU, where this process has no simulator."""
    monkeypatch.setattr(machine, "SIMULATOR", False)
    assert barriers.ask_scheduler() == SAID


def test_a_failing_child_is_told(monkeypatch):
    monkeypatch.setattr(machine, "SIMULATOR", False)
    monkeypatch.setattr(probe, "simulator_environment", compiler_environment)
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        barriers.ask_scheduler()


def test_the_simulators_environment(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    assert probe.simulator_environment()["NUMBA_ENABLE_CUDASIM"] == "1"
    assert not probe.simulator_requested()


@simulator
def test_lost_turns_are_seen(monkeypatch):
    fewer = "range(1, turns, UNROLLED + 1)"
    none = {"of_warp": False, "of_block": False, "barrier": "none"}
    lost = changed(barriers.LOOPS["none"], "range(0, turns, UNROLLED)", fewer, barriers, **none)
    monkeypatch.setitem(barriers.LOOPS, "none", lost)
    with pytest.raises(AssertionError):
        barriers.EXPERIMENT.frame(**{**lab.load("barriers").small, "turns": 72})


def test_claims_of_barriers_can_fail(monkeypatch):
    rows = []
    for block in (32, 64, 128, 256, 512, 1024):
        for barrier in barriers.LOOPS:
            least = barriers.least_clocks(barrier, block)
            clocks = 12 + least if barrier == "syncthreads" else least
            rows.append(("loop", barrier, block, clocks / 1.98, least / 1.98))
    for measurement, short in (("even rounds", 256), ("uneven rounds", 16)):
        for barrier in barriers.ROUNDS:
            steps = barriers.critical(barrier, barriers.uneven(16, short, 256))
            rows.append((measurement, barrier, 128, steps * 1.05, steps))
    rows += [("tile of A", "syncwarp", 1024, 700e3, 550e3), ("tile of A", "syncthreads", 1024, 770e3, 550e3)]
    frame = pd.DataFrame(rows, columns=["measurement", "barrier", "block", "ns_a_turn", "predicted_ns_a_turn"])
    said = pd.DataFrame({"measurement": "divergent", "barrier": list(SAID), "outcome": list(SAID.values())})
    said["predicted_outcome"] = [expected for _, expected in barriers.DIVERGENT.values()]
    frame = pd.concat([frame, said], ignore_index=True)
    assert all(barriers.EXPERIMENT.claims(frame).values())
    scaled = frame["ns_a_turn"].where(frame["barrier"] != "syncthreads", 3 * frame["predicted_ns_a_turn"])
    assert fails_on(
        barriers.EXPERIMENT.claims,
        frame.assign(ns_a_turn=scaled.where(frame["measurement"] == "loop", frame["ns_a_turn"])),
        "beyond its floor",
    )
    free = (frame["measurement"] == "tile of A") & (frame["barrier"] == "syncthreads")
    assert fails_on(
        barriers.EXPERIMENT.claims, frame.assign(ns_a_turn=frame["ns_a_turn"].mask(free, 700e3)), "for the tile of A"
    )
    hangs = frame.copy()
    hangs.loc[hangs["barrier"] == "block_barrier_in_branch", "outcome"] = "completes: 64 threads have written"
    assert fails_on(barriers.EXPERIMENT.claims, hangs, "the scheduler finds")
