"""Every stage in every precision: calls, plans and descriptions agree in their launches."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.array_libraries import half_tensor, tensor

from numba_gemm import explain, plan, tiled_sgemm
from numba_gemm.gemm import precompile as precompiling
from numba_gemm.gemm.precision import KNOWN
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.tensor_core.tma_stage import TmaStage

PAIRS = [(stage.name, precision) for stage in STAGES.values() for precision in stage.precisions]
DTYPES = {"float32": tensor, "float16": half_tensor}


def bias(value, row, col, vector):
    return value + vector[col]


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float16"), ("float16", "float32")])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(("stage", "precision"), [*PAIRS, *(("auto", precision) for precision in KNOWN)])
def test_calls_plans_and_descriptions_agree(torch, gpu, checked, stage, precision, batch, dtypes):
    gpu.computes = False
    known = STAGES.get(stage)
    if isinstance(known, TmaStage) and dtypes != ("float32", "float32"):
        with pytest.raises(ValueError, match="tensor maps cannot describe these operands; expected float32"):
            plan(64, 64, 128, batch=batch, stage=stage, precision=precision, dtype=dtypes)
        return
    with_vector = {"epilogue": bias}
    ways = [{}] if known is not None and not known.takes_epilogue else [{}, with_vector]
    a, b = (
        DTYPES[dtype](np.zeros((*batch, *shape))) for dtype, shape in zip(dtypes, ((64, 128), (128, 64)), strict=True)
    )
    c, vector = tensor(np.zeros((*batch, 64, 64))), tensor(np.zeros(64))
    for way in ways:
        arguments = {"epilogue_args": (vector,)} if way else {}
        options = {"stage": stage, "precision": precision, **way}
        multiply = plan(64, 64, 128, batch=batch, dtype=dtypes, **options)
        told, found = explain(a, b, c, **options, **arguments), []
        for call in (partial(tiled_sgemm, **options), multiply):
            for _ in range(2):  # the second one takes the fast path
                with gpu.recording() as made:
                    call(a, b, c, **arguments)
                found.append([(did.kernel, did.grid, did.block) for did in made])
        assert found[1:] == found[:-1]
        assert told.launches == len(found[0])
        assert told.stage == multiply.stage == (stage if stage != "auto" else multiply.stage)


@pytest.mark.parametrize(("stage", "precision"), PAIRS)
def test_every_pair_is_precompiled(monkeypatch, stage, precision):
    monkeypatch.setattr(precompiling, "SIMULATOR", False)
    cc = (9, 0) if STAGES[stage].runs_on((9, 0)) else STAGES[stage].min_cc
    found = precompiling.kernels_of(stage, cc, precision)
    assert stage in {name for name, *_ in found}
