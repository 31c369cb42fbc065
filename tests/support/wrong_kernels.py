"""Wrong solutions of the puzzles: edits of the correct ones, and what the check says of each."""

from __future__ import annotations

from dataclasses import dataclass

BARRIER = "cuda.syncthreads()"


@dataclass(frozen=True)
class Wrong:
    """A wrong solution: its edits, the line of the kernel that is to blame, and the message.

    In the message, a line's number is replaced by its text between ticks, and an address by ``#``.
    """

    puzzle: str
    name: str
    edits: tuple[tuple[str, str], ...]
    at: str
    says: str

    @property
    def id(self) -> str:
        """Name of the test."""
        return f"{self.puzzle}-{self.name}"

    def edited(self, text: str) -> str:
        """Return the text of the correct solution with the edits, each in the first place of the code that it fits."""
        statement, text = text.split('\n"""\n', 1)
        for old, new in self.edits:
            assert old in text, f"{self.id}: {old!r} is not in the solution"
            text = text.replace(old, new, 1)
        return f'{statement}\n"""\n{text}'


def wrong(puzzle: str, name: str, *edits: tuple[str, str], at: str, says: str) -> Wrong:
    """Return a row of the table."""
    return Wrong(puzzle, name, edits, at, says)


ELEMENT = (
    wrong(
        "element",
        "no_edges",
        ("if row < m and col < n:", "if True:"),
        at="c[row, col] = float32(2) * a[row, col]",
        says=(
            "out of bounds: thread (2, 0, 0) of block (2, 0, 0) accesses a[0, 18], and a has 13 x 18 elements "
            "(M=13, N=18)"
        ),
    ),
    wrong(
        "element",
        "edge_off_by_one",
        ("row < m", "row <= m"),
        at="c[row, col] = float32(2) * a[row, col]",
        says=(
            "out of bounds: thread (0, 5, 0) of block (0, 1, 0) accesses a[13, 0], and a has 13 x 18 elements "
            "(M=13, N=18)"
        ),
    ),
    wrong(
        "element",
        "x_and_y_swapped",
        ("Idx.y * cuda.blockDim.y + cuda.threadIdx.y", "Idx.x * cuda.blockDim.x + cuda.threadIdx.x"),
        at="c[row, col] = float32(2) * a[row, col]",
        says=(
            "c[0, 1] is never written, expected 1.5 (M=8, N=8); 56 of 64 elements are wrong. c[0, 0] is written by "
            "thread (0, 0, 0) of block (0, 0, 0) and by thread (0, 1, 0) of block (0, 0, 0)"
        ),
    ),
    wrong(
        "element",
        "no_block",
        ("cuda.blockIdx.x * cuda.blockDim.x + ", ""),
        at="c[row, col] = float32(2) * a[row, col]",
        says=(
            "c[0, 8] is never written, expected -3 (M=13, N=18); 130 of 234 elements are wrong. c[0, 0] is written "
            "by thread (0, 0, 0) of block (0, 0, 0) and by thread (0, 0, 0) of block (1, 0, 0)"
        ),
    ),
    wrong(
        "element",
        "undefined_name",
        ("2) * a[row, col]", "2) * A[row, col]"),
        at="c[row, col] = float32(2) * A[row, col]",
        says="NameError in thread (0, 0, 0) of block (0, 0, 0): name 'A' is not defined (M=8, N=8)",
    ),
)
PRODUCT = (
    wrong(
        "product",
        "one_term_less",
        ("range(k)", "range(k - 1)"),
        at="c[row, col] = acc",
        says=(
            "c[0, 0] is -3.5625, expected -3.3125 (M=8, N=8, K=5); thread (0, 0, 0) of block (0, 0, 0) wrote it "
            "here; 56 of 64 elements are wrong"
        ),
    ),
    wrong(
        "product",
        "one_term_more",
        ("range(k)", "range(k + 1)"),
        at="acc += a[row, p] * b[p, col]",
        says=(
            "out of bounds: thread (0, 0, 0) of block (0, 0, 0) accesses a[0, 5], and a has 8 x 5 elements "
            "(M=8, N=8, K=5)"
        ),
    ),
    wrong(
        "product",
        "indices_swapped",
        ("b[p, col]", "b[col, p]"),
        at="acc += a[row, p] * b[col, p]",
        says=(
            "out of bounds: thread (5, 0, 0) of block (0, 0, 0) accesses b[5, 0], and b has 5 x 8 elements "
            "(M=8, N=8, K=5)"
        ),
    ),
    wrong(
        "product",
        "sum_in_c",
        ("acc += a", "c[row, col] += a"),
        at="c[row, col] += a[row, p] * b[p, col]",
        says=(
            "thread (0, 0, 0) of block (0, 0, 0) reads c[0, 0], which holds NaN: nobody has written it (M=8, N=8, K=5)"
        ),
    ),
    wrong(
        "product",
        "sum_in_zeroed_c",
        ("acc = float32(0)", "c[row, col] = float32(0)"),
        ("acc += a", "c[row, col] += a"),
        ("        c[row, col] = acc\n", ""),
        at="c[row, col] += a[row, p] * b[p, col]",
        says=(
            "384 floats written to global memory, at most 64; this line writes 320 of them: thread (0, 0, 0) of"
            " block (0, 0, 0) writes c[0, 0], which it has written already at line `c[row, col] = float32(0)`"
        ),
    ),
)
COALESCED = (
    wrong(
        "coalesced",
        "rows_along_x",
        ("y + cuda.threadIdx.y", "y + cuda.threadIdx.x"),
        ("x + cuda.threadIdx.x", "x + cuda.threadIdx.y"),
        at="acc += a[row, p] * b[p, col]",
        says=(
            "2432 sectors moved from and to global memory, at most 576; here 16 sectors move for a warp, whose "
            "data fit into 2: thread (0, 0, 0) reads a[0, 0], thread (1, 0, 0) reads a[1, 0]"
        ),
    ),
    wrong(
        "coalesced",
        "blocks_swapped",
        ("cuda.blockIdx.y *", "cuda.blockIdx.x *"),
        ("cuda.blockIdx.x * cuda.blockDim.x", "cuda.blockIdx.y * cuda.blockDim.x"),
        at="acc += a[row, p] * b[p, col]",
        says=(
            "out of bounds: thread (0, 0, 0) of block (1, 0, 0) accesses a[16, 0], and a has 16 x 8 elements "
            "(M=16, N=32, K=8)"
        ),
    ),
    wrong(
        "coalesced",
        "one_index",
        ("y + cuda.threadIdx.y", "y + cuda.threadIdx.x"),
        at="c[row, col] = acc",
        says=(
            "c[0, 1] is never written, expected 0.375 (M=16, N=32, K=8); 480 of 512 elements are wrong. c[0, 0] is "
            "written by thread (0, 0, 0) of block (0, 0, 0) and by thread (0, 1, 0) of block (0, 0, 0)"
        ),
    ),
)
STRIDED = (
    wrong(
        "strided_sum",
        "contiguous",
        ("range(t, k, T)", "range(t * (k // T), (t + 1) * (k // T))"),
        at="c[row, t] = acc",
        says=(
            "c[0, 0] is 2.5, expected 1.5 (M=3, K=72); thread (0, 0, 0) of block (0, 0, 0) wrote it here; 94 of 96 "
            "elements are wrong"
        ),
    ),
    wrong(
        "strided_sum",
        "every_element",
        ("range(t, k, T)", "range(t, k)"),
        at="c[row, t] = acc",
        says=(
            "c[0, 0] is 5.25, expected 1.5 (M=3, K=72); thread (0, 0, 0) of block (0, 0, 0) wrote it here; 95 of 96 "
            "elements are wrong"
        ),
    ),
    wrong(
        "strided_sum",
        "whole_turns",
        ("range(t, k, T)", "range(0, k, T)"),
        ("a[row, p]", "a[row, p + t]"),
        at="acc += a[row, p + t]",
        says=(
            "out of bounds: thread (8, 0, 0) of block (0, 0, 0) accesses a[0, 72], and a has 3 x 72 elements "
            "(M=3, K=72)"
        ),
    ),
    wrong(
        "strided_sum",
        "no_sum",
        ("acc +=", "acc ="),
        at="c[row, t] = acc",
        says=(
            "c[0, 0] is 1.75, expected 1.5 (M=3, K=72); thread (0, 0, 0) of block (0, 0, 0) wrote it here; 93 of 96 "
            "elements are wrong"
        ),
    ),
)
TRANSPOSE = (
    wrong(
        "transpose",
        "no_barrier",
        (BARRIER, "pass"),
        at="tile[ty, tx] = a[row + ty, col + tx]",
        says=(
            "race: thread (1, 0, 0) of block (0, 0, 0) writes tile[0, 1] here, and thread (0, 1, 0) reads it at"
            " line `c[col + ty, row + tx] = tile[tx, ty]`, with no barrier between the two"
        ),
    ),
    wrong(
        "transpose",
        "straight",
        ("c[col + ty, row + tx] = tile[tx, ty]", "c[col + tx, row + ty] = tile[ty, tx]"),
        at="c[col + tx, row + ty] = tile[ty, tx]",
        says=(
            "24 sectors moved from and to global memory, at most 16; here 8 sectors move for a warp, whose data"
            " fit into 4: thread (0, 0, 0) writes c[0, 0], thread (1, 0, 0) writes c[1, 0]"
        ),
    ),
    wrong(
        "transpose",
        "not_transposed",
        ("= tile[tx, ty]", "= tile[ty, tx]"),
        at="c[col + ty, row + tx] = tile[ty, tx]",
        says=(
            "c[0, 1] is 0.75, expected -1.5 (M=8, N=8); thread (1, 0, 0) of block (0, 0, 0) wrote it here; 54 of 64 "
            "elements are wrong"
        ),
    ),
    wrong(
        "transpose",
        "block_not_transposed",
        ("c[col + ty, row + tx]", "c[row + ty, col + tx]"),
        at="c[row + ty, col + tx] = tile[tx, ty]",
        says=(
            "out of bounds: thread (0, 0, 0) of block (1, 0, 0) accesses c[0, 8], and c has 16 x 8 elements (M=8, N=16)"
        ),
    ),
    wrong(
        "transpose",
        "two_barriers",
        (BARRIER, f"{BARRIER}\n    {BARRIER}"),
        at="cuda.syncthreads()",
        says=(
            "2 barriers per block, at most 1; block (0, 0, 0) has 1 at line `cuda.syncthreads()`, 1 at line "
            "`cuda.syncthreads()`; without barrier number 1, this one, there would be no race either"
        ),
    ),
)
BARRIERS = (
    wrong(
        "barriers",
        "none",
        (f"        {BARRIER}\n", ""),
        at="partial[t] = acc",
        says=(
            "race: thread (1, 0, 0) of block (0, 0, 0) writes partial[1] here, and thread (0, 0, 0) reads it at"
            " line `partial[t] += partial[t + half]`, with no barrier between the two"
        ),
    ),
    wrong(
        "barriers",
        "before_the_loop",
        (f"        {BARRIER}\n", ""),
        ("    half = T // 2", f"    {BARRIER}\n    half = T // 2"),
        at="partial[t] += partial[t + half]",
        says=(
            "race: thread (1, 0, 0) of block (0, 0, 0) writes partial[1] here, and thread (0, 0, 0) reads it in"
            " the same line, with no barrier between the two"
        ),
    ),
    wrong(
        "barriers",
        "some_threads",
        (f"        {BARRIER}\n", ""),
        ("        if t < half:\n", f"        if t < half:\n            {BARRIER}\n"),
        at="cuda.syncthreads()",
        says=(
            "not all threads of block (0, 0, 0) reach this barrier: 32 wait here, such as thread (0, 0, 0); "
            "thread (32, 0, 0) has returned"
        ),
    ),
    wrong(
        "barriers",
        "seven",
        ("    half = T // 2", f"    {BARRIER}\n    half = T // 2"),
        at="cuda.syncthreads()",
        says=(
            "7 barriers per block, at most 6; block (0, 0, 0) has 1 at line `cuda.syncthreads()`, 6 at line "
            "`cuda.syncthreads()`; without barrier number 1, this one, there would be no race either"
        ),
    ),
    wrong(
        "barriers",
        "seven_at_the_bottom",
        (f"        {BARRIER}\n", ""),
        ("    half = T // 2", f"    {BARRIER}\n    half = T // 2"),
        ("        half //= 2\n", f"        {BARRIER}\n        half //= 2\n"),
        at="cuda.syncthreads()",
        says=(
            "7 barriers per block, at most 6; block (0, 0, 0) has 1 at line `cuda.syncthreads()`, 6 at line "
            "`cuda.syncthreads()`; without barrier number 7, this one, there would be no race either"
        ),
    ),
)
SHARED = (
    wrong(
        "shared_tile",
        "no_first_barrier",
        (f"        {BARRIER}\n", ""),
        at="a_tile[ty, tx] = a[row, k0 + tx]",
        says=(
            "race: thread (0, 0, 0) of block (0, 0, 0) writes a_tile[0, 0] here, and thread (7, 0, 0) reads it "
            "at line `acc += a_tile[ty, p] * b_tile[p, tx]`, with no barrier between the two"
        ),
    ),
    wrong(
        "shared_tile",
        "no_second_barrier",
        (f"        {BARRIER}\n    c[", "    c["),
        at="a_tile[ty, tx] = a[row, k0 + tx]",
        says=(
            "race: thread (0, 0, 0) of block (0, 0, 0) writes a_tile[0, 0] here, and thread (7, 0, 0) reads it "
            "at line `acc += a_tile[ty, p] * b_tile[p, tx]`, with no barrier between the two"
        ),
    ),
    wrong(
        "shared_tile",
        "barriers_in_the_loop",
        ("            acc +=", f"            {BARRIER}\n            acc +="),
        at="cuda.syncthreads()",
        says=(
            "20 barriers per block, at most 4; block (0, 0, 0) has 2 at line `cuda.syncthreads()`, 16 at line "
            "`cuda.syncthreads()`, 2 at line `cuda.syncthreads()`; without barrier number 19, this one, there "
            "would be no race either"
        ),
    ),
    wrong(
        "shared_tile",
        "indices_swapped",
        ("a_tile[ty, p] * b_tile[p, tx]", "a_tile[p, ty] * b_tile[p, tx]"),
        at="c[row, col] = acc",
        says=(
            "c[0, 0] is 11.4375, expected 8.75 (M=8, N=8, K=16); thread (0, 0, 0) of block (0, 0, 0) wrote it here; "
            "64 of 64 elements are wrong"
        ),
    ),
    wrong(
        "shared_tile",
        "from_global_memory",
        ("a_tile[ty, p] *", "a[row, k0 + p] *"),
        at="acc += a[row, k0 + p] * b_tile[p, tx]",
        says=(
            "1280 floats read from global memory, at most 256; this line reads 1024 of them: thread (0, 0, 0) "
            "of block (0, 0, 0) reads a[0, 0], which it has read already at line `a_tile[ty, tx] = a[row, k0 + "
            "tx]`"
        ),
    ),
    wrong(
        "shared_tile",
        "first_tile_again",
        ("b[k0 + ty, col]", "b[ty, col]"),
        at="c[row, col] = acc",
        says=(
            "c[0, 0] is -3.5, expected 8.75 (M=8, N=8, K=16); thread (0, 0, 0) of block (0, 0, 0) wrote it here; 61 "
            "of 64 elements are wrong"
        ),
    ),
)
EDGES = (
    wrong(
        "edges",
        "early_return",
        ("    acc = float32(0)", "    if row >= m or col >= n:\n        return\n    acc = float32(0)"),
        at="cuda.syncthreads()",
        says=(
            "not all threads of block (0, 0, 0) reach this barrier: 40 wait here, such as thread (0, 0, 0); "
            "thread (0, 5, 0) has returned"
        ),
    ),
    wrong(
        "edges",
        "rows_only",
        ("if row < m and k0 + tx < k:", "if row < m:"),
        at="a_tile[ty, tx] = a[row, k0 + tx]",
        says=(
            "out of bounds: thread (3, 0, 0) of block (0, 0, 0) accesses a[0, 11], and a has 5 x 11 elements "
            "(M=5, N=9, K=11)"
        ),
    ),
    wrong(
        "edges",
        "no_zeros",
        ("            a_tile[ty, tx] = float32(0)", "            pass"),
        at="acc += a_tile[ty, p] * b_tile[p, tx]",
        says=(
            "thread (0, 5, 0) of block (0, 0, 0) reads a_tile[5, 0], which nobody has written: shared memory "
            "holds no zeros at first"
        ),
    ),
    wrong(
        "edges",
        "store_outside",
        ("    if row < m and col < n:\n        c[", "    if True:\n        c["),
        at="c[row, col] = acc",
        says=(
            "out of bounds: thread (0, 5, 0) of block (0, 0, 0) accesses c[5, 0], and c has 5 x 9 elements "
            "(M=5, N=9, K=11)"
        ),
    ),
    wrong(
        "edges",
        "clamped",
        (
            "            a_tile[ty, tx] = float32(0)",
            "            a_tile[ty, tx] = a[min(row, m - 1), min(k0 + tx, k - 1)]",
        ),
        at="a_tile[ty, tx] = a[min(row, m - 1), min(k0 + tx, k - 1)]",
        says=(
            "355 floats read from global memory, at most 209; this line reads 146 of them: thread (0, 5, 0) of "
            "block (0, 0, 0) reads a[4, 0], which thread (0, 4, 0) has read already at line `a_tile[ty, tx] = "
            "a[row, k0 + tx]`"
        ),
    ),
)
COLUMN = (
    wrong(
        "thread_column",
        "no_zeros",
        ("        acc[i] = float32(0)", "        pass"),
        at="c[block_row + row + i, block_col + col] = acc[i]",
        says=(
            "c[0, 0] is nan, expected -5.375 (M=16, N=16, K=8); thread (0, 0, 0) of block (0, 0, 0) wrote it here; "
            "256 of 256 elements are wrong. A local array holds no zeros at first: is acc (line `acc = "
            "cuda.local.array(TM, float32)`) read before it is written?"
        ),
    ),
    wrong(
        "thread_column",
        "b_read_again",
        ("a_tile[row + i, p] * b_value", "a_tile[row + i, p] * b_tile[p, col]"),
        at="acc[i] += a_tile[row + i, p] * b_tile[p, col]",
        says=(
            "4608 floats read from shared memory, at most 2560; this line reads 4096 of them: thread (0, 0, 0) "
            "of block (0, 0, 0) reads b_tile[0, 0], which it has read already at line `b_value = b_tile[p, "
            "col]`"
        ),
    ),
    wrong(
        "thread_column",
        "same_row",
        ("block_row + row + i,", "block_row + row,"),
        at="c[block_row + row, block_col + col] = acc[i]",
        says=(
            "c[0, 0] is 5.5625, expected -5.375 (M=16, N=16, K=8); thread (0, 0, 0) of block (0, 0, 0) wrote it "
            "here; 256 of 256 elements are wrong"
        ),
    ),
    wrong(
        "thread_column",
        "row_of_a",
        ("a_tile[row + i, p]", "a_tile[row * TM + i, p]"),
        at="acc[i] += a_tile[row * TM + i, p] * b_value",
        says=(
            "out of bounds: thread (16, 0, 0) of block (0, 0, 0) accesses a_tile[16, 0], and a_tile has 16 x 4 "
            "elements (M=16, N=16, K=8)"
        ),
    ),
)
TILE = (
    wrong(
        "thread_tile",
        "no_fragments",
        ("a_frag[i] * b_frag[j]", "a_frag[i] * b_tile[p, col + j]"),
        at="acc[i, j] += a_frag[i] * b_tile[p, col + j]",
        says=(
            "12288 floats read from shared memory, at most 4096; this line reads 8192 of them: thread (0, 0, 0)"
            " of block (0, 0, 0) reads b_tile[0, 0], which it has read already at line `b_frag[j] = b_tile[p, "
            "col + j]`"
        ),
    ),
    wrong(
        "thread_tile",
        "fragment_not_filled",
        ("b_frag[j] = b_tile[p, col + j]", "b_frag[0] = b_tile[p, col + j]"),
        at="c[block_row + row + i, block_col + col + j] = acc[i, j]",
        says=(
            "c[0, 0] is -9.875, expected 0.3125 (M=32, N=32, K=8); thread (0, 0, 0) of block (0, 0, 0) wrote it "
            "here; 1024 of 1024 elements are wrong"
        ),
    ),
    wrong(
        "thread_tile",
        "transposed",
        ("= acc[i, j]", "= acc[j, i]"),
        at="c[block_row + row + i, block_col + col + j] = acc[j, i]",
        says=(
            "c[0, 1] is 0.0625, expected -4.3125 (M=32, N=32, K=8); thread (0, 0, 0) of block (0, 0, 0) wrote it "
            "here; 766 of 1024 elements are wrong"
        ),
    ),
    wrong(
        "thread_tile",
        "no_sum",
        ("acc[i, j] +=", "acc[i, j] ="),
        at="c[block_row + row + i, block_col + col + j] = acc[i, j]",
        says=(
            "c[0, 0] is -0, expected 0.3125 (M=32, N=32, K=8); thread (0, 0, 0) of block (0, 0, 0) wrote it here; "
            "1018 of 1024 elements are wrong"
        ),
    ),
)
VECTOR = (
    wrong(
        "vector_copy",
        "no_vectors_of_four",
        (") * 4\n", ")\n"),
        at="v = load4(a, row, col)",
        says=(
            "ValueError in thread (1, 0, 0) of block (0, 0, 0): misaligned 128-bit access to [0, 1]: address # "
            "% 16 = 4 (M=8, N=32)"
        ),
    ),
    wrong(
        "vector_copy",
        "one_by_one",
        (
            "        v = load4(a, row, col)\n",
            "        v = (a[row, col], a[row, col + 1], a[row, col + 2], a[row, col + 3])\n",
        ),
        at="v = (a[row, col], a[row, col + 1], a[row, col + 2], a[row, col + 3])",
        says=(
            "10 instructions of warps that access global memory, at most 4; here a thread reads 32 bits of a at"
            " a time, of 128 possible"
        ),
    ),
    wrong(
        "vector_copy",
        "no_edges",
        ("row < m and col < n", "row < m"),
        at="v = load4(a, row, col)",
        says=(
            "IndexError in thread (1, 0, 0) of block (1, 0, 0): 128-bit access to [0, 36:40] of an array of "
            "shape (21, 36) (M=21, N=36)"
        ),
    ),
    wrong(
        "vector_copy",
        "same_float",
        ("two * v[3]", "two * v[2]"),
        at="store4(c, row, col, (two * v[0], two * v[1], two * v[2], two * v[2]))",
        says=(
            "c[0, 3] is 0, expected -2 (M=8, N=32); thread (0, 0, 0) of block (0, 0, 0) wrote it here; 60 of 256 "
            "elements are wrong"
        ),
    ),
)
BANKS = (
    wrong(
        "bank_conflicts",
        "no_pad",
        ("COLUMNS = 33", "COLUMNS = 32"),
        at="c[col + i, row + tx] = tile[tx, i]",
        says=(
            "1056 wavefronts of shared memory, at most 64; here a warp reads tile in 32 wavefronts, and 1 would"
            " do: thread (0, 0, 0) reads tile[0, 0] and thread (1, 0, 0) tile[1, 0], both in bank 0"
        ),
    ),
    wrong(
        "bank_conflicts",
        "pad_of_two",
        ("COLUMNS = 33", "COLUMNS = 34"),
        at="c[col + i, row + tx] = tile[tx, i]",
        says=(
            "96 wavefronts of shared memory, at most 64; here a warp reads tile in 2 wavefronts, and 1 would "
            "do: thread (0, 0, 0) reads tile[0, 0] and thread (16, 0, 0) tile[16, 0], both in bank 0"
        ),
    ),
    wrong(
        "bank_conflicts",
        "pad_of_rows",
        ("(T, COLUMNS)", "(COLUMNS, T)"),
        at="c[col + i, row + tx] = tile[tx, i]",
        says=(
            "1056 wavefronts of shared memory, at most 64; here a warp reads tile in 32 wavefronts, and 1 would"
            " do: thread (0, 0, 0) reads tile[0, 0] and thread (1, 0, 0) tile[1, 0], both in bank 0"
        ),
    ),
    wrong(
        "bank_conflicts",
        "half_a_swizzle",
        ("tile[tx, i]", "tile[tx, i ^ tx]"),
        at="c[col + i, row + tx] = tile[tx, i ^ tx]",
        says=(
            "c[0, 1] is 1.75, expected -2 (M=32, N=32); thread (1, 0, 0) of block (0, 0, 0) wrote it here; 942 of "
            "1024 elements are wrong"
        ),
    ),
)
BUFFERS = (
    wrong(
        "two_buffers",
        "one_buffer",
        ("a_tile[1 - buffer, ty, tx]", "a_tile[buffer, ty, tx]"),
        at="a_tile[buffer, ty, tx] = a[row, k0 + T + tx]",
        says=(
            "race: thread (0, 0, 0) of block (0, 0, 0) writes a_tile[0, 0, 0] here, and thread (7, 0, 0) reads "
            "it at line `acc += a_tile[buffer, ty, p] * b_tile[buffer, p, tx]`, with no barrier between the two"
        ),
    ),
    wrong(
        "two_buffers",
        "no_swap",
        ("        buffer = 1 - buffer\n", ""),
        at="c[row, col] = acc",
        says=(
            "c[0, 0] is -12.75, expected 3.5 (M=8, N=8, K=32); thread (0, 0, 0) of block (0, 0, 0) wrote it here; 64 "
            "of 64 elements are wrong"
        ),
    ),
    wrong(
        "two_buffers",
        "past_the_end",
        ("if k0 + T < k:", "if True:"),
        at="a_tile[1 - buffer, ty, tx] = a[row, k0 + T + tx]",
        says=(
            "out of bounds: thread (0, 0, 0) of block (0, 0, 0) accesses a[0, 32], and a has 8 x 32 elements "
            "(M=8, N=8, K=32)"
        ),
    ),
    wrong(
        "two_buffers",
        "two_barriers",
        ("        buffer = 1 - buffer\n", f"        {BARRIER}\n        buffer = 1 - buffer\n"),
        at="cuda.syncthreads()",
        says=(
            "8 barriers per block, at most 4; block (0, 0, 0) has 4 at line `cuda.syncthreads()`, 4 at line "
            "`cuda.syncthreads()`; without barrier number 8, this one, there would be no race either"
        ),
    ),
    wrong(
        "two_buffers",
        "barrier_at_the_end",
        (f"        {BARRIER}\n", ""),
        ("        buffer = 1 - buffer\n", f"        buffer = 1 - buffer\n        {BARRIER}\n"),
        at="a_tile[0, ty, tx] = a[row, tx]",
        says=(
            "race: thread (0, 0, 0) of block (0, 0, 0) writes a_tile[0, 0, 0] here, and thread (7, 0, 0) reads "
            "it at line `acc += a_tile[buffer, ty, p] * b_tile[buffer, p, tx]`, with no barrier between the two"
        ),
    ),
)
WARP = (
    wrong(
        "warp_tile",
        "rows_of_the_block",
        ("warp // 2 * WM + lane // 8 * TM", "t // 16 * TM"),
        ("warp % 2 * WN + lane % 8 * TN", "t % 16 * TN"),
        at="c[block_row + row + i, block_col + col + j] = acc[i, j]",
        says=(
            "c[0, 16] is written by thread 8 (warp 0, lane 8) of block (0, 0, 0), and belongs to thread 32 "
            "(warp 1, lane 0)"
        ),
    ),
    wrong(
        "warp_tile",
        "warps_swapped",
        ("warp // 2 * WM", "warp % 2 * WM"),
        ("warp % 2 * WN", "warp // 2 * WN"),
        at="c[block_row + row + i, block_col + col + j] = acc[i, j]",
        says=(
            "c[0, 16] is written by thread 64 (warp 2, lane 0) of block (0, 0, 0), and belongs to thread 32 "
            "(warp 1, lane 0)"
        ),
    ),
    wrong(
        "warp_tile",
        "no_warp",
        ("warp // 2 * WM + ", ""),
        at="c[block_row + row + i, block_col + col + j] = acc[i, j]",
        says=(
            "c[16, 0] is never written, expected 2.6875 (M=32, N=32, K=4); 512 of 1024 elements are wrong. c[0, 0] "
            "is written by thread (0, 0, 0) of block (0, 0, 0) and by thread (64, 0, 0) of block (0, 0, 0)"
        ),
    ),
    wrong(
        "warp_tile",
        "lanes_of_four",
        ("lane // 8 * TM", "lane // 4 * TM"),
        at="acc[i, j] += a_tile[row + i, p] * b_value",
        says=(
            "out of bounds: thread (80, 0, 0) of block (0, 0, 0) accesses a_tile[32, 0], and a_tile has 32 x 5 "
            "elements (M=32, N=32, K=4)"
        ),
    ),
)
ASYNC = (
    wrong(
        "async_copies",
        "no_wait",
        ("        wait_group(0)\n", ""),
        at="cp_async4(a_tile, ty, tx, row < m and tx < k, a, row, tx)",
        says=(
            "race: thread (0, 0, 0) of block (0, 0, 0) starts a copy to a_tile[0, 0] here, and thread (7, 0, 0)"
            " reads it at line `acc += a_tile[buffer + ty, p] * b_tile[buffer + p, tx]`, where it may still be "
            "in flight: the copying thread must close the copy's group and wait for it before a barrier"
        ),
    ),
    wrong(
        "async_copies",
        "wait_after_the_barrier",
        (f"        wait_group(0)\n        {BARRIER}\n", f"        {BARRIER}\n        wait_group(0)\n"),
        at="cp_async4(a_tile, ty, tx, row < m and tx < k, a, row, tx)",
        says=(
            "race: thread (0, 0, 0) of block (0, 0, 0) starts a copy to a_tile[0, 0] here, and thread (7, 0, 0)"
            " reads it at line `acc += a_tile[buffer + ty, p] * b_tile[buffer + p, tx]`, where it may still be "
            "in flight: the copying thread must close the copy's group and wait for it before a barrier"
        ),
    ),
    wrong(
        "async_copies",
        "wait_for_all_but_one",
        ("wait_group(0)", "wait_group(1)"),
        at="cp_async4(a_tile, ty, tx, row < m and tx < k, a, row, tx)",
        says=(
            "race: thread (0, 0, 0) of block (0, 0, 0) starts a copy to a_tile[0, 0] here, and thread (7, 0, 0)"
            " reads it at line `acc += a_tile[buffer + ty, p] * b_tile[buffer + p, tx]`, where it may still be "
            "in flight: the copying thread must close the copy's group and wait for it before a barrier"
        ),
    ),
    wrong(
        "async_copies",
        "no_commit",
        ("            commit_group()\n", ""),
        at="cp_async4(a_tile, to + ty, tx, row < m and following + tx < k, a, row, following + tx)",
        says=(
            "race: thread (0, 0, 0) of block (0, 0, 0) starts a copy to a_tile[0, 0] here, and thread (7, 0, 0)"
            " reads it at line `acc += a_tile[buffer + ty, p] * b_tile[buffer + p, tx]`, where it may still be "
            "in flight: the copying thread must close the copy's group and wait for it before a barrier"
        ),
    ),
    wrong(
        "async_copies",
        "through_registers",
        (
            "cp_async4(a_tile, to + ty, tx, row < m and following + tx < k, a, row, following + tx)",
            "a_tile[to + ty, tx] = a[row, following + tx] if row < m and following + tx < k else float32(0)",
        ),
        at="a_tile[to + ty, tx] = a[row, following + tx] if row < m and following + tx < k else float32(0)",
        says=(
            "128 floats read into registers from global memory, at most 0; here thread (0, 0, 0) loads a[0, 8] "
            "into a register instead of starting a copy"
        ),
    ),
    wrong(
        "async_copies",
        "always_inside",
        ("row < m and following + tx < k", "True"),
        at="cp_async4(a_tile, to + ty, tx, True, a, row, following + tx)",
        says=(
            "IndexError in thread (3, 0, 0) of block (0, 0, 0): copy from [0, 11:12] of a matrix of shape (5, "
            "11) (M=5, N=9, K=11)"
        ),
    ),
)
EPILOGUE = (
    wrong(
        "epilogue",
        "c_always_read",
        ("if beta != float32(0):", "if True:"),
        at="value += beta * c[row, col]",
        says=(
            "thread (0, 0, 0) of block (0, 0, 0) reads c[0, 0], which holds NaN: nobody has written it (M=8, "
            "N=8, K=8, alpha=2, beta=0)"
        ),
    ),
    wrong(
        "epilogue",
        "no_beta",
        ("            value += beta * c[row, col]", "            pass"),
        at="c[row, col] = value",
        says=(
            "c[0, 0] is -1.375, expected -2.5 (M=5, N=9, K=3, alpha=-1, beta=0.5); thread (0, 0, 0) of block (0, 0, "
            "0) wrote it here; 41 of 45 elements are wrong"
        ),
    ),
    wrong(
        "epilogue",
        "all_scaled",
        ("value = alpha * acc", "value = acc"),
        ("c[row, col] = value", "c[row, col] = alpha * value"),
        at="c[row, col] = alpha * value",
        says=(
            "c[0, 0] is -0.25, expected -2.5 (M=5, N=9, K=3, alpha=-1, beta=0.5); thread (0, 0, 0) of block (0, 0, "
            "0) wrote it here; 41 of 45 elements are wrong"
        ),
    ),
    wrong(
        "epilogue",
        "no_edges",
        ("    if row < m and col < n:\n        value", "    if True:\n        value"),
        at="value += beta * c[row, col]",
        says=(
            "out of bounds: thread (0, 5, 0) of block (0, 0, 0) accesses c[5, 0], and c has 5 x 9 elements "
            "(M=5, N=9, K=3, alpha=-1, beta=0.5)"
        ),
    ),
)
WRONG = (
    *ELEMENT,
    *PRODUCT,
    *COALESCED,
    *STRIDED,
    *TRANSPOSE,
    *BARRIERS,
    *SHARED,
    *EDGES,
    *COLUMN,
    *TILE,
    *VECTOR,
    *BANKS,
    *BUFFERS,
    *WARP,
    *ASYNC,
    *EPILOGUE,
)
