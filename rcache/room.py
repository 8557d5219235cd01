"""Room for a pass: pages behind the windows are released, and checkpoints give way to live sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from rcache import checkpoints as ckpt, pages as paging, pool as pools, table as tables
from rcache.batch import Rows
from rcache.config import Config
from rcache.table import Table


def trim(table: Table, sequences: jax.Array, config: Config) -> Table:
    """Releases what `sequences` i32[n] keep further back than their groups' memory."""
    if all(group.memory is None for group in config.page_groups):
        return table
    record = tables.read(table, sequences)
    trimmed = [
        paging.trim(page_table, group, sequences, first, record.length, config.page_size)
        for page_table, group, first in zip(table.page_tables, config.page_groups, record.first, strict=True)
    ]
    page_tables, firsts = zip(*trimmed, strict=True)
    return tables.write(table, sequences, record.replace(first=firsts)).replace(page_tables=page_tables)


def leaves_slot(table: Table, rows: Rows, slots: jax.Array) -> jax.Array:
    """Which rows need another slot than `slots` i32[B]: those of new sequences, those that share theirs: bool[B]."""
    return (rows.active & (slots < 0)) | pools.must_leave(table.slot_pool, slots)


def shortage(table: Table, rows: Rows, slots: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Whether too few slots, and too few pages of any group, are free for the rows: bool[], bool[]."""
    slots_short = jnp.zeros((), bool)
    if config.has_states:
        slots_short = jnp.sum(leaves_slot(table, rows, slots), dtype=jnp.int32) > table.slot_pool.num_free
    pages_short = jnp.zeros((), bool)
    for page_table in table.page_tables:
        pages_short |= paging.shortage(page_table, rows, config.page_size)
    return slots_short, pages_short


def make_room(table: Table, rows: Rows, slots: jax.Array, config: Config) -> tuple[Table, jax.Array, jax.Array]:
    """Trims the rows, where that is not enough the other sequences too, then gives up checkpoints until the rows fit.

    The rows hold `slots` i32[B]. Also returns whether slots, and whether pages, are short after all that: bool[],
    bool[]. Then only what `take_if` selects has changed.
    """
    table = trim(table, rows.index, config)
    slots_short, pages_short = shortage(table, rows, slots, config)
    if not (config.num_checkpoints or any(group.memory is not None for group in config.page_groups)):
        return table, slots_short, pages_short

    def relieve(given: Table) -> tuple[Table, jax.Array, jax.Array]:
        everyone = jnp.arange(config.max_sequences, dtype=jnp.int32)
        trimmed = lax.cond(pages_short, lambda: trim(given, everyone, config), lambda: given)
        state = (trimmed, *shortage(trimmed, rows, slots, config))
        if config.num_checkpoints:
            state = lax.while_loop(is_short_with_checkpoints, evict, state)
        relieved, slots_still, pages_still = state
        return lax.cond(slots_still | pages_still, lambda: given, lambda: relieved), slots_still, pages_still

    def is_short_with_checkpoints(state: tuple[Table, jax.Array, jax.Array]) -> jax.Array:
        return (state[1] | state[2]) & jnp.any(state[0].sequences.checkpoints.positions >= 0)

    def evict(state: tuple[Table, jax.Array, jax.Array]) -> tuple[Table, jax.Array, jax.Array]:
        evicted = _evict(state[0])
        return (evicted, *shortage(evicted, rows, slots, config))

    return lax.cond(slots_short | pages_short, relieve, lambda given: (given, slots_short, pages_short), table)


def _evict(table: Table) -> Table:
    """The sequence with the most checkpoints gives up its lowest one."""
    sequence = jnp.argmax(table.sequences.checkpoints.count).astype(jnp.int32)
    record = tables.read(table, sequence)
    kept = record.checkpoints
    rest = ckpt.select(jnp.arange(kept.positions.shape[0]) > 0, kept)
    evicted = table.replace(
        slot_pool=pools.release(table.slot_pool, kept.slots[:1], unique=True),
        page_tables=tuple(
            t.replace(pool=pools.release(t.pool, pages[0], unique=True))
            for t, pages in zip(table.page_tables, kept.pages, strict=True)
        ),
    )
    return tables.count(tables.write(evicted, sequence, record.replace(checkpoints=rest)), evictions=1)


def take_if(ok: jax.Array, new: Table, old: Table, config: Config) -> Table:
    """`new` where `ok` bool[], else `old`, of what `trim` has changed; all else is that of `new`."""
    if all(group.memory is None for group in config.page_groups):
        return new
    page_tables = tuple(
        jax.tree.map(lambda n, o: jnp.where(ok, n, o), n, o) if group.memory is not None else n
        for n, o, group in zip(new.page_tables, old.page_tables, config.page_groups, strict=True)
    )
    return new.replace(records=jnp.where(ok, new.records, old.records), page_tables=page_tables)
