"""The command ``numba-gemm``, without a compiler: what it compiles, exports, checks, imports and lists."""

from __future__ import annotations

import dataclasses

import pytest
from support.compiled import CUBIN

from numba_gemm.gemm import command, precision
from numba_gemm.gemm import precompile as precompiling
from numba_gemm.runtime import bundle, kernel_cache, private_files

SMALL = ["precompile", "--stages", "naive,coalesced", "--cc", "8.0,9.0"]  # two variants of each


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
    arguments = ["precompile", "--cc", "9.0", "--shapes", "4096x6144x2048", "1023x1025x511", "--layouts", "NN,NT"]
    assert command.main(arguments) == command.DONE
    assert len(compiled) == 4
    assert command.main([*arguments, "--precision", "bf16x6"]) == command.DONE
    assert len(compiled) == 8, "two that decompose, and two that multiply, for short sums and long ones"


def test_a_bundle_is_exported_checked_and_imported(compiled, capsys, tmp_path, monkeypatch):
    path = tmp_path / "kernels.bundle"
    assert command.main([*SMALL, "--export", str(path)]) == command.DONE
    assert capsys.readouterr().out.startswith(f"8 kernels, {path.stat().st_size / 1e6:.1f} MB, in {path}")
    assert command.main([*SMALL, "--check", str(path), "--sample", "3"]) == command.DONE
    assert capsys.readouterr().out == "3 kernels compiled again, 0 differ\n"
    monkeypatch.setattr(command, "machine_code", lambda cubin: [object()])
    assert command.main([*SMALL, "--check", str(path), "--sample", "99"]) == command.DIFFERS
    assert capsys.readouterr().out.endswith("8 kernels compiled again, 8 differ\n")
    assert command.main(["cache", "--clear"]) == command.DONE
    assert capsys.readouterr().out.startswith("8 kernels deleted")
    assert command.main(["precompile", "--import", str(path)]) == command.DONE
    assert capsys.readouterr().out.startswith("8 kernels imported")
    before = len(compiled)
    assert command.main(SMALL) == command.DONE
    assert "8 kernels, 0 of them compiled" in capsys.readouterr().out
    assert len(compiled) == before
    assert command.main(["cache"]) == command.DONE
    assert "8 kernels more in the bundle that was imported" in capsys.readouterr().out


def test_a_bundle_that_lacks_kernels_differs(compiled, capsys, tmp_path):
    path = tmp_path / "kernels.bundle"
    command.main(["precompile", "--stages", "naive", "--cc", "8.0", "--export", str(path)])
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
    assert command.main(["cache"]) == command.DONE
    title, *rows, total = capsys.readouterr().out.splitlines()
    assert title.split() == ["kernel", "cc", "compiled", "in", "size", "used", "made", "with"]
    assert sorted({row.split()[0] for row in rows}) == sorted(set(compiled))
    assert all(" 1.5 s " in row and " KB " in row and "numba=" in row for row in rows)
    assert total.startswith("8 kernels, 0.0 MB of at most 500 MB, in ")


def test_cache_that_is_switched_off(monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "off")
    assert command.main(["cache"]) == command.DONE
    assert "switched off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["precompile", "--cc", "9"], "expected compute capabilities such as 8.0,9.0"),
        (["precompile", "--cc", "9.0", "--shapes", "64x64"], "expected M, N and K, such as"),
        (["precompile", "--cc", "9.0", "--shapes", "64x0x64"], "expected M, N and K, from 1 on"),
        (["precompile", "--cc", "9.0", "--shapes", "64x64x64", "--layouts", "XX"], "expected 'NN', 'NT'"),
        (["precompile", "--cc", "9.0", "--precision", "fp7"], "precision is 'fp7'"),
        (["precompile", "--import", "/no/such/bundle"], "No such file"),
    ],
)
def test_errors_are_one_line(compiled, capsys, arguments, says):
    assert command.main(arguments) == command.UNUSABLE
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("numba-gemm: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("words", "size"), [("500M", 5e8), ("4g", 4e9), ("123", 123), ("2 KB", 2000)])
def test_size_limit(monkeypatch, words, size):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_SIZE", words)
    assert command.kernel_files.size_limit() == size


@pytest.mark.parametrize("words", ["", "much", "-1", "1T", "1.5G"])
def test_size_limit_that_is_no_size(monkeypatch, words):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_SIZE", words)
    with pytest.raises(ValueError, match="expected bytes, or a size such as 500M or 4G"):
        command.kernel_files.size_limit()
