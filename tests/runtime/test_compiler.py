"""The compiler half of the internals, in a process of its own, and the probe and the switch.

This file run as a script is that process: it compiles the kernels below without the simulator, and prints what came
of it as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import re
import struct
import subprocess
import sys
import threading
from typing import Any

import cuda.core as cuda_core
import pytest
from cuda.pathfinder import DynamicLibNotFoundError
from numba import cuda, float32
from numba.core import config

from numba_gemm.device import matrix
from numba_gemm.kernels import STAGES
from numba_gemm.runtime import compilation, compiler
from numba_gemm.simulator import probe
from numba_gemm.simulator.switch import SIMULATOR, device_function, hardware_only

CAPABILITIES = {
    (7, 5): "sm_75",
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (12, 0): "sm_120a",
}
SHARED_FLOATS = 200


@cuda.jit(device=True)
def jitted_helper(x):
    return x + float32(1)


@device_function
def inlined_helper(x, y):
    return x * y


@cuda.jit(**hardware_only(launch_bounds=128))
def shares(alpha, a, b, beta, c):
    tile = cuda.shared.array(SHARED_FLOATS, float32)
    i = cuda.threadIdx.x
    tile[i] = jitted_helper(a[i, 0])
    cuda.syncthreads()
    c[i, 0] = inlined_helper(tile[SHARED_FLOATS - 1 - i], alpha)


@cuda.jit
def shares_dynamically(alpha, a, b, beta, c):
    tile = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    tile[i] = jitted_helper(a[i, 0])
    cuda.syncthreads()
    c[i, 0] = tile[SHARED_FLOATS - 1 - i]


@cuda.jit
def divides(alpha, a, b, beta, c):
    c[0, 0] = a[0, 0] / alpha


@cuda.jit(**hardware_only(fastmath=True))
def divides_fast(alpha, a, b, beta, c):
    c[0, 0] = a[0, 0] / alpha


@cuda.jit
def keeps_much(alpha, a, b, beta, c):
    kept = cuda.local.array(64, float32)
    for i in range(64):
        kept[i] = a[i, 0]
    cuda.syncthreads()
    for i in range(64):
        c[i, 0] = kept[i] * alpha


@cuda.jit
def indexes_local_memory(alpha, a, b, beta, c):
    kept = cuda.local.array(1000, float32)
    for i in range(1000):
        kept[i] = a[i, 0]
    c[0, 0] = kept[int(alpha)]


# ------------------------------------------------------------------------------------- in the process that compiles


def _outcome(kernel: Any, signature: Any, cc: tuple[int, int], name: str = "k", **options: Any) -> dict[str, Any]:
    cubin = compiler.compile_cubin(kernel, signature, cc, name=name, **options)
    size = struct.unpack_from("<H", cubin.code, 0x3A)  # the cubin is a 64-bit ELF file
    fields = {f: getattr(cubin, f) for f in ("name", "registers", "shared", "local", "spill_stores", "spill_loads")}
    return fields | {
        "cc": list(cubin.cc),
        "ptx": cubin.ptx,
        "log": cubin.log,
        "elf": cubin.code[:4] == b"\x7fELF" and size == (64,),
        "names_kernel": f".text.{cubin.name}\0".encode() in cubin.code,
        "line_table": b".debug_line" in cubin.code,
    }


def _without(module: Any, function: str, signature: Any) -> list[str]:
    """Return the messages of a module whose `function` does not find its library."""

    def not_found(*arguments: Any, **options: Any) -> Any:
        raise DynamicLibNotFoundError("libmissing.so.13")

    real = getattr(module, function)
    setattr(module, function, not_found)
    try:
        compiler.compile_cubin(divides, signature, (9, 0), name="k")
    except RuntimeError as error:
        return [type(error).__name__, str(error), str(error.__cause__)]
    finally:
        setattr(module, function, real)
    return []


def _compile_all() -> dict[str, Any]:
    from numba.cuda import dispatcher, types

    array = types.Array(types.float32, 2, "A")
    arrays = (types.float32, array, array, types.float32, array)
    matrices = matrix.kernel_signature(False)
    real = dispatcher.get_current_device
    outcomes: dict[str, Any] = {}
    for cc, target in CAPABILITIES.items():
        outcomes[f"shares {target}"] = _outcome(shares, matrices, cc, "tile 128x8-8x8")
        outcomes[f"shares_dynamically {target}"] = _outcome(shares_dynamically, matrices, cc)
    cc = (9, 0)
    outcomes["arrays"] = _outcome(shares, arrays, cc)
    outcomes["divides"] = _outcome(divides, matrices, cc)
    outcomes["divides_fast"] = _outcome(divides_fast, matrices, cc)
    outcomes["keeps_much"] = _outcome(keeps_much, matrices, cc)
    outcomes["capped"] = _outcome(cuda.jit(max_registers=32)(keeps_much.py_func), matrices, cc)
    outcomes["local"] = _outcome(indexes_local_memory, matrices, cc)
    outcomes["lineinfo"] = _outcome(cuda.jit(lineinfo=True)(divides.py_func), matrices, cc)
    outcomes["bounds"] = _outcome(cuda.jit(launch_bounds=(256, 2))(divides.py_func), matrices, cc)
    outcomes["plain function"] = _outcome(divides.py_func, matrices, cc, name="1st")
    config.FORCE_CUDA_CC = 8, 0
    outcomes["forced"] = _outcome(divides, matrices, cc)
    outcomes["left"] = config.FORCE_CUDA_CC
    config.FORCE_CUDA_CC = None
    kernel, codes = STAGES["shared_tile"].kernel_of(STAGES["shared_tile"].configs[0], False), []
    for config.OPT in (0, 3, 3):
        codes.append(compiler.machine_code(compilation.compile_kernel(kernel, cc)))
        if len(codes) > 1:
            compilation._built.cache_clear()
    outcomes["settings"] = [codes[0] != codes[1], codes[1] == codes[2]]

    # Threads that compile for different targets at once, nested device functions included.
    def compile_one(cc: tuple[int, int]) -> None:
        outcomes[f"threads {CAPABILITIES[cc]}"] = _outcome(shares, matrices, cc)

    threads = [threading.Thread(target=compile_one, args=(cc,)) for cc in CAPABILITIES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # One that launches meanwhile asks for its device without holding the compiler lock.
    answers: list[Any] = []
    dispatcher.get_current_device = lambda: "its own"
    with compiler._compiling_for((7, 5)):
        bystander = threading.Thread(target=lambda: answers.append(dispatcher.get_current_device()))
        bystander.start()
        bystander.join()
        answers.append(dispatcher.get_current_device().compute_capability)
    dispatcher.get_current_device = real
    outcomes["bystander"] = answers

    for module, function in ((cuda, "compile_ptx"), (cuda_core, "Linker")):
        outcomes[f"without {function}"] = _without(module, function, matrices)
    try:
        compiler.compile_cubin(shares, matrices[:2], cc, name="k")
    except TypeError as error:
        outcomes["error"] = str(error)
    outcomes["restored"] = dispatcher.get_current_device is real
    return outcomes


# ------------------------------------------------------------------------------------------------------- the checks


@functools.cache
def _child() -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the package may be importable from the checkout alone
    return subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=240)


def compiled() -> dict[str, Any]:
    assert _child().returncode == 0, _child().stderr
    outcomes: dict[str, Any] = json.loads(_child().stdout)
    return outcomes


pytestmark = pytest.mark.xdist_group("internals")  # so that one worker compiles, once


@pytest.mark.parametrize("how", ["shares", "threads"])
@pytest.mark.parametrize("cc", CAPABILITIES)
def test_every_target_compiles_for_itself(cc, how):
    target = CAPABILITIES[cc]
    outcome = compiled()[f"{how} {target}"]
    assert re.search(r"^\.target (\w+)", outcome["ptx"], re.MULTILINE).group(1) == target
    assert outcome["cc"] == list(cc)
    assert outcome["elf"]
    assert compiler.target(cc) == target
    assert f"for '{target}'" in outcome["log"]
    assert 8 <= outcome["registers"] <= 40
    assert (outcome["local"], outcome["spill_stores"], outcome["spill_loads"]) == (0, 0, 0)


@pytest.mark.parametrize("cc", CAPABILITIES)
def test_shared_memory_is_what_the_kernel_declares(cc):
    assert compiled()[f"shares {CAPABILITIES[cc]}"]["shared"] == 4 * SHARED_FLOATS
    assert compiled()[f"shares_dynamically {CAPABILITIES[cc]}"]["shared"] == 0


def test_the_kernel_has_the_name_that_it_was_given():
    outcome = compiled()["shares sm_90a"]
    assert outcome["name"] == "tile_128x8_8x8"
    assert outcome["names_kernel"]
    assert re.findall(r"\.entry\s+(\w+)", outcome["ptx"]) == ["tile_128x8_8x8"]
    assert compiled()["plain function"]["name"] == "kernel_1st"


WORD = "u64"
PARAMETERS = {
    "shares sm_90a": ["f32", *[WORD] * 10, "f32", *[WORD] * 5],
    "arrays": ["f32", *[WORD] * 18, "f32", *[WORD] * 9],
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_are_flattened_as_they_are_packed(case):
    ptx = compiled()[case]["ptx"]
    header = ptx[ptx.index(".entry") :].partition(")")[0]
    assert re.findall(r"\.param\s+\.(\w+)", header) == PARAMETERS[case]


@pytest.mark.parametrize(
    ("case", "words", "expected"),
    [
        ("shares sm_75", r"\.maxntid\s+128\b", True),
        ("divides", r"\.maxntid", False),
        ("bounds", r"\.maxntid\s+256\b", True),
        ("bounds", r"\.minnctapersm\s+2\b", True),
        ("divides", r"div\.rn\.f32|call", True),
        ("divides_fast", r"div\.(approx|full)\.ftz\.f32", True),
        ("divides", r"\.loc\b", False),
        ("lineinfo", r"\.loc\b", True),
    ],
)
def test_options_reach_the_compiler(case, words, expected):
    assert bool(re.search(words, compiled()[case]["ptx"])) == expected


def test_line_tables_are_kept_on_request():
    assert compiled()["lineinfo"]["line_table"]
    assert not compiled()["divides"]["line_table"]


def test_resource_usage_is_read_from_the_log():
    outcomes = compiled()
    assert outcomes["keeps_much"]["registers"] > 64
    assert outcomes["keeps_much"]["local"] == 0
    assert outcomes["capped"]["registers"] <= 32
    assert outcomes["capped"]["spill_stores"] > 0
    assert outcomes["capped"]["spill_loads"] > 0
    assert outcomes["capped"]["local"] > 0
    assert outcomes["local"]["local"] == 4000


def test_no_other_compute_capability_is_forced():
    """NUMBA_FORCE_CUDA_CC replaces that of Numba's own launches only; it is not part of a kernel's key."""
    assert ".target sm_90a" in compiled()["forced"]["ptx"]
    assert compiled()["left"] == [8, 0]


def test_a_changed_setting_compiles_anew():
    """Else the code of another setting would be kept under the key of this one."""
    assert compiled()["settings"] == [True, True]


def test_the_compiler_is_left_as_it_was():
    assert compiled()["restored"]
    assert "2 argument types given" in compiled()["error"]  # also after a failure


@pytest.mark.parametrize("function", ["compile_ptx", "Linker"])
def test_missing_libraries_are_named_with_what_brings_them(function):
    kind, said, cause = compiled()[f"without {function}"]
    assert kind == "RuntimeError"
    assert all(words in said for words in ("NVVM", "not found", "'numba-gemm[cu13]'", "'numba-gemm[cu12]'"))
    assert cause == "libmissing.so.13"


def test_only_the_thread_that_compiles_sees_another_device():
    assert compiled()["bystander"] == ["its own", [7, 5]]


@pytest.mark.parametrize("ptx", ["", ".entry k() .entry l()"])
def test_one_kernel_is_expected(ptx):
    with pytest.raises(compiler.CompilationError, match="one kernel"):
        compiler._rename_entry(ptx, "k")


LOG = """\
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     32 bytes stack frame, 0 bytes spill stores, 1 bytes spill loads
ptxas info    : Used 37 registers, used 1 barriers
"""


def test_functions_that_were_not_inlined_count():
    assert compiler._resources("k", LOG, {}) == (37, 48, 4, 9)


@pytest.mark.parametrize("lost", ["stack frame", "Used 37 registers"])
def test_what_neither_log_nor_cubin_tells_is_an_error(lost):
    with pytest.raises(compiler.CompilationError, match="the resources of k"):
        compiler._resources("k", LOG.replace(lost, ""), {})


def test_the_cubin_tells_what_the_log_does_not():
    def entry(attribute, symbol, value):
        return bytes([4, attribute, 8, 0]) + symbol.to_bytes(4, "little") + value.to_bytes(4, "little")

    other = bytes([3, 0x1B, 255, 0])  # of another format: its value stands where this one keeps its size
    info = other + entry(0x2F, 7, 37) + entry(0x11, 7, 32) + other + entry(0x2F, 8, 24) + entry(0x11, 8, 16)
    assert compiler._resources("k", "", {".nv.info": info}) == (37, 48, 48, 48)


@pytest.mark.simulator
def test_the_simulator_has_no_compiler():
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM"):
        compiler.compile_cubin(shares, (), (9, 0), name="k")


# ---------------------------------------------------------------------------------------------- probe and switch


@pytest.mark.parametrize(
    ("value", "requested"), [(None, False), ("0", False), ("1", True), ("2", True), ("", False), ("yes", False)]
)
def test_the_simulators_switch_is_read_as_numba_reads_it(value, requested, monkeypatch):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    if value is not None:
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", value)
    assert probe.simulator_requested() is requested


def test_probing_needs_no_numba():
    code = "import sys; from numba_gemm.simulator import probe; print(probe.driver_error(), probe.gpu_count()); "
    code += "assert not [name for name in sys.modules if name.partition('.')[0] == 'numba']"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    error, _, count = done.stdout.strip().rpartition(" ")
    assert (error == "None") == (int(count) > 0)
    assert error == "None" or error.endswith(".")


def test_the_switch_gives_options_to_the_hardware_only():
    assert hardware_only(launch_bounds=4) == ({} if SIMULATOR else {"debug": False, "launch_bounds": 4})


if __name__ == "__main__":
    print(json.dumps(_compile_all()))
