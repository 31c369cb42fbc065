"""Decomposed operands on the simulator, and the sums of a warp, for tests of the tensor cores' kernels."""

from __future__ import annotations

import numpy as np

from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TensorPrecision, TensorVariant, decompose
from numba_gemm.kernels.tensor_core.config import MARKED_WORDS, ORDINARY, ROW_WORDS, parts_shape, words_per_row

LAYOUTS = {
    "rows": lambda x: x,
    "columns": np.asfortranarray,
    "reversed": lambda x: x[::-1, ::-1],
    "aligned": lambda x: np.ascontiguousarray(np.pad(x, ((0, 0), (0, -x.shape[1] % 4))))[:, : x.shape[1]],
}


def recomposed(precision: TensorPrecision, parts: np.ndarray, mn: int, k: int) -> np.ndarray:
    """The parts as float64, (parts, mn, k), from where `stage` says that they lie, without scales and factors."""
    slots = parts.shape[0] // precision.parts
    words = parts.shape[1] // words_per_row(precision) * ROW_WORDS
    narrow = np.ascontiguousarray(parts[: precision.parts * slots, :words])
    chunks = narrow.view(np.uint32).reshape(precision.parts, slots, -1, 8, 4)
    rows = np.arange(chunks.shape[2])
    order = np.arange(8)[None, :] ^ (rows % 8)[:, None]
    straight = np.take_along_axis(chunks, order[None, None, :, :, None], axis=3).reshape(
        precision.parts, slots, -1, ROW_WORDS
    )
    if precision.kind == "tf32":
        values = straight.view(np.float32)
    elif precision.kind == "f16":
        values = straight.view(np.float16)
    else:
        halves = np.stack([straight << 16, straight & np.uint32(0xFFFF0000)], axis=-1)
        values = np.ascontiguousarray(halves).view(np.float32).reshape(*straight.shape[:3], -1)
    whole = values.transpose(0, 2, 1, 3).reshape(precision.parts, chunks.shape[2], -1).astype(np.float64)
    beyond = whole.copy()
    beyond[:, :mn, :k] = 0
    assert not beyond.any(), "beyond the operand's edges the parts are zero"
    if precision.scaled:
        whole[:, :mn] *= reciprocals_in(parts[-1, :mn])[None, :, None]
    whole[1:] /= precision.second_factor
    return whole[:, :mn, :k]


def reciprocals_in(words: np.ndarray) -> np.ndarray:
    """The reciprocals of scales, in float64, from words of two powers of two in BF16 each."""
    bits = np.ascontiguousarray(words).view(np.uint32)
    low, high = ((half & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64) for half in (bits << 16, bits))
    return low * high


def words_of_scales(logarithms: np.ndarray) -> np.ndarray:
    """Words that divide by scales of these binary logarithms."""
    low, high = ((2.0**-half).astype(np.float32).view(np.uint32) for half in (logarithms // 2, (logarithms + 1) // 2))
    return (low >> 16 | high).view(np.float32)


def aligned_empty(rows: int, cols: int) -> np.ndarray:
    """NaNs at a multiple of 16 bytes."""
    flat = np.full(rows * cols + 4, np.nan, np.float32)
    return flat[-flat.ctypes.data % 16 // 4 :][: rows * cols].reshape(rows, cols)


def simulated_decomposition(precision: TensorPrecision, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Parts of both, as (mn, k), for tiles of 32 rows."""
    from numba_gemm.simulator import scheduler

    k = x.shape[1]
    parts = [aligned_empty(*parts_shape(precision, mn, k, 32)) for mn in (x.shape[0], y.shape[0])]
    padded = [part.shape[1] // words_per_row(precision) for part in parts]
    blocks = sum(part.shape[0] // precision.parts * (rows // 32) for part, rows in zip(parts, padded))
    operands = (x, parts[0], y, parts[1])
    if precision.scaled:
        spans = max(1, -(-k // decompose.SPAN))
        large = [aligned_empty(spans, rows) for rows in padded]
        each = sum(one.shape[0] * (one.shape[1] // 32) for one in large)
        scheduler.run(decompose.build_row_maxima(), (each, 1), decompose.THREADS, (x, large[0], y, large[1], (0,) * 4))
        operands = (x, parts[0], large[0], y, parts[1], large[1])
    scheduler.run(decompose.build(precision), (blocks, 1), decompose.THREADS, (*operands, (0,) * len(operands)))
    return parts


def marks_of(x, slot_bits):
    """Decomposed rows with nothing but their marks, (slots, ...)."""
    mn, k = x.shape
    slots = max(1, -(-k >> slot_bits))
    parts = np.full((slots, MARKED_WORDS * mn), np.nan, np.float32)
    for slot in range(slots):
        own = x[:, slot << slot_bits : slot + 1 << slot_bits]
        parts[slot, ROW_WORDS * mn :] = (~(np.abs(own) <= ORDINARY)).any(axis=1)
    return parts


def float32_sums(x, y):
    """``x @ y`` by float32 multiply-adds in order of k."""
    acc = np.zeros((x.shape[0], y.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(x.shape[1]):
            acc += x[:, k, None] * y[k]
    return acc


class Warp:
    """A warp's sums of a C of (m, n), 16 * deep rows and 8 * across columns, and what it writes."""

    def __init__(self, precision, m, n, k, *, deep=2, across=4):
        generator = np.random.default_rng([m, n, k])
        self.precision, self.m, self.n, self.deep, self.across = TENSOR_PRECISIONS[precision], m, n, deep, across
        self.x = generator.standard_normal((m, k)).astype(np.float32)
        self.y = generator.standard_normal((k, n)).astype(np.float32)
        self.old = generator.standard_normal((m, n)).astype(np.float32)
        self.sums = generator.standard_normal((16 * deep, 8 * across)).astype(np.float32)
        self.scales = generator.integers(-40, 40, (2, 64)).astype(np.float32)
        # Nothing is marked. Columns are read in pairs.
        self.parts = [aligned_empty(3, MARKED_WORDS * 64) for _ in self.scales]
        for parts, scales in zip(self.parts, self.scales):
            parts[...] = 0
            parts[-1, :64] = words_of_scales(scales)

    def store(self, layout, alpha, beta, epilogue=None, vectors=(), partial=False):
        """C after all lanes have stored; it lies among NaNs, which stay."""
        from numba import cuda, float32, int64

        from numba_gemm.kernels.tensor_core.epilogue import sums_store
        from numba_gemm.simulator import scheduler

        write = sums_store(TensorVariant(self.precision, epilogue, len(vectors)), self.across, self.deep)
        across, shape = self.across, (self.deep * self.across, 4)

        @cuda.jit
        def kernel(alpha, sums, beta, c, a, b, x, y, vectors):
            lane = cuda.threadIdx.x
            total = cuda.local.array(shape, float32)
            for j in range(shape[0]):
                for q in range(4):
                    row, col = j // across * 16 + q // 2 * 8 + lane // 4, j % across * 8 + lane % 4 * 2 + q % 2
                    total[j, q] = sums[row, col]
            write(c, int64(lane // 4), int64(lane % 4 * 2), alpha, total, beta, a, b, x, y, vectors, partial)

        m, n = self.m, self.n
        if layout == "turned":
            around = np.full((n + 2, m + 3), np.nan, np.float32)
            c = around[1:-1, 1:-2].T
        else:  # in pairs: an even start, and an even distance of rows
            around = np.full((m + 2, (n + 5) // 2 * 2), np.nan, np.float32)
            c = around[1:-1, 2 : n + 2]
        if beta:
            c[...] = self.old
        operands = (np.float32(alpha), self.sums, np.float32(beta), c, *self.parts, self.x, self.y, vectors)
        with np.errstate(all="ignore"):
            scheduler.run(kernel, (1, 1), 32, operands)
        found = c.copy()
        c[...] = np.nan
        assert np.isnan(around).all(), "nothing beside C is written"
        return found
