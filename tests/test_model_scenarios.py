"""The scenarios that need a model, on every family: whatever was done to a sequence, it equals a fresh prefill.

`Lineage` takes one cache through a scenario, and knows by plain lists which tokens each sequence holds. After every
operation it holds all that the model remembers of them against a prefill of exactly these tokens, in one pass of a
cache that nobody has used: logits, each state of each layer, checkpoints, keys and values. So most tests here only say
what is done, and what else must hold. Payload begins as NaN. Scenarios run twice on one cache: cold, and then warm,
over what they left behind.

What `verify.py` checks of every family (`test_models.py`) is not repeated here, nor what needs no model
(`test_scenarios.py`). All passes are of four shapes, so that there are four programs of a family to compile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decoding
import models
import rcache
from models.attention import Attention
from rcache import Status, table as tables
from tests.oracle import in_chunks, poisoned, same_caches as same_bits

HF = Path(__file__).parent / "data" / "hf"
FAMILIES = tuple(
    os.environ.get("RCACHE_FAMILIES", "granitemoehybrid lfm2 nemotron_h qwen3_5 qwen3_next recurrent_gemma").split()
)

CONTEXT = 64
CHUNK = 8
NUM_CAPTURES = 4
NUM_SEQUENCES = 8
NUM_SLOTS = 20
POLICY = rcache.CheckpointPolicy(count=6, min_position=5, interval=10)
PINNED = [1, 3, 5, 7, 9, 11]  # six checkpoints in two passes
FILLER = 89  # a token that would show if padding took part in anything

# Shapes of a pass: rows, tokens, captures.
CHUNKS = (NUM_SEQUENCES, CHUNK, NUM_CAPTURES)
DECODE = (NUM_SEQUENCES, 1, 0)
THREE_ROWS = (3, 20, 0)
ONE_ROW = (1, CONTEXT, 0)

TOLERANCE = 1e-4  # as in verify.py: of a logit
# Of a state, key or value as a part of the largest one. Up to 1.0e-4 was seen, in keys of Qwen3-Next.
TOLERANCE_OF_MEMORY = 3e-4
# These two normalise what nearly cancels out: now and then a token's logits are that far off from those in float64 even
# in one pass (up to 7e-4 in 40 texts of 40 tokens).
TOLERANCE_OF_LOGITS = {"qwen3_5": 2e-3, "qwen3_next": 2e-3}

Leaves = dict[tuple[int, str], np.ndarray]  # by layer and name


class Memory(NamedTuple):
    """What a model remembers of a sequence of `length` tokens."""

    length: int
    states: Leaves
    kept: Leaves  # "keys" and "values": [H, X, D] of the last X tokens, of all where there is no window


class Family:
    """One model, and one configuration of a cache for all scenarios. `logits` and `memory` are the oracle."""

    def __init__(self, folder: Path) -> None:
        self.tolerance = TOLERANCE_OF_LOGITS.get(folder.name, TOLERANCE)
        model = models.load(folder)
        self.model = decoding.split(model)
        self.vocab_size = model.config.vocab_size
        layers = model.cache_layers()
        self.config = rcache.Config(
            layers, NUM_SEQUENCES, CONTEXT, page_size=4, num_slots=NUM_SLOTS, checkpoints=POLICY
        )
        mixers = [block.mixer for block in model.layers]
        [self.rope] = {mixer.rope for mixer in mixers if isinstance(mixer, Attention)}  # Rope, or None
        conv_states = {state for layer in layers for name, state in layer.states if name == "conv"}
        [self.conv_memory] = {state.shape[0] for state in conv_states}  # inputs that a convolution remembers
        self._fresh: dict[tuple[int, ...], tuple[np.ndarray, Memory]] = {}

    @property
    def shift(self) -> rcache.Shift:
        """How keys move with their token."""
        return rcache.RopeShift(inverse_frequencies=self.rope.frequencies) if self.rope else rcache.no_shift

    def twice(self) -> Iterator[tuple[Lineage, Any]]:
        """A scenario's cache, cold; then the same one emptied, warm, with other tokens. Emptied again, all is free.

        Yields the lineage and `text(n)`, which makes up `n` tokens.
        """
        lineage, random = Lineage(self), np.random.default_rng(7)
        for _ in range(2):
            yield lineage, lambda n: random.integers(0, self.vocab_size, n).tolist()
            lineage.empty()

    def fresh(self, tokens: Sequence[int]) -> tuple[np.ndarray, Memory]:
        """Logits f32[L, V] and memory after `tokens`, run in one pass from nothing."""
        key = tuple(tokens)
        if key not in self._fresh:
            virgin = Lineage(self)
            logits = virgin.run({0: key}, shape=ONE_ROW, check=False)[0]
            self._fresh[key] = logits, virgin.memory(0)
        return self._fresh[key]

    def same_logits(self, got: np.ndarray, expected: np.ndarray) -> None:
        assert got.shape == expected.shape
        error = np.max(np.abs(got - expected))
        assert error <= self.tolerance, f"logits are off by {error}"

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self.fresh(tokens)[0]

    def memory(self, tokens: Sequence[int]) -> Memory:
        return self.fresh(tokens)[1]

    def without(self, memory: Memory, begin: int, end: int) -> Memory:
        """What a removal of `[begin, end)` leaves of a memory: states and values are as they were, the keys behind it
        are turned back to their new positions, and all that is approximate."""
        kept = {}
        for (layer, name), leaf in memory.kept.items():
            positions = np.arange(memory.length - leaf.shape[1], memory.length)
            if name == "keys" and self.rope is not None:
                leaf = np.where((positions >= end)[:, None], self._turned(leaf, begin - end), leaf)
            kept[layer, name] = leaf[:, (positions < begin) | (positions >= end)]
        return Memory(memory.length - (end - begin), memory.states, kept)

    def _turned(self, keys: np.ndarray, offset: int) -> np.ndarray:
        """Keys [..., D] by an offset of positions: pairs are complex numbers, and positions angles."""
        frequencies = np.array(self.rope.frequencies)
        first, second, rest = np.split(keys, [len(frequencies), 2 * len(frequencies)], axis=-1)
        pairs = (first + 1j * second) * np.exp(1j * offset * frequencies)
        return np.concatenate([pairs.real, pairs.imag, rest], axis=-1).astype(keys.dtype)


class Lineage:
    """One cache through a scenario; nothing unwritten can pass for a value, since its payload begins as NaN."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.config = family.config
        self.cache = poisoned(rcache.init(self.config))
        self.texts: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
        # Prefixes longer than this are approximate: tokens were cut out before their end.
        self.exact = [CONTEXT] * NUM_SEQUENCES
        self.num_run = 0

    # Operations; each checks all sequences

    def run(
        self,
        rows: Mapping[int, Sequence[int]],
        *,
        captures: Mapping[int, Sequence[int]] | None = None,
        positions: Mapping[int, Sequence[int]] | None = None,
        shape: tuple[int, int, int] = CHUNKS,
        status: Status = Status.OK,
        check: bool = True,
    ) -> dict[int, np.ndarray]:
        """One pass: the next tokens of each sequence, in rows of this order. Returns logits of each sequence."""
        tokens, batch = self.batch(rows, captures=captures, positions=positions, shape=shape)
        before = None if status is Status.OK else jax.tree.map(np.array, self.cache)
        self.cache, logits, got = decoding.run(self.family.model, self.cache, tokens, batch)
        assert Status(int(got)) is status
        logits = np.asarray(logits)
        assert np.isfinite(logits).all(), "stale payload, or padding that is not finite"
        if status is not Status.OK:
            same_bits(before, self.cache)
            return {}
        answers = {}
        for row, (sequence, new) in enumerate(rows.items()):
            answers[sequence] = logits[row, : len(new)]
            self.texts[sequence] = self.texts[sequence] + list(new)
            self.num_run += len(new)
            if check and new and self.is_exact(sequence):
                expected = self.family.logits(self.tokens(sequence))[-len(new) :]
                self.family.same_logits(answers[sequence], expected)
        if check:
            self.check()
        return answers

    def decode(self, tokens: Mapping[int, int], *, check: bool = True) -> dict[int, np.ndarray]:
        """One token of each sequence, in the program that decodes. Returns the logits f32[V] behind it."""
        answers = self.run({s: [token] for s, token in tokens.items()}, shape=DECODE, check=check)
        return {sequence: logits[0] for sequence, logits in answers.items()}

    def prefill(
        self, texts: Mapping[int, Sequence[int]], *, chunk: int = CHUNK, captures: Mapping[int, Sequence[int]] = {}
    ) -> None:
        """Passes of at most `chunk` tokens, side by side. `captures`: lengths of a sequence to keep a checkpoint at."""
        starts = {sequence: len(self.tokens(sequence)) for sequence in texts}
        for now, offsets in in_chunks(texts, starts, chunk=chunk, captures=captures):
            self.run(now, captures=offsets)

    def fork(self, src: int, dst: int, length: int | None = None, *, got: int | None = None) -> None:
        """`copy_prefix`, which must give `got` tokens (all of `length`, unless said otherwise)."""
        length = len(self.tokens(src)) if length is None else length
        got = length if got is None else got
        self.cache, copied, status = rcache.copy_prefix(self.cache, src, dst, length)
        assert (int(copied), Status(int(status))) == (got, Status.OK)
        self.texts[dst], self.exact[dst] = self.tokens(src)[:got], self.exact[src]
        self._forget_cuts(dst)
        self.check()

    def cut(self, sequence: int, begin: int = 0, end: int | None = None, *, status: Status = Status.OK) -> None:
        """`remove`, with this outcome."""
        before = None if status is Status.OK else jax.tree.map(np.array, self.cache)
        shift = None if end is None else self.family.shift
        self.cache, got = rcache.remove(self.cache, sequence, begin, end, shift=shift)
        assert Status(int(got)) is status
        if status is not Status.OK:
            same_bits(before, self.cache)
            return
        text = self.tokens(sequence)
        if end is None or end >= len(text):
            self.texts[sequence] = text[:begin]
            self._forget_cuts(sequence)
        else:
            self.texts[sequence] = text[:begin] + text[end:]
            self.exact[sequence] = min(begin, self.exact[sequence])
        self.check()

    def cut_exactly(self, sequence: int, begin: int, end: int) -> None:
        """`remove_exact`, and the tokens that it says are to be run again."""
        rest = self.tokens(sequence)[end:]
        self.cache, num_rerun, status = rcache.remove_exact(self.cache, sequence, begin, end)
        assert (int(num_rerun), Status(int(status))) == (len(rest), Status.OK)
        self.texts[sequence] = self.tokens(sequence)[:begin]
        self._forget_cuts(sequence)
        self.check()
        self.prefill({sequence: rest})

    def permute(self, sources: Sequence[int]) -> None:
        """`reorder`."""
        self.cache, status = rcache.reorder(self.cache, np.array(sources, np.int32))
        rcache.raise_if_error(status)
        texts, exact = self.texts, self.exact
        self.texts = [texts[source] if source >= 0 else [] for source in sources]
        self.exact = [exact[source] if source >= 0 else CONTEXT for source in sources]
        self.check()

    def ask(self, sequence: int, prompt: Sequence[int], *, captures: Sequence[int] = ()) -> int:
        """A turn as a server takes it: goes back to where the prompt can be resumed, runs the rest, says how much."""
        known = self.tokens(sequence)
        common = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))
        length = self.resume(sequence, min(common, len(prompt) - 1))
        self.cut(sequence, length)
        before = self.num_run
        self.prefill({sequence: prompt[length:]}, captures={sequence: captures})
        assert self.tokens(sequence) == list(prompt)
        return self.num_run - before

    def empty(self) -> None:
        """Removes every sequence; everything is free again."""
        for sequence, text in enumerate(self.texts):
            if text:
                self.cut(sequence)
        virgin = rcache.init(self.config)
        assert int(rcache.free_slots(self.cache)) == int(rcache.free_slots(virgin))
        assert [int(n) for n in rcache.free_pages(self.cache)] == [int(n) for n in rcache.free_pages(virgin)]

    def reset(self) -> None:
        """`reset`: everything is empty, and slots are handed out from the first; payload stays what it was."""
        self.cache = rcache.reset(self.cache)
        self.texts, self.exact = [[] for _ in range(NUM_SEQUENCES)], [CONTEXT] * NUM_SEQUENCES
        self.check()

    def batch(
        self,
        rows: Mapping[int, Sequence[int]],
        *,
        captures: Mapping[int, Sequence[int]] | None = None,
        positions: Mapping[int, Sequence[int]] | None = None,
        shape: tuple[int, int, int] = CHUNKS,
        filler: int = FILLER,
    ) -> tuple[jax.Array, rcache.Batch]:
        """Tokens i32[B, T] and the batch of one pass."""
        num_rows, num_tokens, num_captures = shape
        sequences, lengths = np.full(num_rows, -1, np.int32), np.zeros(num_rows, np.int32)
        tokens, given = np.full((num_rows, num_tokens), filler, np.int32), np.full((num_rows, num_tokens), -1, np.int32)
        asked = np.full((num_rows, num_captures), -1, np.int32)
        for row, (sequence, new) in enumerate(rows.items()):
            sequences[row], lengths[row], tokens[row, : len(new)] = sequence, len(new), new
            for filled, wanted in ((asked, captures), (given, positions)):
                values = (wanted or {}).get(sequence, ())
                filled[row, : len(values)] = values
        batch = rcache.make_batch(sequences, lengths, num_tokens, positions=given, captures=asked)
        return jnp.asarray(tokens), batch

    # Questions

    def tokens(self, sequence: int) -> list[int]:
        return self.texts[sequence]

    def is_exact(self, sequence: int) -> bool:
        return len(self.tokens(sequence)) <= self.exact[sequence]

    def resume(self, sequence: int, target: int) -> int:
        return int(rcache.prepare_restore(self.cache, sequence, target))

    def checkpoints(self, sequence: int) -> list[int]:
        """Lengths at which the states of a sequence were kept."""
        return [int(p) + 1 for p in np.asarray(rcache.checkpoint_positions(self.cache))[sequence] if p >= 0]

    def memory(self, sequence: int) -> Memory:
        """What the payload has of a sequence."""
        states = self._in_slot(int(rcache.slots(self.cache)[sequence]))
        kept = {where: array[index].copy() for where, array, index in self._kept(sequence)}
        return Memory(len(self.tokens(sequence)), states, kept)

    def checkpoint(self, sequence: int, length: int) -> Leaves:
        """The states kept at a length."""
        k = self.checkpoints(sequence).index(length)
        return self._in_slot(int(self.cache.table.sequences.checkpoints.slots[sequence, k]))

    def everything(self, sequence: int) -> tuple:
        """All that is a sequence's own: its memory, and its checkpoints by length."""
        kept = {length: self.checkpoint(sequence, length) for length in self.checkpoints(sequence)}
        return self.memory(sequence), kept

    def abandoned(self) -> Lineage:
        """A copy, for what is tried and never looked at again: the passes here donate the cache they are given."""
        copy = Lineage(self.family)
        copy.cache = jax.tree.map(jnp.copy, self.cache)
        copy.texts, copy.exact = list(self.texts), list(self.exact)
        return copy

    @classmethod
    def holding(cls, family: Family, memory: Memory) -> Lineage:
        """A virgin cache whose sequence 0 holds this memory, wherever it comes from."""
        lineage = cls(family)
        lineage.prefill({0: [0] * memory.length})
        lineage.exact[0] = 0
        cache = lineage.cache
        states, keys, values = jax.tree.map(np.array, (cache.states, cache.keys, cache.values))
        slot = int(rcache.slots(cache)[0])
        lineage.cache = cache.replace(states=states, keys=keys, values=values)
        for where, array, index in lineage._states(slot):
            array[index] = memory.states[where]
        for where, array, index in lineage._kept(0):
            there, new = array[index], memory.kept[where]
            num_tokens = min(there.shape[1], new.shape[1])  # of a window, each may have more than it needs
            there[:, -num_tokens:] = new[:, -num_tokens:]
            array[index] = there
        one = jnp.zeros((), jnp.int32)
        record = tables.read(cache.table, one).replace(approximate=jnp.ones((), bool))
        table = tables.write(cache.table, one, record)
        lineage.cache = jax.tree.map(jnp.asarray, lineage.cache.replace(table=table))
        return lineage

    # The oracle

    def check(self) -> None:
        lengths, approximate = np.asarray(rcache.lengths(self.cache)), np.asarray(rcache.approximate(self.cache))
        of_checkpoints = np.asarray(rcache.checkpoint_approximate(self.cache))
        for sequence, text in enumerate(self.texts):
            what = f"sequence {sequence}"
            assert lengths[sequence] == len(text), what
            assert approximate[sequence] == (not self.is_exact(sequence)), what
            if not text:
                assert int(rcache.slots(self.cache)[sequence]) == -1 and not self.checkpoints(sequence), what
            elif self.is_exact(sequence):
                close_memories(what, self.memory(sequence), self.family.memory(text))
            for k, length in enumerate(self.checkpoints(sequence)):
                assert length <= len(text), f"{what}: a checkpoint past the end"
                assert of_checkpoints[sequence, k] == (length > self.exact[sequence]), what
                if length <= self.exact[sequence]:
                    expected = self.family.memory(text[:length]).states
                    close_leaves(f"{what}, kept at {length}", self.checkpoint(sequence, length), expected)

    def _in_slot(self, slot: int) -> Leaves:
        assert slot >= 0
        return {where: array[index].copy() for where, array, index in self._states(slot)}

    def _states(self, slot: int) -> Iterator[tuple[tuple[int, str], np.ndarray, tuple]]:
        """What is in a slot: the layer and name, and where it is, as an array and an index."""
        for group in self.config.state_groups:
            for row, layer in enumerate(group.layers):
                yield (layer, group.name), np.asarray(self.cache.states[group.key]), (row, slot)

    def _kept(self, sequence: int) -> Iterator[tuple[tuple[int, str], np.ndarray, tuple]]:
        """As `_states`, the keys and values [H, X, D]. A window keeps at least what the next token may see."""
        length = len(self.tokens(sequence))
        for group in self.config.kv_groups:
            table, pages = self.cache.table.page_tables[group.page_group], self.config.page_groups[group.page_group]
            first = int(self.cache.table.sequences.first[group.page_group][sequence])
            assert first <= (0 if pages.span is None else max(0, length - pages.span))
            positions = np.arange(first, length)
            held = np.asarray(table.pages)[sequence, positions // self.config.page_size]
            assert (held >= 0).all()
            for row, layer in enumerate(group.layers):
                index = (slice(None), row, held, positions % self.config.page_size)
                yield (layer, "keys"), np.asarray(self.cache.keys[group.key]), index
                yield (layer, "values"), np.asarray(self.cache.values[group.key]), index

    def _forget_cuts(self, sequence: int) -> None:
        if self.is_exact(sequence):
            self.exact[sequence] = CONTEXT


def close(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    error = np.max(np.abs(got - expected)) / np.max(np.abs(expected))
    assert error <= TOLERANCE_OF_MEMORY, f"{what} is off by {error} of the largest value"  # not so for NaN


def close_leaves(what: str, got: Leaves, expected: Leaves) -> None:
    assert got.keys() == expected.keys()
    for where, leaf in expected.items():
        assert got[where].dtype == leaf.dtype == np.float32
        close(f"{what}: {where}", got[where], leaf)


def close_memories(what: str, got: Memory, expected: Memory) -> None:
    assert got.length == expected.length
    close_leaves(what, got.states, expected.states)
    close_leaves(what, got.kept, {w: leaf[:, -got.kept[w].shape[1] :] for w, leaf in expected.kept.items()})


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    yield Family(HF / request.param)
    jax.clear_caches()  # see conftest.py: programs of six families are many


def pin(cache: Lineage, text: Any) -> None:
    """Sequences 6 and 7, with as many checkpoints as may be, so that six slots are left for other sequences."""
    cache.prefill({6: text(16), 7: text(16)}, captures={6: PINNED, 7: PINNED})
    assert int(rcache.free_slots(cache.cache)) == 6


def fill(cache: Lineage, text: Any) -> None:
    """The same, and six sequences of 3 tokens: there are as many slots as there must be, and none is free."""
    pin(cache, text)
    cache.run({sequence: text(3) for sequence in range(6)})
    assert int(rcache.free_slots(cache.cache)) == 0


# Stale state


@pytest.mark.parametrize("passes", [(1, 1, 1), (7,), (8, 8, 3), (2,)], ids=["decode", "prefill", "chunks", "few"])
def test_freed_slot_starts_from_zero(family, passes):
    """A sequence that moves into the only free slot equals a fresh one, on every path through the layers."""
    for cache, text in family.twice():
        fill(cache, text)
        for sequence in (0, 2):
            cache.cut(sequence)
            assert int(rcache.free_slots(cache.cache)) == 1
            for num_tokens in passes:
                cache.run({sequence: text(num_tokens)}, shape=DECODE if num_tokens == 1 else CHUNKS)


def test_preempted_sequence_is_recomputed_from_the_beginning(family):
    """Pushed out under pressure and run again from position 0, it forgets what its slot held."""
    for cache, text in family.twice():
        fill(cache, text)
        tokens = text(13)
        cache.cut(1)
        cache.prefill({1: tokens})
        before = cache.memory(1)
        cache.cut(1)
        cache.run({1: tokens[:8]}, positions={1: range(8)})
        cache.run({1: tokens[8:]}, positions={1: range(8, 13)})
        same_bits(cache.memory(1), before)


def test_checkpoints_give_way_to_a_new_sequence(family):
    """Every slot is taken: a checkpoint's becomes that of a new sequence, which must not see what it held."""
    for cache, text in family.twice():
        pin(cache, text)
        cache.run({sequence: text(8) for sequence in range(4)})
        cache.decode(dict.fromkeys(range(4), 7))  # leaves the state at 8 to a checkpoint, and needs another slot
        assert cache.checkpoints(6) == cache.checkpoints(7) == PINNED[1:]
        cache.run({4: text(2), 5: text(7)})
        assert cache.checkpoints(6) == cache.checkpoints(7) == PINNED[2:]
        cache.decode({4: 5, 5: 6})


def test_reset_leaves_nothing_behind(family):
    """Everything at once is emptied in the middle of its life; the payload is still there and plays no part."""
    for cache, text in family.twice():
        fill(cache, text)
        cache.reset()
        cache.run({6: text(5), 0: text(8)})
        cache.decode({7: 3, 6: 4})


# Padding


def test_padded_batch_equals_the_unpadded_one(family):
    """Three rows padded to eight, in length too, equal three rows: the last one, slot 0 and the last slot included."""
    for cache, text in family.twice():
        fill(cache, text)
        cache.cut(4)
        rows = {0: text(3), 7: text(8), 4: text(1)}
        narrow = cache.abandoned()
        answers, padded = narrow.run(rows, shape=THREE_ROWS), cache.run(rows)
        same_bits(narrow.cache.table, cache.cache.table)
        for sequence in rows:
            family.same_logits(padded[sequence], answers[sequence])
            close_memories("padded", cache.memory(sequence), narrow.memory(sequence))
        for sequence in (1, 2, 3, 5, 6):
            same_bits(cache.everything(sequence), narrow.everything(sequence))


def test_what_pads_a_batch_does_not_matter(family):
    """Whichever tokens stand in the padding, no logit of a real one and nothing in the cache has another bit."""
    for cache, text in family.twice():
        cache.prefill({0: text(9), 3: text(5)})
        rows = {3: text(2), 1: text(7), 0: text(1)}
        seen = []
        for filler in (0, FILLER, 255):
            tokens, batch = cache.batch(rows, captures={1: [2, 6]}, filler=filler)
            after, logits, _ = decoding.run(cache.family.model, cache.abandoned().cache, tokens, batch)
            seen.append((after, [np.asarray(logits)[row, : len(new)] for row, new in enumerate(rows.values())]))
        same_bits(seen[0], seen[1])
        same_bits(seen[0], seen[2])


def test_sequences_left_out_are_untouched(family):
    """A batch of four, then one of two and padding: the other two keep every bit."""
    for cache, text in family.twice():
        cache.prefill({sequence: text(12) for sequence in range(4)}, captures={0: [2], 3: [5, 11]})
        before = [cache.everything(sequence) for sequence in (0, 3)]
        for _ in range(2):
            cache.run({2: text(5), 1: text(1)}, captures={2: [3]})
            cache.decode({1: 5, 2: 6})
        for sequence, everything in zip((0, 3), before, strict=True):
            same_bits(cache.everything(sequence), everything)


def test_ragged_prefill_does_not_decay_over_padding(family):
    """20, 7 and 1 tokens in rows of 20, then some again: states end with the last real token of each row."""
    for cache, text in family.twice():
        few = family.conv_memory  # one less than the width
        for lengths in [(20, 7, 1), (1, few, 20), (few - 1, 1, few)]:
            cache.run({sequence: text(n) for sequence, n in enumerate(lengths)}, shape=THREE_ROWS)


def test_ragged_prefill_of_one_row(family):
    """A batch of one row, with more padding than tokens."""
    for cache, text in family.twice():
        for num_tokens in (20, 7, 1, family.conv_memory, 1):
            cache.run({2: text(num_tokens)}, shape=ONE_ROW)


def test_one_token_row_beside_verifying_rows(family):
    """A decoding row padded to the positions of a draft equals one among its like, and one by itself."""
    for cache, text in family.twice():
        tokens = text(12)
        cache.prefill({0: tokens, 1: tokens, 2: text(9)})
        alone = cache.abandoned()
        plain = cache.decode({0: 5})[0]
        beside = cache.run({1: [5], 2: text(5)}, captures={2: [1, 2, 3, 4]})[1][0]
        alone.run({1: [5]})
        same_bits(cache.memory(1), alone.memory(1))  # the same program, and the same row of it
        family.same_logits(beside, plain)
        close_memories("padded", cache.memory(1), cache.memory(0))
        cache.decode({0: 6, 1: 6})


def test_slots_are_a_permutation_of_sequences(family):
    """Slot numbers and sequence ids are both small integers; nothing takes one for the other."""
    for cache, text in family.twice():
        cache.reset()
        for sequence in (1, 2, 3, 0):
            cache.run({sequence: text(3)})
        assert np.asarray(rcache.slots(cache.cache))[:4].tolist() == [3, 0, 1, 2]
        cache.run({1: text(2), 3: text(8)})
        cache.cut(2)
        cache.run({0: text(1), 2: text(5)})
        cache.decode({3: 1, 1: 2, 0: 3, 2: 4})


# Sharing


def test_fork_and_run_less_than_the_conv_width(family):
    """The fork's convolutions mix shared and own inputs; the source keeps every bit, and so do its checkpoints."""
    for cache, text in family.twice():
        cache.prefill({0: text(18)}, captures={0: [18]})
        before = cache.everything(0)
        for num_tokens in range(1, family.conv_memory + 1):
            cache.fork(0, 1)
            cache.run({1: text(num_tokens)})
            same_bits(cache.everything(0), before)
        cache.fork(0, 2)
        cache.decode({2: 9})
        same_bits(cache.everything(0), before)
        cache.run({0: text(1), 1: text(1), 2: text(1)})


def test_beam_search_reorder(family):
    """Sequences [2, 0, 0]: each is its source, bit for bit, and goes on by itself, also back to a checkpoint."""
    for cache, text in family.twice():
        cache.prefill({0: text(24), 1: text(9), 2: text(18)}, captures={0: [5, 22], 2: [12]})
        before = [cache.everything(sequence) for sequence in range(3)]
        cache.permute([2, 0, 0, -1, -1, -1, -1, -1])
        for sequence, source in enumerate([2, 0, 0]):
            same_bits(cache.everything(sequence), before[source])
        for _ in range(2):
            cache.decode(dict(enumerate(text(3))))
        cache.cut(1, 22)
        cache.run({0: text(2), 1: text(3), 2: text(4)})


def test_decoded_together_equals_decoded_alone(family):
    """Four sequences in one batch equal each alone."""
    for cache, text in family.twice():
        prompts, answers = [text(n) for n in (3, 8, 5, 1)], np.array([text(6) for _ in range(4)]).T.tolist()
        cache.run(dict(enumerate(prompts)))
        together = [cache.decode(dict(enumerate(tokens))) for tokens in answers]
        for sequence, prompt in enumerate(prompts):
            alone = Lineage(family)
            alone.run({0: prompt})
            for tokens, logits in zip(answers, together, strict=True):
                family.same_logits(logits[sequence], alone.decode({0: tokens[sequence]})[0])
            close_memories("alone", cache.memory(sequence), alone.memory(0))
            assert cache.checkpoints(sequence) == alone.checkpoints(0)


# Checkpoint labels


def test_captures_inside_chunks_of_a_batch(family):
    """Prefills of 25, 35 and 45 tokens in passes of 6, captures at odd places: those of each alone; each is resumed."""
    for cache, text in family.twice():
        texts = {0: text(25), 1: text(35), 2: text(45)}
        wanted = {0: [2, 17], 1: [18, 20, 34], 2: [1, 44]}
        cache.prefill(texts, chunk=6, captures=wanted)
        for sequence, tokens in texts.items():
            alone = Lineage(family)
            alone.prefill({0: tokens}, chunk=6, captures={0: wanted[sequence]})
            kept = cache.checkpoints(sequence)
            assert kept == alone.checkpoints(0) and set(wanted[sequence]) <= set(kept)
            for length in kept:
                close_leaves("alone", cache.checkpoint(sequence, length), alone.checkpoint(0, length))
                cache.fork(sequence, 7, length)
                cache.run({7: tokens[length : length + 3]})
                cache.decode({7: 1})


def test_chunks_do_not_divide_the_interval(family):
    """31 and 12 tokens in passes of 6 at an interval of 10, a capture wanted inside one: labels are exact."""
    for cache, text in family.twice():
        cache.prefill({0: text(31)}, chunk=6)
        assert cache.checkpoints(0) == [6, 18, 30]
        cache.prefill({0: text(12)}, chunk=6, captures={0: [34]})
        assert cache.checkpoints(0) == [6, 18, 30, 34]
        for length in (34, 18):
            cache.cut(0, length)
            cache.run({0: text(5)})


def test_two_equal_prompts_in_one_batch(family):
    """The second prompt cannot resume from what the first is only about to compute."""
    for cache, text in family.twice():
        tokens = text(8)
        assert cache.resume(0, 8) == cache.resume(1, 8) == 0
        cache.run({0: tokens, 1: tokens})
        assert cache.checkpoints(0) == cache.checkpoints(1) == [8]
        close_memories("second", cache.memory(1), cache.memory(0))
        cache.run({0: text(4), 1: text(3)})


def test_abandoned_pass(family):
    """Run to its end, with captures and a new sequence, and never looked at: the value before knows nothing of it."""
    for cache, text in family.twice():
        cache.prefill({0: text(4), 1: text(11)})
        before = cache.everything(1)
        cache.abandoned().run({0: text(8), 1: text(8), 2: text(3)}, captures={0: [1, 3]})
        assert cache.checkpoints(0) == [] and cache.resume(0, 3) == 0
        same_bits(cache.everything(1), before)
        cache.run({0: text(8), 2: text(3)}, captures={0: [2]})
        cache.cut(0, 6)
        cache.run({0: text(2), 1: text(2)})


def test_restored_twice(family):
    """Checkpoint, roll back, append, roll back to the same checkpoint, append something else."""
    for cache, text in family.twice():
        cache.prefill({0: text(24)}, captures={0: [21]})
        saved = cache.checkpoint(0, 21)
        for num_tokens in (8, 3, 1):
            cache.cut(0, 21)
            same_bits(cache.memory(0).states, saved)
            for _ in range(2):
                cache.run({0: text(num_tokens)}, shape=DECODE if num_tokens == 1 else CHUNKS)
            same_bits(cache.checkpoint(0, 21), saved)


def test_keys_reach_further_than_states(family):
    """45 keys match, states are few: resume at the last state before, and look again after every cut."""
    for cache, text in family.twice():
        cache.prefill({0: text(45)}, captures={0: [10, 13]})
        assert cache.checkpoints(0) == [8, 10, 13, 24, 40]
        for target, expected in [(44, 40), (39, 24), (23, 13), (12, 10), (9, 8), (7, 0)]:
            assert cache.resume(0, target) == expected
            cache.fork(0, 1, target, got=expected)
            cache.run({1: text(2)})
        cache.cut(0, 44, status=Status.NOT_RESTORABLE)
        for length in (40, 13, 8):
            cache.cut(0, length)
            cache.run({0: text(3)})


# Resume


def test_next_turn_continues(family):
    """A turn that only adds runs what it adds; one that edits the last answer goes back to the nearest checkpoint."""
    for cache, text in family.twice():
        cache.ask(0, text(27))
        for token in text(5):
            cache.decode({0: token})
        assert cache.ask(0, cache.tokens(0) + text(6)) == 6
        edited = [*cache.tokens(0)[:30], (cache.tokens(0)[30] + 1) % family.vocab_size, *text(8)]
        assert cache.checkpoints(0)[:2] == [8, 24]
        assert cache.ask(0, edited) == len(edited) - 24


def test_identical_prompt_again(family):
    """Logits need the last token again, and a state cannot step back: the checkpoint before it decides how much."""
    for cache, text in family.twice():
        tokens = text(27)
        assert cache.ask(0, tokens) == 27
        assert cache.ask(0, tokens, captures=[26]) == 3
        states = cache.memory(0).states
        assert cache.ask(0, tokens) == 1
        close_leaves("again", cache.memory(0).states, states)


@pytest.mark.parametrize(("captured", "expected"), [((1, 3, 4, 5), 3), ((1, 4, 5), 1), ((4, 5), 0), ((3,), 3), ((), 0)])
def test_checkpoints_around_a_divergence(family, captured, expected):
    """Texts part at p = 3; checkpoints at 0, p - 1, p and p + 1: none that holds the token at p is ever used."""
    for cache, text in family.twice():
        tokens = text(5)
        cache.run({0: tokens}, captures={0: captured})
        assert cache.checkpoints(0) == list(captured)
        other = [*tokens[:3], (tokens[3] + 1) % family.vocab_size, *text(4)]
        cache.fork(0, 1)
        assert cache.ask(1, other) == len(other) - expected
        assert cache.ask(0, other) == len(other) - expected
        close_memories("the fork", cache.memory(1), cache.memory(0))


def test_short_prompts(family):
    """Shorter than a page (4), than min_position (5), than the interval (10): whole, or from the beginning."""
    for cache, text in family.twice():
        for length in (1, 3, 4, 5, 6, 9):
            cache.prefill({0: text(length)})
            assert cache.checkpoints(0) == ([] if length < 6 else [min(length, CHUNK)])
            assert cache.resume(0, length - 1) == (CHUNK if length == 9 else 0)
            cache.fork(0, 1)
            cache.run({0: text(2), 1: text(8)})
            cache.cut(0)
            cache.cut(1)


def test_prefill_cancelled_and_retried(family):
    """Cancelled at 60 percent, in the middle of a pass: the retry continues after the last pass that came back."""
    for cache, text in family.twice():
        tokens = text(40)
        cache.prefill({0: tokens[:24]})
        cache.abandoned().run({0: tokens[24:32]})
        assert cache.ask(0, tokens) == 16


def test_refused_operations_while_active(family):
    """A cut to where no state was kept, a batch that does not fit: a status, and the sequence goes on as before."""
    for cache, text in family.twice():
        cache.prefill({0: text(21), 1: text(6)})
        cache.cut(0, 15, status=Status.NOT_RESTORABLE)
        cache.run({1: text(3), 0: text(3)}, positions={0: [21, 22, 24]}, status=Status.POSITION_MISMATCH)
        cache.run({1: text(3), 0: text(3)}, captures={0: [4]}, status=Status.CAPTURES_INVALID)
        cache.run({0: text(44)}, shape=ONE_ROW, status=Status.CONTEXT_OVERFLOW)
        cache.run({0: text(8), 1: text(1)})
        cache.cut(0, 8)
        cache.run({0: text(2)})


# Speculation


@pytest.mark.parametrize("accepted", range(5))
def test_draft_of_four(family, accepted):
    """Accept 0 to 4 of a draft, a plain step, reject everything: each state steps back exactly. Once, the draft ends
    on the boundary of a page."""
    for cache, text in family.twice():
        cache.prefill({0: text(11)})
        for accept in (accepted, 0):
            length = len(cache.tokens(0))
            cache.run({0: text(5)}, captures={0: [1, 2, 3, 4]})
            cache.cut(0, length + 1 + accept)
            cache.decode({0: text(1)[0]})


def test_batch_that_mixes_everything(family):
    """Verifying, prefilling, new and padding rows, and one that decodes beside its fork."""
    for cache, text in family.twice():
        cache.prefill({0: text(11), 1: text(24), 2: text(8)})
        cache.fork(1, 6)
        before = cache.everything(6)
        for accept in (2, 0):
            length = len(cache.tokens(0))
            rows = {4: text(3), 0: text(5), 2: text(8), 1: text(1), 5: []}
            cache.run(rows, captures={0: [1, 2, 3, 4], 2: [3]})
            cache.cut(0, length + 1 + accept)
            cache.cut(4)
        same_bits(cache.everything(6), before)
        cache.cut(2, 11)
        cache.decode({0: 1, 2: 2, 6: 3})


def test_passes_of_five_and_three_equal_one_of_eight(family):
    """Several tokens on a warm cache: how they are split does not matter."""
    for cache, text in family.twice():
        start, tokens = text(9), text(8)
        cache.prefill({0: start, 1: start})
        whole = cache.run({0: tokens})[0]
        split = np.concatenate([cache.run({1: tokens[:5]})[1], cache.run({1: tokens[5:]})[1]])
        family.same_logits(split, whole)
        close_memories("split", cache.memory(1), cache.memory(0))


# Middle removal. The states still hold what was cut, so there is no fresh prefill to compare with. What is promised:
# states and values stay, keys move, and what comes next is computed from just that.


def test_two_hundred_tokens_in_a_context_of_64(family):
    """Whenever the context is full, the oldest 30 tokens after the first 4 go: one pass a token, nothing run again."""
    for cache, text in family.twice():
        cache.prefill({0: text(4)})
        token, twin, num_removals = text(1)[0], None, 0
        num_before = cache.num_run
        for _ in range(200):
            if len(cache.tokens(0)) == CONTEXT:
                expected = family.without(cache.memory(0), 4, 34)
                cache.cut(0, 4, 34)
                same_bits(cache.memory(0).states, expected.states)
                close_memories("moved", cache.memory(0), expected)
                twin, num_removals = Lineage.holding(family, expected), num_removals + 1
            logits = cache.decode({0: token}, check=False)[0]
            if twin is not None:
                family.same_logits(logits, twin.decode({0: token}, check=False)[0])
            token = int(np.argmax(logits))
            if len(cache.tokens(0)) == 40:
                twin = None
        cache.check()
        assert cache.num_run - num_before == 200 and num_removals == 1 + (200 - 60 - 1) // 30
        assert np.asarray(rcache.approximate(cache.cache))[0]


def test_checkpoints_before_a_cut_stay_exact(family):
    """Those inside go, later ones move with their states and are approximate; going back before the cut is exact."""
    for cache, text in family.twice():
        cache.prefill({0: text(40)}, captures={0: [12, 21, 38]})
        assert cache.checkpoints(0) == [8, 12, 21, 32, 38]
        later = cache.checkpoint(0, 38)
        cache.cut(0, 14, 24)
        assert [length for length in cache.checkpoints(0) if length <= 14] == [8, 12]
        assert cache.checkpoints(0)[-1] == 28
        same_bits(cache.checkpoint(0, 28), later)
        cache.run({0: text(4)})
        cache.cut(0, 28)
        same_bits(cache.memory(0).states, later)
        cache.fork(0, 1, 12)
        cache.run({1: text(3), 0: text(2)})
        cache.cut(0, 8)
        cache.run({0: text(5)})


def test_cut_in_a_fork_leaves_the_source(family):
    """Pages they share are copied before keys move."""
    for cache, text in family.twice():
        cache.prefill({0: text(30)}, captures={0: [26]})
        cache.fork(0, 1)
        before, expected = cache.everything(0), family.without(cache.memory(1), 3, 9)
        cache.cut(1, 3, 9)
        same_bits(cache.everything(0), before)
        close_memories("moved", cache.memory(1), expected)
        cache.run({0: text(3), 1: text(3)})
        cache.cut(0, 26)
        cache.decode({0: 1, 1: 2})


def test_exact_removal(family):
    """Cut where a state was kept, and the rest run again: a fresh prefill of what is left."""
    for cache, text in family.twice():
        cache.prefill({0: text(30)}, captures={0: [12]})
        cache.cut_exactly(0, 12, 19)
        cache.decode({0: 5})


def test_cuts_at_the_very_end(family):
    """[len - 1, end) is the last token, [len, end) is nothing; either is exact, or refused."""
    for cache, text in family.twice():
        cache.prefill({0: text(20)}, captures={0: [18]})
        cache.cut(0, 20, 25)
        cache.cut(0, 19, 20, status=Status.NOT_RESTORABLE)
        cache.cut(0, 18, 20)
        cache.run({0: text(8)}, captures={0: [7]})
        cache.cut(0, 25, 26)
        cache.decode({0: 5})
