"""``python -m numba_gemm.doctor``: see `numba_gemm.doctor.checks`."""

import sys

from .checks import main

if __name__ == "__main__":
    sys.exit(main())
