"""Stages that have a schedule: what their table of cases reaches, the table on a GPU, and the sanitizer's cases.

In the simulator `test_broken_kernels.py` runs the table, for the kernels as they are as well as for broken ones."""

from __future__ import annotations

import dataclasses

import pytest
import sanitize
from schedule_cases import modes_of, run_shared, scheduled, shared_cases

from numba_gemm import launch
from numba_gemm.device.tile_loader import MODES
from numba_gemm.ladder import STAGES
from numba_gemm.ladder.stage import Share

ALL = [(stage, config) for stage in scheduled(STAGES) for config in (stage.test_config, *stage.configs)]
LAUNCHES = 3  # on one workspace, the counters of which each must leave at 0


def label(value):
    return getattr(value, "name", str(value))


@pytest.mark.gpu
@pytest.mark.parametrize(("stage", "config"), ALL, ids=label)
def test_table(stage, config, monkeypatch):
    for group in (2, 8):
        monkeypatch.setattr("numba_gemm.ladder.stage.GROUP", group)
        monkeypatch.setattr(launch, "_bound", {})  # launches made for another group
        for case in shared_cases(config):
            outcomes = [run_shared(stage, config, case) for _ in range(LAUNCHES)]
            for outcome in outcomes:
                assert outcome.ok, f"{stage.name} {config.name}, {case}: {outcome}"
            assert len({outcome.result.tobytes() for outcome in outcomes}) == 1, f"{case}: other bits each time"


def test_cases_reach_every_mode():
    stage = STAGES["stream_k"]
    reached = {case.modes: modes_of(stage, stage.test_config, case) for case in shared_cases(stage.test_config)}
    assert all(modes == name for name, modes in reached.items())
    for side in (0, 1):
        assert {modes.split()[side] for modes in reached.values()} == set(MODES)


class TestSanitize:
    """The parts of `sanitize.py` that need no GPU."""

    @pytest.mark.simulator
    @pytest.mark.parametrize("case", [*sanitize.cases_of(STAGES["stream_k"], STAGES["stream_k"].test_config)])
    def test_cases_are_right(self, case):
        operands = sanitize.Operands(case)
        owners = {name: views[0] for name, views in operands.views.items()}
        bases = {name: flat.ctypes.data for name, flat in operands.flats.items()}
        extra = operands.extra()
        if case.epilogue:
            places = (launch.Vector(0, one.size, 4, one) for one in (operands.across, operands.down))
            extra = dataclasses.replace(extra, vectors=tuple(places))
        a, b, c = operands.matrices(bases, owners)
        share = Share(case.blocks, case.whole)
        assert not operands.judge(1.5, -0.5, operands.flats["c"]) <= 1
        launch.launch(case.stage, case.config, 1.5, a, b, -0.5, c, share=share, extra=extra)
        assert operands.judge(1.5, -0.5, operands.flats["c"]) <= 1

    def test_variants_say_what_runs(self):
        stage = STAGES["stream_k"]
        words = []
        for case in sanitize.cases_of(stage, stage.configs[0]):
            operands = sanitize.Operands(case)
            owners = {name: views[0] for name, views in operands.views.items()}
            matrices = operands.matrices(dict.fromkeys("abc", 0), owners)
            words.append(sanitize.variant_of(case, matrices, operands.extra())[1])
        assert len(set(words)) == len(words)
        for mode in MODES:
            assert any(word.startswith(f"{mode}_") for word in words), mode
            assert any(f"_{mode}_" in word for word in words), mode
        for what in ("-batch", "_bias-", "-1whole", "-7blocks"):
            assert any(what in word for word in words), what

    def test_reports_belong_to_their_cases(self):
        output = """
            @begin stream_k tiles along4_across4_aligned-7blocks 44 36 36
            ========= Error: Race reported between Write access and Read access
            @end 0.25
            @begin thin tiles any_any_any-8blocks 1 2 3
            @end inf
            ========= Invalid __global__ read of size 4 bytes
        """
        rows, stray = sanitize.parse("racecheck", "\n".join(line.strip() for line in output.splitlines()))
        assert [(row.stage, row.k, row.reports, row.clean) for row in rows] == [
            ("stream_k", 36, 1, False),
            ("thin", 3, 0, False),
        ]
        assert rows[0].variant == "along4_across4_aligned-7blocks"
        assert stray == 1
