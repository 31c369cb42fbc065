"""Placements, facts that ranks compare, predictions, and the description of a distributed product."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from numba_gemm.distributed import explain
from numba_gemm.distributed.division import divide, shards
from numba_gemm.distributed.facts import Facts, bits, compare, numbers, packed, unpacked
from numba_gemm.distributed.model import Rates, plan_work, product_flops
from numba_gemm.distributed.placements import COLS, OTHER, ROWS, WHOLE, algorithm, chunks, moved, placement
from numba_gemm.gemm.precision import KNOWN

PLACEMENTS = (ROWS, COLS, WHOLE)


def test_the_folder_imports_torch_only_for_products():
    code = "import sys, numba_gemm.distributed as d; d.explain(8, 8, 8, mesh=2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Shard:
    """As PyTorch's."""

    def __init__(self, dim):
        self.dim = dim


class _StridedShard(Shard):
    pass


class Replicate:
    """As PyTorch's."""


def test_placements_are_read():
    given = [
        Shard(0),
        Shard(-2),
        Shard(1),
        Shard(-1),
        Replicate(),
        "Shard(1)",
        "Replicate()",
        Shard(2),
        _StridedShard(0),
        "Partial",
    ]
    assert [placement(one) for one in given] == [ROWS, ROWS, COLS, COLS, WHOLE, COLS, WHOLE, OTHER, OTHER, OTHER]


@pytest.mark.parametrize(("extent", "count"), [(8, 4), (9, 4), (5, 4), (3, 4), (0, 2)])
def test_chunks_are_those_of_torch_chunk(extent, count):
    each = -(-extent // count)
    expected = [len(range(extent)[i * each : (i + 1) * each]) for i in range(count)]
    assert [part.extent for part in chunks(extent, count)] == expected


def test_moved_operands_have_an_algorithm():
    """Whatever the placements of DTensors are, there is one after they are moved, with a result to move on from."""
    refused = 0
    for a, b, out in product((*PLACEMENTS, OTHER), (*PLACEMENTS, OTHER), (None, *PLACEMENTS)):
        out = out and (out,)
        if algorithm((a,), (b,), out) is None:
            refused += 1
            assert algorithm(*moved((a,), (b,), out)) is not None
            assert out in (None, moved((a,), (b,), out).out)
    assert refused == 7 * 4 + 2
    assert algorithm(*moved((COLS, ROWS), (ROWS, ROWS), None)).out == (ROWS, COLS)


def test_nothing_travels_if_nothing_has_to():
    for x, y, z in ((ROWS, WHOLE, ROWS), (WHOLE, COLS, COLS), (WHOLE, WHOLE, WHOLE), (WHOLE, WHOLE, ROWS)):
        found = algorithm((x,), (y,), (z,))
        assert (found.a_travels, found.b_travels, found.reduces, found.spreads) == (None, None, False, False)
        assert explain(64, 64, 64, mesh=4, a=x, b=y, out=z).predicted.communication == 0


UNFIT = {
    "k": ({(0,): (2, 8), (1,): (2, 8)}, {(0,): (4, 3), (1,): (3, 3)}, None, "expected (M, K) and (K, N)"),
    "columns of a": ({(0,): (2, 8), (1,): (2, 7)}, {(0,): (4, 3), (1,): (4, 3)}, None, "a has a shard of shape (2, 7)"),
    "columns of b": ({(0,): (2, 8), (1,): (2, 8)}, {(0,): (4, 3), (1,): (4, 2)}, None, "b has a shard of shape (4, 2)"),
    "out": (
        {(0,): (2, 8), (1,): (2, 8)}, {(0,): (4, 3), (1,): (4, 3)}, {(0,): (1, 3), (1,): (3, 3)},
        "expected shards of rows [2, 2] and columns [3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_shards_that_do_not_fit(case):
    a, b, out, words = UNFIT[case]
    with pytest.raises(ValueError) as raised:
        divide(algorithm((ROWS,), (ROWS,)), (2,), (ROWS,), (ROWS,), a, b, out)
    assert words in str(raised.value)


def test_sums_need_equal_parts_of_k():
    shapes = {(0,): (4, 3), (1,): (4, 5)}, {(0,): (4, 6), (1,): (4, 6)}
    with pytest.raises(ValueError, match=r"a has \[3, 5\] columns on the ranks and b \[4, 4\] rows"):
        divide(algorithm((COLS,), (ROWS,)), (2,), (COLS,), (ROWS,), *shapes)


def test_facts_survive_the_exchange():
    facts = Facts(1, (0, 1), (2, -1), (-1, -1), 3, bits(-0.1), bits(float("nan")), 1, (5, 6), host=1 << 31)
    assert unpacked(packed(facts)) == facts
    assert len(packed(facts)) == len(packed(Facts()))


SAME = Facts(a_placements=numbers((ROWS,)), precision=KNOWN.index("ieee"), alpha=bits(1.0))
DIFFERENT = {
    "alpha": (bits(2.0), "alpha is 1.0 at 0 of the mesh and 2.0 at 1 of the mesh"),
    "precision": (KNOWN.index("bf16x6"), "precision is 'ieee' at 0 of the mesh and 'bf16x6' at 1 of the mesh"),
    "a_placements": (numbers((COLS,)), "placements of a is Shard(0) at 0 of the mesh and Shard(1) at 1"),
    "has_out": (1, "an out is not given at 0 of the mesh and given at 1"),
    "panel": (7, "panel is not given at 0 of the mesh and 7 at 1"),
    "b_whole": ((3, 4), "b of shape is not given at 0 of the mesh and (3, 4) at 1"),
    "refused": (1, "the rank at 1 of the mesh refused its arguments"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_disagree(name):
    value, words = DIFFERENT[name]
    compare({(0,): SAME, (1,): SAME._replace(a_shape=(3, 4), megaflops=5)})
    with pytest.raises(ValueError) as raised:
        compare({(0,): SAME, (1,): SAME._replace(**{name: value})})
    assert words in str(raised.value)


def test_predicted_time_of_two_panels():
    """Own panel first, while the other one arrives; then the other, which adds to C."""
    n, rates = 4096, Rates(50e12, 1e12, (100e9, 100e9), 0.0)
    division = divide(algorithm((ROWS,), (ROWS,)), (2,), (ROWS,), (ROWS,), *(shards((n, n), (ROWS,), (2,)),) * 2)
    found = plan_work(division, "ieee", rates, n // 2).predicted(rates)
    tiles = n // 128 * (n // 2 // 128)
    waves = -(-tiles // 132) * 132 / tiles
    one, adds, sent = waves * 2 * n / 2 * n * n / 2 / 50e12, 4 * n / 2 * n / 1e12, 4 * n / 2 * n / 100e9
    assert found.products == pytest.approx(2 * one + adds, abs=1e-5)
    assert found.communication == pytest.approx(2 * sent, rel=1e-6)
    # The second rank's own panel is broadcast last; the first one waits for it.
    assert found.seconds == pytest.approx(max(one, 2 * sent) + one + adds, abs=1e-5)


def test_slow_links_decide_the_time():
    fast, slow = (explain(16384, 16384, 16384, mesh=8, bandwidth=one) for one in (300e9, 1e9))
    assert slow.predicted.seconds >= slow.predicted.communication > 10 * fast.predicted.seconds
    assert fast.predicted.products <= fast.predicted.seconds < 1.1 * fast.predicted.products


def test_speeds_follow_the_precision():
    assert product_flops("fp16x3") > product_flops("bf16x6") > product_flops("ieee")
    assert product_flops("ieee", 66) == pytest.approx(product_flops("ieee") / 2)


WORDS = {
    "stationary": ({"mesh": 2}, "C stays in place; B travels in 2 panels of up to 512 elements along k"),
    "columns": ({"mesh": 2, "b": COLS}, "B travels in 2 panels of up to 512 elements along n"),
    "blocks": ({"mesh": (2, 2)}, "A and B travel in"),
    "one column": ({"mesh": (2, 1)}, "B travels in"),
    "sums": ({"mesh": 2, "a": COLS, "hosts": 2}, "the sums are added in"),
    "copied sums": ({"mesh": 2, "a": COLS, "flops": 1e12}, "copies the others' sums for its part of C"),
    "copies": ({"mesh": 2, "flops": 1e12}, "in 2,097,152 bytes of slots per rank, to which others copy"),
    "short": ({"mesh": 2, "a": COLS}, "the sums are added in 2 chunks of C"),
    "local": ({"mesh": 2, "b": WHOLE}, "Nothing travels"),
    "result": ({"mesh": 2, "out": WHOLE}, "Each block of C is then broadcast to all ranks"),
}


@pytest.mark.parametrize("case", WORDS)
def test_explanations(case):
    arguments, words = WORDS[case]
    assert words in str(explain(1024, 1024, 1024, panel=512, **arguments))


@pytest.mark.parametrize(
    ("placements", "n", "words"),
    [
        ({}, 26008, "multiples of 4, where contiguous rows of A are read in single floats"),
        ({"b": COLS}, 26008, "multiples of 4, where contiguous rows of C are written in single floats"),
        ({"a": COLS, "b": COLS}, 26008, ""),  # panels of A are copied
        ({}, 26016, ""),
        ({"b": COLS}, 26016, ""),
    ],
)
def test_panels_at_columns_that_are_not_aligned_are_explained(placements, n, words):
    text = str(explain(n, n, n, mesh=4, **placements))
    assert words in text
    assert ("single floats" in text) == bool(words)


WRONG = {
    "mesh": ({"mesh": (2, 2, 2)}, "expected one or two extents"),
    "placements": ({"mesh": (2, 2), "a": ROWS}, "a has 1 placements and the mesh 2 dimensions"),
    "algorithm": ({"mesh": 2, "out": COLS}, "pass one of these results: Shard(0), Replicate"),
    "two dimensions": ({"mesh": (2, 2), "a": (COLS, ROWS)}, "divide rows along the first and columns along the second"),
    "bandwidth": ({"mesh": 2, "bandwidth": (1e9, 1e9)}, "bandwidth has 2 numbers"),
    "no bandwidth": ({"mesh": 2, "bandwidth": 0.0}, "bandwidth is 0.0 and flops None; expected positive numbers"),
    "no speed": ({"mesh": 2, "flops": 0.0}, "expected positive numbers"),
    "panel": ({"mesh": 2, "panel": 0}, "panel is 0; expected 1 or more"),
    "hosts": ({"mesh": 2, "hosts": 0}, "hosts is 0; expected a positive number"),
    "more hosts than ranks": ({"mesh": 2, "hosts": 3}, "hosts is 3; expected a positive number, at most 2"),
    "misspelt": ({"mesh": 2, "a": "shard(0)"}, "a is 'shard(0)'; expected Shard(0), Shard(1) or Replicate"),
    "axis": ({"mesh": 2, "b": "Shard(2)"}, "b is 'Shard(2)'; expected Shard(0), Shard(1) or Replicate"),
    "no placement": ({"mesh": 2, "out": 3}, "out is 3; expected Shard(0), Shard(1) or Replicate"),
    "without an axis": ({"mesh": 2, "a": "Shard"}, "a is 'Shard'; expected Shard(0)"),
    "text": ({"mesh": 2, "bandwidth": "x"}, "bandwidth is 'x' and flops None; expected positive numbers"),
    "precision": ({"mesh": 2, "precision": "fp64"}, "precision is 'fp64'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    arguments, words = WRONG[case]
    with pytest.raises(ValueError) as raised:
        explain(64, 64, 64, **arguments)
    assert words in str(raised.value)
