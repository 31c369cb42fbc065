"""The player: its record against the steps and the trace of the same launch, and the page that holds it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from numba import cuda, float32

from numba_gemm.inspect import frames, step, trace
from numba_gemm.inspect.snapshots import show

pytestmark = pytest.mark.simulator


@cuda.jit
def reverse(x, y):
    tile = cuda.shared.array((2, 2), float32)
    kept = cuda.local.array((2, 1), float32)
    t = cuda.threadIdx.x  # </script><b>"it's" & so on</b>
    tile[t // 2, t % 2] = x[t]
    cuda.syncthreads()
    for i in range(2):
        kept[i, 0] = tile[(3 - t) // 2, (3 - t) % 2]
    y[t] = kept[0, 0] + kept[1, 0]


def reversing(**options):
    x, y = np.array([1, 2, 3, np.inf], np.float32), np.zeros(4, np.float32)
    return step(reverse, 1, 4, x, y, **({"thread": 1} | options)), y


def product(m=9, n=7, k=10):
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-4, 5, shape).astype(np.float32) for shape in ((m, k), (k, n)))
    return a, b, np.full((m, n), np.nan, np.float32)


def stage(name, thread=0, **options):
    a, b, c = product()
    return step(name, None, None, 1, a, b, 0, c, config="test", thread=thread, **options), (a, b, c)


def page_record(page):
    (data,) = re.findall(r'<script type="application/json" id="record">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def replayed(record, thread=0):
    """Yield each frame of a thread with all its locals and the contents of all arrays in use, by name."""
    calls, contents, visible = {}, {}, []
    for frame in record["threads"][thread]["frames"]:
        values = calls[frame["c"]] = calls.get(frame["c"], {}) | frame.get("v", {})
        for number, change in frame.get("t", {}).items():
            if isinstance(change, list):
                contents[int(number)] = list(change)
                continue
            for place, value in zip(change["p"], change["v"], strict=True):
                contents[int(number)][place] = value
        visible = frame.get("s", visible)
        arrays = {record["arrays"][number]["name"]: list(contents[number]) for number in visible}
        yield frame, values, arrays


def plain(array):
    return [None if np.isnan(value) else float(f"{value:.4g}") for value in array.reshape(-1).tolist()]


def without_addresses(text):
    return re.sub(r"\d{10,}", "address", text)


@pytest.mark.parametrize("name", ["naive", "shared_tile", "vectorized", "warp_tiled", "async_copy", "stream_k"])
def test_the_frames_are_the_steps(name):
    stepping, (_, _, wanted) = stage(name, thread=3)
    expected = list(stepping)
    stepping, (_, _, c) = stage(name, thread=3)
    player = stepping.player()
    np.testing.assert_array_equal(c, wanted)
    record = page_record(player.html())
    assert len(record["threads"][0]["frames"]) == record["threads"][0]["total"] == len(expected)
    for s, (frame, values, arrays) in zip(expected, replayed(record), strict=True):
        own = record["functions"][frame["f"]]
        assert (frames.KINDS[frame["k"]], frame["l"], frame["d"], own["name"]) == (s.kind, s.line, s.depth, s.function)
        assert (frame["i"], frame.get("b")) == (s.interval, s.barrier)
        if s.source:
            assert own["lines"][frame["l"] - own["first"]].strip() == s.source
        shown = {name: without_addresses(show(value)) for name, value in s.locals.items()}
        assert {name: without_addresses(value) for name, value in values.items()} == shown
        for name, array in s.shared.items():
            if name in arrays:
                assert arrays[name] == plain(array)
        assert {name for name, array in s.shared.items() if array.ndim == 2} <= set(arrays)


def test_each_thread_has_its_steps():
    player = reversing()[0].player(threads=[2, 0, 2])
    assert [one["thread"] for one in player.record["threads"]] == [[2, 0, 0], [0, 0, 0]]
    for number, thread in enumerate((2, 0)):
        expected = [(s.line, s.locals.get("t")) for s in reversing(thread=thread)[0]]
        found = [(frame["l"], values.get("t")) for frame, values, _ in replayed(player.record, number)]
        assert found == [(line, None if t is None else str(t)) for line, t in expected]


def test_contents_of_arrays_at_every_step():
    player = reversing()[0].player()
    by_line = [(frame["l"], frame["k"], arrays) for frame, _, arrays in replayed(player.record)]
    first = reverse.py_func.__code__.co_firstlineno + 2
    assert by_line[0] == (first, 0, {})
    assert by_line[3] == (first + 3, 0, {"tile": [1, None, None, None], "kept": [None, None]})  # thread 0 has stored
    (barrier,) = [arrays for _, kind, arrays in by_line if kind == 1]
    assert barrier["tile"] == [1, 2, 3, "inf"]
    assert by_line[-1][2]["kept"] == [3, 3]
    described = {array["name"]: array for array in player.record["arrays"]}
    assert (described["tile"]["low"], described["tile"]["high"], described["tile"]["shared"]) == (1, 3, True)
    assert (described["kept"]["rows"], described["kept"]["cols"], described["kept"]["shared"]) == (2, 1, False)


def lanes(record, number):
    request = record["requests"][number]
    numbers, places = record["patterns"][request["p"]]
    return [(lane, place + request["at"]) for lane, place in zip(numbers or range(len(places)), places, strict=True)]


def test_lines_have_their_requests():
    record = reversing()[0].player().record
    first = reverse.py_func.__code__.co_firstlineno + 2
    found = [
        (frame["l"] - first, [(record["requests"][i]["op"], record["requests"][i]["of"]) for i in frame["a"]])
        for frame in record["threads"][0]["frames"]
        if "a" in frame
    ]
    loads = [(6, [("load", "tile")])] * 2
    assert found == [(3, [("load", "x"), ("store", "tile")]), *loads, (7, [("store", "y")])]
    (reading,) = {number for frame in record["threads"][0]["frames"][6:8] for number in frame.get("a", [])}
    assert lanes(record, reading) == [(0, 12), (1, 8), (2, 4), (3, 0)]


@pytest.mark.parametrize("name", ["naive", "vectorized", "async_copy"])
def test_requests_are_those_of_the_trace(name):
    record = stage(name, into=[])[0].player().record
    a, b, c = product()
    traced = trace(name, None, None, 1, a, b, 0, c, config="test", blocks=[(0, 0, 0)])
    table = traced.requests
    expected = {
        (row.op, row.array, row.warp, row.sectors + row.wavefronts, row.ideal, tuple(traced.lanes(number)))
        for number, row in enumerate(table.itertuples())
    }
    made = {
        (one["op"], one["of"], one["w"], one["cost"], one["ideal"], tuple(lanes(record, number)))
        for number, one in enumerate(record["requests"])
    }
    assert made
    assert made <= expected
    own = set(traced.accesses.index[traced.accesses["thread"] == 0])
    counted = sum(len(frame.get("a", [])) + frame.get("m", 0) for frame in record["threads"][0]["frames"])
    assert counted == len(own)


def test_an_array_knows_its_place_in_shared_memory():
    record = stage("warp_tiled")[0].player().record
    tiles = {array["name"]: array for array in record["arrays"]}
    assert tiles["a_tile"]["of"] == tiles["b_tile"]["of"] == "tiles"
    assert tiles["b_tile"]["at"] == tiles["a_tile"]["at"] + 4 * tiles["a_tile"]["rows"] * tiles["a_tile"]["cols"]


def test_what_does_not_fit_is_left_out():
    whole = stage("vectorized")[0].player()
    size = len(json.dumps(whole.record["threads"]))
    cut = stage("vectorized")[0].player(limit=size // 4)
    (kept,) = cut.record["threads"]
    assert kept["total"] == whole.record["threads"][0]["total"]
    assert 10 < len(kept["frames"]) < kept["total"] / 2
    assert kept["frames"] == whole.record["threads"][0]["frames"][: len(kept["frames"])]
    assert len(json.dumps(kept)) < size / 3
    assert f": {len(kept['frames'])} of {kept['total']} steps" in str(cut)
    assert "left out" in cut.html()
    assert len(stage("vectorized")[0].player(limit=1).record["threads"][0]["frames"]) == 1
    assert len(whole.html()) < 1_000_000


def test_source_cannot_end_the_script():
    player = reversing()[0].player()
    page = player.html()
    assert page.lower().count("</script") == page.count("<script") == 2
    assert page_record(page) == json.loads(json.dumps(player.record))
    assert '</script><b>"it\'s" & so on</b>' in "\n".join(page_record(page)["functions"][0]["lines"])
    assert not re.search(r"(?:src|href)=|url\((?!#)|https?:|@import", page), "no network"


def test_a_notebook_shows_the_page(tmp_path):
    player = reversing()[0].player()
    shown = player._repr_html_()
    (inside,) = re.findall(r"<iframe srcdoc='([^']*)' title=\"Player of reverse, block", shown)
    assert html.unescape(inside) == player.html()
    player.save(tmp_path / "player.html")
    assert (tmp_path / "player.html").read_text(encoding="utf-8") == player.html()


def test_text_is_the_last_step():
    player = reversing()[0].player()
    lines = str(player).splitlines()
    assert lines[0] == "reverse, block (0, 0, 0), thread (1, 0, 0): 13 steps; the last:"
    assert any(re.fullmatch(r"->  +\d+      y\[t\] = kept\[0, 0\] \+ kept\[1, 0\]", line) for line in lines)
    assert lines[-2:] == ["    t = 1", "    i = 1"]


def test_what_cannot_be_played():
    stepping, _ = reversing()
    with stepping:
        next(stepping)
        with pytest.raises(RuntimeError, match="the iteration has begun"):
            stepping.player()
    with pytest.raises(RuntimeError, match="the iteration has begun"):
        stepping.player()
    with pytest.raises(ValueError, match=r"thread \(4, 0, 0\) is outside"):
        reversing()[0].player(threads=[0, 4])
    with pytest.raises(ValueError, match="no threads"):
        reversing()[0].player(threads=[])


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_valid(tmp_path):
    script = reversing()[0].player().html().rpartition("<script>")[2].partition("</script>")[0]
    (tmp_path / "player.js").write_text(script, encoding="utf-8")
    done = subprocess.run(["node", "--check", tmp_path / "player.js"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
