"""What a model needs to know of a pass, with a cache and without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

import rcache


class WholePass(struct.PyTreeNode):
    """A pass over `B` whole sequences of up to `T` tokens of which nothing is kept: for training.

    Models take it in place of an `rcache.Forward`, with None for the cache. Such a pass can be differentiated.
    """

    lengths: jax.Array  # i32[B]
    positions: jax.Array  # i32[B, T]
    token_mask: jax.Array  # bool[B, T]
    capture_offsets: jax.Array  # i32[B, 0]

    @classmethod
    def of(cls, lengths: jax.Array, num_tokens: int) -> WholePass:
        """Rows of `lengths` i32[B] tokens, padded to `num_tokens`."""
        offsets = jnp.arange(num_tokens, dtype=jnp.int32)
        token_mask = offsets < lengths[:, None]
        positions = jnp.where(token_mask, offsets, 0)
        return cls(lengths, positions, token_mask, jnp.zeros((lengths.shape[0], 0), jnp.int32))

    def causal_mask(self, sliding_window: int | None) -> jax.Array:
        """Which token may look at which: bool[B, T, T]."""
        query, key = self.positions[:, :, None], self.positions[:, None, :]
        mask = (key <= query) & self.token_mask[:, :, None] & self.token_mask[:, None, :]
        return mask if sliding_window is None else mask & (key > query - sliding_window)


Pass = rcache.Forward | WholePass
