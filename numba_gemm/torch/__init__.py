"""Matrix multiplication for PyTorch, with gradients and for ``torch.compile``; and in place of PyTorch's own."""

from ..arrays.extras import from_extra

# These imports register operators with PyTorch (`operators`).
with from_extra("torch", "torch"):
    from .dispatch import override
    from .functions import addmm, linear, matmul
    from .inductor import external_matmul, unfuse_addmm

__all__ = ["addmm", "external_matmul", "linear", "matmul", "override", "unfuse_addmm"]
