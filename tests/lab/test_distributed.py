"""The experiment `distributed`, without ranks: what it claims, and sizes that it refuses."""

import pandas as pd
import pytest

from numba_gemm.lab.bench import distributed


@pytest.mark.parametrize(
    ("gpus", "n", "placements", "precision", "least"),
    [
        (2, 32768, distributed.BY_ROWS, "fp16x3", 0.97),
        (4, 65536, distributed.BY_ROWS, "bf16x6", 0.94),
        (8, 65536, distributed.BY_ROWS, "bf16x6", 0.9),
        (8, 65536, distributed.BY_ROWS, "ieee", 0.94),
        (4, 16384, distributed.BY_ROWS, "ieee", 0.95),
        (2, 65536, distributed.BY_ROWS, "ieee", distributed.OTHER_RATIO),
        (2, 16384, distributed.BLOCKS, "ieee", distributed.OTHER_RATIO),
    ],
)
@pytest.mark.parametrize("above", [0.001, -0.001])
def test_goals_depend_on_gpus_size_and_precision(gpus, n, placements, precision, least, above):
    row = {"placements": placements, "m": n, "n": n, "k": n, "precision": precision, "gpus": gpus}
    row |= {"error": 0.0, "ratio": least + above, "addmm_tflops": 1.0, "addmm_alone_tflops": 2.0}
    found = distributed.EXPERIMENT.claims(pd.DataFrame([row]))
    (held,) = (holds for sentence, holds in found.items() if "of the products alone" in sentence)
    assert held == (above > 0)


def test_gpus_divide_all_sizes():
    with pytest.raises(ValueError, match=r"which is 3: not \[16\]"):
        next(distributed.distributed(gpus=3, sizes=(9, 16)))
