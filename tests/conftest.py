"""JAX as the tests want it: on the CPU unless told otherwise, 32-bit, and nothing promoted silently."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_enable_x64", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
