"""Bundles of kernels: what is exported is found elsewhere, from the same sources, and nothing else is."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.compiled import CUBIN

import numba_gemm
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.ladder.stage import Variant
from numba_gemm.runtime import bundle, kernel_cache, kernel_files, kernel_key, private_files

COALESCED = STAGES["coalesced"]
KERNELS = [COALESCED.kernel_of(COALESCED.configs[0], aligned) for aligned in (True, False)]
CC = (9, 0)
CUBINS = [dataclasses.replace(CUBIN, name=f"k{i}", code=bytes([i] * 999), ptx="", log="") for i in range(3)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty cache, no bundle, and a process that has not warned yet."""
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("NUMBA_GEMM_BUNDLE", raising=False)
    monkeypatch.setattr(private_files, "_warned", set())
    monkeypatch.setattr(bundle, "PACKAGED", tmp_path / "packaged.bundle")
    return tmp_path / "cache"


def export(path, *cubins):
    """Write a bundle of the first kernels."""
    kernels = [(kernel_key.portable_key(kernel, CC), kernel.name, cubin, 1.5) for kernel, cubin in zip(KERNELS, cubins)]
    assert bundle.export(path, kernels) == path.stat().st_size
    return path


def found(kernel):
    return bundle.look_up(kernel_key.portable_key(kernel, CC))


def test_round_trip(tmp_path):
    path = export(tmp_path / "b", *CUBINS[:2])
    assert [bundle.read(path, kernel_key.portable_key(kernel, CC)) for kernel in KERNELS] == CUBINS[:2]
    assert bundle.read(path, kernel_key.portable_key(KERNELS[0], (8, 0))) is None
    assert bundle.contents_of(path) == {
        kernel_key.portable_key(kernel, CC): cubin for kernel, cubin in zip(KERNELS, CUBINS)
    }


def test_ptx_and_log_are_left_out(tmp_path):
    path = export(tmp_path / "b", dataclasses.replace(CUBINS[0], ptx="// ptx", log="log"))
    assert bundle.read(path, kernel_key.portable_key(KERNELS[0], CC)) == CUBINS[0]


def test_where_bundles_are_looked_up(place, tmp_path, monkeypatch):
    """Named by the environment, imported, with the package: the first that has the kernel."""
    assert found(KERNELS[0]) is None
    export(bundle.PACKAGED, CUBINS[0], CUBINS[0])
    assert found(KERNELS[0]) == CUBINS[0]
    assert bundle.import_bundle(export(tmp_path / "b", CUBINS[1])) == 1
    assert found(KERNELS[0]) == CUBINS[1]
    assert found(KERNELS[1]) == CUBINS[0], "the imported one does not have it"
    monkeypatch.setenv("NUMBA_GEMM_BUNDLE", str(export(tmp_path / "c", CUBINS[2])))
    assert found(KERNELS[0]) == CUBINS[2]
    assert kernel_files.clear_cache() == 0
    monkeypatch.delenv("NUMBA_GEMM_BUNDLE")
    assert found(KERNELS[0]) == CUBINS[0], "the imported one is cleared, too"


def test_the_cache_comes_first(place, tmp_path, monkeypatch):
    def compile_all(tasks, done, jobs):
        for i in range(len(tasks)):
            done(i, CUBINS[2], 0.0)

    monkeypatch.setattr(kernel_cache, "compile_all", compile_all)
    assert kernel_cache.fetch(KERNELS[0], CC)[:2] == (CUBINS[2], "compiler")
    monkeypatch.setenv("NUMBA_GEMM_BUNDLE", str(export(tmp_path / "b", *CUBINS[:2])))
    fetched = kernel_cache.fetch_all([(kernel, CC) for kernel in KERNELS])
    assert [one[:2] for one in fetched] == [(CUBINS[2], "cache"), (CUBINS[1], "bundle")]
    assert len(list(place.glob("*.kernel"))) == 1, "what a bundle has is not kept again"


def test_a_bundle_of_a_user_who_does_not_exist(place, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_BUNDLE", "~nosuchuser/a.bundle")
    with pytest.warns(private_files.CacheWarning, match=r"~nosuchuser/a.bundle cannot be used .*NUMBA_GEMM_BUNDLE"):
        assert found(KERNELS[0]) is None


def test_other_sources_find_nothing(place, tmp_path, monkeypatch):
    path = export(tmp_path / "b", *CUBINS)
    monkeypatch.setenv("NUMBA_GEMM_BUNDLE", str(path))
    for module in (kernel_key, bundle):
        monkeypatch.setattr(module, "SOURCES", "other")
    with pytest.raises(ValueError, match="made from other sources of numba_gemm; export it again"):
        bundle.import_bundle(path)
    with pytest.warns(private_files.CacheWarning, match="cannot be used .*made from other sources"):
        assert found(KERNELS[0]) is None
    monkeypatch.setattr(kernel_key, "SOURCES", None)
    assert kernel_key.portable_key(KERNELS[0], CC) is None


def test_other_releases_of_the_compiler_find_the_same(monkeypatch):
    before, own = kernel_key.portable_key(KERNELS[0], CC), kernel_key.key(KERNELS[0], CC)
    monkeypatch.setattr(kernel_key, "_toolchain", lambda: ("other",))
    assert kernel_key.portable_key(KERNELS[0], CC) == before
    assert kernel_key.key(KERNELS[0], CC) != own


def test_kernels_with_an_epilogue_do_not_travel():
    stage = STAGES["stream_k"]
    plain = Variant("along4", "along4", True)
    variants = plain, plain._replace(epilogue=lambda value, row, col: value)
    keys = [kernel_key.portable_key(stage.kernel_of(stage.configs[0], variant), CC) for variant in variants]
    assert keys[0] is not None
    assert keys[1] is None


BROKEN = {
    "empty": lambda contents: b"",
    "another file": lambda contents: b"PK" + contents,
    "no index": lambda contents: bundle.MAGIC,
    "index of another form": lambda contents: bundle.MAGIC + b"[1]\n",
    "empty index": lambda contents: bundle.MAGIC + b"{}\n",
    "cut off": lambda contents: contents[:-1],
    "another byte": lambda contents: contents[:-1] + bytes([contents[-1] ^ 1]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_bundle_warns_once(place, tmp_path, monkeypatch, case):
    path = export(tmp_path / "b", CUBINS[0])
    path.write_bytes(BROKEN[case](path.read_bytes()))
    with pytest.raises((ValueError, TypeError)):
        bundle.import_bundle(path)
    monkeypatch.setenv("NUMBA_GEMM_BUNDLE", str(path))
    with pytest.warns(private_files.CacheWarning, match="bundle of kernels .* cannot be used") as caught:
        assert [found(KERNELS[0]) for _ in range(3)] == [None] * 3
    assert len(caught) == 1
    assert str(caught[0].message).endswith(". Correct or unset NUMBA_GEMM_BUNDLE")


def test_a_named_bundle_that_is_not_there_warns_once(place, tmp_path, monkeypatch):
    export(bundle.PACKAGED, CUBINS[0])
    monkeypatch.setenv("NUMBA_GEMM_BUNDLE", str(tmp_path / "nowhere"))
    with pytest.warns(private_files.CacheWarning, match="nowhere.* Correct or unset NUMBA_GEMM_BUNDLE") as caught:
        assert [found(KERNELS[0]) for _ in range(3)] == [CUBINS[0]] * 3
    assert len(caught) == 1


def test_a_bundle_that_others_can_change_is_refused(place, tmp_path, monkeypatch):
    path = export(tmp_path / "b", CUBINS[0])
    path.chmod(0o666)
    monkeypatch.setenv("NUMBA_GEMM_BUNDLE", str(path))
    with pytest.warns(private_files.CacheWarning, match="can be written by other users"):
        assert found(KERNELS[0]) is None


def test_no_other_user_can_change_an_export(place, tmp_path):
    before = os.umask(0o002)
    try:
        path = export(tmp_path / "b", CUBINS[0])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    bundle.import_bundle(path)


@pytest.mark.parametrize(("version", "included"), [("standard", True), ("editable", False)])
def test_the_build_puts_a_bundle_into_a_wheel(tmp_path, monkeypatch, version, included):
    pytest.importorskip("hatchling")  # the build installs it
    source = Path(numba_gemm.__file__).parents[1] / "hatch_build.py"
    spec = importlib.util.spec_from_file_location("hatch_build", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "recorded_files", lambda root: {})
    monkeypatch.setattr(module.WheelFiles, "root", str(tmp_path))
    hook, path = module.WheelFiles.__new__(module.WheelFiles), export(tmp_path / "b", CUBINS[0])
    for named in ("", str(path)):
        data = {"force_include": {}}
        monkeypatch.setenv("NUMBA_GEMM_WHEEL_BUNDLE", named)
        hook.initialize(version, data)
        expected = {str(path.resolve()): "numba_gemm/kernels.bundle"} if named and included else {}
        assert data["force_include"] == expected
    monkeypatch.setenv("NUMBA_GEMM_WHEEL_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError) if included else nullcontext():
        hook.initialize(version, data)
    assert bundle.PACKAGED.name == "kernels.bundle"


def test_import_needs_a_cache(place, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "off")
    with pytest.raises(RuntimeError, match="switches the kernel cache off"):
        bundle.import_bundle(export(tmp_path / "b", CUBINS[0]))
