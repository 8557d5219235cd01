"""Sliding windows and chunks: what a sequence sees next is what it would see after a fresh prefill of its tokens.

Pages behind a window are given up, forks and checkpoints share those before it, and pools are small, so that all the
ways in which a page can be the wrong one, or no longer there, occur. Payload begins as NaN. After every operation each
sequence and each checkpoint is run one token further, in a cache that is thrown away, and compared with plain Python.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from rcache import Status
from tests.differential import add_offset, check_conserved
from tests.oracle import CHUNK, NUM_CAPTURES, History, Model, poisoned, same_caches, step

N = 3
state = {"sum": rcache.State((2,))}
POLICY = rcache.CheckpointPolicy(3, 1, 4)
OPTIONS = {"max_pass_tokens": CHUNK, "checkpoints": POLICY}


def attention(**window):
    return rcache.Attention(1, 2, **window)


CONFIGS = {
    "hybrid, pages of 3": rcache.Config(
        (rcache.Layer(state, attention(sliding_window=4)), rcache.Layer(attention=attention(chunk_size=5, memory=6))),
        N, 40, page_size=3, num_pages=(11, 12), num_slots=7, **OPTIONS,
    ),
    "attention only, pages of 1 and a longer memory": rcache.Config(
        (
            rcache.Layer(attention=attention(sliding_window=3, memory=7)),
            rcache.Layer(attention=attention(sliding_window=1)),
            rcache.Layer(attention=attention()),
        ), N, 40, page_size=1, num_pages=(22, 18, 55), **OPTIONS,
    ),
}  # fmt: skip


class Session:
    """One cache, and what each sequence should hold, as plain lists."""

    def __init__(self, config, seed):
        self.config, self.model = config, Model(config)
        self.cache = poisoned(rcache.init(config))
        self.histories = [History() for _ in range(N)]
        self.random = np.random.default_rng(seed)
        self.statuses = []

    def length(self, sequence):
        return len(self.histories[sequence].tokens)

    # Operations

    def forward(self):
        rows = {
            int(s): self.text(self.random.integers(0, CHUNK + 1)) for s in self.random.permutation(N)[: self.draw(N)]
        }
        captures = {s: sorted({self.draw(len(text)) for _ in range(self.draw(2))}) for s, text in rows.items() if text}
        self.cache, status = self.run(self.cache, self.histories, rows, captures)
        if status is Status.OK:
            for sequence, text in rows.items():
                self.histories[sequence] = self.histories[sequence].extend(text)
        return status

    def fork(self):
        src, dst = (int(s) for s in self.random.integers(0, N, 2))
        length = int(self.random.integers(0, self.length(src) + 1))
        self.cache, got, status = rcache.copy_prefix(self.cache, src, dst, length)
        self.histories[dst] = self.histories[src].prefix(int(got))
        return Status(int(status))

    def roll_back(self):
        sequence = int(self.random.integers(0, N))
        length = int(self.random.integers(0, self.length(sequence) + 1))
        if self.random.random() < 0.7:
            length = int(rcache.prepare_restore(self.cache, sequence, length))
        self.cache, status = rcache.remove(self.cache, sequence, length)
        if status == Status.OK:
            self.histories[sequence] = self.histories[sequence].prefix(length)
        return Status(int(status))

    def cut(self):
        sequence = int(self.random.integers(0, N))
        begin = int(self.random.integers(0, self.length(sequence) + 1))
        end = begin + int(self.random.integers(0, 6))
        self.cache, status = rcache.remove(self.cache, sequence, begin, end, shift=add_offset)
        if status == Status.OK and begin < end:
            history = self.histories[sequence]
            whole = end >= len(history.tokens)
            self.histories[sequence] = history.prefix(begin) if whole else history.without(begin, end)
        return Status(int(status))

    def reorder(self):
        sources = self.random.integers(-1, N, N)
        self.cache, status = rcache.reorder(self.cache, sources.astype(np.int32))
        self.histories = [self.histories[s] if s >= 0 else History() for s in sources]
        return Status(int(status))

    def any(self):
        operations = [self.forward] * 6 + [self.fork] * 2 + [self.roll_back] * 2 + [self.cut, self.cut, self.reorder]
        before = self.cache
        status = operations[self.random.integers(len(operations))]()
        if status is not Status.OK:
            same_caches(before, self.cache)
        self.statuses.append(status)
        self.check()

    # The oracle

    def check(self):
        check_conserved(jax.tree.map(np.asarray, self.cache))
        assert rcache.lengths(self.cache).tolist() == [self.length(s) for s in range(N)]
        live = {s: [89] for s in range(N) if 0 < self.length(s) < self.config.context_length}
        self.probe(self.cache, self.histories, live)
        kept = np.asarray(rcache.checkpoint_positions(self.cache))
        for k in range(kept.shape[1]):
            cache, histories = self.cache, list(self.histories)
            for sequence in np.flatnonzero(kept[:, k] >= 0):
                length = int(kept[sequence, k]) + 1
                cache, status = rcache.remove(cache, int(sequence), length)
                assert status == Status.OK
                histories[sequence] = histories[sequence].prefix(length)
            self.probe(cache, histories, {s: text for s, text in live.items() if kept[s, k] >= 0})

    def probe(self, cache, histories, rows):
        """One token more for each of `rows`; sequences that find no room are tried alone."""
        if rows and self.run(cache, histories, rows, {})[1] is not Status.OK and len(rows) > 1:
            for sequence, text in rows.items():
                self.run(cache, histories, {sequence: text}, {})

    def run(self, cache, histories, rows, captures):
        """A pass; all that its layers read and see is compared. Returns the cache and the status."""
        sequences, lengths = np.full(N, -1), np.zeros(N, int)
        tokens, asked = np.full((N, CHUNK), 88), np.full((N, NUM_CAPTURES), -1)
        for row, (sequence, text) in enumerate(rows.items()):
            sequences[row], lengths[row], tokens[row, : len(text)] = sequence, len(text), text
            offsets = captures.get(sequence, [])
            asked[row, : len(offsets)] = offsets
        batch = rcache.make_batch(sequences, lengths, CHUNK, captures=asked)
        cache, _, status, read, visible = step(cache, jnp.asarray(tokens, jnp.int32), batch)
        for leaf in jax.tree.leaves((read, visible)):
            assert np.all(np.isfinite(leaf)), "stale payload"
        if status == Status.OK:
            visible = jax.tree.map(np.asarray, visible)
            for row, (sequence, text) in enumerate(rows.items()):
                history, start = histories[sequence], len(histories[sequence].tokens)
                fresh = self.model.prefill(history.folded)
                for layer, states in read.items():
                    for name, state in states.items():
                        assert not text or np.array_equal(state[row], fresh[layer, name]), (sequence, layer, name)
                for t in range(len(text)):
                    self.sees(
                        history.tokens + tuple(text), start + t, {i: [x[row] for x in v] for i, v in visible.items()}, t
                    )
        return cache, Status(int(status))

    def sees(self, tokens, position, visible, t):
        for layer, (keys, values, mask) in visible.items():
            a = self.config.layers[layer].attention
            first = 0
            if a.sliding_window is not None:
                first = max(0, position - a.sliding_window + 1)
            if a.chunk_size is not None:
                first = position // a.chunk_size * a.chunk_size
            seen = range(first, position + 1)
            assert np.array_equal(keys[mask[t]], [self.model.key(layer, tokens[p], p) for p in seen]), (layer, position)
            assert np.array_equal(values[mask[t]], [self.model.value(layer, tokens[p], p) for p in seen])

    def text(self, n):
        return self.random.integers(1, 88, n).tolist()

    def draw(self, n):
        return int(self.random.integers(1, n + 1))


@pytest.mark.parametrize("name", CONFIGS)
def test_any_session(name):
    session = Session(CONFIGS[name], seed=1)
    for _ in range(100):
        session.any()
    seen = set(session.statuses)
    assert {Status.OK, Status.NOT_RESTORABLE, Status.PAGES_FULL} <= seen, seen
