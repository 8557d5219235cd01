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
    """`C` ids. Those in `free[:num_free]` have no holder; the rest of `free` means nothing.

    Two are one array: a compiled call takes, copies and returns arrays one by one, however small they are. The third is
    not: what is asked all over the place must not stand where things are changed in place, or all is copied to be safe.
    """

    numbers: jax.Array  # i32[2 C]: `ref_count` and `free`
    num_free: jax.Array  # i32[]

    @property
    def capacity(self) -> int:
        return self.numbers.shape[0] // 2

    @property
    def ref_count(self) -> jax.Array:
        """i32[C]"""
        return self.numbers[: self.capacity]

    @property
    def free(self) -> jax.Array:
        """i32[C]"""
        return self.numbers[self.capacity :]


def init(capacity: int) -> Pool:
    """A pool with every id free; they are handed out from 0 upwards."""
    ref_count, free = jnp.zeros(capacity, jnp.int32), jnp.arange(capacity - 1, -1, -1, dtype=jnp.int32)
    return Pool(jnp.concatenate([ref_count, free]), jnp.array(capacity, jnp.int32))


def holders(pool: Pool, ids: jax.Array, filler: int) -> jax.Array:
    """How many each of `ids` i32[...] has: i32[...]; `filler` for NONE."""
    return look_up(pool.numbers, ids, filler)


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
    ids, num_free, stack = jnp.zeros(0, jnp.int32), pool.num_free, pool.capacity
    if wanted is not None:
        top = jnp.where(wanted, stack + num_free - 1 - rank(wanted), jnp.int32(NONE))
        ids = look_up(pool.numbers, top, NONE)
        num_free -= jnp.sum(wanted, dtype=jnp.int32)
    more = ids if shared is None else jnp.concatenate([ids, shared])
    steps = np.repeat(np.array([1, -1], np.int32), [more.shape[0], left.shape[0]])
    pool = Pool(add(pool.numbers, jnp.concatenate([more, left]), steps), num_free)
    if left.shape[0] == 0:
        return pool, ids
    freed = holders(pool, left, 1) == 0
    if not unique:
        freed &= first_occurrence(left)
    top = jnp.where(freed, stack + num_free + rank(freed), jnp.int32(NONE))
    return Pool(store(pool.numbers, top, left), num_free + jnp.sum(freed, dtype=jnp.int32)), ids


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
    return (ids >= 0) & ~(is_last & (holders(pool, ids, 0) == holders_here))
