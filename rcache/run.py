"""A run: several tokens of each row, planned at once, that come one at a time.

Decoding knows how many tokens it wants, but not which. A run plans them as one pass, takes the states, keys and values
of its rows out of the pools, and lets the layers work on those, token by token; at the end what was run goes back. So
planning and moving are paid once for all tokens, and a step costs what it costs without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rcache import pages as paging, payload, pool as pools, table as tables
from rcache.arguments import as_int32
from rcache.batch import Batch, Rows
from rcache.cache import Cache
from rcache.config import Config
from rcache.forward import Forward, check_pass, grow, plan_pass
from rcache.indexing import NONE
from rcache.pages import PagePlan
from rcache.payload import Layers, Row
from rcache.table import Table


class Run(struct.PyTreeNode):
    """A cache at work on `B` rows of up to `T` tokens. Layers use it as they use a `Cache`, with the plan of a token.

    Immutable, like the cache: to abandon a run, go on from the cache it was started from.
    """

    cache: Cache  # slots and pages are taken, shared pages copied; lengths and checkpoints are those before the run
    plan: Forward  # of all its tokens
    came: jax.Array  # i32[B]: how many of them layers have written so far
    states: dict[str, Layers]  # [B, *shape] of each layer of a state group
    keys: dict[str, Layers]  # [B, H, X, D] of each layer of an attention group: what its queries may see
    values: dict[str, Layers]  # [B, H, X, Dv]

    @property
    def config(self) -> Config:
        return self.cache.config


CacheT = TypeVar("CacheT", bound="Cache | Run")


def written(cache: CacheT, forward: Forward, **buffers: Mapping[str, Layers]) -> CacheT:
    """`cache` with what a layer has written. In a run, the token of `forward` has come with that."""
    came = {"came": forward.starts + forward.lengths - cache.plan.starts} if isinstance(cache, Run) else {}
    return cast(CacheT, cache.replace(**buffers, **came))


def start_run(
    cache: Cache, batch: Batch, *, context: int | None = None, stacked: bool = False
) -> tuple[Run, jax.Array]:
    """Plans the next tokens of the sequences of `batch`, which come one at a time.

    It takes slots and pages for all of them, so that checkpoints may give way for tokens that never come. It holds a
    copy of the states of its rows and of the keys and values in `context`.

    Args:
      cache: the cache.
      batch: which sequences, and at most how many tokens of each. No captures; every token is causal.
      context: as in `start_forward`.
      stacked: the layers of a group are one array, where a traced layer can be found (a scan over equal layers). Left
        out, each is an array of its own: far faster for layers that are written out, in particular on CPU.

    Returns:
      The run, and a status i32[] as of `start_forward`. If it is not OK, no row of the run is active, and
      `finish_run` returns the cache that was given.

    Raises:
      ValueError: as `start_forward`, or the batch asks for captures.
    """
    if batch.captures.ndim == 2 and batch.captures.shape[1]:
        raise ValueError("a run takes no captures inside it: finish it there, or use start_forward")
    config = cache.config
    context = check_pass(batch, config, context)
    table, plan, status = _plan_run(cache.table, batch, config, context)
    of_layers = _stacked if stacked else _separate
    states: dict[str, Layers] = {}
    for group in config.state_groups:
        read = partial(payload.read_rows, cache.states[group.key], slots=plan.read_slots)
        states[group.key] = of_layers(len(group.layers), read)
    keys: dict[str, Layers] = {}
    values: dict[str, Layers] = {}
    pooled_keys, pooled_values = dict(cache.keys), dict(cache.values)
    before = plan.replace(lengths=jnp.zeros_like(plan.lengths))
    for kv_group in config.kv_groups:
        pages = plan.pages[kv_group.page_group]
        _, kept = payload.context(before, pages)
        for taken, pool in ((keys, pooled_keys), (values, pooled_values)):
            pool[kv_group.key] = _into_layers(pool[kv_group.key], partial(_copy_pages, pages=pages), axis=1)
            read = partial(payload.read_pages, pool[kv_group.key], plan=pages, kept=kept)
            taken[kv_group.key] = of_layers(len(kv_group.layers), read)
    cache = cache.replace(table=table, keys=pooled_keys, values=pooled_values)
    return Run(cache, plan, jnp.zeros_like(plan.starts), states, keys, values), status


def run_token(run: Run, index: int | jax.Array, active: jax.Array | None = None) -> Forward:
    """The plan of one token of a run, for its layers: a pass of `B` rows of one token.

    A row has the token if it has had all tokens before it: one that leaves a token out has ended.

    Args:
      run: the run, with what the layers have written of the tokens before.
      index: i32[] which of its `T` tokens: 0, 1, ... in order.
      active: bool[B] rows that have this token; None: all that the batch gave as many.
    """
    plan, index = run.plan, as_int32("index", index, ndim=0)
    has = (index < plan.lengths) & (index == run.came)
    if active is not None:
        active = jnp.asarray(active)
        if active.shape != has.shape or active.dtype != jnp.bool_:
            raise AssertionError(f"active must be bool{list(has.shape)}, got {active.dtype}{list(active.shape)}")
        has &= active
    starts = plan.starts + run.came
    nothing = jnp.zeros((has.shape[0], 0), jnp.int32)
    none = jnp.full(has.shape, NONE, jnp.int32)
    return Forward(
        sequences=jnp.where(has, plan.sequences, jnp.int32(NONE)),
        starts=starts,
        lengths=has.astype(jnp.int32),
        positions=jnp.where(has, starts, 0)[:, None],
        token_mask=has[:, None],
        read_slots=plan.read_slots,
        write_slots=plan.write_slots,
        capture_offsets=nothing,
        capture_slots=nothing,
        bidirectional=none[:, None],
        pages=tuple(
            pages.replace(
                token_pages=lax.dynamic_slice_in_dim(pages.token_pages, index, 1, axis=1), copy_from=none, copy_to=none
            )
            for pages in plan.pages
        ),
        config=plan.config,
        in_run=True,
    )


def finish_run(run: Run) -> Cache:
    """The cache with the tokens of a run that came, as if they had come in one pass.

    Those are the tokens whose plan a row had and whose states, keys and values the layers wrote. Checkpoints are
    captured as at the end of a pass. What was taken for tokens that did not come is given back. A row to which none
    came keeps its value, though perhaps in a slot of its own.
    """
    config, plan, lengths = run.config, run.plan, run.came
    table, write_slots = _finish_run(run.cache.table, plan, lengths, config)
    states = {
        key: _from_layers(buffer, run.states[key], partial(payload.write_rows, slots=write_slots))
        for key, buffer in run.cache.states.items()
    }
    came = jnp.arange(plan.positions.shape[1], dtype=jnp.int32) < lengths[:, None]
    keys, values = dict(run.cache.keys), dict(run.cache.values)
    for group in config.kv_groups:
        pages = plan.pages[group.page_group]
        pages = pages.replace(token_pages=jnp.where(came, pages.token_pages, jnp.int32(NONE)))
        write = partial(_write_tokens, pages=pages, positions=plan.positions)
        for pool, held in ((keys, run.keys), (values, run.values)):
            pool[group.key] = _from_layers(pool[group.key], held[group.key], write, axis=1)
    return run.cache.replace(table=table, states=states, keys=keys, values=values)


def _write_tokens(buffer: jax.Array, row: Row, values: jax.Array, pages: PagePlan, positions: jax.Array) -> jax.Array:
    """The tokens at `positions` i32[B, T] out of `values` [B, H, X, D] to their pages."""
    columns = jnp.maximum(positions - pages.context_start[:, None], 0)
    tokens = jnp.take_along_axis(values, columns[:, None, :, None], axis=2)
    return payload.write_pages(buffer, row, pages, positions, tokens.swapaxes(1, 2))


def _copy_pages(row: jax.Array, buffer: jax.Array, pages: PagePlan) -> jax.Array:
    return payload.copy_pages(buffer, row, pages)


def _into_layers(buffer: jax.Array, write: Callable[..., jax.Array], axis: int = 0) -> jax.Array:
    """`write(row, buffer)` for the row of every layer of a group, in place."""
    return lax.fori_loop(0, buffer.shape[axis], write, buffer)


@partial(jax.jit, static_argnames=("config", "context"))
def _plan_run(table: Table, batch: Batch, config: Config, context: int) -> tuple[Table, Forward, jax.Array]:
    table, rows, record, plan, status = plan_pass(table, batch, config, context)
    return tables.write(table, rows.index, record), plan, status


@partial(jax.jit, static_argnames="config")
def _finish_run(table: Table, plan: Forward, lengths: jax.Array, config: Config) -> tuple[Table, jax.Array]:
    """The table after `lengths` i32[B] tokens of each row, and the slots its states are written to: i32[B]."""
    ends = plan.starts + lengths
    page_tables = tuple(
        paging.give_back(page_table, plan.sequences, ends, plan.starts + plan.lengths, config.page_size)
        for page_table in table.page_tables
    )
    # A new sequence to which no token came is empty, and holds no slot.
    is_empty = (plan.sequences >= 0) & (ends == 0)
    write_slots = jnp.where(is_empty, jnp.int32(NONE), plan.write_slots)
    slot_pool = pools.release(table.slot_pool, jnp.where(is_empty, plan.write_slots, jnp.int32(NONE)))
    record = tables.read(table, plan.sequences).replace(slot=write_slots)
    table = tables.write(table, jnp.where(is_empty, plan.sequences, jnp.int32(NONE)), record)
    table = table.replace(page_tables=page_tables, slot_pool=slot_pool)
    came = lengths > 0
    rows = Rows(
        active=came,
        index=jnp.where(came, plan.sequences, jnp.int32(NONE)),
        starts=plan.starts,
        lengths=lengths,
        token_mask=jnp.arange(plan.positions.shape[1], dtype=jnp.int32) < lengths[:, None],
        captures=jnp.zeros((came.shape[0], 0), jnp.int32),
    )
    table, _ = grow(table, rows, record, write_slots, config)
    return table, write_slots


def _separate(num_layers: int, read: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
    """`read(row)` of every layer of a group."""
    return tuple(read(row=row) for row in range(num_layers))


def _stacked(num_layers: int, read: Callable[..., jax.Array]) -> jax.Array:
    """`read(row)` of every layer of a group: [L, ...]."""
    return lax.map(lambda row: read(row=row), jnp.arange(num_layers, dtype=jnp.int32))


def _from_layers(buffer: jax.Array, held: Layers, write: Callable[..., jax.Array], axis: int = 0) -> jax.Array:
    """`write(buffer, row, values=...)` with what a run holds for every layer of a group."""
    if isinstance(held, tuple):
        for row, values in enumerate(held):
            buffer = write(buffer, row, values=values)
        return buffer

    def write_layer(row: jax.Array, buffer: jax.Array) -> jax.Array:
        return write(buffer, row, values=payload.layer_at(held, row))

    return _into_layers(buffer, write_layer, axis)
