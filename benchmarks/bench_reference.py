"""One session of passes, forks, restores and removals, in rcache and in its NumPy reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import Call, Measure, in_turn, median_ratio, medians

import rcache
from rcache.reference import ReferenceCache
from tests.differential import NUM_TOKENS, StandIn, step

NUM_SEQUENCES, NUM_OPERATIONS = 4, 100


def config() -> rcache.Config:
    """Two layers with states to two with attention, one of them with a window."""
    layers = (
        rcache.Layer({"conv": rcache.State((3, 32)), "ssm": rcache.State((16, 16))}),
        rcache.Layer(attention=rcache.Attention(2, 16)),
        rcache.Layer({"ssm": rcache.State((16, 16))}),
        rcache.Layer(attention=rcache.Attention(2, 16, sliding_window=32)),
    )
    policy = rcache.CheckpointPolicy(count=4, min_position=4, interval=8)
    return rcache.Config(layers, NUM_SEQUENCES, 256, checkpoints=policy, max_pass_tokens=NUM_TOKENS)


def session() -> list[tuple[str, Any]]:
    """Operations at random, those that the reference took."""
    random, reference, model = np.random.default_rng(3), ReferenceCache(config()), StandIn(config())
    operations: list[tuple[str, Any]] = []
    while len(operations) < NUM_OPERATIONS:
        sequence, other = (int(number) for number in random.permutation(NUM_SEQUENCES)[:2])
        length = reference.lengths()[sequence]
        kind = random.choice(["pass", "fork", "restore", "remove"], p=[0.7, 0.1, 0.15, 0.05])
        if kind == "pass" and max(reference.lengths()) + NUM_TOKENS <= 256:
            lengths = random.integers(0, NUM_TOKENS + 1, NUM_SEQUENCES)
            tokens = random.integers(0, 97, (NUM_SEQUENCES, NUM_TOKENS))
            operations.append((kind, (tokens, lengths)))
            _by_reference(reference, model, *operations[-1])
            continue
        operands = {"fork": (sequence, other, length), "remove": (sequence, 0)}
        operands["restore"] = (sequence, reference.prepare_restore(sequence, max(0, length - 5)))
        if kind in operands:
            operations.append((kind, operands[kind]))
            _by_reference(reference, model, *operations[-1])
    return operations


def _by_reference(reference: ReferenceCache, model: StandIn, kind: str, operands: Any) -> None:
    if kind == "pass":
        tokens, lengths = operands
        rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
        reference.forward(range(NUM_SEQUENCES), rows, model)
    elif kind == "fork":
        reference.copy_prefix(*operands)
    else:
        reference.remove(*operands)


def _by_rcache(cache: rcache.Cache, kind: str, operands: Any) -> rcache.Cache:
    if kind == "pass":
        tokens, lengths = operands
        batch = rcache.make_batch(np.arange(NUM_SEQUENCES), lengths, NUM_TOKENS)
        return step(cache, jnp.asarray(tokens, jnp.int32), batch)[0]
    if kind == "fork":
        return rcache.copy_prefix(cache, *operands)[0]
    return rcache.remove(cache, *operands)[0]


def reference() -> list[Measure]:
    operations = session()

    def in_rcache() -> jax.Array:
        cache = rcache.init(config())
        for operation in operations:
            cache = _by_rcache(cache, *operation)
        return rcache.lengths(cache)

    def in_numpy() -> np.ndarray:
        cache, model = ReferenceCache(config()), StandIn(config())
        for operation in operations:
            _by_reference(cache, model, *operation)
        return np.array(cache.lengths())

    np.testing.assert_array_equal(in_rcache(), in_numpy())
    calls = {"NumPy reference": Call(in_numpy), "rcache": Call(in_rcache)}
    times = in_turn(calls, rounds=15)
    ratio = median_ratio(times["NumPy reference"], times["rcache"])
    return [Measure("reference, NumPy over rcache", ratio, seconds=medians(times, NUM_OPERATIONS))]
