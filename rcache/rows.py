"""The rows of a batch held against the table: are they in order, and which sequences grow from where to where."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rcache import pool as pools
from rcache.batch import Batch, Rows
from rcache.config import Config
from rcache.indexing import NONE
from rcache.status import Status, first_error


def resolve(batch: Batch, held: jax.Array, ok: jax.Array) -> Rows:
    """The rows of `batch`, whose sequences hold `held` i32[B] tokens; all inactive unless `ok` bool[]."""
    active = (batch.sequences >= 0) & (batch.lengths > 0) & ok
    index = jnp.where(active, batch.sequences, jnp.int32(NONE))
    lengths = jnp.where(active, batch.lengths, 0)
    return Rows(
        active=active,
        index=index,
        starts=jnp.where(active, held, 0),
        lengths=lengths,
        token_mask=jnp.arange(batch.positions.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None],
        captures=jnp.where(active[:, None], batch.captures, jnp.int32(NONE)),
    )


def check(batch: Batch, starts: jax.Array, config: Config, context: int) -> jax.Array:
    """Status i32[] of all that can be wrong with a batch but the room for it. Its sequences hold `starts` i32[B]."""
    is_row = batch.sequences != -1
    has_tokens = is_row & (batch.lengths > 0)
    num_tokens = batch.positions.shape[1]
    offsets = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    token_mask = is_row[:, None] & (offsets < batch.lengths[:, None])
    unknown = is_row & ((batch.sequences < 0) | (batch.sequences >= config.max_sequences))
    elsewhere = (batch.positions != -1) & (batch.positions != starts[:, None] + offsets)
    return jnp.where(
        batch.status != Status.OK,
        batch.status,
        first_error(
            (jnp.any(unknown), Status.SEQUENCE_OUT_OF_RANGE),
            (jnp.any(is_row & ~pools.first_occurrence(batch.sequences)), Status.DUPLICATE_SEQUENCE),
            (
                jnp.any(is_row & ((batch.lengths < 0) | (batch.lengths > num_tokens))),
                Status.LENGTH_OUT_OF_RANGE,
            ),
            (jnp.any(token_mask & elsewhere), Status.POSITION_MISMATCH),
            (jnp.any(has_tokens & (starts + batch.lengths > context)), Status.CONTEXT_OVERFLOW),
            (jnp.any(has_tokens & _captures_invalid(batch)), Status.CAPTURES_INVALID),
        ),
    )


def _captures_invalid(batch: Batch) -> jax.Array:
    """bool[B]: offsets that do not ascend within 1 .. length, or follow a -1."""
    offsets = batch.captures
    given = offsets != -1
    outside = given & ((offsets < 1) | (offsets > batch.lengths[:, None]))
    unordered = given[:, 1:] & (~given[:, :-1] | (offsets[:, 1:] <= offsets[:, :-1]))
    return jnp.any(outside, axis=1) | jnp.any(unordered, axis=1)
