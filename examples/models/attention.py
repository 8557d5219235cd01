"""Attention over the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import rcache
from models.layers import FEW_ROWS, Linear, einsum
from models.passes import Pass
from models.rope import Rope

BLOCK_SCORES = 1 << 19  # at a time, of all heads: what a processor's nearer caches hold
FEWEST_QUERIES = 128  # at a time, so that products of matrices are worth the name
FEWEST_WINDOWED = 64  # the same where a window is smaller: more of them would see mostly what is not for them
KEY_WIDTHS = 4  # over one of so many numbers of keys


class Attention(nnx.Module):
    """Grouped-query attention.

    Args:
      hidden_size: of the input and the output.
      num_heads: heads of queries; as many, one after the other, share a head of keys and values.
      num_kv_heads: heads of keys and values.
      head_dim: size of a head.
      scale: of the scores; None: `head_dim ** -0.5`.
      rope: turns queries and keys by their positions; None: positions are not encoded.
      norm: makes the norm of each head of queries and of keys, before RoPE; None: they have none.
      gated: the output is multiplied by the sigmoid of a gate, which `q_proj` gives beside each head of queries.
      bias: whether the projections of queries, keys and values have one.
      output_bias: whether the output's has one.
      sliding_window: a query sees itself and the `sliding_window - 1` tokens before it; None: all before it.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        rope: Rope | None = None,
        norm: Callable[[int], nnx.Module] | None = None,
        gated: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        sliding_window: int | None = None,
    ) -> None:
        self.q_proj = Linear(hidden_size, num_heads * head_dim * (2 if gated else 1), bias=bias)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=output_bias)
        if norm is not None:
            self.q_norm, self.k_norm = norm(head_dim), norm(head_dim)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rope = rope
        self.gated = gated
        self.sliding_window = sliding_window

    def cache_layer(self) -> rcache.Layer:
        """What it remembers."""
        kept = rcache.Attention(self.num_kv_heads, self.head_dim, sliding_window=self.sliding_window)
        return rcache.Layer(attention=kept)

    def __call__(
        self, x: jax.Array, cache: rcache.Cache | None, forward: Pass, layer: int
    ) -> tuple[jax.Array, rcache.Cache | None]:
        """f32[B, T, D] to the same shape, and the cache. Padding sees no key, and gets some finite mean."""
        heads = (*x.shape[:2], -1, self.head_dim)
        queries, keys, values = self.q_proj(x), self.k_proj(x).reshape(heads), self.v_proj(x).reshape(heads)
        if self.gated:
            queries, gate = jnp.split(queries.reshape(*x.shape[:2], self.num_heads, -1), 2, axis=-1)
        queries = queries.reshape(heads)
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if self.rope is not None:
            queries, keys = self.rope(queries, forward.positions), self.rope(keys, forward.positions)
        if cache is None:
            mask = forward.causal_mask(self.sliding_window)
        else:
            cache = rcache.put(cache, forward, layer, keys, values)
            keys, values, mask = rcache.get(cache, forward, layer)  # [B, X, H, D], [B, X, H, Dv], [B, T, X]
        attended = attend(queries, keys, values, mask, scale=self.scale, sliding_window=self.sliding_window)
        if self.gated:
            attended = attended * jax.nn.sigmoid(gate)
        return self.o_proj(attended.reshape(*x.shape[:2], -1)), cache


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> jax.Array:
    """Softmax attention of `queries` f32[B, T, H * G, D] to `keys` f32[B, X, H, D] where `mask` bool[B, T, X].

    Query heads `h * G .. h * G + G - 1` share key head `h`. Returns f32[B, T, H * G, Dv]. The mask alone
    decides what is seen; `sliding_window` says how much that is at most.

    Many queries run in blocks of a row, so that a block's scores stay near the processor; and over no more keys than
    those from the first to the last that any of them sees, rounded up to one of a few widths.
    """
    num_rows, num_tokens, num_heads, head_dim = queries.shape
    grouped = queries.reshape(num_rows, num_tokens, keys.shape[2], num_heads // keys.shape[2], head_dim)
    if num_tokens * grouped.shape[3] <= FEW_ROWS:
        # Keys on the left: so the product reads them as they are. To turn them around takes longer than to multiply
        # them by few queries.
        scores = jnp.moveaxis(einsum("bxhd,bthgd->bhxtg", keys, grouped) * scale, (2, 4), (4, 2))
        attended = _weighted(scores, values.swapaxes(1, 2), mask)
        return jnp.moveaxis(attended, 3, 1).reshape(num_rows, num_tokens, num_heads, -1)
    grouped, keys, values = jnp.moveaxis(grouped * scale, 1, 3), keys.swapaxes(1, 2), values.swapaxes(1, 2)
    size = max(BLOCK_SCORES // (num_heads * keys.shape[2]), FEWEST_QUERIES)
    if sliding_window is not None:
        size = min(size, max(sliding_window, FEWEST_WINDOWED))
    size = min(size, num_tokens)
    attended = lax.map(lambda row: _attend_row(*row, size=size), (grouped, keys, values, mask))  # [B, T, H, G, Dv]
    return attended.reshape(num_rows, num_tokens, num_heads, -1)


def _attend_row(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, *, size: int) -> jax.Array:
    """One row: `queries` [H, G, T, D], scaled, `keys` [H, X, D] and `values` [H, X, Dv] to [T, H, G, Dv].

    In blocks of `size` queries.
    """
    num_tokens, num_keys = mask.shape
    padding = (0, -num_tokens % size)
    queries = jnp.pad(queries, ((0, 0), (0, 0), padding, (0, 0)))
    queries = jnp.moveaxis(queries.reshape(*queries.shape[:2], -1, size, queries.shape[3]), 2, 0)
    mask = jnp.pad(mask, (padding, (0, 0))).reshape(-1, size, num_keys)
    widths = np.unique([-(-num_keys * part // KEY_WIDTHS) for part in range(1, KEY_WIDTHS + 1)]).tolist()
    seen = jnp.any(mask, axis=1)  # [N, X]
    first = jnp.argmax(seen, axis=1).astype(jnp.int32)
    behind = jnp.max(jnp.where(seen, jnp.arange(1, num_keys + 1, dtype=jnp.int32), 0), axis=1)
    enough = jnp.searchsorted(jnp.asarray(widths, jnp.int32), jnp.maximum(behind - first, 0))

    def attend_block(width: int, queries: jax.Array, mask: jax.Array, first: jax.Array) -> jax.Array:
        spanned = (lax.dynamic_slice_in_dim(x, first, width, axis=1) for x in (keys, values, mask))
        keys_, values_, mask = spanned  # from the first on, or the last `width` if there are not as many
        return _weighted(einsum("hgtd,hxd->hgtx", queries, keys_), values_, mask)

    branches = [partial(attend_block, width) for width in widths]
    blocks = (enough, queries, mask, first)
    attended = lax.map(lambda block: lax.switch(block[0], branches, *block[1:]), blocks)  # [N, H, G, size, Dv]
    attended = jnp.moveaxis(attended, 3, 1)
    return attended.reshape(-1, *attended.shape[2:])[:num_tokens]


def _weighted(scores: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean [..., H, G, T, Dv] of values [..., H, X, Dv] by scores [..., H, G, T, X] where `mask` bool[..., T, X].

    As a softmax of the scores, but what is divided are the sums, of which there are fewer than weights.
    """
    # Added, not selected, so that XLA on CPU makes one operation of all up to the weights. What is masked is finite.
    scores = scores + jnp.where(mask, 0, jnp.finfo(scores.dtype).min)[..., None, None, :, :]
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return einsum("...hgtx,...hxd->...hgtd", weights, values) / jnp.sum(weights, axis=-1, keepdims=True)
