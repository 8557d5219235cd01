"""What the payloads of both pools share: finding a layer's row, and writing rows of large arrays in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rcache.arguments import as_int32
from rcache.cache import Cache
from rcache.forward import Forward
from rcache.indexing import look_up, store


def check_same_config(cache: Cache, forward: Forward) -> None:
    """Refuses a plan made for a cache of another config."""
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
