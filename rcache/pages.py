"""Page tables: which page holds which positions of which sequence, for one group of attention layers.

Logical page `m` of a sequence holds its positions `m * page_size` and on. Forks share pages; a page is written only by
a sequence that is its one holder. Groups with a `memory` keep positions from `first` on, and their checkpoints hold
the pages of the window before them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from rcache import pool as pools
from rcache.batch import Rows
from rcache.config import Config, PageGroup
from rcache.indexing import NONE, look_up, store
from rcache.pool import Pool


class PageTable(struct.PyTreeNode):
    """Pages of all sequences in one page group."""

    pages: jax.Array  # i32[N, M]: page of each logical page; NONE where nothing is kept
    pool: Pool  # of P pages


class PagePlan(struct.PyTreeNode):
    """Where one pass reads and writes keys and values of one page group."""

    context_pages: jax.Array  # i32[B, X / page_size]: pages a query of this pass may see; NONE: not there
    context_start: jax.Array  # i32[B]: position of the first token in them
    first: jax.Array  # i32[B]: lowest position kept
    token_pages: jax.Array  # i32[B, T]: page each token is written to; NONE: padding
    copy_from: jax.Array  # i32[B]: shared page a row leaves, NONE if it does not
    copy_to: jax.Array  # i32[B]: the page it takes instead


def init(config: Config, num_pages: int) -> PageTable:
    """No pages for any sequence."""
    return PageTable(
        pages=jnp.full((config.max_sequences, config.pages_per_sequence), NONE, jnp.int32),
        pool=pools.init(num_pages),
    )


def num_pages(length: jax.Array, page_size: int) -> jax.Array:
    """Logical pages that `length` i32[...] tokens reach into."""
    return (length + page_size - 1) // page_size


def is_resumable(group: PageGroup, first: jax.Array, length: jax.Array) -> jax.Array:
    """Whether everything a query at position `length` may see before itself is kept: bool[...]."""
    if group.memory is None or group.span is None:
        return jnp.ones(jnp.broadcast_shapes(first.shape, length.shape), bool)
    return (first == 0) | (first <= length - group.span)


def window_pages(
    table: jax.Array, sequences: jax.Array, lengths: jax.Array, group: PageGroup, page_size: int
) -> jax.Array:
    """Pages of the window before position `lengths` i32[B] of `sequences` i32[B], in logical order: i32[B, W]."""
    logical = _window_logical(lengths, group, page_size)
    wanted = logical * page_size < lengths[:, None]
    return _lookup(table, sequences[:, None], logical, wanted)


def window_row(window: jax.Array, length: jax.Array, group: PageGroup, config: Config) -> tuple[jax.Array, jax.Array]:
    """The row i32[M] and `first` i32[] of a sequence of `length` i32[] whose pages are `window` i32[W] alone."""
    assert group.span is not None
    logical = _window_logical(length[None], group, config.page_size)[0]
    row = jnp.full(config.pages_per_sequence, NONE, jnp.int32)
    row = store(row, jnp.where(window >= 0, logical, jnp.int32(NONE)), window)
    return row, jnp.maximum(length - group.span, 0)


def _window_logical(lengths: jax.Array, group: PageGroup, page_size: int) -> jax.Array:
    assert group.span is not None
    begin = jnp.maximum(lengths - group.span, 0) // page_size
    return begin[:, None] + jnp.arange(group.checkpoint_pages, dtype=jnp.int32)[None, :]


def _lookup(table: jax.Array, sequences: jax.Array, logical: jax.Array, wanted: jax.Array) -> jax.Array:
    """`table[sequences, logical]` where `wanted`, else NONE. Out-of-range sequences read NONE."""
    return look_up(table, (sequences, jnp.where(wanted, logical, jnp.int32(NONE))), NONE)


def release_rows(pool: Pool, rows: jax.Array) -> Pool:
    """Releases `rows` i32[n, m], each free of duplicates in itself; rows may share pages."""
    if rows.size == 0:
        return pool
    return jax.lax.fori_loop(0, rows.shape[0], lambda i, p: pools.release(p, rows[i], unique=True), pool)


def trim(
    table: PageTable, group: PageGroup, sequences: jax.Array, first: jax.Array, starts: jax.Array, page_size: int
) -> tuple[PageTable, jax.Array]:
    """Releases the pages of `sequences` i32[B] wholly more than `memory` tokens before `starts` i32[B].

    Also the lowest position kept from then on, of those that keep those from `first` i32[B] on: i32[B].
    """
    if group.memory is None:
        return table, first
    rows = look_up(table.pages, sequences, NONE)
    first = jnp.maximum(first, starts - group.memory)
    behind = (jnp.arange(rows.shape[1], dtype=jnp.int32) + 1)[None, :] * page_size <= first[:, None]
    trimmed = PageTable(
        pages=store(table.pages, sequences, jnp.where(behind, jnp.int32(NONE), rows)),
        pool=release_rows(table.pool, jnp.where(behind, rows, jnp.int32(NONE))),
    )
    return trimmed, first


class _Need(struct.PyTreeNode):
    """Pages a pass has to take."""

    held: jax.Array  # i32[B]: partial last page of each row, NONE if there is none
    leaves: jax.Array  # bool[B]: it is shared or not kept, so the row takes another
    logical: jax.Array  # i32[B, Q]: logical pages the pass may reach into anew
    wanted: jax.Array  # bool[B, Q]: those it does

    @property
    def count(self) -> jax.Array:
        return jnp.sum(self.leaves, dtype=jnp.int32) + jnp.sum(self.wanted, dtype=jnp.int32)


def _need(table: PageTable, rows: Rows, page_size: int) -> _Need:
    is_partial = rows.starts % page_size != 0
    held = _lookup(table.pages, rows.index, rows.starts // page_size, is_partial)
    # A window of one token sees nothing before itself: a checkpoint there keeps no page, not even the partial one.
    leaves = pools.must_leave(table.pool, held) | (rows.active & is_partial & (held < 0))
    most = -(-rows.num_tokens // page_size)
    logical = num_pages(rows.starts, page_size)[:, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
    wanted = (logical * page_size < rows.ends[:, None]) & rows.active[:, None]
    return _Need(held, leaves, logical, wanted)


def shortage(table: PageTable, rows: Rows, page_size: int) -> jax.Array:
    """bool[]: whether too few pages are free for the rows to grow."""
    return _need(table, rows, page_size).count > table.pool.num_free


def extend(table: PageTable, rows: Rows, page_size: int) -> tuple[PageTable, jax.Array, jax.Array]:
    """Takes the pages the rows grow into. Also which shared page each row leaves, and for which: i32[B], i32[B]."""
    need = _need(table, rows, page_size)
    wanted = jnp.concatenate([need.leaves[:, None], need.wanted], axis=1)
    left = jnp.where(need.leaves, need.held, jnp.int32(NONE))
    pool, ids = pools.exchange(table.pool, left, wanted=wanted.reshape(-1))
    ids = ids.reshape(wanted.shape)
    logical = jnp.concatenate([(rows.starts // page_size)[:, None], need.logical], axis=1)
    where = jnp.where(wanted, logical, jnp.int32(NONE))
    return (
        table.replace(pages=store(table.pages, (rows.index[:, None], where), ids), pool=pool),
        left,
        jnp.where(left >= 0, ids[:, 0], jnp.int32(NONE)),
    )


def give_back(table: PageTable, sequences: jax.Array, begins: jax.Array, ends: jax.Array, page_size: int) -> PageTable:
    """Releases the pages `sequences` i32[B] took for tokens from `begins` i32[B] to `ends` i32[B]: none is shared."""
    rows = look_up(table.pages, sequences, NONE)
    logical = jnp.arange(rows.shape[1], dtype=jnp.int32)
    behind = (logical >= num_pages(begins, page_size)[:, None]) & (logical < num_pages(ends, page_size)[:, None])
    return table.replace(
        pages=store(table.pages, sequences, jnp.where(behind, jnp.int32(NONE), rows)),
        pool=pools.release(table.pool, jnp.where(behind, rows, jnp.int32(NONE)).reshape(-1), unique=True),
    )


def rewrite(
    table: PageTable, row: jax.Array, begin: jax.Array, length: jax.Array, first: jax.Array, page_size: int
) -> tuple[PageTable, jax.Array, jax.Array]:
    """Pages for a sequence whose tokens from `begin` on are written anew and end at `length`.

    Args:
      table: the page table; only its pool changes.
      row: i32[M] pages the sequence holds.
      begin: i32[] pages before the one with this position stay as they are.
      length: i32[] tokens there will be.
      first: i32[] lowest position that will be kept.
      page_size: tokens of a page.

    Returns:
      The table, the new row i32[M], and whether there were too few free pages bool[].
    """
    logical = jnp.arange(row.shape[0], dtype=jnp.int32)
    rewritten = (logical >= begin // page_size) & (logical < num_pages(length, page_size))
    rewritten &= (logical + 1) * page_size > first
    untouched = (logical < begin // page_size) & ((logical + 1) * page_size > first)
    holders = pools.holders(table.pool, row, 0)
    takes = rewritten & (holders != 1)
    stays = untouched | (rewritten & ~takes)
    pool = pools.release(table.pool, jnp.where(stays, jnp.int32(NONE), row), unique=True)
    full = jnp.sum(takes, dtype=jnp.int32) > pool.num_free
    pool, ids = pools.allocate(pool, takes & ~full)
    return table.replace(pool=pool), jnp.where(takes, ids, jnp.where(stays, row, jnp.int32(NONE))), full


def plan(
    table: PageTable,
    group: PageGroup,
    rows: Rows,
    first: jax.Array,
    positions: jax.Array,
    copies: tuple[jax.Array, jax.Array],
    page_size: int,
    context: int,
) -> PagePlan:
    """Where a pass over `positions` i32[B, T] reads and writes, `context` tokens at most in sight.

    Rows keep positions from `first` i32[B] on.
    """
    context_size = -(-context // page_size)
    begin = jnp.zeros_like(rows.starts)
    if group.span is not None:
        context_size = min(context_size, -(-(group.span + rows.num_tokens) // page_size) + 1)
        begin = jnp.maximum(rows.starts - group.span, 0) // page_size
    logical = begin[:, None] + jnp.arange(context_size, dtype=jnp.int32)[None, :]
    return PagePlan(
        context_pages=_lookup(table.pages, rows.index[:, None], logical, jnp.ones_like(logical, bool)),
        context_start=begin * page_size,
        first=first,
        token_pages=_lookup(table.pages, rows.index[:, None], positions // page_size, rows.token_mask),
        copy_from=copies[0],
        copy_to=copies[1],
    )
