"""Operations and minimum memory traffic of a matrix multiplication, and the roofline of a device.

Nothing here needs a GPU. One multiply-add counts as two floating-point operations (FLOP), and one float32 as four
bytes.
"""

from __future__ import annotations

from ..device.units import FLOAT32_BYTES
from ..typing import ComputeCapability
from .gpu_names import compute_capability, dotted

# FP32 multiply-adds that one multiprocessor starts per clock, by compute capability.
# Source: CUDA C++ Programming Guide, section "Arithmetic Instructions", table of throughputs
# (32-bit floating-point add, multiply, multiply-add).
FP32_LANES_PER_SM = {
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 7): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (11, 0): 128,
    (12, 0): 128,
    (12, 1): 128,
}


def gemm_flops(m: int, n: int, k: int) -> int:
    """Return the FLOP of an (m, k) by (k, n) product: one multiply and one add for each of m*n*k terms."""
    return 2 * m * n * k


def gemm_bytes(m: int, n: int, k: int, beta: float = 0.0) -> int:
    """Return the fewest bytes of device memory moved: A and B read once, C written once, and read once if beta."""
    return FLOAT32_BYTES * (m * k + k * n + m * n * (2 if beta else 1))


def arithmetic_intensity(m: int, n: int, k: int, beta: float = 0.0) -> float:
    """Return the FLOP per byte of device memory at the fewest bytes possible (0 for a product without terms)."""
    moved = gemm_bytes(m, n, k, beta)
    return gemm_flops(m, n, k) / moved if moved else 0.0


def fp32_peak(sm_count: int, clock_hz: float, cc: ComputeCapability) -> float:
    """Return the FP32 peak in FLOP/s: multiprocessors x lanes x 2 FLOP per lane and clock x clock.

    Raises
    ------
    ValueError
        For a compute capability that is not in `FP32_LANES_PER_SM`.
    """
    cc = compute_capability(cc)
    if cc not in FP32_LANES_PER_SM:
        known = ", ".join(map(dotted, sorted(FP32_LANES_PER_SM)))
        raise ValueError(f"compute capability {dotted(cc)}: FP32 lanes per multiprocessor are known for {known}")
    return 2.0 * sm_count * FP32_LANES_PER_SM[cc] * clock_hz


def roofline(intensity: float, peak: float, bandwidth: float) -> float:
    """Return the attainable FLOP/s at an arithmetic intensity (FLOP/byte), given peak (FLOP/s) and bandwidth (byte/s).

    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
    """
    return min(peak, intensity * bandwidth)
