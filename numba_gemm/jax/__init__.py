"""Matrix multiplication for JAX, under ``jit``, ``vmap`` and ``grad``."""

from ..arrays.extras import from_extra

# These imports register the product with XLA (`foreign_call`) and a primitive with JAX (`functions`).
with from_extra("jax", "jax"):
    from .functions import matmul

__all__ = ["matmul"]
