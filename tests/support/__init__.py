"""Cases, operands and child processes that several tests use."""

from pathlib import Path

SUPPORT = Path(__file__).parent
