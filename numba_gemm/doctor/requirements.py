"""Python, packages, drivers and GPUs that this package needs."""

from __future__ import annotations

LOWEST_PYTHON, HIGHEST_PYTHON = (3, 11), (3, 13)
LOWEST_CC, TENSOR_CC, BULK_CC = (7, 5), (8, 0), (9, 0)
LOWEST_DRIVER = (12, 0)  # CUDA release
LOWEST_LINKER = (12, 3)  # older releases of nvJitLink lack functions that cuda-core calls
# Lower bounds of the requirements, as in pyproject.toml.
LOWEST = {
    "numba-cuda": (0, 30, 4),
    "cuda-bindings": (12, 9, 3),
    "cuda-core": (0, 7),
    "cuda-pathfinder": (1, 4, 2),
    "llvmlite": (0, 43),
    "numba": (0, 60),
    "numpy": (2, 0),
    "pandas": (2, 2, 2),
}
# The first compilation of numba-cuda calls numpy.row_stack, which this release removed.
BROKEN_NUMPY = (2, 5)

DISTRIBUTIONS = ("numba-gemm", "numba-cuda", "numba", "llvmlite", "numpy", "pandas")
BINDINGS = ("cuda-bindings", "cuda-core", "cuda-pathfinder", "cuda-toolkit")
COMPILER = ("nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink")
COMPILER_12 = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-nvjitlink-cu12")
CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
OPTIONAL = ("matplotlib", *CUPY, "torch")
LIBRARIES = dict(zip(("nvvm", "nvrtc", "nvJitLink"), zip(COMPILER, COMPILER_12)))
NAMES = {"nvvm": "NVVM", "nvrtc": "NVRTC", "nvJitLink": "nvJitLink"}

# Modules and the packages that provide them. Without the first ones, not even the simulator works.
NEEDED = {
    "numpy": "numpy<2.5",
    "numba": "numba",
    "numba_cuda": "numba-cuda",
    "numba.cuda": "numba-cuda",
    "cuda.pathfinder": "cuda-pathfinder",
    "cuda.bindings.driver": "cuda-bindings",
}
NEEDED_BY_COMPILER = {"cuda.core": "cuda-core"}
NEEDED_BY_TOOLS = {"pandas": "pandas"}
