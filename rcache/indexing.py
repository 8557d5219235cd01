"""Reading and writing small tables by ids of which some are none.

In JAX an index of -1 is the last element, even where out-of-bounds writes are dropped, and a read past the end answers
the last element too. Here -1, like every other id outside the table, reads a filler and writes nowhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

NONE = -1
"""No slot, no page, no position, no sequence."""

Index = jax.Array | tuple[jax.Array | slice, ...]


def look_up(values: jax.Array, index: jax.Array | tuple[jax.Array, ...], filler: int | bool | jax.Array) -> jax.Array:
    """`values[index]`, and `filler` where the index is outside."""
    indices = index if isinstance(index, tuple) else (index,)
    inside = jnp.ones((), bool)
    safe = []
    for i, size in zip(indices, values.shape, strict=False):
        is_inside = (i >= 0) & (i < size)
        inside &= is_inside
        safe.append(jnp.where(is_inside, i, 0))
    tail = values.shape[len(indices) :]
    if values.size == 0:  # there is nothing to gather from
        return jnp.full((*inside.shape, *tail), filler, values.dtype)
    # Of its own, JAX answers this with twice as many operations.
    found = values.at[tuple(safe)].get(mode="promise_in_bounds")
    return jnp.where(inside.reshape(*inside.shape, *(1,) * len(tail)), found, filler)


def store(values: jax.Array, index: Index, new: Any) -> jax.Array:
    """`values` with `new` at `index`; nothing is written where the index is outside."""
    return values.at[index].set(new, mode="drop", wrap_negative_indices=False)


def add(values: jax.Array, index: Index, step: Any) -> jax.Array:
    """`values` with `step` added at `index`, as often as it occurs; nothing where it is outside."""
    return values.at[index].add(step, mode="drop", wrap_negative_indices=False)
