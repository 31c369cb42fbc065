"""GPUs as people write them: every form of a compute capability and of a device, and that all functions take them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

import numba_gemm
from numba_gemm.gemm import precompile as precompiling
from numba_gemm.gemm.explain import explain_shape
from numba_gemm.models import gpu_names, occupancy, roofline
from numba_gemm.runtime import device as devices
from numba_gemm.streaming import blocking_of


def named(one):
    """Return the same name of a case in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(one))


CAPABILITIES = [
    ((9, 0), (9, 0)),
    ([9, 0], (9, 0)),
    ((np.int64(9), 0), (9, 0)),
    (90, (9, 0)),
    (np.int32(86), (8, 6)),
    (120, (12, 0)),
    (9.0, (9, 0)),
    (np.float64(7.5), (7, 5)),
    (12.1, (12, 1)),
    ("9.0", (9, 0)),
    (" 8.9 ", (8, 9)),
    ("90", (9, 0)),
    ("sm_90", (9, 0)),
    ("sm_90a", (9, 0)),
    ("compute_100", (10, 0)),
]
NO_CAPABILITIES = [
    (9, ValueError),
    (-90, ValueError),
    (9.55, ValueError),
    (float("nan"), ValueError),
    ("9", ValueError),
    ("9,0", ValueError),
    ("sm_9.0", ValueError),
    ("cuda:0", ValueError),
    ("", ValueError),
    (True, TypeError),
    (None, TypeError),
    ((9, 0.5), TypeError),
    ((9, True), TypeError),
    ((9, 0, 0), TypeError),
    ((90, 80), TypeError),
    (b"90", TypeError),
]


@pytest.mark.parametrize(("cc", "expected"), CAPABILITIES, ids=named)
def test_compute_capabilities(cc, expected):
    found = gpu_names.compute_capability(cc)
    assert found == expected
    assert [type(part) for part in found] == [int, int]
    assert gpu_names.compute_capabilities(cc) == [expected]


@pytest.mark.parametrize("cc", [10, "10", 12, "12", "sm_12"])
def test_a_major_version_alone_is_refused(cc):
    major = re.sub(r"\D", "", str(cc))
    with pytest.raises(ValueError, match=rf'^cc is {cc!r}, which .*; pass "{major}\.0", or \({major}, 0\)$'):
        gpu_names.compute_capability(cc)


@pytest.mark.parametrize(("cc", "error"), NO_CAPABILITIES, ids=named)
def test_what_is_no_compute_capability(cc, error):
    with pytest.raises(error, match=r"^cc is .*; expected a compute capability, as \(9, 0\), .*; pass \(9, 0\) for"):
        gpu_names.compute_capability(cc)


@pytest.mark.parametrize(
    "several",
    [[(8, 0), (9, 0)], ((8, 0), (9, 0)), [80, 90], (80, 90), ["sm_80", 9.0], "8.0,9.0", {8.0: 0, "9.0": 0}.keys()],
    ids=named,
)
def test_several_compute_capabilities(several):
    assert gpu_names.compute_capabilities(several) == [(8, 0), (9, 0)]


def device_of(kind, **attributes):
    """Return a stand-in for a device object of a library."""
    return type(kind, (), attributes)()


OBJECTS = {
    "torch": device_of("torch", type="cuda", index=1),
    "cupy": device_of("cupy", id=1),
    "numba": device_of("numba", id=1, compute_capability=(9, 0)),
    "cuda.core": device_of("cuda", device_id=1),
    "ordinal": device_of("other", ordinal=np.int64(1)),
}
DEVICES = {"int": 1, "numpy": np.int8(1), "str": "cuda:1", "digits": "1", **OBJECTS}
NO_DEVICES = [
    ("cuda:", ValueError),
    ("gpu", ValueError),
    ("-1", ValueError),
    ("cpu", ValueError),
    (device_of("torch", type="cpu", index=None), ValueError),
    (True, TypeError),
    (1.0, TypeError),
    ((9, 0), TypeError),
    (device_of("thing", id="1"), TypeError),
    (device_of("thing", id=True), TypeError),
]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_devices(device, monkeypatch):
    assert gpu_names.device_index(device) == 1
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    assert devices.ordinal_of(device) == 1


@pytest.mark.parametrize("device", [None, "cuda", device_of("torch", type="cuda", index=None)], ids=named)
def test_the_current_device(device, monkeypatch):
    monkeypatch.setattr(devices, "current_device", lambda: 3)
    assert devices.ordinal_of(device) == 3


@pytest.mark.parametrize(("device", "error"), NO_DEVICES, ids=named)
def test_what_is_no_device(device, error):
    with pytest.raises(error, match=r"^device is .*; expected an ordinal, .* pass 0 for the first GPU"):
        gpu_names.device_index(device)


def test_a_compute_capability_is_no_device():
    with pytest.raises(TypeError, match=r"device is \(9, 0\); .*; pass a compute capability as cc$"):
        gpu_names.device_index((9, 0))


@pytest.fixture
def two_gpus(monkeypatch):
    """An A100 beside an H200, which is current."""
    found = [SimpleNamespace(cc=(8, 0)), SimpleNamespace(cc=(9, 0))]
    monkeypatch.setattr(devices, "device_properties", lambda device=0: found[device])
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "current_device", lambda: 1)


@pytest.mark.usefixtures("two_gpus")
def test_both_may_be_given_if_they_agree():
    assert devices.capability_of() == (9, 0)
    assert devices.capability_of(device="cuda:0") == (8, 0)
    assert devices.capability_of("sm_75") == (7, 5)
    assert devices.capability_of(80, 0) == (8, 0)
    with pytest.raises(ValueError, match=r"cc is 90 and device 0 has compute capability 8\.0; .*; leave one out"):
        devices.capability_of(90, 0)
    with pytest.raises(ValueError, match="device is 'cuda:2'; expected 0 to 1, ordinals of GPUs; pass one of these"):
        devices.capability_of(device="cuda:2")


A = np.ones((4, 4), np.float32)
TAKE_DEVICES = {
    "plan": lambda device: numba_gemm.plan(4, 4, 4, stage="naive", device=device),
    "explain_shape": lambda device: explain_shape(4, 4, 4, device=device),
    "streamed_sgemm": lambda device: numba_gemm.streamed_sgemm(A, A, device=device),
    "blocking_of": lambda device: blocking_of(A, A, device=device),
    "clear_autotuned": lambda device: numba_gemm.clear_autotuned(device),
}


@pytest.mark.parametrize("call", TAKE_DEVICES.values(), ids=TAKE_DEVICES)
def test_every_function_takes_every_form_of_a_device(call):
    for device in (0, "cuda:0", "cuda", device_of("torch", type="cuda", index=0), None):
        call(device)
    for unknown in (99, -1):
        with pytest.raises(ValueError, match=f"device is {unknown}; expected 0 to"):
            call(unknown)
    with pytest.raises(TypeError, match="pass a compute capability as cc"):
        call((9, 0))


TAKE_CAPABILITIES = {
    "explain_shape": lambda cc: str(explain_shape(64, 64, 64, cc=cc, stage="naive")),
    "models.occupancy": lambda cc: occupancy.occupancy(256, 32, 0, cc),
    "models.roofline": lambda cc: roofline.fp32_peak(108, 1.41e9, cc),
}


@pytest.mark.parametrize("call", TAKE_CAPABILITIES.values(), ids=TAKE_CAPABILITIES)
def test_every_function_takes_every_form_of_a_compute_capability(call):
    expected = call((8, 0))
    for cc in (80, 8.0, "8.0", "sm_80"):
        assert call(cc) == expected
    assert call(86) != expected
    with pytest.raises(ValueError, match="cc is '8'; expected a compute capability"):
        call("8")


@pytest.mark.usefixtures("two_gpus")
def test_precompile_for_a_device(monkeypatch):
    monkeypatch.setattr(precompiling, "SIMULATOR", False)

    def found(**target):
        return {cc for *_, cc in precompiling.kernels_of("naive", **target)}

    assert found() == {(8, 0), (9, 0)}
    assert found(device=0) == {(8, 0)}
    assert found(device="cuda") == found(cc="9.0", device=1) == found(cc=[90], device=1) == {(9, 0)}
    assert found(cc="8.0,7.5") == found(cc=[80, (7, 5)]) == {(8, 0), (7, 5)}
    with pytest.raises(ValueError, match=r"cc is \(8, 0\) and device 1 has compute capability 9\.0"):
        found(cc=[90, 80], device=1)
