"""Ids with reference counts and a stack of free ones. State slots are one pool, the pages of each page group another.

`NONE` among ids stands for none of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rcache.indexing import NONE, add, look_up, store


class Pool(struct.PyTreeNode):
    """`C` ids. Those in `free[:num_free]` have no holder; the rest of `free` means nothing."""

    ref_count: jax.Array  # i32[C]
    free: jax.Array  # i32[C]
    num_free: jax.Array  # i32[]

    @property
    def capacity(self) -> int:
        return self.ref_count.shape[0]


def init(capacity: int) -> Pool:
    """A pool with every id free; they are handed out from 0 upwards."""
    return Pool(
        ref_count=jnp.zeros(capacity, jnp.int32),
        free=jnp.arange(capacity - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.array(capacity, jnp.int32),
    )


def rank(mask: jax.Array) -> jax.Array:
    """For each True of `mask` bool[n], how many come before it: i32[n]. Meaningless elsewhere."""
    n = mask.shape[0]
    if n > _FEW:
        return jnp.cumsum(mask, dtype=jnp.int32) - 1
    return jnp.sum(mask[None, :] & jnp.tril(jnp.ones((n, n), bool), -1), axis=1, dtype=jnp.int32)


_FEW = 32
"""Up to so many elements, comparing all pairs is one operation where a prefix sum is a dozen, one for each bit."""


def first_occurrence(ids: jax.Array) -> jax.Array:
    """bool[n]: no earlier element of `ids` i32[n] is equal."""
    n = ids.shape[0]
    earlier = jnp.tril(jnp.ones((n, n), bool), -1)
    return ~jnp.any((ids[:, None] == ids[None, :]) & earlier, axis=1)


def exchange(
    pool: Pool,
    left: jax.Array,
    *,
    wanted: jax.Array | None = None,
    shared: jax.Array | None = None,
    unique: bool = False,
) -> tuple[Pool, jax.Array]:
    """Takes ids, adds holders to others and takes them from others, with as few operations as one of these would need.

    Args:
      pool: the pool.
      left: i32[k]: one holder less for each; those left without a holder become free, after ids were taken.
      wanted: bool[n]: an id is taken for each True; they must be at most `num_free`.
      shared: i32[m]: one holder more for each.
      unique: no id occurs twice in `left`; saves finding out.

    Returns:
      The pool, and the ids taken: i32[n], NONE where none is wanted.
    """
    ids, num_free = jnp.zeros(0, jnp.int32), pool.num_free
    if wanted is not None:
        ids = look_up(pool.free, jnp.where(wanted, num_free - 1 - rank(wanted), jnp.int32(NONE)), NONE)
        num_free -= jnp.sum(wanted, dtype=jnp.int32)
    more = ids if shared is None else jnp.concatenate([ids, shared])
    steps = np.repeat(np.array([1, -1], np.int32), [more.shape[0], left.shape[0]])
    ref_count = add(pool.ref_count, jnp.concatenate([more, left]), steps)
    if left.shape[0] == 0:
        return Pool(ref_count, pool.free, num_free), ids
    freed = look_up(ref_count, left, 1) == 0
    if not unique:
        freed &= first_occurrence(left)
    free = store(pool.free, jnp.where(freed, num_free + rank(freed), jnp.int32(NONE)), left)
    return Pool(ref_count, free, num_free + jnp.sum(freed, dtype=jnp.int32)), ids


def allocate(pool: Pool, wanted: jax.Array) -> tuple[Pool, jax.Array]:
    """Takes one id for each True of `wanted` bool[n], which must be at most `num_free`. Ids are NONE elsewhere."""
    return exchange(pool, jnp.zeros(0, jnp.int32), wanted=wanted)


def share(pool: Pool, ids: jax.Array) -> Pool:
    """One more holder for each of `ids` i32[...]; NONE is skipped."""
    return exchange(pool, jnp.zeros(0, jnp.int32), shared=ids.reshape(-1))[0]


def release(pool: Pool, ids: jax.Array, *, unique: bool = False) -> Pool:
    """One holder less for each of `ids` i32[...]; those left without a holder become free.

    `unique`: no id occurs twice; saves finding out.
    """
    return exchange(pool, ids.reshape(-1), unique=unique)[0]


def must_leave(pool: Pool, ids: jax.Array) -> jax.Array:
    """Which holders `ids` i32[B] of shared ids must take another one before they write: bool[B].

    A holder stays if it is the only one, or the last of several in `ids` with nobody else: then all others have read
    before it writes, in whatever order rows are worked through.
    """
    n = ids.shape[0]
    same = ids[:, None] == ids[None, :]
    holders_here = jnp.sum(same, axis=1, dtype=jnp.int32)
    is_last = ~jnp.any(same & jnp.triu(jnp.ones((n, n), bool), 1), axis=1)
    holders = look_up(pool.ref_count, ids, 0)
    return (ids >= 0) & ~(is_last & (holders == holders_here))
