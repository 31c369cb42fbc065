"""Pictures of traces and of speeds: their contents, and errors for input that cannot be drawn."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from numba_gemm.inspect import trace
from numba_gemm.inspect.register_tile import RegisterTile

draw = pytest.importorskip("numba_gemm.inspect.draw")
pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex, to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

simulator = pytest.mark.simulator
RECORDED = Path(__file__).resolve().parents[2] / "results" / "h200" / "latest"


def traced(stage, m=64, n=64, k=64, a=None, b=None, c=None, **options):
    a = np.ones((m, k), np.float32) if a is None else a
    b = np.ones((k, n), np.float32) if b is None else b
    c = np.zeros((m, n), np.float32) if c is None else c
    options = {"blocks": [(0, 0, 0)]} | options
    return trace(stage, None, None, 1.0, a, b, 0.0, c, **options)


@pytest.fixture(scope="module")
def found():
    return traced("vectorized", config="test")


@pytest.fixture(scope="module")
def naive():
    return traced("naive", k=8)


@pytest.fixture(scope="module")
def shared_tile():
    return traced("shared_tile", k=32, config="test", blocks=[(1, 0, 0), (0, 1, 0)])


def pixels(figure):
    from matplotlib.image import imread

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=60)
    file.seek(0)
    return imread(file)


def colours_in(figure):
    return len(np.unique(pixels(figure).reshape(-1, 4), axis=0))


def image_of(figure, axes=0, image=0):
    return np.ma.filled(figure.axes[axes].images[image].get_array(), np.nan)


def request(trace, array, op):
    table = trace.requests
    return int(table.index[(table["array"] == array) & (table["op"] == op)][0])


def overflows(figure):
    """Return True if something reaches beyond the figure."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return box.x0 < -0.02 or box.y0 < -0.02 or box.x1 > width + 0.02 or box.y1 > height + 0.02


class TestLanguage:
    def test_the_first_letter_decides(self):
        assert draw.colour("a") == draw.colour("a_tile") == draw.colour("A") == "#0072B2"
        assert draw.colour("b_frag") == "#E69F00"
        assert draw.colour("c") == "#009E73"
        assert draw.colour("partition.counters") == draw.colour("tiles") == draw.OTHER

    @pytest.mark.parametrize("name", ["a_tile", "b", "c", "tiles"])
    def test_a_ramp_ends_in_the_colour_and_begins_near_white(self, name):
        made = draw.ramp(name)
        assert to_hex(made(1.0)).upper() == draw.colour(name).upper()
        assert min(to_rgb(to_hex(made(0.0)))) > 0.85

    def test_shades_of_lanes_differ_and_darken(self):
        shades = draw.shades("b")
        assert len({to_hex(shade) for shade in shades}) == len(shades) == 32
        assert (np.diff(shades[:, :3].sum(axis=1)) < 0).all()

    def test_a_stage_has_one_look_in_every_chart(self):
        alone, among = draw.stage_styles(["vectorized"]), draw.stage_styles(["naive", "vectorized", "cublas", "mine"])
        assert alone["vectorized"]["marker"] == among["vectorized"]["marker"]
        assert list(among) == ["naive", "vectorized", "cublas", "mine"]
        assert (among["cublas"]["color"], among["cublas"]["linestyle"]) == ("black", "--")
        assert draw.stage_styles(["auto"])["auto"]["color"] == "#D55E00"


@simulator
class TestArrays:
    def test_who_stores_a_tile(self, found):
        figure = draw.thread_map(found, "a_tile", "store")
        values = image_of(figure)
        assert values.shape == (32, 8)
        assert values[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]  # vectors of four, neighbouring threads along a row
        assert colours_in(figure) > 32, "not blank"

    def test_lanes_have_the_shades_of_the_array(self, found):
        image = draw.thread_map(found, "a_tile", "store").axes[0].images[0]
        wanted = draw.shades("a_tile")
        for thread in (0, 7, 31):
            assert to_hex(image.to_rgba(float(thread))) == to_hex(wanted[thread])

    def test_warps_are_outlined_in_black(self):
        found = traced("coalesced", m=8, k=8, blocks=None)
        figure = draw.thread_map(found, "c", "store", width=64)
        (lines,) = figure.axes[0].collections
        assert [to_hex(colour) for colour in lines.get_colors()] == ["#000000"]
        values = image_of(figure)
        wanted = sum(int((np.diff(values // 32, axis=axis) != 0).sum()) for axis in (0, 1))
        assert len(lines.get_segments()) == wanted > 0

    def test_one_warp_has_no_outline(self, found):
        (lines,) = draw.thread_map(found, "b", "load").axes[0].collections
        values, threads = image_of(draw.thread_map(found, "b", "load")), found.touched("b")[1]
        assert threads.max() < 32
        holes = np.isnan(values)
        assert len(lines.get_segments()) == sum(int(np.diff(holes, axis=axis).sum()) for axis in (0, 1))

    def test_warps_are_numbered_where_threads_are_not(self, naive):
        figure = draw.thread_map(naive, "c", "store")
        assert {text.get_text() for text in figure.axes[0].texts} == {str(warp) for warp in range(32)}

    def test_buffers_and_a_swizzle_are_seen(self):
        options = {"m": 64, "n": 32, "k": 16, "config": "test"}
        axes = draw.thread_map(traced("double_buffered", **options), "a_tile", "store").axes[0]
        (between,) = axes.lines
        assert list(between.get_ydata()) == [7.5, 7.5]  # eight rows per buffer
        *_, request = axes.collections
        assert [to_hex(colour).upper() for colour in request.get_colors()] == [draw.CHOICE]
        places = np.array(request.get_segments()).reshape(-1, 2)
        upper = places[places[:, 1] < 1]
        assert (upper[:, 0].min(), upper[:, 0].max()) == (-0.5, 15.5)  # k = 0
        lower = places[places[:, 1] > 1]
        assert (lower[:, 0].min(), lower[:, 0].max(), lower[:, 1].min()) == (15.5, 31.5, 3.5)  # k = 4, swizzled
        axes = draw.thread_map(traced("conflict_free", **options), "a_tile", "store").axes[0]
        assert not axes.lines

    def test_reuse(self, found):
        figure = draw.reuse_map(found, "b_tile")
        values = image_of(figure)
        assert values.shape == (8, 16)
        assert (values == 64).all()  # eight rows of threads, in eight k-tiles
        image = figure.axes[0].images[0]
        assert to_hex(image.to_rgba(64.0)).upper() == draw.COLOURS["b"].upper()
        assert image.get_clim() == (0, 64)

    def test_a_long_narrow_part_can_be_seen(self):
        figure = draw.thread_map(traced("stream_k", k=32, config="test"), "partition.partials", "store")
        figure.canvas.draw()
        assert figure.axes[0].get_window_extent().width > 200

    def test_what_cannot_be_drawn(self, found):
        with pytest.raises(ValueError, match="does not store b; what it does is load"):
            draw.thread_map(found, "b", "store")
        with pytest.raises(ValueError, match="has no array 'z'"):
            draw.reuse_map(found, "z")


@simulator
class TestRequests:
    def test_banks(self, found):
        row = request(found, "b_tile", "load")
        figure = draw.bank_map(found, row)
        wavefronts = found.requests.loc[row, "wavefronts"]
        assert f"{wavefronts} wavefronts" in figure.axes[0].get_title()
        values = image_of(figure)
        assert values.shape == (wavefronts, 32)
        # 32 lanes read vectors of four words
        assert np.nansum(values) == 32 * 4
        assert colours_in(figure) > 8

    def test_a_row_of_a_has_one_word_of_each_sector(self, naive):
        figure = draw.sector_map(naive, request(naive, "a", "load"))
        values = image_of(figure)
        assert values.shape == (8, 32)  # rows of eight floats: four per line
        assert (np.flatnonzero(values[0] == 1) == [0, 8, 16, 24]).all()
        assert np.isnan(values).sum() == values.size - 32
        assert "32 sectors, 4 would do: efficiency 12.5 %" in figure.axes[0].get_title()
        assert "128 of 1024 bytes used" in figure.axes[0].get_title()
        assert {text.get_text() for text in figure.axes[0].texts} == {str(lane) for lane in range(32)}
        hatched = [patch for patch in figure.axes[0].patches if patch.get_hatch()]
        assert len(hatched) == 32

    def test_a_word_for_all_lanes(self, naive):
        figure = draw.sector_map(naive, request(naive, "b", "load"))
        values = image_of(figure)
        assert values[0, 0] == 32
        assert np.isnan(values).sum() == values.size - 1
        assert [text.get_text() for text in figure.axes[0].texts] == ["0\n×32"]
        assert "1 sector, 1 would do" in figure.axes[0].get_title()

    def test_vectors(self, found):
        row = request(found, "a", "load")
        figure = draw.sector_map(found, row)
        assert found.requests.loc[row, "bits"] == 128
        assert (image_of(figure) == 1).sum() == 32 * 4
        assert len(figure.axes[0].texts) == 32

    def test_a_view_begins_where_it_begins(self):
        whole = np.ones((64, 24), np.float32)
        found = traced("naive", a=whole[:, 5:13], k=8)
        values = image_of(draw.sector_map(found, request(found, "a", "load")))
        at = [(row, 5 + 24 * row) for row in range(32)]  # in floats from the start of the allocation
        lines = sorted({float_ // 32 for _, float_ in at})
        wanted = np.full((len(lines), 32), np.nan)
        for _, float_ in at:
            wanted[lines.index(float_ // 32), float_ % 32] = 1
        np.testing.assert_array_equal(values, wanted)

    def test_the_other_space_is_refused(self, found):
        with pytest.raises(ValueError, match="in global memory, which has no banks"):
            draw.bank_map(found, request(found, "a", "load"))
        with pytest.raises(ValueError, match="in shared memory, which has no sectors"):
            draw.sector_map(found, request(found, "a_tile", "load"))
        for make in (draw.bank_map, draw.sector_map):
            with pytest.raises(ValueError, match="expected a row of requests, from 0 to"):
                make(found, -1)


def bounds(axes):
    """Return column, row, width and height of the boxes of a panel."""
    return [(box.get_x() + 0.5, box.get_y() + 0.5, box.get_width(), box.get_height()) for box in axes.patches]


def panels(figure):
    """Return the counts of B, A and C, 0 if there is none; an empty panel is None."""
    _, *axes = figure.axes
    return [np.nan_to_num(np.ma.filled(a.images[0].get_array(), np.nan)) if a.images else None for a in axes]


@simulator
class TestWhoReadsWhat:
    def test_a_thread_reads_a_row_and_a_column(self, naive):
        b, a, c = panels(draw.who_reads_what(naive, thread=3))
        assert (a.sum(), b.sum(), c.sum()) == (8, 8, 1)
        row, col = np.argwhere(c)[0]
        assert (a[row] == 1).all()
        assert (b[:, col] == 1).all()

    def test_a_warp_and_a_block(self, naive):
        b, a, _ = panels(draw.who_reads_what(naive, warp=1))
        assert (a[a > 0] == 1).all()
        assert (b[b > 0] == 32).all()  # each lane reads the same column
        counts = panels(draw.who_reads_what(naive))
        for array, op, drawn in zip("bac", ("load", "load", "store"), counts, strict=True):
            wanted = np.zeros(naive.array(array).shape)
            indices, _ = naive.touched(array, op)
            np.add.at(wanted, tuple(indices.T), 1)
            np.testing.assert_array_equal(drawn, wanted)

    def test_the_block_that_is_meant(self, shared_tile):
        first = panels(draw.who_reads_what(shared_tile))
        for drawn, same in zip(first, panels(draw.who_reads_what(shared_tile, block=(1, 0))), strict=True):
            np.testing.assert_array_equal(drawn, same)
        other = panels(draw.who_reads_what(shared_tile, block=(0, 1, 0)))
        assert np.argwhere(first[2]).min(axis=0).tolist() == [0, 8]
        assert np.argwhere(other[2]).min(axis=0).tolist() == [8, 0]

    def test_a_shade_is_the_same_count_in_all_pictures(self, naive):
        options = {"m": 16, "n": 16, "k": 16, "config": "test"}
        before, after = (draw.who_reads_what(traced(name, **options)) for name in ("coalesced", "shared_tile"))
        counts = [panels(figure)[1].max() for figure in (before, after)]
        assert counts == [8, 1]
        dark, light = before.axes[2].images[0], after.axes[2].images[0]
        assert sum(dark.to_rgba(8.0)[:3]) < sum(light.to_rgba(1.0)[:3]) - 0.5
        assert dark.to_rgba(3.0) == light.to_rgba(3.0)
        assert draw.who_reads_what(naive).axes[2].images[0].get_clim() == after.axes[2].images[0].get_clim()

    @pytest.mark.parametrize(
        ("name", "said", "boxes"),
        [
            ("naive", "a request: 32 sectors, 4 would do", [(0, 0, 8, 32)]),
            ("coalesced", "a request: 1 sector, 1 would do", [(0, 0, 8, 1)]),
        ],
    )
    def test_sectors_of_a_request_are_hatched(self, name, said, boxes):
        axes = draw.who_reads_what(traced(name, k=8), warp=0).axes[2]
        assert axes.get_title().endswith(said)
        assert all(patch.get_hatch() for patch in axes.patches)
        assert bounds(axes) == boxes

    def test_sectors_hold_elements_of_the_array_only(self):
        a = np.asfortranarray(np.ones((20, 4), np.float32))[2:]
        axes = draw.who_reads_what(traced("naive", m=18, k=4, a=a), warp=0).axes[2]
        # Column 0 lies at bytes 8 to 80 and column 1 from byte 88 on; the sectors end at byte 96.
        assert bounds(axes) == [(0, row, 2 if row < 2 else 1, 1) for row in range(18)]

    def test_vectors_and_copies(self, found):
        b, a, c = panels(draw.who_reads_what(found))
        assert (a[:32] == 1).all()
        assert not a[32:].any()
        assert (b[:, :16] == 1).all()
        assert c.sum() == 32 * 16
        copied = panels(draw.who_reads_what(traced("async_copy", k=32, config="test")))
        assert copied[0].sum() > 0
        assert copied[1].sum() > 0

    @pytest.mark.parametrize(
        "lay", [lambda x: np.asfortranarray(x), lambda x: np.ones((96, 38), np.float32)[::3, 3:35], lambda x: x[::-1]]
    )
    def test_operands_of_any_strides(self, lay):
        given = lay(np.ones((32, 32), np.float32))
        options = {"m": 32, "n": 32, "k": 32, "config": "test"}
        drawn = panels(draw.who_reads_what(traced("shared_tile", a=given, **options), thread=40))
        wanted = panels(draw.who_reads_what(traced("shared_tile", **options), thread=40))
        for one, other in zip(drawn, wanted, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_a_cropped_product(self):
        b, a, c = panels(draw.who_reads_what(traced("vectorized", m=30, n=13, k=11, config="test")))
        assert (a.shape, b.shape, c.shape) == ((30, 11), (11, 13), (30, 13))
        assert min(a.min(), b.min(), c.min()) == 1

    def test_nothing_vanishes_in_a_long_matrix(self):
        found = traced("naive", m=2, n=2, k=1000)
        b, a, _ = panels(draw.who_reads_what(found, thread=0))
        assert a.shape == (2, 125)
        assert (a[0] == 1).all()
        assert not a[1].any()
        assert (b[:, 0] == 1).all()

    def test_a_matrix_of_which_nothing_is_stored(self):
        figure = draw.who_reads_what(traced("stream_k", k=32, config="test"))
        assert panels(figure)[2] is None
        assert [text.get_text() for text in figure.axes[3].texts] == ["nothing stored"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"thread": 1024}, "a block of naive has threads 0 to 1023"),
            ({"warp": -1}, "a block of naive has warps 0 to 31"),
            ({"warp": 1, "thread": 1}, "give one of them"),
            ({"block": (1, 0)}, r"those that were traced are \(0, 0, 0\)"),
        ],
    )
    def test_who_was_not_traced(self, naive, options, message):
        for make in (draw.who_reads_what, draw.timeline):
            with pytest.raises(ValueError, match=message):
                make(naive, **options)

    def test_a_thread_is_a_number(self, naive):
        for make in (draw.who_reads_what, draw.timeline):
            with pytest.raises(TypeError, match=r"^thread is \(0, 0\); expected its position in the block; pass one"):
                make(naive, thread=(0, 0))

    def test_a_kernel_of_other_arrays(self):
        from numba import cuda

        def double(x):
            x[cuda.threadIdx.x] *= 2

        found = trace(double, 1, 32, np.ones(32, np.float32))
        with pytest.raises(ValueError, match=r"double has no array 'a' among those in global memory \(x\)"):
            draw.who_reads_what(found)


def timeline_of(figure):
    """Return the counts by row, 0 if there is none."""
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    images = [np.nan_to_num(np.ma.filled(image.get_array(), np.nan))[0] for image in axes.images]
    return dict(zip(labels, images, strict=True))


@simulator
class TestTimeline:
    def test_filling_and_using_lie_in_different_intervals(self, shared_tile):
        for options in ({"thread": 0}, {"warp": 1}, {}):
            rows = timeline_of(draw.timeline(shared_tile, **options))
            assert rows["store a_tile (shared)"].tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 0]
            assert rows["load a_tile (shared)"].tolist() == [0, 8, 0, 8, 0, 8, 0, 8, 0]
            assert rows["store c (global)"].tolist() == [0] * 8 + [1]

    def test_two_buffers_are_filled_and_used_in_one_interval(self):
        found = traced("double_buffered", k=32, config="test")
        rows = timeline_of(draw.timeline(found, warp=0))
        both = (rows["store b_tile (shared)"] > 0) & (rows["load b_tile (shared)"] > 0)
        assert both.tolist() == [False, True, True, True, False]

    def test_a_warp_counts_requests_and_a_thread_accesses(self, found):
        table = found.requests
        drawn = timeline_of(draw.timeline(found, warp=0))
        assert sum(row.sum() for row in drawn.values()) == (table["warp"] == 0).sum()
        own = found.accesses
        drawn = timeline_of(draw.timeline(found, thread=5))
        assert sum(row.sum() for row in drawn.values()) == (own["thread"] == 5).sum()

    def test_rows_have_their_arrays_colours(self, found):
        axes = draw.timeline(found).axes[0]
        for label, image in zip(axes.get_yticklabels(), axes.images, strict=True):
            name = label.get_text().split()[1]
            assert to_hex(image.cmap(1.0)).upper() == draw.colour(name).upper()

    def test_a_thread_that_accesses_nothing(self):
        from numba import cuda

        def some(a):
            if cuda.threadIdx.x > 0:
                a[cuda.threadIdx.x] = 1

        with pytest.raises(ValueError, match=r"thread 0 of block \(0, 0, 0\) of some accesses no memory"):
            draw.timeline(trace(some, 1, 32, np.ones(32, np.float32)))


@simulator
def test_alternative_texts_say_what_is_drawn(naive):
    text = draw.alt_text(draw.who_reads_what(naive, warp=0))
    assert text.startswith("naive: what warp 0 of block (0, 0, 0) reads and writes. ")
    assert "A, 64 × 8: 256 elements; loaded 1× each; a request: 32 sectors, 4 would do" in text
    text = draw.alt_text(draw.thread_map(naive, "c", "store"))
    assert text.startswith("naive: threads that store c; warps outlined and numbered. horizontal axis: column. ")
    figure = Figure()
    upper, lower = figure.subfigures(2, 1)
    upper.suptitle("recorded")
    lower.suptitle("measured")
    upper.add_subplot(xlabel="us").barh(["in order", "reversed"], [1, 2])
    lower.add_subplot(yscale="log").plot([1e-5, 1])
    assert draw.alt_text(figure) == "recorded. measured. horizontal axis: us. rows: in order, reversed"


@simulator
def test_nothing_reaches_beyond_the_picture(found, naive):
    made = [draw.thread_map(naive, "c", "store"), draw.sector_map(naive, request(naive, "a", "load"))]
    made += [draw.who_reads_what(naive, warp=0), draw.sector_map(naive, request(naive, "b", "load"))]
    made += [draw.thread_map(found, "a_tile", "store"), draw.reuse_map(found, "b_tile"), draw.timeline(found)]
    made += [draw.who_reads_what(found), draw.bank_map(found, request(found, "b_tile", "load"))]
    for figure in made:
        assert not overflows(figure)
        assert figure.get_size_inches()[0] <= 7.2


@pytest.fixture(scope="module")
def recorded():
    text = {"config": str, "via": str, "status": str, "throttle": str, "note": str}
    frame = pd.read_csv(RECORDED / "results.csv", dtype=text)
    return frame, json.loads((RECORDED / "environment.json").read_text(encoding="utf-8"))


def at(frame, size):
    rows = frame[(frame["m"] == size) & (frame["n"] == size) & (frame["k"] == size) & (frame["precision"] == "ieee")]
    return rows.groupby("stage", sort=False)["gflops"].max()


def bars_of(figure):
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    return dict(zip(names, [bar.get_width() for bar in axes.patches], strict=True))


def said(figure):
    return [text.get_text() for text in figure.axes[0].texts]


class TestLadder:
    def test_bars_are_the_recorded_speeds_in_climbing_order(self, recorded):
        from numba_gemm.kernels.ladder import ASIDE, STAGES

        frame, environment = recorded
        figure = draw.ladder_chart(frame, environment)
        bars, speeds = bars_of(figure), at(frame, 4096)
        timed = [name for name in STAGES if name not in ASIDE and name in speeds]
        assert [name for name in bars if name in STAGES] == timed
        assert list(bars)[-1] == "tiled_sgemm's choice"
        for name, width in bars.items():
            assert width == pytest.approx(speeds["auto" if "choice" in name else name] / 1000)
        gain = speeds["coalesced"] / speeds["naive"]
        assert any(f"×{gain:.2f}" in text for text in said(figure))
        (line,) = figure.axes[0].lines
        assert line.get_xdata()[0] == pytest.approx(speeds["cublas"] / 1000)
        assert (line.get_color(), line.get_linestyle()) == ("black", "--")
        assert f"cuBLAS {speeds['cublas'] / 1000:.1f}" in said(figure)
        assert figure.axes[0].get_title() == f"The climb at 4096 × 4096 × 4096, {environment['gpu']['name']}"
        assert colours_in(figure) > len(bars)
        assert not overflows(figure)

    def test_the_second_axis_is_the_share_of_the_peak(self, recorded):
        frame, environment = recorded
        for given in (environment, None):
            figure = draw.ladder_chart(frame, given)
            figure.savefig(io.BytesIO(), format="png")
            (shares,) = figure.axes[0].child_axes
            peak = environment["gpu"]["fp32_peak_gflops"] / 1000
            assert shares.get_xlim()[1] == pytest.approx(100 * figure.axes[0].get_xlim()[1] / peak, rel=1e-3)
        without = draw.ladder_chart(frame.drop(columns="percent_of_peak"))
        assert not without.axes[0].child_axes

    def test_some_stages_of_another_gpu(self, recorded):
        frame, _ = recorded
        frame = frame[frame["stage"].isin(["stream_k", "naive", "shared_tile"])].iloc[::-1]
        figure = draw.ladder_chart(frame, {"gpu": {"name": "Some GPU"}}, size=1024)
        speeds = at(frame, 1024)
        assert list(bars_of(figure)) == ["naive", "shared_tile", "stream_k"]
        assert any(f"×{speeds['stream_k'] / speeds['shared_tile']:.2f}" in text for text in said(figure))
        assert "1024 × 1024 × 1024, Some GPU" in figure.axes[0].get_title()
        assert not figure.axes[0].lines, "no cuBLAS"
        assert "Mine" in draw.ladder_chart(frame, gpu="Mine").axes[0].get_title()
        simulated = draw.ladder_chart(frame, {"simulator": True, "gpu": None})
        assert "mean nothing" in simulated.axes[0].get_title()

    def test_the_size_that_most_stages_have(self, recorded):
        frame, _ = recorded
        cubes = frame[(frame["m"] == frame["n"]) & (frame["n"] == frame["k"])]
        few = cubes[(cubes["m"] < 4096) | ((cubes["m"] > 4096) & (cubes["stage"] != "naive"))]
        largest = max(size for size in few["m"].unique() if size < 4096)
        assert f"{largest} × {largest}" in draw.ladder_chart(few).axes[0].get_title()
        shape = (2048, 2048, 1024)
        assert "2048 × 2048 × 1024" in draw.ladder_chart(frame, size=shape).axes[0].get_title()

    def test_other_precisions_and_failed_stages_are_no_bars(self, recorded):
        frame, _ = recorded
        frame = frame[(frame["m"] == 4096) & (frame["n"] == 4096) & (frame["k"] == 4096)].copy()
        faster = frame.assign(precision="tf32", gflops=1e6)
        frame.loc[frame["stage"] == "async_copy", "gflops"] = math.nan
        bars = bars_of(draw.ladder_chart(pd.concat([frame, faster], ignore_index=True)))
        assert "async_copy" not in bars
        assert max(bars.values()) < 100

    def test_what_cannot_be_drawn(self, recorded):
        frame, environment = recorded
        with pytest.raises(ValueError, match="no stage of the ladder was timed at 5 x 5 x 5"):
            draw.ladder_chart(frame, environment, size=5)
        with pytest.raises(ValueError, match="no stage of the ladder was timed in these results"):
            draw.ladder_chart(frame[frame["stage"] == "cublas"])
        with pytest.raises(ValueError, match="no column stage, gflops"):
            draw.ladder_chart(frame.drop(columns=["stage", "gflops"]))


class TestRoofline:
    def test_points_are_the_recorded_speeds(self, recorded):
        frame, environment = recorded
        figure = draw.roofline_chart(frame, environment)
        lines = {line.get_label(): line for line in figure.axes[0].lines}
        own = frame[(frame["stage"] == "naive") & (frame["precision"] == "ieee")]
        found = lines["naive"].get_xydata()
        assert sorted(found[:, 1]) == pytest.approx(sorted(own["gflops"]))
        row = own[(own["m"] == 4096) & (own["n"] == 4096) & (own["k"] == 4096)].iloc[0]
        wanted = (2 * 4096**3 / (4 * 3 * 4096**2), row["gflops"])
        assert np.isclose(found, wanted).all(axis=1).any()
        assert {"cuBLAS", "tiled_sgemm's choice"} <= set(lines)
        assert "cpu" not in lines
        (roof,) = [line for label, line in lines.items() if label.startswith("_")]
        assert roof.get_ydata().max() == environment["gpu"]["fp32_peak_gflops"]
        assert colours_in(figure) > 15
        assert not overflows(figure)

    def test_without_an_environment_there_is_no_roof(self, recorded):
        figure = draw.roofline_chart(recorded[0])
        assert not any(line.get_label().startswith("_") for line in figure.axes[0].lines)

    def test_nothing_was_timed(self, recorded):
        with pytest.raises(ValueError, match="nothing was timed on the GPU"):
            draw.roofline_chart(recorded[0].assign(gflops=math.nan))


class TestPictures:
    def test_of_recorded_results(self, recorded):
        from numba_gemm.lab.bench import plots

        assert list(plots.pictures(*recorded)) == ["gflops_vs_size.png", "roofline.png", "ladder.png"]

    def test_results_without_a_stage_have_no_climb(self, recorded):
        from numba_gemm.lab.bench import plots

        frame, environment = recorded
        drawn = plots.pictures(frame[frame["stage"].isin(["auto", "cublas"])], environment)
        assert list(drawn) == ["gflops_vs_size.png", "roofline.png"]


class TestWhatAThreadDoes:
    KINDS = {"load": draw.ACCENT, "use": draw.COLOURS["c"]}  # noqa: RUF012

    def test_boxes_and_arrows(self):
        events = [draw.Event("load", 3), draw.Event("barrier", 2), draw.Event("use", 5, "7", needs=0)]
        figure = draw.sequence({"one": events, "other": events[:1]}, self.KINDS)
        first, second = figure.axes
        (arrow,) = [text for text in first.texts if hasattr(text, "arrow_patch") and text.arrow_patch is not None]
        assert (arrow.xyann, arrow.xy) == ((3, 0), (5, 1))
        boxes = [tuple(box.get_paths()[0].get_extents().bounds) for box in first.collections]
        assert [(box[0], box[2]) for box in boxes] == [(0, 3), (5, 5)]
        assert [line.get_xdata()[0] for line in first.lines] == [4]
        assert "7" in [text.get_text() for text in first.texts]
        assert len(second.collections) == 1
        assert len(np.unique(pixels(figure).reshape(-1, 4), axis=0)) > 8, "not blank"

    def test_what_cannot_be_drawn(self):
        with pytest.raises(ValueError, match="of kinds store; colours has load, use"):
            draw.sequence({"one": [draw.Event("store", 1)]}, self.KINDS)
        with pytest.raises(ValueError, match="event 0 of one needs event 0, which is not before it"):
            draw.sequence({"one": [draw.Event("use", 1, needs=0)]}, self.KINDS)


class TestMemories:
    NEAR, FAR = draw.Memory("near", "2 KB", "one thread", 100.0, 4.0, True), draw.Memory("far", "", "all", 0.1)

    def test_a_row_per_level(self):
        figure = draw.memory_hierarchy([self.NEAR, self.FAR], 132, "one GPU")
        boxes, bars = figure.axes
        near, far, frame = boxes.patches
        assert near.get_width() < far.get_width()
        assert frame.get_y() < near.get_y() < frame.get_y() + frame.get_height() < far.get_y()
        written = {text.get_text() for text in boxes.texts}
        assert written >= {"near: 2 KB", "one thread", "far", "all", "in each of 132 multiprocessors"}
        assert [bar.get_width() for bar in bars.patches] == [100.0, 0.1]
        assert [text.get_text() for text in bars.texts] == ["100 TB/s\n4 cycles", "0.1 TB/s"]
        assert draw.alt_text(figure).endswith(": near 100 TB/s, far 0.1 TB/s. one GPU")
        assert not overflows(figure)

    def test_no_frame_without_a_multiprocessor(self):
        boxes, _ = draw.memory_hierarchy([self.FAR], 132, "one level").axes
        assert len(boxes.patches) == 1

    def test_what_cannot_be_drawn(self):
        with pytest.raises(ValueError, match="0 levels"):
            draw.memory_hierarchy([], 132, "none")
        with pytest.raises(ValueError, match="1 levels: expected one or more, with positive bandwidths"):
            draw.memory_hierarchy([self.FAR._replace(tb_s=0.0)], 132, "no bandwidth")
        with pytest.raises(ValueError, match="the 1 levels of a multiprocessor before"):
            draw.memory_hierarchy([self.FAR, self.NEAR], 132, "wrong order")


class TestRegisterBanks:
    TILE = RegisterTile([4, 5], [6, 7], [[0, 1], [2, 3]])

    def test_a_cell_per_register(self):
        figure = draw.register_banks({"one": (self.TILE, [[True, False], [False, False]])}, 2, "two banks")
        (axes,) = figure.axes
        assert axes.get_title() == "one: 1 of 4 FFMA wait"
        cells = [patch for patch in axes.patches if patch.get_fill()]
        texts = [text.get_text() for text in axes.texts if text.get_text().startswith("R")]
        assert texts == ["R4", "R5", "R6", "R7", "R0", "R1", "R2", "R3"]
        even, odd = ({to_hex(cell.get_facecolor()) for cell in cells[bank::2]} for bank in (0, 1))
        assert len(even) == len(odd) == 1
        assert even != odd
        (outline,) = [patch for patch in axes.patches if not patch.get_fill()]
        assert (int(outline.get_x()), int(outline.get_y())) == (0, 0)
        assert to_hex(outline.get_edgecolor()) == draw.CHOICE.lower()
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["bank 0", "bank 1", "waits"]
        assert not overflows(figure)

    def test_what_cannot_be_drawn(self):
        with pytest.raises(ValueError, match="0 tiles and 4 banks"):
            draw.register_banks({}, 4)
        with pytest.raises(ValueError, match="1 tiles and 5 banks: expected tiles, and 1 to 4 banks"):
            draw.register_banks({"one": (self.TILE, [[False] * 2] * 2)}, 5)


class TestSchedule:
    def test_bars_are_pieces(self):
        figure = draw.schedule([(0, 0, 3, True), (1, 1, 1, False), (1, 2, 1, False)], 2, "three")
        (axes,) = figure.axes
        assert [(bar.get_x(), bar.get_width(), bar.get_y() + 0.5) for bar in axes.patches] == [
            (0, 3, 0),
            (0, 1, 1),
            (1, 1, 1),
        ]
        assert "3 k-tiles long, 83.3% of the time used" in axes.get_title()
        assert to_hex(axes.patches[1].get_facecolor()) == draw.ACCENT.lower()
        assert len(np.unique(pixels(figure).reshape(-1, 4), axis=0)) > 8, "not blank"

    def test_many_blocks_have_a_legend(self):
        figure = draw.schedule([(block, block, 4, block % 2 == 0) for block in range(132)], 132, "many")
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["whole tile", "part of a tile", "part of the next"]

    def test_what_cannot_be_drawn(self):
        with pytest.raises(ValueError, match="0 pieces"):
            draw.schedule([], 3, "none")
        with pytest.raises(ValueError, match="blocks 0 to 2"):
            draw.schedule([(3, 0, 1, True)], 3, "beyond")


@simulator
class TestSharedTiles:
    def test_what_a_thread_reads_of_them(self):
        found = traced("shared_tile", 8, 8, 8, config="test")
        figure = draw.who_reads_what(found, thread=9, shared=True)  # row 1, column 1 of 8 x 8
        b, a, c = (np.ma.filled(axes.images[0].get_array(), np.nan) for axes in figure.axes[1:])
        assert np.argwhere(~np.isnan(a)).tolist() == [[1, k] for k in range(8)]
        assert np.argwhere(~np.isnan(b)).tolist() == [[k, 1] for k in range(8)]
        assert np.argwhere(~np.isnan(c)).tolist() == [[1, 1]]
        assert "A_TILE" in figure.axes[2].get_title()

    def test_what_cannot_be_drawn(self):
        with pytest.raises(ValueError, match="no tile of two dimensions that begins with 'a' in shared memory"):
            draw.who_reads_what(traced("coalesced", 8, 8, 8, config="test"), shared=True)
        found = traced("conflict_free", 64, 64, 16, config="test")
        with pytest.raises(ValueError, match="not rows of A and columns of B as they lie"):  # A's tile is transposed
            draw.who_reads_what(found, shared=True)
