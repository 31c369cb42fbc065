"""Multiplication of matrices in host memory that need not fit on the device."""

from .blocking import Blocking
from .pipeline import Done
from .prediction import Prediction
from .streamed import blocking_of, expected_time, streamed_sgemm

__all__ = ["Blocking", "Done", "Prediction", "blocking_of", "expected_time", "streamed_sgemm"]
