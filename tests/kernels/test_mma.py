"""The twin of the warp's matrix instruction, and the model of the tensor cores' adder."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32

from numba_gemm.device import mma, narrow
from numba_gemm.inspect import trace
from numba_gemm.simulator import scheduler, tensor_core
from numba_gemm.simulator.scheduler import DivergentBarrier

pytestmark = pytest.mark.simulator

PER_WORD = {"tf32": 1, "bf16": 2, "f16": 2}
KINDS = tuple(PER_WORD)
LANES = 32


def fragment_places(kind):
    """Rows and columns of the elements of A, B and C in each lane's words, as the PTX ISA gives them."""
    a, b, c = [], [], []
    for lane in range(LANES):
        group, member = divmod(lane, 4)
        if kind == "tf32":
            a.append([(group + 8 * (i in (1, 3)), member + 4 * (i >= 2)) for i in range(4)])
            b.append([(member + 4 * i, group) for i in range(2)])
        else:
            a.append([(group + 8 * (i in (2, 3, 6, 7)), 2 * member + (i & 1) + 8 * (i >= 4)) for i in range(8)])
            b.append([(2 * member + (i & 1) + 8 * (i >= 2), group) for i in range(4)])
        c.append([(group + 8 * (i >= 2), 2 * member + (i & 1)) for i in range(4)])
    return a, b, c


def words_of(values, kind):
    """Pack narrow numbers, held as float32, into 32-bit words."""
    values = np.asarray(values, np.float32)
    if kind == "f16":
        return tuple(values.astype(np.float16).view(np.uint32))
    bits = values.view(np.uint32)
    return tuple(bits if kind == "tf32" else bits[0::2] >> 16 | bits[1::2] & 0xFFFF0000)


def narrowed(kind, x):
    return np.vectorize(getattr(narrow, kind), otypes=[np.float32])(x)


def multiplied(kind, a, b, c, seed=None):
    """Compute ``a @ b + c`` by one instruction of one warp."""
    places_a, places_b, places_c = fragment_places(kind)
    multiply, result = mma.multiply(kind), np.full((16, 8), np.nan, np.float32)

    def kernel():
        lane = cuda.threadIdx.x
        left = words_of([a[place] for place in places_a[lane]], kind)
        right = words_of([b[place] for place in places_b[lane]], kind)
        sums = multiply(tuple(c[place] for place in places_c[lane]), left, right)
        for place, value in zip(places_c[lane], sums, strict=True):
            result[place] = value

    scheduler.run(kernel, 1, LANES, (), seed=seed)
    return result


def operands(kind, seed=0):
    rng, k = np.random.default_rng(seed), 8 * PER_WORD[kind]
    a, b = (narrowed(kind, rng.standard_normal(shape)) for shape in ((16, k), (k, 8)))
    return a, b, rng.standard_normal((16, 8)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 1])
def test_every_lane_holds_its_elements(kind, seed):
    """Sums of small integers are exact, so one misplaced element shows."""
    rng, k = np.random.default_rng(3), 8 * PER_WORD[kind]
    a, b, c = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((16, k), (k, 8), (16, 8)))
    assert np.array_equal(multiplied(kind, a, b, c, seed), a @ b + c)


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_adds_as_the_model_does(kind):
    a, b, c = operands(kind)
    found = multiplied(kind, a, b, c)
    products = a.astype(np.float64)[:, None] * b.T.astype(np.float64)[None]
    assert np.array_equal(found, tensor_core.add_products(c, products))
    exact = products.sum(axis=-1) + c
    largest = np.maximum(np.abs(products).max(axis=-1), np.abs(c))
    terms = products.shape[-1] + 1
    # Each term loses less than 2^-25 of the power of two above the largest, the result less than 2^-23 of itself.
    assert (np.abs(found - exact) <= terms * 2.0**-25 * largest + 2.0**-23 * np.abs(exact) + 2.0**-149).all()
    assert (found != (a @ b + c)).any(), "rounded sums would differ from truncated ones"


def test_lower_bits_of_tf32_are_ignored():
    a, b, c = operands("tf32")
    noisy = (a.view(np.uint32) | 0x1FFF).view(np.float32)
    assert np.array_equal(multiplied("tf32", noisy, b, c), multiplied("tf32", a, b, c))


def test_special_values():
    a, b, c = operands("bf16")
    a[1, 3], a[2, 0], c[3, 1] = np.inf, np.nan, -np.inf
    b[3] = np.abs(b[3])
    found = multiplied("bf16", a, b, c)
    assert (found[1] == np.inf).all()
    assert np.isnan(found[2]).all()
    assert found[3, 1] == -np.inf
    rest = np.delete(found, (1, 2, 3), axis=0)
    assert np.isfinite(rest).all()


@pytest.mark.parametrize("threads", [16, 31, 40])
def test_incomplete_warps_are_refused(threads):
    multiply = mma.multiply("bf16")

    def kernel():
        multiply((0, 0, 0, 0), (0, 0, 0, 0), (0, 0))

    with pytest.raises(RuntimeError, match="the instruction needs all 32 lanes of a warp"):
        scheduler.run(kernel, 1, threads, ())


@pytest.mark.parametrize("other", ["exits", "waits for its warp", "waits for its block", "multiplies elsewhere"])
def test_lanes_that_are_elsewhere_are_missed(other):
    multiply = mma.multiply("bf16")
    nothing = (0, 0, 0, 0), (0, 0, 0, 0), (0, 0)

    def kernel():
        if cuda.threadIdx.x != 5:
            multiply(*nothing)
        elif other == "waits for its warp":
            cuda.syncwarp()
        elif other == "waits for its block":
            cuda.syncthreads()
        elif other == "multiplies elsewhere":
            multiply(*nothing)

    with pytest.raises((RuntimeError, DivergentBarrier), match=r"needs all 32 lanes|divergent barrier"):
        scheduler.run(kernel, 1, LANES, ())


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_values_of_one_exchange_are_not_those_of_the_next(seed):
    found = {}

    def kernel():
        lane = cuda.threadIdx.x
        for i in range(5):
            found[lane, i] = scheduler.exchange((i, lane))

    scheduler.run(kernel, 1, 64, (), seed=seed)
    for (lane, i), values in found.items():
        assert values == [(i, lane // LANES * LANES + other) for other in range(LANES)]


# --------------------------------------------------------------------------------------------------- model of the adder


def test_terms_are_truncated_two_bits_below_a_float():
    """Relative to a sum of 1, the last bit that is added is 2^-25, and halves do not round up."""
    for exponent, expected in ((-22, 1 + 2.0**-22), (-23, 1 + 2.0**-23), (-24, 1.0)):
        assert tensor_core.add_products(1.0, [2.0**exponent]) == expected
    kept, lost = [2.0**-25] * 4, [2.0**-26] * 8  # either is 2^-23, the last bit of a float
    assert tensor_core.add_products(1.0, kept) == 1 + 2.0**-23
    assert tensor_core.add_products(1.0, lost) == 1.0
    assert tensor_core.add_products(1.0, lost, extra=3) == 1 + 2.0**-23


def test_truncation_is_toward_zero():
    assert tensor_core.add_products(-1.0, [-(2.0**-24)]) == -1.0
    assert tensor_core.add_products(1.0, [3 * 2.0**-24]) == 1 + 2.0**-23


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=2, max_size=17), st.randoms())
def test_the_sum_does_not_depend_on_the_order(terms, random):
    found = tensor_core.add_products(terms[0], terms[1:])
    first, *others = random.sample(terms, len(terms))
    assert tensor_core.add_products(first, others) == found
    assert np.float32(found) == found
    largest = max(map(abs, terms))
    exact = math.fsum(terms)
    assert abs(found - exact) <= len(terms) * 2.0**-25 * largest + 2.0**-23 * abs(exact) + 2.0**-149


def test_large_and_small_sums():
    huge, tiny = float(np.finfo(np.float32).max), 2.0**-149
    assert tensor_core.add_products(huge, [huge]) == np.inf
    assert tensor_core.add_products(tiny, [tiny]) == 2 * tiny
    assert tensor_core.add_products(0.0, [0.75 * tiny]) == 0.0
    assert tensor_core.add_products(0.0, [0.0]) == 0.0


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("barrier", [False, True])
def test_the_instruction_orders_no_memory_accesses(barrier):
    multiply = mma.multiply("bf16")

    @cuda.jit
    def kernel(out):
        shared, lane = cuda.shared.array(32, float32), cuda.threadIdx.x
        shared[lane] = lane
        multiply((0, 0, 0, 0), (0, 0, 0, 0), (0, 0))
        if barrier:
            cuda.syncwarp()
        out[lane] = shared[lane ^ 1]

    found = trace(kernel, 1, LANES, np.zeros(LANES, np.float32))
    assert (found.races == []) == barrier


@given(st.floats(width=32), st.floats(width=32))
def test_words_of_two_rounded_floats(low, high):
    word = mma.bf16_word(np.float32(low), np.float32(high))
    assert word.dtype == np.uint32
    halves = np.array([int(word) << 16 & 0xFFFFFFFF, int(word) & 0xFFFF0000], np.uint32).view(np.float32)
    assert np.array_equal(halves, [narrow.bf16(low), narrow.bf16(high)], equal_nan=True)
