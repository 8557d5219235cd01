"""Ids with reference counts and a stack of free ones. State slots are one pool, the pages of each page group another.

`NONE` among ids stands for none of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from rcache.indexing import NONE, add, look_up, store


class Pool(struct.PyTreeNode):
    """`C` ids. Ids in `free[:num_free]` have no holder; the rest of `free` is NONE."""

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


_FEW = 256
"""Up to so many elements, comparing all pairs is one operation where a prefix sum is a dozen, one for each bit."""


def first_occurrence(ids: jax.Array) -> jax.Array:
    """bool[n]: no earlier element of `ids` i32[n] is equal."""
    n = ids.shape[0]
    earlier = jnp.tril(jnp.ones((n, n), bool), -1)
    return ~jnp.any((ids[:, None] == ids[None, :]) & earlier, axis=1)


def allocate(pool: Pool, wanted: jax.Array) -> tuple[Pool, jax.Array]:
    """Takes one id for each True of `wanted` bool[n], which must be at most `num_free`. Ids are NONE elsewhere."""
    taken = jnp.where(wanted, pool.num_free - 1 - rank(wanted), jnp.int32(NONE))
    ids = look_up(pool.free, taken, NONE)
    return pool.replace(
        ref_count=store(pool.ref_count, ids, 1),
        free=store(pool.free, taken, NONE),
        num_free=pool.num_free - jnp.sum(wanted, dtype=jnp.int32),
    ), ids


def share(pool: Pool, ids: jax.Array) -> Pool:
    """One more holder for each of `ids` i32[...]; NONE is skipped."""
    return pool.replace(ref_count=add(pool.ref_count, ids.reshape(-1), 1))


def release(pool: Pool, ids: jax.Array, *, unique: bool = False) -> Pool:
    """One holder less for each of `ids` i32[...]; those left without a holder become free.

    `unique`: no id occurs twice; saves finding out.
    """
    if pool.capacity == 0:  # a config without states; nothing to gather from
        return pool
    ids = ids.reshape(-1)
    ref_count = add(pool.ref_count, ids, -1)
    freed = look_up(ref_count, ids, 1) == 0
    if not unique:
        freed &= first_occurrence(ids)
    return Pool(
        ref_count=ref_count,
        free=store(pool.free, jnp.where(freed, pool.num_free + rank(freed), jnp.int32(NONE)), ids),
        num_free=pool.num_free + jnp.sum(freed, dtype=jnp.int32),
    )


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
