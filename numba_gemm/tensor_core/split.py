"""Split an operand into narrow parts, in the order in which the tensor cores' copies bring them (see `stage`).

The operand is seen as (mn, k): A as it is, B transposed; so this transposes what is not contiguous along k, on its
way. Beyond the operand's edges the parts are zero. Each element is read once, each part of it written once: 4 bytes
in, 8 out for two parts of TF32, 6 for three of BF16.

An infinity, and what rounds to one, has a rest of NaN or infinity: a mode of several parts gives NaN where a product of
float32 would give infinity, and so for elements next to the largest float32. Parts end where float32 does: of an
element below 2^-102 or so the last ones lose bits, or vanish.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ..device.narrow import bf16, pair, tf32
from ..device.switch import device_function, hardware_only
from ..device.vector import store4
from .mode import Mode
from .stage import ROW_WORDS

CHUNKS = 8  # of four words, of a slot's row
ROWS = 32  # that a block splits, of one slot
THREADS = ROWS * CHUNKS


def build(mode: Mode, along: bool):
    """Make the kernel ``(x, parts)``; `along` says that neighbouring threads shall read along k, not along mn.

    Its grid has a block for each 32 rows of the padded operand along x, and for each slot of k along y: 65,535 at most.
    """
    PARTS, PER_WORD, SLOT_K = mode.parts, mode.per_word, mode.slot_k
    narrow = tf32 if mode.kind == "tf32" else bf16

    @device_function
    def word(pieces, p):
        return pieces[p, 0] if PER_WORD == 1 else pair(pieces[p, 0], pieces[p, PER_WORD - 1])

    @cuda.jit(**hardware_only(launch_bounds=THREADS))
    def split(x, parts):
        tid = uint32(cuda.threadIdx.x)
        if along:
            r, chunk = tid // CHUNKS, tid % CHUNKS
        else:
            r, chunk = tid % ROWS, tid // ROWS
        row = int64(cuda.blockIdx.x) * ROWS + int64(r)
        slot = int64(cuda.blockIdx.y)
        slots = parts.shape[0] // PARTS
        first_k = slot * SLOT_K + int64(chunk) * (4 * PER_WORD)
        pieces = cuda.local.array((PARTS, 2), float32)  # of the elements of a word
        words = cuda.local.array((PARTS, 4), float32)
        for w in range(4):
            for i in range(PER_WORD):
                k = first_k + (w * PER_WORD + i)
                rest = float32(0)
                if row < x.shape[0] and k < x.shape[1]:
                    rest = x[row, k]
                for p in range(PARTS):
                    pieces[p, i] = narrow(rest)
                    rest -= pieces[p, i]
            for p in range(PARTS):
                words[p, w] = word(pieces, p)
        col = row * ROW_WORDS + int64((chunk ^ (r % 8)) * 4)
        for p in range(PARTS):
            store4(parts, p * slots + slot, col, (words[p, 0], words[p, 1], words[p, 2], words[p, 3]))

    return split
