"""The oracle of the scenarios: a sequence equals a fresh prefill of exactly its current tokens.

`History` knows which tokens each sequence should hold, by plain lists, and `Model` folds them one by one in NumPy.
Neither knows of slots, pages or checkpoints. `Lineage` is a `Pair` (so every operation is compared with the NumPy
reference, too) whose every state, checkpoint, key and value is then held against that fold, leaf by leaf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rcache
from rcache import Status
from tests.differential import Pair, add_offset, same

CHUNK = 8
"""Tokens of a pass (`T`)."""
NUM_CAPTURES = 4
"""Captures a row may ask for (`C`): after every draft token but the last."""

States = dict[tuple[int, str], np.ndarray]  # of (layer, name)


class Model:
    """Exact in float32. `conv` is a true window: its last inputs, the newest at the end; `sum` is a recurrence.

    Keys are linear in the position, so a key that moved equals the key of its new position.
    """

    def __init__(self, config: rcache.Config) -> None:
        self.config = config

    def update(self, layer: int, name: str, state: np.ndarray, token: int) -> np.ndarray:
        if name == "conv":
            return np.concatenate([state[1:], _input(layer, token, state.shape[1])[None]]).astype(state.dtype)
        j = np.arange(state.size).reshape(state.shape)
        return ((3 * state + token + 7 * layer + j) % 251).astype(state.dtype)

    def key(self, layer: int, token: int, position: int) -> np.ndarray:
        a = self.config.layers[layer].attention
        d = np.arange(a.num_kv_heads * a.head_dim).reshape(a.num_kv_heads, -1)
        return (7 * token + 13 * layer + position + d).astype(np.float32)

    def value(self, layer: int, token: int, position: int) -> np.ndarray:
        a = self.config.layers[layer].attention
        d = np.arange(a.num_kv_heads * a.value_dim).reshape(a.num_kv_heads, -1)
        return (5 * token + 11 * layer + 3 * d).astype(np.float32)

    def prefill(self, tokens: Sequence[int]) -> States:
        """The states after `tokens`, run one by one from zero."""
        return _prefill(self.config, tuple(tokens))


def _input(layer: int, token: Any, channels: int) -> Any:
    return token + 7 * layer + np.arange(channels)


@functools.lru_cache(maxsize=100_000)
def _prefill(config: rcache.Config, tokens: tuple[int, ...]) -> States:
    model, states = Model(config), {}
    before = [_prefill(config, tokens[: len(tokens) // CHUNK * CHUNK])] if len(tokens) % CHUNK else []
    for index, layer in enumerate(config.layers):
        for name, kind in layer.states:
            state = before[0][index, name] if before else np.zeros(kind.shape, kind.dtype)
            for token in tokens[len(tokens) // CHUNK * CHUNK if before else 0 :]:
                state = model.update(index, name, state, token)
            states[index, name] = state
    return states


@jax.jit
def step(cache: rcache.Cache, tokens: jax.Array, batch: rcache.Batch) -> tuple:
    """`Model` over the cache: tokens i32[B, T]. Also what every layer read and what it could see."""
    cache, forward, status = rcache.start_forward(cache, batch)
    read, visible = {}, {}
    for index, layer in enumerate(cache.config.layers):
        if layer.states:
            read[index] = rcache.read_state(cache, forward, index)
            folded = {name: _fold(index, name, state, tokens, forward) for name, state in read[index].items()}
            after = {name: states[0] for name, states in folded.items()}
            captured = {name: states[1] for name, states in folded.items()} if batch.captures.shape[1] else None
            cache = rcache.update_state(cache, forward, index, after, captured=captured)
        if layer.attention is not None:
            a = layer.attention
            d = jnp.arange(a.num_kv_heads * a.head_dim, dtype=jnp.int32).reshape(a.num_kv_heads, -1)
            e = jnp.arange(a.num_kv_heads * a.value_dim, dtype=jnp.int32).reshape(a.num_kv_heads, -1)
            t, p = tokens[:, :, None, None], forward.positions[:, :, None, None]
            keys, values = (7 * t + 13 * index + p + d).astype(a.dtype), (5 * t + 11 * index + 3 * e).astype(a.dtype)
            cache = rcache.put(cache, forward, index, keys, values)
            visible[index] = rcache.get(cache, forward, index)
    return cache, forward, status, read, visible


def _fold(layer: int, name: str, state: jax.Array, tokens: jax.Array, forward: rcache.Forward) -> tuple:
    """The state after all real tokens of each row, and after `forward.capture_offsets` of them."""
    wide = (-1,) + (1,) * (state.ndim - 1)
    j = jnp.arange(int(np.prod(state.shape[1:])), dtype=jnp.int32).reshape(state.shape[1:])

    def one(state: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, real = inputs
        if name == "conv":
            channels = jnp.arange(state.shape[2], dtype=jnp.int32)
            newest = (token[:, None] + 7 * layer + channels)[:, None].astype(state.dtype)
            new = jnp.concatenate([state[:, 1:], newest], axis=1)
        else:
            new = ((3 * state.astype(jnp.int32) + token.reshape(wide) + 7 * layer + j) % 251).astype(state.dtype)
        state = jnp.where(real.reshape(wide), new, state)
        return state, state

    state, after = jax.lax.scan(one, state, (tokens.T, forward.token_mask.T))
    offsets = jnp.maximum(forward.capture_offsets - 1, 0)
    return state, jax.vmap(lambda states, at: states[at], in_axes=(1, 0))(after, offsets)


@dataclasses.dataclass(frozen=True)
class History:
    """What one sequence should hold. `folded` differs from `tokens` only after a removal from the middle:
    `folded[: reach[i]]` went into the state when `tokens[i]` was the last token."""

    tokens: tuple[int, ...] = ()
    folded: tuple[int, ...] = ()
    reach: tuple[int, ...] = ()

    def extend(self, tokens: Sequence[int]) -> History:
        folded = self.folded + tuple(tokens)
        reach = self.reach + tuple(range(len(self.folded) + 1, len(folded) + 1))
        return History(self.tokens + tuple(tokens), folded, reach)

    def prefix(self, length: int) -> History:
        return History(self.tokens[:length], self.folded_at(length), self.reach[:length])

    def without(self, begin: int, end: int) -> History:
        return History(self.tokens[:begin] + self.tokens[end:], self.folded, self.reach[:begin] + self.reach[end:])

    def folded_at(self, length: int) -> tuple[int, ...]:
        if length == len(self.tokens):
            return self.folded
        return self.folded[: self.reach[length - 1]] if length else ()


def poisoned(cache: rcache.Cache) -> rcache.Cache:
    """The cache with NaN in every element of its payload."""
    nan = lambda leaf: jnp.full_like(leaf, jnp.nan)  # noqa: E731
    states, keys, values = (jax.tree.map(nan, part) for part in (cache.states, cache.keys, cache.values))
    return cache.replace(states=states, keys=keys, values=values)


def in_chunks(
    texts: Mapping[int, Sequence[int]], starts: Mapping[int, int], *, chunk: int, captures: Mapping[int, Sequence[int]]
) -> Iterator[tuple[dict[int, Sequence[int]], dict[int, list[int]]]]:
    """Passes of at most `chunk` tokens, all sequences side by side: the tokens of each, and the offsets to capture.

    `starts`: how many tokens a sequence holds before; `captures`: lengths of a sequence to keep a checkpoint at.
    """
    for begin in range(0, max(map(len, texts.values())), chunk):
        now = {sequence: text[begin : begin + chunk] for sequence, text in texts.items() if len(text) > begin}
        offsets = {s: [length - starts[s] - begin for length in captures.get(s, ())] for s in now}
        yield now, {s: [offset for offset in offsets[s] if 1 <= offset <= len(now[s])] for s in now}


class Lineage(Pair):
    """One cache through a scenario. Its payload begins as NaN, so that nothing unwritten can pass for a value."""

    def __init__(self, config: rcache.Config) -> None:
        super().__init__(config)
        self.model = Model(config)
        self.cache = poisoned(self.cache)
        self.histories = [History() for _ in range(config.max_sequences)]

    # Operations; each says what it expects

    def run(
        self,
        rows: Mapping[int, Sequence[int]],
        *,
        captures: Mapping[int, Sequence[int]] | None = None,
        positions: Mapping[int, Sequence[int]] | None = None,
        status: Status = Status.OK,
        num_rows: int | None = None,
        check: bool = True,
    ) -> tuple[Any, dict, dict]:
        """One pass: the next tokens of each sequence, in rows of this order, padded to `num_rows`.

        Returns the plan, and what the layers read and could see. `check=False`: only the statuses are compared.
        """
        sequences, tokens, batch = self.batch(rows, captures=captures, positions=positions, num_rows=num_rows)
        before = self.cache
        self.cache, forward, got, read, visible = step(self.cache, jnp.asarray(tokens), batch)
        expected, plans = self.reference.forward(
            sequences.tolist(),
            tokens.tolist(),
            self.model,
            lengths=np.asarray(batch.lengths).tolist(),
            positions=np.asarray(batch.positions).tolist(),
            captures=np.asarray(batch.captures).tolist(),
        )
        assert Status(int(got)) is expected is status
        if not check:
            for sequence, new in rows.items():
                self.histories[sequence] = self.histories[sequence].extend(new)
            return forward, read, visible
        if status is not Status.OK:
            self._unchanged(before)
        for plan in plans:
            self._same_pass(sequences.tolist().index(plan.sequence), forward, plan, read, visible)
        for leaf in jax.tree.leaves((read, visible)):
            assert np.all(np.isfinite(np.asarray(leaf, np.float32))), "stale payload came out of the cache"
        if status is Status.OK:
            for row, (sequence, new) in enumerate(rows.items()):
                if new:
                    self._read_before(sequence, row, read)
                    self.histories[sequence] = self.histories[sequence].extend(new)
                    self._seen_by_last(sequence, row, len(new) - 1, visible)
        self.check()
        self.check_oracle()
        return forward, read, visible

    def batch(
        self,
        rows: Mapping[int, Sequence[int]],
        *,
        captures: Mapping[int, Sequence[int]] | None = None,
        positions: Mapping[int, Sequence[int]] | None = None,
        num_rows: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray, rcache.Batch]:
        """Sequence ids i32[B], tokens i32[B, T] and the batch of one pass."""
        num_rows = self.config.max_sequences if num_rows is None else num_rows
        sequences = np.full(num_rows, -1, np.int32)
        lengths = np.zeros(num_rows, np.int32)
        tokens = np.full((num_rows, CHUNK), 89, np.int32)  # padding that would show if it were folded in
        asked = np.full((num_rows, NUM_CAPTURES), -1, np.int32)
        given = np.full((num_rows, CHUNK), -1, np.int32)
        for row, (sequence, new) in enumerate(rows.items()):
            sequences[row], lengths[row], tokens[row, : len(new)] = sequence, len(new), new
            offsets = (captures or {}).get(sequence, ())
            asked[row, : len(offsets)] = offsets
            claimed = (positions or {}).get(sequence, ())
            given[row, : len(claimed)] = claimed
        return sequences, tokens, rcache.make_batch(sequences, lengths, CHUNK, positions=given, captures=asked)

    def prefill(
        self, texts: Mapping[int, Sequence[int]], *, chunk: int = CHUNK, captures: Mapping[int, Sequence[int]] = {}
    ) -> None:
        """Passes of at most `chunk` tokens, all sequences side by side. `captures`: tokens of the sequence so far."""
        starts = {sequence: self.length(sequence) for sequence in texts}
        for now, offsets in in_chunks(texts, starts, chunk=chunk, captures=captures):
            self.run(now, captures=offsets)

    def fork(self, src: int, dst: int, length: int | None = None, *, got: int | None = None) -> None:
        """`copy_prefix`, which must give `got` tokens (all of `length`, unless said otherwise)."""
        length = len(self.tokens(src)) if length is None else length
        self.copy_prefix(src, dst, length)
        self.histories[dst] = self.histories[src].prefix(length if got is None else got)
        self.check_oracle()

    def cut(self, sequence: int, begin: int = 0, end: int | None = None, *, status: Status = Status.OK) -> None:
        """`remove`, with this outcome."""
        shift = None if end is None else add_offset
        assert int(rcache.remove(self.cache, sequence, begin, end, shift=shift)[1]) == status
        self.remove(sequence, begin, end)
        if status is Status.OK:
            history = self.histories[sequence]
            length = len(history.tokens)
            if end is None or end >= length:
                self.histories[sequence] = history.prefix(min(begin, length))
            elif begin < end:
                self.histories[sequence] = history.without(begin, end)
        self.check_oracle()

    def permute(self, sources: list[int]) -> None:
        """`reorder`."""
        self.reorder(sources)
        old = self.histories
        self.histories = [old[source] if source >= 0 else History() for source in sources]
        self.check_oracle()

    def empty(self) -> None:
        """Removes every sequence; everything is free again."""
        for sequence, history in enumerate(self.histories):
            if history.tokens:
                self.cut(sequence)
        virgin = rcache.init(self.config)
        assert int(rcache.free_slots(self.cache)) == int(rcache.free_slots(virgin))
        assert [int(n) for n in rcache.free_pages(self.cache)] == [int(n) for n in rcache.free_pages(virgin)]

    # Questions

    def tokens(self, sequence: int) -> tuple[int, ...]:
        return self.histories[sequence].tokens

    def resume(self, sequence: int, target: int) -> int:
        """`prepare_restore`; `can_resume` is asked the same, and both leave the cache as it is."""
        self.ask(sequence, target)
        return int(rcache.prepare_restore(self.cache, sequence, target))

    def kept(self, sequence: int) -> list[int]:
        """Positions of the checkpoints of a sequence."""
        return [int(p) for p in np.asarray(rcache.checkpoint_positions(self.cache))[sequence] if p >= 0]

    def states(self, sequence: int) -> States:
        """The live states of a sequence, out of the payload."""
        return self._in_slot(int(np.asarray(rcache.slots(self.cache))[sequence]))

    def checkpoint(self, sequence: int, position: int) -> States:
        """The states kept at a position."""
        k = self.kept(sequence).index(position)
        return self._in_slot(int(np.asarray(self.cache.table.sequences.checkpoints.slots)[sequence, k]))

    def _in_slot(self, slot: int) -> States:
        assert slot >= 0
        return {
            (layer, group.name): np.asarray(self.cache.states[group.key])[row, slot]
            for group in self.config.state_groups
            for row, layer in enumerate(group.layers)
        }

    # The oracle

    def check_oracle(self) -> None:
        for sequence, history in enumerate(self.histories):
            length = len(history.tokens)
            same(f"length of sequence {sequence}", np.asarray(rcache.lengths(self.cache))[sequence], length)
            if not length:
                assert int(np.asarray(rcache.slots(self.cache))[sequence]) == -1 and not self.kept(sequence)
                continue
            if self.config.has_states:
                same_states(f"sequence {sequence}", self.states(sequence), self.model.prefill(history.folded))
            for position in self.kept(sequence):
                assert position < length, "a checkpoint past the end"
                expected = self.model.prefill(history.folded_at(position + 1))
                same_states(f"sequence {sequence}, {position}", self.checkpoint(sequence, position), expected)
            self._stored(sequence, history.tokens)

    def _stored(self, sequence: int, tokens: tuple[int, ...]) -> None:
        size, positions = self.config.page_size, np.arange(len(tokens))
        for group in self.config.kv_groups:
            pages = np.asarray(self.cache.table.page_tables[group.page_group].pages)[sequence, positions // size]
            assert np.all(pages >= 0)
            for row, layer in enumerate(group.layers):
                for buffer, fresh in ((self.cache.keys, self.model.key), (self.cache.values, self.model.value)):
                    stored = np.asarray(buffer[group.key])[:, row, pages, positions % size].swapaxes(0, 1)
                    expected = np.stack([fresh(layer, token, p) for p, token in enumerate(tokens)])
                    same(f"stored of sequence {sequence} by layer {layer}", stored, expected)

    def _read_before(self, sequence: int, row: int, read: dict) -> None:
        if self.config.has_states and len(read):
            expected = self.model.prefill(self.histories[sequence].folded)
            for layer, states in read.items():
                for name, state in states.items():
                    same(f"read for sequence {sequence}", np.asarray(state)[row], expected[layer, name])

    def _seen_by_last(self, sequence: int, row: int, column: int, visible: dict) -> None:
        tokens = self.tokens(sequence)
        for layer, (keys, values, mask) in visible.items():
            mask = np.asarray(mask)[row, column]
            expected = [self.model.key(layer, token, p) for p, token in enumerate(tokens)]
            same("keys visible", np.asarray(keys)[row][mask], np.stack(expected))
            expected = [self.model.value(layer, token, p) for p, token in enumerate(tokens)]
            same("values visible", np.asarray(values)[row][mask], np.stack(expected))

    def _unchanged(self, before: rcache.Cache) -> None:
        same_caches(before, self.cache)


def same_states(what: str, got: States, expected: States) -> None:
    assert got.keys() == expected.keys()
    for leaf, state in expected.items():
        same(f"{what}, state {leaf}", got[leaf], state)
        assert got[leaf].dtype == state.dtype


def same_caches(expected: Any, got: Any) -> None:
    """Bit-equal, every leaf, NaN included."""
    assert jax.tree.structure(expected) == jax.tree.structure(got)
    for old, new in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        old, new = np.asarray(old), np.asarray(new)
        assert old.dtype == new.dtype and old.shape == new.shape and old.tobytes() == new.tobytes()


def twice(config: rcache.Config) -> Iterator[tuple[Lineage, Any]]:
    """A scenario's cache, cold; then the same cache emptied, warm, with other tokens. Emptied again, all is free.

    Yields the lineage and `text(n)`, which makes up `n` tokens.
    """
    lineage, random = Lineage(config), np.random.default_rng(7)
    for _ in range(2):
        yield lineage, lambda n: random.integers(1, 89, n).tolist()
        lineage.empty()
