"""Which tokens of which sequences run next."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rcache.arguments import as_int32, check_integer
from rcache.pool import first_occurrence, rank
from rcache.status import Status


class Batch(struct.PyTreeNode):
    """`B` rows of up to `T` tokens, each row the next tokens of one sequence."""

    sequences: jax.Array  # i32[B]; -1: a row of padding
    lengths: jax.Array  # i32[B]: real tokens of each row, at its beginning
    positions: jax.Array  # i32[B, T]: checked against the sequence's length; -1: not given
    captures: jax.Array  # i32[B, C]: ascending offsets, in tokens of this pass, to capture a checkpoint at; -1: none
    bidirectional: jax.Array  # i32[B, T]: tokens of a row with the same id >= 0 see each other (images); -1: causal
    status: jax.Array  # i32[]: OK, or why these rows are not the batch that was asked for


class Rows(struct.PyTreeNode):
    """Rows that run. Inactive ones (padding, no tokens, a refused batch) have index -1, start 0 and length 0."""

    active: jax.Array  # bool[B]
    index: jax.Array  # i32[B]: the sequence; -1 for inactive rows
    starts: jax.Array  # i32[B]: tokens it holds
    lengths: jax.Array  # i32[B]: tokens it gets
    token_mask: jax.Array  # bool[B, T]
    captures: jax.Array  # i32[B, C]; NONE for inactive rows

    @property
    def ends(self) -> jax.Array:
        """i32[B]: tokens it will hold."""
        return self.starts + self.lengths

    @property
    def num_tokens(self) -> int:
        return self.token_mask.shape[1]


def make_batch(
    sequences: Any,
    lengths: Any,
    num_tokens: int,
    *,
    positions: Any = None,
    captures: Any = None,
    bidirectional: Any = None,
) -> Batch:
    """A batch from its rows.

    Args:
      sequences: i32[B] sequence ids; -1 for a row of padding.
      lengths: i32[B] real tokens in each row.
      num_tokens: `T`, the padded length of a row.
      positions: i32[B, T] or None. Positions follow from the lengths of the sequences; given ones are only checked.
      captures: i32[B, C] or None: offsets 1 .. length at which to keep a checkpoint, ascending, -1 filling the rest.
      bidirectional: i32[B, T] or None: non-causal blocks; tokens of equal id see each other.

    Raises:
      ValueError: an array of other than these axes, or not of integers.
    """
    check_integer("num_tokens", num_tokens, 0)
    sequences, lengths = as_int32("sequences", sequences, ndim=1), as_int32("lengths", lengths, ndim=1)
    num_rows = sequences.shape[0]
    none: Any = np.full((num_rows, num_tokens), -1, np.int32)  # on the host, as `as_int32` leaves what is there
    blocks = none if bidirectional is None else as_int32("bidirectional", bidirectional, ndim=2)
    batch = Batch(
        sequences=sequences,
        lengths=lengths,
        positions=none if positions is None else as_int32("positions", positions, ndim=2),
        captures=none[:, :0] if captures is None else as_int32("captures", captures, ndim=2),
        bidirectional=blocks,
        status=cast(Any, np.int32(Status.OK)),
    )
    for name, wanted in (
        ("lengths", (num_rows,)),
        ("positions", (num_rows, num_tokens)),
        ("captures", (num_rows, batch.captures.shape[1])),
        ("bidirectional", (num_rows, num_tokens)),
    ):
        if getattr(batch, name).shape != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {getattr(batch, name).shape}")
    return batch


def flat_batch(sequences: Any, positions: Any, *, num_rows: int, num_tokens: int) -> tuple[Batch, jax.Array, jax.Array]:
    """A batch from a flat list of tokens; those of one sequence are in order, sequences interleave in any way.

    Args:
      sequences: i32[F] the sequence of each token; -1 for padding.
      positions: i32[F] the position of each token, or -1 where it is not to be checked.
      num_rows: `B`, sequences the batch has room for.
      num_tokens: `T`, tokens of one sequence it has room for.

    Returns:
      The batch, its rows in order of first appearance, and for each flat token its row and column, i32[F]. Padding has
      row `num_rows`, so that `x.at[rows, columns].set(flat, mode="drop")` skips it. If there are more sequences or
      tokens than planned, the batch's status is BATCH_TOO_LARGE, and `start_forward` refuses it.
    """
    check_integer("num_rows", num_rows, 1)
    check_integer("num_tokens", num_tokens, 1)
    sequences, positions = as_int32("sequences", sequences, ndim=1), as_int32("positions", positions, ndim=1)
    if positions.shape != sequences.shape:
        raise ValueError(f"positions must have shape {sequences.shape}, got {positions.shape}")
    num_flat = sequences.shape[0]
    real = sequences != -1
    same = (sequences[:, None] == sequences[None, :]) & real[:, None]
    earlier = jnp.tril(jnp.ones((num_flat, num_flat), bool), -1)
    columns = jnp.sum(same & earlier, axis=1, dtype=jnp.int32)
    is_first = first_occurrence(sequences) & real
    appearance = rank(is_first)  # at first tokens: the row
    rows = jnp.sum(jnp.where(same & is_first[None, :], appearance[None, :], 0), axis=1, dtype=jnp.int32)
    rows = jnp.where(real, rows, jnp.int32(num_rows))
    too_large = jnp.any(real & ((rows >= num_rows) | (columns >= num_tokens)))
    columns = jnp.where(real, columns, jnp.int32(0))
    batch = make_batch(
        jnp.full(num_rows, -1, jnp.int32).at[rows].set(sequences, mode="drop"),
        jnp.zeros(num_rows, jnp.int32).at[rows].add(1, mode="drop"),
        num_tokens,
        positions=jnp.full((num_rows, num_tokens), -1, jnp.int32).at[rows, columns].set(positions, mode="drop"),
    )
    return batch.replace(status=jnp.where(too_large, jnp.int32(Status.BATCH_TOO_LARGE), batch.status)), rows, columns
