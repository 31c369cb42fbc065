"""Speed of copies by the NUMA node of the host memory, and by that of the thread that copies."""

import ctypes
import mmap
import os
import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver

from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.lab.harness.pictures import bars, panels
from numba_gemm.lab.memory import machine, movement, transfers
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.device import current_device
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import host_us, span_ms

NODES = Path("/sys/devices/system/node")
BIND = 2  # Linux: MPOL_BIND
MBIND = {"x86_64": 237, "aarch64": 235}  # Linux: number of the system call
NEAREST = 10  # distance of a node from itself, by definition
MEMORIES = (transfers.ON_HOST, transfers.PAGEABLE, transfers.PINNED)


def numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    ends = (part.split("-") for part in text.strip().split(",") if part)
    return {number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)}


def processors() -> dict[int, set[int]]:
    """Return the processors on which this thread may run, by node; empty where Linux does not tell the nodes."""
    lists = {int(path.parent.name[4:]): path.read_text() for path in NODES.glob("node[0-9]*/cpulist")}
    return {node: numbers(text) & os.sched_getaffinity(0) for node, text in sorted(lists.items())}


def distance(node: int, other: int) -> int:
    """Relative latency from one node to another, as the firmware tells; `NEAREST` if they are the same."""
    distances = (NODES / f"node{node}" / "distance").read_text().split()
    return int(distances[sorted(processors()).index(other)])


def gpu_node() -> int:
    """NUMA node of the current device; -1 if the system does not tell."""
    with suppress(OSError, ValueError):
        device = call(driver.cuDeviceGet, current_device())
        address = call(driver.cuDeviceGetPCIBusId, 32, device).split(b"\0")[0].decode().lower()
        return int((Path("/sys/bus/pci/devices") / address / "numa_node").read_text())
    return -1


def node_of(address: int) -> int:
    """Node that holds most pages of the mapping at an address; -1 if the system does not tell."""
    found = -1
    with suppress(OSError):
        for line in Path("/proc/self/numa_maps").read_text().splitlines():
            if int(line.split()[0], 16) <= address:
                pages = {int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", line)}
                found = max(pages, key=lambda node: pages[node], default=-1)
    return found


@contextmanager
def running_on(node: int) -> Iterator[None]:
    """Run this thread on the processors of a node."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors()[node] or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def placed(node: int, elements: int) -> np.ndarray:
    """Return float32 memory that is bound to a node if that is permitted, and touched first from there."""
    size = -(-4 * elements // mmap.PAGESIZE) * mmap.PAGESIZE
    array = np.frombuffer(mmap.mmap(-1, size), np.float32)[:elements]  # shared, so that `node_of` finds it alone
    mask = ctypes.c_ulong(1 << node)
    if platform.machine() in MBIND:  # not permitted in some containers
        values = (MBIND[platform.machine()], array.ctypes.data, size, BIND, ctypes.addressof(mask), 64, 0)
        ctypes.CDLL(None).syscall(*map(ctypes.c_long, values))
    with running_on(node):
        array[:] = np.resize(np.arange(1000, dtype=np.float32), elements)
    return array


def numa(elements: int = 1 << 26, rounds: int = 9) -> Iterator[pd.DataFrame]:
    """Copy host memory of each node by threads on each node: page-locked, as pageable memory, and by the host alone.

    One row per ``memory``, ``direction``, ``memory_node`` and ``thread_node``: ``gpu_node`` (-1 if unknown),
    ``distance`` of the thread from the memory, ``ms`` (median) and ``gb_s`` of the bytes copied.

    Parameters
    ----------
    elements: Floats of a buffer; several times the host's caches.
    """
    nodes = processors()
    if len(nodes) < 2:
        raise Unavailable(
            f"this system has {len(nodes) or 'no known'} NUMA node; expected two or more to place memory on"
        )
    rows: list[dict[str, Any]] = []
    with movement.Scope() as scope:
        (stream,), (near,) = scope.streams(), scope.on_device(1, elements)
        buffers = {node: [placed(node, elements) for _ in range(2)] for node in nodes}
        held = {node: pair for node, pair in buffers.items() if {node_of(one.ctypes.data) for one in pair} == {node}}
        if len(held) < 2:
            raise Unavailable(f"this process gets memory of the NUMA nodes {list(held)} only, of {list(buffers)}")
        for source, _ in held.values():
            movement.copy(near, source, source.nbytes, stream)
        common = {"gpu_node": gpu_node(), "link_gb_s": transfers.link_gb_s(*transfers.link())}  # an idle link is slower
        for node, (source, target) in held.items():
            for memory in MEMORIES:
                with ExitStack() as locked:
                    for array in (source, target) if memory == transfers.PINNED else ():
                        locked.enter_context(pinned_memory.registered(array))
                    for thread in (node for node, found in nodes.items() if found):
                        with running_on(thread):
                            times = measure(memory, source, target, near, stream, rounds)
                        row = {"memory": memory, "memory_node": node, "thread_node": thread} | common
                        row |= {"distance": distance(thread, node)}
                        for direction, ms in times.items():
                            rows.append(row | {"direction": direction, "ms": ms, "gb_s": source.nbytes / ms / 1e6})
                yield predicted(pd.DataFrame(rows))


def measure(memory: str, source: Any, target: Any, near: Any, stream: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of copies from `source` to `target`, by the host or by way of the device, by direction."""
    target[:] = 0
    if memory == transfers.ON_HOST:
        times = {transfers.ON_HOST: host_us(lambda: np.copyto(target, source), rounds) / 1e3}
    else:
        movement.clear(near, source.nbytes, stream)
        work = {
            transfers.TO_DEVICE: lambda: movement.copy(near, source, source.nbytes, stream),
            transfers.TO_HOST: lambda: movement.copy(target, near, source.nbytes, stream),
        }
        times = {direction: span_ms([stream], copy, rounds) for direction, copy in work.items()}
    assert np.array_equal(target, source), f"{memory}: what was copied is wrong"
    return times


def predicted(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the predicted speeds."""
    host = frame[frame["memory"] == transfers.ON_HOST]
    copied = host["gb_s"][host["distance"] == NEAREST].max() * NEAREST / frame["distance"]
    either = np.minimum(copied, frame["link_gb_s"].fillna(np.inf))
    speeds = {transfers.ON_HOST: copied, transfers.PAGEABLE: either, transfers.PINNED: frame["link_gb_s"]}
    return frame.assign(predicted_gb_s=sum(of.where(frame["memory"] == name, 0) for name, of in speeds.items()))


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    pinned, host = frame[frame["memory"] == transfers.PINNED], frame[frame["memory"] == transfers.ON_HOST]
    over = pinned.groupby(["direction", "memory_node"])["gb_s"].agg(["min", "max"])
    nodes = pinned.groupby("direction")["gb_s"].agg(["min", "max"])
    own, other = host[host["memory_node"] == host["thread_node"]], host[host["memory_node"] != host["thread_node"]]
    return {
        "a copy of page-locked memory takes the same time wherever its thread runs, to 5 %": (
            over["max"] < 1.05 * over["min"]
        ),
        "and on whichever node the memory is, within a third": nodes["max"] < 4 / 3 * nodes["min"],
        "the host copies memory of its own node faster than memory of another": (other["gb_s"] < own["gb_s"].min()),
    }


BAR = "{}, {}: memory on {}, thread on {}"
PLOT = panels(bars("gb_s", ["memory", "direction", "memory_node", "thread_node"], label=BAR))
SMALL = {"elements": 1 << 20, "rounds": 1}
EXPERIMENT = machine.gpu_experiment(numa, "9.4", claims, PLOT, SMALL)
