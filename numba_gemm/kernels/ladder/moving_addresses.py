"""moving_addresses: each thread keeps the addresses of its loads and stores, and adds to them.

Bottleneck before: one instruction in ten is not a multiply-add. Many of them compute addresses from indices and
    strides, again for every tile.
Idea: addresses in place of indices. Before the loop, each thread computes the global addresses of its first loads and
    the shared addresses of its first stores. For each tile it adds a constant to the global addresses, and the offset
    of the buffer to the shared ones. A constant distance between two accesses is part of the instruction. `pinned`
    keeps the compiler from computing an address again in every tile to save a register. Rows of A and columns of B
    beyond the last are replaced by the last, since their results are never stored, so only k is compared with its end.
Traffic: the same.
Registers and shared memory: as register_prefetch, and addresses in place of indices: one of 64 bits for each vector of
    A that the thread loads, and one for B.
Measured: 53.8 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 1.05 of cuBLAS SGEMM and 1.02 times register_prefetch; 205
    registers per thread, 83.6 % of the FMA pipe, 2.3 % excess shared wavefronts.
Limits: each vector of B is loaded by one instruction and stored by another one, and waits in registers in between.
"""

from numba import cuda, float32, int64, uint32

from ...device.address import (
    address_of,
    col_step,
    global_load4_or_zero,
    row_step,
    shared_address,
    shared_load4,
    shared_store1,
    shared_store4,
)
from ...device.kept import pinned
from ...device.store import row_store
from ...device.units import WARP
from ...device.vector import fetch4_any
from ...simulator.switch import device_function, hardware_only
from ..stage import vector_copies
from .stage import ANY, WHOLE
from .tile_config import require


def build(config, fit):
    BM, BN, BK, TM, TN, WM, WN = config.BM, config.BN, config.BK, config.TM, config.TN, config.WM, config.WN
    THREADS = config.threads
    A_VECTORS, B_VECTORS = max(BK // 4, 1), max(BN // 4, 1)  # per row of the tiles that are copied
    A_ROWS = THREADS // A_VECTORS  # rows of A that the block copies at a time
    B_ROWS = THREADS // B_VECTORS  # rows of B
    A_LOADS, B_LOADS = BM // max(A_ROWS, 1), BK // max(B_ROWS, 1)  # vectors that each thread stages
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
            **vector_copies(config),
            "two buffers: slots == 2": config.slots == 2,
            "dynamic shared memory": config.dynamic,
        },
    )
    store_row = row_store(TN, 4 * LANES_N, fit != ANY)

    @device_function
    def fetch(x, at, row, col, inside):
        """Read x[row, col:col+4], which is at an address, or return zeros unless inside."""
        if fit == ANY:
            return fetch4_any(x, row, col)
        return global_load4_or_zero(x, at, fit == WHOLE or inside)

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
    def multiply(a_frag, b_frag, acc):
        """Add the products of one k-step."""
        for j in range(TN):
            for i in range(TM):
                acc[i, j] += a_frag[i] * b_frag[j]

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

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def moving_addresses(alpha, a, b, beta, c):
        tiles = cuda.shared.array(0, float32, alignment=16)
        start = shared_address(tiles)
        k = a.shape[1]
        tid = uint32(cuda.threadIdx.x)
        warp, lane = tid // WARP, tid % WARP
        block_row = int64(cuda.blockIdx.y) * BM
        block_col = int64(cuda.blockIdx.x) * BN
        a_row, a_col = block_row + tid // A_VECTORS, tid % A_VECTORS * 4
        b_row, b_col = tid // B_VECTORS, block_col + tid % B_VECTORS * 4
        row = warp // (BN // WN) * WM + lane // LANES_N * 4  # this thread's first group within the block tile
        col = warp % (BN // WN) * WN + lane % LANES_N * 4

        # addresses of this thread's first loads and stores, and of its fragments of the first k-step
        a_at = cuda.local.array(A_LOADS, int64)
        for i in range(A_LOADS):
            a_at[i] = address_of(a, min(a_row + i * A_ROWS, a.shape[0] - 1), a_col)
        b_at = address_of(b, b_row, min(b_col, b.shape[1] - 4))
        a_to = pinned(uint32(start + a_col * A_PITCH + 4 * (tid // A_VECTORS)))
        b_to = pinned(uint32(start + B_START + b_row * B_PITCH + 4 * (tid % B_VECTORS * 4)))
        a_from = pinned(uint32(start + 4 * row))
        b_from = pinned(uint32(start + B_START + 4 * col))

        a_next = cuda.local.array((A_LOADS, 4), float32)
        b_next = cuda.local.array((B_LOADS, 4), float32)
        a_even = cuda.local.array(TM, float32)  # fragments of the even k-steps
        b_even = cuda.local.array(TN, float32)
        a_odd = cuda.local.array(TM, float32)  # fragments of the odd k-steps
        b_odd = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        for i in range(A_LOADS):
            store_a(tiles, a_to, i, fetch(a, a_at[i], a_row + i * A_ROWS, a_col, a_col < k))
        for i in range(B_LOADS):
            p = b_row + i * B_ROWS
            values = fetch(b, b_at + i * B_ROWS * row_step(b), p, b_col, p < k)
            shared_store4(tiles, uint32(b_to + i * B_ROWS * B_PITCH), values)
        buffer = uint32(0)  # bytes from the first buffer to the one that is read
        cuda.syncthreads()  # all threads have written the first tiles before any reads them
        read_fragments(tiles, a_from, b_from, 0, a_even, b_even)

        k0 = BK
        while k0 < k:
            for i in range(A_LOADS):
                a_at[i] += BK * col_step(a)
                values = fetch(a, a_at[i], a_row + i * A_ROWS, k0 + a_col, k0 + a_col < k)
                a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3] = values
            b_at += BK * row_step(b)
            for i in range(B_LOADS):
                p = k0 + b_row + i * B_ROWS
                values = fetch(b, b_at + i * B_ROWS * row_step(b), p, b_col, p < k)
                b_next[i, 0], b_next[i, 1], b_next[i, 2], b_next[i, 3] = values
            a_now, b_now = uint32(a_from + buffer), uint32(b_from + buffer)
            multiply_tile(tiles, a_now, b_now, a_even, b_even, a_odd, b_odd, acc)
            buffer = uint32(BUFFER - buffer)
            for i in range(A_LOADS):
                store_a(tiles, uint32(a_to + buffer), i, (a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3]))
            for i in range(B_LOADS):
                values = (b_next[i, 0], b_next[i, 1], b_next[i, 2], b_next[i, 3])
                shared_store4(tiles, uint32(b_to + uint32(buffer + i * B_ROWS * B_PITCH)), values)
            # all threads have written the next tiles before any reads them, and have read this tile's last fragments
            # before the next iteration overwrites it
            cuda.syncthreads()
            read_fragments(tiles, uint32(a_from + buffer), uint32(b_from + buffer), 0, a_even, b_even)
            multiply(a_odd, b_odd, acc)
            k0 += BK
        a_now, b_now = uint32(a_from + buffer), uint32(b_from + buffer)
        multiply_tile(tiles, a_now, b_now, a_even, b_even, a_odd, b_odd, acc)
        multiply(a_odd, b_odd, acc)

        for i in range(TM):
            c_row = block_row + row + i // 4 * (4 * LANES_M) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return moving_addresses
