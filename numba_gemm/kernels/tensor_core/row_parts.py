"""Rows of an operand from memory to registers, where their parts are computed: those that `decompose` would make.

A slot has 64 k of each row, as floats. If k is the contiguous axis, a row has 256 bytes, whose 16-byte chunks are
permuted by XOR with twice the row, so that the 64-bit loads of a half warp use all banks. If rows are stored across
(access "across4", or "across1" by single floats), the tile's rows of one k follow each other; groups of eight rows are
permuted by XOR with half of k, so that the 32-bit loads of a warp, eight rows of four k, use all banks.

A thread holds two rows, eight apart, in the order in which a matrix instruction takes its first operand from registers.
Each 32-bit word of a part is of two k.

Rows of BF16 (access "along8") are a part as they are: 128 bytes per row of a slot, whose 16-byte chunks are permuted by
XOR with the row, so that the 32-bit loads of a warp use all banks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import int32, int64, uint32

from ...device.address import address_of, col_step, copy4_of, copy16_of, row_step, shared_load1, shared_load2
from ...device.mma import bf16_floats, bf16_word
from ...device.narrow import pair, short_bf16_of_number
from ...simulator.switch import device_function
from .accumulate import STEPS
from .config import GROUP_ROWS, NARROW, ROW_BYTES, WARPGROUP

TERMS = ROW_BYTES // 2  # of a row in a slot
AT_ONCE = 4  # copies of a thread, or more
PERMUTED = 8  # rows, or k if rows are stored across, after which the permutation repeats
WORDS = 4 * STEPS  # of a thread's two rows in a slot, for each part
FLOATS = 2 * WORDS


def pitch_of(access: str) -> int:
    """Return the bytes of a row in a slot."""
    return TERMS * (2 if access == NARROW else 4)


@lru_cache(maxsize=8)
def positions(access: str, extent: int):
    """Make a device function ``(row, k)``: bytes from the start of a tile of A to an element."""
    PITCH = pitch_of(access)

    @device_function
    def narrow(row, k):
        chunk = uint32(uint32(k // uint32(8)) ^ uint32(row % uint32(8)))
        return uint32(row * uint32(PITCH) + (chunk << uint32(4)) + k % uint32(8) * uint32(2))

    @device_function
    def along(row, k):
        chunk = uint32(uint32(k // uint32(4)) ^ uint32(row % uint32(4) * uint32(2)))
        return uint32(row * uint32(PITCH) + (chunk << uint32(4)) + k % uint32(4) * uint32(4))

    @device_function
    def across(row, k):
        place = uint32(uint32(row) ^ uint32(k // uint32(2) % uint32(4) * uint32(8)))
        return uint32(k * uint32(4 * extent) + place * uint32(4))

    return narrow if access == NARROW else across if access.startswith("across") else along


def copies_at_once(access: str, extent: int) -> int:
    """Return the copies that a thread makes in one iteration, after which the permutation is the same."""
    return max(AT_ONCE, PERMUTED * extent // WARPGROUP) if access == "across1" else AT_ONCE


@lru_cache(maxsize=8)
def row_copies(access: str, extent: int):
    """Make a device function ``(memory, tid, at, x, block_row, k)``, which all threads of a warpgroup call.

    It starts copying a tile of `extent` rows and 64 k of x to the address `at`; what is not in x becomes zeros. A copy
    of 16 bytes at an edge of x reads as many as there are.
    """
    ACROSS = access.startswith("across")
    WIDTH = {"any": 1, "across1": 1, NARROW: 8}.get(access, 4)  # elements per copy
    PITCH = pitch_of(access)
    ITEM = PITCH // TERMS
    INNER, OUTER = (extent // WIDTH, TERMS) if ACROSS else (TERMS // WIDTH, extent)  # copies along both axes
    NEXT = WARPGROUP // INNER  # rows, or k if they are stored across, from a copy of a thread to its next one
    STRIDE = 4 * extent if ACROSS else PITCH
    COPIES = copies_at_once(access, extent)
    TURNS = tuple((i * NEXT // 2 if ACROSS else i * NEXT) % 4 << 5 for i in range(COPIES))
    copy, position = copy4_of if WIDTH == 1 else copy16_of, positions(access, extent)

    @device_function
    def fetch(memory, tid, at, x, block_row, k):
        outer, inner = uint32(tid // uint32(INNER)), uint32(tid % uint32(INNER) * uint32(WIDTH))
        row, own_k = (inner, outer) if ACROSS else (outer, inner)
        address = address_of(x, block_row + int64(row), k + int64(own_k))
        rows, terms = x.shape[0] - block_row - int64(row), x.shape[1] - k - int64(own_k)  # from the first copy's on
        left, rest = (rows, terms) if ACROSS else (terms, rows)
        size = int32(ITEM * max(min(left, int64(WIDTH)), int64(0)))  # bytes before the edge
        rest = int32(min(rest, int64(OUTER)))
        step = NEXT * (col_step(x) if ACROSS else row_step(x))
        to = uint32(at + position(row, own_k))
        end = uint32(to + extent * PITCH)
        if WIDTH == 1 and size == int32(ITEM) and rest >= int32(OUTER):  # fewer instructions per copy
            while to < end:
                for i in range(COPIES):
                    turned = uint32(to ^ uint32(TURNS[i]))
                    copy(memory, uint32(turned + i * NEXT * STRIDE), x, address, int32(ITEM))
                    address += step
                to = uint32(to + COPIES * NEXT * STRIDE)
        while to < end:  # unrolled in full, it would take more registers than a thread that fetches has
            for i in range(COPIES):
                turned = uint32(to ^ uint32(TURNS[i]))
                inside = rest > int32(i * NEXT)
                copy(memory, uint32(turned + i * NEXT * STRIDE), x, address + i * step, size if inside else int32(0))
            address += COPIES * step
            to = uint32(to + COPIES * NEXT * STRIDE)
            rest = int32(rest - COPIES * NEXT)

    return fetch


@lru_cache(maxsize=8)
def first_floats(access: str, extent: int):
    """Make a device function ``(group, warp, lane)``.

    It returns the upper one of a thread's two rows in a tile, and the byte offset of its first float.
    """
    position = positions(access, extent)

    @device_function
    def first_float(group, warp, lane):
        row = uint32(group * uint32(GROUP_ROWS) + warp * uint32(16) + lane // uint32(4))
        return row, position(row, uint32(lane % uint32(4) * uint32(2)))

    return first_float


@lru_cache(maxsize=8)
def row_loads(access: str, extent: int):
    """Make a device function ``(floats, memory, at)`` that loads the floats of a thread's two rows, the first at `at`.

    They are in the order of the matrix instructions' words.
    """
    PITCH = pitch_of(access)

    @device_function
    def along(floats, memory, at):
        for step in range(STEPS):
            for half in range(2):
                upper = uint32(uint32(at ^ uint32((step % 2 * 2 + half) << 5)) + uint32(step // 2 * ROW_BYTES))
                at_word = 8 * step + 4 * half
                two = shared_load2(memory, upper)
                floats[at_word], floats[at_word + 1] = two[0], two[1]
                two = shared_load2(memory, uint32(upper + uint32(8 * PITCH)))
                floats[at_word + 2], floats[at_word + 3] = two[0], two[1]

    @device_function
    def across(floats, memory, at):
        lower = uint32(at ^ uint32(32))  # eight rows below
        for word in range(2 * STEPS):  # of each row; from one to the next are eight k
            for i in range(2):
                floats[4 * word + i] = shared_load1(memory, uint32(at + uint32(4 * extent * (8 * word + i))))
                floats[4 * word + 2 + i] = shared_load1(memory, uint32(lower + uint32(4 * extent * (8 * word + i))))

    return across if access.startswith("across") else along


@device_function
def load_words(words, floats, memory, at):
    """Load the words of a thread's two rows of BF16, the first at `at`; there are no floats."""
    for chunk in range(2 * STEPS):
        upper = uint32(at ^ uint32(chunk << 4))
        words[2 * chunk] = shared_load1(memory, upper).view(np.uint32)
        words[2 * chunk + 1] = shared_load1(memory, uint32(upper + uint32(8 * ROW_BYTES))).view(np.uint32)


@lru_cache(maxsize=64)
def part_of(p: int, parts: int, short: bool):
    """Make a device function ``(words, floats)`` that computes part p of a thread's floats.

    `floats` are what the parts before have left, and become what this part leaves.
    """

    @device_function
    def last(words, floats):
        for w in range(WORDS):
            words[p * WORDS + w] = bf16_word(floats[2 * w], floats[2 * w + 1])

    # Of a NaN, some part is NaN: at the latest the second one, a NaN minus anything.
    @device_function
    def first_short(words, floats):
        for w in range(WORDS):
            x, y = short_bf16_of_number(floats[2 * w]), short_bf16_of_number(floats[2 * w + 1])
            words[p * WORDS + w] = pair(x, y).view(np.uint32)
            floats[2 * w] -= x
            floats[2 * w + 1] -= y

    @device_function
    def part(words, floats):
        for w in range(WORDS):
            both = bf16_word(floats[2 * w], floats[2 * w + 1])
            words[p * WORDS + w] = both
            x = bf16_floats(both)
            floats[2 * w] -= x[0]
            floats[2 * w + 1] -= x[1]

    return last if p == parts - 1 else first_short if short and p == 0 else part


@lru_cache(maxsize=64)
def decompositions(parts: int, short: bool, access: str, extent: int):
    """Make a device function ``(words, floats, memory, at)`` that loads a thread's rows and computes all parts."""
    if access == NARROW:
        return load_words

    @device_function
    def nothing(words, floats):
        pass

    def from_part(p):
        if p == parts:
            return nothing
        own, following = part_of(p, parts, short), from_part(p + 1)

        @device_function
        def make(words, floats):
            own(words, floats)
            following(words, floats)

        return make

    load_rows, all_parts = row_loads(access, extent), from_part(0)

    @device_function
    def decompose(words, floats, memory, at):
        load_rows(floats, memory, at)
        all_parts(words, floats)

    return decompose
