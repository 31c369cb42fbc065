"""``python -m numba_gemm.inspect``: see `numba_gemm.inspect.cli`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
