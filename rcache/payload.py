"""What the payloads of both pools share: finding a layer's row, and writing rows of large arrays in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rcache.arguments import as_int32
from rcache.cache import Cache
from rcache.forward import Forward
from rcache.indexing import NONE, look_up, store
from rcache.pages import PagePlan


def check_plan(cache: Any, forward: Forward) -> None:
    """Refuses a plan made for a cache of another config, or a run's for a cache and the other way round."""
    if isinstance(cache, Cache) == forward.in_run:
        raise ValueError("a run goes with the plans of run_token, a cache with those of start_forward")
    if forward.in_run and forward.lengths.shape != cache.plan.lengths.shape:
        raise ValueError("this plan of a token belongs to another run, of other rows: call run_token on this run")
    if forward.config != cache.config:
        raise ValueError("this Forward was planned for a cache of another config: call start_forward on this cache")


def example_layer(
    what: str, having: Sequence[int], kinds: set, layer: int | jax.Array, like: int | None, num_layers: int
) -> int:
    """A static layer index that has what `layer` has: `layer` itself, or `like` where it is traced."""
    if not isinstance(layer, jax.core.Tracer):
        layer = int(as_int32("layer", layer, ndim=0))
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer must be in 0 .. {num_layers - 1}, got {layer}")
        if layer not in having:
            raise ValueError(f"layer {layer} has no {what}: layers {list(having)} do")
        return layer
    if like is None and len(kinds) == 1:
        return having[0]
    if like not in having:
        raise ValueError(f"layer is traced and layers differ: give like=, one layer with {what} it may be, got {like}")
    assert like is not None
    return like


Row = int | jax.Array
"""Where a layer stands in its group's payload: static for a static layer, i32[] for a traced one."""

Layers = jax.Array | tuple[jax.Array, ...]
"""What a run holds for the `L` layers of a group: `L` arrays, or one with a leading axis for traced layers."""


def row_of_layer(layers: tuple[int, ...], layer: int | jax.Array) -> Row:
    """Where `layer` stands in its group's payload."""
    if isinstance(layer, jax.core.Tracer):
        return jnp.searchsorted(jnp.asarray(np.array(layers, np.int32)), layer.astype(jnp.int32)).astype(jnp.int32)
    return layers.index(int(layer))


def layer_at(held: Layers, row: Row) -> jax.Array:
    """A layer of what a run holds."""
    if not isinstance(held, tuple):
        return lax.dynamic_index_in_dim(held, row, keepdims=False)
    _check_is_static(row)
    return held[row]


def with_layer(held: Layers, row: Row, new: jax.Array) -> Layers:
    """What a run holds with `new` for a layer."""
    if not isinstance(held, tuple):
        return lax.dynamic_update_index_in_dim(held, new, row, 0)
    _check_is_static(row)
    return (*held[:row], new, *held[row + 1 :])


def _check_is_static(row: Row) -> None:
    if isinstance(row, jax.core.Tracer):
        raise ValueError("layer is traced: start_run(..., stacked=True) keeps layers where a traced one can be found")


def read_rows(buffer: jax.Array, row: Row, slots: jax.Array) -> jax.Array:
    """`buffer` [L, S, ...] at `[row, slots]`: [n, ...]. NONE reads zeros: selected, never multiplied."""

    def gather(buffer: jax.Array, row: jax.Array, slots: jax.Array) -> jax.Array:
        return look_up(buffer, (row, slots), 0)

    def one_slice(buffer: jax.Array, row: jax.Array, slots: jax.Array) -> jax.Array:
        shape = (1, 1, *buffer.shape[2:])

        def read(_: jax.Array, __: jax.Array) -> jax.Array:
            return lax.dynamic_slice(buffer, (row, slots[0], *(jnp.int32(0),) * (buffer.ndim - 2)), shape)[0]

        return lax.fori_loop(0, (slots[0] >= 0).astype(jnp.int32), read, jnp.zeros(shape[1:], buffer.dtype))

    if slots.shape[0] == 1:
        # A gather of one row is a slice to XLA on CPU, which it puts together with whatever uses the value later; then
        # the write in between must not disturb it, and the whole buffer is copied. It cannot see through a loop.
        return lax.platform_dependent(buffer, jnp.int32(row), slots, cpu=one_slice, default=gather)
    return gather(buffer, jnp.int32(row), slots)


def write_rows(buffer: jax.Array, row: Row, slots: jax.Array, values: jax.Array) -> jax.Array:
    """`buffer` [L, S, ...] with `values` [n, ...] at `[row, slots]`; NONE writes nowhere. Slots do not repeat."""
    return store(buffer, (jnp.int32(row), slots), values)


def replace_rows(rows: jax.Array, active: jax.Array, values: jax.Array) -> jax.Array:
    """`rows` [B, ...] with `values` [B, ...] where `active` bool[B]."""
    return jnp.where(active.reshape(-1, *(1,) * (values.ndim - 1)), values, rows)


def append_token(held: Layers, row: Row, columns: jax.Array, active: jax.Array, values: jax.Array) -> Layers:
    """What a run holds, `[B, H, X, D]` a layer, with `values` [B, H, D] at `[b, :, columns[b]]` if `active` bool[B]."""
    rows = jnp.where(active, jnp.arange(values.shape[0], dtype=jnp.int32), jnp.int32(NONE))
    if isinstance(held, tuple):
        return with_layer(held, row, store(layer_at(held, row), (rows, slice(None), columns), values))
    return store(held, (jnp.int32(row), rows, slice(None), columns), values)


def write_tokens(buffer: jax.Array, row: Row, pages: jax.Array, offsets: jax.Array, values: jax.Array) -> jax.Array:
    """`buffer` [H, L, P, page_size, D] with `values` [n, H, D] at `[:, row, pages, offsets]`; NONE writes nowhere."""
    return store(buffer, (slice(None), jnp.int32(row), pages, offsets), values.swapaxes(0, 1))


def context(forward: Forward, plan: PagePlan) -> tuple[jax.Array, jax.Array]:
    """Position of each context token i32[B, X], and whether it is kept bool[B, X]."""
    page_size = forward.config.page_size
    positions = plan.context_start[:, None] + jnp.arange(plan.context_pages.shape[1] * page_size, dtype=jnp.int32)
    ends = (forward.starts + forward.lengths)[:, None]
    there = jnp.repeat(plan.context_pages >= 0, page_size, axis=1)
    return positions, there & (positions >= plan.first[:, None]) & (positions < ends)


def read_pages(buffer: jax.Array, row: Row, plan: PagePlan, kept: jax.Array) -> jax.Array:
    """The context `[B, H, X, D]` out of `buffer` [H, L, P, page_size, D]; zero where not `kept` bool[B, X]."""
    read = jax.vmap(lambda pages: buffer[:, jnp.int32(row), pages])  # rows outside of heads, in the gather itself
    pages = read(jnp.maximum(plan.context_pages, 0))  # [B, H, X / page_size, page_size, D]
    tokens = pages.reshape(*pages.shape[:2], -1, pages.shape[-1])
    return jnp.where(kept[:, None, :, None], tokens, jnp.zeros((), buffer.dtype))


def copy_pages(buffer: jax.Array, row: Row, plan: PagePlan) -> jax.Array:
    """Copies the partial pages that rows share with others and are about to write to."""
    num_heads, _, _, page_size, size = buffer.shape

    def copy(b: jax.Array, buffer: jax.Array) -> jax.Array:
        to = jnp.maximum(plan.copy_to[b], 0)
        source = jnp.where(plan.copy_to[b] >= 0, plan.copy_from[b], to)
        zero, layer = jnp.int32(0), jnp.int32(row)
        page = lax.dynamic_slice(buffer, (zero, layer, source, zero, zero), (num_heads, 1, 1, page_size, size))
        return lax.dynamic_update_slice(buffer, page, (zero, layer, to, zero, zero))

    def copy_all(buffer: jax.Array) -> jax.Array:
        return lax.fori_loop(0, plan.copy_to.shape[0], copy, buffer)

    return lax.cond(jnp.any(plan.copy_to >= 0), copy_all, lambda buffer: buffer, buffer)


def write_pages(buffer: jax.Array, row: Row, plan: PagePlan, positions: jax.Array, new: jax.Array) -> jax.Array:
    """`buffer` [H, L, P, page_size, D] with the tokens `new` [B, T, H, D] at `positions` i32[B, T], as planned."""
    offsets = positions % buffer.shape[3]
    return write_tokens(buffer, row, plan.token_pages.reshape(-1), offsets.reshape(-1), new.reshape(-1, *new.shape[2:]))
