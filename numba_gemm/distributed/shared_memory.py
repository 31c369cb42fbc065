"""Memory that the ranks of one host share: each has a buffer that the others open.

On GPUs, the driver's interprocess handles open it, and copy engines reach it over NVLink or PCI Express, so that
products keep all multiprocessors. On a CPU, where the simulator runs, it is a file in memory that all map.
"""

from __future__ import annotations

import os
import secrets
import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from ..device.units import FLOAT32_BYTES
from ..runtime.driver import call
from .schedule import SLOTS

__all__ = ["CLOSED", "NOTHING", "Buffer", "Peer", "all_buffers", "buffer_of"]

HANDLE_BYTES = 64  # of the driver's handles of memory and of events
EVENTS = 2 * SLOTS + 1
WORDS = (1 + EVENTS) * HANDLE_BYTES // 8  # of the handles of memory and of events
NOTHING = [0] * (2 + WORDS)  # what a rank tells that has no memory left for a buffer
CLOSED = [0, 1, *[0] * WORDS]  # what a rank tells whose buffer no other process can open


class _Allocation:
    """Memory on a GPU outside of PyTorch's pool, which would divide and keep it: others map it as a whole."""

    def __init__(self, elements: int) -> None:
        try:
            self.address = int(call(driver.cuMemAlloc, elements * FLOAT32_BYTES))
        except RuntimeError:
            torch.cuda.empty_cache()
            self.address = int(call(driver.cuMemAlloc, elements * FLOAT32_BYTES))
        self.__cuda_array_interface__ = {
            "shape": (elements,),
            "typestr": "<f4",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def handle(self) -> bytes:
        return bytes(call(driver.cuIpcGetMemHandle, self.address).reserved)

    def free(self) -> None:
        call(driver.cuMemFree, self.address)


class Buffer:
    """Memory of this rank that others read or write.

    Attributes
    ----------
    number : int
        Random number of the present memory, 0 if there is none.
    room : int
        Its floats.
    lacks : int
        Floats for which there was no memory; 0 if there was.
    ready : list of Event or None
        Events by slot: this rank has written what others need, to their memory in turns of that slot, or to its own.
    free : list of Event or None
        Events by slot: this rank has read what was in it; after all of them, others may write anywhere.
    read : Event or None
        Event: this rank has copied sums from all others.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.number, self.room, self.lacks = device, 0, 0, 0
        self.memory: Tensor | None = None
        events: list[Any] = [None] * EVENTS
        if device.type == "cuda":
            events = [torch.cuda.Event(interprocess=True) for _ in events]
        self.ready, self.free, self.read = _by_use(events)
        self._allocation: _Allocation | None = None
        self._openers: set[int] = set()  # processes that have the memory open
        self._retired: list[tuple[_Allocation, set[int]]] = []  # old memory, and who has it open
        self._file = 0  # descriptor of the memory of a CPU
        self._peers: dict[int, Peer] = {}  # by the number of their owner's process

    def reserve(self, elements: int) -> None:
        """Have room for so many floats; old memory is kept while others have it open."""
        if elements <= self.room:
            return
        if self.device.type == "cuda":
            self.lacks = elements
            with torch.cuda.device(self.device), torch.inference_mode(False):
                allocation = _Allocation(elements)
                self.memory = torch.as_tensor(allocation, device=self.device)
            if self._allocation is not None:
                self._retired.append((self._allocation, self._openers))
            self._allocation, self._openers, self.lacks = allocation, set(), 0
        else:
            if self.number:
                os.close(self._file)
            self._file = os.memfd_create("numba_gemm")
            self.memory = _mapped(os.getpid(), self._file, elements)
            self._openers = set()
        self.number, self.room = secrets.randbits(62) | 1, elements

    def told(self) -> list[int]:
        """Return what other ranks open the memory by, as integers of 64 bits."""
        words = struct.pack("<2q", os.getpid(), self._file)
        if self._allocation is not None:
            with torch.cuda.device(self.device):
                events = [one.ipc_handle() for one in (*self.ready, *self.free, self.read)]
                words = b"".join([self._allocation.handle(), *events])
        parts = struct.unpack(f"<{WORDS}q", words.ljust(8 * WORDS, b"\0"))
        return [_process(), self.number, *parts]

    def open(self, told: list[int]) -> Peer:
        """Return the memory of another rank, which is opened once.

        Raises
        ------
        RuntimeError, OSError
            If this process cannot open it.
        """
        owner, number, *parts = told
        words = struct.pack(f"<{WORDS}q", *parts)
        if (known := self._peers.get(owner)) is not None and known.number == number:
            return known
        if known is not None:
            self._peers.pop(owner).close()
        self._peers[owner] = Peer(self.device, number, words)
        return self._peers[owner]

    def note_openers(self, processes: set[int]) -> None:
        """Note processes that may open the present memory."""
        self._openers |= processes

    def free_closed(self, processes: set[int]) -> None:
        """Free old memory that no process has open, since these have closed it."""
        retired, self._retired = self._retired, []
        for memory, openers in retired:
            if openers <= processes:
                self._free(memory)
            else:
                self._retired.append((memory, openers - processes))

    def close_peers(self) -> None:
        """Close the memory of all other ranks, after all copies to and from it."""
        peers = list(self._peers.values())
        self._peers.clear()
        for peer in peers:
            peer.close()

    def free_all(self) -> None:
        """Free all memory, which no rank has open any more, after all work on it."""
        for memory, _ in self._retired:
            self._free(memory)
        if self._allocation is not None:
            self._free(self._allocation)
        elif self.number:
            os.close(self._file)
        self.memory = self._allocation = None
        self._openers, self._retired = set(), []
        self.number = self.room = self.lacks = 0

    def _free(self, memory: _Allocation) -> None:
        with torch.cuda.device(self.device):
            memory.free()


class Peer:
    """Memory of another rank of this host, and the events of its `Buffer`."""

    def __init__(self, device: torch.device, number: int, words: bytes) -> None:
        self.device, self.number = device, number
        found: list[Any] = [None] * EVENTS
        if device.type == "cuda":
            memory, *events = (words[i : i + HANDLE_BYTES] for i in range(0, len(words), HANDLE_BYTES))
            handle = driver.CUipcMemHandle()
            handle.reserved = memory
            lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            with torch.cuda.device(device):
                self._address = int(call(driver.cuIpcOpenMemHandle, handle, lazily.value))
                found = [torch.cuda.Event.from_ipc_handle(device, one) for one in events]
        else:
            self._memory = _mapped(*struct.unpack_from("<2q", words))
        self.ready, self.free, self.read = _by_use(found)

    def read_into(self, target: Tensor, begin: int) -> None:
        """Copy floats from this memory on the current stream, from `begin` on, to contiguous ones."""
        if self.device.type != "cuda":
            target.copy_(self._memory[begin : begin + target.numel()].view(target.shape))
        elif target.numel():
            self._copy(target.data_ptr(), self._address + FLOAT32_BYTES * begin, target.numel())

    def write(self, source: Tensor, begin: int, pitch: int) -> None:
        """Copy a matrix to this memory on the current stream: to rows of `pitch` floats, from `begin` on."""
        rows, cols = source.shape
        if not source.numel():
            return
        if self.device.type != "cuda":
            self._memory.as_strided((rows, cols), (pitch, 1), begin).copy_(source)
            return
        if (cols > 1 and source.stride(1) != 1) or (rows > 1 and source.stride(0) < cols):
            source = source.contiguous()
        target = self._address + FLOAT32_BYTES * begin
        step = source.stride(0) if rows > 1 else cols
        if rows == 1 or step == pitch == cols:
            self._copy(target, source.data_ptr(), rows * cols)
            return
        what = driver.CUDA_MEMCPY2D()
        what.srcMemoryType = what.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        what.srcDevice, what.dstDevice = source.data_ptr(), target
        what.srcPitch, what.dstPitch = FLOAT32_BYTES * step, FLOAT32_BYTES * pitch
        what.WidthInBytes, what.Height = FLOAT32_BYTES * cols, rows
        with torch.cuda.device(self.device):
            call(driver.cuMemcpy2DAsync, what, torch.cuda.current_stream(self.device).cuda_stream)

    def _copy(self, target: int, source: int, count: int) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self.device):
            call(driver.cuMemcpyAsync, target, source, FLOAT32_BYTES * count, stream)

    def close(self) -> None:
        """Close the memory, after all copies to and from it."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.synchronize(self.device)
                call(driver.cuIpcCloseMemHandle, self._address)


_buffers: dict[torch.device, Buffer] = {}


def buffer_of(device: torch.device) -> Buffer:
    """Return this process's buffer on a device."""
    if device not in _buffers:
        _buffers[device] = Buffer(device)
    return _buffers[device]


def all_buffers() -> list[Buffer]:
    """Return this process's buffers on all devices."""
    return list(_buffers.values())


def _by_use(events: list[Any]) -> tuple[list[Any], list[Any], Any]:
    return events[:SLOTS], events[SLOTS:-1], events[-1]


@cache
def _process() -> int:
    return secrets.randbits(62) | 1


def _mapped(process: int, file: int, elements: int | None = None) -> Tensor:
    """Return the memory of a process's file, of this size or as large as it is."""
    path = Path(f"/proc/{process}/fd/{file}")
    size = path.stat().st_size // FLOAT32_BYTES if elements is None else elements
    with torch.inference_mode(False):  # else it could not be written to outside of that mode
        return torch.from_file(str(path), shared=True, size=size)
