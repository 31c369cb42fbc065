"""Measure the ladder: ``python bench.py --help``.

On a GPU, every stage and cuBLAS; without one, Numba's simulator. Numba reads that switch at its first import, so it is
set here, before anything imports numba.
"""

import os
import sys

from numba_gemm.simulator.probe import driver_error

if driver_error() is not None:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

from numba_gemm.lab.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
