"""One battery over every operation: what holds for all of them, whatever they do.

An operation is a function (cache, forward, number i32[]) -> (cache, status i32[] or None, anything else it answers).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from tests import small
from tests.differential import add_offset


def start_forward(cache, forward, number):
    del forward
    lengths = jnp.stack([number, jnp.int32(1), jnp.int32(2), number])
    batch = small.batch([0, 3, -1, 1], [0] * 4, captures=[[1]]).replace(lengths=lengths)
    cache, forward, status = rcache.start_forward(cache, batch)
    return cache, status, forward


def read_state(cache, forward, number):
    del number
    return cache, None, rcache.read_state(cache, forward, 0)


def update_state(cache, forward, number):
    filled = lambda state, *axes: jnp.full((*axes, *state.shape), number.astype(state.dtype))  # noqa: E731
    states = {name: filled(state, *forward.lengths.shape) for name, state in small.LAYERS[0].states}
    captured = {name: filled(state, *forward.capture_slots.shape) for name, state in small.LAYERS[0].states}
    return rcache.update_state(cache, forward, 0, states, captured=captured), None


def ensure_writable(cache, forward, number):
    del number
    cache, forward = rcache.ensure_writable(cache, forward)
    return cache, None, forward


def put(cache, forward, number):
    keys = jnp.full((*forward.token_mask.shape, 2, 4), number.astype(jnp.float32))
    return rcache.put(cache, forward, 1, keys, -keys[..., :3]), None


def get(cache, forward, number):
    del number
    return cache, None, rcache.get(cache, forward, 2)


def copy_prefix(cache, forward, number):
    del forward
    cache, length, status = rcache.copy_prefix(cache, 0, 3, number)
    return cache, status, length


def can_resume(cache, forward, number):
    del forward
    return cache, None, rcache.can_resume(cache, 0, number)


def prepare_restore(cache, forward, number):
    del forward
    return cache, None, rcache.prepare_restore(cache, 0, number)


def remove_tail(cache, forward, number):
    del forward
    return rcache.remove(cache, 0, number)


def remove_middle(cache, forward, number):
    del forward
    return rcache.remove(cache, 0, number, number + 2, shift=add_offset)


def remove_whole(cache, forward, number):
    del forward
    return rcache.remove(cache, number)


def remove_exact(cache, forward, number):
    del forward
    cache, num_rerun, status = rcache.remove_exact(cache, 0, number, 10)
    return cache, status, num_rerun


def reorder(cache, forward, number):
    del forward
    return rcache.reorder(cache, jnp.stack([number, jnp.int32(0), jnp.int32(-1), jnp.int32(1)]))


def reset(cache, forward, number):
    del forward, number
    return rcache.reset(cache), None


def queries(cache, forward, number):
    del forward, number
    answers = [query(cache) for query in (rcache.slots, *small.QUERIES)]
    return cache, None, answers


# Four numbers each, worked through in order. Where there is a status, at least one number is refused and one is not.
OPERATIONS = {
    start_forward: (5, 7, 1, 2),
    read_state: (0, 0, 0, 0),
    update_state: (3, 1, 4, 2),
    ensure_writable: (0, 0, 0, 0),
    put: (3, 1, 4, 2),
    get: (0, 0, 0, 0),
    copy_prefix: (11, 99, 7, -1),
    can_resume: (0, 5, 6, 12),
    prepare_restore: (11, 10, 5, -3),
    remove_tail: (10, 8, -1, 6),
    remove_middle: (3, -1, 7, 5),
    remove_whole: (1, 4, 0, 0),
    remove_exact: (7, 8, 11, 6),
    reorder: (2, 4, 1, -2),
    reset: (0, 0, 0, 0),
    queries: (0, 0, 0, 0),
}
ON_THE_PLAN = (read_state, update_state, ensure_writable, put, get)
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)


def before(operation):
    cache, forward = small.planned()
    return (cache if operation in ON_THE_PLAN else small.used()), forward


@functools.cache
def standalone(operation):
    """What separate calls return, one after the other, each on the cache of the one before."""
    cache, forward = before(operation)
    results = []
    for number in OPERATIONS[operation]:
        results.append(operation(cache, forward, jnp.int32(number)))
        cache = results[-1][0]
    return results


@every_operation
def test_compiled_loops_equal_standalone_calls(operation):
    """A `scan` in a `while_loop` in a `jit` that donates the cache does bit for bit what separate calls do."""
    num_traces = 0

    @functools.partial(jax.jit, donate_argnums=0)
    def compiled(cache, forward, numbers):
        nonlocal num_traces
        num_traces += 1

        def one(cache, number):
            cache, *rest = operation(cache, forward, number)
            return cache, rest

        def some(carry):
            i, cache, answers = carry
            cache, new = jax.lax.scan(one, cache, numbers[i])
            return i + 1, cache, jax.tree.map(lambda all_, new: all_.at[i].set(new), answers, new)

        shapes = jax.eval_shape(lambda cache: jax.lax.scan(one, cache, numbers[0])[1], cache)
        answers = jax.tree.map(lambda a: jnp.zeros((numbers.shape[0], *a.shape), a.dtype), shapes)
        carry = (jnp.int32(0), cache, answers)
        return jax.lax.while_loop(lambda carry: carry[0] < numbers.shape[0], some, carry)[1:]

    expected = standalone(operation)
    cache, forward = before(operation)
    cache = jax.tree.map(jnp.copy, cache)
    answers = []
    for half in (
        OPERATIONS[operation][:2],
        OPERATIONS[operation][2:],
    ):  # the second call donates what the first returned
        cache, answer = compiled(cache, forward, jnp.array([half[:1], half[1:]], jnp.int32))
        answers += [jax.tree.map(lambda a, i=i: a[i, 0], answer) for i in range(2)]
    small.same_tree("cache", cache, expected[-1][0])
    for number, got, wanted in zip(OPERATIONS[operation], answers, expected, strict=True):
        small.same_tree(f"answer for {number}", got, list(wanted[1:]))
    assert num_traces == 1  # whatever the numbers


@every_operation
def test_structure_shapes_and_dtypes_stay(operation):
    cache, _ = before(operation)
    after = standalone(operation)[0][0]
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        assert jax.typeof(new) == jax.typeof(old)  # shape, dtype and weak type
        assert not new.weak_type
    for answer in jax.tree.leaves(standalone(operation)[0][1:]):
        assert answer.dtype in (jnp.int32, jnp.bool_, jnp.float32) and not answer.weak_type


@every_operation
def test_a_refused_operation_returns_the_cache_given(operation):
    cache, _ = before(operation)
    statuses = []
    for after, status, *_ in standalone(operation):
        statuses.append(None if status is None else rcache.Status(int(status)))
        if statuses[-1] not in (None, rcache.Status.OK):
            small.same_tree("cache", after, cache)
        cache = after
    if statuses[0] is not None:
        assert rcache.Status.OK in statuses and len(set(statuses)) > 1, "the numbers above must try both"


@every_operation
def test_what_an_operation_returns_can_be_donated(operation):
    """No two leaves share a buffer."""
    assert_apart(standalone(operation)[0][0])


def test_init_can_be_donated():
    assert_apart(rcache.init(small.CONFIG))


def assert_apart(cache):
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache) if leaf.size]
    assert len(set(pointers)) == len(pointers)


def test_stale_payload_never_shows():
    """The canary: with NaN wherever nothing was written yet, callers read what they read of a cache of zeros."""
    zeros = rcache.init(small.CONFIG)
    nans = zeros.replace(
        **{part: jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), getattr(zeros, part)) for part in small.PAYLOAD}
    )
    assert all(np.isnan(leaf).all() for part in small.PAYLOAD for leaf in jax.tree.leaves(getattr(nans, part)))
    of_zeros, of_nans = everything_read(zeros), everything_read(nans)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(of_nans))
    small.same_tree("read", of_nans, of_zeros)


def everything_read(cache):
    """What a caller reads in a session with a fork, a roll-back, a middle removal, reused slots and padding."""
    read = []

    def run(seed, batch):
        nonlocal cache
        cache, forward, _, *seen = small.run(cache, seed, batch)
        read.append((seen, forward.replace(config=None)))

    run(0, small.batch([0, 2], [6, 4]))
    run(1, small.batch([0], [5], captures=[[2]]))
    cache = rcache.copy_prefix(cache, 0, 1, 11)[0]
    run(2, small.batch([1, 0], [1, 6], bidirectional=[[-1], [-1, 0, 0, 0]]))
    cache, status = rcache.remove(cache, 0, 3, 5, shift=add_offset)
    assert status == rcache.Status.OK
    run(3, small.batch([-1, 0], [6, 2]))
    cache, status = rcache.remove(cache, 1, 8)
    assert status == rcache.Status.OK
    cache = rcache.remove(cache, 2)[0]
    run(4, small.batch([2, 1, 3], [1, 3, 2]))
    cache, forward, _ = rcache.start_forward(cache, small.batch([0, 3], [1, 0], captures=[]))
    cache, forward = rcache.ensure_writable(cache, forward)
    read.append([rcache.read_state(cache, forward, layer) for layer in (0, *small.EQUAL_LAYERS)])
    return read
