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


def capture() -> list[Measure]:
    """Eight steps of a token, each of which leaves a checkpoint in every row, over eight that leave none."""
    layers = (rcache.Layer({"state": rcache.State(bench_states.STATE)}),) * NUM_LAYERS

    def call(policy: rcache.CheckpointPolicy) -> Call:
        config = rcache.Config(layers, NUM_ROWS, 2**20, num_slots=4 * NUM_ROWS, checkpoints=policy)
        tokens = jax.tree.map(lambda x: x[:8], bench_states.tokens())
        return carried(partial(bench_states.decode_by_pass, bench_states.delta_update), rcache.init(config), tokens)

    calls = {
        "every token": call(rcache.CheckpointPolicy(count=2, min_position=0, interval=1)),
        "none": call(rcache.CheckpointPolicy(count=2, min_position=2**20, interval=1)),
    }
    times = in_turn(calls, rounds=81)
    ratio = median_ratio(times["every token"], times["none"])
    return [Measure("capture", ratio, goal=1.05, seconds=medians(times, 8))]
