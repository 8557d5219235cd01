"""Checkpoints taken during a pass: at the offsets a row asks for, and at its end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from rcache import checkpoints as ckpt, pages as paging, pool as pools
from rcache.batch import Rows
from rcache.checkpoints import Checkpoints
from rcache.config import Config
from rcache.indexing import NONE, look_up, store
from rcache.table import Counters, Table


class _Round(struct.PyTreeNode):
    """One capture of every row that wants one."""

    wanted: jax.Array  # bool[B]
    offset: jax.Array  # i32[B]: tokens of the pass folded in
    end_slot: jax.Array | None  # i32[B]: the slot to share, at the end of the pass; None: a slot of its own


def capture(table: Table, rows: Rows, write_slots: jax.Array, config: Config) -> tuple[Table, jax.Array]:
    """Takes the checkpoints of a pass whose slots and pages are planned already.

    Returns the table and, for each requested offset, the slot its state goes to: i32[B, C], NONE for nowhere.
    """
    num_requests = rows.captures.shape[1]
    nowhere = jnp.full(rows.captures.shape, NONE, jnp.int32)
    if not config.num_checkpoints:
        return table, nowhere
    taker = _Taker(table, rows, config)
    requested = [
        taker.take(_Round((rows.captures[:, c] >= 0) & (rows.captures[:, c] < rows.lengths), rows.captures[:, c], None))
        for c in range(num_requests)
    ]
    end = rows.ends - 1
    due = ckpt.is_due(taker.kept, end, config.checkpoints)
    asked = jnp.any(rows.captures == rows.lengths[:, None], axis=1)
    taker.take(_Round(rows.active & (due | asked), rows.lengths, write_slots))
    if not requested:
        return taker.table(), nowhere
    # A later round may have dropped an earlier one's checkpoint and given its slot away.
    slots, positions = jnp.stack(requested, axis=1), rows.starts[:, None] + rows.captures - 1
    kept = taker.kept
    is_kept = (kept.slots[:, None, :] == slots[:, :, None]) & (kept.positions[:, None, :] == positions[:, :, None])
    return taker.table(), jnp.where(jnp.any(is_kept, axis=2), slots, jnp.int32(NONE))


class _Taker:
    """Working copies of what captures change: the rows' checkpoints and the pools."""

    def __init__(self, table: Table, rows: Rows, config: Config) -> None:
        self._before, self._rows, self._config = table, rows, config
        self._approximate = look_up(table.approximate, rows.index, False)
        self._slot_pool = table.slot_pool
        self._page_pools = [t.pool for t in table.page_tables]
        self._counters = table.counters
        self.kept: Checkpoints = jax.tree.map(lambda values: look_up(values, rows.index, NONE), table.checkpoints)
        self.kept = self.kept.replace(flags=jnp.where(self.kept.positions >= 0, self.kept.flags, 0))

    def take(self, wish: _Round) -> jax.Array:
        """One round. Returns the slot each row's checkpoint got: i32[B], NONE where none was taken."""
        policy, rows = self._config.checkpoints, self._rows
        position = rows.starts + wish.offset - 1
        extra = ckpt.is_extra(self.kept, position, policy)
        full = self.kept.count == policy.count
        dropped = jnp.where(full & wish.wanted, ckpt.victim(self.kept), jnp.int32(NONE))
        batch = jnp.arange(position.shape[0])
        victim_slots = jnp.where(dropped >= 0, self.kept.slots[batch, jnp.maximum(dropped, 0)], jnp.int32(NONE))
        taken = wish.wanted
        if wish.end_slot is None:
            needs_another = wish.wanted & (look_up(self._slot_pool.ref_count, victim_slots, 0) != 1)
            taken &= ~needs_another | (pools.rank(needs_another) < self._slot_pool.num_free)
        dropped = jnp.where(taken, dropped, jnp.int32(NONE))
        self._slot_pool = pools.release(self._slot_pool, jnp.where(taken, victim_slots, jnp.int32(NONE)))
        if wish.end_slot is None:
            self._slot_pool, slots = pools.allocate(self._slot_pool, taken)
        else:
            slots = jnp.where(taken, wish.end_slot, jnp.int32(NONE))
            self._slot_pool = pools.share(self._slot_pool, slots)
        flags = jnp.where(extra, ckpt.EXTRA, 0) | jnp.where(self._approximate, ckpt.APPROXIMATE, 0)
        added = Checkpoints(
            positions=position[:, None],
            slots=slots[:, None],
            flags=flags.astype(jnp.int32)[:, None],
            pages=tuple(pages[:, None] for pages in self._window_pages(position + 1, taken)),
        )
        for g, pages in enumerate(self.kept.pages):
            leaving = jnp.where((dropped >= 0)[:, None], pages[batch, jnp.maximum(dropped, 0)], jnp.int32(NONE))
            pool = pools.share(self._page_pools[g], added.pages[g])
            self._page_pools[g] = paging.release_rows(pool, leaving)
        self.kept = ckpt.replace(self.kept, taken, dropped, added)
        count = lambda mask: jnp.sum(mask, dtype=jnp.int32)  # noqa: E731
        self._counters = Counters(
            captures=self._counters.captures + count(taken),
            captures_skipped=self._counters.captures_skipped + count(wish.wanted & ~taken),
            evictions=self._counters.evictions,
        )
        return slots

    def _window_pages(self, lengths: jax.Array, taken: jax.Array) -> list[jax.Array]:
        pages = []
        for page_table, group in zip(self._before.page_tables, self._config.page_groups, strict=True):
            if group.checkpoint_pages:
                window = paging.window_pages(page_table.pages, self._rows.index, lengths, group, self._config.page_size)
            else:
                window = jnp.zeros((lengths.shape[0], 0), jnp.int32)
            pages.append(jnp.where(taken[:, None], window, jnp.int32(NONE)))
        return pages

    def table(self) -> Table:
        """The table with the captures in it."""
        put = lambda values, rows: store(values, self._rows.index, rows)  # noqa: E731
        return self._before.replace(
            slot_pool=self._slot_pool,
            checkpoints=jax.tree.map(put, self._before.checkpoints, self.kept),
            page_tables=tuple(
                t.replace(pool=pool) for t, pool in zip(self._before.page_tables, self._page_pools, strict=True)
            ),
            counters=self._counters,
        )
