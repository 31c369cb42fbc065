"""Stores of C, the last step of every stage: ``alpha * acc + beta * C``; C is not read when beta is zero."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from numba import cuda, float32, int32, int64, uint32

from ..simulator.switch import device_function
from .address import address_of, col_step, global_store1_if, row_step, shared_load1, shared_store4
from .kept import product
from .matrix import read4_if, write4_if, write4_partial
from .units import WARP
from .vector import load4, store4

VALUES = 16  # values that a lane stores per staged group of rows


@device_function
def axpby(alpha, acc, beta, c, row, col):
    """``alpha * acc + beta * c[row, col]``; C may hold anything, NaN included, when beta is 0."""
    if beta == float32(0):
        return alpha * acc
    return alpha * acc + beta * c[row, col]


@device_function
def store_axpby1(c, row, col, alpha, acc, beta):
    """Write one element of C if it lies inside."""
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = axpby(alpha, acc, beta, c, row, col)


@device_function
def axpby4(alpha, acc, beta, old):
    """``alpha * acc + beta * old`` of four elements."""
    return (
        alpha * acc[0] + beta * old[0],
        alpha * acc[1] + beta * old[1],
        alpha * acc[2] + beta * old[2],
        alpha * acc[3] + beta * old[3],
    )


@device_function
def store_axpby4(c, row, col, alpha, acc, beta):
    """Write four consecutive elements of a row of C in one 128-bit access if they lie inside.

    ``acc`` is a tuple of the four sums. The extents of C are whole vectors.
    """
    if row < c.shape[0] and col < c.shape[1]:
        if beta == float32(0):
            store4(c, row, col, (alpha * acc[0], alpha * acc[1], alpha * acc[2], alpha * acc[3]))
        else:
            store4(c, row, col, axpby4(alpha, acc, beta, load4(c, row, col)))


@device_function
def store_axpby4_partial(c, row, col, alpha, acc, beta):
    """Write as `store_axpby4`; the extents of C need not be whole vectors."""
    inside = row < c.shape[0]
    values = (alpha * acc[0], alpha * acc[1], alpha * acc[2], alpha * acc[3])
    if beta != float32(0):
        values = axpby4(alpha, acc, beta, read4_if(inside, c, row, col))
    write4_partial(inside, c, row, col, values)


@device_function
def store_axpby4_by_floats(c, row, col, alpha, acc, beta):
    """Write as `store_axpby4`, one by one, to a C of any extents and strides.

    No branch depends on beta: around one, the compiler would not unroll the rows of large thread tiles.
    """
    inside = row < c.shape[0]
    old = read4_if(inside and beta != float32(0), c, row, col)
    write4_if(inside, c, row, col, axpby4(alpha, acc, beta, old))


@lru_cache(maxsize=64)
def row_store(columns, apart, aligned, partial=False):
    """Return a device function that writes row i of a thread tile to C, four consecutive elements at a time.

    If C is `aligned`, these are vectors; the last one of a row may be `partial`.

    The thread tile has 4, 8 or 16 columns; its groups of four lie ``apart`` columns apart. The groups are unrolled by
    hand: a loop over groups within a loop over rows keeps the compiler from unrolling both, and accumulators that are
    indexed at run time live in local memory.
    """
    if columns not in (4, 8, 16):
        raise ValueError(f"thread tiles of 4, 8 or 16 columns can be stored, got {columns}")
    store = store_axpby4_by_floats if not aligned else store_axpby4_partial if partial else store_axpby4

    @device_function
    def store_row(c, row, col, alpha, acc, i, beta):
        store(c, row, col, alpha, (acc[i, 0], acc[i, 1], acc[i, 2], acc[i, 3]), beta)
        if columns >= 8:
            store(c, row, col + apart, alpha, (acc[i, 4], acc[i, 5], acc[i, 6], acc[i, 7]), beta)
        if columns == 16:
            store(c, row, col + 2 * apart, alpha, (acc[i, 8], acc[i, 9], acc[i, 10], acc[i, 11]), beta)
            store(c, row, col + 3 * apart, alpha, (acc[i, 12], acc[i, 13], acc[i, 14], acc[i, 15]), beta)

    return store_row


@lru_cache(maxsize=64)
def callable_from_kernels(epilogue):
    """Return a caller's function as a device function, unless ``cuda.jit`` made it; then it has its own options."""
    return epilogue if hasattr(epilogue, "targetoptions") else device_function(epilogue)


@lru_cache(maxsize=64)
def element_store(epilogue):
    """Return a device function that writes one element of C if it lies inside.

    Its parameters are ``(c, row, col, alpha, acc, beta, vectors)``. `epilogue` is the caller's last step,
    ``epilogue(value, row, col, *vectors)``, or None.
    """
    epilogue = epilogue and callable_from_kernels(epilogue)

    @device_function
    def store_plain(c, row, col, alpha, acc, beta, vectors):
        store_axpby1(c, row, col, alpha, acc, beta)

    @device_function
    def store_with(c, row, col, alpha, acc, beta, vectors):
        # An epilogue may index vectors by row and col, so it runs only for elements of C.
        if row < c.shape[0] and col < c.shape[1]:
            c[row, col] = float32(epilogue(axpby(alpha, acc, beta, c, row, col), row, col, *vectors))

    return store_plain if epilogue is None else store_with


@lru_cache(maxsize=64)
def staged_store(TM, TN, LANES_M, LANES_N, epilogue):
    """Return a store of a warp's tile by rows, through shared memory, for a C without vector accesses or an epilogue.

    Straight from the registers, each lane would write four consecutive elements one by one, so a warp's store would
    touch 32 places. An epilogue, compiled in for each of a thread's sums, would soon be too much code for the compiler
    to unroll around.

    Returns the number of floats of shared memory that a warp needs, and a device function ``(tiles, at, lane, c, row,
    col, alpha, acc, beta, vectors)``. `at` is the address of the warp's floats; `row` and `col` are the warp tile's
    first row and column in C. A lane's rows and columns form groups of four, interleaved with those of the other lanes,
    as fragments are read.
    """
    WIDTH = TN * LANES_N
    PITCH = WIDTH + 16  # keeps the vectors of two rows in different banks
    DEPTH = max(1, min(4, VALUES * WARP // (LANES_M * WIDTH)))  # rows of a lane that are staged together
    COLS = min(WIDTH, WARP)  # columns that a warp stores at a time
    ROWS = WARP // COLS
    ROUNDS, ACROSS = LANES_M * DEPTH // ROWS, WIDTH // COLS  # iterations over the staged rows, and over their columns
    FIRST_ROWS = tuple(r * ROWS // DEPTH * 4 + r * ROWS % DEPTH for r in range(ROUNDS + 1))
    TO_NEXT = tuple(below - above for above, below in pairwise(FIRST_ROWS))  # rows of C from one iteration to the next
    PLAIN = epilogue is None
    store1 = element_store(epilogue)
    epilogue = epilogue and callable_from_kernels(epilogue)

    @device_function
    def final(value, row, col, vectors):
        return value if PLAIN else float32(epilogue(value, row, col, *vectors))

    @device_function
    def stage4(tiles, at, alpha, acc, i, j):
        # Computed here, not earlier: if all were computed at once, the registers of the vectors would tie those of the
        # sums together, in the main loop too.
        values = (
            product(alpha, acc[i, j]),
            product(alpha, acc[i, j + 1]),
            product(alpha, acc[i, j + 2]),
            product(alpha, acc[i, j + 3]),
        )
        shared_store4(tiles, uint32(at + 4 * (i % DEPTH * PITCH + j * LANES_N)), values)

    @device_function
    def below(r, lane):
        """Rows of C from the first staged row to the one that a lane stores in iteration r."""
        staged = uint32(r * ROWS + lane // COLS)
        return int32(staged // DEPTH * 4 + staged % DEPTH)

    @device_function
    def store_tile(tiles, at, lane, c, row, col, alpha, acc, beta, vectors):
        mine = uint32(at + 4 * (lane // LANES_N * (DEPTH * PITCH) + lane % LANES_N * 4))
        source = uint32(at + 4 * (lane // COLS * PITCH + lane % COLS))
        first_col = col + int64(lane % COLS)
        start = address_of(c, row, first_col)
        rows = int32(min(max(c.shape[0] - row, int64(0)), int64(TM * LANES_M)))  # rows of C from the tile's first on
        cols = int32(min(max(c.shape[1] - first_col, int64(0)), int64(WIDTH)))
        whole = row + TM * LANES_M <= c.shape[0] and col + WIDTH <= c.shape[1]
        values = cuda.local.array((ROUNDS, ACROSS), float32)
        i = uint32(0)
        while i < uint32(TM):  # must stay a loop; within it, constants select the sums
            for x in range(TM):
                if i == uint32(x // DEPTH * DEPTH):
                    stage4(tiles, mine, alpha, acc, x, 0)
                    if TN >= 8:
                        stage4(tiles, mine, alpha, acc, x, 4)
                    if TN == 16:
                        stage4(tiles, mine, alpha, acc, x, 8)
                        stage4(tiles, mine, alpha, acc, x, 12)
            cuda.syncwarp()  # the warp's rows are staged before any lane reads them
            down = int32(i // 4 * (4 * LANES_M) + i % 4)
            if beta == float32(0) and (PLAIN or whole):
                # Compute all values first: the compiler would not move an epilogue's reads above others' writes.
                for r in range(ROUNDS):
                    for j in range(0, WIDTH, COLS):
                        value = shared_load1(tiles, uint32(source + 4 * (r * ROWS * PITCH + j)))
                        c_row = row + int64(down + below(r, lane))
                        values[r, j // COLS] = final(value, c_row, first_col + j, vectors)
                to = start + int64(down + below(0, lane)) * row_step(c)
                if whole:
                    for r in range(ROUNDS):
                        for j in range(0, WIDTH, COLS):
                            global_store1_if(c, to + j * col_step(c), values[r, j // COLS], True)
                        to += TO_NEXT[r] * row_step(c)
                else:
                    for r in range(ROUNDS):
                        c_row = int32(down + below(r, lane))
                        for j in range(0, WIDTH, COLS):
                            global_store1_if(c, to + j * col_step(c), values[r, j // COLS], c_row < rows and j < cols)
                        to += TO_NEXT[r] * row_step(c)
            else:
                for r in range(ROUNDS):
                    for j in range(0, WIDTH, COLS):
                        value = shared_load1(tiles, uint32(source + 4 * (r * ROWS * PITCH + j)))
                        c_row = row + int64(down + below(r, lane))
                        store1(c, c_row, first_col + j, float32(1), value, beta, vectors)
            cuda.syncwarp()  # all lanes have read before the next rows are staged
            i = uint32(i + DEPTH)

    return LANES_M * DEPTH * PITCH, store_tile
