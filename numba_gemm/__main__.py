"""``python -m numba_gemm``: the command ``numba-gemm``, see `numba_gemm.gemm.command`."""

import sys

from .gemm.command import main

if __name__ == "__main__":
    sys.exit(main())
