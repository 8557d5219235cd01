"""Checkpoints taken during a pass: at the offsets a row asks for, and at its end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rcache import checkpoints as ckpt, pages as paging, pool as pools, table as tables
from rcache.batch import Rows
from rcache.checkpoints import Checkpoints
from rcache.config import Config
from rcache.indexing import NONE, look_up
from rcache.pool import Pool
from rcache.records import Record
from rcache.table import Table


def capture(
    table: Table, rows: Rows, record: Record, write_slots: jax.Array, config: Config
) -> tuple[Table, Record, jax.Array]:
    """Takes the checkpoints of a pass whose slots and pages are planned already.

    Returns the table, the record of the rows with their checkpoints, and, for each requested offset, the slot its state
    goes to: i32[B, C], NONE for nowhere.
    """
    if not config.num_checkpoints:
        return table, record, jnp.full(rows.captures.shape, NONE, jnp.int32)
    nothing = jnp.zeros((), jnp.int32)
    page_pools = tuple(page_table.pool for page_table in table.page_tables)
    round_ = _Round(record.checkpoints, table.slot_pool, page_pools, nothing, nothing)
    plan = _Plan(rows, record.approximate, tuple(page_table.pages for page_table in table.page_tables))

    def inside(round_: _Round, offset: jax.Array) -> tuple[_Round, jax.Array]:
        return _take(round_, (offset >= 0) & (offset < rows.lengths), offset, None, plan, config)

    round_, requested = lax.scan(inside, round_, rows.captures.T)
    is_end_asked = jnp.any(rows.captures == rows.lengths[:, None], axis=1)
    is_end_due = ckpt.is_due(round_.kept, rows.ends - 1, config.checkpoints)
    is_end_wanted = rows.active & (is_end_due | is_end_asked)
    round_, _ = _take(round_, is_end_wanted, rows.lengths, write_slots, plan, config)
    table = table.replace(
        slot_pool=round_.slot_pool,
        page_tables=tuple(t.replace(pool=p) for t, p in zip(table.page_tables, round_.page_pools, strict=True)),
    )
    table = tables.count(table, captures=round_.num_taken, captures_skipped=round_.num_skipped)
    # A later round may have dropped an earlier one's checkpoint and given its slot away.
    slots, positions = requested.T[:, :, None], (rows.starts[:, None] + rows.captures - 1)[:, :, None]
    is_kept = (round_.kept.slots[:, None, :] == slots) & (round_.kept.positions[:, None, :] == positions)
    capture_slots = jnp.where(jnp.any(is_kept, axis=2), requested.T, jnp.int32(NONE))
    return table, record.replace(checkpoints=round_.kept), capture_slots


class _Round(struct.PyTreeNode):
    """What a round of captures, one for every row that wants one, changes."""

    kept: Checkpoints  # of the B rows
    slot_pool: Pool
    page_pools: tuple[Pool, ...]
    num_taken: jax.Array  # i32[]
    num_skipped: jax.Array  # i32[]


class _Plan(struct.PyTreeNode):
    """What no round changes."""

    rows: Rows
    approximate: jax.Array  # bool[B]
    pages: tuple[jax.Array, ...]  # i32[N, M] of each page group


def _take(
    before: _Round,
    wanted: jax.Array,
    offset: jax.Array,
    end_slots: jax.Array | None,
    plan: _Plan,
    config: Config,
) -> tuple[_Round, jax.Array]:
    """One round: rows where `wanted` bool[B] capture what they are after `offset` i32[B] tokens of the pass.

    `end_slots` i32[B] are shared at the end of the pass; inside it, where they are None, each capture needs a slot of
    its own. Returns the slot each got: i32[B], NONE where none was taken.
    """
    rows, kept, slot_pool = plan.rows, before.kept, before.slot_pool
    position = rows.starts + offset - 1
    full = kept.count == config.checkpoints.count
    victim = ckpt.victim(kept)
    victim_slots = jnp.where(full & wanted, _at(kept.slots, victim), jnp.int32(NONE))
    taken = wanted
    if end_slots is None:
        needs_another = wanted & (pools.holders(slot_pool, victim_slots, 0) != 1)
        taken = wanted & (~needs_another | (pools.rank(needs_another) < slot_pool.num_free))
    dropped = jnp.where(full & taken, victim, jnp.int32(NONE))
    left = jnp.where(taken, victim_slots, jnp.int32(NONE))
    if end_slots is None:
        slot_pool, slots = pools.allocate(pools.release(slot_pool, left), taken)  # it may get what was just let go
    else:
        slots = jnp.where(taken, end_slots, jnp.int32(NONE))
        slot_pool, _ = pools.exchange(slot_pool, left, shared=slots)

    flags = jnp.where(ckpt.is_extra(kept, position, config.checkpoints), jnp.int32(ckpt.EXTRA), 0)
    flags |= jnp.where(plan.approximate, jnp.int32(ckpt.APPROXIMATE), 0)
    windows, page_pools = [], []
    for pages, group, pool, held in zip(plan.pages, config.page_groups, before.page_pools, kept.pages, strict=True):
        window = jnp.zeros((position.shape[0], 0), jnp.int32)
        if group.checkpoint_pages:
            window = paging.window_pages(pages, rows.index, position + 1, group, config.page_size)
            window = jnp.where(taken[:, None], window, jnp.int32(NONE))
            leaving = jnp.where((dropped >= 0)[:, None], _at(held, victim), jnp.int32(NONE))
            pool = paging.release_rows(pools.share(pool, window), leaving)
        windows.append(window[:, None])
        page_pools.append(pool)
    added = Checkpoints(position[:, None], slots[:, None], flags[:, None], tuple(windows))
    num_taken, num_wanted = jnp.sum(taken, dtype=jnp.int32), jnp.sum(wanted, dtype=jnp.int32)
    after = _Round(
        kept=ckpt.replace(kept, taken, dropped, added),
        slot_pool=slot_pool,
        page_pools=tuple(page_pools),
        num_taken=before.num_taken + num_taken,
        num_skipped=before.num_skipped + num_wanted - num_taken,
    )
    return after, slots


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[b, index[b]]` for each row: [B, K, ...] by i32[B] to [B, ...]."""
    return look_up(values, (jnp.arange(index.shape[0], dtype=jnp.int32), index), NONE)
