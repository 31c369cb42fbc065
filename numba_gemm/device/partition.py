"""Partition of C's tiles between blocks (Stream-K), and the addition of partial sums.

The k-tiles of all shared tiles of C form one line, which is cut into as many equal pieces as there are blocks. A piece
may end in the middle of a tile. The blocks that compute parts of a tile write their partial sums to a workspace, and
the last of them to arrive adds all parts, or another kernel does so (`apart`). Then no block waits for another. In
`thin`, blocks publish their parts (`device.published`), and the block with the last part of a tile waits for the
others. Parts are always added in the same order, so the result has the same bits every time. The line comes from Osama
et al., "Stream-K: Work-Centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU" (2023),
arXiv:2301.03598; there, the block with the first part waits for the others.

A kernel is given a `PartitionArguments`:

- `partials`, `counters`: addresses of the workspace, and of 32-bit counters: one per shared tile or, if that is more,
  one per block; in `thin`, room for two published parts per block. Counters are zero before a launch and zero again
  after it;
- `whole`: number of tiles of C that are not shared. Block g computes tiles g, g + blocks, ... of these;
- `base`, `extra`: block g's piece of the line begins at ``g * base + min(g, extra)``;
- `k_tiles`: k-tiles per tile of C;
- `rows`, `cols`: tiles of a matrix along its rows and columns; `group`: rows of tiles that are walked together, column
  by column, so that blocks that run together share more of A and B in the L2 cache;
- `matrices`: number of products; `inner`, `middle`: extents of the last two of three batch dimensions, and `a_outer` to
  `c_inner`: bytes from one matrix to the next along each of the three, 0 where an operand is broadcast;
- `apart`: extents of tiles if another kernel adds the parts (`kernels.ladder.add_parts`), else 0. Then there are no
  counters.

PTX ISA: "atom", "ld", "st", "Memory Consistency Model".
"""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache

from numba import int64, uint32

from ..simulator.switch import SIMULATOR, device_function

FIELDS = (
    "partials",
    "counters",
    "whole",
    "base",
    "extra",
    "k_tiles",
    "rows",
    "cols",
    "group",
    "matrices",
    "inner",
    "middle",
    "a_outer",
    "a_middle",
    "a_inner",
    "b_outer",
    "b_middle",
    "b_inner",
    "c_outer",
    "c_middle",
    "c_inner",
    "apart",
)

PartitionArguments = namedtuple("PartitionArguments", FIELDS)  # type: ignore[misc]

if SIMULATOR:

    def arrive(partition, tile):
        """Count this block at a shared tile; return how many blocks arrived before."""
        before = int(partition.counters[tile])
        partition.counters[tile] = before + 1
        return before

    def reset(partition, tile):
        """Set a shared tile's counter to zero."""
        partition.counters[tile] = 0

    def store_partial(partition, index, value):
        """Write a float of a partial sum, `index` floats from the start of the workspace."""
        partition.partials[index] = value

    def load_partial(partition, index):
        """Read a float of a partial sum that another block may have written."""
        return partition.partials[index]

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .ptx import FLOAT, LONG, NOTHING, WORD, inline

    PARTITION = types.NamedUniTuple(types.int64, len(FIELDS), PartitionArguments)

    def counter_address(builder, partition, tile):
        """Return the address of a counter."""
        return builder.add(builder.extract_value(partition, 1), builder.shl(tile, ir.Constant(LONG, 2)))

    @intrinsic
    def arrive(typingctx, partition, tile):
        """Count this block at a shared tile; return how many blocks arrived before.

        After a barrier, this makes what the block's threads wrote before the barrier visible to all blocks. Before a
        barrier, it makes what earlier blocks wrote visible to the block's threads. The barriers order the block's own
        accesses; release and acquire pass that order on ("Causality order" in PTX ISA's memory consistency model).
        """

        def codegen(context, builder, signature, args):
            code = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
            before = inline(builder, WORD, [counter_address(builder, *args)], code, "=r,l,~{memory}")
            return builder.zext(before, LONG)

        return types.int64(partition, types.int64), codegen

    @intrinsic
    def reset(typingctx, partition, tile):
        """Set a shared tile's counter to zero."""

        def codegen(context, builder, signature, args):
            code = "st.relaxed.gpu.global.u32 [$0], 0;"
            inline(builder, NOTHING, [counter_address(builder, *args)], code, "l,~{memory}")
            return context.get_dummy_value()

        return types.void(partition, types.int64), codegen

    def _place(builder, partition, index):
        return builder.add(builder.extract_value(partition, 0), builder.shl(index, ir.Constant(LONG, 2)))

    @intrinsic
    def store_partial(typingctx, partition, index, value):
        """Write a float of a partial sum, `index` floats from the start of the workspace."""

        def codegen(context, builder, signature, args):
            partition, index, value = args
            place = _place(builder, partition, index)
            inline(builder, NOTHING, [place, value], "st.global.cg.f32 [$0], $1;", "l,f,~{memory}")
            return context.get_dummy_value()

        return types.void(partition, types.int64, types.float32), codegen

    @intrinsic
    def load_partial(typingctx, partition, index):
        """Read a float of a partial sum that another block may have written."""

        def codegen(context, builder, signature, args):
            # bypasses the L1 cache, which other blocks' writes do not reach
            return inline(builder, FLOAT, [_place(builder, *args)], "ld.global.cg.f32 $0, [$1];", "=f,l,~{memory}")

        return types.float32(partition, types.int64), codegen


# Numba widens a product of 32-bit integers to 64 bits, and a 64-bit division is a call: hence every uint32 below.


@device_function
def piece(partition, block):
    """Start of a block's piece of the line of shared k-tiles."""
    return uint32(uint32(block * uint32(partition.base)) + min(block, uint32(partition.extra)))


@device_function
def owner(partition, at):
    """Block whose piece contains a position on the line."""
    base, extra = uint32(partition.base), uint32(partition.extra)
    long = uint32(extra * uint32(base + 1))
    return uint32(at // uint32(base + 1)) if at < long else uint32(extra + uint32(uint32(at - long) // base))


@device_function
def part_slot(partition, index, lead, q):
    """Workspace slot of part q of shared tile `index`, whose first part belongs to block `lead`."""
    second = q == 0 and piece(partition, lead) < uint32(index * uint32(partition.k_tiles))
    return int64(2 * (lead + q) + (1 if second else 0))


@device_function
def first_terms(k, k_tiles, first, BK):
    """Return where a piece of a sum begins, and the terms of its first k-tile; only the sum's first may have fewer."""
    narrow = k - (int64(k_tiles) - 1) * BK
    k0 = int64(0) if first == uint32(0) else narrow + (int64(first) - 1) * BK
    width = narrow if first == uint32(0) else int64(BK)
    return k0, width


@lru_cache(maxsize=64)
def first_k_tile(BK, tails):
    """Return a device function ``(k, k_tiles, first)`` that says how a piece of a sum begins.

    It returns where the piece begins, the terms of its first k-tile, those of them that precede the second k-tile, and
    how far behind these the others begin: with `tails`, the last one to four terms come with a sum's first k-tile, see
    `tile_loader`.
    """

    @device_function
    def without_tails(k, k_tiles, first):
        k0, width = first_terms(k, k_tiles, first, BK)
        return k0, width, width, int64(0)

    @device_function
    def with_tails(k, k_tiles, first):
        k0, width = first_terms(k, k_tiles, first, BK)
        if first == uint32(0):
            return k0, width, (width - 1) // 4 * 4, k - width
        return (k0 - 1) // 4 * 4, width, width, int64(0)

    return with_tails if tails else without_tails


@device_function
def parts_in_group(parts):
    """Number of parts of a sum that one block adds, at least 16; a sum has at most 32 such groups."""
    return max(uint32(16), uint32(uint32(parts + 31) // 32))


@device_function
def member_of(partition, tile):
    """Index in the batch of the matrix that a tile belongs to."""
    return uint32(tile // uint32(uint32(partition.rows) * uint32(partition.cols)))


@device_function
def batch_place(partition, member):
    """Indices of a matrix along the three batch dimensions."""
    inner, middle = uint32(partition.inner), uint32(partition.middle)
    rest = uint32(member // inner)
    outer = uint32(rest // middle)
    return int64(outer), int64(uint32(rest - uint32(outer * middle))), int64(uint32(member - uint32(rest * inner)))


@device_function
def tile_place(partition, tile):
    """Row and column, in tiles, of a tile in its matrix; rows are walked in groups, column by column."""
    top, height = uint32(0), uint32(partition.rows)
    if height > uint32(partition.group):
        band = uint32(uint32(partition.group) * uint32(partition.cols))
        above = uint32(tile // band)
        tile = uint32(tile - uint32(above * band))
        top = uint32(above * uint32(partition.group))
        height = min(uint32(partition.group), uint32(height - top))
    across = uint32(tile // height)
    return uint32(top + uint32(tile - uint32(across * height))), across


@lru_cache(maxsize=64)
def row_partial(columns, threads, sums):
    """Return two device functions that store and load row i of a thread tile's part of a partial sum.

    A part has `sums` floats: one float of every thread, side by side, then the next float of every thread. (Vector
    accesses would take fewer instructions, but tie four sums to neighbouring registers throughout the kernel.) The
    columns of a row are unrolled by hand in groups of four, as in `store.row_store`. Their first column is an argument,
    and one function serves all groups but the first one: a default stays a constant for the compiler.
    """
    if columns not in (4, 8, 16):
        raise ValueError(f"thread tiles of 4, 8 or 16 columns can be shared, got {columns}")

    @device_function
    def store4(partition, at, acc, i, j=0):
        store_partial(partition, at + (i * columns + j) * threads, acc[i, j])
        store_partial(partition, at + (i * columns + j + 1) * threads, acc[i, j + 1])
        store_partial(partition, at + (i * columns + j + 2) * threads, acc[i, j + 2])
        store_partial(partition, at + (i * columns + j + 3) * threads, acc[i, j + 3])

    @device_function
    def load4(partition, at, values, i, j=0):
        values[i, j] = load_partial(partition, at + (i * columns + j) * threads)
        values[i, j + 1] = load_partial(partition, at + (i * columns + j + 1) * threads)
        values[i, j + 2] = load_partial(partition, at + (i * columns + j + 2) * threads)
        values[i, j + 3] = load_partial(partition, at + (i * columns + j + 3) * threads)

    def by_fours(four):
        @device_function
        def row(partition, slot, tid, values, i):
            at = slot * sums + int64(tid)
            four(partition, at, values, i)
            if columns >= 8:
                four(partition, at, values, i, 4)
            if columns == 16:
                four(partition, at, values, i, 8)
                four(partition, at, values, i, 12)

        return row

    return by_fours(store4), by_fours(load4)
