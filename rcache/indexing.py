"""Reading and writing small tables by ids of which some are none.

In JAX an index of -1 is the last element, even where out-of-bounds writes are dropped, and a read past the end answers
the last element too. Here -1, like every other id outside the table, reads a filler and writes nowhere.
"""

from __future__ import annotations

from typing import Any

import jax

NONE = -1
"""No slot, no page, no position, no sequence."""

Index = jax.Array | tuple[jax.Array | slice, ...]


def look_up(values: jax.Array, index: Index, filler: int | bool) -> jax.Array:
    """`values[index]`, and `filler` where the index is outside."""
    return values.at[index].get(mode="fill", fill_value=filler, wrap_negative_indices=False)


def store(values: jax.Array, index: Index, new: Any) -> jax.Array:
    """`values` with `new` at `index`; nothing is written where the index is outside."""
    return values.at[index].set(new, mode="drop", wrap_negative_indices=False)


def add(values: jax.Array, index: Index, step: Any) -> jax.Array:
    """`values` with `step` added at `index`, as often as it occurs; nothing where it is outside."""
    return values.at[index].add(step, mode="drop", wrap_negative_indices=False)
