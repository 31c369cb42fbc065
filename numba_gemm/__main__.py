"""``python -m numba_gemm``: the command ``numba-gemm``, see `numba_gemm.command`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
