"""Choices of autotune: measured, kept, found again and used; entries that are not valid are not."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from support.operands import check, filled
from support.refused_paths import REFUSED_DIRECTORIES, REFUSED_FILES

import numba_gemm
from numba_gemm import autotune, clear_autotuned, explain, plan, prepare, tiled_sgemm
from numba_gemm.gemm import autotune as tuning
from numba_gemm.gemm import autotune_cache, candidate_bench, heuristics, product
from numba_gemm.gemm import precision as precision_names
from numba_gemm.gemm.fast_path import CallCache
from numba_gemm.gemm.request import checked
from numba_gemm.kernels.stage import IEEE
from numba_gemm.runtime import device as runtime_devices
from numba_gemm.runtime import matrix, private_files
from numba_gemm.runtime.private_files import CacheWarning

M, N, K = 96, 200, 300
A, B = np.zeros((M, K), np.float32), np.zeros((K, N), np.float32)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty cache, and a process that knows none of its own."""
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "cache"))
    autotune_cache.forget()
    yield tmp_path / "cache"
    autotune_cache.forget()
    product.forget()


@pytest.fixture
def clock(monkeypatch):
    """All is right at once, and the last candidate is the fastest, unless it is told which."""
    told = {"fastest": -1, "choices": []}

    def timed(bench, choices, rounds):
        told["choices"] = list(choices)
        times = [10.0 + i for i in range(len(choices))]
        times[told["fastest"]] = 2.5
        return times

    monkeypatch.setattr(candidate_bench.CandidateBench, "checked", lambda bench, choice: 1e-6)
    monkeypatch.setattr(candidate_bench.CandidateBench, "timed", timed)
    return told


def reason(a=A, b=B, **options):
    return explain(a, b, **options).reason


def files_of(place):
    # No temporary files either. What a GPU runs is compiled, and kept there, too.
    return [path for path in place.iterdir() if path.suffix != ".kernel" and path.name != autotune_cache.LOCK]


def file_of(place):
    (path,) = files_of(place)
    return path


# ------------------------------------------------------------------------------------------------------- measuring


def test_autotune_measures_and_is_followed():
    a, b = filled(5, 9), filled(9, 6)
    told = autotune(a, b, candidates=2, seconds=1e-9)  # even then, two are measured
    assert len(told.candidates) == 2
    assert told.best.microseconds <= told.candidates[1].microseconds
    assert reason(a, b).startswith("measured by autotune on ")
    assert explain(a, b).microseconds == pytest.approx(told.best.microseconds)
    check(tiled_sgemm(a, b), a, b)
    check(plan(5, 6, 9)(a, b), a, b)


def test_autotune_neither_reads_nor_writes():
    a, b, c = filled(4, 3), filled(3, 4), filled(4, 4, seed=1)
    before = [x.copy() for x in (a, b, c)]
    a.flags.writeable = b.flags.writeable = False
    autotune(a, b, c, candidates=1)
    assert all((x == y).all() for x, y in zip((a, b, c), before, strict=True))


def test_autotune_with_an_epilogue():
    a, b, bias = filled(4, 3), filled(3, 5), filled(1, 5)[0]
    options = {"epilogue": lambda value, row, col, bias: value + bias[col], "epilogue_args": [bias]}
    autotune(a, b, candidates=2, **options)
    assert "autotune" in reason(a, b, **options)
    assert "autotune" not in reason(a, b), "it was measured with an epilogue"


@pytest.mark.simulator
def test_wrong_candidates_are_left_out(monkeypatch):
    launched, done = candidate_bench.launch_choice, []

    def wrong(product, choice, alpha, a, b, beta, c, *others):
        launched(product, choice, alpha, a, b, beta, c, *others)
        done.append(choice.config.name)
        if len(done) == 2:
            c.owner[-1, -1] += 1

    monkeypatch.setattr(candidate_bench, "launch_choice", wrong)
    with pytest.warns(RuntimeWarning, match=r"is not measured: its result differs") as caught:
        told = autotune(filled(5, 9), filled(9, 6), candidates=3)
    assert done[1] in str(caught[0].message)
    assert caught[0].filename == __file__
    assert len(told.candidates) == 2
    assert told.model is not None


def test_candidates_that_cannot_run_are_left_out(monkeypatch):
    check, asked = runtime_devices.Device.check, []

    def refusing(*arguments):
        asked.append(arguments)
        if len(asked) == 1:
            raise RuntimeError("too much shared memory")
        return check(*arguments)

    monkeypatch.setattr(runtime_devices.Device, "check", refusing)
    with pytest.warns(RuntimeWarning, match="too much shared memory"):
        told = autotune(filled(2, 3), filled(3, 2), candidates=2)
    assert told.model is None
    assert np.isnan(told.speedup)

    monkeypatch.setattr(runtime_devices.Device, "check", lambda *_: refusing(asked.clear()))
    with (
        pytest.warns(RuntimeWarning, match="too much shared memory"),
        pytest.raises(RuntimeError, match=r"no candidate for Problem.*can be run"),
    ):
        autotune(filled(2, 3), filled(3, 2), candidates=2)


@pytest.mark.parametrize(
    ("extents", "options", "words"),
    [
        ((4, 0, 4), {}, "nothing to multiply"),
        ((0, 3, 4), {}, "nothing to multiply"),
        ((4, 3, 4), {"candidates": 0}, "candidates is 0; expected an int above 0"),
        ((4, 3, 4), {"seconds": -1.0}, "seconds is -1.0; expected a number above 0"),
        ((4, 3, 4), {"seconds": float("nan")}, "seconds is nan; expected"),
    ],
)
def test_wrong_arguments(extents, options, words):
    m, k, n = extents
    with pytest.raises(ValueError, match=words):
        autotune(filled(m, k), filled(k, n), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"candidates": 2.5}, r"candidates is 2\.5, of type float; expected an int above 0"),
        ({"seconds": "30"}, "seconds is '30', of type str; expected a number above 0"),
    ],
)
def test_arguments_of_wrong_types(options, words):
    with pytest.raises(TypeError, match=words):
        autotune(A, B, **options)


def test_vectors_are_measured_as_matrices():
    a = np.zeros(12, np.float32)
    told = autotune(a, np.zeros((12, 5), np.float32), candidates=2, seconds=0.1)
    assert (told.problem.m, told.problem.n, told.problem.k) == (1, 5, 12)


def test_prepared_operands_are_refused_by_name():
    prepared = prepare(filled(4, 5), "ieee")
    with pytest.raises(TypeError, match="b is a prepared operand; expected an array; pass its attribute `array`"):
        autotune(filled(3, 4), prepared)
    autotune(filled(3, 4), prepared.array, candidates=1)
    assert "autotune" in reason(filled(3, 4), prepared)


def test_operands_are_checked_as_ever():
    with pytest.raises(TypeError, match="a has dtype float64"):
        autotune(A.astype(float), B)


@pytest.mark.parametrize("count", [1, 5, 12, 1000])
@pytest.mark.parametrize("extents", [(4096, 4096, 4096), (64, 64, 4096), (16384, 1, 16384)])
def test_candidates_are_diverse(extents, count):
    ranked = heuristics.ranked(heuristics.Problem(*extents))
    chosen = tuning.diverse(ranked, count)
    assert chosen[0] == ranked[0] == heuristics.choose(heuristics.Problem(*extents))._replace(reason="")
    assert len(chosen) == len(set(chosen)) == min(count, len(set(ranked)))
    if count == 12:
        kernels = [(one.stage.name, one.config.name, one.swapped) for one in chosen]
        assert max(map(kernels.count, kernels)) <= tuning.MOST_SHARES


@pytest.mark.parametrize(
    ("calls", "seconds", "rounds"),
    [([1e-5] * 12, 30.0, tuning.MOST_ROUNDS), ([1.0], 11.0, 3), ([0.1] * 2, 2.0, 3), ([1.0] * 9, -5.0, 3)],
)
def test_rounds_that_time_allows(calls, seconds, rounds, monkeypatch):
    monkeypatch.setattr(tuning, "SIMULATOR", False)
    assert tuning.affordable_rounds(calls, seconds) == rounds
    assert tuning.affordable_rounds(calls, float("inf")) == tuning.MOST_ROUNDS


# ------------------------------------------------------------------------------------------------------ the result


def test_result_tells_what_was_measured(clock, place):
    told = autotune(A, B, candidates=5)
    assert [one.microseconds for one in told.candidates] == [2.5, 10.0, 11.0, 12.0, 13.0]
    assert told.best is told.candidates[0]
    assert told.model is told.candidates[1]
    assert told.speedup == 4.0
    assert told.stored == file_of(place)
    fastest = clock["choices"][-1]
    assert (told.best.stage, told.best.config) == (fastest.stage.name, fastest.config.name)
    assert (told.best.partition, told.best.swapped) == (fastest.partition, fastest.swapped)
    text = str(told)
    for words in ("M=96, N=200, K=300 on ", "fastest of 5", "4.000 times", "\n*        10.00 ", str(told.stored)):
        assert words in text, words
    assert isinstance(told, numba_gemm.Autotuned)
    assert "3 products of" in str(autotune(np.empty((3, *A.shape), np.float32), np.stack([B] * 3), candidates=1))


# ---------------------------------------------------------------------------------------------------------- its use


@pytest.mark.usefixtures("clock")
def test_choice_outlives_the_process():
    before = explain(A, B)
    told = autotune(A, B)
    assert (told.best.stage, told.best.config, told.best.partition) != (before.stage, before.config, None)
    for _ in range(2):
        now = explain(A, B)
        assert (now.stage, now.config, now.blocks) == (told.best.stage, told.best.config, told.best.partition.blocks)
        assert now.reason.startswith(f"measured by autotune on {told.device}, 2")
        assert "2.5 us, the least of 12 candidates" in now.reason
        made = plan(M, N, K)
        assert (made.stage, made.config.name, made.grid) == (now.stage, now.config, (now.blocks, 1, 1))
        autotune_cache.forget()  # as the next process


@pytest.mark.usefixtures("clock")
def test_only_the_same_problem_follows():
    autotune(A, B)
    assert "autotune" not in reason(A[:-1], B)
    assert "autotune" not in reason(A, B.T.copy().T), "B lies by columns"
    assert "autotune" not in reason(A, B, out=np.empty((N, M), np.float32).T), "C lies by columns"
    assert "autotune" not in reason(np.stack([A, A]), np.stack([B, B]))
    assert "autotune" not in reason(A, B, stage="stream_k")
    assert "autotune" in reason(A, B, beta=1.0, out=np.empty((M, N), np.float32))


def test_operands_of_16_bits_have_choices_of_their_own():
    a, b = filled(5, 9), filled(9, 6)
    half = np.float16(a)
    expected = explain(half, b).microseconds
    told = autotune(half, b, candidates=2)
    assert told.model.expected == pytest.approx(expected), "with the conversion"
    assert explain(half, b).microseconds == pytest.approx(told.best.microseconds), "which was measured"
    assert "autotune" in plan(5, 6, 9, dtype=("float16", "float32"))._choice.reason
    assert "autotune" not in reason(a, b)
    assert "autotune" not in reason(a, np.float16(b))
    autotune(a, b, candidates=1)
    assert "the least of 2 candidates" in reason(half, b)


def test_swapped_choice(clock):
    a, b = np.empty((4, 512), np.float32), np.empty((512, 640), np.float32)
    autotune(a, b, candidates=40)
    clock["fastest"] = next(i for i, one in enumerate(clock["choices"]) if one.swapped)
    told = autotune(a, b, candidates=40)
    assert told.best.swapped
    assert "as the transpose" in str(told.best)
    assert explain(a, b).swapped


@pytest.mark.usefixtures("clock")
def test_remembered_calls_are_forgotten(monkeypatch):
    calls = CallCache()
    calls["like this"] = "known"
    monkeypatch.setattr(product, "calls", calls)
    autotune(A, B)
    assert not calls
    calls["like this"] = "known"
    clear_autotuned()
    assert not calls


@pytest.mark.usefixtures("clock")
def test_plans_keep_what_they_chose():
    made = plan(M, N, K)
    before = made._choice
    autotune(A, B)
    assert made._choice == before
    assert plan(M, N, K)._choice != before


def test_without_choices_the_model_is_asked_at_once(monkeypatch):
    explain(A, B)  # reads the store
    monkeypatch.setattr(autotune_cache, "key", lambda wanted: pytest.fail("looked for a choice"))
    explain(A, B)


# --------------------------------------------------------------------------------------------------------- the file


@pytest.mark.usefixtures("clock")
def test_file_is_readable_and_complete(place):
    autotune(A, B)
    (entry,) = json.loads(file_of(place).read_text())["choices"].items()
    assert entry[0].startswith("m=96 n=200 k=300 matrices=1 ")
    assert not any(field in entry[0] for field in autotune_cache.OF_DEVICE)
    assert entry[1].keys() == {"stage", "config", "partition", "swapped", "microseconds", "candidates", "date"}


@pytest.mark.usefixtures("clock")
def test_processes_add_to_each_others_choices(place):
    autotune(A, B)
    mine = file_of(place).read_text()
    clear_autotuned()
    autotune(A.T.copy(), np.empty((M, N), np.float32))
    file_of(place).write_text(mine)  # another process, which had not seen this one's
    autotune(A[:8], B)
    choices = json.loads(file_of(place).read_text())["choices"]
    assert [key.split()[0] for key in choices] == ["m=96", "m=8"]
    for a, b in [(A, B), (A[:8], B), (A.T.copy(), np.empty((M, N), np.float32))]:
        assert "autotune" in reason(a, b), "this process knows its own, and the other's"


@pytest.mark.usefixtures("clock")
def test_later_choice_replaces_the_earlier(clock):
    autotune(A, B)
    clock["fastest"] = 0
    autotune(A, B)
    autotune_cache.forget()
    assert explain(A, B).config == clock["choices"][0].config.name


BROKEN = {
    "empty": "",
    "cut off": '{"choices": {"m=96',
    "no text": b"\xff\xfe\x00",
    "a list": "[]",
    "no choices": '{"choices": 5}',
    "nested too deep": "[" * 100_000,
    "a number of too many digits": '{"choices": ' + "1" * 10_000 + "}",
    "too large": '{"choices": {}}' + " " * (17 << 20),
}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_warns_and_is_replaced(place, case):
    autotune(A, B)
    path, contents = file_of(place), BROKEN[case]
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    autotune_cache.forget()
    with pytest.warns(CacheWarning, match="is broken") as caught:
        assert "autotune" not in reason()
    assert len(caught) == 1
    assert "autotune" not in reason(), "said once"
    autotune(A, B)
    autotune_cache.forget()
    assert "autotune" in reason()


# Contents of an entry that none of this version's candidates matches.
STALE = {
    "stage": {"stage": "gone"},
    "config": {"config": "3x3x3-3x3"},
    "partition": {"partition": [7, 10**6]},
    "partition of nothing": {"partition": [0, 0]},
    "partition missing": {"partition": None},
    "partition misread": {"partition": [1, 2, 3]},
    "swapped": {"swapped": True},
    "microseconds": {"microseconds": "few"},
    "no date": {"date": ...},
    "date of another kind": {"date": 5},
    "date that is no text": {"date": "\ud800"},
    "number of candidates": {"candidates": [[]]},
    "infinite time": {"microseconds": float("inf")},
    "no time": {"microseconds": float("nan")},
    "negative time": {"microseconds": -1},
    "time beyond a float": {"microseconds": 10**400},
    "partition beyond a float": {"partition": [10**400, 10**400]},
}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("case", STALE)
def test_stale_choice_warns_and_is_not_used(place, case):
    autotune(A, B)
    path = file_of(place)
    contents = json.loads(path.read_text())
    (entry,) = contents["choices"].values()
    entry |= STALE[case]
    path.write_text(json.dumps({"choices": {key: _without(entry) for key in contents["choices"]}}))
    autotune_cache.forget()
    with pytest.warns(CacheWarning, match=r"what autotune chose for m=96 .* is no longer valid .*; the model chooses"):
        assert "autotune" not in reason()
    assert "autotune" not in reason(), "said once"


def _without(entry):
    return {name: value for name, value in entry.items() if value is not ...}


@pytest.mark.usefixtures("clock")
def test_entry_of_another_kind(place):
    autotune(A, B)
    path = file_of(place)
    path.write_text(json.dumps({"choices": {key: [1] for key in json.loads(path.read_text())["choices"]}}))
    autotune_cache.forget()
    with pytest.warns(CacheWarning, match="no longer valid"):
        reason()


@pytest.mark.usefixtures("clock")
def test_entry_that_is_nested_too_deep():
    """Deeper than the encoder goes; the parser may have gone deeper, from a shallower stack."""
    autotune(A, B)
    (entries,) = autotune_cache._known.values()
    nested = []
    for _ in range(100_000):
        nested = [nested]
    entries.update(dict.fromkeys(entries, nested))
    with pytest.warns(CacheWarning, match="no longer valid"):
        assert "autotune" not in reason()


@pytest.mark.usefixtures("clock")
def test_entry_that_cannot_be_written_again_is_dropped(place):
    """Nested deeper than the indenting encoder goes, though not deeper than the parser."""
    autotune(A, B)
    depth = 2 * sys.getrecursionlimit()
    file_of(place).write_text('{"choices": {"other": ' + "[" * depth + "]" * depth + "}}")
    autotune_cache.forget()
    autotune(A[:8], B)
    autotune_cache.forget()
    assert "autotune" in reason(A[:8], B)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("case", REFUSED_DIRECTORIES)
def test_directory_that_others_can_change(place, monkeypatch, case):
    monkeypatch.setattr(private_files, "_warned", set())
    path, (spoil, words) = autotune(A, B).stored, REFUSED_DIRECTORIES[case]
    before = path.read_bytes()
    spoil(place)
    autotune_cache.forget()
    with pytest.warns(CacheWarning, match=words) as caught:
        told = reason(), autotune(A[:8], B).stored
    assert "autotune" not in told[0]
    assert told[1] is None
    assert len(caught) == 1
    assert "autotune" in reason(A[:8], B), "this process knows it"
    with pytest.raises(PermissionError, match=words):
        clear_autotuned()
    assert path.read_bytes() == before


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("case", REFUSED_FILES)
def test_file_that_others_can_change(place, monkeypatch, case):
    monkeypatch.setattr(private_files, "_warned", set())
    path, (spoil, words) = autotune(A, B).stored, REFUSED_FILES[case]
    (place / "elsewhere").write_bytes(path.read_bytes())
    spoil(path)
    autotune_cache.forget()
    with pytest.warns(CacheWarning, match=words) as caught:
        assert "autotune" not in reason()
    assert len(caught) == 1
    autotune(A[:8], B)
    autotune_cache.forget()
    assert "autotune" in reason(A[:8], B), "the file is replaced"
    assert "autotune" not in reason(), "and holds nothing of what was refused"


KEEPER = """
import sys
from numba_gemm.gemm import autotune_cache, heuristics
process = int(sys.argv[1])
choice = heuristics.ranked(heuristics.Problem(64, 64, 64))[0]
print("ready", flush=True)
sys.stdin.readline()
for i in range(40):
    autotune_cache.keep(0, heuristics.Problem(64 + process, 64 + i, 64), choice, 5.0, 12)
"""


def test_processes_that_keep_choices_at_once_lose_none(place):
    count = 4
    keepers = [
        subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(process)],
            env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]
    assert [keeper.stdout.readline() for keeper in keepers] == ["ready\n"] * count
    for keeper in keepers:
        keeper.stdin.write("\n")
        keeper.stdin.flush()
    assert [keeper.wait() for keeper in keepers] == [0] * count
    for keeper in keepers:
        keeper.stdin.close()
        keeper.stdout.close()
    assert len(json.loads(file_of(place).read_text())["choices"]) == 40 * count


@pytest.mark.usefixtures("clock")
def test_directory_that_cannot_be_written(place, monkeypatch):
    place.write_text("a file in its place")
    with pytest.warns(CacheWarning, match="cannot be written .* this process only"):
        told = autotune(A, B)
    assert told.stored is None
    assert "for this process only" in str(told)
    assert "autotune" in reason()

    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("replaced"))
    with pytest.warns(CacheWarning, match="cannot be written"):
        autotune(A[:8], B)
    assert "autotune" in reason(), "a later choice leaves it"


@pytest.mark.usefixtures("clock")
def test_choices_on_disk_outlive_a_failed_write(monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    autotune(A, B)
    autotune_cache.forget()
    monkeypatch.setattr(private_files.PrivateDirectory, "write", full)
    with pytest.warns(CacheWarning, match="no space left .* this process only"):
        assert autotune(A[:8], B).stored is None
    assert "autotune" in reason(), "it is on disk"
    assert "autotune" in reason(A[:8], B)


@pytest.mark.usefixtures("clock")
def test_choices_that_cannot_be_deleted_stay_in_use(monkeypatch):
    def readonly(*_):
        raise OSError("read-only file system")

    autotune(A, B)
    calls = CallCache()
    calls["like this"] = "known"
    monkeypatch.setattr(product, "calls", calls)
    with monkeypatch.context() as patch:
        patch.setattr(private_files.PrivateDirectory, "delete", readonly)
        with pytest.raises(OSError, match="read-only file system"):
            clear_autotuned()
    assert "autotune" in reason()
    assert not calls, "they are chosen anew"
    assert clear_autotuned() == 1
    assert "autotune" not in reason()


@pytest.mark.usefixtures("clock")
def test_file_that_cannot_be_read(place):
    path = autotune(A, B).stored
    path.unlink()
    path.mkdir()
    autotune_cache.forget()
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert "autotune" not in reason()


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:there is no place for a kernel cache")  # of a GPU whose kernels are not loaded yet
@pytest.mark.parametrize("variables", [{"NUMBA_GEMM_CACHE_DIR": "off"}, {"HOME": "~", "XDG_CACHE_HOME": ""}])
def test_nowhere_to_keep_it(variables, monkeypatch):
    monkeypatch.delenv("NUMBA_GEMM_CACHE_DIR")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert autotune(A, B).stored is None
    assert "autotune" in reason()
    assert clear_autotuned() == 0
    assert "autotune" not in reason()


# ------------------------------------------------------------------------------------------- devices and versions


@pytest.fixture
def devices(monkeypatch):
    """Device 0 is of another kind than 1, and 2 of the same as 0."""
    own = runtime_devices.device_properties(0)
    others = [own, dataclasses.replace(own, name="NVIDIA Other/8 GB", sm_count=78), own]
    monkeypatch.setattr(runtime_devices, "device_properties", lambda device=0: others[device])
    monkeypatch.setattr(runtime_devices, "device_count", lambda: 3)
    return [
        heuristics.Problem(M, N, K),
        heuristics.Problem(M, N, K, sm_count=78),
        heuristics.Problem(M, N, K),
    ]


def keep(device, wanted):
    choice = heuristics.ranked(wanted)[3]
    autotune_cache.keep(device, wanted, choice, 5.0, 12)
    return choice.partition


def is_kept(device, wanted):
    return "autotune" in autotune_cache.choose(device, wanted).reason


def test_devices_of_a_kind_share_choices(devices, place):
    keep(0, devices[0])
    assert [is_kept(device, wanted) for device, wanted in enumerate(devices)] == [True, False, True]
    keep(1, devices[1])
    assert len(files_of(place)) == 2
    autotune_cache.forget()
    assert [is_kept(device, wanted) for device, wanted in enumerate(devices)] == [True, True, True]
    assert "NVIDIA Other/8 GB" in autotune_cache.choose(1, devices[1]).reason


def test_clear_one_kind_of_device(devices, place):
    keep(0, devices[0])
    keep(1, devices[1])
    foreign = {"something.json", "restaurant.choices.json", "a-cc9.0-sm132-0123456789abcdeF.choices.json"}
    for name in foreign:
        (place / name).write_text('{"choices": {"dinner": {}}}')
    assert clear_autotuned(2) == 1
    for _ in range(2):
        assert [is_kept(device, wanted) for device, wanted in enumerate(devices)] == [False, True, False]
        autotune_cache.forget()
    assert clear_autotuned() == 1
    assert not is_kept(1, devices[1])
    assert {path.name for path in files_of(place)} == foreign
    assert clear_autotuned() == 0


def test_broken_file_is_cleared(devices, place):
    keep(0, devices[0])
    file_of(place).write_text("broken")
    assert clear_autotuned() == 0
    assert not files_of(place)


def test_other_versions_have_their_own(devices, place, monkeypatch):
    keep(0, devices[0])
    monkeypatch.setattr(autotune_cache.kernel_key, "SOURCES", "others")
    autotune_cache.forget()
    assert not is_kept(0, devices[0])
    keep(0, devices[0])
    assert len(files_of(place)) == 2
    assert clear_autotuned(0) == 2


def test_clear_cache_leaves_choices(devices):
    keep(0, devices[0])
    numba_gemm.clear_cache()
    autotune_cache.forget()
    assert is_kept(0, devices[0])


# ------------------------------------------------------------------------------- the driver's side, without a driver


class HostMemory:
    """Stands in for a driver whose memory is the host's."""

    def __init__(self):
        self.held = {}
        self.streams = 0

    def __call__(self, function, *arguments):
        return getattr(self, function.__name__)(*arguments)

    def cuMemAlloc(self, size):
        block = np.full(size + 256, 77, np.uint8)
        pointer = -(-block.ctypes.data // 256) * 256
        self.held[pointer] = block, size
        return pointer

    def cuMemFree(self, pointer):
        del self.held[pointer]

    def cuMemcpyDtoDAsync(self, to, source, size, stream):
        assert to >= source + size, "overlaps"
        self.cuMemcpyHtoDAsync(to, source, size, stream)

    def cuMemcpyHtoDAsync(self, to, source, size, stream):
        assert any(base <= to and to + size <= base + room for base, (_, room) in self.held.items())
        ctypes.memmove(to, source, size)

    def cuMemcpyDtoHAsync(self, to, source, size, stream):
        assert any(base <= source and source + size <= base + room for base, (_, room) in self.held.items())
        ctypes.memmove(to, source, size)

    def cuMemsetD32Async(self, to, value, count, stream):
        np.frombuffer((ctypes.c_int32 * count).from_address(to), np.int32)[:] = value

    def cuStreamCreate(self, flags):
        self.streams += 1
        return 9

    def cuStreamDestroy(self, stream):
        self.streams -= 1

    def cuStreamSynchronize(self, stream):
        assert stream == 9


@pytest.fixture
def memory(monkeypatch):
    made = HostMemory()
    monkeypatch.setattr(tuning, "SIMULATOR", False)
    monkeypatch.setattr(candidate_bench, "SIMULATOR", False)
    monkeypatch.setattr(candidate_bench, "call", made)
    monkeypatch.setattr(candidate_bench.workspaces, "call", made)
    monkeypatch.setattr(matrix, "SIMULATOR", False)
    monkeypatch.setattr(runtime_devices.get_device(0), "load", lambda kernel: None)
    monkeypatch.setattr(runtime_devices.get_device(0), "load_all", lambda kernels: None)
    monkeypatch.setattr(tuning, "device_scope", lambda device: nullcontext())
    yield made
    assert not made.held
    assert not made.streams


def view(x):
    interface = {"data": (x.pointer, False), "shape": (x.rows, x.cols), "strides": (x.row_stride, x.col_stride)}
    return np.asarray(type("Memory", (), {"__array_interface__": interface | {"typestr": "<f4", "version": 3}})())


@pytest.mark.simulator
@pytest.mark.parametrize("compared", [1 << 26, 1 << 10])
def test_operands_are_laid_out_alike(memory, monkeypatch, compared):
    monkeypatch.setattr(candidate_bench, "COMPARED_BYTES", compared)
    monkeypatch.setattr(candidate_bench, "PIECES", 4)
    monkeypatch.setattr(candidate_bench, "PERIOD", 1009)
    depth = 8 * K  # for candidates whose sums are divided, which need a workspace
    a, b, c = filled(2 * M, depth)[::-2], filled(N, depth).T, filled(M + 1, N + 3)[1:, :N]
    done, timed, divided = [], [], []

    def launched(product, choice, alpha, x, y, beta, z, stream, vectors, workspace):
        gpu = runtime_devices.device_properties(0).gpu
        needed = choice.stage.launches(choice.config, product, IEEE, choice.partition, gpu)
        assert workspace.holds(needed.scratch_bytes, needed.counters)
        divided.append(needed.counters > 0)
        assert (alpha, beta, stream) == (1.0, 0.0, 9)
        x, y, z = map(view, (x, y, z))
        z[...] = x @ y
        done.append([(one.ctypes.data, one.shape, one.strides) for one in (x, y, z)])
        assert (x == x.round()).all() == (y == y.round()).all() == (not timed), "integers are compared, others timed"
        assert x.std() > 0.5
        assert y.std() > 0.5

    def time_interleaved(runs, *, stream, rounds, min_span_us):
        timed.append(rounds)
        for run in runs.values():
            run(stream)
        return {name: SimpleNamespace(median=5.0 + int(name)) for name in runs}

    monkeypatch.setattr(candidate_bench, "launch_choice", launched)
    monkeypatch.setattr(candidate_bench, "time_interleaved", time_interleaved)
    told = autotune(a, b, c, candidates=4)
    assert told.best is told.model
    assert any(divided)
    assert [len(told.candidates), len(done), timed] == [4, 12, [tuning.MOST_ROUNDS]]
    for own, given in zip(done[0], (a, b, c), strict=True):
        assert own[1:] == (given.shape, given.strides)
        assert own[0] != given.ctypes.data
        assert (own[0] - given.ctypes.data) % candidate_bench.BOUNDARY == 0


@pytest.mark.simulator
@pytest.mark.parametrize("elements", [1, 63, 64, 1000, 5000])
def test_scratch_memory(memory, monkeypatch, elements):
    monkeypatch.setattr(candidate_bench, "COMPARED_BYTES", 4096)
    monkeypatch.setattr(candidate_bench, "PIECES", 8)
    like = checked(filled(1, elements), filled(elements, 1), None, 1.0, 0.0, None, "auto", None, ()).a
    with ExitStack() as held:
        scratch = candidate_bench.Scratch(like, 9, held)
        scratch.fill(np.arange(97, dtype=np.float32))
        size = scratch.size // 4
        assert elements <= size <= elements + 65
        ((block, _),) = memory.held.values()
        skip = -block.ctypes.data % 256
        expected = np.resize(np.arange(97, dtype=np.float32), size)
        assert (block[skip : skip + scratch.size].view(np.float32) == expected).all()
        got = scratch.read()
        if scratch.size <= 4096:
            assert (got[0] == expected).all()
        else:
            assert got.shape == (8, 128)
            assert (got[0] == expected[:128]).all()
            assert (got[-1] == expected[-128:]).all()


# ------------------------------------------------------------------------------------------------------ precisions


@pytest.mark.simulator
@pytest.mark.parametrize("precision", ["tf32", "bf16x6", "bf16x9", "fp16x3"])
def test_precisions(memory, place, monkeypatch, precision):
    """The choice is measured, kept and followed for this precision only."""
    m, n, k = 256, 512, 512
    a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    done = []

    def launched(product, choice, alpha, x, y, beta, z, stream, vectors, workspace):
        gpu = runtime_devices.device_properties(0).gpu
        oriented = choice.oriented(product)
        needed = choice.stage.launches(choice.config, oriented, choice.precision, choice.partition, gpu)
        assert (workspace is None) == (precision == "tf32"), "other candidates decompose their operands"
        assert not needed.scratch_bytes or workspace.holds(needed.scratch_bytes, 0)
        assert choice.precision == ("bf16x6" if choice.stage.name == "fused_decomposition" else precision)
        view(z)[...] = 0
        done.append((choice.config.name, choice.partition))

    def time_interleaved(runs, **_):
        return {name: SimpleNamespace(median=9.0 - int(name)) for name in runs}

    monkeypatch.setattr(precision_names, "SIMULATOR", False)
    monkeypatch.setattr(candidate_bench, "launch_choice", launched)
    monkeypatch.setattr(candidate_bench, "time_interleaved", time_interleaved)
    told = autotune(a, b, precision=precision, candidates=3)
    assert told.problem.precision == precision
    expected = {
        "tf32": {"tf32_tma"},
        "bf16x6": {"fused_decomposition", "rows_in_registers"},
        "bf16x9": {"persistent"},
        "fp16x3": {"fused_decomposition", "persistent"},
    }[precision]
    assert {one.stage for one in told.candidates} == expected
    assert len({(one.config, one.partition) for one in told.candidates}) == len(told.candidates) == 3
    for one in told.candidates:
        assert one.precision == ("bf16x6" if one.stage == "fused_decomposition" else precision)
    assert (", in bf16x6" in str(told)) == (precision == "fp16x3")
    assert (told.best.config, told.best.partition) == done[-1], "the last candidate is the fastest"
    assert f" precision={precision} " in next(iter(json.loads(file_of(place).read_text())["choices"]))
    for _ in range(2):
        found = explain(a, b, precision=precision)
        assert (found.config, found.split > 1) == (told.best.config, told.best.partition is not None)
        assert found.reason.startswith("measured by autotune on ")
        assert found.microseconds == pytest.approx(told.best.microseconds)
        assert "autotune" not in reason(a, b)
        assert "autotune" not in reason(a, b, precision="bf16")
        autotune_cache.forget()  # as the next process


@pytest.mark.simulator
def test_precisions_that_the_simulator_lacks():
    with pytest.raises(ValueError, match="precision is 'bf16x6', and this is the simulator"):
        autotune(A, B, precision="bf16x6")


# --------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_autotune_on_the_gpu(layout, place):
    from numba import cuda

    m, n, k = 500, 640, 384
    a = filled(m, k) if layout[0] == "N" else filled(k, m).T
    b = filled(k, n) if layout[1] == "N" else filled(n, k).T
    told = autotune(a, b, candidates=6)
    assert 2 <= len(told.candidates) <= 6
    assert all(1 < one.microseconds < 1e4 for one in told.candidates)
    assert told.speedup >= 1
    assert told.stored == file_of(place)
    assert "autotune" in reason(a, b)
    check(tiled_sgemm(a, b), a, b)
    check(plan(m, n, k, layout=layout)(a, b), a, b)
    if layout == "NN":
        x, y = cuda.to_device(a), cuda.to_device(b)
        for _ in range(3):  # on the fast path too
            check(tiled_sgemm(x, y).copy_to_host(), a, b)


@pytest.mark.gpu
def test_remembered_launches_follow_on_the_gpu(monkeypatch):
    from numba import cuda

    x, y = cuda.to_device(filled(512, 512)), cuda.to_device(filled(512, 512, seed=1))
    for _ in range(2):
        before = tiled_sgemm(x, y).copy_to_host()
    assert product.calls
    told = autotune(x, y, candidates=4, seconds=5)
    assert not product.calls
    asked = []
    choose = autotune_cache.choose
    monkeypatch.setattr(autotune_cache, "choose", lambda *problem: asked.append(choose(*problem)) or asked[-1])
    after = tiled_sgemm(x, y).copy_to_host()
    assert asked[0].config.name == told.best.config
    assert np.allclose(before, after, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shapes", [((1, 4096), (4096, 3000)), ((3000, 4096), (4096, 1)), ((8, 256, 128), (8, 128, 192))]
)
def test_odd_shapes_on_the_gpu(shapes):
    def relu(value, row, col):
        return max(value, np.float32(0))

    a, b = (np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32) for shape in shapes)
    for options in ({}, {"epilogue": relu}):
        autotune(a, b, candidates=6, seconds=10, **options)
        assert "autotune" in reason(a, b, **options)
        got, expected = tiled_sgemm(a, b, **options), a.astype(float) @ b.astype(float)
        assert np.allclose(got, expected.clip(0) if options else expected, atol=1e-3)
