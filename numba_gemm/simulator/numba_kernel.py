"""Kernels that Numba's own simulator runs, launched by ``kernel[grid, block, stream, shared](...)``.

Numba's simulator refuses shared arrays with an alignment, treats `syncwarp` as no barrier, and replaces `cuda` in the
kernel's module alone. Its threads run at the same time, in an order that the operating system chooses.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from . import patches
from .kernel_view import Shared
from .threads import WARP_SIZE


class _Cuda(patches.SimulatedModule):
    """`numba.cuda` with aligned shared arrays and barriers of warps."""

    shared: Any = None  # hides a property of the base class

    def __init__(self, grid: Any, block: Any, dynamic_bytes: int) -> None:
        super().__init__(grid, block, dynamic_bytes)
        self.threads = math.prod(block)
        self.arrived, self.turns = Counter[int](), Counter[int]()  # threads at a barrier, and barriers passed, by warp
        self.changed = threading.Condition()
        self.exchanged = dict[int, Any]()  # by thread
        self.shared = Shared(dynamic_bytes, None)
        self.shared.array(0, np.uint8)  # dynamic shared memory, before threads ask for it

    def syncwarp(self, mask: int = 0xFFFFFFFF) -> None:
        """Wait for all threads of the warp, which must all call this."""
        thread: Any = threading.current_thread()
        warp = thread.thread_id // WARP_SIZE
        with self.changed:
            turn = self.turns[warp]
            self.arrived[warp] += 1
            if self.arrived[warp] == min(WARP_SIZE, self.threads - WARP_SIZE * warp):
                self.arrived[warp], self.turns[warp] = 0, turn + 1
                self.changed.notify_all()
            while self.turns[warp] == turn:
                if thread.abort:  # another thread has raised
                    raise RuntimeError("the launch ends")
                self.changed.wait(0.1)

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: int) -> Any:
        """Return the value of the lane whose number differs in the bits of `lane_mask`; all lanes must take part."""
        thread: Any = threading.current_thread()
        self.exchanged[thread.thread_id] = value
        self.syncwarp()
        other = self.exchanged[thread.thread_id ^ int(lane_mask)]
        self.syncwarp()
        return other


class NumbaKernel(patches.NumbaKernel):
    """Kernel of Numba's own simulator, whose device functions may be in any module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        def silent(*args: Any) -> None:
            with np.errstate(all="ignore"):  # NumPy's setting is per operating-system thread
                function(*args)

        super().__init__(silent, device=False)

    def __call__(self, *args: Any) -> None:
        """Launch the kernel as configured by ``[grid, block, stream, shared]``."""
        replacement = patches.SimulatedCuda()
        try:
            replacement.install_at_launch(self.fn, _Cuda)
            super().__call__(*args)
        finally:
            replacement.restore()
