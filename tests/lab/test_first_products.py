"""The benchmark of a process's first products, without a GPU: its cases, and the processes that it runs."""

from __future__ import annotations

import json
import logging
import re

import pandas as pd
import pytest

from numba_gemm.lab.bench import first_products as first
from numba_gemm.lab.bench import first_products_child as child


def test_products():
    found = {kind: list(child.products(kind)) for kind in child.KINDS}
    assert {kind: len(products) for kind, products in found.items()} == dict(zip(child.KINDS, (1, 15, 6)))
    step = found["training step"]
    assert {layout for _, layout in step} == {"NT", "NN", "TN"}
    assert len({m * n * k for (m, n, k), _ in step}) == len(child.LAYERS) - 1, "of a layer, and of its transpose"
    assert all(any(extent % 4 for extent in shape) for shape, _ in found["odd shapes"])


def test_processes(tmp_path, monkeypatch):
    """Each cache is filled by the first process alone; a bundle leaves nothing in it."""
    ran = []

    def run(arguments, **variables):
        ran.append((arguments, variables))
        folder = tmp_path / variables["NUMBA_GEMM_CACHE_DIR"]
        if arguments[1] == first.CHILD and "NUMBA_GEMM_BUNDLE" not in variables:
            folder.mkdir(exist_ok=True)
            (folder / "1.kernel").touch()
        return json.dumps({"products_s": 1.0}), 2.0

    monkeypatch.setattr(first, "run", run)
    frame = pd.DataFrame(first.measured(["ieee"], ["9.0"], tmp_path))
    assert list(frame["case"][:3]) == ["precompile, ieee", "precompile, all precisions", "export of a bundle"]
    cases = frame[3:]
    assert list(zip(cases["case"], cases["cache"])) == [(kind, cache) for kind in child.KINDS for cache in first.CACHES]
    assert list(cases["kernels_kept"]) == [1, 1, 0] * 3
    assert (cases["products_s"] == 1.0).all()
    assert len({variables["NUMBA_GEMM_CACHE_DIR"] for _, variables in ran}) == 3 + 2 * len(child.KINDS)
    exported = ran[2][0][ran[2][0].index("--export") + 1]
    assert {variables.get("NUMBA_GEMM_BUNDLE") for _, variables in ran} == {None, exported}


def test_one_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(first, "run", lambda arguments, **variables: (json.dumps({"products_s": 1.0}), 2.0))
    frame = pd.DataFrame(first.measured(["ieee"], ["9.0"], tmp_path, ["empty"]))
    assert list(zip(frame["case"], frame["cache"])) == [(kind, "empty") for kind in child.KINDS]
    with pytest.raises(ValueError, match="invalid choice: 'cold'; expected one of empty, filled, bundle"):
        first.EXPERIMENT.parameters["caches"].parse("empty,cold")


def test_a_process_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"-c raise SystemExit\(3\) failed"):
        first.run(["-c", "raise SystemExit(3)"])
    assert first.run(["-c", "print(1); print(2)"])[0] == "2"


def test_messages_of_compilation_are_kept():
    logger = logging.getLogger("numba_gemm.kernels")
    level, messages = logger.level, child.Messages()
    try:
        logger.info("kernel %s: compiled", "k")
        logger.debug("kernel k: found")
    finally:
        logger.removeHandler(messages)
        logger.setLevel(level)
    (text,) = messages.texts
    assert re.fullmatch(r"\d\.\d\d s: kernel k: compiled", text)
