"""Multiplication of matrices in host memory that need not fit on the device.

`streamed_sgemm` divides C into blocks and k into panels (`blocking`). While products run, it copies panels to the
device and finished strips of C from it (`pipeline`), on queues of the device (`queues`), from and to ordinary,
page-locked or file-backed memory (`host`). `prediction` predicts how long that takes.
"""

from .blocking import Blocking
from .pipeline import Done
from .prediction import Prediction
from .streamed import blocking_of, expected_time, streamed_sgemm

__all__ = ["Blocking", "Done", "Prediction", "blocking_of", "expected_time", "streamed_sgemm"]
