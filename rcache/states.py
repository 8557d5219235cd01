"""Payload of the slot pool: reading, writing and copying the states of one pass.

A pass reads each state from `Forward.read_slots` and writes it to `Forward.write_slots`. Sharing costs nothing then:
the state is read from one slot, changed as a whole, and written to another.
"""

from __future__ import annotations

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rcache import payload
from rcache.cache import Cache
from rcache.config import StateGroup
from rcache.forward import Forward
from rcache.indexing import NONE
from rcache.run import CacheT, Run, written


def read_state(
    cache: Cache | Run, forward: Forward, layer: int | jax.Array, *, like: int | None = None
) -> dict[str, jax.Array]:
    """The states of `layer` before this pass, by name: `[B, *shape]` each, zero for new sequences and padding.

    Args:
      cache: the cache, or a run.
      forward: the plan of this pass.
      layer: index into `config.layers`; may be traced (a scan over equal layers); then it is not checked.
      like: with a traced `layer`, one index it may take: says which layers it ranges over. Not needed where all layers
        with states have the same ones.

    Raises:
      ValueError: the layer has no states, or the plan belongs to a cache of another config.
    """
    payload.check_plan(cache, forward)
    states = {}
    for group, row in groups_of(cache, layer, like):
        if isinstance(cache, Run):
            states[group.name] = payload.layer_at(cache.states[group.key], row)
        else:
            states[group.name] = payload.read_rows(cache.states[group.key], row, forward.read_slots)
    return states


def update_state(
    cache: CacheT,
    forward: Forward,
    layer: int | jax.Array,
    states: Mapping[str, jax.Array],
    *,
    captured: Mapping[str, jax.Array] | None = None,
    like: int | None = None,
) -> CacheT:
    """Writes the states of `layer` after this pass.

    A pass must update every state of every layer, or call `ensure_writable` first.

    Args:
      cache: the cache.
      forward: the plan of this pass.
      layer: index into `config.layers`; may be traced.
      states: by name, `[B, *shape]` in the config's dtype; what a row of padding holds does not matter.
      captured: by name, `[B, C, *shape]`: the states after `forward.capture_offsets` tokens of this pass, wanted
        exactly when the batch asked for captures (`C > 0`). Values at offsets of -1 do not matter.
      like: as in `read_state`.

    Raises:
      ValueError: a name the layer does not have, or captures missing or unasked for.
      AssertionError: a shape or dtype other than the config's.
    """
    payload.check_plan(cache, forward)
    num_rows, num_captures = forward.capture_slots.shape
    if (captured is not None) != (num_captures > 0):
        raise ValueError(
            f"captured must be given exactly where the batch has captures: this one has {num_captures} a row"
        )
    groups = groups_of(cache, layer, like)
    known = {group.name for group, _ in groups}
    for given in (states, captured or {}):
        if unknown := set(given) - known:
            raise ValueError(f"layer {layer} has states {sorted(known)}, not {sorted(unknown)}")
    if captured is not None and set(captured) != set(states):
        raise ValueError(f"captured has {sorted(captured)}, states has {sorted(states)}: they must be the same names")
    buffers: dict[str, payload.Layers] = dict(cache.states)
    for group, row in groups:
        if group.name not in states:
            continue
        new = states[group.name]
        _check(new, (num_rows, *group.state.shape), group, layer)
        if isinstance(cache, Run):
            held = cache.states[group.key]
            new = payload.replace_rows(payload.layer_at(held, row), forward.lengths > 0, new)
            buffers[group.key] = payload.with_layer(held, row, new)
            continue
        buffer = payload.write_rows(cache.states[group.key], row, forward.write_slots, new)
        if captured is not None:
            at_offsets = captured[group.name]
            _check(at_offsets, (num_rows, num_captures, *group.state.shape), group, layer)
            slots = forward.capture_slots.reshape(-1)
            buffer = payload.write_rows(buffer, row, slots, at_offsets.reshape(-1, *group.state.shape))
        buffers[group.key] = buffer
    return written(cache, forward, states=buffers)


def ensure_writable(cache: Cache, forward: Forward) -> tuple[Cache, Forward]:
    """Copies every state of the pass to the slot it will be written to, zero for new sequences, at once.

    For passes that update only some layers or some states: the others keep their value. Such a pass cannot be asked
    for captures at offsets inside it. Returns the cache and the plan that reads what was copied.

    Raises:
      ValueError: the plan belongs to a cache of another config.
    """
    payload.check_plan(cache, forward)
    moves = forward.read_slots != forward.write_slots
    write_slots = jnp.where(moves, forward.write_slots, jnp.int32(NONE))
    buffers = dict(cache.states)
    for group in cache.config.state_groups:

        def copy_layer(row: jax.Array, buffer: jax.Array) -> jax.Array:
            rows = payload.read_rows(buffer, row, forward.read_slots)
            return payload.write_rows(buffer, row, write_slots, rows)

        buffers[group.key] = lax.fori_loop(0, len(group.layers), copy_layer, buffers[group.key])
    return cache.replace(states=buffers), forward.replace(read_slots=forward.write_slots)


def _check(value: jax.Array, shape: tuple[int, ...], group: StateGroup, layer: int | jax.Array) -> None:
    what = f"state {group.name!r} of layer {layer} must be {group.state.dtype}{list(shape)}"
    chex.assert_shape(value, shape, custom_message=what)
    if value.dtype != jnp.dtype(group.state.dtype):
        raise AssertionError(f"{what}, got {value.dtype}{list(value.shape)}: cast it to the config's dtype")


def groups_of(cache: Cache | Run, layer: int | jax.Array, like: int | None) -> list[tuple[StateGroup, payload.Row]]:
    """The groups `layer` has states in, and its row in each."""
    config = cache.config
    having = [index for index, other in enumerate(config.layers) if other.states]
    example = payload.example_layer(
        "states", having, {config.layers[index].states for index in having}, layer, like, len(config.layers)
    )
    return [
        (group, payload.row_of_layer(group.layers, layer)) for group in config.state_groups if example in group.layers
    ]
