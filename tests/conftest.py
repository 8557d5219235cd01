"""JAX as the tests want it: on the CPU unless told otherwise, 32-bit, and nothing promoted silently."""

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_enable_x64", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def own_programs() -> Iterator[None]:
    """Programs compiled for a module go with it.

    On a CPU each maps memory of its own. A process may have 65,530 such mappings on Linux; compiling beyond that ends
    in a segmentation fault.
    """
    yield
    jax.clear_caches()
