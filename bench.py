"""The command ``numba-gemm bench``, from a checkout: ``python bench.py --help``."""

import sys

from numba_gemm.lab.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
