"""Matrix multiplication for JAX, under ``jit``, ``vmap`` and ``grad``."""

# These imports register the product with XLA (`foreign_call`) and a primitive with JAX (`functions`).
from .functions import matmul

__all__ = ["matmul"]
