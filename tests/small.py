"""One small hybrid cache in use, shared by several test files so that it compiles once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rcache
from tests.differential import NUM_TOKENS, step

conv = rcache.State((3, 2))
ssm = rcache.State((2, 2))
full = rcache.Attention(2, 4, value_dim=3)
window = rcache.Attention(1, 4, value_dim=2, sliding_window=4)
LAYERS = (
    rcache.Layer({"conv": conv, "ssm": ssm}),
    rcache.Layer(attention=full),
    rcache.Layer({"conv": conv}, window),
    rcache.Layer({"conv": conv}, window),
)
POLICY = rcache.CheckpointPolicy(count=3, min_position=2, interval=3)
CONFIG = rcache.Config(LAYERS, 4, 24, page_size=3, checkpoints=POLICY, max_pass_tokens=NUM_TOKENS)
EQUAL_LAYERS = (2, 3)
QUERIES = (  # but for slots, whose numbers nobody may rely on
    rcache.lengths,
    rcache.approximate,
    rcache.checkpoint_positions,
    rcache.checkpoint_approximate,
    rcache.free_slots,
    rcache.free_pages,
    rcache.counters,
)
PAYLOAD = ("states", "keys", "values")  # fields of a Cache


def batch(
    sequences: list[int],
    lengths: list[int],
    *,
    positions: list[list[int]] | None = None,
    captures: list[list[int]] | None = None,
    bidirectional: list[list[int]] | None = None,
) -> rcache.Batch:
    """A batch of always the same shape: 4 rows of 6 tokens, 1 capture."""

    def grid(rows: list[list[int]] | None, width: int) -> np.ndarray:
        filled = np.full((CONFIG.max_sequences, width), -1, np.int32)
        for row, values in enumerate(rows or []):
            filled[row, : len(values)] = values
        return filled

    absent = CONFIG.max_sequences - len(sequences)
    return rcache.make_batch(
        sequences + [-1] * absent,
        lengths + [0] * absent,
        NUM_TOKENS,
        positions=grid(positions, NUM_TOKENS),
        captures=grid(captures, 1),
        bidirectional=grid(bidirectional, NUM_TOKENS),
    )


def tokens(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 97, (CONFIG.max_sequences, NUM_TOKENS)), jnp.int32)


def run(cache: rcache.Cache, seed: int, what: rcache.Batch) -> tuple:
    """One pass of the stand-in model; `seed` draws the tokens."""
    result = step(cache, tokens(seed), what)
    rcache.raise_if_error(result[2])
    return result


@functools.cache
def used() -> rcache.Cache:
    """Sequence 0 has 11 tokens and checkpoints of 6, 8 and 11 tokens; 1 is its fork; 2 has 4 tokens; 3 is empty."""
    cache = run(rcache.init(CONFIG), 0, batch([0, 2], [6, 4]))[0]
    cache = run(cache, 1, batch([0], [5], captures=[[2]]))[0]
    return rcache.copy_prefix(cache, 0, 1, 11)[0]


@functools.cache
def planned() -> tuple[rcache.Cache, rcache.Forward]:
    """A pass over the used cache: one row shares slot and pages, one is new, one is padding."""
    cache, forward, status = rcache.start_forward(used(), batch([0, 3, -1, 2], [5, 4, 3, 6], captures=[[2], [1]]))
    rcache.raise_if_error(status)
    return cache, forward


def same_tree(what: str, got: Any, expected: Any) -> None:
    """Structure, shapes, dtypes, weak types and every bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), what
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        where = what + jax.tree_util.keystr(path)
        assert jax.typeof(one) == jax.typeof(other), where
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), f"{where}: {one} instead of {other}"
