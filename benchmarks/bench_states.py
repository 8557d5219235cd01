"""Decoding with recurrent states: the pool beside a dense carry, and beside a copy of the active states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from measure import Call, Measure, carried, in_turn, median_ratio, medians

import rcache
from models import recurrence

NUM_LAYERS, NUM_ROWS, NUM_STEPS = 8, 8, 64
HEADS, SIZE = 8, 64
STATE = (HEADS, SIZE, SIZE)


def config_of(num_slots: int = 64) -> rcache.Config:
    """Layers of one matrix-valued state, a pool of `num_slots`."""
    layers = (rcache.Layer({"state": rcache.State(STATE)}),) * NUM_LAYERS
    return rcache.Config(layers, max_sequences=64, context_length=2**20, num_slots=num_slots)


class Token(struct.PyTreeNode):
    """What a token brings to every layer: of the steps of a loop, each with a leading axis."""

    query: jax.Array  # f32[B, H, K]
    key: jax.Array  # f32[B, H, K], of length 1
    value: jax.Array  # f32[B, H, V]
    log_decay: jax.Array  # f32[B, H]
    beta: jax.Array  # f32[B, H]


def tokens() -> Token:
    """Random ones, for all steps."""
    random = np.random.default_rng(0)
    query, key, value = random.standard_normal((3, NUM_STEPS, NUM_ROWS, HEADS, SIZE), np.float32)
    log_decay, beta = random.random((2, NUM_STEPS, NUM_ROWS, HEADS), np.float32)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    return jax.tree.map(jnp.asarray, Token(query / SIZE, key, value, -log_decay, beta))


Step = Callable[[jax.Array, Token], tuple[jax.Array, jax.Array]]  # state [B, H, K, V], token to output, new state


def cheap_update(state: jax.Array, token: Token) -> tuple[jax.Array, jax.Array]:
    """As little arithmetic as it gets, so that only the moving of states is left."""
    new = state * jnp.float32(0.99) + token.key[..., None] * token.value[..., None, :]
    return token.value, new


def delta_update(state: jax.Array, token: Token) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule."""
    one = lambda x: x[:, None]  # noqa: E731
    outputs, states = recurrence.linear_attention(
        one(token.query),
        one(token.key),
        one(token.value),
        one(token.log_decay),
        state,
        jnp.ones((state.shape[0], 1), jnp.int32),
        beta=one(token.beta),
    )
    return outputs[:, 0], states[:, 0]


def decode_by_pass(step: Step, cache: rcache.Cache, tokens: Token) -> tuple[rcache.Cache, jax.Array]:
    """Each step planned by itself."""
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32), 1)

    def one(cache: rcache.Cache, token: Token) -> tuple[rcache.Cache, jax.Array]:
        cache, forward, _ = rcache.start_forward(cache, batch)
        return _layers(step, cache, forward, token)

    return lax.scan(one, cache, tokens)


def decode_by_run(step: Step, cache: rcache.Cache, tokens: Token) -> tuple[rcache.Cache, jax.Array]:
    """All steps planned at once."""
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.full(NUM_ROWS, NUM_STEPS, np.int32), NUM_STEPS)
    run, _ = rcache.start_run(cache, batch)

    def one(run: rcache.Run, indexed: tuple[jax.Array, Token]) -> tuple[rcache.Run, jax.Array]:
        index, token = indexed
        return _layers(step, run, rcache.run_token(run, index), token)

    run, outputs = lax.scan(one, run, (jnp.arange(NUM_STEPS, dtype=jnp.int32), tokens))
    return rcache.finish_run(run), outputs


def _layers(step: Step, cache: Any, forward: rcache.Forward, token: Token) -> tuple[Any, jax.Array]:
    total = jnp.float32(0)
    for layer in range(NUM_LAYERS):
        output, state = step(rcache.read_state(cache, forward, layer)["state"], token)
        cache = rcache.update_state(cache, forward, layer, {"state": state})
        total += jnp.sum(output)
    return cache, total


def decode_dense(step: Step, states: tuple[jax.Array, ...], tokens: Token) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The same arithmetic on a plain array [B, *state] for each layer, without any cache."""

    def one(states: tuple[jax.Array, ...], token: Token) -> tuple[tuple[jax.Array, ...], jax.Array]:
        outputs, states = zip(*(step(state, token) for state in states), strict=True)
        return states, sum(jnp.sum(output) for output in outputs)

    return lax.scan(one, states, tokens)


@functools.cache
def _calls(step: Step) -> dict[str, Call]:
    """`NUM_STEPS` steps in each way, and as many copies of the active states."""
    dense = tuple(jnp.zeros((NUM_ROWS, *STATE), jnp.float32) for _ in range(NUM_LAYERS))
    source = np.ones((NUM_LAYERS, NUM_ROWS, *STATE), np.float32)  # zeros might be one page, mapped many times
    target = np.empty_like(source)

    def copies() -> None:
        for _ in range(NUM_STEPS):
            np.copyto(target, source)

    return {
        "run": _pooled(decode_by_run, step),
        "dense": carried(partial(decode_dense, step), dense, tokens()),
        "pass": _pooled(decode_by_pass, step),
        "copy": Call(copies),
    }


def _pooled(decode: Callable, step: Step) -> Call:
    return carried(partial(decode, step), rcache.init(config_of()), tokens())


def _ratio(name: str, step: Step, first: str, second: str, goal: float | None = None) -> list[Measure]:
    calls = {way: _calls(step)[way] for way in (first, second)}
    times = in_turn(
        calls, rounds=41
    )  # no third in between: what it leaves in the CPU's caches would favour one of them
    return [
        Measure(
            name,
            median_ratio(times[first], times[second]),
            goal=goal,
            seconds=medians(times, NUM_STEPS),
            compile_seconds=calls[first].compile_seconds,
        )
    ]


def decode_state() -> list[Measure]:
    return _ratio("decode_state", delta_update, "run", "dense", goal=1.05) + _ratio(
        "decode_state, by pass", delta_update, "pass", "dense"
    )


def decode_floor() -> list[Measure]:
    return _ratio("decode_floor", delta_update, "run", "copy", goal=2.0) + _ratio(
        "decode_floor, dense", delta_update, "dense", "copy"
    )


def decode_trivial() -> list[Measure]:
    return _ratio("decode_trivial", cheap_update, "run", "dense", goal=1.20) + _ratio(
        "decode_trivial, by pass", cheap_update, "pass", "dense"
    )


def memory() -> list[Measure]:
    """Temporaries of the compiled loop over the bytes of the active rows, and payload it does not update in place."""

    def step_memory(num_slots: int) -> rcache.StepMemory:
        shapes = jax.eval_shape(tokens)
        return rcache.reserve(partial(decode_by_run, delta_update), rcache.abstract(config_of(num_slots)), shapes)[1]

    usual, least, most = step_memory(64), step_memory(NUM_ROWS), step_memory(64 * NUM_ROWS)
    active = NUM_LAYERS * NUM_ROWS * 4 * int(np.prod(STATE))
    return [
        Measure("memory, temporaries", usual.temporaries / active, goal=2.0),
        Measure("memory, temporaries at 64 x slots", most.temporaries / least.temporaries, goal=1.1),
        Measure("memory, not aliased", max(0, config_of().memory().total - usual.aliased), "bytes", goal=0),
    ]
