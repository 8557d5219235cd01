"""Which past states of a sequence are kept: rows of at most `K` checkpoints, sorted by position, NONE at the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from rcache.config import CheckpointPolicy
from rcache.indexing import NONE

APPROXIMATE = 1
"""Flag: the state contains tokens a middle removal cut out."""
EXTRA = 2
"""Flag: captured by request, closer to the one before it than the interval; the first to go when there is no room."""


class Checkpoints(struct.PyTreeNode):
    """The checkpoints of several sequences; leading axis N in the table, B in a batch, none for one sequence."""

    positions: jax.Array  # i32[..., K]: position of the last token folded in, ascending; NONE at the end
    slots: jax.Array  # i32[..., K]: the state slot each holds
    flags: jax.Array  # i32[..., K]: APPROXIMATE | EXTRA; 0 where there is none
    pages: tuple[jax.Array, ...]  # i32[..., K, W] for each page group: pages of the window before it

    @property
    def count(self) -> jax.Array:
        """i32[...]: how many there are."""
        return jnp.sum(self.positions >= 0, axis=-1, dtype=jnp.int32)

    @property
    def newest(self) -> jax.Array:
        """i32[...]: position of the newest one, NONE if there is none."""
        return jnp.max(self.positions, axis=-1, initial=NONE)


def empty(shape: tuple[int, ...], num_checkpoints: int, window_pages: tuple[int, ...]) -> Checkpoints:
    """No checkpoints for `shape` sequences."""
    row = (*shape, num_checkpoints)
    return Checkpoints(
        positions=jnp.full(row, NONE, jnp.int32),
        slots=jnp.full(row, NONE, jnp.int32),
        flags=jnp.zeros(row, jnp.int32),
        pages=tuple(jnp.full((*row, width), NONE, jnp.int32) for width in window_pages),
    )


def before(length: jax.Array, checkpoints: Checkpoints) -> Checkpoints:
    """Only the checkpoints of one sequence within its first `length` i32[] tokens. They ascend: none has to move."""
    return _where(checkpoints.positions < length, checkpoints)


def select(keep: jax.Array, checkpoints: Checkpoints) -> Checkpoints:
    """Only the checkpoints of one sequence where `keep` bool[K], moved up to close the gaps."""
    order = jnp.argsort(~keep, stable=True)
    return jax.tree.map(lambda values: values[order], _where(keep, checkpoints))


def _where(keep: jax.Array, checkpoints: Checkpoints) -> Checkpoints:
    def pick(values: jax.Array, none: int) -> jax.Array:
        return jnp.where(keep.reshape(keep.shape + (1,) * (values.ndim - 1)), values, jnp.int32(none))

    return Checkpoints(
        positions=pick(checkpoints.positions, NONE),
        slots=pick(checkpoints.slots, NONE),
        flags=pick(checkpoints.flags, 0),
        pages=tuple(pick(pages, NONE) for pages in checkpoints.pages),
    )


def is_due(checkpoints: Checkpoints, position: jax.Array, policy: CheckpointPolicy) -> jax.Array:
    """bool[...]: whether a pass that ends at `position` i32[...] leaves a checkpoint by itself."""
    return _on_interval(checkpoints.newest, position, policy)


def is_extra(checkpoints: Checkpoints, position: jax.Array, policy: CheckpointPolicy) -> jax.Array:
    """bool[...]: whether a checkpoint at `position` would be an EXTRA one."""
    regular = jnp.where(checkpoints.flags & EXTRA == 0, checkpoints.positions, jnp.int32(NONE))
    return ~_on_interval(jnp.max(regular, axis=-1, initial=NONE), position, policy)


def _on_interval(newest: jax.Array, position: jax.Array, policy: CheckpointPolicy) -> jax.Array:
    far_enough = (newest < 0) | (position - newest >= policy.interval)
    return (position >= policy.min_position) & far_enough


def victim(checkpoints: Checkpoints) -> jax.Array:
    """i32[...]: index of the checkpoint that goes when a row is full: the lowest EXTRA one, else the lowest."""
    is_extra = (checkpoints.flags & EXTRA != 0) & (checkpoints.positions >= 0)
    return jnp.argmax(is_extra, axis=-1).astype(jnp.int32)  # 0 where there is no EXTRA one


def replace(checkpoints: Checkpoints, taken: jax.Array, dropped: jax.Array, new: Checkpoints) -> Checkpoints:
    """Appends `new` to the rows where `taken` bool[B], dropping index `dropped` i32[B] (NONE: nothing) first.

    `new` has one checkpoint a row: `K == 1`.
    """
    index = jnp.arange(checkpoints.positions.shape[1], dtype=jnp.int32)[None, :]
    drops = (dropped >= 0)[:, None]
    behind = drops & (index >= dropped[:, None])
    is_end = index == jnp.where(drops, checkpoints.count[:, None] - 1, checkpoints.count[:, None])

    def rows(old: jax.Array, added: jax.Array, none: int) -> jax.Array:
        wide = lambda mask: mask.reshape(mask.shape + (1,) * (old.ndim - 2))  # noqa: E731
        next_one = jnp.concatenate([old[:, 1:], jnp.full_like(old[:, :1], none)], axis=1)
        moved = jnp.where(wide(behind), next_one, old)
        return jnp.where(wide(taken[:, None] & is_end), added, jnp.where(wide(taken[:, None]), moved, old))

    return Checkpoints(
        positions=rows(checkpoints.positions, new.positions, NONE),
        slots=rows(checkpoints.slots, new.slots, NONE),
        flags=rows(checkpoints.flags, new.flags, 0),
        pages=tuple(rows(o, n, NONE) for o, n in zip(checkpoints.pages, new.pages, strict=True)),
    )
