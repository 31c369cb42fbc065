"""Shared memory turns a strided read into a coalesced one, and padding a tile removes its bank conflicts."""

from typing import Any

import pandas as pd
from numba import cuda, float32, uint32

from numba_gemm.lab.memory import machine
from numba_gemm.lab.memory.narrow_product import PLOT, Accesses, W, compare, integers


@machine.kernel("float32[:, ::1], float32[:, ::1]")
def strided(a: Any, c: Any) -> None:
    """Read two rows of A per thread; the second one differs between the lanes of a warp."""
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    acc = float32(0)
    for i in range(uint32(W)):
        acc += a[row, i] * a[col, i]
    c[row, col] = acc


def through_shared(name: str, width: int) -> Any:
    """Return a kernel that reads rows of A coalesced, and transposes them into a tile with rows of this width."""

    @machine.kernel("float32[:, ::1], float32[:, ::1]", name)
    def through_shared(a: Any, c: Any) -> None:
        a_tile = cuda.shared.array((W, W), float32)
        transposed_tile = cuda.shared.array((W, width), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * cuda.blockDim.y + y
        col = cuda.blockIdx.x * cuda.blockDim.x + x
        a_tile[y, x] = a[row, x]
        transposed_tile[x, y] = a[cuda.blockIdx.x * cuda.blockDim.x + y, x]
        cuda.syncthreads()  # each column of transposed_tile is written by one warp and read by all
        acc = float32(0)
        for i in range(uint32(W)):
            acc += a_tile[y, i] * transposed_tile[i, x]
        c[row, col] = acc

    return through_shared


WIDTHS = {"coalesced": W, "padded": W + 1}  # row width of the transposed tile
KERNELS: dict[str, Any] = {"strided": strided, **{name: through_shared(name, width) for name, width in WIDTHS.items()}}


ACCESSES: dict[str, Accesses] = {
    "strided": [("global", 0, W), ("global", W, W), ("global", 1, 1)],
    **{
        name: [("global", 1, 3), ("store", 1, 1), ("store", width, 1), ("load", 0, W), ("load", 1, W)]
        for name, width in WIDTHS.items()
    },
}
"""Requests of a warp by kernel, as in `narrow_product`."""


def product_with_transpose(m: int = 8192, rounds: int = machine.ROUNDS) -> pd.DataFrame:
    """Multiply an m x 32 matrix by its transpose with each kernel.

    One row per kernel, with the columns of `narrow_product`; A counts once in ``moved_mb``.

    Parameters
    ----------
    m: Multiple of 32.
    """
    a = integers(m, W, 0)
    return compare(KERNELS, ACCESSES, (a,), a @ a.T, rounds)


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    at = frame.set_index("kernel")
    passes, gb_s, allowed = at["passes_a_warp"], at["gb_s"], at["predicted_by_hits_gb_s"]
    return {
        "a warp takes 1057, 100 and 69 passes": list(passes[list(KERNELS)]) == [1057, 100, 69],
        "coalesced reads are more than five times as fast as strided ones": gb_s["coalesced"] > 5 * gb_s["strided"],
        "without bank conflicts the same is faster by more than a tenth": gb_s["padded"] > 1.1 * gb_s["coalesced"],
        "no kernel is faster than its passes allow, within a tenth": gb_s < 1.1 * allowed,
        "every kernel reaches more than half of what its passes allow": gb_s > allowed / 2,
    }


SMALL = {"m": 64, "rounds": 1}
EXPERIMENT = machine.experiment(
    product_with_transpose, "9.2.3.3", claims, PLOT, SMALL, KERNELS.values(), allowed={"m": W}
)
