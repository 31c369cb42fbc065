"""Floats that a block publishes for another one, which waits for them.

Each float is its own flag. Its place in global memory is +0 until it is published, and +0 is published as -0, which
adds nothing to a sum. So a float takes one trip to the L2 cache, and one from there. With a counter, another block can
read the floats only after their writes have been confirmed and the counter has been increased: two trips more. The
block that reads a float withdraws it, so all places are +0 again when the launch ends.

A block may wait only for blocks of lower indices. A GPU starts blocks in the order of their indices, so these have
started before it, and none of them waits for a later one. (CUDA does not promise this order; "decoupled look-back"
scans and Stream-K rely on it, too.) Two launches must not use the same places at the same time: one may withdraw what
the other waits for.

The places are the counters of a `numba_gemm.device.partition.PartitionArguments`. One instruction moves up to four
adjacent floats of a thread, which may become visible at different times.

PTX ISA: "ld.relaxed", "st.relaxed", "Memory Consistency Model". The protocol without counters is known from all-reduces
between GPUs, such as the LL protocol of NCCL. Simulator twin: blocks run one after another and do not wait; a float
that is not published yet is read as +0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..simulator.switch import SIMULATOR, device_function

NOTHING_YET, MINUS_ZERO = 0, 1 << 31  # the bits of +0 and -0


class PublishedFloats(NamedTuple):
    """Functions for runs of floats, whose first place is `index`, a multiple of their number.

    Attributes
    ----------
    publish : function
        ``publish(partition, index, values, i)`` publishes a run of a local array, from `i` on.
    read : function
        ``read(partition, index, wanted, values, row, i)`` reads a run to a row of a local array, without waiting: a
        float that is not published yet is +0. If the run is not wanted, nothing is read, and its floats are -0.
    withdraw : function
        ``withdraw(partition, index)`` makes places +0 again.
    """

    publish: Any
    read: Any
    withdraw: Any


if SIMULATOR:
    import numpy as np

    def missing(value):
        """Return True if a float that was read is not published yet, so that it must be read again."""
        return False

    def _access(count):
        def publish(partition, index, values):
            for i, value in enumerate(values):
                bits = int(np.float32(value).view(np.uint32)) or MINUS_ZERO
                partition.counters[index + i] = np.uint32(bits).view(np.int32)

        def read(partition, index, wanted):
            if not wanted:
                return (np.float32(-0.0),) * count
            return tuple(np.int32(partition.counters[index + i]).view(np.float32) for i in range(count))

        def withdraw(partition, index):
            for i in range(count):
                partition.counters[index + i] = NOTHING_YET

        return publish, read, withdraw

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .partition import counter_address
    from .ptx import FLOAT, NOTHING, WORD, inline

    @intrinsic
    def missing(typingctx, value):
        """Return True if a float that was read is not published yet."""

        def codegen(context, builder, signature, args):
            return builder.icmp_unsigned("==", builder.bitcast(args[0], WORD), ir.Constant(WORD, NOTHING_YET))

        return types.boolean(types.float32), codegen

    def _access(count):
        suffix = {1: "", 2: ".v2", 4: ".v4"}[count]

        def run(first):
            names = ", ".join(f"${first + i}" for i in range(count))
            return names if count == 1 else f"{{{names}}}"

        def published(builder, value):
            bits = builder.bitcast(value, WORD)
            zero = builder.icmp_unsigned("==", bits, ir.Constant(WORD, NOTHING_YET))
            return builder.select(zero, ir.Constant(WORD, MINUS_ZERO), bits)

        def write(builder, partition, index, words):
            code = f"st.relaxed.gpu.global{suffix}.b32 [$0], {run(1)};"
            operands = [counter_address(builder, partition, index), *words]
            inline(builder, NOTHING, operands, code, "l" + ",r" * count + ",~{memory}")

        @intrinsic
        def publish(typingctx, partition, index, values):
            def codegen(context, builder, signature, args):
                floats = (builder.extract_value(args[2], i) for i in range(count))
                write(builder, *args[:2], [published(builder, value) for value in floats])
                return context.get_dummy_value()

            return types.void(partition, types.int64, types.UniTuple(types.float32, count)), codegen

        @intrinsic
        def read(typingctx, partition, index, wanted):
            def codegen(context, builder, signature, args):
                code = f"{{ .reg .pred wanted; setp.ne.u32 wanted, ${count + 1}, 0; "
                code += "".join(f"mov.b32 ${i}, {MINUS_ZERO:#x}; " for i in range(count))
                code += f"@wanted ld.relaxed.gpu.global{suffix}.f32 {run(0)}, [${count}]; }}"
                operands = [counter_address(builder, *args[:2]), builder.zext(args[2], WORD)]
                result = FLOAT if count == 1 else ir.LiteralStructType([FLOAT] * count)
                constraints = "=&f," * count + "l,r,~{memory}"
                found = inline(builder, result, operands, code, constraints)
                values = [found] if count == 1 else [builder.extract_value(found, i) for i in range(count)]
                return context.make_tuple(builder, signature.return_type, values)

            return types.UniTuple(types.float32, count)(partition, types.int64, types.boolean), codegen

        @intrinsic
        def withdraw(typingctx, partition, index):
            def codegen(context, builder, signature, args):
                write(builder, *args, [ir.Constant(WORD, NOTHING_YET)] * count)
                return context.get_dummy_value()

            return types.void(partition, types.int64), codegen

        return publish, read, withdraw


def published_floats(count):
    """Return `PublishedFloats` for runs of 1, 2 or 4 floats."""
    publish, read, withdraw = _access(count)

    if count == 1:

        @device_function
        def publish_run(partition, index, values, i):
            publish(partition, index, (values[i],))

        @device_function
        def read_run(partition, index, wanted, values, row, i):
            (values[row, i],) = read(partition, index, wanted)

    elif count == 2:

        @device_function
        def publish_run(partition, index, values, i):
            publish(partition, index, (values[i], values[i + 1]))

        @device_function
        def read_run(partition, index, wanted, values, row, i):
            values[row, i], values[row, i + 1] = read(partition, index, wanted)

    else:

        @device_function
        def publish_run(partition, index, values, i):
            publish(partition, index, (values[i], values[i + 1], values[i + 2], values[i + 3]))

        @device_function
        def read_run(partition, index, wanted, values, row, i):
            four = read(partition, index, wanted)
            values[row, i], values[row, i + 1], values[row, i + 2], values[row, i + 3] = four

    return PublishedFloats(publish_run, read_run, withdraw)
