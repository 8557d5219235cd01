"""The whole bookkeeping of a cache as one small pytree, and what one sequence is worth in it.

`prefix` reads a sequence, cut to a length, as a value; `assign` makes a sequence that value. Forking, restoring and
removing are these two, and no payload takes part.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from rcache import checkpoints as ckpt, pages as paging, pool as pools
from rcache.checkpoints import Checkpoints
from rcache.config import Config
from rcache.indexing import NONE, look_up, store
from rcache.pages import PageTable
from rcache.pool import Pool


class Counters(struct.PyTreeNode):
    """What happened to checkpoints since `init`."""

    captures: jax.Array  # i32[]: taken
    captures_skipped: jax.Array  # i32[]: wanted inside a pass, but no slot was free
    evictions: jax.Array  # i32[]: given up so that a pass finds a slot or a page


class Table(struct.PyTreeNode):
    """Everything but the payload."""

    lengths: jax.Array  # i32[N]: tokens of each sequence
    slots: jax.Array  # i32[N]: its state slot, NONE if it is empty or no layer has states
    approximate: jax.Array  # bool[N]: tokens were cut out of its middle
    slot_pool: Pool  # of S slots
    checkpoints: Checkpoints  # of N sequences
    page_tables: tuple[PageTable, ...]  # one for each page group
    counters: Counters


class SequenceValue(struct.PyTreeNode):
    """All that one sequence holds: ids of slots and pages, and what they mean."""

    length: jax.Array  # i32[]
    slot: jax.Array  # i32[]
    approximate: jax.Array  # bool[]
    checkpoints: Checkpoints  # of one sequence
    pages: tuple[jax.Array, ...]  # i32[M] for each page group
    first: tuple[jax.Array, ...]  # i32[] for each page group


def init(config: Config) -> Table:
    """N empty sequences."""
    n = config.max_sequences
    return Table(
        lengths=jnp.zeros(n, jnp.int32),
        slots=jnp.full(n, NONE, jnp.int32),
        approximate=jnp.zeros(n, bool),
        slot_pool=pools.init(config.capacity.slots),
        checkpoints=ckpt.empty((n,), config.num_checkpoints, window_widths(config)),
        page_tables=tuple(paging.init(config, pages) for pages in config.capacity.pages),
        counters=Counters(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)),
    )


def window_widths(config: Config) -> tuple[int, ...]:
    """Pages of the window before a checkpoint (`W`), for each page group."""
    return tuple(group.checkpoint_pages for group in config.page_groups)


def is_sequence(config: Config, sequence: jax.Array) -> jax.Array:
    """bool[...]: whether `sequence` is an id of this cache."""
    return (sequence >= 0) & (sequence < config.max_sequences)


def row(table: Table, sequence: jax.Array) -> SequenceValue:
    """What `sequence` i32[] holds. Nothing, for an id that is none."""

    def pick(values: jax.Array, none: int | bool) -> jax.Array:
        return look_up(values, sequence, none)

    return SequenceValue(
        length=pick(table.lengths, 0),
        slot=pick(table.slots, NONE),
        approximate=pick(table.approximate, False),
        checkpoints=Checkpoints(
            positions=pick(table.checkpoints.positions, NONE),
            slots=pick(table.checkpoints.slots, NONE),
            flags=pick(table.checkpoints.flags, 0),
            pages=tuple(pick(pages, NONE) for pages in table.checkpoints.pages),
        ),
        pages=tuple(pick(t.pages, NONE) for t in table.page_tables),
        first=tuple(pick(t.first, 0) for t in table.page_tables),
    )


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
        checkpoints = ckpt.select((checkpoints.positions >= 0) & (checkpoints.positions < length), checkpoints)
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
    """Makes `sequence` i32[] the `value`, where `ok` bool[]: holds what is new, then lets go of what was there."""
    old = row(table, sequence)
    return write_row(release(share(table, value, ok), old, ok), sequence, value, ok)


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
    put = lambda values, new: store(values, index, new)  # noqa: E731
    return table.replace(
        lengths=put(table.lengths, value.length),
        slots=put(table.slots, value.slot),
        approximate=put(table.approximate, value.approximate),
        checkpoints=jax.tree.map(put, table.checkpoints, value.checkpoints),
        page_tables=tuple(
            t.replace(pages=put(t.pages, value.pages[g]), first=put(t.first, value.first[g]))
            for g, t in enumerate(table.page_tables)
        ),
    )


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
