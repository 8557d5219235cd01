"""What the table says of a sequence, but for its pages: one row of integers, read and written by one operation."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from rcache import checkpoints as ckpt
from rcache.checkpoints import Checkpoints
from rcache.indexing import NONE


class Layout(NamedTuple):
    """What a row is made of. Static."""

    num_checkpoints: int  # K
    window_pages: tuple[int, ...]  # W of each page group: pages of the window before a checkpoint

    @property
    def width(self) -> int:
        """Integers of a row."""
        return 3 + len(self.window_pages) + self.num_checkpoints * (3 + sum(self.window_pages))


class Record(struct.PyTreeNode):
    """What a row says; leading axes: N of the table, B of a batch, none for one sequence."""

    length: jax.Array  # i32[...]: tokens
    slot: jax.Array  # i32[...]: the state slot, NONE if it is empty or no layer has states
    approximate: jax.Array  # bool[...]: tokens were cut out of its middle
    first: tuple[jax.Array, ...]  # i32[...] for each page group: lowest position kept
    checkpoints: Checkpoints


def empty(layout: Layout) -> Record:
    """An empty sequence."""
    zero = jnp.zeros((), jnp.int32)
    return Record(
        length=zero,
        slot=jnp.full((), NONE, jnp.int32),
        approximate=jnp.zeros((), bool),
        first=(zero,) * len(layout.window_pages),
        checkpoints=ckpt.empty((), layout.num_checkpoints, layout.window_pages),
    )


def pack(record: Record) -> jax.Array:
    """`record` as i32[..., width]."""
    kept = record.checkpoints
    one = [record.length, record.slot, record.approximate.astype(jnp.int32), *record.first]
    rows = [x[..., None] for x in one] + [kept.positions, kept.slots, kept.flags]
    rows += [pages.reshape(*pages.shape[:-2], -1) for pages in kept.pages]
    return jnp.concatenate(rows, axis=-1)


def unpack(values: jax.Array, layout: Layout) -> Record:
    """What `values` i32[..., width] say."""
    count, num_groups = layout.num_checkpoints, len(layout.window_pages)
    begin = 3 + num_groups

    def take(size: int) -> jax.Array:
        nonlocal begin
        begin += size
        return values[..., begin - size : begin]

    positions, slots, flags = take(count), take(count), take(count)
    pages = tuple(take(count * size).reshape(*values.shape[:-1], count, size) for size in layout.window_pages)
    return Record(
        length=values[..., 0],
        slot=values[..., 1],
        approximate=values[..., 2] != 0,
        first=tuple(values[..., 3 + group] for group in range(num_groups)),
        checkpoints=Checkpoints(positions, slots, flags, pages),
    )
