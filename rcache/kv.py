"""Payload of the page pool: writing the keys and values of a pass, reading what its queries may see, moving tokens."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rcache import payload
from rcache.cache import Cache
from rcache.config import KVGroup, PageGroup
from rcache.forward import Forward
from rcache.indexing import NONE, look_up
from rcache.run import CacheT, Run, written
from rcache.shift import Shift


def put(
    cache: CacheT,
    forward: Forward,
    layer: int | jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    like: int | None = None,
) -> CacheT:
    """Stores the keys and values of this pass. Every attention layer does so once a pass, before `get`.

    Args:
      cache: the cache.
      forward: the plan of this pass.
      layer: index into `config.layers`; may be traced (a scan over equal layers); then it is not checked.
      keys: `[B, T, H, D]` in the config's dtype, positions already encoded; padding is not stored.
      values: `[B, T, H, Dv]`.
      like: with a traced `layer`, one index it may take. Not needed where all attention layers are equal.

    Raises:
      ValueError: the layer has no attention, or the plan belongs to a cache of another config.
      AssertionError: a shape or dtype other than the config's.
    """
    payload.check_plan(cache, forward)
    group, row = _group_of(cache, layer, like)
    attention, plan = group.attention, forward.pages[group.page_group]
    num_rows, num_tokens = forward.token_mask.shape
    heads = (num_rows, num_tokens, attention.num_kv_heads)
    stored: list[payload.Layers] = []
    for what, size, new, held in (
        ("keys", attention.head_dim, keys, cache.keys[group.key]),
        ("values", attention.value_dim, values, cache.values[group.key]),
    ):
        _check(new, (*heads, size), attention.dtype, what, layer)
        if isinstance(cache, Run):
            column = forward.starts - plan.context_start
            stored.append(payload.append_token(held, row, column, forward.lengths > 0, new[:, 0]))
            continue
        assert isinstance(held, jax.Array)
        stored.append(payload.write_pages(payload.copy_pages(held, row, plan), row, plan, forward.positions, new))
    new_keys, new_values = {**cache.keys, group.key: stored[0]}, {**cache.values, group.key: stored[1]}
    return written(cache, forward, keys=new_keys, values=new_values)


def get(
    cache: Cache | Run, forward: Forward, layer: int | jax.Array, *, like: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the queries of this pass may see.

    Args:
      cache: the cache, after `put`, which also makes its own what the sequence shares of its last page: without it,
        older tokens on that page may read wrong.
      forward: the plan of this pass.
      layer: index into `config.layers`; may be traced.
      like: as in `put`.

    Returns:
      Keys `[B, X, H, D]`, values `[B, X, H, Dv]` and mask bool[B, T, X]: which of them each token sees. `X` is
      the context bucket, or what window and pass can span if that is less. Zero where nothing is kept; padding sees
      nothing.

    Raises:
      ValueError: the layer has no attention, or the plan belongs to a cache of another config.
    """
    payload.check_plan(cache, forward)
    group, row = _group_of(cache, layer, like)
    plan = forward.pages[group.page_group]
    positions, kept = payload.context(forward, plan)
    if isinstance(cache, Run):  # what has not come yet is zero there
        keys, values = (payload.layer_at(held[group.key], row) for held in (cache.keys, cache.values))
    else:
        keys = payload.read_pages(cache.keys[group.key], row, plan, kept)
        values = payload.read_pages(cache.values[group.key], row, plan, kept)
    # Heads are outside, as products of matrices want them: a caller who moves them there moves nothing.
    keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    return keys, values, _mask(forward, cache.config.page_groups[group.page_group], positions, kept)


def _mask(forward: Forward, group: PageGroup, positions: jax.Array, kept: jax.Array) -> jax.Array:
    query, key = forward.positions[:, :, None], positions[:, None, :]
    mask = key <= query
    if group.sliding_window is not None:
        mask &= key > query - group.sliding_window
    if group.chunk_size is not None:
        mask &= key // group.chunk_size == query // group.chunk_size
    return (mask | _same_block(forward, positions)) & kept[:, None, :] & forward.token_mask[:, :, None]


def _same_block(forward: Forward, positions: jax.Array) -> jax.Array:
    """Whether a key belongs to the same bidirectional block of this pass as the query: bool[B, T, X]."""
    column = positions - forward.starts[:, None]
    num_tokens = forward.bidirectional.shape[1]
    in_pass = (column >= 0) & (column < num_tokens)
    block = jnp.take_along_axis(forward.bidirectional, jnp.clip(column, 0, num_tokens - 1), axis=1)
    block = jnp.where(in_pass, block, jnp.int32(-1))
    return (forward.bidirectional[:, :, None] == block[:, None, :]) & (forward.bidirectional >= 0)[:, :, None]


class Move(struct.PyTreeNode):
    """The tokens of one sequence, in one page group, that a middle removal moves down."""

    old_pages: jax.Array  # i32[M]
    new_pages: jax.Array  # i32[M]; NONE where nothing is written
    begin: jax.Array  # i32[]: position the cut begins at
    distance: jax.Array  # i32[]: tokens cut
    low: jax.Array  # i32[]: positions low .. high - 1 are written
    high: jax.Array  # i32[]


def move(cache: Cache, moves: tuple[Move, ...], shift: Shift) -> Cache:
    """Moves keys and values as `moves` (one for each page group) say, keys at their new position by `shift`."""
    keys, values = dict(cache.keys), dict(cache.values)
    for group in cache.config.kv_groups:
        step = moves[group.page_group]
        for index, layer in enumerate(group.layers):
            row = jnp.int32(index)
            keys[group.key] = _move_layer(keys[group.key], row, step, layer, shift)
            values[group.key] = _move_layer(values[group.key], row, step, layer, None)
    return cache.replace(keys=keys, values=values)


def _move_layer(buffer: jax.Array, row: jax.Array, step: Move, layer: int, shift: Shift | None) -> jax.Array:
    page_size = buffer.shape[3]
    positions = jnp.arange(step.old_pages.shape[0] * page_size, dtype=jnp.int32)
    moved = positions >= step.begin
    source = jnp.where(moved, positions + step.distance, positions)
    written = (positions >= step.low) & (positions < step.high)
    source_page = look_up(step.old_pages, jnp.where(written, source // page_size, jnp.int32(NONE)), NONE)
    tokens = buffer[:, row, jnp.maximum(source_page, 0), source % page_size].swapaxes(0, 1)  # [M * page_size, H, D]
    if shift is not None:
        turned = shift(tokens, -step.distance, layer)
        chex.assert_equal_shape([turned, tokens], custom_message="shift must keep the shape of the keys")
        chex.assert_type([turned], tokens.dtype)
        tokens = jnp.where(moved[:, None, None], turned, tokens)
    pages = jnp.where(written, jnp.repeat(step.new_pages, page_size), jnp.int32(-1))
    return payload.write_tokens(buffer, row, pages, positions % page_size, tokens)


def _check(value: jax.Array, shape: tuple, dtype: str, what: str, layer: int | jax.Array) -> None:
    message = f"{what} of layer {layer} must be {dtype}{list(shape)}"
    chex.assert_shape(value, shape, custom_message=message)
    if value.dtype != jnp.dtype(dtype):
        raise AssertionError(f"{message}, got {value.dtype}{list(value.shape)}: cast it to the config's dtype")


def _group_of(cache: Cache | Run, layer: int | jax.Array, like: int | None) -> tuple[KVGroup, payload.Row]:
    config = cache.config
    having = [index for index, other in enumerate(config.layers) if other.attention]
    kinds = {config.layers[index].attention for index in having}
    example = payload.example_layer("attention", having, kinds, layer, like, len(config.layers))
    group = next(group for group in config.kv_groups if example in group.layers)
    return group, payload.row_of_layer(group.layers, layer)
