"""One cache, twice: the JAX operations and the NumPy reference, compared in full after every operation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rcache
from rcache.checkpoints import EXTRA
from rcache.reference import ReferenceCache

NUM_TOKENS = 6
NUM_CAPTURES = 2


class StandIn:
    """A model that is exact in float32: integers below 251 for states, linear keys and values (NumPy side)."""

    def __init__(self, config: rcache.Config) -> None:
        self.config = config

    def update(self, layer: int, name: str, state: np.ndarray, token: int) -> np.ndarray:
        j = np.arange(state.size).reshape(state.shape)
        return ((3 * state + token + 7 * layer + j + 100 * len(name)) % 251).astype(state.dtype)

    def key(self, layer: int, token: int, position: int) -> np.ndarray:
        attention = self.config.layers[layer].attention
        assert attention is not None
        d = np.arange(attention.num_kv_heads * attention.head_dim).reshape(attention.num_kv_heads, -1)
        return ((7 * token + 13 * layer + 3 * position + d) % 241).astype(np.float32)

    def value(self, layer: int, token: int, position: int) -> np.ndarray:
        attention = self.config.layers[layer].attention
        assert attention is not None and attention.value_dim is not None
        d = np.arange(attention.num_kv_heads * attention.value_dim).reshape(attention.num_kv_heads, -1)
        return ((5 * token + 11 * layer + 3 * d) % 239).astype(np.float32)


def add_offset(keys: jax.Array, offset: jax.Array, layer: int) -> jax.Array:
    """The stand-in's key shift."""
    del layer
    return keys + offset.astype(keys.dtype)


@functools.partial(jax.jit, static_argnames="context")
def step(cache: rcache.Cache, tokens: jax.Array, batch: rcache.Batch, context: int | None = None) -> tuple:
    """The stand-in on the JAX side: tokens i32[B, T]. Also what was read and what was visible, by layer."""
    cache, forward, status = rcache.start_forward(cache, batch, context=context)
    cache, read, visible = layers(cache, forward, tokens)
    return cache, forward, status, read, visible


@functools.partial(jax.jit, static_argnames="context")
def run_step(
    cache: rcache.Cache, tokens: jax.Array, batch: rcache.Batch, came: jax.Array, context: int | None = None
) -> tuple:
    """As `step`, in a run of which `came` i32[B] tokens come; `read` and `visible` have an axis of tokens in front."""
    run, status = rcache.start_run(cache, batch, context=context)

    def one(run: rcache.Run, index: jax.Array) -> tuple:
        token = jax.lax.dynamic_slice_in_dim(tokens, index, 1, axis=1)
        run, read, visible = layers(run, rcache.run_token(run, index, index < came), token)
        return run, (read, visible)

    run, (read, visible) = jax.lax.scan(one, run, jnp.arange(tokens.shape[1], dtype=jnp.int32))
    return rcache.finish_run(run), run.plan, status, read, visible


def layers(cache: Any, forward: rcache.Forward, tokens: jax.Array) -> tuple[Any, dict, dict]:
    """The stand-in's layers over a cache or a run; what was read and what was visible, by layer."""
    read, visible = {}, {}
    for index, layer in enumerate(cache.config.layers):
        if layer.states:
            before = rcache.read_state(cache, forward, index)
            after, captured = {}, {}
            for name, state in before.items():
                after[name], captured[name] = _fold(state, tokens, forward, 7 * index + 100 * len(name))
            captured = captured if forward.capture_slots.shape[1] else None
            cache = rcache.update_state(cache, forward, index, after, captured=captured)
            read[index] = before
        if layer.attention is not None:
            a = layer.attention
            d = jnp.arange(a.num_kv_heads * a.head_dim, dtype=jnp.int32).reshape(a.num_kv_heads, -1)
            e = jnp.arange(a.num_kv_heads * a.value_dim, dtype=jnp.int32).reshape(a.num_kv_heads, -1)
            t, p = tokens[:, :, None, None], forward.positions[:, :, None, None]
            keys = ((7 * t + 13 * index + 3 * p + d) % 241).astype(a.dtype)
            values = ((5 * t + 11 * index + 3 * e) % 239).astype(a.dtype)
            cache = rcache.put(cache, forward, index, keys, values)
            visible[index] = rcache.get(cache, forward, index)
    return cache, read, visible


def _fold(state: jax.Array, tokens: jax.Array, forward: rcache.Forward, add: int) -> tuple[jax.Array, jax.Array]:
    """The state after all real tokens, and after `forward.capture_offsets` of them."""
    wide = (-1,) + (1,) * (state.ndim - 1)
    j = jnp.arange(int(np.prod(state.shape[1:])), dtype=jnp.int32).reshape(state.shape[1:])

    def one(state: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, real = inputs
        new = (3 * state.astype(jnp.int32) + token.reshape(wide) + add + j) % 251
        state = jnp.where(real.reshape(wide), new.astype(state.dtype), state)
        return state, state

    state, after = jax.lax.scan(one, state, (tokens.T, forward.token_mask.T))
    offsets = jnp.maximum(forward.capture_offsets - 1, 0)
    return state, jax.vmap(lambda states, at: states[at], in_axes=(1, 0))(after, offsets)


def same(what: str, got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape and np.array_equal(got, expected), f"{what}: {got} instead of {expected}"


class Pair:
    """The cache of `config`, on both sides. Every method is an operation; it fails where the sides differ."""

    def __init__(self, config: rcache.Config) -> None:
        self.config, self.model = config, StandIn(config)
        self.cache, self.reference = rcache.init(config), ReferenceCache(config)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, 0 for ids that are none."""
        return self.reference.lengths()[sequence] if 0 <= sequence < self.config.max_sequences else 0

    def forward(
        self,
        rows: list[tuple[int, list[int]]],
        *,
        lengths: list[int] | None = None,
        positions: list[list[int]] | None = None,
        captures: list[list[int]] | None = None,
        bidirectional: list[list[int]] | None = None,
        context: int | None = None,
    ) -> rcache.Status:
        n = self.config.max_sequences
        sequences = _padded([sequence for sequence, _ in rows], n, -1)
        tokens = _padded([_padded(row, NUM_TOKENS, 0) for _, row in rows], n, [0] * NUM_TOKENS)
        lengths = [len(row) for _, row in rows] if lengths is None else lengths
        grid = lambda given: _padded([_padded(row, NUM_TOKENS, -1) for row in given or []], n, [-1] * NUM_TOKENS)  # noqa: E731
        asked = _padded([_padded(row, NUM_CAPTURES, -1) for row in captures or []], n, [-1] * NUM_CAPTURES)
        batch = rcache.make_batch(
            sequences,
            _padded(lengths, n, 0),
            NUM_TOKENS,
            positions=grid(positions),
            captures=asked,
            bidirectional=grid(bidirectional),
        )
        before = self.cache
        self.cache, forward, status, read, visible = step(self.cache, jnp.asarray(tokens, jnp.int32), batch, context)
        expected, plans = self.reference.forward(
            sequences,
            tokens,
            self.model,
            lengths=_padded(lengths, n, 0),
            positions=grid(positions),
            captures=asked,
            bidirectional=grid(bidirectional),
            context=context,
        )
        same("status of forward", rcache.Status(int(status)), expected)
        if expected is not rcache.Status.OK:
            self._unchanged(before)
        by_sequence = {plan.sequence: plan for plan in plans}
        assert len(by_sequence) == int(np.sum(np.asarray(forward.lengths) > 0))
        for row, sequence in enumerate(np.asarray(forward.sequences)):
            plan = by_sequence.get(int(sequence))
            if plan is not None:
                self._same_pass(row, forward, plan, read, visible)
        self.check()
        return expected

    def run(self, rows: list[tuple[int, list[int]]], planned: list[int], context: int | None = None) -> rcache.Status:
        """A run of which `planned` tokens of each row were planned, and those given came."""
        n = self.config.max_sequences
        sequences = _padded([sequence for sequence, _ in rows], n, -1)
        given = [row for _, row in rows] + [[]] * (n - len(rows))
        planned = _padded(planned, n, 0)
        tokens = jnp.array([_padded(row, NUM_TOKENS, 0) for row in given], jnp.int32)
        came = jnp.array([len(row) for row in given], jnp.int32)
        batch = rcache.make_batch(sequences, planned, NUM_TOKENS)
        before = self.cache
        self.cache, plan, status, read, visible = run_step(self.cache, tokens, batch, came, context)
        expected, plans = self.reference.run(
            sequences, given, self.model, planned=planned, num_tokens=NUM_TOKENS, context=context
        )
        same("status of a run", rcache.Status(int(status)), expected)
        if expected is not rcache.Status.OK:
            self._unchanged(before)
        by_sequence = {plan.sequence: plan for plan in plans}
        first = jax.tree.map(lambda states: states[0], read)
        visible = jax.tree.map(np.asarray, visible)  # [T, B, ...]
        for row, sequence in enumerate(np.asarray(plan.sequences)):
            expected_plan = by_sequence.get(int(sequence))
            if expected_plan is not None:
                self._same_pass(row, plan, expected_plan, first, {})
                for layer, (keys, values, mask) in visible.items():
                    for token, seen in enumerate(expected_plan.visible[layer]):
                        what = f"seen by layer {layer}, token {token} of a run, "
                        _same_seen(what, keys[token, row], values[token, row], mask[token, row, 0], seen)
        self.check()
        return expected

    def _same_pass(self, row: int, forward: rcache.Forward, plan: Any, read: dict, visible: dict) -> None:
        same("start", forward.starts[row], plan.start)
        for layer, states in read.items():
            for name, state in states.items():
                same(f"state {name} read by layer {layer}", state[row], plan.states_read[layer, name])
        for layer, (keys, values, mask) in visible.items():
            keys, values, mask = (np.asarray(array)[row] for array in (keys, values, mask))
            for token, seen in enumerate(plan.visible[layer]):
                _same_seen(f"seen by layer {layer}, token {token}, ", keys, values, mask[token], seen)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        before = self.cache
        self.cache, got, status = rcache.copy_prefix(self.cache, src, dst, length)
        self._same_outcome("copy_prefix", (got, status), self.reference.copy_prefix(src, dst, length), before)

    def remove(self, sequence: int, begin: int, end: int | None = None) -> None:
        before = self.cache
        shift = None if end is None else add_offset
        self.cache, status = rcache.remove(self.cache, sequence, begin, end, shift=shift)
        expected = self.reference.remove(sequence, begin, end, shift=lambda keys, offset, layer: keys + offset)
        self._same_outcome("remove", (status,), (expected,), before)

    def remove_exact(self, sequence: int, begin: int, end: int) -> None:
        before = self.cache
        self.cache, num_rerun, status = rcache.remove_exact(self.cache, sequence, begin, end)
        expected = self.reference.remove_exact(sequence, begin, end)
        self._same_outcome("remove_exact", (num_rerun, status), expected, before)

    def reorder(self, sources: list[int]) -> None:
        before = self.cache
        self.cache, status = rcache.reorder(self.cache, np.array(sources, np.int32))
        self._same_outcome("reorder", (status,), (self.reference.reorder(sources),), before)

    def reset(self) -> None:
        self.cache = rcache.reset(self.cache)
        self.reference.reset()
        self.check()

    def ask(self, sequence: int, position: int) -> None:
        """The two questions: they change nothing."""
        resume = rcache.prepare_restore(self.cache, sequence, position)
        same("prepare_restore", resume, self.reference.prepare_restore(sequence, position))
        can = rcache.can_resume(self.cache, sequence, position)
        same("can_resume", can, self.reference.can_resume(sequence, position))

    def _same_outcome(self, what: str, got: tuple, expected: tuple, before: rcache.Cache) -> None:
        same(f"result of {what}", np.array([int(x) for x in got]), np.array([int(x) for x in expected]))
        if expected[-1] is not rcache.Status.OK:
            self._unchanged(before)
        self.check()

    def _unchanged(self, before: rcache.Cache) -> None:
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(self.cache), strict=True):
            same("a refused operation changed the cache", new, old)

    # What the cache holds

    def check(self) -> None:
        """Everything observable, and that every slot and page has as many holders as its count says."""
        cache, reference = jax.tree.map(np.asarray, self.cache), self.reference
        table, records = cache.table, cache.table.sequences
        same("lengths", records.length, reference.lengths())
        same("approximate", records.approximate, reference.approximate())
        same("checkpoint positions", records.checkpoints.positions, reference.checkpoint_positions())
        flags = np.asarray(rcache.checkpoint_approximate(self.cache))
        same("checkpoint approximate", flags, reference.checkpoint_approximate())
        same("free slots", table.slot_pool.num_free, reference.free_slots())
        same("free pages", [int(t.pool.num_free) for t in table.page_tables], list(reference.free_pages()))
        for name in ("captures", "captures_skipped", "evictions"):
            same(name, getattr(table.counters, name), getattr(reference.counters, name))
        for sequence in range(self.config.max_sequences):
            self._same_sequence(cache, sequence)
        check_conserved(cache)

    def _same_sequence(self, cache: rcache.Cache, sequence: int) -> None:
        expected, table = self.reference.snapshot(sequence), cache.table
        record = jax.tree.map(lambda leaf: leaf[sequence], table.sequences)
        what = f"sequence {sequence} "
        if expected.length:
            self._same_states(what, cache, int(record.slot), expected.states)
        for k, checkpoint in enumerate(expected.checkpoints):
            same(what + "extra", bool(record.checkpoints.flags[k] & EXTRA), checkpoint.extra)
            slot = int(record.checkpoints.slots[k])
            self._same_states(what + f"checkpoint {checkpoint.position} ", cache, slot, checkpoint.states)
        size = self.config.page_size
        for group in self.config.kv_groups:
            page_table = table.page_tables[group.page_group]
            positions = np.arange(record.first[group.page_group], record.length)
            pages = page_table.pages[sequence][positions // size]
            for row, layer in enumerate(group.layers):
                kept = expected.kept[layer]
                same(what + f"kept by layer {layer}", positions, list(kept))
                for part, payload in enumerate((cache.keys[group.key], cache.values[group.key])):
                    stored = payload[:, row, pages, positions % size].swapaxes(0, 1)
                    same(
                        what + f"stored by layer {layer}",
                        stored,
                        np.array([*(kv[part] for kv in kept.values())]).reshape(stored.shape),
                    )

    def _same_states(self, what: str, cache: rcache.Cache, slot: int, states: dict) -> None:
        for group in self.config.state_groups:
            for row, layer in enumerate(group.layers):
                same(
                    f"{what}state {group.name} of layer {layer}",
                    cache.states[group.key][row, slot],
                    states[layer, group.name],
                )


def _same_seen(what: str, keys: np.ndarray, values: np.ndarray, mask: np.ndarray, seen: list) -> None:
    """Of keys and values [X, H, D], those under `mask` bool[X] are the ones that a token saw."""
    same(what + "count", mask.sum(), len(seen))
    same(what + "keys", keys[mask], np.array([key for _, key, _ in seen]))
    same(what + "values", values[mask], np.array([value for _, _, value in seen]))


def check_conserved(cache: rcache.Cache) -> None:
    """Reference counts are the holders, free ids are those without, and emptied rows are as good as new."""
    table = jax.tree.map(np.asarray, cache.table)
    records = table.sequences
    pools = [(table.slot_pool, [records.slot, records.checkpoints.slots])]
    for page_table, windows in zip(table.page_tables, records.checkpoints.pages, strict=True):
        pools.append((page_table.pool, [page_table.pages, windows]))
    for pool, holders in pools:
        ids = np.concatenate([held.reshape(-1) for held in holders])
        counts = np.bincount(ids[ids >= 0], minlength=pool.ref_count.shape[0])
        same("reference counts", pool.ref_count, counts)
        free = pool.free[: pool.num_free]
        same("free ids", np.sort(free), np.flatnonzero(counts == 0))
    virgin = _virgin(cache.config)
    for sequence in np.flatnonzero(records.length == 0):
        for now, new in zip(
            jax.tree.leaves(_row(table, sequence)), jax.tree.leaves(_row(virgin, sequence)), strict=True
        ):
            same(f"row of the emptied sequence {sequence}", now, new)


@functools.cache
def _virgin(config: rcache.Config) -> Any:
    return jax.tree.map(np.asarray, rcache.init(config).table)


@functools.cache
def _virgin(config: rcache.Config) -> Any:
    return jax.tree.map(np.asarray, rcache.init(config).table)


def _row(table: Any, sequence: int) -> list:
    per_sequence = [table.records, *(page_table.pages for page_table in table.page_tables)]
    return [np.asarray(leaf)[sequence] for leaf in jax.tree.leaves(per_sequence)]


def _padded(values: list, size: int, filler: Any) -> list:
    return list(values) + [filler] * (size - len(values))
