"""``python -m numba_gemm.doctor``: see `numba_gemm.doctor.cli`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
