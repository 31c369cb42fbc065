"""Process that Nsight Compute observes: launches each stage once. Arguments: names of stages, and M,N,K."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import LadderStage
from numba_gemm.lab.bench.buffers import DeviceBuffers, choose_library
from numba_gemm.lab.bench.cases import Shape, parse_shape
from numba_gemm.lab.bench.counters import SEED
from numba_gemm.lab.bench.ncu_pages import shape_of
from numba_gemm.runtime.device import synchronize
from numba_gemm.runtime.launch import launch


def launch_each(stages: Iterable[LadderStage], shape: Shape) -> None:
    """Launch every stage once."""
    library = choose_library(simulated=False)
    made: dict[Shape, DeviceBuffers] = {}
    for stage in stages:
        own = shape_of(stage, shape)
        if own not in made:
            made[own] = DeviceBuffers.random(library, own, SEED)
        a, b, c = made[own].matrices
        launch(stage, stage.configs[0], 1.0, a, b, 0.0, c)
        synchronize()


if __name__ == "__main__":
    launch_each([STAGES[name] for name in sys.argv[1].split(",")], parse_shape(sys.argv[2]))
