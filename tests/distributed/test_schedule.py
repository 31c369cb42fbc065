"""Schedules of distributed products: the steps of all ranks, followed with NumPy; and the order of their broadcasts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from numba_gemm.distributed import model
from numba_gemm.distributed.division import divide, shards
from numba_gemm.distributed.model import LEAST, MOST_SUMS, Rates, Work, plan_work
from numba_gemm.distributed.placements import COLS, ROWS, WHOLE, algorithm
from numba_gemm.distributed.schedule import (
    Add,
    Fetch,
    Give,
    Keep,
    Multiply,
    Reduce,
    Spread,
    Take,
    along,
    held,
    panels_of,
)

RATES = Rates(56e12)
ONE = [(x,) for x in (ROWS, COLS, WHOLE)]
TWO = list(product((ROWS, WHOLE), (COLS, WHOLE)))
# Extents that the meshes divide, that they do not divide, and that are smaller than a mesh or 0.
SHAPES = [(12, 24, 48), (13, 11, 17), (2, 3, 1), (5, 7, 0), (0, 4, 6), (4, 0, 6), (1, 1, 9)]
MESHES = [(1,), (2,), (3,), (5,), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2)]
ALPHA, BETA = 2.0, 3.0


@pytest.fixture(autouse=True)
def short_products_are_copied(monkeypatch):
    monkeypatch.setattr("numba_gemm.distributed.model.COPIED_FROM", 0.0)


def matrices(m, n, k):
    """Integers, so that sums are exact in any order."""
    rng = np.random.default_rng(m + 10 * n + 100 * k)
    return [rng.integers(-4, 5, shape).astype(np.float64) for shape in ((m, k), (k, n), (m, n))]


def cut(matrix, rows, cols):
    return matrix[rows.begin : rows.end, cols.begin : cols.end]


def own(division, operand, coordinate):
    """The rows and columns of an operand that a rank holds."""
    down, across = (division.a_rows, division.a_inner) if operand == "a" else (division.b_inner, division.b_cols)
    return down.at(coordinate), across.at(coordinate)


def inside(part, whole):
    assert whole.begin <= part.begin <= part.end <= whole.end
    return part


def wanted(work, panel, operand, coordinate):
    """The rows and columns of a panel's operand."""
    rows, cols = work.division.computes(coordinate)
    ranges = dict(zip("mnk", (rows, cols, type(rows)(0, work.division.shape[2])))) | {panel.axis: panel.part}
    return (ranges["m"], ranges["k"]) if operand == "a" else (ranges["k"], ranges["n"])


def received(work, panel, operand, coordinate, matrix):
    """A panel as it arrives: NaN where no piece does, and each piece from a rank that holds it."""
    rows, cols = wanted(work, panel, operand, coordinate)
    found = np.full((rows.extent, cols.extent), np.nan)
    by_rows = panel.axis != ("k" if operand == "a" else "n")
    for piece in getattr(panel, operand):
        root = (coordinate[0], piece.root) if operand == "a" else (piece.root, coordinate[1])
        sent = (piece.part, cols) if by_rows else (rows, piece.part)
        for part, whole in zip(sent, own(work.division, operand, root)):
            inside(part, whole)
        place = [slice(part.begin - start.begin, part.end - start.begin) for part, start in zip(sent, (rows, cols))]
        found[tuple(place)] = cut(matrix, *sent)
    return found


def followed(work: Work, coordinate, a, b, c):
    """The part of C that a rank computes, and the broadcasts that it takes part in."""
    rows, cols = work.division.computes(coordinate)
    out, slots, collectives = cut(c, rows, cols).copy(), {}, []
    begun = np.zeros(out.shape, bool)
    for step in work.steps(coordinate):
        if isinstance(step, Fetch):
            panel = work.panels[step.panel]
            collectives.append(step[:2])
            if not held(panel, step.operand, coordinate):
                matrix = a if step.operand == "a" else b
                slots[step.operand, step.slot] = received(work, panel, step.operand, coordinate, matrix)
        elif isinstance(step, Multiply):
            panel, factors = work.panels[step.panel], []
            for operand, slot, matrix in (("a", step.a_slot, a), ("b", step.b_slot, b)):
                ranges = wanted(work, panel, operand, coordinate)
                if slot is None:
                    assert all(inside(*pair) for pair in zip(ranges, own(work.division, operand, coordinate)))
                    factors.append(cut(matrix, *ranges))
                else:
                    factors.append(slots[operand, slot])
                    np.testing.assert_array_equal(slots[operand, slot], cut(matrix, *ranges))
            part = {"m": (panel.part, cols), "n": (rows, panel.part)}.get(panel.axis, (rows, cols))
            place = tuple(
                slice(one.begin - start.begin, one.end - start.begin) for one, start in zip(part, (rows, cols))
            )
            assert not begun[place].any() if step.first else begun[place].all()
            begun[place] = True
            out[place] = ALPHA * factors[0] @ factors[1] + (BETA if step.first else 1) * out[place]
        else:
            assert isinstance(step, Spread)
            collectives.append(step)
    assert begun.all()
    return out, collectives


def reduced(work: Work, a, b, c):
    """C of chunks whose sums are added."""
    division, out = work.division, np.full(c.shape, np.nan)
    for step in work.steps((0, 0)):
        if isinstance(step, Reduce):
            chunk = step.chunk
            rows, cols = division.computes((chunk.root, 0))
            inside(chunk.rows, rows), inside(chunk.cols, cols)
            total = BETA * cut(c, chunk.rows, chunk.cols)
            for coordinate in division.coordinates:
                inner = division.inner(coordinate)
                for operand, ranges in (("a", (chunk.rows, inner)), ("b", (inner, chunk.cols))):
                    assert all(inside(*pair) for pair in zip(ranges, own(division, operand, coordinate)))
                total += ALPHA * cut(a, chunk.rows, inner) @ cut(b, inner, chunk.cols)
            assert np.isnan(cut(out, chunk.rows, chunk.cols)).all()
            out[chunk.rows.begin : chunk.rows.end, chunk.cols.begin : chunk.cols.end] = total
    return out


def copied_sums(work: Work, a, b, c):
    """C of chunks whose sums each rank copies from the others."""
    division, out = work.division, np.full(c.shape, np.nan)
    given = {}  # by the rank that computes and the place in its memory
    for coordinate in division.coordinates:
        inner = division.inner(coordinate)
        steps = [one for one in work.steps(coordinate) if isinstance(one, Give)]
        for chunk, begin in steps:
            assert chunk.root != coordinate[0]
            given[coordinate[0], begin] = ALPHA * cut(a, chunk.rows, inner) @ cut(b, inner, chunk.cols)
        assert work.room(coordinate) == sum(one.chunk.rows.extent * one.chunk.cols.extent for one in steps)
    for coordinate in division.coordinates:
        slots, inner = {}, division.inner(coordinate)
        for step in work.steps(coordinate):
            if isinstance(step, Give):
                continue
            assert step.chunk.root == coordinate[0]
            place = cut(out, step.chunk.rows, step.chunk.cols)
            if isinstance(step, Keep):
                own = ALPHA * cut(a, step.chunk.rows, inner) @ cut(b, inner, step.chunk.cols)
                place[:] = own + BETA * cut(c, step.chunk.rows, step.chunk.cols)
            elif isinstance(step, Take):
                assert step.slot < work.chunk_slots()
                slots[step.slot] = given.pop((step.rank, step.begin))
            else:
                assert isinstance(step, Add)
                place += slots[step.slot]
    assert not given
    return out


def check(work: Work, shape):
    a, b, c = matrices(*shape)
    expected, division = ALPHA * a @ b + BETA * c, work.division
    if division.algorithm.reduces and work.copied:
        np.testing.assert_array_equal(copied_sums(work, a, b, c), expected)
        return
    if division.algorithm.reduces:
        np.testing.assert_array_equal(reduced(work, a, b, c), expected)
        return
    orders = {}
    for coordinate in division.coordinates:
        out, collectives = followed(work, coordinate, a, b, c)
        np.testing.assert_array_equal(out, cut(expected, *division.computes(coordinate)))
        for name, position in (("a", coordinate[0]), ("b", coordinate[1])):
            # Ranks of a row share A's broadcasts, those of a column B's; a rank mixes both in the same order as others.
            orders.setdefault((name, position), []).append(collectives)
    for sequences in orders.values():
        assert work.copied or all(one == sequences[0] for one in sequences)


@pytest.mark.parametrize(
    ("mesh", "panel"),
    [
        # Panels of one term take long among many ranks.
        pytest.param(mesh, panel, marks=[pytest.mark.exhaustive] * (panel == 1 and math.prod(mesh) > 4))
        for panel in (None, 1, 3)
        for mesh in MESHES
    ],
    ids=str,
)
def test_schedules_compute_the_product(mesh, panel):
    """All placements of operands and result, with panels that the model chooses, and with thin ones."""
    count = 0
    for a, b in product(*((TWO, TWO) if len(mesh) == 2 else (ONE, ONE))):
        for out in [None] if len(mesh) == 2 else [None, *ONE]:
            if (found := algorithm(a, b, out)) is None:
                continue
            assert out in (None, found.out)
            for m, n, k in SHAPES:
                division = divide(found, mesh, a, b, shards((m, k), a, mesh), shards((k, n), b, mesh))
                check(plan_work(division, "ieee", RATES, panel), (m, n, k))
                check(plan_work(division, "ieee", RATES, panel, copied=True), (m, n, k))
                count += 1
    assert count == len(SHAPES) * (16 if len(mesh) == 2 else 34)


@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "tf32"])
@pytest.mark.parametrize("least", [2, 5, 100])
def test_panels_of_several_ranks(monkeypatch, precision, least):
    """Ranges of neighbouring ranks are joined: a panel then arrives in pieces."""
    pieces = []
    monkeypatch.setattr("numba_gemm.distributed.model.LEAST", dict.fromkeys(LEAST, least))
    monkeypatch.setattr("numba_gemm.distributed.model.LEAST_OF_OTHERS", least)
    monkeypatch.setattr("numba_gemm.distributed.model._planned", model._planned.__wrapped__)  # plans of other numbers
    for mesh, (a, b) in product([(5,), (4, 3), (3, 4)], [((ROWS, COLS), (ROWS, COLS)), ((WHOLE, COLS), (ROWS, WHOLE))]):
        placed = (a[: len(mesh)], b[: len(mesh)])
        for m, n, k in [(7, 9, 23), (3, 2, 12), (6, 6, 6)]:
            shapes = shards((m, k), placed[0], mesh), shards((k, n), placed[1], mesh)
            division = divide(algorithm(*placed), mesh, *placed, *shapes)
            work = plan_work(division, precision, RATES)
            check(work, (m, n, k))
            check(plan_work(division, precision, RATES, copied=True), (m, n, k))
            pieces += [len(one.b) for one in work.panels]
    assert max(pieces) > 1


def test_shards_of_any_extents():
    """Shards need not be equal, and the two cuts of k on a mesh of two dimensions need not be the same."""
    a = {(i, j): (rows, cols) for i, rows in enumerate((3, 0, 5)) for j, cols in enumerate((1, 9))}
    b = {(i, j): (rows, cols) for i, rows in enumerate((4, 5, 1)) for j, cols in enumerate((6, 2))}
    placed = ((ROWS, COLS), (ROWS, COLS))
    division = divide(algorithm(*placed), (3, 2), *placed, a, b)
    assert [one.part for one in panels_of(division)] == [(0, 1), (1, 4), (4, 9), (9, 10)]
    for panel in (None, 2):
        check(plan_work(division, "ieee", RATES, panel), (8, 8, 10))
        check(plan_work(division, "ieee", RATES, panel, copied=True), (8, 8, 10))


def test_a_repeated_product_is_planned_once(monkeypatch):
    division = divide(algorithm((ROWS,), (ROWS,)), (4,), (ROWS,), (ROWS,), *(shards((8, 8), (ROWS,), (4,)),) * 2)
    work = plan_work(division, "ieee", RATES, copied=True)
    monkeypatch.setattr(model, "_chosen", None)
    again = plan_work(replace(division), "ieee", RATES._replace(), copied=True)
    assert again is work
    assert again.turns((1, 0)) is work.turns((1, 0))


def test_slots_begin_at_multiples_of_16_bytes():
    """Whatever the extents are, slots that others copy to do not overlap, and rows of aligned length are aligned."""
    blocks = (ROWS, COLS)
    division = divide(
        algorithm(blocks, blocks), (2, 2), blocks, blocks, *(shards((n, 7), blocks, (2, 2)) for n in (5, 7))
    )
    for panel, coordinate in product((None, 1, 3), division.coordinates):
        work = plan_work(division, "ieee", RATES, panel, copied=True)
        begins, end = work.slots(coordinate)
        assert len(begins["a"]) == len(begins["b"]) == min(2, len(work.turns(coordinate))) > 0
        places = [(begin, operand) for operand in "ab" for begin in begins[operand]]
        for (begin, operand), (after, _) in pairwise([*places, (end, "")]):
            assert begin % 4 == 0
            assert begin + work.slot_elements(operand, coordinate) <= after
        assert work.room(coordinate) == end


def test_own_panels_are_multiplied_first():
    """So products begin before anything arrives; panels are broadcast in the same order by all."""
    division = divide(algorithm((ROWS,), (ROWS,)), (4,), (ROWS,), (ROWS,), *(shards((8, 8), (ROWS,), (4,)),) * 2)
    work = plan_work(division, "ieee", RATES, 2)
    found = list(work.steps((2, 0)))
    assert [one.panel for one in found if isinstance(one, Multiply)] == [2, 0, 1, 3]
    assert [one.panel for one in found if isinstance(one, Fetch)] == [0, 1, 2, 3]
    # Two broadcasts are issued before the first product, and the third after a product that frees its slot.
    assert [type(one).__name__ for one in found[:5]] == ["Fetch", "Fetch", "Multiply", "Multiply", "Fetch"]


def test_copies_begin_with_another_rank_each():
    """So no rank sends to all others at a time; nothing is fetched that a rank holds."""
    one, two = (4,), (3, 3)
    division = divide(algorithm((ROWS,), (ROWS,)), one, (ROWS,), (ROWS,), *(shards((8, 8), (ROWS,), one),) * 2)
    work = plan_work(division, "ieee", RATES, 2, copied=True)
    for rank in range(4):
        others = [(rank + i) % 4 for i in range(4)]
        found = list(work.steps((rank, 0)))
        assert [step.panel for step in found if isinstance(step, Multiply)] == others
        assert [step.panel for step in found if isinstance(step, Fetch)] == others[1:]
    blocks = ((ROWS, COLS), (ROWS, COLS))
    division = divide(algorithm(*blocks), two, *blocks, *(shards((9, 9), (ROWS, COLS), two),) * 2)
    work = plan_work(division, "ieee", RATES, 3, copied=True)
    for row in range(3):
        for operand, places in (("a", [(row, i) for i in range(3)]), ("b", [(i, row) for i in range(3)])):
            steps = [[one for one in work.steps(at) if isinstance(one, Multiply)] for at in places]
            roots = [[getattr(work.panels[one.panel], operand)[0].root for one in found] for found in steps]
            assert all(sorted(at) == [0, 1, 2] for at in zip(*roots))


@pytest.mark.parametrize(("precision", "most"), [("bf16x6", MOST_SUMS), ("bf16x9", MOST_SUMS), ("ieee", 64)])
def test_compensated_precisions_add_few_panels(precision, most):
    """Each panel after the first one rounds C, which these precisions do not within a product."""
    n, mesh = 1 << 18, (64,)
    division = divide(algorithm((ROWS,), (ROWS,)), mesh, (ROWS,), (ROWS,), *(shards((n, n), (ROWS,), mesh),) * 2)
    work = plan_work(division, precision, RATES)
    assert len(work.panels) == most


def test_products_of_thin_shards_have_deep_panels():
    division = divide(algorithm((ROWS,), (ROWS,)), (8,), (ROWS,), (ROWS,), *(shards((4096, 4096), (ROWS,), (8,)),) * 2)
    for precision, least in LEAST.items():
        assert min(one.part.extent for one in plan_work(division, precision, RATES).panels) >= min(least, 4096)


def test_along_names_the_shared_dimension():
    assert (along("a", (1, 2)), along("b", (1, 2))) == (2, 1)
