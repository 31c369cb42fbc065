"""Host and all devices share one address range: a pointer reveals its memory, and which accesses are possible."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda

from numba_gemm.device.units import FLOAT32_BYTES, MIB
from numba_gemm.lab.harness.pictures import bars, panels, text
from numba_gemm.lab.memory import machine, movement
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.device import current_device, device_count
from numba_gemm.runtime.driver import call, device_scope, failure, primary_context
from numba_gemm.runtime.timing import host_us

Row = dict[str, Any]
BLOCK = 256
HOST_MEMORY = ("pageable", "pinned", "mapped", "registered")
EQUAL_BY_GUIDE = ("pinned", "mapped")  # kinds whose host and device pointer are equal according to the guide
DEVICE_MEMORY = ("device", "managed")
POINTERS, COPIES = "pointer", "copy"
TYPES = {1: "host", 2: "device", 3: "array", 4: "unified"}  # CUmemorytype
COLUMNS = (
    *("part", "name", "memory_type", "managed", "device", "host_pointer", "device_pointer"),
    *("equal", "predicted_equal_by_guide", "predicted_equal", "mib", "gb_s", "predicted_gb_s", "note"),
)

NVLINK_GB_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
"""Bandwidth per link in one direction, by NVML's version number: 1 is NVLink 1.0; 6 is 4.0, that of Hopper."""


@machine.kernel("float32[::1]")
def double(x: Any) -> None:
    """Double one element per thread."""
    i = cuda.grid(1)
    x[i] = 2 * x[i]


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
def allocated(memory: str, elements: int) -> Iterator[int]:
    """Allocate an array in a kind of memory and yield its address; freed at the end."""
    with movement.Scope() as scopes:
        if memory == "device":
            yield movement.address(*scopes.on_device(1, elements))
        elif memory == "managed":  # it migrates to its user
            everywhere = int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
            address = int(call(driver.cuMemAllocManaged, FLOAT32_BYTES * elements, everywhere))
            scopes.callback(call, driver.cuMemFree, address)
            yield address
        elif memory == "mapped":
            yield movement.address(*scopes.pinned(1, elements))
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


def described(memory: str, elements: int, usable: bool) -> Row:
    """Return the row of a kind of memory; `usable` means that the host pointer of registered memory can be used."""
    with allocated(memory, elements) as address:
        kind = known("MEMORY_TYPE", address)
        pointers = {"host": known("HOST_POINTER", address), "device": known("DEVICE_POINTER", address)}
        row: Row = (
            {"part": POINTERS, "name": memory, "memory_type": TYPES.get(kind or 0, "unknown")}
            | {"managed": bool(known("IS_MANAGED", address))}
            | {"device": known("DEVICE_ORDINAL", address) if kind else None}
            | {f"{side}_pointer": relation(pointer, address) for side, pointer in pointers.items()}
        )
        if memory == "pageable":
            return row
        if memory in HOST_MEMORY:
            mapped = int(call(driver.cuMemHostGetDevicePointer, address, 0))
            assert mapped == pointers["device"], f"of {memory} memory, two calls tell different device pointers"
            row |= {"equal": mapped == address, "predicted_equal_by_guide": memory in EQUAL_BY_GUIDE}
            row["predicted_equal"] = usable if memory == "registered" else True
        check_pointer(memory, address, pointers["device"] or 0, elements)
        return row


def check_pointer(memory: str, address: int, pointer: int, elements: int) -> None:
    """Check that a kernel that writes through a device pointer changes the memory at an address."""
    values = np.arange(elements, dtype=np.float32)
    call(driver.cuMemcpy, address, movement.address(values), values.nbytes)
    with machine.streams() as (stream,):
        call(driver.cuCtxSynchronize)
        machine.enqueue(double, elements // BLOCK, BLOCK, movement.view(pointer, elements))(stream)
        movement.finish(stream)
    found = np.empty_like(values)
    call(driver.cuMemcpy, movement.address(found), address, found.nbytes)
    np.testing.assert_array_equal(found, 2 * values, memory)


# ----------------------------------------------------------------------------------------------------------- copies


def nvlink_gb_s() -> float:
    """Theoretical bandwidth of the current device's active NVLinks in one direction; NaN if unknown."""
    total = 0.0
    with contextlib.suppress(Exception):  # NVML missing or not permitted: no prediction
        nvml, gpu = machine.nvml_gpu()
        for link in range(nvml.NVLINK_MAX_LINKS):  # the loop ends with an error after the last link
            if nvml.device_get_nvlink_state(gpu, link):
                total += NVLINK_GB_S.get(int(nvml.device_get_nvlink_version(gpu, link)), math.nan)
    return total or math.nan


@contextlib.contextmanager
def peer_access(first: int, second: int) -> Iterator[None]:
    """Enable peer access between two devices, the first of which is current; undone if it was not enabled before."""
    with ExitStack() as scopes:
        for one, other in ((second, first), (first, second)):
            scopes.enter_context(device_scope(one))
            (status,) = driver.cuCtxEnablePeerAccess(primary_context(other), 0)
            if status == driver.CUresult.CUDA_SUCCESS:
                scopes.callback(call, driver.cuCtxDisablePeerAccess, primary_context(other))
            elif status != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
                raise failure("cuCtxEnablePeerAccess", status)
        yield


def reach_each_other(first: int, second: int) -> bool:
    """True if each device can access the other's memory."""
    one, other = (call(driver.cuDeviceGet, device) for device in (first, second))
    return bool(call(driver.cuDeviceCanAccessPeer, one, other) and call(driver.cuDeviceCanAccessPeer, other, one))


def between_devices(first: int, second: int, size: int, rounds: int) -> Iterator[Row]:
    """Yield rows for copies from the first device, which is current, to the second."""
    gb_s: dict[str, float] = {}
    values = np.resize(np.arange(251, dtype=np.uint8), size)
    found, contexts = np.empty_like(values), (primary_context(second), primary_context(first))
    reachable = reach_each_other(first, second)
    note = "" if reachable else "these devices cannot access each other's memory"
    with ExitStack() as scopes:
        scopes.enter_context(device_scope(second))
        target = scopes.enter_context(movement.device_memory(size))
        (onward,) = scopes.enter_context(machine.streams())
        scopes.enter_context(device_scope(first))
        source = scopes.enter_context(movement.device_memory(size))
        (stream,) = scopes.enter_context(machine.streams())
        host = scopes.enter_context(pinned_memory.pinned(size, np.uint8))
        call(driver.cuMemcpy, source, movement.address(values), size)
        call(driver.cuCtxSynchronize)

        def to_host() -> None:
            movement.copy(host, source, size, stream)
            movement.finish(stream)

        def from_host() -> None:
            with device_scope(second):
                movement.copy(target, host, size, onward)
                movement.finish(onward)

        def staged() -> None:
            to_host()
            from_host()

        def peer() -> None:
            call(driver.cuMemcpyPeerAsync, target, contexts[0], source, contexts[1], size, stream)
            movement.finish(stream)

        def measured(way: str, work: Callable[[], None]) -> Row:
            with device_scope(second):
                call(driver.cuMemsetD8, target, 0, size)
                call(driver.cuCtxSynchronize)
            if way != "from host":
                host[:] = 0
            work()
            with device_scope(second):
                end = movement.address(host) if way == "to host" else target
                call(driver.cuMemcpy, movement.address(found), end, size)
            assert np.array_equal(found, values), f"{way}: the copy is wrong"
            gb_s[way] = size / host_us(work, rounds) / 1e3  # no event spans two devices
            predicted = {"staged": lambda: in_series(gb_s["to host"], gb_s["from host"]), "peer": nvlink_gb_s}
            row = {"part": COPIES, "name": way, "mib": size / MIB, "gb_s": gb_s[way], "note": note}
            return row | {"predicted_gb_s": predicted[way]() if way in predicted else None}

        for way, work in {"to host": to_host, "from host": from_host, "staged": staged, "not enabled": peer}.items():
            yield measured(way, work)
        if reachable:
            with peer_access(first, second):
                yield measured("peer", peer)


# ------------------------------------------------------------------------------------------------------- experiment


def unified_addressing(elements: int = 1 << 20, copy_bytes: int = 256 * MIB, rounds: int = 9) -> Iterator[Row]:
    """Query addresses of every kind of memory; with two devices, also copy from one to the other.

    ``part`` "pointer" has one row per kind of memory (``name``), with the driver's answers: ``host_pointer`` and
    ``device_pointer`` are the "same" as the address, "another" or "absent", ``equal`` compares the two. ``part``
    "copy" has one row per way between two devices, or one that says why there is none.

    Parameters
    ----------
    elements: Floats of each queried array, a multiple of 256.
    copy_bytes: Bytes to copy between devices.
    """
    blank = dict.fromkeys(COLUMNS)
    with machine.in_context():
        usable = bool(machine.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))
        kinds = HOST_MEMORY + DEVICE_MEMORY[: 1 + bool(machine.attribute("MANAGED_MEMORY"))]
        yield from (blank | described(memory, elements, usable) for memory in kinds)
        first = current_device()
        other = next((device for device in range(device_count()) if device != first), None)
        alone = {"part": COPIES, "name": "unavailable", "note": "one device: there is none to copy to"}
        copies = [alone] if other is None else between_devices(first, other, copy_bytes, rounds)
        yield from (blank | row for row in copies)


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    """Claims of the lesson; those on copies only with two devices."""
    rows = {row["name"]: row for row in frame.to_dict("records")}
    compared = [row for row in rows.values() if row["equal"] in (True, False)]
    made: dict[str, Any] = {
        "an address alone tells host memory from device memory": (
            rows[name]["memory_type"] == ("device" if name == "device" else "host")
            for name in ("pinned", "mapped", "registered", "device")
        ),
        "the driver knows nothing of pageable memory": rows["pageable"]["memory_type"] == "unknown",
        "memory that was allocated page-locked has one pointer for host and device": (
            rows[name]["equal"] for name in ("pinned", "mapped")
        ),
        "a device attribute tells whether registered memory has one, too": (
            row["equal"] == row["predicted_equal"] for row in compared
        ),
    }
    if "staged" in rows:
        ratio = rows["staged"]["gb_s"] / rows["staged"]["predicted_gb_s"]
        made["staging takes as long as its two copies"] = 0.8 < ratio < 1.25
    if "peer" in rows:
        peer, links = rows["peer"]["gb_s"], rows["peer"]["predicted_gb_s"]
        made["a copy from device to device is faster than one staged in host memory"] = peer > rows["staged"]["gb_s"]
        made["it reaches no more than the links carry"] = not peer > links  # NaN if the links are unknown
        slow = rows["not enabled"]["gb_s"]
        made["without access to each other's memory, it is not half as fast"] = slow < peer / 2
    return made


PLOT = panels(
    text(list(COLUMNS[1:10]), f"part == {POINTERS!r}", title="the driver's answers about an address"),
    bars("gb_s", ["name", "note"], f"part == {COPIES!r}", title="from one device to another"),
    columns=1,
)
SMALL = {"elements": 1 << 16, "copy_bytes": MIB, "rounds": 1}
ALLOWED = {"elements": BLOCK}
EXPERIMENT = machine.gpu_experiment(unified_addressing, "9.1.4", claims, PLOT, SMALL, [double], allowed=ALLOWED)
