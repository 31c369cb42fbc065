"""Compile kernels with Numba-CUDA's private interfaces, which `front_end` uses too, and nothing outside the simulator.

A kernel becomes a cubin for any compute capability, with or without a GPU.

Private interfaces that are used, and what breaks if they change:

- `numba.cuda.dispatcher.get_current_device`, the name by which a nested device function learns its target. If it
  moves, compiling a kernel that calls one fails without a GPU, and compiles for the wrong target with one.
- `numba.cuda.core.compiler_lock.global_compiler_lock`. If it moves, the import below fails.
- `Dispatcher.targetoptions`, a dict of the options given to `cuda.jit`.
- `config.CUDA_ENABLE_NRT` and `config.CUDA_DEBUGINFO_DEFAULT`, read whenever code is generated. If they move, kernels
  do not compile where these settings are on.
- The flattening of matrices and arrays to parameters, checked against the PTX at every compilation.
"""

from __future__ import annotations

import contextlib
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..simulator.switch import SIMULATOR
from .front_end import faster


class CompilationError(RuntimeError):
    """A kernel compiled to something that this module does not understand."""


@dataclass(frozen=True)
class Cubin:
    """A kernel compiled for one compute capability.

    Attributes
    ----------
    name : str
        Entry point, as the driver and profilers know it.
    code : bytes
        The cubin, for `cuModuleLoadData` or `cuLibraryLoadData`.
    ptx, log : str
        PTX that it was assembled from, empty if it was not kept; and the output of ptxas.
    registers : int
        32-bit registers per thread.
    shared : int
        Bytes of static shared memory per block, without what the hardware reserves for itself.
    local : int
        Bytes of local memory per thread (stack frames, which include spills).
    spill_stores, spill_loads : int
        Bytes that ptxas spills and reloads.
    cc : tuple of int
        Compute capability, (major, minor).
    """

    name: str
    code: bytes
    ptx: str
    log: str
    registers: int
    shared: int
    local: int
    spill_stores: int
    spill_loads: int
    cc: tuple[int, int]


def target(cc: tuple[int, int]) -> str:
    """Return the architecture compiled for: `sm_75`, ..., and from 9.0 on the specific one, such as `sm_90a`."""
    major, minor = cc
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def supported_ccs() -> list[tuple[int, int]]:
    """Return the compute capabilities that the installed compiler knows, in ascending order."""
    from cuda.bindings import nvrtc

    with _finding_libraries():
        _, architectures = nvrtc.nvrtcGetSupportedArchs()
    return sorted(divmod(architecture, 10) for architecture in architectures)


# A parameter in a parameter list: `.param`, optionally its alignment, then its type and width.
_PTX_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[busf](\d+)\s")


def _parameter_sizes(signature: Sequence[Any]) -> list[int] | None:
    """Return the bytes of each parameter as `runtime.frame` packs them, None if it does not know some type."""
    from numba.cuda import types

    from ..device.matrix import MatrixType
    from ..device.partition import PARTITION

    sizes: list[int] = []
    for parameter in signature:
        if parameter == types.float32:
            sizes += [4]
        elif isinstance(parameter, MatrixType):
            sizes += [8] * 5
        elif parameter == PARTITION:
            sizes += [8] * len(PARTITION)
        elif isinstance(parameter, types.Array):
            sizes += [8] * (5 + 2 * parameter.ndim)
        elif isinstance(parameter, types.UniTuple) and isinstance(parameter.dtype, types.Array):
            sizes += [8] * (5 + 2 * parameter.dtype.ndim) * parameter.count
        else:
            return None
    return sizes


class _StandInDevice:
    def __init__(self, cc: tuple[Any, ...]) -> None:
        self.compute_capability = cc


@contextlib.contextmanager
def _compiling_for(cc: tuple[Any, ...]) -> Iterator[None]:
    """Let this thread compile nested device functions for `cc`, whatever GPU there is, under Numba's compiler lock.

    NUMBA_CUDA_ENABLE_NRT, NUMBA_CUDA_DEBUGINFO and NUMBA_FORCE_CUDA_CC are off meanwhile: the first needs a library
    that is not linked here, the second excludes optimisation, and the third would replace `cc`.
    """
    from numba.core import config
    from numba.cuda import dispatcher
    from numba.cuda.core.compiler_lock import global_compiler_lock

    with global_compiler_lock, faster():
        real, compiling_thread = dispatcher.get_current_device, threading.get_ident()

        def get_current_device() -> Any:
            # Another thread may ask without holding the lock, for a launch of its own: it gets the real answer.
            return _StandInDevice(cc) if threading.get_ident() == compiling_thread else real()

        names = "CUDA_ENABLE_NRT", "CUDA_DEBUGINFO_DEFAULT", "FORCE_CUDA_CC"
        settings = {name: getattr(config, name, 0) for name in names}
        dispatcher.get_current_device = get_current_device
        vars(config).update(dict.fromkeys(settings, 0))
        try:
            yield
        finally:
            dispatcher.get_current_device = real
            vars(config).update(settings)


@contextlib.contextmanager
def _finding_libraries() -> Iterator[None]:
    """Name the package to install if NVVM, NVRTC or nvJitLink is missing. Each is searched for at its first use."""
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        yield
    except DynamicLibNotFoundError as error:
        raise RuntimeError(
            "the CUDA compiler's libraries (NVVM, NVRTC, nvJitLink) were not found; expected those of a CUDA toolkit "
            "no newer than the driver; install them with: pip install 'numba-gemm[cu13]', or 'numba-gemm[cu12]' for a "
            "driver of CUDA 12"
        ) from error


_ENTRY = re.compile(r"\.entry\s+([A-Za-z0-9_$]+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def _rename_entry(ptx: str, name: str) -> str:
    """Call the kernel of `ptx` `name`; its parameters follow. Numba mangles the argument types into its own name."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise CompilationError(f"expected PTX with one kernel, got {len(entries)}: {entries}")
    return re.sub(rf"(?<![A-Za-z0-9_$]){re.escape(entries[0])}(?=_param_|(?![A-Za-z0-9_$]))", name, ptx)


def _sections(cubin: bytes) -> dict[str, bytes]:
    """Return the contents of each section of a 64-bit ELF file, by name."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    sections = {}
    for name, _, _, _, offset, size in headers:
        start = names + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        # Sections that occupy no space in the file still have a size.
        sections[text] = cubin[offset : offset + size].ljust(size, b"\0")
    return sections


def machine_code(cubin: Cubin) -> list[bytes]:
    """Return instructions and constants of a kernel, which tell it from another; names of functions are numbered."""
    sections = _sections(cubin.code).items()
    return sorted(contents for name, contents in sections if name.startswith((".text", ".nv.constant")))


def _static_shared(sections: dict[str, bytes], name: str, cc: tuple[int, int]) -> int:
    # The linker's log leaves shared memory out, since it is laid out after ptxas has spoken; so ask the cubin. From
    # compute capability 9.0 on the section begins with 1 KiB that belongs to the system.
    reserved = 1024 if cc >= (9, 0) else 0
    return max(len(sections.get(f".nv.shared.{name}", b"")) - reserved, 0)


# Attributes of `.nv.info`: a symbol's index and a number of bytes of stack, or of registers.
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F


def _attribute(sections: dict[str, bytes], wanted: int) -> list[int]:
    """Return what a cubin's `.nv.info` says under one of the attributes above, a number a function."""
    info, at, values = sections.get(".nv.info", b""), 0, []
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        payload = size if form == 4 else 0  # other formats keep their value where this one keeps its size
        if attribute == wanted and payload == 8:
            values.append(int(struct.unpack_from("<II", info, at + 4)[1]))
        at += 4 + payload
    return values


def _resources(name: str, log: str, sections: dict[str, bytes]) -> tuple[int, int, int, int]:
    """Return registers, and bytes of local memory, spill stores and spill loads.

    ptxas's log tells them. A linker that has the code cached says nothing; then the cubin tells registers and stack
    frames, and all of a frame counts as spilled.
    """
    # A function that was not inlined has a stack frame and spills of its own: all count.
    frames = [tuple(map(int, frame)) for frame in _STACK.findall(log)]
    registers = _REGISTERS.findall(log.partition("Compiling entry function")[2])
    if frames and registers:
        local, spill_stores, spill_loads = (sum(column) for column in zip(*frames, strict=True))
        return int(registers[0]), local, spill_stores, spill_loads
    counts = _attribute(sections, _REGISTER_COUNT)
    if not counts:
        raise CompilationError(f"neither ptxas nor the cubin shows the resources of {name}; ptxas said:\n{log}")
    frame = sum(_attribute(sections, _FRAME_SIZE))
    return max(counts), frame, frame, frame


def compile_cubin(
    kernel: Any,
    signature: Sequence[Any],
    cc: tuple[int, int],
    *,
    name: str,
    whole_program: bool = False,
    keep_ptx: bool = True,
) -> Cubin:
    """Compile `kernel` for the compute capability `cc`. Needs no GPU; safe from several threads.

    Parameters
    ----------
    kernel : dispatcher made by `cuda.jit`, or a plain function
        Its `fastmath`, `opt`, `launch_bounds`, `max_registers` and `lineinfo` options apply. `lto` does not: the kernel
        goes through PTX, which is kept. Nor does `debug`, or NUMBA_CUDA_DEBUGINFO: with debug information Numba makes
        several PTX files.
    signature : sequence of Numba types
        Types of the parameters; `matrix.kernel_signature(aligned)` for the GEMM kernels.
    cc : tuple of int
        (major, minor).
    name : str
        Name of the entry point; what PTX does not allow in a name becomes an underscore.
    whole_program : bool
        Let the assembler see that nothing else will be linked to the kernel, which it must know to hand registers from
        warpgroup to warpgroup ("setmaxnreg"). It does only if it makes the PTX itself, by link-time optimization: the
        PTX that is kept is then another one of the same kernel, and the name the one that Numba gives it.
    keep_ptx : bool
        False to leave the PTX out of the result, and to save the time in which that other PTX is made.

    Raises
    ------
    RuntimeError
        Under the simulator; without the compiler's libraries.
    CompilationError
        If the PTX has not one kernel with the expected parameters.
    """
    if SIMULATOR:
        raise RuntimeError("kernels cannot be compiled under Numba's simulator: unset NUMBA_ENABLE_CUDASIM")
    from numba import cuda

    options = getattr(kernel, "targetoptions", {})
    max_registers, lineinfo = register_limit(kernel, cc), bool(options.get("lineinfo"))
    name = re.sub(r"[^A-Za-z0-9_$]", "_", name)
    name = name if name[:1].isalpha() else f"kernel_{name}"
    full_cc: tuple[Any, ...] = (*cc, "a") if cc >= (9, 0) else cc
    function = getattr(kernel, "py_func", kernel)
    settings = {
        "cc": full_cc,
        "debug": False,
        "opt": options.get("opt"),
        "fastmath": options.get("fastmath", False),
        "lineinfo": lineinfo,
        "launch_bounds": options.get("launch_bounds"),
    }
    ptx = ""
    if keep_ptx or not whole_program:
        with _compiling_for(full_cc), _finding_libraries():
            ptx, _ = cuda.compile_ptx(function, tuple(signature), **settings)
        ptx = _rename_entry(ptx, name)
        _check_parameters(ptx, name, signature)

    if whole_program:
        with _compiling_for(full_cc), _finding_libraries():
            ltoir, _ = cuda.compile(function, tuple(signature), device=False, abi="numba", output="ltoir", **settings)
        cubin = assemble(ltoir, cc, None, max_registers, lineinfo)
    else:
        cubin = assemble(ptx, cc, name, max_registers, lineinfo)
    return replace(cubin, ptx=ptx if keep_ptx else "")


def register_limit(kernel: Any, cc: tuple[int, int]) -> int | None:
    """Return the option `max_registers` of a kernel, which is a number or a function of the compute capability."""
    limit = getattr(kernel, "targetoptions", {}).get("max_registers")
    return limit(cc) if callable(limit) else limit


def assemble(
    source: str | bytes, cc: tuple[int, int], name: str | None, max_registers: int | None = None, lineinfo: bool = False
) -> Cubin:
    """Assemble PTX, or LTO-IR; the linker reports the kernel's name."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    whole_program = isinstance(source, bytes)
    with _finding_libraries():
        linker = Linker(
            ObjectCode.from_ltoir(source) if isinstance(source, bytes) else ObjectCode.from_ptx(source.encode()),
            options=LinkerOptions(
                arch=target(cc),
                ptxas_options=["-v"],
                max_register_count=max_registers,
                lineinfo=lineinfo or None,
                link_time_optimization=whole_program or None,
                no_cache=True,  # of what it finds there it says nothing
            ),
        )
        code = bytes(linker.link("cubin").code)
    log = linker.get_info_log().strip("\0\n") + linker.get_error_log().strip("\0\n")
    name = _entry_name(log) if name is None else name
    sections = _sections(code)
    registers, local, spill_stores, spill_loads = _resources(name, log, sections)
    return Cubin(
        name=name,
        code=code,
        ptx=source if isinstance(source, str) else "",
        log=log,
        registers=registers,
        shared=_static_shared(sections, name, cc),
        local=local,
        spill_stores=spill_stores,
        spill_loads=spill_loads,
        cc=cc,
    )


def _check_parameters(ptx: str, name: str, signature: Sequence[Any]) -> None:
    """Raise CompilationError if the kernel takes other parameters than `runtime.frame` packs."""
    header = ptx[ptx.index(".entry") :]
    declared = [int(bits) // 8 for bits in _PTX_PARAMETER.findall(header[: header.index(")")])]
    expected = _parameter_sizes(signature)
    if expected is not None and declared != expected:
        raise CompilationError(
            f"{name} takes parameters of {declared} bytes where {expected} were expected: "
            "this release of numba-cuda passes arrays in another way"
        )


def _entry_name(log: str) -> str:
    """Return the kernel's name from the assembler's output."""
    found = re.search(r"Compiling entry function '(\S+)'", log)
    if found is None:
        raise CompilationError(f"the assembler names no kernel: {log!r}")
    return found[1]


def takes_more_types(function: Any) -> bool:
    """Return True if a function of `cuda.jit` is compiled for any types, not only for those of its signature.

    This is Numba's ``Dispatcher._can_compile``. Without that attribute, the answer is True: it is compiled again.
    """
    return bool(getattr(function, "_can_compile", True))


def result_type(function: Any, signature: Sequence[Any], cc: tuple[int, int]) -> Any:
    """Compile a device function for arguments of some Numba types; return the Numba type of its result."""
    from numba import cuda

    full_cc: tuple[Any, ...] = (*cc, "a") if cc >= (9, 0) else cc
    with _compiling_for(full_cc), _finding_libraries():
        function = getattr(function, "py_func", function)
        _, result = cuda.compile_ptx(function, tuple(signature), device=True, cc=full_cc, debug=False)
    return result
