"""The products of one slot of k, as every stage of the tensor cores makes them."""

from __future__ import annotations

from ..device import wgmma
from ..device.switch import device_function
from .mode import Mode
from .stage import ROW_BYTES, WarpgroupConfig


def slot_products(config: WarpgroupConfig, mode: Mode):
    """Make a device function ``(acc, a_tile, b_tile)`` that starts ``acc = A @ B`` of a slot, in a group of its own.

    `a_tile` and `b_tile` are descriptors of the first part of this warpgroup's rows of A, and of where the slot begins;
    in a slot the parts of the block's tile of A come first, then those of B's.
    """
    A_BYTES, B_BYTES = ROW_BYTES * config.BM, ROW_BYTES * config.BN  # of one part of a tile
    UNIT = 16  # bytes, in descriptors
    STEP = wgmma.STEP_BYTES // UNIT
    multiply = wgmma.multiply(mode.kind, config.BN)

    @device_function
    def nothing(acc, a_tile, b_tile):
        pass

    def from_product(q):
        """The products from the one of index q on; written out, or the compiler would wait for each."""
        if q == len(mode.products):
            return nothing
        a, b = mode.products[q]
        A_PART, B_PART = a * A_BYTES // UNIT, (mode.parts * A_BYTES + b * B_BYTES) // UNIT
        NOT_FIRST = q > 0
        following = from_product(q + 1)

        @device_function
        def products(acc, a_tile, b_tile):
            multiply(acc, a_tile + A_PART, b_tile + B_PART, NOT_FIRST)
            multiply(acc, a_tile + (A_PART + STEP), b_tile + (B_PART + STEP), True)
            multiply(acc, a_tile + (A_PART + 2 * STEP), b_tile + (B_PART + 2 * STEP), True)
            multiply(acc, a_tile + (A_PART + 3 * STEP), b_tile + (B_PART + 3 * STEP), True)
            following(acc, a_tile, b_tile)

        return products

    everything = from_product(0)

    @device_function
    def slot(acc, a_tile, b_tile):
        wgmma.fence()
        # The smallest products of all steps come first: what a sum is large enough to cut off is least then.
        everything(acc, a_tile, b_tile)
        wgmma.commit()

    return slot
