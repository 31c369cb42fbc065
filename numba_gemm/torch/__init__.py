"""Matrix multiplication for PyTorch, with gradients and for ``torch.compile``; and in place of PyTorch's own.

`matmul`, `addmm` and `linear` are functions; `override` replaces PyTorch's float32 products in a context, and
`external_matmul` and `unfuse_addmm` offer ours to Inductor. Importing this package registers operators with PyTorch
(`operators`).
"""

from .dispatch import override
from .functions import addmm, linear, matmul
from .inductor import external_matmul, unfuse_addmm

__all__ = ["addmm", "external_matmul", "linear", "matmul", "override", "unfuse_addmm"]
