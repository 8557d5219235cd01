"""Bookkeeping: planning a pass, forking, restoring, removing, capturing."""

from __future__ import annotations

import functools
import multiprocessing
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import bench_states
import jax
import jax.numpy as jnp
import numpy as np
from bench_states import NUM_LAYERS, NUM_ROWS
from jax import lax
from measure import Call, Measure, carried, in_turn, median_ratio, medians

import rcache

NUM_STEPS = 64


def hybrid_config(
    num_layers: int = 64,
    num_sequences: int = 256,
    num_pages: int = 1024,
    state_size: int = 8,
    context_length: int = 4096,
) -> rcache.Config:
    """Three layers with a state to one with attention."""
    recurrent = rcache.Layer({"state": rcache.State((state_size,))})
    attention = rcache.Layer(attention=rcache.Attention(1, 2))
    return rcache.Config(
        ((recurrent,) * 3 + (attention,)) * (num_layers // 4),
        num_sequences,
        context_length,
        num_slots=2 * num_sequences,
        num_pages=num_pages,
    )


def _checkpointed(config: rcache.Config) -> rcache.Cache:
    """Sequence 0 has 64 tokens, and a checkpoint at 32."""
    cache = rcache.init(config)
    for _ in range(2):
        cache, _, status = rcache.start_forward(cache, rcache.make_batch([0], [32], 32))
        rcache.raise_if_error(status)
    return cache


OPERATIONS: dict[str, Callable[[rcache.Cache], rcache.Cache]] = {
    "fork": lambda cache: rcache.copy_prefix(cache, 0, 1, 32)[0],
    "restore": lambda cache: rcache.remove(cache, 0, 32)[0],
    "remove": lambda cache: rcache.remove(cache, 0, 0)[0],
}
NUM_CALLS = 32


def _in_a_row(operation: Callable[[rcache.Cache], rcache.Cache], cache: rcache.Cache) -> Any:
    """Calls that each take what the one before returned."""
    for _ in range(NUM_CALLS):
        cache = operation(cache)
    return cache.table


@functools.cache
def _operations() -> dict[str, list[Measure]]:
    """Of each operation, its time at 64 times the state size over that at the small one, and in microseconds.

    In a row, as one calls them between steps: a call returns before it is done. And each waited for: with two threads
    that wake each other up, which is what JAX does by default, and in the thread of the caller.
    """
    small, large = (_checkpointed(hybrid_config(state_size=size)) for size in (64, 64 * 64))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_dispatch_synchronously) as other:
        synchronous = other.submit(_waited_for).result()
    waited_for = _waited_for()
    measures = {}
    for name, operation in OPERATIONS.items():
        calls = {
            size: Call(partial(_in_a_row, operation, cache)) for size, cache in (("small", small), ("large", large))
        }
        times = in_turn(calls, rounds=100)
        seconds = medians(times, NUM_CALLS)
        measures[name] = [
            Measure(
                f"{name}, 64 x state size", median_ratio(times["large"], times["small"]), goal=1.1, seconds=seconds
            ),
            Measure(f"{name}, 64 layers, 256 sequences", seconds["small"] * 1e6, "us", goal=100),
            Measure(f"{name}, each waited for", waited_for[name] * 1e6, "us", goal=100),
            Measure(f"{name}, each waited for, no threads", synchronous[name] * 1e6, "us", goal=100),
        ]
    return measures


def _dispatch_synchronously() -> None:
    """Computations run in the thread that calls them; to be said before the first one."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _waited_for() -> dict[str, float]:
    """Seconds of each operation by itself."""
    cache = _checkpointed(hybrid_config(state_size=64))
    calls = {name: Call(partial(_alone, operation, cache)) for name, operation in OPERATIONS.items()}
    return medians(in_turn(calls, rounds=1000))


def _alone(operation: Callable[[rcache.Cache], rcache.Cache], cache: rcache.Cache) -> Any:
    return operation(cache).table


def fork() -> list[Measure]:
    return _operations()["fork"]


def restore() -> list[Measure]:
    return _operations()["restore"]


def remove() -> list[Measure]:
    return _operations()["remove"]


def _plan_steps(cache: rcache.Cache) -> tuple[rcache.Cache, jax.Array]:
    """As many decode steps of `NUM_ROWS` sequences planned one by one."""
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32), 1)

    def one(cache: rcache.Cache, _: None) -> tuple[rcache.Cache, jax.Array]:
        cache, forward, status = rcache.start_forward(cache, batch)
        return cache, jnp.sum(forward.write_slots) + jnp.sum(forward.pages[0].token_pages) + status

    return lax.scan(one, cache, length=NUM_STEPS)


def plan_scale() -> list[Measure]:
    """Planning a decode step of eight rows, as the cache around them grows."""
    sizes = {
        "64 sequences, 1k pages": (64, 2**10),
        "512 sequences": (512, 2**10),
        "4096 sequences": (4096, 2**10),
        "64k pages": (64, 2**16),
        "1M pages": (64, 2**20),
    }
    calls = {}
    for name, (num_sequences, num_pages) in sizes.items():
        config = hybrid_config(4, num_sequences, num_pages, context_length=2048)  # room for 32 calls
        calls[name] = carried(_plan_steps, rcache.init(config))
    times = in_turn(calls, rounds=30)
    first, *others = sizes
    seconds = medians(times, NUM_STEPS)
    return [Measure("plan_scale, a step", seconds[first] * 1e6, "us", compile_seconds=calls[first].compile_seconds)] + [
        Measure(f"plan_scale, {name}", median_ratio(times[name], times[first]), goal=2.0, seconds={name: seconds[name]})
        for name in others
    ]


def plan_operations() -> list[Measure]:
    """Operations that the compiled plan of a decode step has, where nothing is short: each is a kernel elsewhere."""
    config = hybrid_config()
    batch = jax.eval_shape(lambda: rcache.make_batch(np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32), 1))
    step = jax.jit(rcache.start_forward, donate_argnums=0)
    entry = step.lower(rcache.abstract(config), batch).compile().as_text().split("\nENTRY ")[1]
    kinds = Counter(re.findall(r"^  (?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", entry, re.MULTILINE))
    free = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast")
    return [
        Measure("plan_operations, fusions", kinds["fusion"], ""),
        Measure("plan_operations, all", sum(number for kind, number in kinds.items() if kind not in free), ""),
    ]


NUM_CAPTURED = 8  # tokens, each with a checkpoint of its own
NUM_KEPT = 2  # checkpoints of a sequence


def capture() -> list[Measure]:
    """Tokens after which every row leaves a checkpoint, over tokens that leave none.

    Each of eight tokens planned by itself; and a run of 64 that ends in one, as decoding does. What a checkpoint costs
    is that the next state goes elsewhere. So beside them, the same on plain arrays: one program, told to write where
    it read, or to the next of as many places as checkpoints and sequence hold.
    """
    layers = (rcache.Layer({"state": rcache.State(bench_states.STATE)}),) * NUM_LAYERS
    often, never = (rcache.CheckpointPolicy(NUM_KEPT, min_position, interval=1) for min_position in (0, 2**20))
    step = bench_states.delta_update
    tokens = bench_states.tokens()
    few_tokens = jax.tree.map(lambda x: x[:NUM_CAPTURED], tokens)

    def pooled(decode: Callable, policy: rcache.CheckpointPolicy, tokens: bench_states.Token) -> Call:
        config = rcache.Config(layers, NUM_ROWS, 2**20, num_slots=4 * NUM_ROWS, checkpoints=policy)
        return carried(partial(decode, step), rcache.init(config), tokens)

    def plain(places: np.ndarray) -> Call:
        pool = jnp.zeros((NUM_LAYERS, 4 * NUM_ROWS, *bench_states.STATE), jnp.float32)
        return carried(partial(_decode_from_place_to_place, step), pool, few_tokens, jnp.asarray(places, jnp.int32))

    def ratio(name: str, calls: dict[str, Call], num_tokens: int, goal: float | None = None) -> Measure:
        times = in_turn(calls, rounds=81)
        value = median_ratio(times["checkpoints"], times["none"])
        return Measure(name, value, goal=goal, seconds=medians(times, num_tokens))

    by_pass, by_run = bench_states.decode_by_pass, bench_states.decode_by_run
    in_place = np.zeros(NUM_CAPTURED + 1)
    return [
        ratio(
            "capture",
            {"checkpoints": pooled(by_pass, often, few_tokens), "none": pooled(by_pass, never, few_tokens)},
            NUM_CAPTURED,
            goal=1.05,
        ),
        ratio(
            "capture, plain arrays",
            {"checkpoints": plain(np.arange(NUM_CAPTURED + 1) % (NUM_KEPT + 1)), "none": plain(in_place)},
            NUM_CAPTURED,
        ),
        ratio(
            "capture, at the end of a run",
            {"checkpoints": pooled(by_run, often, tokens), "none": pooled(by_run, never, tokens)},
            bench_states.NUM_STEPS,
            goal=1.05,
        ),
    ]


def _decode_from_place_to_place(
    step: bench_states.Step, pool: jax.Array, tokens: bench_states.Token, places: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Steps on `pool` [L, S, *state], the first from row block `places[0]` to `places[1]`, and so on."""
    rows = jnp.arange(NUM_ROWS, dtype=jnp.int32)

    def one(pool: jax.Array, here: tuple[bench_states.Token, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, source, target = here
        total = jnp.float32(0)
        for layer in range(NUM_LAYERS):
            output, state = step(pool[layer, source * NUM_ROWS + rows], token)
            pool = pool.at[layer, target * NUM_ROWS + rows].set(state, unique_indices=True, mode="promise_in_bounds")
            total += jnp.sum(output)
        return pool, total

    return lax.scan(one, pool, (tokens, places[:-1], places[1:]))
