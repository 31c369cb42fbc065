"""snake_order: the products of a k-step in an order that reads fewer registers.

Bottleneck before: register banks. A multiply-add reads three registers from two banks, so at least two of them share a
    bank unless an operand is kept from the multiply-add before. Such reads can cost an extra clock.
Idea: products row after row of the thread tile, every other row backwards, so that from each multiply-add to the next
    one operand stays the same. The compiler keeps it beside the pipe instead of reading it again, and finds registers
    whose banks alternate. The kernel is that of async_copy, in configurations of another order.
Traffic: the same.
Registers and shared memory: the same shared memory; up to twelve more registers in 128x256x16.
Measured: 54.2 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 1.05 of cuBLAS SGEMM and 1.00 times async_copy; 202
    registers per thread, 84.2 % of the FMA pipe, 2.3 % excess shared wavefronts.
Limits: wave quantization: 4096x4096 is 512 tiles on 132 SMs, four rounds where 3.88 would suffice. Within a round, one
    instruction in twelve is not a multiply-add, and most of these read fragments.
"""

from .async_copy import build

__all__ = ["build"]
