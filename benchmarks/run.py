"""What the cache costs beside plain arrays: `python benchmarks/run.py [NAME...] [--json]`.

Every value is a ratio of two things timed in turn in one run (median of many; compilation apart), or bytes read off the
compiled program, so that it holds on a noisy machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rcache

NUM_LAYERS, NUM_ROWS, NUM_STEPS = 8, 8, 64
STATE = (8, 64, 64)


def config_of(num_slots: int = 64, state: tuple[int, ...] = STATE, **options: Any) -> rcache.Config:
    """Layers of one matrix-valued state, a pool of `num_slots`."""
    options = {"max_sequences": 64, "context_length": 4096, "num_slots": num_slots} | options
    return rcache.Config((rcache.Layer({"state": rcache.State(state)}),) * NUM_LAYERS, **options)


def cheap_update(state: jax.Array, x: jax.Array) -> jax.Array:
    """A rank-one update, so that little but the moving of states is left: [B, H, D, D] by [B, D]."""
    return state * jnp.float32(0.99) + x[:, None, :, None] * x[:, None, None, :]


def decode_pooled(cache: rcache.Cache, inputs: jax.Array) -> tuple[rcache.Cache, jax.Array]:
    """One token a step for `B` sequences of the cache: inputs [steps, B, D]."""
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32), 1)

    def step(cache: rcache.Cache, x: jax.Array) -> tuple[rcache.Cache, jax.Array]:
        cache, forward, status = rcache.start_forward(cache, batch)

        def layer(index: jax.Array, cache: rcache.Cache) -> rcache.Cache:
            state = rcache.read_state(cache, forward, index)["state"]
            return rcache.update_state(cache, forward, index, {"state": cheap_update(state, x)})

        return lax.fori_loop(0, NUM_LAYERS, layer, cache), status

    return lax.scan(step, cache, inputs)


def decode_dense(states: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same arithmetic on plain arrays [L, B, *state] without any cache."""

    def step(states: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(index: jax.Array, states: jax.Array) -> jax.Array:
            state = lax.dynamic_index_in_dim(states, index, keepdims=False)
            return lax.dynamic_update_index_in_dim(states, cheap_update(state, x), index, 0)

        return lax.fori_loop(0, NUM_LAYERS, layer, states), jnp.int32(0)

    return lax.scan(step, states, inputs)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def paired_ratio(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> float:
    """Median of time(first) / time(second), the two called in turn."""
    seconds(first), seconds(second)
    return statistics.median(seconds(first) / seconds(second) for _ in range(rounds))


def carried(function: Callable[..., tuple[Any, Any]], carry: Any, inputs: jax.Array) -> Callable[[], Any]:
    """`function` as a call without arguments that donates its carry and keeps the new one."""
    jitted, held = jax.jit(function, donate_argnums=0), [carry]

    def call() -> Any:
        held[0], outputs = jitted(held[0], inputs)
        return held[0], outputs

    return call


def decode_trivial() -> float:
    inputs = jnp.full((NUM_STEPS, NUM_ROWS, STATE[-1]), 0.01, jnp.float32)
    dense = carried(decode_dense, jnp.zeros((NUM_LAYERS, NUM_ROWS, *STATE), jnp.float32), inputs)
    return paired_ratio(carried(decode_pooled, rcache.init(config_of()), inputs), dense, rounds=15)


def _by_state_size(operation: Callable[[rcache.Cache], Any]) -> float:
    """Time of one standalone call at 64 times the state size, over the time at the small one."""
    caches = []
    for size in (8, 64):
        cache = rcache.init(config_of(state=(8, size, size)))
        for _ in range(2):  # a checkpoint at 32 tokens, and 32 more to roll back over
            cache, _, status = rcache.start_forward(cache, rcache.make_batch([0], [32], 32))
            rcache.raise_if_error(status)
        caches.append(cache)
    return paired_ratio(lambda: operation(caches[1]), lambda: operation(caches[0]), rounds=300)


def fork() -> float:
    return _by_state_size(lambda cache: rcache.copy_prefix(cache, 0, 1, 32)[0].table)


def restore() -> float:
    return _by_state_size(lambda cache: rcache.remove(cache, 0, 32)[0].table)


def remove() -> float:
    return _by_state_size(lambda cache: rcache.remove(cache, 0, 0)[0].table)


def _step_memory(num_slots: int) -> rcache.StepMemory:
    inputs = jax.ShapeDtypeStruct((NUM_STEPS, NUM_ROWS, STATE[-1]), jnp.float32)
    return rcache.reserve(decode_pooled, rcache.abstract(config_of(num_slots)), inputs)[1]


def temporaries() -> float:
    """Temporaries of the compiled decoding loop over the bytes of the rows of one layer that it works on."""
    return _step_memory(64).temporaries / (NUM_ROWS * int(np.prod(STATE)) * 4)


def not_aliased() -> float:
    """Bytes of payload that the compiled decoding loop does not update in place."""
    return max(0, config_of().memory().total - _step_memory(64).aliased)


def temporaries_growth() -> float:
    """Temporaries with 64 times the slots, over those with the fewest."""
    return _step_memory(64 * NUM_ROWS).temporaries / _step_memory(NUM_ROWS).temporaries


BENCHMARKS: dict[str, tuple[Callable[[], float], float]] = {
    "decode_trivial": (decode_trivial, 1.20),
    "fork": (fork, 1.1),
    "restore": (restore, 1.1),
    "remove": (remove, 1.1),
    "temporaries": (temporaries, 2.0),
    "temporaries_growth": (temporaries_growth, 1.1),
    "not_aliased": (not_aliased, 0.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    machine = f"{platform.machine()}, jax {jax.__version__}, {jax.devices()[0].device_kind}"
    results = {}
    for name in arguments.names or BENCHMARKS:
        run, goal = BENCHMARKS[name]
        value = run()
        results[name] = {"value": value, "goal": goal}
        if not arguments.json:
            print(f"{name:<20} {value:>10.2f}   goal <= {goal:<5} {'' if value <= goal else 'not met'}", flush=True)
    print(json.dumps({"machine": machine, "results": results}) if arguments.json else machine)


if __name__ == "__main__":
    main()
