"""Operands for tests: random matrices, every layout that NumPy has for them, and the one comparison with float64."""

from __future__ import annotations

import numpy as np

from numba_gemm.device.units import VECTOR_BYTES
from numba_gemm.kernels.product import Layout
from numba_gemm.models.accuracy import compare, reference

NAN = np.float32(np.nan)


def filled(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rows, cols]).uniform(-1, 1, (rows, cols)).astype(np.float32)


def check(got, a, b, *, alpha=1.0, beta=0.0, c=None) -> None:
    expected, scale = reference(alpha, a, b, beta, c)
    comparison = compare(np.asarray(got), expected, scale, a.shape[1], alpha=alpha)
    assert comparison.ok, str(comparison)


def layout_of(x: np.ndarray) -> Layout:
    """Return the layout of a NumPy array."""
    return Layout(*x.shape, *x.strides, x.ctypes.data % VECTOR_BYTES)


def frozen(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def packed_field(x: np.ndarray) -> np.ndarray:
    """Float32 elements five bytes apart, so that most lie off every boundary."""
    records = np.zeros(x.shape, np.dtype([("value", "f4"), ("flag", "u1")]))
    records["value"] = x
    return records["value"]


def spaced(x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Every `rows`-th row and `cols`-th column of a larger array; negative steps run backwards."""
    larger = np.full((x.shape[0] * abs(rows), x.shape[1] * abs(cols)), NAN)
    view = larger[::rows, ::cols]
    view[...] = x
    return view


def inside(x: np.ndarray) -> np.ndarray:
    larger = np.full((x.shape[0] + 5, x.shape[1] + 3), NAN)
    view = larger[2:-3, 1:-2]
    view[...] = x
    return view


# Arrays with the elements of x, laid out in every way that NumPy has.
LAYOUTS = {
    "rows": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "inside": inside,
    "every other row": lambda x: spaced(x, 2, 1),
    "every third column": lambda x: spaced(x, 1, 3),
    "reversed": lambda x: spaced(x, -1, -1),
    "reversed, spaced, by columns": lambda x: spaced(x.T, -2, -3).T,
    "packed records": packed_field,
}
# These repeat elements, so they can be operands but not results.
REPEATING = {
    "one row repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "one column repeated": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one element": lambda x: np.broadcast_to(x[0, 0], x.shape),
}


class Exported:
    """Speaks DLPack, and nothing else; `device` is what it says of where it is."""

    def __init__(self, array, device=(1, 0), versioned=True):
        self.array, self.device, self.versioned, self.streams = array, device, versioned, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument")
        self.streams.append(stream)
        options.pop("dl_device", None)
        return self.array.__dlpack__(**options)
