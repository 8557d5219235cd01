"""What the payloads of both pools share: finding a layer's row, and writing rows of large arrays in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def row_of_layer(layers: tuple[int, ...], layer: int | jax.Array) -> jax.Array:
    """Where `layer` stands in its group's payload: i32[]."""
    if isinstance(layer, jax.core.Tracer):
        return jnp.searchsorted(jnp.asarray(np.array(layers, np.int32)), layer.astype(jnp.int32)).astype(jnp.int32)
    return jnp.int32(layers.index(int(layer)))


def read_rows(buffer: jax.Array, row: jax.Array, slots: jax.Array) -> jax.Array:
    """`buffer` [L, S, ...] at `[row, slots]`: [n, ...]. NONE reads zeros: selected, never multiplied."""

    def gather(buffer: jax.Array, row: jax.Array, slots: jax.Array) -> jax.Array:
        return look_up(buffer, (row, slots), 0)

    def slices(buffer: jax.Array, row: jax.Array, slots: jax.Array) -> jax.Array:
        tail = (jnp.int32(0),) * (buffer.ndim - 2)

        def read(i: jax.Array, rows: jax.Array) -> jax.Array:
            value = lax.dynamic_slice(buffer, (row, jnp.maximum(slots[i], 0), *tail), (1, 1, *buffer.shape[2:]))
            value = jnp.where(slots[i] >= 0, value[0], jnp.zeros((), buffer.dtype))
            return lax.dynamic_update_slice(rows, value, (i, *tail))

        return lax.fori_loop(0, _num_turns(slots), read, jnp.zeros((slots.shape[0], *buffer.shape[2:]), buffer.dtype))

    if slots.shape[0] == 1:
        # A gather of one row is a slice to XLA on CPU, which it puts together with whatever uses the value later; then
        # the write in between must not disturb it, and the whole buffer is copied. It cannot see through a loop.
        return lax.platform_dependent(buffer, row, slots, cpu=slices, default=gather)
    return gather(buffer, row, slots)


def write_rows(buffer: jax.Array, row: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """`buffer` [L, S, ...] with `values` [n, ...] at `[row, slots]`; NONE writes nowhere. Slots do not repeat."""
    tail = (jnp.int32(0),) * (buffer.ndim - 2)

    def scatter(buffer: jax.Array, row: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
        return store(buffer, (row, slots), values)

    def slices(buffer: jax.Array, row: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
        values = values.reshape(-1, 1, 1, *buffer.shape[2:])
        return _write_slices(buffer, slots, values, lambda i: (row, jnp.maximum(slots[i], 0), *tail))

    if slots.shape[0] == 0:
        return buffer
    return lax.platform_dependent(buffer, row, slots, values, cpu=slices, default=scatter)


def replace_rows(rows: jax.Array, row: jax.Array, active: jax.Array, values: jax.Array) -> jax.Array:
    """`rows` [L, B, ...] with `values` [B, ...] in layer `row`, where `active` bool[B]."""
    old = lax.dynamic_index_in_dim(rows, row, keepdims=False)
    new = jnp.where(active.reshape(-1, *(1,) * (values.ndim - 1)), values, old)
    return lax.dynamic_update_index_in_dim(rows, new, row, 0)


def append_rows(rows: jax.Array, row: jax.Array, columns: jax.Array, active: jax.Array, values: jax.Array) -> jax.Array:
    """`rows` [L, B, X, ...] with `values` [B, ...] at `[row, b, columns[b]]`, where `active` bool[B]."""
    ids = jnp.where(active, jnp.arange(values.shape[0], dtype=jnp.int32), jnp.int32(NONE))
    tail = (jnp.int32(0),) * (rows.ndim - 3)

    def scatter(rows: jax.Array, row: jax.Array, ids: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
        return store(rows, (row, ids, columns), values)

    def slices(rows: jax.Array, row: jax.Array, ids: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
        return _write_slices(rows, ids, values[:, None, None, None], lambda i: (row, i, columns[i], *tail))

    return lax.platform_dependent(rows, row, ids, columns, values, cpu=slices, default=scatter)


def write_tokens(
    buffer: jax.Array, row: jax.Array, pages: jax.Array, offsets: jax.Array, values: jax.Array
) -> jax.Array:
    """`buffer` [H, L, P, page_size, D] with `values` [n, H, D] at `[:, row, pages, offsets]`; NONE writes nowhere."""
    zero = jnp.int32(0)

    def scatter(
        buffer: jax.Array, row: jax.Array, pages: jax.Array, offsets: jax.Array, values: jax.Array
    ) -> jax.Array:
        return store(buffer, (slice(None), row, pages, offsets), values.swapaxes(0, 1))

    def slices(buffer: jax.Array, row: jax.Array, pages: jax.Array, offsets: jax.Array, values: jax.Array) -> jax.Array:
        values = values[:, :, None, None, None, :]
        return _write_slices(buffer, pages, values, lambda i: (zero, row, jnp.maximum(pages[i], 0), offsets[i], zero))

    if pages.shape[0] == 0:
        return buffer
    return lax.platform_dependent(buffer, row, pages, offsets, values, cpu=slices, default=scatter)


def _write_slices(
    buffer: jax.Array, ids: jax.Array, values: jax.Array, start: Callable[[jax.Array], tuple[jax.Array, ...]]
) -> jax.Array:
    """Writes `values[i]` at `start(i)` where `ids[i]` is not NONE, one slice after another.

    On CPU this is in place and moves a slice at once, where a scatter works element by element.
    """

    def write(i: jax.Array, buffer: jax.Array) -> jax.Array:
        value = lax.dynamic_index_in_dim(values, i, keepdims=False)
        there = lax.dynamic_slice(buffer, start(i), value.shape)
        return lax.dynamic_update_slice(buffer, jnp.where(ids[i] >= 0, value, there), start(i))

    return lax.fori_loop(0, _num_turns(ids), write, buffer)


def _num_turns(ids: jax.Array) -> jax.Array:
    """Up to the last of `ids` that is not NONE: i32[].

    Unknown to the compiler on purpose: it would unroll a loop of one turn (see `read_rows`).
    """
    return jnp.max(jnp.where(ids >= 0, jnp.arange(1, ids.shape[0] + 1, dtype=jnp.int32), jnp.int32(0)))


def context(forward: Forward, plan: PagePlan) -> tuple[jax.Array, jax.Array]:
    """Position of each context token i32[B, X], and whether it is kept bool[B, X]."""
    page_size = forward.config.page_size
    positions = plan.context_start[:, None] + jnp.arange(plan.context_pages.shape[1] * page_size, dtype=jnp.int32)
    ends = (forward.starts + forward.lengths)[:, None]
    there = jnp.repeat(plan.context_pages >= 0, page_size, axis=1)
    return positions, there & (positions >= plan.first[:, None]) & (positions < ends)


def read_pages(buffer: jax.Array, row: jax.Array, plan: PagePlan, kept: jax.Array) -> jax.Array:
    """The context `[B, X, H, D]` out of `buffer` [H, L, P, page_size, D]; zero where not `kept` bool[B, X]."""
    num_heads, _, _, page_size, size = buffer.shape
    num_rows, num_pages = plan.context_pages.shape
    pages = buffer[:, row, jnp.maximum(plan.context_pages, 0)]  # [H, B, X / page_size, page_size, D]
    tokens = pages.reshape(num_heads, num_rows, num_pages * page_size, size).transpose(1, 2, 0, 3)
    return jnp.where(kept[:, :, None, None], tokens, jnp.zeros((), buffer.dtype))


def copy_pages(buffer: jax.Array, row: jax.Array, plan: PagePlan) -> jax.Array:
    """Copies the partial pages that rows share with others and are about to write to."""
    num_heads, _, _, page_size, size = buffer.shape

    def copy(b: jax.Array, buffer: jax.Array) -> jax.Array:
        to = jnp.maximum(plan.copy_to[b], 0)
        source = jnp.where(plan.copy_to[b] >= 0, plan.copy_from[b], to)
        zero = jnp.int32(0)
        page = lax.dynamic_slice(buffer, (zero, row, source, zero, zero), (num_heads, 1, 1, page_size, size))
        return lax.dynamic_update_slice(buffer, page, (zero, row, to, zero, zero))

    def copy_all(buffer: jax.Array) -> jax.Array:
        return lax.fori_loop(0, plan.copy_to.shape[0], copy, buffer)

    return lax.cond(jnp.any(plan.copy_to >= 0), copy_all, lambda buffer: buffer, buffer)


def write_pages(buffer: jax.Array, row: jax.Array, plan: PagePlan, positions: jax.Array, new: jax.Array) -> jax.Array:
    """`buffer` [H, L, P, page_size, D] with the tokens `new` [B, T, H, D] at `positions` i32[B, T], as planned."""
    offsets = positions % buffer.shape[3]
    return write_tokens(buffer, row, plan.token_pages.reshape(-1), offsets.reshape(-1), new.reshape(-1, *new.shape[2:]))
