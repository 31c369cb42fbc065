"""Host and all devices share one address range: a pointer reveals its memory, and which accesses are possible.

For every kind of memory, the driver is queried about an address: its type, its device, the pointers by which host and
device reach it, and its extent. For host memory, the device pointer is compared with the host pointer. According to the
guide, they are equal for memory allocated as page-locked, and differ for memory registered later; that is
`predicted_equal_by_guide`. The device attribute `CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM` tells whether this device can
use the host pointer of registered memory; that is `predicted_equal`. On an H200 the attribute is 1, and the two
pointers of registered memory are equal: there the guide's statement is out of date. (The driver knows nothing of
pageable memory, which has no device pointer.) A kernel then writes through each device pointer, and the host checks
that the memory has changed.

A common address range is also the basis of copies between devices. With two devices, an array is copied from the first
to the second:

- "peer": by `cuMemcpyPeerAsync`, after each context has been given access to the other's memory;
- "not enabled": by the same call before that;
- "staged": to page-locked host memory and from there, one copy after the other.

The prediction for "staged" is the time of the two copies over PCIe, "to host" and "from host", each measured alone:
copies through host memory cannot exceed half a link's bandwidth. Between two H200s it is about 27.6 GB/s, as predicted.
For "peer" the prediction is the bandwidth of a device's active NVLinks in one direction, by NVIDIA's figures for their
version; there is no prediction without such links, or if NVML does not report them. The measured bandwidth is about
390 GB/s of 450, 14 times that of staging; packet overhead is not predicted. For "not enabled" there is no prediction:
the driver may stage the copy or use the direct path. It reaches about 38 GB/s: more than the two copies in series, and
less than either of them alone. It is as if the driver staged in pieces, with one on its way in while another is on its
way out.

With one device, a row states that there is no other to copy to.

Source: CUDA C++ Best Practices Guide, "Unified Virtual Addressing"; CUDA Driver API, "Unified Addressing" and "Peer
Context Memory Access"; for NVLink's bandwidths NVIDIA's product pages.

One module because the kernels, the measurement, the claims and the plot of an experiment are read together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda

from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.drawing import bars
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.device import current_device, device_count
from numba_gemm.runtime.driver import call, device_scope, failure, primary_context

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NVLINK_GB_S", "double", "equal_by_guide", "in_series", "unified_addressing"]

BLOCK = 256
MIB = 1 << 20
HOST_MEMORY = ("pageable", "pinned", "mapped", "registered")
DEVICE_MEMORY = ("device", "managed")
POINTERS, COPIES = "pointer", "copy"
TYPES = {1: "host", 2: "device", 3: "array", 4: "unified"}  # CUmemorytype
COLUMNS = (
    "part",
    "name",
    "memory_type",
    "managed",
    "device",
    "host_pointer",
    "device_pointer",
    "range_bytes",
    "equal",
    "predicted_equal_by_guide",
    "predicted_equal",
    "mib",
    "gb_s",
    "predicted_gb_s",
    "note",
)

NVLINK_GB_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
"""Bandwidth per link in one direction, by NVML's version number: 1 is NVLink 1.0; 6 is 4.0, that of Hopper."""


@cuda.jit
def double(x: Any) -> None:
    """Double one element per thread."""
    i = cuda.grid(1)
    x[i] = 2 * x[i]


def equal_by_guide(memory: str) -> bool:
    """True if host and device pointer are equal according to the guide; pageable memory has only one pointer."""
    return memory in ("pinned", "mapped")


def in_series(*gb_s: float) -> float:
    """Bandwidth of consecutive copies of the same bytes."""
    return 1 / sum(1 / each for each in gb_s)


# --------------------------------------------------------------------------------------------------------- pointers


def known(attribute: str, address: int) -> int | None:
    """Query a pointer attribute by its name without ``CU_POINTER_ATTRIBUTE_``; None if the driver does not know it."""
    which = getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
    status, value = driver.cuPointerGetAttribute(which, address)
    return None if int(status) or value is None else int(value)


@contextlib.contextmanager
def device_memory(size: int) -> Iterator[int]:
    """Allocate memory on the current device and yield its address; freed at the end."""
    address = int(call(driver.cuMemAlloc, size))
    try:
        yield address
    finally:
        call(driver.cuMemFree, address)


@contextlib.contextmanager
def managed_memory(size: int) -> Iterator[int]:
    """Allocate managed memory, which migrates to its user, and yield its address; freed at the end."""
    address = int(call(driver.cuMemAllocManaged, size, int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
    try:
        yield address
    finally:
        call(driver.cuMemFree, address)


@contextlib.contextmanager
def allocated(memory: str, elements: int) -> Iterator[int]:
    """Allocate an array in a kind of memory and yield its address; freed at the end."""
    with ExitStack() as scopes:
        if memory == "device":
            yield scopes.enter_context(device_memory(FLOAT32_BYTES * elements))
        elif memory == "managed":
            yield scopes.enter_context(managed_memory(FLOAT32_BYTES * elements))
        elif memory == "mapped":
            yield movement.address(scopes.enter_context(pinned_memory.pinned(elements)))
        else:
            array = cuda.pinned_array(elements, np.float32) if memory == "pinned" else np.zeros(elements, np.float32)
            if memory == "registered":
                scopes.enter_context(pinned_memory.registered(array))
            yield movement.address(array)


def relation(pointer: int | None, address: int) -> str:
    """Describe how a pointer reported by the driver relates to the address of the query."""
    if not pointer:
        return "absent"
    return "same" if pointer == address else "another"


def described(memory: str, elements: int, usable: bool) -> dict[str, Any]:
    """Return the row of a kind of memory; `usable` means that the host pointer of registered memory can be used."""
    with allocated(memory, elements) as address:
        kind = known("MEMORY_TYPE", address)
        pointers = {"host": known("HOST_POINTER", address), "device": known("DEVICE_POINTER", address)}
        row: dict[str, Any] = {
            "part": POINTERS,
            "name": memory,
            "memory_type": TYPES.get(kind or 0, "unknown"),
            "managed": bool(known("IS_MANAGED", address)),
            "device": known("DEVICE_ORDINAL", address) if kind else None,
            "host_pointer": relation(pointers["host"], address),
            "device_pointer": relation(pointers["device"], address),
            "range_bytes": known("RANGE_SIZE", address) if kind else None,
        }
        if memory == "pageable":
            return row
        if memory in HOST_MEMORY:
            mapped = int(call(driver.cuMemHostGetDevicePointer, address, 0))
            assert mapped == pointers["device"], f"of {memory} memory, two calls tell different device pointers"
            row["equal"] = mapped == address
            row["predicted_equal_by_guide"] = equal_by_guide(memory)
            row["predicted_equal"] = usable if memory == "registered" else True
        check_pointer(memory, address, pointers["device"] or 0, elements)
        return row


def check_pointer(memory: str, address: int, pointer: int, elements: int) -> None:
    """Check that a kernel that writes through a device pointer changes the memory at an address."""
    values = np.arange(elements, dtype=np.float32)
    view = {"shape": (elements,), "typestr": "<f4", "data": (pointer, False), "version": 3}
    seen = cuda.as_cuda_array(type("Memory", (), {"__cuda_array_interface__": view})(), sync=False)
    call(driver.cuMemcpy, address, movement.address(values), values.nbytes)
    with machine.streams() as (stream,):
        call(driver.cuCtxSynchronize)
        machine.enqueue(double, elements // BLOCK, BLOCK, seen)(stream)
        call(driver.cuStreamSynchronize, stream)
    found = np.empty_like(values)
    call(driver.cuMemcpy, movement.address(found), address, found.nbytes)
    np.testing.assert_array_equal(found, 2 * values, memory)


# ----------------------------------------------------------------------------------------------------------- copies


def nvlink_gb_s() -> float:
    """Theoretical bandwidth of the current device's active NVLinks in one direction; NaN if unknown."""
    total = 0.0
    with contextlib.suppress(Exception):  # NVML missing or not permitted: no prediction
        from cuda.bindings import nvml

        nvml.init_v2()
        gpu = nvml.device_get_handle_by_uuid(cuda.get_current_device().uuid)
        for link in range(nvml.NVLINK_MAX_LINKS):  # the loop ends with an error after the last link
            if nvml.device_get_nvlink_state(gpu, link):
                total += NVLINK_GB_S.get(int(nvml.device_get_nvlink_version(gpu, link)), float("nan"))
    return total or float("nan")


@contextlib.contextmanager
def peer_access(first: int, second: int) -> Iterator[None]:
    """Enable peer access between two devices' contexts; disabled again at the end if it was disabled before."""
    with ExitStack() as scopes:
        for one, other in ((first, second), (second, first)):
            with device_scope(one):
                (status,) = driver.cuCtxEnablePeerAccess(primary_context(other), 0)
            if status == driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
                continue
            if int(status):
                raise failure("cuCtxEnablePeerAccess", status)
            scopes.callback(end_peer_access, one, other)
        yield


def end_peer_access(one: int, other: int) -> None:
    """Disable a context's access to another device's memory."""
    with device_scope(one):
        call(driver.cuCtxDisablePeerAccess, primary_context(other))


def reach_each_other(first: int, second: int) -> bool:
    """True if each device can access the other's memory."""
    one, other = (call(driver.cuDeviceGet, device) for device in (first, second))
    return bool(call(driver.cuDeviceCanAccessPeer, one, other) and call(driver.cuDeviceCanAccessPeer, other, one))


def between_devices(first: int, second: int, size: int, rounds: int) -> list[dict[str, Any]]:
    """Rows for copies from the first device, which is current, to the second."""
    gb_s: dict[str, float] = {}
    with ExitStack() as scopes:
        (stream,) = scopes.enter_context(machine.streams())
        host = scopes.enter_context(pinned_memory.pinned(size, np.uint8))
        source = scopes.enter_context(device_memory(size))
        with device_scope(second):
            target = int(call(driver.cuMemAlloc, size))
            onward = int(call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        scopes.callback(end_target, second, target, onward)
        values = np.resize(np.arange(251, dtype=np.uint8), size)
        call(driver.cuMemcpy, source, movement.address(values), size)
        call(driver.cuCtxSynchronize)
        contexts = primary_context(second), primary_context(first)

        def to_host() -> None:
            movement.copy(host, source, size, stream)
            call(driver.cuStreamSynchronize, stream)

        def from_host() -> None:
            with device_scope(second):
                movement.copy(target, host, size, onward)
                call(driver.cuStreamSynchronize, onward)

        def staged() -> None:
            to_host()
            from_host()

        def peer() -> None:
            call(driver.cuMemcpyPeerAsync, target, contexts[0], source, contexts[1], size, stream)
            call(driver.cuStreamSynchronize, stream)

        def measure(way: str, work: Callable[[], None]) -> None:
            found = np.empty_like(values)
            with device_scope(second):
                call(driver.cuMemsetD8, target, 0, size)
                call(driver.cuCtxSynchronize)
            if way != "from host":
                host[:] = 0
            work()
            with device_scope(second):
                call(
                    driver.cuMemcpy,
                    movement.address(found),
                    movement.address(host) if way == "to host" else target,
                    size,
                )
            assert np.array_equal(found, values), f"{way}: the copy is wrong"
            gb_s[way] = size / movement.host_us(work, rounds) / 1e3  # no event spans two devices

        reachable = reach_each_other(first, second)
        for way, work in {"to host": to_host, "from host": from_host, "staged": staged, "not enabled": peer}.items():
            measure(way, work)
        if reachable:
            with peer_access(first, second):
                measure("peer", peer)
    predicted = {"staged": in_series(gb_s["to host"], gb_s["from host"]), "peer": nvlink_gb_s()}
    note = "" if reachable else "these devices cannot access each other's memory"
    return [
        {
            "part": COPIES,
            "name": way,
            "mib": size / MIB,
            "gb_s": value,
            "predicted_gb_s": predicted.get(way),
            "note": note,
        }
        for way, value in gb_s.items()
    ]


def end_target(device: int, target: int, stream: int) -> None:
    """Free memory and a stream of a device."""
    with device_scope(device):
        call(driver.cuStreamDestroy, stream)
        call(driver.cuMemFree, target)


# ------------------------------------------------------------------------------------------------------- experiment


def unified_addressing(elements: int = 1 << 20, copy_bytes: int = 256 * MIB, rounds: int = 9) -> pd.DataFrame:
    """Query addresses of every kind of memory; with two devices, also copy from one to the other.

    Parameters
    ----------
    elements : int
        Floats of each queried array, a multiple of `BLOCK`.
    copy_bytes : int
        Bytes to copy between devices.
    rounds : int
        Samples of each copy.

    Returns
    -------
    DataFrame
        ``part`` "pointer" has one row per kind of memory (``name``): ``memory_type`` reported by the driver,
        ``managed``, ``device`` (its ordinal), ``host_pointer`` and ``device_pointer`` ("same" as the address,
        "another", "absent"), ``range_bytes`` of the allocation; for page-locked memory, ``equal`` if host and device
        pointer are equal, ``predicted_equal_by_guide`` and ``predicted_equal``. ``part`` "copy" has one row per way
        between two devices: ``mib``, ``gb_s`` (median), ``predicted_gb_s``, ``note``.

    Raises
    ------
    Unavailable
        on a device without unified addressing.
    AssertionError
        if a kernel writes to the wrong memory, or a copy is wrong.
    """
    with machine.in_context():
        if not machine.attribute("UNIFIED_ADDRESSING"):
            raise Unavailable("this device has an address range of its own")
        usable = bool(machine.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))
        kinds = HOST_MEMORY + DEVICE_MEMORY[: 1 + bool(machine.attribute("MANAGED_MEMORY"))]
        rows = [described(memory, elements, usable) for memory in kinds]
        first = current_device()
        others = [device for device in range(device_count()) if device != first]
        if others:
            rows += between_devices(first, others[0], copy_bytes, rounds)
        else:
            rows.append({"part": COPIES, "name": "unavailable", "note": "one device: there is none to copy to"})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot the driver's answers for each kind of memory, and the bandwidth between devices."""
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    pointers = frame[frame["part"] == POINTERS]
    shown = {
        "name": "memory",
        "memory_type": "type",
        "managed": "managed",
        "host_pointer": "host pointer",
        "device_pointer": "device pointer",
        "equal": "equal",
        "predicted_equal_by_guide": "by the guide",
        "predicted_equal": "by the attribute",
    }
    cells = [[word(row[column]) for column in shown] for row in pointers.to_dict("records")]
    upper.axis("off")
    table = upper.table(cells, colLabels=list(shown.values()), loc="center", cellLoc="center")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.scale(1, 1.5)
    upper.set_title("what the driver knows of an address; whether host and device pointer are equal")
    copies = frame[(frame["part"] == COPIES) & frame["gb_s"].notna()]
    if len(copies):
        bars(lower, list(copies["name"]), copies["gb_s"], copies["predicted_gb_s"])
        lower.set(xlabel="GB/s", title=f"from one device to another, {copies['mib'].iloc[0]:.4g} MiB")
    else:
        lower.axis("off")
        lower.text(0.5, 0.5, frame["note"].dropna().iloc[0], ha="center")


def word(value: Any) -> str:
    """Format a cell of the table: yes, no, a word, or nothing."""
    if value is None or value != value:
        return ""
    return {"True": "yes", "False": "no"}.get(str(value), str(value))


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    rows = {row["name"]: row for row in frame.to_dict("records")}
    types = {name: row["memory_type"] for name, row in rows.items() if row["part"] == POINTERS}
    compared = [row for row in rows.values() if row["equal"] in (True, False)]
    made = {
        "an address alone tells host memory from device memory": all(
            types[name] == ("device" if name == "device" else "host")
            for name in ("pinned", "mapped", "registered", "device")
        ),
        "the driver knows nothing of pageable memory": types["pageable"] == "unknown",
        "memory that was allocated page-locked has one pointer for host and device": all(
            rows[name]["equal"] for name in ("pinned", "mapped")
        ),
        "of registered memory, the device's attribute tells whether it has": all(
            row["equal"] == row["predicted_equal"] for row in compared
        ),
    }
    if "staged" in rows:
        staged, predicted = rows["staged"]["gb_s"], rows["staged"]["predicted_gb_s"]
        made["staging takes as long as its two copies"] = bool(0.8 < staged / predicted < 1.25)
    if "peer" in rows:
        peer, links = rows["peer"]["gb_s"], rows["peer"]["predicted_gb_s"]
        made["a copy from device to device is faster than one staged in host memory"] = bool(
            peer > rows["staged"]["gb_s"]
        )
        made["it reaches no more than the links carry"] = not peer > links  # NaN if the links are unknown
    if "peer" in rows and "not enabled" in rows:
        made["without access to each other's memory, it is not half as fast"] = bool(
            rows["not enabled"]["gb_s"] < rows["peer"]["gb_s"] / 2
        )
    return made


EXPERIMENT = Experiment(
    name="unified_addressing",
    section="9.1.4",
    run=unified_addressing,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={"elements": 1 << 16, "copy_bytes": MIB, "rounds": 1},
    unavailable="the simulator has one memory, and no driver that knows of addresses",
    kernels={"double": (double, "float32[::1]")},
)
