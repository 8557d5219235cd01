"""Turning what a caller hands in into what compiled functions take; every `ValueError` names the argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_INT32 = np.iinfo(np.int32)


def as_int32(name: str, value: Any, *, ndim: int) -> Any:
    """`value` as int32 of `ndim` axes. Integers too large for that stay as large as they can: they never wrap around.

    NumPy arrays and Python integers stay on the host: a compiled call transfers them faster than `jnp` would.
    """
    if ndim == 0 and type(value) is int:  # by far the most common, and what follows takes ten times as long
        return np.int32(min(max(value, _INT32.min), _INT32.max))
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.size == 0 and not isinstance(value, jax.Array):
        array = array.astype(np.int32)
    if array.ndim != ndim or not jnp.issubdtype(array.dtype, jnp.integer):
        kind = "an integer" if ndim == 0 else f"an integer array of {ndim} axes"
        raise ValueError(f"{name} must be {kind}, got {array.dtype}{list(array.shape)}")
    if array.dtype == np.int32:
        return array
    clip = jnp.clip if isinstance(array, jax.Array) else np.clip
    low = 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else max(_INT32.min, int(jnp.iinfo(array.dtype).min))
    high = min(_INT32.max, int(jnp.iinfo(array.dtype).max))
    return clip(array, low, high).astype(np.int32)


def scalars(**named: Any) -> list[Any]:
    """Each of `named` as i32[], in order."""
    return [as_int32(name, value, ndim=0) for name, value in named.items()]


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = _INT32.max) -> None:
    """Refuses anything but an integer in `minimum .. maximum`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < minimum or (maximum is not None and value > maximum):
        limits = f">= {minimum}" if maximum is None else f"in {minimum} .. {maximum}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}")
