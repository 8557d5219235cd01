"""What the cache costs beside plain arrays: `python benchmarks/run.py [NAME...] [--json]`.

Every value is a ratio of two things timed in turn in one run (median of many; compilation apart), or bytes read off the
compiled program, so that it holds on a noisy machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rcache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from models import recurrence

NUM_LAYERS, NUM_ROWS, NUM_STEPS = 8, 8, 64
STATE = (8, 64, 64)


def config_of(num_slots: int = 64, state: tuple[int, ...] = STATE, **options: Any) -> rcache.Config:
    """Layers of one matrix-valued state, a pool of `num_slots`."""
    options = {"max_sequences": 64, "context_length": 4096, "num_slots": num_slots} | options
    return rcache.Config((rcache.Layer({"state": rcache.State(state)}),) * NUM_LAYERS, **options)


def cheap_update(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A rank-one update, so that little but the moving of states is left: [B, H, D, D] by [B, D]."""
    return x, state * jnp.float32(0.99) + x[:, None, :, None] * x[:, None, None, :]


def delta_update(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A token of the gated delta rule: [B, H, D, D] by [B, D], which gives queries, keys, values and gates."""
    key = jnp.broadcast_to(x[:, None], state.shape[:3]) * jnp.float32(8)
    gate = jnp.broadcast_to(x[:, :1], state.shape[:2])
    offsets = jnp.ones((state.shape[0], 1), jnp.int32)
    one = lambda value: value[:, None]  # noqa: E731
    outputs, states = recurrence.linear_attention(
        one(key), one(key), one(key), one(-jnp.abs(gate)), state, offsets, beta=one(jax.nn.sigmoid(gate))
    )
    return outputs[:, 0], states[:, 0]


Step = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # state, x to output, new state


def decode_by_pass(step: Step, cache: rcache.Cache, inputs: jax.Array) -> tuple[rcache.Cache, jax.Array]:
    """One token a step for `B` sequences of the cache, each step planned by itself: inputs [steps, B, D]."""
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32), 1)

    def one(cache: rcache.Cache, x: jax.Array) -> tuple[rcache.Cache, jax.Array]:
        cache, forward, _ = rcache.start_forward(cache, batch)
        return _layers(step, cache, forward, x)

    return lax.scan(one, cache, inputs)


def decode_by_run(step: Step, cache: rcache.Cache, inputs: jax.Array) -> tuple[rcache.Cache, jax.Array]:
    """The same, planned at once."""
    num_steps = inputs.shape[0]
    batch = rcache.make_batch(np.arange(NUM_ROWS), np.full(NUM_ROWS, num_steps, np.int32), num_steps)
    run, _ = rcache.start_run(cache, batch)

    def one(run: rcache.Run, token: tuple[jax.Array, jax.Array]) -> tuple[rcache.Run, jax.Array]:
        index, x = token
        return _layers(step, run, rcache.run_token(run, index), x)

    run, outputs = lax.scan(one, run, (jnp.arange(num_steps, dtype=jnp.int32), inputs))
    return rcache.finish_run(run), outputs


def _layers(step: Step, cache: Any, forward: rcache.Forward, x: jax.Array) -> tuple[Any, jax.Array]:
    def layer(index: jax.Array, carry: tuple) -> tuple:
        cache, total = carry
        output, state = step(rcache.read_state(cache, forward, index)["state"], x)
        return rcache.update_state(cache, forward, index, {"state": state}), total + jnp.sum(output)

    return lax.fori_loop(0, NUM_LAYERS, layer, (cache, jnp.float32(0)))


def decode_dense(step: Step, states: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same arithmetic on plain arrays [L, B, *state] without any cache."""

    def one(states: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(index: jax.Array, carry: tuple) -> tuple:
            states, total = carry
            output, state = step(lax.dynamic_index_in_dim(states, index, keepdims=False), x)
            return lax.dynamic_update_index_in_dim(states, state, index, 0), total + jnp.sum(output)

        return lax.fori_loop(0, NUM_LAYERS, layer, (states, jnp.float32(0)))

    return lax.scan(one, states, inputs)


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


def _inputs() -> jax.Array:
    return jnp.full((NUM_STEPS, NUM_ROWS, STATE[-1]), 0.01, jnp.float32)


def _active_states() -> jax.Array:
    return jnp.zeros((NUM_LAYERS, NUM_ROWS, *STATE), jnp.float32)


def _pooled(decode: Callable, step: Step) -> Callable[[], Any]:
    """The call that decodes over a pool; sequences that grow too long begin again."""
    jitted, held = jax.jit(partial(decode, step), donate_argnums=0), [rcache.init(config_of()), 0]

    def call() -> Any:
        if held[1] + NUM_STEPS > held[0].config.context_length:
            held[:] = rcache.reset(held[0]), 0
        held[0], outputs = jitted(held[0], _inputs())
        held[1] += NUM_STEPS
        return held[0], outputs

    return call


def _over_dense(decode: Callable, step: Step) -> float:
    dense = carried(partial(decode_dense, step), _active_states(), _inputs())
    return paired_ratio(_pooled(decode, step), dense, rounds=25)


def decode_trivial() -> float:
    return _over_dense(decode_by_run, cheap_update)


def decode_trivial_by_pass() -> float:
    return _over_dense(decode_by_pass, cheap_update)


def decode_state() -> float:
    return _over_dense(decode_by_run, delta_update)


def decode_state_by_pass() -> float:
    return _over_dense(decode_by_pass, delta_update)


def decode_floor() -> float:
    """A step over the copying of the active states, each byte read once and written once."""
    source = np.zeros((NUM_LAYERS, NUM_ROWS, *STATE), np.float32)
    target = np.empty_like(source)

    def copies() -> None:
        for _ in range(NUM_STEPS):
            np.copyto(target, source)

    return paired_ratio(_pooled(decode_by_run, delta_update), copies, rounds=25)


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
    return rcache.reserve(partial(decode_by_run, delta_update), rcache.abstract(config_of(num_slots)), inputs)[1]


def temporaries() -> float:
    """Temporaries of the compiled decoding loop over the bytes of the active rows."""
    return _step_memory(64).temporaries / _active_states().nbytes


def not_aliased() -> float:
    """Bytes of payload that the compiled decoding loop does not update in place."""
    return max(0, config_of().memory().total - _step_memory(64).aliased)


def temporaries_growth() -> float:
    """Temporaries with 64 times the slots, over those with the fewest."""
    return _step_memory(64 * NUM_ROWS).temporaries / _step_memory(NUM_ROWS).temporaries


BENCHMARKS: dict[str, tuple[Callable[[], float], float]] = {
    "decode_state": (decode_state, 1.05),
    "decode_state_by_pass": (decode_state_by_pass, math.inf),
    "decode_floor": (decode_floor, 2.0),
    "decode_trivial": (decode_trivial, 1.20),
    "decode_trivial_by_pass": (decode_trivial_by_pass, math.inf),
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
