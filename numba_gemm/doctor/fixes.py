"""Known failures of drivers and compilers, and the commands that fix them."""

from __future__ import annotations

from collections.abc import Sequence

from numba_gemm.doctor.facts import Facts, dotted, parsed
from numba_gemm.doctor.requirements import LOWEST_LINKER

SIMULATE = "export NUMBA_ENABLE_CUDASIM=1"
REINSTALL_DRIVER = (
    "install a newer driver (Ubuntu: sudo ubuntu-drivers install; others: https://www.nvidia.com/drivers)"
)
# Errors of the driver's initialisation, by CUresult (CUDA Driver API, "Data types used by CUDA driver").
DRIVER_ANSWERS = {
    34: (
        "the library that was found is a toolkit's stub, not a driver",
        "take the directory that ends in /stubs out of LD_LIBRARY_PATH: echo $LD_LIBRARY_PATH",
    ),
    46: ("another process holds the GPU for itself", "sudo nvidia-smi -c DEFAULT"),
    802: ("the switches between the GPUs are not set up", "sudo systemctl start nvidia-fabricmanager"),
    803: ("the library is of another version than the kernel's driver, after an update for instance", "sudo reboot"),
    804: (
        "a compatibility package's library came before the driver's own, and this GPU does not support it",
        "take the directory of cuda-compat out of LD_LIBRARY_PATH: echo $LD_LIBRARY_PATH",
    ),
    999: (
        "often after the machine slept, or in a container whose devices were lost",
        "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
    ),
}

# Messages of a failed trial, in the words of the driver, the compiler or this package, and their meaning. The most
# common causes are a compiler newer than the driver, and nvJitLink older than NVVM.
FAILURES = (
    (
        r"Unsupported \.version|UNSUPPORTED_PTX_VERSION|unsupported toolchain",
        "the compiler's PTX is newer than what is to assemble it understands",
        "{pinned}",
    ),
    (r"row_stack", "numba-cuda calls a function that this release of NumPy no longer has", "{numpy}"),
    (
        r"NO_BINARY_FOR_GPU|sm_\d+a?' is not|not defined for option 'gpu-architecture'",
        "the compiler does not know this GPU",
        "{upgrade}",
    ),
    (
        r"compiler's libraries|libnvvm|libNVVM|LibNotFound|FunctionNotFound|ptxas_options option is not supported",
        "a library of the compiler is missing, or too old",
        "{compiler}",
    ),
    (
        r"OUT_OF_MEMORY",
        "the GPU's memory is full",
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv, then end what is not needed",
    ),
    (r"did not end within", "the product took too long", "python -m numba_gemm.doctor --timeout 1200"),
)


def extra_for(facts: Facts) -> str:
    """Return the extra for the driver's CUDA major release; without a driver, for that of the bindings."""
    major = (facts.driver_cuda or parsed(facts.versions.get("cuda-bindings")) or (13,))[0]
    return "cu12" if major <= 12 else "cu13"


def install_command(facts: Facts) -> str:
    """Return the command that installs the compiler's libraries."""
    return f"python -m pip install 'numba-cuda[{extra_for(facts)}]'"


def pinned_command(facts: Facts) -> str:
    """Return the command that installs the compiler's packages of the driver's release."""
    extra, release = extra_for(facts), facts.driver_cuda
    if release is None:
        return install_command(facts)
    linker = "nvidia-nvjitlink" if extra == "cu13" else "nvidia-nvjitlink-cu12"
    least = max(release, LOWEST_LINKER)
    return f"{install_command(facts)} 'cuda-toolkit=={dotted(release)}.*' '{linker}=={dotted(least)}.*'"


def package_to_install(facts: Facts, package: str) -> str:
    """Return the requirement to install for a package; numba-cuda selects releases that are compatible."""
    return f"numba-cuda[{extra_for(facts)}]" if package.startswith(("numba", "cuda")) else package


def upgrade_linker_command(release: Sequence[int]) -> str:
    """Return the command that installs an nvJitLink of a CUDA release or later."""
    package = "nvidia-nvjitlink" if release[0] >= 13 else f"nvidia-nvjitlink-cu{release[0]}"
    return f"python -m pip install --upgrade '{package}>={dotted(release)},<{release[0] + 1}'"
