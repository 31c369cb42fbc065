"""Multiplication of matrices in host memory that need not fit on the device."""

from .blocking import Blocking
from .prediction import Prediction
from .sharing import Done
from .streamed import blocking_of, expected_time, streamed_sgemm

__all__ = ["Blocking", "Done", "Prediction", "blocking_of", "expected_time", "streamed_sgemm"]
