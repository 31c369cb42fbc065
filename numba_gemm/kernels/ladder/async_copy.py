"""async_copy: B's tiles go from global to shared memory without passing through registers.

Bottleneck before: the next tiles wait in registers while the current ones are multiplied, 24 per thread. Each vector is
    loaded by one instruction and stored by another one, which waits for the first.
Idea: ``cp.async``. Each thread starts its copies of B's next tile and continues; the data arrive in shared memory while
    it multiplies, and the thread waits for them before the barrier at the end of the tile. A is transposed on its way,
    which asynchronous copies can do only four bytes at a time. Each such copy of a warp would take four wavefronts of
    shared memory, more than an ordinary store. A's vectors therefore go through registers as before.
Traffic: the same; copies of B write to shared memory directly.
Registers and shared memory: TM*TN accumulators, 2*(TM + TN) fragments, the staged floats of A, and addresses; 2*BK*(BM
    + pad + BN) floats (49 KB at 128x256x16).
Measured: 54.0 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 1.05 of cuBLAS SGEMM and 1.00 times moving_addresses; 190
    registers per thread, 83.9 % of the FMA pipe, 2.3 % excess shared wavefronts.
Limits: register banks. A multiply-add reads three registers from two banks, so at least two of them share a bank
    unless an operand is kept from the multiply-add before. Such reads can cost an extra clock.
"""

from numba import cuda, float32, int64, uint32

from ...device.address import (
    address_of,
    col_step,
    copy4_or_zero,
    copy16_or_zero,
    global_load4_or_zero,
    row_step,
    shared_address,
    shared_load4,
    shared_store1,
)
from ...device.async_copy import commit_group, wait_group
from ...device.kept import pinned
from ...device.outer_product import outer_product
from ...device.store import row_store
from ...device.units import WARP
from ...device.vector import fetch4_any
from ...simulator.switch import device_function, hardware_only
from .stage import ANY, WHOLE
from .tile_config import require


def main_loop(config, fit):
    """Return a device function that multiplies a range of k and adds the products to a thread's accumulators."""
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    THREADS = config.threads
    A_VECTORS = max(BK // 4, 1)  # per row of A's tile
    A_ROWS = THREADS // A_VECTORS  # rows of A that the block copies at a time
    A_LOADS = BM // max(A_ROWS, 1)  # vectors of A that each thread stages
    B_WIDTH = 1 if fit == ANY else 4  # floats of B per copy
    B_ROWS = max(THREADS * B_WIDTH // BN, 1)  # rows of B that the block copies at a time
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    A_PITCH, B_PITCH = 4 * (BM + config.pad), 4 * BN  # bytes from one k to the next
    B_START = BK * A_PITCH  # bytes from the start of a buffer to its tile of B
    BUFFER = B_START + BK * B_PITCH  # bytes per buffer
    require(
        config,
        {
            "TM % 4 == 0, TN is 4, 8 or 16": TM % 4 == 0 and TN in (4, 8, 16),
            "warps have tiles: WM > 0": WM > 0,
            "BK % 4 == 0": BK % 4 == 0,
            "pad % 4 == 0": config.pad % 4 == 0,
            "copies cover A's tile: threads % (BK/4) == 0 and BM % (threads/(BK/4)) == 0": (
                A_ROWS > 0 and THREADS % A_VECTORS == 0 and BM % A_ROWS == 0
            ),
            "copies cover B's tile, a whole number of its rows at a time": (
                THREADS * B_WIDTH % BN == 0 and BK % B_ROWS == 0
            ),
            "two buffers: slots == 2": config.slots == 2,
            "dynamic shared memory": config.dynamic,
        },
    )
    copy_b = copy4_or_zero if fit == ANY else copy16_or_zero
    multiply = outer_product(TM, TN, config.order)  # one k-step; acc[i, j] += a_frag[i] * b_frag[j] for all i, j

    @device_function
    def fetch(a, at, row, k, end):
        """Read a[row, k:k+4], which is at an address; zeros from k = end on."""
        if fit == ANY:
            return fetch4_any(a, row, k)
        return global_load4_or_zero(a, at, fit == WHOLE or k < end)

    @device_function
    def start_copies(tiles, b, b_at, b_to, k, end):
        """Start this thread's copies of B's tile, the first of which is of row k, as one group."""
        for p in range(0, BK, B_ROWS):
            inside = fit == WHOLE or k + p < end
            copy_b(tiles, uint32(b_to + p * B_PITCH), b, b_at + p * row_step(b), inside)
        commit_group()

    @device_function
    def store_a(tiles, a_to, i, values):
        """Store four k of a row of A's tile, transposing."""
        to = uint32(a_to + 4 * i * A_ROWS)
        shared_store1(tiles, to, values[0])
        shared_store1(tiles, uint32(to + A_PITCH), values[1])
        shared_store1(tiles, uint32(to + 2 * A_PITCH), values[2])
        shared_store1(tiles, uint32(to + 3 * A_PITCH), values[3])

    @device_function
    def read_fragments(tiles, a_from, b_from, p, a_frag, b_frag):
        """Read the fragments of the k-step p steps after the one at a_from and b_from; p is a constant."""
        for i in range(0, TM, 4):
            values = shared_load4(tiles, uint32(a_from + p * A_PITCH + 4 * i * LANES_M))
            a_frag[i], a_frag[i + 1], a_frag[i + 2], a_frag[i + 3] = values
        for j in range(0, TN, 4):
            values = shared_load4(tiles, uint32(b_from + p * B_PITCH + 4 * j * LANES_N))
            b_frag[j], b_frag[j + 1], b_frag[j + 2], b_frag[j + 3] = values

    @device_function
    def multiply_tile(tiles, a_from, b_from, a_even, b_even, a_odd, b_odd, acc):
        """Add the products of the tiles, but for the last k-step, whose fragments end in a_odd, b_odd."""
        p = uint32(0)
        while p < uint32(BK // 2 - 1):
            read_fragments(tiles, a_from, b_from, 1, a_odd, b_odd)
            multiply(a_even, b_even, acc)
            read_fragments(tiles, a_from, b_from, 2, a_even, b_even)
            multiply(a_odd, b_odd, acc)
            a_from, b_from = uint32(a_from + 2 * A_PITCH), uint32(b_from + 2 * B_PITCH)
            p = uint32(p + 1)
        read_fragments(tiles, a_from, b_from, 1, a_odd, b_odd)
        multiply(a_even, b_even, acc)

    @device_function
    def accumulate(tiles, a, b, block_row, block_col, row, col, k0, end, acc):
        """Add the products of k0 <= k < end; this thread's first group is at (row, col) of the block tile."""
        start = shared_address(tiles)
        tid = uint32(cuda.threadIdx.x)
        a_row, a_col = tid // A_VECTORS, tid % A_VECTORS * 4
        b_row, b_col = tid // (BN // B_WIDTH), tid % (BN // B_WIDTH) * B_WIDTH

        # addresses of this thread's first copies, and of its fragments of the first k-step
        a_at = cuda.local.array(A_LOADS, int64)
        for i in range(A_LOADS):
            a_at[i] = address_of(a, min(block_row + a_row + i * A_ROWS, a.shape[0] - 1), k0 + a_col)
        b_at = address_of(b, k0 + b_row, min(block_col + b_col, b.shape[1] - B_WIDTH))
        a_to = pinned(uint32(start + a_col * A_PITCH + 4 * a_row))
        b_to = pinned(uint32(start + B_START + b_row * B_PITCH + 4 * b_col))
        a_from = pinned(uint32(start + 4 * row))
        b_from = pinned(uint32(start + B_START + 4 * col))

        a_next = cuda.local.array((A_LOADS, 4), float32)
        a_even = cuda.local.array(TM, float32)  # fragments of the even k-steps
        b_even = cuda.local.array(TN, float32)
        a_odd = cuda.local.array(TM, float32)  # fragments of the odd k-steps
        b_odd = cuda.local.array(TN, float32)

        start_copies(tiles, b, b_at, b_to, k0 + b_row, end)
        for i in range(A_LOADS):
            store_a(tiles, a_to, i, fetch(a, a_at[i], block_row + a_row + i * A_ROWS, k0 + a_col, end))
        buffer = uint32(0)  # bytes from the first buffer to the one that is read
        wait_group(0)
        cuda.syncthreads()  # all threads' stores and copies of the first tiles are complete before any reads them
        read_fragments(tiles, a_from, b_from, 0, a_even, b_even)

        k0 += BK
        while k0 < end:
            b_at += BK * row_step(b)
            start_copies(tiles, b, b_at, uint32(b_to + uint32(BUFFER - buffer)), k0 + b_row, end)
            for i in range(A_LOADS):
                a_at[i] += BK * col_step(a)
                values = fetch(a, a_at[i], block_row + a_row + i * A_ROWS, k0 + a_col, end)
                a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3] = values
            a_now, b_now = uint32(a_from + buffer), uint32(b_from + buffer)
            multiply_tile(tiles, a_now, b_now, a_even, b_even, a_odd, b_odd, acc)
            buffer = uint32(BUFFER - buffer)
            for i in range(A_LOADS):
                values = (a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3])
                store_a(tiles, uint32(a_to + buffer), i, values)
            wait_group(0)
            # all threads' stores and copies of the next tiles are complete before any reads them, and all have read
            # this tile's last fragments before the next iteration overwrites it
            cuda.syncthreads()
            read_fragments(tiles, uint32(a_from + buffer), uint32(b_from + buffer), 0, a_even, b_even)
            multiply(a_odd, b_odd, acc)
            k0 += BK
        a_now, b_now = uint32(a_from + buffer), uint32(b_from + buffer)
        multiply_tile(tiles, a_now, b_now, a_even, b_even, a_odd, b_odd, acc)
        multiply(a_odd, b_odd, acc)

    return accumulate


def build(config, fit):
    BM, BN, TM, TN, WM, WN = config.BM, config.BN, config.TM, config.TN, config.WM, config.WN
    LANES_M, LANES_N = WM // TM, WN // TN  # lanes of a warp along rows and columns
    accumulate = main_loop(config, fit)
    store_row = row_store(TN, 4 * LANES_N, fit != ANY)

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def async_copy(alpha, a, b, beta, c):
        tiles = cuda.shared.array(0, float32, alignment=16)
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        block_row = int64(cuda.blockIdx.y) * BM
        block_col = int64(cuda.blockIdx.x) * BN
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)
        accumulate(tiles, a, b, block_row, block_col, row, col, 0, a.shape[1], acc)
        for i in range(TM):
            c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return async_copy
