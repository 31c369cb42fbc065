"""Blocks that keep in step, so that what they share stays in the L2 cache until the last of them has read it.

Blocks that compute tiles of the same rows, or columns, read the same slots. Nothing holds them together: over long sums
some run ahead by more than the cache holds, and the others read those slots from memory again, which takes time and
power. Therefore a thread of each block counts its turns, of a few slots each, in a counter that all blocks share. This
thread also has to release each slot, like a warp that multiplies, and withholds its release while its block is too far
ahead of the average.

Results do not depend on the pacing. A block that has waited too long, since others have not begun (another kernel may
hold their multiprocessors), never waits again.
"""

from __future__ import annotations

from functools import lru_cache

from numba import cuda, int32, uint32

from ...device.counter import add_to_counter, clear_counter, read_counter
from ...simulator.switch import device_function
from .pipeline import give_back, ring

TURN = 4  # slots
AHEAD = 1  # turns that a block may be ahead of the average
POLLS = 200  # of a block that waits, about 0.1 ms
NEVER = 1 << 30


@device_function
def take_turn(counter, bound):
    """Count a turn of this block, and wait until all blocks together have counted `bound` turns.

    Returns the bound of the next turn: one that is always reached, if this one was not.
    """
    counted, polls = add_to_counter(counter, int32(1)), int32(0)
    while int32(bound - counted) > int32(0):
        counted = read_counter(counter)
        polls = int32(polls + 1)
        if polls == int32(POLLS):
            bound = int32(counted - int32(NEVER))
    return int32(bound + int32(cuda.gridDim.x))


@device_function
def end_turns(counter, tile, whole, each):
    """Count the turns of one tile, `each`, if this block had one less than others; the last turns clear the counter.

    `whole` is the number of tiles, rounded up to a multiple of the blocks, and `tile` the block's next one, beyond all.
    """
    left = each if tile < whole else int32(0)
    if int32(add_to_counter(counter, left) + left) == int32(int32(whole) * each):
        clear_counter(counter)


@lru_cache(maxsize=8)
def pace(slots: int):
    """Make a device function ``(counter, whole, tiles, k_slots, full, empty)``, which one thread of a block calls.

    `counter` is the counter's address, 0 before the launch and after it; `tiles` the number of tiles, and `whole` the
    same, rounded up to a multiple of the blocks. `full` and `empty` are the barriers of the ring of slots.
    """
    await_slot, following = ring(slots)

    @device_function
    def keep_in_step(counter, whole, tiles, k_slots, full, empty):
        bound = int32(int32(1 - AHEAD) * int32(cuda.gridDim.x))
        tile, i, parity = uint32(cuda.blockIdx.x), uint32(0), uint32(0)
        while tile < tiles:
            s = uint32(0)
            while s < k_slots:
                await_slot(full, i, parity)
                s = uint32(s + 1)
                if s % uint32(TURN) == uint32(0):
                    bound = take_turn(counter, bound)
                give_back(empty, i)
                i, parity = following(i, parity)
            tile = uint32(tile + cuda.gridDim.x)
        end_turns(counter, tile, whole, int32(k_slots // uint32(TURN)))

    return keep_in_step
