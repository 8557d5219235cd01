"""Whole models: a decode step beside one over plain arrays, and what prompts of any length compile."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from measure import Call, Measure, carried, in_turn, median_ratio, medians

import decoding
import models
import rcache
from generate import BUCKETS, compile_clock
from models import LanguageModel, attention, mixers
from models.passes import WholePass

ROOT = Path(__file__).resolve().parent.parent
WONDERLAND = ROOT / "examples" / "data" / "wonderland"
NUM_ROWS, NUM_STEPS, CONTEXT = 8, 64, 512


class Dense(struct.PyTreeNode):
    """What a hand-written decoder keeps: plain arrays for each layer, no row of them padding."""

    states: tuple[dict[str, jax.Array], ...]  # of each layer, by name [B, *shape]
    keys: tuple[jax.Array | None, ...]  # of each layer [B, H, X, D]: heads outside are fastest
    values: tuple[jax.Array | None, ...]


def read_state(dense: Dense, forward: WholePass, layer: int) -> dict[str, jax.Array]:
    return dense.states[layer]


def update_state(
    dense: Dense, forward: WholePass, layer: int, states: Mapping[str, jax.Array], *, captured: None = None
) -> Dense:
    return dense.replace(states=_with(dense.states, layer, dict(states)))


def put(dense: Dense, forward: WholePass, layer: int, keys: jax.Array, values: jax.Array) -> Dense:
    def written(held: jax.Array, new: jax.Array) -> jax.Array:
        rows = jnp.arange(new.shape[0], dtype=jnp.int32)
        columns = forward.positions[:, 0]
        return held.at[rows, :, columns].set(new[:, 0], mode="promise_in_bounds", unique_indices=True)

    return dense.replace(
        keys=_with(dense.keys, layer, written(dense.keys[layer], keys)),
        values=_with(dense.values, layer, written(dense.values[layer], values)),
    )


def get(dense: Dense, forward: WholePass, layer: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys, values = dense.keys[layer].swapaxes(1, 2), dense.values[layer].swapaxes(1, 2)
    return keys, values, jnp.arange(keys.shape[1], dtype=jnp.int32) <= forward.positions[:, :, None]


def _with(layers: tuple, layer: int, new: Any) -> tuple:
    return (*layers[:layer], new, *layers[layer + 1 :])


@contextmanager
def over_dense() -> Iterator[None]:
    """Models that are traced in here work on a `Dense`: what they would ask of the cache is done by the above."""
    offered = SimpleNamespace(read_state=read_state, update_state=update_state, put=put, get=get)
    redirected = SimpleNamespace(**vars(rcache) | vars(offered))
    with mock.patch.object(mixers, "rcache", redirected), mock.patch.object(attention, "rcache", redirected):
        yield


def decode_dense(model: decoding.SplitModel, carry: tuple[Dense, jax.Array], starts: jax.Array) -> tuple:
    """`NUM_STEPS` greedy tokens behind `token` i32[B], at positions from `starts` i32[B] on."""
    merged = model.merge()
    ones = jnp.ones(NUM_ROWS, jnp.int32)

    def one(carry: tuple, index: jax.Array) -> tuple:
        dense, token = carry
        forward = WholePass(ones, (starts + index)[:, None], ones[:, None] > 0, jnp.zeros((NUM_ROWS, 0), jnp.int32))
        logits, dense = merged(token[:, None], dense, forward)
        token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return (dense, token), token

    with over_dense():
        return lax.scan(one, carry, jnp.arange(NUM_STEPS, dtype=jnp.int32))


def decode_by_run(model: decoding.SplitModel, carry: tuple[rcache.Cache, jax.Array]) -> tuple:
    """The same over a cache, all tokens planned at once."""
    cache, token = carry
    merged = model.merge()
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.full(NUM_ROWS, NUM_STEPS, np.int32), NUM_STEPS)
    run, _ = rcache.start_run(cache, batch, context=CONTEXT)

    def one(carry: tuple, index: jax.Array) -> tuple:
        run, token = carry
        logits, run = merged(token[:, None], run, rcache.run_token(run, index))
        token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return (run, token), token

    (run, token), tokens = lax.scan(one, (run, token), jnp.arange(NUM_STEPS, dtype=jnp.int32))
    return (rcache.finish_run(run), token), tokens


def decode_by_pass(model: decoding.SplitModel, carry: tuple[rcache.Cache, jax.Array]) -> tuple:
    """The same over a cache, each token planned by itself."""
    merged = model.merge()
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32), 1)

    def one(carry: tuple, _: None) -> tuple:
        cache, token = carry
        cache, forward, _ = rcache.start_forward(cache, batch, context=CONTEXT)
        logits, cache = merged(token[:, None], cache, forward)
        token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return (cache, token), token

    return lax.scan(one, carry, length=NUM_STEPS)


def _rewound(decode: Any, carry: tuple, model: decoding.SplitModel) -> tuple:
    """`decode`, and the cache with the sequences as long as they were, so that it can be called any number of times."""
    (cache, token), tokens = decode(model, carry)
    return (cache.replace(table=carry[0].table), token), tokens, cache.table


def prompts_of(vocab_size: int, lengths: np.ndarray) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(vocab_size, size=length).tolist() for length in lengths]


def cache_for(model: LanguageModel, num_rows: int, context_length: int, **options: Any) -> rcache.Cache:
    policy = rcache.CheckpointPolicy(count=0)
    return rcache.init(rcache.Config(model.cache_layers(), num_rows, context_length, checkpoints=policy, **options))


def dense_of(cache: rcache.Cache) -> Dense:
    """What the first rows of a cache hold, as plain arrays."""
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32), 1)
    run, _ = rcache.start_run(cache, batch, context=CONTEXT)
    forward = rcache.run_token(run, 0)
    layers = list(enumerate(cache.config.layers))
    kept = [
        tuple(held.swapaxes(1, 2) for held in rcache.get(run, forward, i)[:2]) if layer.attention else (None, None)
        for i, layer in layers
    ]
    states = tuple(rcache.read_state(run, forward, i) if layer.states else {} for i, layer in layers)
    return Dense(states, *zip(*kept, strict=True))


@functools.cache
def _decode_calls(folder: Path) -> dict[str, Call]:
    """`NUM_STEPS` tokens of `NUM_ROWS` rows of different lengths, each way; the first call of each gives the tokens."""
    model = models.load(folder)
    split = decoding.split(model)
    lengths = np.arange(NUM_ROWS) * 16 + CONTEXT // 2

    def prefilled() -> tuple[rcache.Cache, jax.Array]:
        prompts = prompts_of(model.config.vocab_size, lengths)
        cache = cache_for(model, NUM_ROWS, CONTEXT)
        cache, logits, status = decoding.prefill(split, cache, prompts, range(NUM_ROWS))
        rcache.raise_if_error(status)
        return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    cache, token = prefilled()
    dense = jax.tree.map(jnp.copy, (dense_of(cache), token))
    function = lambda carry, starts, split: decode_dense(split, carry, starts)  # noqa: E731
    return {
        "run": carried(partial(_rewound, decode_by_run), (cache, token), split),
        "dense": carried(function, dense, jnp.asarray(lengths, jnp.int32), split),
        "pass": carried(partial(_rewound, decode_by_pass), prefilled(), split),
    }


def decode_model() -> list[Measure]:
    calls = _decode_calls(WONDERLAND)
    tokens = {name: np.asarray(call.run()[1][0]) for name, call in calls.items()}
    for name in ("run", "pass"):
        np.testing.assert_array_equal(tokens[name], tokens["dense"])
    times = in_turn(calls, rounds=41)
    typical = medians(times, NUM_STEPS)
    return [
        Measure(
            name,
            median_ratio(times[way], times["dense"]),
            goal=goal,
            seconds={key: typical[key] for key in (way, "dense")},
            compile_seconds=calls[way].compile_seconds,
        )
        for name, way, goal in (("decode_model", "run", 1.15), ("decode_model, by pass", "pass", None))
    ]


def prefill() -> list[Measure]:
    """Prompts of many lengths, and answers to them, once every bucket was used: nothing more is compiled."""
    model = models.load(WONDERLAND)
    split = decoding.split(model)
    random = np.random.default_rng(0)
    longest, num_new = 2 * BUCKETS[-1], 32
    held = [cache_for(model, NUM_ROWS, longest + num_new, max_pass_tokens=BUCKETS[-1])]

    def answer(lengths: np.ndarray) -> None:
        prompts = prompts_of(model.config.vocab_size, lengths)
        sequences = random.permutation(NUM_ROWS)[: len(prompts)]
        cache, logits, status = decoding.prefill(
            split, rcache.reset(held[0]), prompts, sequences, num_rows=NUM_ROWS, buckets=BUCKETS
        )
        rcache.raise_if_error(status)
        padded = np.full(NUM_ROWS, -1, np.int32)
        padded[: len(prompts)] = sequences
        held[0], generated, status = decoding.generate(
            split, cache, jnp.asarray(padded), logits, max_new_tokens=num_new
        )
        rcache.raise_if_error(status)
        jax.block_until_ready(generated)

    before = decoding.num_compiled()
    with compile_clock() as compiled:
        for bucket in BUCKETS:
            answer(np.array([bucket]))
        warm, compile_seconds = decoding.num_compiled(), compiled()
    num_tokens, start = 0, time.perf_counter()
    for _ in range(40):
        lengths = random.integers(1, longest, size=random.integers(1, NUM_ROWS + 1), endpoint=True)
        answer(lengths)
        num_tokens += int(lengths.sum()) + num_new * len(lengths)
    taken = time.perf_counter() - start
    return [
        Measure("prefill, compiled at first", warm - before, "programs", compile_seconds=compile_seconds),
        Measure("prefill, compiled later", decoding.num_compiled() - warm, "programs", goal=0),
        Measure("prefill, tokens run and answered", num_tokens / taken, "a second"),
    ]
