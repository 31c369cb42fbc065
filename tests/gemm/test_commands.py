"""Subcommands about products, without a compiler and a GPU: precompile, cache, explain, autotune."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.compiled import CUBIN

import numba_gemm
from numba_gemm import explain
from numba_gemm.arrays import Copies
from numba_gemm.gemm import precision
from numba_gemm.gemm import precompile as precompiling
from numba_gemm.gemm.commands import autotune as autotune_command
from numba_gemm.gemm.commands import cache
from numba_gemm.gemm.commands import explain as explain_command
from numba_gemm.gemm.commands import precompile as command
from numba_gemm.runtime import bundle, kernel_cache, kernel_files, private_files

SMALL = ["--stages", "naive,coalesced", "--cc", "8.0,9.0"]  # two variants of each


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Names of the kernels that were compiled, in an empty cache; each compiles to its name."""
    names = []

    def compile_all(tasks, done, jobs):
        for i, (kernel, cc) in enumerate(tasks):
            names.append(kernel.name)
            done(i, dataclasses.replace(CUBIN, code=kernel.name.encode(), ptx="", log="", cc=cc), 1.5)

    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(private_files, "_warned", set())
    for module in (precompiling, precision):
        monkeypatch.setattr(module, "SIMULATOR", False)
    monkeypatch.setattr(kernel_cache, "compile_all", compile_all)
    monkeypatch.setattr(command, "compile_all", compile_all)
    monkeypatch.setattr(command, "machine_code", lambda cubin: [cubin.code])
    monkeypatch.setattr(bundle, "PACKAGED", tmp_path / "none")
    return names


def test_precompile(compiled, capsys, tmp_path):
    assert command.main(SMALL) == command.DONE
    assert len(compiled) == 8
    out, err = capsys.readouterr()
    assert out.startswith(f"8 kernels, 8 of them compiled, in {tmp_path / 'cache'}, after ")
    assert not err, "progress is for terminals"
    assert command.main(SMALL) == command.DONE
    assert "8 kernels, 0 of them compiled" in capsys.readouterr().out
    assert len(compiled) == 8


def test_shapes(compiled, capsys):
    arguments = ["--cc", "9.0", "--shapes", "4096x6144x2048", "1023x1025x511", "--layouts", "NN,NT"]
    assert command.main(arguments) == command.DONE
    assert len(compiled) == 4
    assert command.main([*arguments, "--precision", "bf16x6"]) == command.DONE
    assert len(compiled) == 7, "one that decomposes, and two that multiply, for short sums and long ones"


def test_a_bundle_is_exported_checked_and_imported(compiled, capsys, tmp_path, monkeypatch):
    path = tmp_path / "kernels.bundle"
    assert command.main([*SMALL, "--export", str(path)]) == command.DONE
    assert capsys.readouterr().out.startswith(f"8 kernels, {path.stat().st_size / 1e6:.1f} MB, in {path}")
    assert command.main([*SMALL, "--check", str(path), "--sample", "3"]) == command.DONE
    assert capsys.readouterr().out == "3 kernels compiled again, 0 differ\n"
    monkeypatch.setattr(command, "machine_code", lambda cubin: [object()])
    assert command.main([*SMALL, "--check", str(path), "--sample", "99"]) == command.DIFFERS
    assert capsys.readouterr().out.endswith("8 kernels compiled again, 8 differ\n")
    assert cache.main(["--clear"]) == 0
    assert capsys.readouterr().out.startswith("8 kernels deleted")
    assert command.main(["--import", str(path)]) == command.DONE
    assert capsys.readouterr().out.startswith("8 kernels imported")
    before = len(compiled)
    assert command.main(SMALL) == command.DONE
    assert "8 kernels, 0 of them compiled" in capsys.readouterr().out
    assert len(compiled) == before
    assert cache.main([]) == 0
    assert "8 kernels more in the bundle that was imported" in capsys.readouterr().out
    (tmp_path / "cache" / kernel_files.IMPORTED).write_bytes(b"broken")
    assert cache.main([]) == 0
    assert "not a bundle of kernels); import one again, or delete it\n0 kernels, 0.0 MB of" in capsys.readouterr().out


def test_a_bundle_that_lacks_kernels_differs(compiled, capsys, tmp_path):
    path = tmp_path / "kernels.bundle"
    command.main(["--stages", "naive", "--cc", "8.0", "--export", str(path)])
    capsys.readouterr()
    assert command.main([*SMALL, "--check", str(path), "--sample", "99"]) == command.DIFFERS
    out = capsys.readouterr().out
    assert out.count("missing") == 6
    assert out.endswith("8 kernels compiled again, 6 differ\n")


def test_cache_lists_its_kernels(compiled, capsys, tmp_path, monkeypatch):
    command.main(SMALL)
    capsys.readouterr()
    (tmp_path / "cache" / ("0" * 64 + ".kernel")).write_bytes(b"broken")
    monkeypatch.setenv("NUMBA_GEMM_CACHE_SIZE", "500M")
    assert cache.main([]) == 0
    title, *rows, total = capsys.readouterr().out.splitlines()
    assert title.split() == ["kernel", "cc", "compiled", "in", "size", "used", "made", "with"]
    assert sorted({row.split()[0] for row in rows}) == sorted(set(compiled))
    assert all(" 1.5 s " in row and " KB " in row and "numba=" in row for row in rows)
    assert total.startswith("8 kernels, 0.0 MB of at most 500 MB, in ")


@pytest.mark.parametrize("reason", ["can be written by other users", "Not a directory"])
def test_cache_that_cannot_be_read(reason, monkeypatch, tmp_path, capsys):
    place = tmp_path / "cache"
    place.touch() if reason == "Not a directory" else place.mkdir()
    place.chmod(0o777)
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(place))
    assert cache.main([]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: kernels cannot be kept in {place} (")
    assert reason in err


def test_cache_without_a_directory(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "none"))
    assert cache.main([]) == 0
    assert capsys.readouterr().out.startswith("0 kernels")


def test_cache_that_is_switched_off(monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "off")
    assert cache.main([]) == 0
    assert "switched off" in capsys.readouterr().out


REFUSED = {
    "cc": (command, ["--cc", "9"], "cc is '9'; expected a compute capability, as (9, 0), 9.0,"),
    "shape": (command, ["--cc", "9.0", "--shapes", "64x64"], "expected M, N and K, from 1 on, such as"),
    "no extent": (command, ["--cc", "9.0", "--shapes", "64x0x64"], "expected M, N and K, from 1 on"),
    "layout": (command, ["--cc", "9.0", "--layouts", "NN,XX"], "'XX' given; expected some of NN, NT, TN, TT"),
    "precision": (command, ["--cc", "9.0", "--precision", "fp7"], "precision is 'fp7'"),
    "stage": (command, ["--cc", "9.0", "--stages", "fast"], "stage is 'fast'; expected 'auto' or one of naive"),
    "jobs": (command, ["--jobs", "0"], "0 is not at least 1"),
    "bundle": (command, ["--import", "/no/such/bundle"], "No such file"),
    "two bundles": (command, ["--import", "a", "--export", "b"], "not allowed with"),
    "explain: no shape": (explain_command, [], "required: MxNxK"),
    "explain: shape": (explain_command, ["64x64"], "'64x64' given; expected M, N and K"),
    "explain: batch": (explain_command, ["64x64x64", "--batch", "0"], "0 is not at least 1"),
    "explain: layout": (explain_command, ["64x64x64", "--layout", "XX"], "invalid choice: 'XX'"),
    "explain: cc": (explain_command, ["64x64x64", "--cc", "1.0"], "compute capability 1.0 is not known"),
    "explain: stage": (explain_command, ["64x64x64", "--stage", "fast"], "stage is 'fast'"),
    "explain: stage of 8.0": (explain_command, ["9x9x9", "--cc", "7.5", "--stage", "async_copy"], "capability 8.0"),
    "explain: precision": (explain_command, ["64x64x64", "--precision", "fp7"], "precision is 'fp7'"),
    "explain: size": (explain_command, ["9999999999x9999999999x9"], "a size that can be addressed"),
    "autotune: seconds": (autotune_command, ["64x64x64", "--seconds", "0"], "expected a number of seconds above 0"),
    "autotune: candidates": (autotune_command, ["64x64x64", "--candidates", "x"], "'x' is not a whole number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_one_line(case, compiled, capsys):
    module, arguments, says = REFUSED[case]
    try:
        status = module.main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


def test_autotune_does_not_measure_the_simulator(monkeypatch, capsys):
    monkeypatch.setattr(autotune_command, "simulator_requested", lambda: True)
    assert autotune_command.main(["64x64x64"]) == 2
    assert capsys.readouterr().err == "error: the simulator has no times: unset NUMBA_ENABLE_CUDASIM, on a GPU\n"


def test_autotune_measures_operands_of_the_shape(monkeypatch, capsys):
    told = []
    monkeypatch.setattr(autotune_command, "simulator_requested", lambda: False)
    monkeypatch.setattr("numba_gemm.gemm.autotune.autotune", lambda *given, **options: told.append((given, options)))
    assert autotune_command.main(["64x48x32", "--layout", "TN", "--batch", "3", "--candidates", "2"]) == 0
    ((a, b), options) = told[0]
    assert (a.shape, a.strides) == ((3, 64, 32), (64 * 32 * 4, 4, 64 * 4))
    assert (b.shape, b.strides) == ((3, 32, 48), (32 * 48 * 4, 48 * 4, 4))
    assert options == {"precision": "ieee", "candidates": 2, "seconds": 30.0}


def test_autotune_prints_what_it_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune_command, "simulator_requested", lambda: False)
    try:
        assert autotune_command.main(["32x16x16", "--layout", "NT", "--candidates", "2", "--seconds", "1"]) == 0
    finally:
        numba_gemm.clear_autotuned()
    out = capsys.readouterr().out
    assert out.startswith("M=32, N=16, K=16 on ")
    assert "the fastest of 2 candidates" in out
    assert str(tmp_path) in out


EXPLAINED = {
    "square": (["512x256x128"], (512, 128), (128, 256), {}),
    "layouts": (["512x256x128", "--layout", "TT"], (128, 512), (256, 128), {}),
    "batch": (["64x48x32", "--batch", "5"], (5, 64, 32), (5, 32, 48), {}),
    "stage": (["512x256x128", "--stage", "vectorized"], (512, 128), (128, 256), {"stage": "vectorized"}),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_explain_tells_what_the_function_tells(case, capsys):
    """The function's description of arrays in device memory; for NumPy arrays on a GPU it adds copies."""
    arguments, a_shape, b_shape, options = EXPLAINED[case]
    a, b = np.empty(a_shape, np.float32), np.empty(b_shape, np.float32)
    if case == "layouts":
        a, b = a.T, b.T
    expected = dataclasses.replace(explain(a, b, **options), copies=Copies())
    assert explain_command.main(arguments) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cc", "sm_80"], ["108 SMs", "modelled on the A100", "Expected: "]),
        (["--cc", "8.9", "--stage", "naive"], ["Stage naive", "modelled on the GeForce RTX 4090"]),
        (["--cc", "8.0", "--precision", "bf16x6"], ["precision bf16x6", "operands decomposed first"]),
        (["--cc", "8.0", "--precision", "fp32_auto"], ["fp32_auto stands for ieee"]),
    ],
)
def test_explain_for_a_gpu_that_is_not_here(arguments, words, compiled, monkeypatch, capsys):
    monkeypatch.setattr("numba_gemm.runtime.device.device_count", lambda: 0)
    assert explain_command.main(["1024x1024x1024", *arguments]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert all(word in out for word in words), out
    assert out.count("\n") == 1


@pytest.mark.parametrize(("words", "size"), [("500M", 5e8), ("4g", 4e9), ("123", 123), ("2 KB", 2000)])
def test_size_limit(monkeypatch, words, size):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_SIZE", words)
    assert kernel_files.size_limit() == size


@pytest.mark.parametrize("words", ["", "much", "-1", "1T", "1.5G"])
def test_size_limit_that_is_no_size(monkeypatch, words):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_SIZE", words)
    with pytest.raises(ValueError, match="expected bytes, or a size such as 500M or 4G"):
        kernel_files.size_limit()
