"""Operations on sequences as values: fork, resume, roll back, remove. None moves payload, but a removal in the middle.

Standalone calls are compiled over the table alone; the payload is attached again to what they return. They cost the
same for a cache of a megabyte and one of a hundred gigabytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rcache import checkpoints as ckpt, kv, pages as paging, pool as pools, table as tables
from rcache.arguments import as_int32, scalars
from rcache.cache import Cache
from rcache.checkpoints import Checkpoints
from rcache.config import Config
from rcache.indexing import NONE
from rcache.shift import Shift
from rcache.status import Status, first_error
from rcache.table import SequenceValue, Table


def copy_prefix(cache: Cache, src: Any, dst: Any, length: Any) -> tuple[Cache, jax.Array, jax.Array]:
    """Makes `dst` the first `length` tokens of `src`, checkpoints and all; what `dst` held is released.

    If no state was kept at `length`, `dst` falls back to the longest prefix whose state was.

    Args:
      cache: the cache.
      src: i32[] sequence to copy.
      dst: i32[] sequence to become it; `src` itself to cut it.
      length: i32[] tokens, 0 .. length of `src`.

    Returns:
      The cache, the length `dst` got i32[], and a status i32[]: SEQUENCE_OUT_OF_RANGE, RANGE_INVALID or OK.
    """
    table, got, status = _copy_prefix(cache.table, *scalars(src=src, dst=dst, length=length), cache.config)
    return cache.replace(table=table), got, status


def prepare_restore(cache: Cache, sequence: Any, target: Any) -> jax.Array:
    """The longest prefix of `sequence` i32[], at most `target` i32[] tokens, that can be resumed: i32[] tokens, or 0.

    The whole sequence can; a shorter prefix can where its state was kept. Changes nothing.
    """
    return _prepare_restore(cache.table, *scalars(sequence=sequence, target=target), cache.config)


def can_resume(cache: Cache, sequence: Any, position: Any) -> jax.Array:
    """Whether some prefix of 1 .. `position` i32[] tokens of `sequence` i32[] can be resumed: bool[].

    Always true for position 0, always false past the end and for ids that are none.
    """
    return _can_resume(cache.table, *scalars(sequence=sequence, position=position), cache.config)


def remove(
    cache: Cache, sequence: Any, begin: Any = 0, end: Any = None, *, shift: Shift | None = None
) -> tuple[Cache, jax.Array]:
    """Removes the tokens `[begin, end)` of `sequence`; without `end`, all from `begin` on; without both, everything.

    The tail can be cut where the state at `begin` was kept. In the middle the later tokens move down, which is an
    *approximation*: the recurrent state still contains what was cut, and the later keys and values were computed in
    its presence. The sequence, and its checkpoints at or after the cut, are marked approximate. See `remove_exact`.

    Args:
      cache: the cache.
      sequence: i32[] sequence.
      begin: i32[] first position to go.
      end: i32[] position after the last to go; None: the length of the sequence. A value, even one past the end, makes
        this the operation that moves keys and values: its compiled form takes the payload.
      shift: how keys move to other positions (`RopeShift`, `no_shift`, or a function of the same form); needed with
        `end` where there are attention layers.

    Returns:
      The cache and a status i32[]: SEQUENCE_OUT_OF_RANGE, RANGE_INVALID, NOT_RESTORABLE, PAGES_FULL or OK.

    Raises:
      ValueError: `end` is given, there are attention layers, and `shift` is not given.
    """
    config = cache.config
    if end is None:
        table, status = _remove_tail(cache.table, *scalars(sequence=sequence, begin=begin), config)
        return cache.replace(table=table), status
    if shift is None:
        if config.kv_groups:
            raise ValueError("shift must say how keys move: RopeShift(...), no_shift, or a function of the same form")
        table, _, status = _remove_range(cache.table, *scalars(sequence=sequence, begin=begin, end=end), config)
        return cache.replace(table=table), status
    return _remove_and_move(cache, *scalars(sequence=sequence, begin=begin, end=end), shift)


def remove_exact(cache: Cache, sequence: Any, begin: Any, end: Any) -> tuple[Cache, jax.Array, jax.Array]:
    """Removes `[begin, end)` by cutting at `begin` and leaving the rest to be run again.

    Args:
      cache: the cache.
      sequence: i32[] sequence.
      begin: i32[] first position to go; the state there must have been kept.
      end: i32[] position after the last to go.

    Returns:
      The cache, the number of tokens i32[] after `end` that the caller runs again, and a status i32[]:
      SEQUENCE_OUT_OF_RANGE, RANGE_INVALID, NOT_RESTORABLE or OK.
    """
    table, num_rerun, status = _remove_exact(
        cache.table, *scalars(sequence=sequence, begin=begin, end=end), cache.config
    )
    return cache.replace(table=table), num_rerun, status


def reorder(cache: Cache, sources: jax.Array) -> tuple[Cache, jax.Array]:
    """All sequences at once: sequence `i` becomes what `sources[i]` was, -1: empty. For beam search.

    Args:
      cache: the cache.
      sources: i32[N].

    Returns:
      The cache and a status i32[]: SEQUENCE_OUT_OF_RANGE or OK.
    """
    table, status = _reorder(cache.table, as_int32("sources", sources, ndim=1), cache.config)
    return cache.replace(table=table), status


def reset(cache: Cache) -> Cache:
    """Empties every sequence and every counter; the payload stays where it is, and is never read."""
    return cache.replace(table=_reset(cache.config))


_on_table = partial(jax.jit, static_argnames="config")


@_on_table
def _reset(config: Config) -> Table:
    return tables.init(config)


@_on_table
def _prepare_restore(table: Table, sequence: jax.Array, target: jax.Array, config: Config) -> jax.Array:
    return tables.longest_resumable(config, tables.row(table, sequence), target)


@_on_table
def _can_resume(table: Table, sequence: jax.Array, position: jax.Array, config: Config) -> jax.Array:
    value = tables.row(table, sequence)
    some = tables.longest_resumable(config, value, position) >= 1
    return tables.is_sequence(config, sequence) & ((position == 0) | ((position <= value.length) & some))


@_on_table
def _copy_prefix(
    table: Table, src: jax.Array, dst: jax.Array, length: jax.Array, config: Config
) -> tuple[Table, jax.Array, jax.Array]:
    value = tables.row(table, src)
    status = first_error(
        (~tables.is_sequence(config, src) | ~tables.is_sequence(config, dst), Status.SEQUENCE_OUT_OF_RANGE),
        ((length < 0) | (length > value.length), Status.RANGE_INVALID),
    )
    ok = status == Status.OK
    got = jnp.where(ok, tables.longest_resumable(config, value, length), 0)
    return tables.assign(table, dst, tables.prefix(config, value, got), ok), got, status


@_on_table
def _remove_tail(table: Table, sequence: jax.Array, begin: jax.Array, config: Config) -> tuple[Table, jax.Array]:
    value = tables.row(table, sequence)
    length = jnp.minimum(begin, value.length)
    status = first_error(
        (~tables.is_sequence(config, sequence), Status.SEQUENCE_OUT_OF_RANGE),
        (begin < 0, Status.RANGE_INVALID),
        (tables.longest_resumable(config, value, length) != length, Status.NOT_RESTORABLE),
    )
    ok = status == Status.OK
    cut = tables.prefix(config, value, jnp.where(ok, length, 0))
    return tables.assign(table, sequence, cut, ok & (length < value.length)), status


@_on_table
def _remove_exact(
    table: Table, sequence: jax.Array, begin: jax.Array, end: jax.Array, config: Config
) -> tuple[Table, jax.Array, jax.Array]:
    length = tables.row(table, sequence).length
    nothing = begin == end
    removed, status = _remove_tail(table, sequence, jnp.where(nothing & (begin >= 0), length, begin), config)
    known = tables.is_sequence(config, sequence)
    status = jnp.where(known & ((begin < 0) | (end < begin)), jnp.int32(Status.RANGE_INVALID), status)
    ok = status == Status.OK
    table = jax.tree.map(lambda new, old: jnp.where(ok, new, old), removed, table)
    return table, jnp.where(ok & ~nothing, jnp.maximum(length - end, 0), 0), status


@_on_table
def _reorder(table: Table, sources: jax.Array, config: Config) -> tuple[Table, jax.Array]:
    if sources.shape != (config.max_sequences,):
        raise ValueError(f"sources must be i32[{config.max_sequences}], got {sources.shape}")
    empty = sources == -1
    status = first_error((jnp.any(~empty & ~tables.is_sequence(config, sources)), Status.SEQUENCE_OUT_OF_RANGE))
    ok = status == Status.OK
    old = jax.vmap(lambda source: tables.row(table, source))(jnp.arange(config.max_sequences, dtype=jnp.int32))
    new = jax.vmap(lambda source: tables.row(table, source))(sources)

    def write(sequence: jax.Array, reordered: Table) -> Table:
        return tables.assign(reordered, sequence, jax.tree.map(lambda leaf: leaf[sequence], new), ok)

    # Every row is held once more while rows are rewritten, so that nothing is let go too early.
    def hold(sequence: jax.Array, table: Table) -> Table:
        return tables.share(table, jax.tree.map(lambda leaf: leaf[sequence], old), ok)

    def let_go(sequence: jax.Array, table: Table) -> Table:
        return tables.release(table, jax.tree.map(lambda leaf: leaf[sequence], old), ok)

    n = config.max_sequences
    return lax.fori_loop(0, n, let_go, lax.fori_loop(0, n, write, lax.fori_loop(0, n, hold, table))), status


@_on_table
def _remove_range(
    table: Table, sequence: jax.Array, begin: jax.Array, end: jax.Array, config: Config
) -> tuple[Table, tuple[kv.Move, ...], jax.Array]:
    """`remove` with an `end`: the table, and which tokens move where."""
    value = tables.row(table, sequence)
    invalid = first_error(
        (~tables.is_sequence(config, sequence), Status.SEQUENCE_OUT_OF_RANGE),
        ((begin < 0) | (end < begin), Status.RANGE_INVALID),
    )
    is_tail = (end >= value.length) & (begin < value.length)
    nothing = (begin >= value.length) | (begin == end)
    cut, cut_status = _remove_tail(table, sequence, begin, config)
    begin, end = jnp.clip(begin, 0, value.length), jnp.clip(end, 0, value.length)
    moved, moves, move_status = _remove_middle(table, sequence, value, begin, jnp.maximum(end, begin), config)
    status = jnp.where(is_tail, cut_status, jnp.where(nothing, jnp.int32(Status.OK), move_status))
    status = jnp.where(invalid != Status.OK, invalid, status)
    changed = (status == Status.OK) & ~nothing

    def choose(old: jax.Array, tail: jax.Array, middle: jax.Array) -> jax.Array:
        return jnp.where(changed, jnp.where(is_tail, tail, middle), old)

    moves = tuple(move.replace(high=jnp.where(changed & ~is_tail, move.high, move.low)) for move in moves)
    return jax.tree.map(choose, table, cut, moved), moves, status


@partial(jax.jit, static_argnames="shift")
def _remove_and_move(
    cache: Cache, sequence: jax.Array, begin: jax.Array, end: jax.Array, shift: Shift
) -> tuple[Cache, jax.Array]:
    table, moves, status = _remove_range(cache.table, sequence, begin, end, cache.config)
    return kv.move(cache.replace(table=table), moves, shift), status


def _remove_middle(
    table: Table, sequence: jax.Array, value: SequenceValue, begin: jax.Array, end: jax.Array, config: Config
) -> tuple[Table, tuple[kv.Move, ...], jax.Array]:
    """Drops `[begin, end)`, which ends before the sequence does, and moves the rest down."""
    distance = end - begin
    length = value.length - distance
    # Checkpoints behind the cut get other windows; until then they hold none, and no page is shared for their sake.
    always = jnp.ones((), bool)
    table = tables.release(table, _windows_behind(value, begin), always)
    page_tables, moves, rows, firsts = [], [], [], []
    lost = full = jnp.zeros((), bool)
    for g, group in enumerate(config.page_groups):
        first = value.first[g]
        first = jnp.where(first <= begin, first, jnp.maximum(begin, first - distance))
        lost |= ~paging.is_resumable(group, first, length)
        page_table, row, no_page = paging.rewrite(
            table.page_tables[g], value.pages[g], begin, length, first, config.page_size
        )
        full |= no_page
        moves.append(
            kv.Move(
                old_pages=value.pages[g],
                new_pages=row,
                begin=begin,
                distance=distance,
                low=jnp.maximum(begin // config.page_size * config.page_size, first),
                high=length,
            )
        )
        page_tables.append(page_table)
        rows.append(row)
        firsts.append(first)
    table = table.replace(page_tables=tuple(page_tables))
    kept, dropped = _after_middle(value.checkpoints, begin, end, tuple(rows), tuple(firsts), config)
    moved = SequenceValue(
        length=length,
        slot=value.slot,
        approximate=always,
        checkpoints=kept,
        pages=tuple(rows),
        first=tuple(firsts),
    )

    table = tables.share(table, _windows_behind(moved, begin), always)
    table = table.replace(slot_pool=pools.release(table.slot_pool, dropped))
    status = first_error((lost, Status.NOT_RESTORABLE), (full, Status.PAGES_FULL))
    return tables.write_row(table, sequence, moved, always), tuple(moves), status


def _windows_behind(value: SequenceValue, begin: jax.Array) -> SequenceValue:
    """Of all that `value` holds, the window pages of its checkpoints at `begin` i32[] and later."""
    behind = (value.checkpoints.positions >= begin)[:, None]
    windows = tuple(jnp.where(behind, pages, jnp.int32(NONE)) for pages in value.checkpoints.pages)
    return value.replace(
        slot=jnp.int32(NONE),
        pages=tuple(jnp.full_like(pages, NONE) for pages in value.pages),
        checkpoints=value.checkpoints.replace(slots=jnp.full_like(value.checkpoints.slots, NONE), pages=windows),
    )


def _after_middle(
    checkpoints: Checkpoints,
    begin: jax.Array,
    end: jax.Array,
    rows: tuple[jax.Array, ...],
    firsts: tuple[jax.Array, ...],
    config: Config,
) -> tuple[Checkpoints, jax.Array]:
    """The checkpoints that stay when `[begin, end)` goes: those before it, and later ones, moved and approximate.

    Also the slots of those that do not stay: i32[K].
    """
    if not config.num_checkpoints:
        return checkpoints, checkpoints.slots
    positions = checkpoints.positions
    later = positions >= end
    moved = jnp.where(later, positions - (end - begin), positions)
    keep = (positions >= 0) & (later | (positions < begin))
    pages = []
    for window, row, first, group in zip(checkpoints.pages, rows, firsts, config.page_groups, strict=True):
        if group.memory is not None:
            keep &= ~later | paging.is_resumable(group, first, moved + 1)
        if group.checkpoint_pages:
            sequence = jnp.zeros_like(moved)
            anew = paging.window_pages(row[None, :], sequence, moved + 1, group, config.page_size)
            window = jnp.where(later[:, None], anew, window)
        pages.append(window)
    flags = checkpoints.flags | jnp.where(later, jnp.int32(ckpt.APPROXIMATE), 0)
    kept = ckpt.select(keep, checkpoints.replace(positions=moved, flags=flags, pages=tuple(pages)))
    return kept, jnp.where(keep, jnp.int32(NONE), checkpoints.slots)
