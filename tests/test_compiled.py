"""What operations compile to: no payload where none is needed, updates in place, and nothing that piles up."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from tests import small
from tests.differential import add_offset, check_conserved, step

# Much payload and small tables.
LAYERS = (rcache.Layer({"sum": rcache.State((64, 64))}, rcache.Attention(1, 256)),)
CONTEXT = 64


def config(scale):
    policy = rcache.CheckpointPolicy(count=2, min_position=0, interval=8)
    return rcache.Config(LAYERS, 2, CONTEXT, checkpoints=policy, num_slots=8 * scale, num_pages=12 * scale)


def decode(cache):
    """One token of both sequences; a full one begins anew. Also how many rows read what should not be there.

    The state counts tokens; keys and values hold their position plus one.
    """
    for sequence in (0, 1):
        full = rcache.lengths(cache)[sequence] == CONTEXT
        cache, _ = rcache.remove(cache, sequence, jnp.where(full, 0, jnp.int32(CONTEXT)))
    cache, forward, status = rcache.start_forward(cache, rcache.make_batch([0, 1], [1, 1], 1))
    state = rcache.read_state(cache, forward, 0)["sum"]
    cache = rcache.update_state(cache, forward, 0, {"sum": state + jnp.float32(1)})
    kv = jnp.broadcast_to(forward.positions[:, :, None, None].astype(jnp.float32) + 1, (2, 1, 1, 256))
    cache = rcache.put(cache, forward, 0, kv, kv)
    keys, _, mask = rcache.get(cache, forward, 0)
    length = rcache.lengths(cache).astype(jnp.float32)
    seen = jnp.sum(keys[:, None, :, 0, 0], where=mask, axis=2)[:, 0]
    wrong = (status != rcache.Status.OK) | (state[:, 0, 0] + 1 != length) | (2 * seen != length * (length + 1))
    return cache, jnp.sum(wrong, dtype=jnp.int32)


def decode_thousand(cache):
    def one(_, carry):
        cache, wrong = decode(carry[0])
        return cache, carry[1] + wrong

    return jax.lax.fori_loop(0, 1000, one, (cache, jnp.int32(0)))


@functools.cache
def compiled(scale):
    """A thousand decode steps in one compiled loop that donates the cache."""
    return rcache.reserve(decode_thousand, rcache.abstract(config(scale)))


def payload_bytes(config):
    report = config.memory()
    return report.total - report.table


def payload_part_bytes(config):
    """Bytes of each payload array."""
    return [
        leaf.size * leaf.dtype.itemsize
        for part in small.PAYLOAD
        for leaf in getattr(rcache.abstract(config), part).values()
    ]


ON_THE_TABLE = {
    "copy_prefix": lambda cache: rcache.copy_prefix(cache, 0, 1, 3),
    "remove tail": lambda cache: rcache.remove(cache, 0, 3),
    "prepare_restore": lambda cache: (cache, rcache.prepare_restore(cache, 0, 3)),
    "can_resume": lambda cache: (cache, rcache.can_resume(cache, 0, 3)),
    "remove_exact": lambda cache: rcache.remove_exact(cache, 0, 3, 4),
    "reorder": lambda cache: rcache.reorder(cache, jnp.array([1, 0, 0, -1], jnp.int32)),
    "reset": lambda cache: (rcache.reset(cache), None),
    "start_forward": lambda cache: rcache.start_forward(cache, small.batch([0], [3])),
}


@pytest.mark.parametrize("name", ON_THE_TABLE)
def test_operations_on_sequences_take_no_payload(name):
    """Payload goes into nothing that is compiled, and comes back as it is."""
    cache = rcache.abstract(small.CONFIG)
    jaxpr = jax.make_jaxpr(lambda cache: ON_THE_TABLE[name](cache)[0])(cache).jaxpr
    payload = [leaf for part in small.PAYLOAD for leaf in jax.tree.leaves(getattr(cache, part))]
    is_payload = [any(leaf is other for other in payload) for leaf in jax.tree.leaves(cache)]
    assert sum(is_payload) == len(payload) == 6
    given = [var for var, yes in zip(jaxpr.invars, is_payload, strict=True) if yes]
    returned = [var for var, yes in zip(jaxpr.outvars, is_payload, strict=True) if yes]
    assert all(a is b for a, b in zip(given, returned, strict=True))
    used = {id(var) for equation in jaxpr.eqns for var in equation.invars}
    assert jaxpr.eqns and used.isdisjoint(map(id, given))


def test_a_middle_removal_does_take_payload():
    """The test above can tell."""
    cache = rcache.abstract(small.CONFIG)
    jaxpr = jax.make_jaxpr(lambda cache: rcache.remove(cache, 0, 2, 4, shift=rcache.no_shift)[0])(cache).jaxpr
    assert not set(map(id, jaxpr.invars[-4:])).isdisjoint(id(var) for eqn in jaxpr.eqns for var in eqn.invars)


@pytest.mark.parametrize("scale", [1, 16])
def test_decoding_updates_all_payload_in_place(scale):
    _, memory = compiled(scale)
    assert memory.aliased >= payload_bytes(config(scale))
    assert memory.outputs - memory.aliased < 4096  # nothing of the payload is returned twice
    assert memory.temporaries < min(payload_part_bytes(config(scale)))  # nor is any part of it copied


def test_decoding_one_sequence_updates_its_state_in_place():
    policy = rcache.CheckpointPolicy(count=2, min_position=0, interval=8)
    config = rcache.Config(
        (rcache.Layer({"sum": rcache.State((64, 64))}),), 1, CONTEXT, checkpoints=policy, num_slots=64
    )

    def step(cache, batch):
        cache, forward, _ = rcache.start_forward(cache, batch)
        new = rcache.read_state(cache, forward, 0)["sum"] + jnp.float32(1)
        return rcache.update_state(cache, forward, 0, {"sum": new}), new[:, 0, 0]

    _, memory = rcache.reserve(step, rcache.abstract(config), rcache.make_batch([0], [1], 1))
    assert memory.temporaries < payload_bytes(config) / 2


def test_temporaries_do_not_grow_with_the_pool():
    """Sixteen times the slots and pages: what a step needs besides the cache grows by some tables at most."""
    (_, few), (_, many) = compiled(1), compiled(16)
    tables = config(16).memory().table - config(1).memory().table
    assert many.temporaries - few.temporaries <= 16 * tables < payload_bytes(config(1)) / 10


def test_ten_thousand_steps_leave_nothing_behind():
    """The same arrays are alive before and after."""
    decode, _ = compiled(1)
    cache = rcache.init(config(1))
    alive = set()
    for calls in range(1, 11):
        cache, wrong = decode(cache)
        assert wrong == 0
        assert rcache.lengths(cache).tolist() == [(1000 * calls - 1) % CONTEXT + 1] * 2
        alive.add(count_arrays())
    assert len(alive) == 1, alive
    check_conserved(jax.tree.map(np.asarray, cache))


def count_arrays():
    """Arrays alive, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def random_session(cache, rng, num_operations):
    """All operations in the shapes of a server: whatever they say, OK or refused."""
    for _ in range(num_operations):
        sequence, other, number = (int(n) for n in rng.integers((-1, 0, 0), (5, 4, 12)))
        match rng.integers(9):
            case 0 | 1 | 2:
                ids = [int(i) for i in rng.permutation(4)[: rng.integers(1, 5)]]
                batch = small.batch(ids, [int(n) for n in rng.integers(0, 7, len(ids))])
                cache = step(cache, small.tokens(number), batch)[0]
            case 3:
                cache = rcache.copy_prefix(cache, sequence, other, number)[0]
            case 4:
                cache = rcache.remove(cache, other, rcache.prepare_restore(cache, other, number))[0]
            case 5:
                cache = rcache.remove(cache, sequence, number, number + 2, shift=add_offset)[0]
            case 6:
                cache = rcache.remove_exact(cache, other, number, number + 1)[0]
            case 7:
                cache = rcache.reorder(cache, rng.integers(-1, 4, 4).astype(np.int32))[0]
            case _:
                assert not rcache.can_resume(cache, sequence, 99)
    return cache


def test_a_long_session_compiles_nothing_new():
    compilations = []

    def listen(event, duration, **_):
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    cache = rcache.init(small.CONFIG)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 3 + 1)(jnp.float32(1))
        assert compilations, "the listener must hear of compilations"
        cache = random_session(cache, np.random.default_rng(0), 60)
        compilations.clear()
        random_session(cache, np.random.default_rng(1), 200)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compilations


def test_planning_copies_no_page_pool():
    """In a loop, plans take pages and let them go in place; what they need besides does not grow with the pool."""
    layers = (rcache.Layer({"sum": rcache.State((2,))}), rcache.Layer(attention=rcache.Attention(1, 2)))

    def plan(cache):
        def one(cache, _):
            cache, forward, status = rcache.start_forward(cache, rcache.make_batch([0, 1], [1, 1], 1))
            return cache, (forward.pages[0].token_pages, forward.write_slots, status)

        return jax.lax.scan(one, cache, length=8)

    def temporaries(num_pages):
        config = rcache.Config(layers, 4, CONTEXT, num_slots=8, num_pages=num_pages)
        return rcache.reserve(plan, rcache.abstract(config))[1].temporaries

    assert temporaries(2**16) - temporaries(2**8) < 2**16
