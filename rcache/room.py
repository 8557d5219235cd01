"""Room for a pass: pages behind the windows are released, and checkpoints give way to live sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from rcache import checkpoints as ckpt, pages as paging, pool as pools
from rcache.batch import Rows
from rcache.config import Config
from rcache.indexing import NONE, look_up
from rcache.pages import PageTable
from rcache.table import Table


def trim(table: Table, sequences: jax.Array, config: Config) -> Table:
    """Releases what `sequences` i32[n] keep further back than their groups' memory."""
    lengths = look_up(table.lengths, sequences, 0)
    return table.replace(
        page_tables=tuple(
            paging.trim(page_table, group, sequences, lengths, config.page_size)
            for page_table, group in zip(table.page_tables, config.page_groups, strict=True)
        )
    )


def leaves_slot(table: Table, rows: Rows) -> jax.Array:
    """Which rows need a slot: those of new sequences, and those that share theirs: bool[B]."""
    held = look_up(table.slots, rows.index, NONE)
    return (rows.active & (held < 0)) | pools.must_leave(table.slot_pool, held)


def shortage(table: Table, rows: Rows, config: Config) -> tuple[jax.Array, jax.Array]:
    """Whether too few slots, and too few pages of any group, are free for the rows: bool[], bool[]."""
    slots_short = jnp.zeros((), bool)
    if config.has_states:
        slots_short = jnp.sum(leaves_slot(table, rows), dtype=jnp.int32) > table.slot_pool.num_free
    pages_short = jnp.zeros((), bool)
    for page_table in table.page_tables:
        pages_short |= paging.shortage(page_table, rows, config.page_size)
    return slots_short, pages_short


def make_room(table: Table, rows: Rows, config: Config) -> tuple[Table, jax.Array, jax.Array]:
    """Trims the rows, where that is not enough the other sequences too, then gives up checkpoints until the rows fit.

    Also returns whether slots, and whether pages, are short after all that: bool[], bool[]. Then only what `take_if`
    selects has changed.
    """
    table = trim(table, rows.index, config)
    slots_short, pages_short = shortage(table, rows, config)
    if not (config.num_checkpoints or any(group.memory is not None for group in config.page_groups)):
        return table, slots_short, pages_short

    def relieve(given: Table) -> tuple[Table, jax.Array, jax.Array]:
        everyone = jnp.arange(config.max_sequences, dtype=jnp.int32)
        trimmed = lax.cond(pages_short, lambda: trim(given, everyone, config), lambda: given)
        state = (trimmed, *shortage(trimmed, rows, config))
        if config.num_checkpoints:
            state = lax.while_loop(is_short_with_checkpoints, evict, state)
        relieved, slots_still, pages_still = state
        return lax.cond(slots_still | pages_still, lambda: given, lambda: relieved), slots_still, pages_still

    def is_short_with_checkpoints(state: tuple[Table, jax.Array, jax.Array]) -> jax.Array:
        return (state[1] | state[2]) & jnp.any(state[0].checkpoints.positions >= 0)

    def evict(state: tuple[Table, jax.Array, jax.Array]) -> tuple[Table, jax.Array, jax.Array]:
        evicted = _evict(state[0])
        return (evicted, *shortage(evicted, rows, config))

    return lax.cond(slots_short | pages_short, relieve, lambda given: (given, slots_short, pages_short), table)


def _evict(table: Table) -> Table:
    """The sequence with the most checkpoints gives up its lowest one."""
    kept = table.checkpoints
    sequence = jnp.argmax(kept.count)
    one = jax.tree.map(lambda values: values[sequence], kept)
    rest = ckpt.select(jnp.arange(kept.positions.shape[1]) > 0, one)
    return table.replace(
        slot_pool=pools.release(table.slot_pool, one.slots[:1], unique=True),
        checkpoints=jax.tree.map(lambda values, row: values.at[sequence].set(row), kept, rest),
        page_tables=tuple(
            t.replace(pool=pools.release(t.pool, pages[0], unique=True))
            for t, pages in zip(table.page_tables, one.pages, strict=True)
        ),
        counters=table.counters.replace(evictions=table.counters.evictions + 1),
    )


def take_if(ok: jax.Array, new: tuple[PageTable, ...], old: tuple[PageTable, ...], config: Config) -> tuple:
    """`new` where `ok` bool[], for the page groups that `trim` and `make_room` change; the others are the same."""
    return tuple(
        jax.tree.map(lambda n, o: jnp.where(ok, n, o), n, o) if group.memory is not None else o
        for n, o, group in zip(new, old, config.page_groups, strict=True)
    )
