"""Number of blocks of a kernel that a multiprocessor holds at once, and the resources that limit it; needs no GPU.

A block becomes resident once its warps, registers and shared memory fit beside those of the resident blocks. Sources:
CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute Capability", for the
resources of a multiprocessor; NVIDIA's ``cuda_occupancy.h``, part of the CUDA toolkit, for their allocation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..device.units import WARP, ceil_div
from ..typing import ComputeCapability
from .gpu_names import compute_capability, dotted

__all__ = ["LIMITS", "Occupancy", "SmLimits", "occupancy"]

MAX_THREADS = 1024  # per block
MAX_REGISTERS = 255  # per thread
REGISTERS = 65_536  # per SM
PARTITIONS = 4  # per SM, each with a quarter of its registers
REGISTER_UNIT = 256  # granularity of the allocation of registers to a warp
KB = 1024


@dataclass(frozen=True)
class SmLimits:
    """Limits of a multiprocessor of one compute capability, and its granularity of shared memory.

    Attributes
    ----------
    blocks, warps : int
        Largest number of resident blocks and warps.
    shared : int
        Bytes of shared memory for all blocks.
    shared_per_block : int
        Largest number of bytes of shared memory that one block may request.
    shared_reserved : int
        Bytes that the system reserves in every block.
    shared_unit : int
        Granularity of the allocation to a block, in bytes.
    """

    blocks: int
    warps: int
    shared: int
    shared_per_block: int
    shared_reserved: int = KB
    shared_unit: int = 128


LIMITS: dict[tuple[int, int], SmLimits] = {
    (7, 5): SmLimits(16, 32, 64 * KB, 64 * KB, shared_reserved=0, shared_unit=256),
    (8, 0): SmLimits(32, 64, 164 * KB, 163 * KB),
    (8, 6): SmLimits(16, 48, 100 * KB, 99 * KB),
    (8, 7): SmLimits(16, 48, 164 * KB, 163 * KB),
    (8, 9): SmLimits(24, 48, 100 * KB, 99 * KB),
    (9, 0): SmLimits(32, 64, 228 * KB, 227 * KB),
    (10, 0): SmLimits(32, 64, 228 * KB, 227 * KB),
    (10, 3): SmLimits(32, 64, 228 * KB, 227 * KB),
    (12, 0): SmLimits(24, 48, 100 * KB, 99 * KB),
    (12, 1): SmLimits(24, 48, 100 * KB, 99 * KB),
}
"""Limits by compute capability."""


@dataclass(frozen=True)
class Occupancy:
    """Number of blocks of a kernel that a multiprocessor holds at once, and the resources that limit it.

    Attributes
    ----------
    blocks, warps : int
        Number held at once by one multiprocessor; 0 if no block fits.
    fraction : float
        Fraction of the warps that the multiprocessor can hold.
    limits : mapping of str to int
        Number of blocks that each resource alone would allow: "blocks", "warps", "registers", "shared memory".
    limiters : tuple of str
        The resources that allow the fewest.
    threads, registers, shared : int
        Threads per block, registers per thread, and bytes of shared memory per block (static and dynamic).
    cc : tuple of int
        Compute capability.
    """

    blocks: int
    warps: int
    fraction: float
    limits: Mapping[str, int] = field(hash=False)
    limiters: tuple[str, ...]
    threads: int
    registers: int
    shared: int
    cc: tuple[int, int]

    def __str__(self) -> str:
        allowed = ", ".join(f"{name} {count}" for name, count in self.limits.items())
        return (
            f"{self.blocks} blocks ({self.warps} warps, {100 * self.fraction:.1f} %) on a multiprocessor of compute "
            f"capability {self.cc[0]}.{self.cc[1]}, limited by {' and '.join(self.limiters)}; each alone would allow: "
            f"{allowed}. Threads per block: {self.threads}, registers per thread: {self.registers}, bytes of shared "
            f"memory per block: {self.shared:,}"
        )


def occupancy(threads: int, registers: int, shared: int, cc: ComputeCapability) -> Occupancy:
    """Compute the number of blocks that a multiprocessor holds at once.

    A warp's registers come from one of the multiprocessor's four partitions, in units of 256. A block's shared memory
    includes the kilobyte that the system reserves from compute capability 8.0 on, and is rounded up to whole units.

    Parameters
    ----------
    threads : int
        Threads per block, 1 to 1024.
    registers : int
        32-bit registers per thread, 1 to 255.
    shared : int
        Bytes of shared memory per block, static and dynamic.
    cc : tuple of int, float, int or str
        Compute capability: (9, 0), 9.0, 90, "9.0" or "sm_90".

    Raises
    ------
    ValueError
        For a compute capability that is not in `LIMITS`, or for resources that no block can have.
    """
    cc = compute_capability(cc)
    if cc not in LIMITS:
        known = ", ".join(map(dotted, LIMITS))
        raise ValueError(f"cc is {cc!r}; expected one of {known}; pass (9, 0) for an H200")
    has = LIMITS[cc]
    for name, value, least, most in (
        ("threads", threads, 1, MAX_THREADS),
        ("registers", registers, 1, MAX_REGISTERS),
        ("shared", shared, 0, has.shared_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(
                f"{name} is {value}; expected {least} to {most} on compute capability {cc[0]}.{cc[1]}; make the tiles "
                "smaller, or spread them over other threads"
            )
    warps = ceil_div(threads, WARP)
    warp_registers = _rounded(registers * WARP, REGISTER_UNIT)
    # A launch is refused unless every partition has room for an equal share of the block's registers.
    fits = warp_registers * _rounded(warps, PARTITIONS) <= REGISTERS
    register_warps = PARTITIONS * (REGISTERS // PARTITIONS // warp_registers) if fits else 0
    block_shared = _rounded(shared + has.shared_reserved, has.shared_unit)
    limits = {
        "blocks": has.blocks,
        "warps": has.warps // warps,
        "registers": register_warps // warps,
        "shared memory": has.shared // block_shared if block_shared else has.blocks,
    }
    blocks = min(limits.values())
    return Occupancy(
        blocks=blocks,
        warps=blocks * warps,
        fraction=blocks * warps / has.warps,
        limits=limits,
        limiters=tuple(name for name, count in limits.items() if count == blocks),
        threads=threads,
        registers=registers,
        shared=shared,
        cc=cc,
    )


def _rounded(amount: int, unit: int) -> int:
    """Round an amount up to whole units."""
    return ceil_div(amount, unit) * unit
