"""Hardware counters: parsing of Nsight Compute's pages, from excerpts of real ones, and the command.

``data/ncu_source.csv`` and ``data/ncu_raw.csv`` were printed on an H200 for products of 1024 cubed, and then shortened.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from numba_gemm.device.access import ACCESSES
from numba_gemm.kernels.ladder import STAGES, TileConfig
from numba_gemm.kernels.ladder.stage import Variant
from numba_gemm.lab.__main__ import main
from numba_gemm.lab.bench import counters
from numba_gemm.lab.bench.buffers import HostLibrary
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.harness import environment, runner

ROOT = Path(__file__).resolve().parents[2]
CUBE = Shape(1024, 1024, 1024)
RECORDED = {
    "naive": "naive_32x32x1_1x1",
    "coalesced": "coalesced_2x128x1_1x1",
    "conflict_free": "conflict_free_128x128x8_8x8",
    "async_copy": "async_copy_128x256x16_8x16_w64x64_s3",
}
NAME = {stage: counters.kernel_name(STAGES[stage]) for stage in RECORDED}


def recorded(file):
    """Return a page with the names of the current default configurations, which may differ from the recorded ones."""
    text = (ROOT / "tests" / "data" / file).read_text()
    for stage, kernel in RECORDED.items():
        text = text.replace(f'"{kernel}"', f'"{NAME[stage]}"')
    return text


SOURCE, RAW = recorded("ncu_source.csv"), recorded("ncu_raw.csv")
RAW_STAGES = [STAGES[name] for name in ("naive", "coalesced", "conflict_free", "async_copy")]
CONFLICT_FREE = [STAGES["conflict_free"]]

STORE = '"262144","262144"'  # of the one 128-bit store: taken, ideal
CONFLICT_STORE = '"300000","262144"'


def wavefronts(text=SOURCE, stages=CONFLICT_FREE):
    return counters.read_wavefronts(text, stages, CUBE)


def second_kernel(name, *replacements):
    """Return the source page of a second kernel: the first one's, with some words replaced."""
    text = SOURCE[SOURCE.index('"Kernel Name"') :].replace(NAME["conflict_free"], name)
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text


class TestSourcePage:
    def test_real_page(self):
        frame = wavefronts()
        columns = ["op", "bits", "wavefronts", "ideal", "excessive", "excess_percent"]
        assert list(frame.columns) == [*counters.KEY, *columns]
        assert set(zip(*(frame[name] for name in counters.KEY))) == {
            ("conflict_free", STAGES["conflict_free"].configs[0].name, *CUBE)
        }
        assert frame[columns[:-1]].astype(object).where(frame[columns[:-1]].notna(), None).to_numpy().tolist() == [
            ["LDS", 128, 6291456, 6291456, 0],
            ["STS", 32, 262144, 262144, 0],
            ["STS", 128, 262144, 262144, 0],
            ["total", None, 6815744, 6815744, 0],
        ]
        assert set(frame["excess_percent"]) == {0.0}

    def test_excess(self):
        frame = wavefronts(SOURCE.replace(STORE, CONFLICT_STORE)).set_index(["op", "bits"])
        assert frame.loc[("STS", 128), "excessive"].item() == 300000 - 262144
        assert frame.loc[("LDS", 128), "excessive"].item() == 0
        total = frame.loc["total"].iloc[0]
        assert total["wavefronts"] == 6815744 + 300000 - 262144
        assert total["excess_percent"] == pytest.approx(100 * (300000 - 262144) / 6815744)

    def test_several_kernels_in_the_stages_order(self):
        copies = second_kernel(
            NAME["async_copy"],
            ("STS.128 [R75+UR7], R28", "LDGSTS.E.BYPASS.LTC128B.128 [R75], [R28.64]"),
            (STORE, CONFLICT_STORE),
        )
        empty = second_kernel(NAME["naive"])
        kept = [line for line in empty.splitlines() if "Shared" not in line or "Address Space" in line]
        stages = [STAGES[name] for name in ("conflict_free", "async_copy", "naive")]
        frame = wavefronts("\n".join((SOURCE, "==PROF== between", copies, *kept)), stages)
        assert list(frame["stage"]) == 4 * ["conflict_free"] + 4 * ["async_copy"] + ["naive"]
        (copied,) = frame[frame["op"] == "LDGSTS"].to_dict("records")
        assert (copied["stage"], copied["bits"], copied["excessive"]) == ("async_copy", 128, 300000 - 262144)
        naive = frame.iloc[-1]
        assert (naive["op"], naive["wavefronts"], naive["ideal"]) == ("total", 0, 0)
        assert pd.isna(naive["excess_percent"])

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("      STS [R74], R24", ("STS", 32)),
            ("@!P1  LDS.U.128 R4, [R2]", ("LDS", 128)),
            ("@P0 LDS.64 R4, [R2+0x128]", ("LDS", 64)),
            ("LDS.U16 R4, [R2]", ("LDS", 16)),
            ("@UP0 LDGSTS.E.LTC128B [R4], desc[UR8][R2.64], !P0", ("LDGSTS", 32)),
            ("LDGSTS.E.BYPASS.LTC128B.128 [R4], [R2.64]", ("LDGSTS", 128)),
            ("", ("", 32)),
        ],
    )
    def test_opcode(self, source, expected):
        assert counters.opcode(source) == expected

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("==PROF== nothing\n", "but ncu profiled nothing"),
            (
                SOURCE + second_kernel(NAME["conflict_free"]),
                f"profiled {NAME['conflict_free']}, {NAME['conflict_free']}",
            ),
            (SOURCE.replace(NAME["conflict_free"], "conflict_free_8x8"), "profiled conflict_free_8x8"),
            (SOURCE.replace("Shared Ideal", "Shared Best"), "no column L1 Wavefronts Shared Ideal"),
        ],
    )
    def test_errors(self, text, says):
        with pytest.raises(counters.CountersError, match=says):
            wavefronts(text)

    def test_unaligned_variant_is_the_stage_too(self):
        text = SOURCE.replace(NAME["conflict_free"], NAME["conflict_free"] + "_any(float, float)")
        assert list(wavefronts(text)["stage"]) == 4 * ["conflict_free"]

    @pytest.mark.parametrize(
        "suffix", ["_along4_across4_aligned", "_any_along1_any(float, float)", "_any", "_whole", ""]
    )
    @pytest.mark.parametrize("stage", ["stream_k", "thin"])
    def test_kernels_are_named_for_how_they_load(self, stage, suffix):
        text = SOURCE.replace(NAME["conflict_free"], counters.kernel_name(STAGES[stage]) + suffix)
        assert set(wavefronts(text, [STAGES[stage]])["stage"]) == {stage}

    def test_a_stage_for_few_columns_gets_few(self):
        config = STAGES["thin"].configs[0]
        frame = wavefronts(
            SOURCE.replace(NAME["conflict_free"], counters.kernel_name(STAGES["thin"])), [STAGES["thin"]]
        )
        assert set(zip(*(frame[name] for name in counters.KEY))) == {("thin", config.name, 1024, config.BN, 1024)}
        assert counters.shape_of(STAGES["stream_k"], CUBE) == CUBE

    @pytest.mark.parametrize(
        ("text", "stages", "kept"),
        [
            (SOURCE, CONFLICT_FREE, True),
            (SOURCE.replace(STORE, '"330000","262144"'), CONFLICT_FREE, True),  # 0.996 %
            (SOURCE.replace(STORE, '"331000","262144"'), CONFLICT_FREE, False),  # 1.010 %
            ("".join(line for line in SOURCE.splitlines(True) if '"Shared"' not in line), CONFLICT_FREE, False),
        ],
    )
    def test_verdict(self, text, stages, kept):
        claims = counters.SHARED_WAVEFRONTS.claims(wavefronts(text, stages))
        assert claims == {"conflict_free has at most 1 % excess shared wavefronts": kept}

    def test_no_verdict_of_other_stages(self):
        text = SOURCE.replace(NAME["conflict_free"], NAME["naive"])
        assert counters.SHARED_WAVEFRONTS.claims(wavefronts(text, [STAGES["naive"]])) == {}


class TestRawPage:
    def test_real_page(self):
        frame = counters.read_counters(RAW, RAW_STAGES, CUBE).set_index("stage")
        assert list(frame.index) == [stage.name for stage in RAW_STAGES]
        assert {*counters.METRICS, "sectors_per_request"} <= set(frame.columns)
        assert not frame.isna().any(axis=None)
        for stage, column, value in (
            ("naive", "time_us", 4420.896),
            ("naive", "global_load_sectors", 1_107_296_256),
            ("naive", "sectors_per_request", 16.5),
            ("coalesced", "sectors_per_request", 2.5),
            ("coalesced", "dram_write_bytes", 512),
            ("conflict_free", "registers", 96),
            ("conflict_free", "shared_store_wavefronts", 556_909),
            ("async_copy", "fma_pipe_percent", 78.58),
            ("async_copy", "l1_hit_percent", 3.72),
            ("async_copy", "config", STAGES["async_copy"].configs[0].name),
        ):
            assert frame.loc[stage, column] == value, (stage, column)

    def test_units(self):
        text = RAW.replace('"ns"', '"ms"', 1).replace('"byte"', '"Kbyte"')
        before, after = (counters.read_counters(page, RAW_STAGES, CUBE) for page in (RAW, text))
        assert (after["time_us"] / before["time_us"]).to_numpy() == pytest.approx(1e6)
        assert (after["l2_bytes"] / before["l2_bytes"]).to_numpy(float) == pytest.approx(1e3)
        with pytest.raises(counters.CountersError, match="in 'furlong', a unit"):
            counters.read_counters(RAW.replace('"byte"', '"furlong"', 1), RAW_STAGES, CUBE)

    def test_what_a_gpu_does_not_count_is_blank(self):
        text = RAW.replace("sm__pipe_fma_cycles_active.avg", "x").replace('"1,107,296,256"', '"n/a"')
        frame = counters.read_counters(text, RAW_STAGES, CUBE).set_index("stage")
        assert frame["fma_pipe_percent"].isna().all()
        assert list(frame["global_load_sectors"].isna()) == [True, False, False, False]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "raw page is empty"),
            (RAW.replace("Kernel Name", "Kernel"), "no column Kernel Name"),
            (RAW.replace(NAME["coalesced"], "coalesced_x"), "but ncu profiled .*coalesced_x"),
        ],
    )
    def test_errors(self, text, says):
        with pytest.raises(counters.CountersError, match=says):
            counters.read_counters(text, RAW_STAGES, CUBE)


# Stand-in for ncu: prints the requested page, and records its command line.
FAKE_NCU = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
if "--version" in sys.argv:
    sys.exit(print("NVIDIA (R) Nsight Compute\\nVersion 2025.3.1.0 (build 1)"))
page = sys.argv[sys.argv.index("--page") + 1]
(here / (page + ".argv")).write_text("\\n".join(sys.argv[1:]))
print((here / page).read_text())
"""


class TestCommand:
    @pytest.fixture
    def ncu(self, tmp_path, monkeypatch):
        folder = tmp_path / "bin"
        folder.mkdir()
        path = folder / "ncu"
        path.write_text(FAKE_NCU.format(python=sys.executable))
        path.chmod(0o755)
        (folder / "source").write_text(SOURCE)
        others = [f'"{NAME[stage.name]}"' for stage in RAW_STAGES if stage.name != "conflict_free"]
        own = [line for line in RAW.splitlines() if not any(other in line for other in others)]
        (folder / "raw").write_text("\n".join(own))
        monkeypatch.setattr(runner, "SIMULATOR", False)
        for module in (runner, environment):
            monkeypatch.setattr(module, "driver_error", lambda: None)
        monkeypatch.setattr("numba_gemm.inspect.sass.find_tool", lambda name: str(path))
        monkeypatch.setattr(environment, "describe_gpu", lambda: {"name": "Test GPU"})
        monkeypatch.setattr(environment, "current_nvml", lambda: None)
        return folder

    def run(self, tmp_path, *arguments, name="shared_wavefronts"):
        options = ["--stages=conflict_free", "--shape=1024,1024,1024", f"--out={tmp_path}/out", *arguments]
        return main([*name.split(), *options])

    def test_files(self, ncu, tmp_path, capsys):
        assert self.run(tmp_path, name="counters shared_wavefronts") == 0
        assert "holds: conflict_free has at most 1 % excess shared wavefronts" in capsys.readouterr().out
        out = tmp_path / "out"
        names = {"counters": counters.COUNTERS, "shared_wavefronts": counters.WAVEFRONTS}
        assert {path.name for path in out.iterdir()} == {*names.values(), *(f"{name}.json" for name in names)}
        assert pd.read_csv(out / counters.COUNTERS)["instructions"].tolist() == [44872192]
        assert pd.read_csv(out / counters.WAVEFRONTS)["op"].tolist() == ["LDS", "STS", "STS", "total"]
        for name in names:
            how = json.loads((out / f"{name}.json").read_text())
            assert how["gpu"] == {"name": "Test GPU"}
            assert how["ncu"]["version"] == "2025.3.1.0"
            assert how["command"].endswith(f"{name} --stages conflict_free --shape 1024,1024,1024")
            assert [line.split()[0] for line in how["ncu"]["commands"]] == ["ncu"]
            for path in (tmp_path, sys.executable, ROOT):
                assert str(path) not in json.dumps(how)
        for page in ("source", "raw"):
            given = (ncu / f"{page}.argv").read_text().splitlines()
            assert given[given.index("-k") + 1] == "regex:^(conflict_free)_[0-9]"
            assert given[given.index("-m") :] == ["-m", counters.CHILD, "conflict_free", "1024,1024,1024"]

    def test_conflicts_fail(self, ncu, tmp_path, capsys):
        (ncu / "source").write_text(SOURCE.replace(STORE, '"400000","262144"'))
        assert self.run(tmp_path) == 1
        assert "DOES NOT HOLD" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("page", "says"),
        [
            ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
            ("==WARNING== No kernels were profiled.\n", "ncu's output is in"),
        ],
    )
    def test_ncu_fails(self, page, says, ncu, tmp_path, capsys):
        (ncu / "source").write_text(page)
        assert self.run(tmp_path) == 2
        assert says in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("simulator", "driver", "says"),
        [
            (True, None, "unset NUMBA_ENABLE_CUDASIM"),
            (False, "no NVIDIA driver was found.", "this needs a GPU, and no NVIDIA driver"),
            (False, None, "install Nsight Compute"),
        ],
    )
    def test_what_is_missing(self, simulator, driver, says, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(runner, "SIMULATOR", simulator)
        monkeypatch.setattr(runner, "driver_error", lambda: driver)
        monkeypatch.setattr("numba_gemm.inspect.sass.find_tool", lambda name: None)
        assert self.run(tmp_path) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--stages=naive,fast"], "unknown stage fast; known are naive"),
            (["--shape=1,2"], "is not M,N,K"),
        ],
    )
    def test_usage(self, arguments, says, ncu, tmp_path, capsys):
        try:
            status = self.run(tmp_path, *arguments)
        except SystemExit as stopped:
            status = stopped.code
        assert status == 2
        assert says in capsys.readouterr().err

    def test_kernel_names(self):
        config = TileConfig(BM=128, BN=256, BK=16, TM=8, TN=16, WM=64, WN=64, slots=3, dynamic=True)
        stage = dataclasses.replace(STAGES["async_copy"], configs=(config,))
        assert counters.kernel_name(stage) == RECORDED["async_copy"]
        stream_k = STAGES["stream_k"]
        for variant in (Variant(a, b, c) for a in ACCESSES for b in ACCESSES for c in (True, False)):
            kernel = re.sub(r"\W", "_", f"stream_k_{stream_k.configs[0].name}_{variant.name}")  # as the compiler does
            assert kernel.startswith(counters.kernel_name(stream_k))
        assert counters.kernel_filter(RAW_STAGES[:2]) == "regex:^(naive|coalesced)_[0-9]"

    @pytest.mark.gpu
    def test_on_a_gpu(self, tmp_path):
        if not shutil.which("ncu"):
            pytest.skip("needs Nsight Compute")
        command = [
            sys.executable,
            "-m",
            "numba_gemm.lab",
            "counters",
            "--stages=naive,conflict_free",
            "--shape=512,512,64",
        ]
        done = subprocess.run(
            [*command, "--out", tmp_path], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
        )
        if "ERR_NVGPUCTRPERM" in done.stderr:
            pytest.skip("counters are reserved for administrators here")
        assert done.returncode == 0, done.stdout + done.stderr
        assert pd.read_csv(tmp_path / counters.COUNTERS)["stage"].tolist() == ["naive", "conflict_free"]

    def test_child_launches_every_stage_once(self, monkeypatch):
        launched, columns = [], {}

        def launch(stage, config, alpha, a, b, beta, c):
            launched.append(stage.name)
            columns[stage.name] = b.cols, c.cols

        monkeypatch.setattr(counters, "launch", launch)
        monkeypatch.setattr(counters, "choose_library", lambda simulated: HostLibrary())
        counters.launch_each([STAGES[name] for name in ("naive", "thin", "stream_k")], Shape(8, 8, 8))
        assert launched == ["naive", "thin", "stream_k"]
        few = STAGES["thin"].configs[0].BN
        assert columns == {"naive": (8, 8), "thin": (few, few), "stream_k": (8, 8)}
