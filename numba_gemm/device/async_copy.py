"""Asynchronous copies from global to shared memory, past the registers (compute capability 8.0 and up).

`cp_async4`, `cp_async8` and `cp_async16` start a copy of 4, 8 or 16 bytes and return at once; outside of the matrix
they write zeros and read nothing. `commit_group` closes the group of all copies that this thread has started since the
last one, and ``wait_group(n)`` waits until at most the newest n groups of this thread are in flight. A thread's wait
does not cover the copies of other threads: a barrier must follow before their bytes are read. PTX ISA: "cp.async",
"cp.async.commit_group", "cp.async.wait_group".

The simulator twins guarantee no more than the hardware does. A copy's destination holds NaN from the start of the copy,
since the bytes may change at any time. The copy reads its source and lands at the wait that guarantees it, no sooner.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

if SIMULATOR:
    from ..simulator.scheduler import thread_state
    from .watch import Copy, address

    def _groups():
        """Groups of this thread's copies in flight, oldest first; the last group is still open."""
        return thread_state().setdefault("async_groups", [[]])

    def _targets():
        """Places that this thread's open group of copies writes."""
        return thread_state().setdefault("async_targets", set())

    def _start(tile, tile_row, tile_col, inside, matrix, row, col, count):
        to = address(tile) + int(tile_row) * tile.strides[0] + int(tile_col) * tile.strides[1]
        if to % (4 * count):
            raise ValueError(f"misaligned {4 * count}-byte copy to [{tile_row}, {tile_col}]: address {to:#x}")
        if tile_col + count > tile.shape[1] or tile_row >= tile.shape[0]:
            raise IndexError(f"copy to [{tile_row}, {tile_col}:{tile_col + count}] of a tile of shape {tile.shape}")
        if row < 0 or col < 0:
            raise IndexError(f"negative index [{row}, {col}] of a matrix in global memory")
        if inside and (row >= matrix.shape[0] or col + count > matrix.shape[1]):
            raise IndexError(f"copy from [{row}, {col}:{col + count}] of a matrix of shape {matrix.shape}")
        if count > 1:  # also outside of the matrix: the copy writes zeros, but the instruction takes the address
            source = address(matrix) + int(row) * matrix.strides[0] + int(col) * matrix.strides[1]
            if source % (4 * count) or matrix.strides[1] != 4:
                raise ValueError(f"misaligned or strided {4 * count}-byte copy from [{row}, {col}]")
        sources = [(row, col + i) for i in range(count)] if inside else []
        start_copy(tile, [(tile_row, tile_col + i) for i in range(count)], matrix, sources)

    def start_copy(target, targets, source, sources):
        """Start a copy of consecutive elements, with zeros where sources are missing; it lands at the wait.

        Two copies of a group are not ordered, so they may not have a target in common.
        """
        places, taken = {(id(target), place) for place in targets}, _targets()
        if not places.isdisjoint(taken):
            raise ValueError(f"two copies of one group to the same place in shared memory: {list(targets)}")
        taken |= places
        _groups()[-1].append(Copy(target, targets, source, sources))

    def cp_async4(tile, tile_row, tile_col, inside, matrix, row, col):
        """Start copying ``matrix[row, col]`` to ``tile[tile_row, tile_col]``, or a zero unless ``inside``."""
        _start(tile, tile_row, tile_col, inside, matrix, row, col, 1)

    def cp_async8(tile, tile_row, tile_col, inside, matrix, row, col):
        """Start copying ``matrix[row, col:col+2]`` to ``tile[tile_row, tile_col:]``, or zeros unless ``inside``."""
        _start(tile, tile_row, tile_col, inside, matrix, row, col, 2)

    def cp_async16(tile, tile_row, tile_col, inside, matrix, row, col):
        """Start copying ``matrix[row, col:col+4]`` to ``tile[tile_row, tile_col:]``, or zeros unless ``inside``."""
        _start(tile, tile_row, tile_col, inside, matrix, row, col, 4)

    def commit_group():
        """Close the group of copies started since the last call."""
        _groups().append([])
        _targets().clear()

    def wait_group(newest):
        """Wait until at most the ``newest`` groups of this thread are in flight."""
        groups = _groups()
        while len(groups) - 1 > newest:
            for copy in groups.pop(0):
                copy.land()

else:
    from llvmlite import ir
    from numba.core.errors import TypingError
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .matrix import BYTE_POINTER, GLOBAL_BYTE_POINTER, element_address
    from .ptx import NOTHING, WORD, inline, instruction

    def shared_address(context, builder, tile_type, tile, row, col):
        """32-bit address in shared memory of ``tile[row, col]``."""
        base = context.make_array(tile_type)(context, builder, tile)
        offset = builder.mul(row, builder.extract_value(base.strides, 0))
        offset = builder.add(offset, builder.shl(col, ir.Constant(ir.IntType(64), 2)))
        generic = builder.gep(builder.bitcast(base.data, BYTE_POINTER), [offset])
        return builder.ptrtoint(builder.addrspacecast(generic, ir.IntType(8).as_pointer(3)), WORD)

    def copy(size, cache):
        """Return an intrinsic that copies ``size`` bytes; a source size of 0 reads nothing and writes zeros."""
        function = ir.FunctionType(ir.VoidType(), [WORD, GLOBAL_BYTE_POINTER, WORD])
        code = f"cp.async.{cache}.shared.global [$0], [$1], {size}, $2;"

        def start(typingctx, tile, tile_row, tile_col, inside, matrix, row, col):
            def codegen(context, builder, signature, args):
                tile, tile_row, tile_col, inside, *place = args
                to = shared_address(context, builder, signature.args[0], tile, tile_row, tile_col)
                source = element_address(builder, signature.args[4], *place)
                count = builder.select(inside, ir.Constant(WORD, size), ir.Constant(WORD, 0))
                builder.asm(function, code, "r,l,r,~{memory}", [to, source, count], side_effect=True)
                return context.get_dummy_value()

            index = types.int64
            return types.void(tile, index, index, types.boolean, matrix, index, index), codegen

        return intrinsic(start)

    cp_async4 = copy(4, "ca")
    cp_async8 = copy(8, "ca")
    cp_async16 = copy(16, "cg")

    @instruction(types.void(), "cp.async.commit_group;")
    def commit_group():
        """Close the group of copies started since the last call."""

    @intrinsic
    def wait_group(typingctx, newest):
        """Wait until at most the ``newest`` groups of this thread are in flight; ``newest`` is a constant."""
        if not isinstance(newest, types.IntegerLiteral):
            raise TypingError("wait_group takes a constant number of groups")

        def codegen(context, builder, signature, args):
            inline(builder, NOTHING, [], f"cp.async.wait_group {newest.literal_value};", "~{memory}")
            return context.get_dummy_value()

        return types.void(newest), codegen
