"""The whole bookkeeping of a cache as one small pytree, and what one sequence is worth in it.

`prefix` reads a sequence, cut to a length, as a value; `assign` makes a sequence that value. Forking, restoring and
removing are these two, and no payload takes part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rcache import checkpoints as ckpt, pages as paging, pool as pools, records as recording
from rcache.config import Config
from rcache.indexing import NONE, look_up, store
from rcache.pages import PageTable
from rcache.pool import Pool
from rcache.records import Layout, Record


class Counters(struct.PyTreeNode):
    """What happened to checkpoints since `init`."""

    captures: jax.Array  # i32[]: taken
    captures_skipped: jax.Array  # i32[]: wanted inside a pass, but no slot was free
    evictions: jax.Array  # i32[]: given up so that a pass finds a slot or a page


class Table(struct.PyTreeNode):
    """Everything but the payload."""

    records: jax.Array  # i32[N, width]: a `Record` of each sequence
    slot_pool: Pool  # of S slots
    page_tables: tuple[PageTable, ...]  # one for each page group
    counts: jax.Array  # i32[3]: the fields of `Counters`
    layout: Layout = struct.field(pytree_node=False)

    @property
    def sequences(self) -> Record:
        """Of all sequences: leading axis N."""
        return recording.unpack(self.records, self.layout)

    @property
    def counters(self) -> Counters:
        return Counters(self.counts[0], self.counts[1], self.counts[2])


class SequenceValue(Record):
    """All that one sequence holds: ids of slots and pages, and what they mean."""

    pages: tuple[jax.Array, ...]  # i32[M] for each page group


def init(config: Config) -> Table:
    """N empty sequences."""
    layout = Layout(config.num_checkpoints, tuple(group.checkpoint_pages for group in config.page_groups))
    return Table(
        records=jnp.tile(recording.pack(recording.empty(layout)), (config.max_sequences, 1)),
        slot_pool=pools.init(config.capacity.slots),
        page_tables=tuple(paging.init(config, pages) for pages in config.capacity.pages),
        counts=jnp.zeros(3, jnp.int32),
        layout=layout,
    )


def read(table: Table, sequences: jax.Array) -> Record:
    """The records of `sequences` i32[...]; of an empty one, for ids that are none."""
    filler = recording.pack(recording.empty(table.layout))
    return recording.unpack(look_up(table.records, sequences, filler), table.layout)


def write(table: Table, sequences: jax.Array, record: Record) -> Table:
    """Makes `record` what the table says of `sequences` i32[...]; ids that are none are skipped."""
    return table.replace(records=store(table.records, sequences, recording.pack(record)))


def count(table: Table, *, captures: Any = 0, captures_skipped: Any = 0, evictions: Any = 0) -> Table:
    """Counts what happened: i32[] each."""
    happened = jnp.stack([jnp.int32(number) for number in (captures, captures_skipped, evictions)])
    return table.replace(counts=table.counts + happened)


def is_sequence(config: Config, sequence: jax.Array) -> jax.Array:
    """bool[...]: whether `sequence` is an id of this cache."""
    return (sequence >= 0) & (sequence < config.max_sequences)


def row(table: Table, sequence: jax.Array) -> SequenceValue:
    """What `sequence` i32[] holds. Nothing, for an id that is none."""
    pages = tuple(look_up(page_table.pages, sequence, NONE) for page_table in table.page_tables)
    return SequenceValue(**vars(read(table, sequence)), pages=pages)


def longest_resumable(config: Config, value: SequenceValue, target: jax.Array) -> jax.Array:
    """The longest prefix, at most `target` i32[] tokens, whose state is kept: its length i32[], 0 if there is none."""
    target = jnp.minimum(target, value.length)
    if config.has_states:
        ends = value.checkpoints.positions + 1  # 0 where there is none
        kept = jnp.max(jnp.where(ends <= target, ends, 0), initial=0)
        length = jnp.where(target == value.length, value.length, kept)
    else:
        length = target
        for group, first in zip(config.page_groups, value.first, strict=True):
            # If `target` is not resumable, no shorter prefix is: the window before it reaches even further back.
            length = jnp.where(paging.is_resumable(group, first, target), length, 0)
    return jnp.maximum(length, 0)


def prefix(config: Config, value: SequenceValue, length: jax.Array) -> SequenceValue:
    """`value` cut to `length` i32[], which must be resumable."""
    whole = length == value.length
    checkpoints = value.checkpoints
    window_pages: tuple[jax.Array, ...] = ()
    slot, approximate = value.slot, value.approximate
    if config.num_checkpoints:
        here = checkpoints.positions == length - 1
        index = jnp.argmax(here)
        found = here[index] & (length > 0)
        flags = checkpoints.flags[index]
        slot = jnp.where(whole, slot, jnp.where(found, checkpoints.slots[index], jnp.int32(NONE)))
        approximate = jnp.where(whole, approximate, found & (flags & ckpt.APPROXIMATE != 0))
        window_pages = tuple(pages[index] for pages in checkpoints.pages)
        checkpoints = ckpt.before(length, checkpoints)
    empty = length == 0
    rows, firsts = [], []
    logical = jnp.arange(config.pages_per_sequence, dtype=jnp.int32)
    for g, group in enumerate(config.page_groups):
        kept = logical < paging.num_pages(length, config.page_size)
        cut = jnp.where(kept, value.pages[g], jnp.int32(NONE))
        first = jnp.where(empty, jnp.int32(0), value.first[g])
        if group.memory is not None and config.num_checkpoints:
            # The sequence may have moved on and given up the pages behind it: the checkpoint has its own.
            from_checkpoint, its_first = paging.window_row(window_pages[g], length, group, config)
            cut = jnp.where(whole | empty, cut, from_checkpoint)
            first = jnp.where(whole | empty, first, its_first)
        rows.append(cut)
        firsts.append(first)
    return SequenceValue(
        length=length,
        slot=jnp.where(empty, jnp.int32(NONE), slot),
        approximate=approximate & ~empty,
        checkpoints=checkpoints,
        pages=tuple(rows),
        first=tuple(firsts),
    )


def assign(table: Table, sequence: jax.Array, value: SequenceValue, ok: jax.Array) -> Table:
    """Makes `sequence` i32[] the `value`, where `ok` bool[]: holds what is new and lets go of what was there."""
    new, old = _held(value, ok), _held(row(table, sequence), ok)
    slot_pool, _ = pools.exchange(table.slot_pool, old.slots, shared=new.slots)
    page_tables = []
    for page_table, taken, (rows, windows) in zip(table.page_tables, new.pages, old.pages, strict=True):
        shared = jnp.concatenate([ids.reshape(-1) for ids in taken])
        pool, _ = pools.exchange(page_table.pool, rows.reshape(-1), shared=shared, unique=True)
        page_tables.append(page_table.replace(pool=paging.release_rows(pool, windows)))
    table = table.replace(slot_pool=slot_pool, page_tables=tuple(page_tables))
    return write_row(table, sequence, value, ok)


def share(table: Table, value: SequenceValue, ok: jax.Array) -> Table:
    """One more holder for every slot and page of `value`, where `ok` bool[]."""
    held = _held(value, ok)
    page_tables = []
    for page_table, (rows, windows) in zip(table.page_tables, held.pages, strict=True):
        page_tables.append(page_table.replace(pool=pools.share(pools.share(page_table.pool, rows), windows)))
    return table.replace(slot_pool=pools.share(table.slot_pool, held.slots), page_tables=tuple(page_tables))


def release(table: Table, value: SequenceValue, ok: jax.Array) -> Table:
    """One holder less for every slot and page of `value`, where `ok` bool[]."""
    held = _held(value, ok)
    page_tables = []
    for page_table, (rows, windows) in zip(table.page_tables, held.pages, strict=True):
        pool = paging.release_rows(paging.release_rows(page_table.pool, rows), windows)
        page_tables.append(page_table.replace(pool=pool))
    return table.replace(slot_pool=pools.release(table.slot_pool, held.slots), page_tables=tuple(page_tables))


def write_row(table: Table, sequence: jax.Array, value: SequenceValue, ok: jax.Array) -> Table:
    """Writes the row of `sequence` i32[], where `ok` bool[], leaving reference counts alone."""
    index = jnp.where(ok, sequence, jnp.int32(NONE))
    page_tables = tuple(
        page_table.replace(pages=store(page_table.pages, index, pages))
        for page_table, pages in zip(table.page_tables, value.pages, strict=True)
    )
    return write(table, index, value).replace(page_tables=page_tables)


class _Held(struct.PyTreeNode):
    """Ids a sequence holds."""

    slots: jax.Array  # i32[1 + K]
    pages: tuple[tuple[jax.Array, jax.Array], ...]  # i32[1, M] and i32[K, W] for each page group


def _held(value: SequenceValue, ok: jax.Array) -> _Held:
    held = _Held(
        slots=jnp.concatenate([value.slot[None], value.checkpoints.slots]),
        pages=tuple((pages[None], window) for pages, window in zip(value.pages, value.checkpoints.pages, strict=True)),
    )
    return jax.tree.map(lambda ids: jnp.where(ok, ids, jnp.int32(NONE)), held)
