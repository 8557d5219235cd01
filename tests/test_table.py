"""The parts the table is made of: look-ups by ids that may be none, rows of integers, pools of ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rcache import pool as pools, records as recording
from rcache.checkpoints import Checkpoints
from rcache.indexing import add, look_up, store
from tests.small import same_tree

IDS = np.array([0, 2, 3, -1, -3, 2**31 - 1, -(2**31)], np.int32)
"""Two inside a table of three, the others outside."""


@pytest.mark.parametrize("values", [np.arange(1, 4, dtype=np.int32), np.array([True, True, True]), np.ones((3, 2, 1))])
def test_look_up_answers_a_filler_outside(values):
    filler = False if values.dtype == bool else 7
    got = look_up(jnp.asarray(values), jnp.asarray(IDS), filler)
    expected = np.full((len(IDS), *values.shape[1:]), filler, values.dtype)
    expected[:2] = values[[0, 2]]
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == jnp.asarray(values).dtype
    for index in IDS:
        inside = 0 <= index < 3
        np.testing.assert_array_equal(
            look_up(jnp.asarray(values), jnp.int32(index), filler),
            values[index] if inside else np.full(values.shape[1:], filler),
        )


def test_look_up_by_two_ids():
    values = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    got = look_up(values, (jnp.array([[0], [1], [2]]), jnp.array([0, 2, 3, -1])), -7)
    assert got.tolist() == [[0, 2, -7, -7], [3, 5, -7, -7], [-7] * 4]


def test_look_up_where_there_is_nothing():
    assert look_up(jnp.zeros(0, jnp.int32), jnp.array([0, -1]), -7).tolist() == [-7, -7]
    assert look_up(jnp.zeros((0, 2), jnp.int32), jnp.array([0, -1]), -7).tolist() == [[-7, -7]] * 2


def test_look_up_with_a_filler_for_each_column():
    got = look_up(jnp.zeros((3, 2), jnp.int32), jnp.asarray(IDS), jnp.array([4, 5], jnp.int32))
    assert got.tolist() == [[0, 0]] * 2 + [[4, 5]] * 5


def test_nothing_is_written_outside():
    ones = jnp.ones(3, jnp.int32)
    assert store(ones, jnp.asarray(IDS), 5).tolist() == [5, 1, 5]
    assert add(ones, jnp.asarray(np.concatenate([IDS, IDS])), 5).tolist() == [11, 1, 11]


@pytest.mark.parametrize("layout", [recording.Layout(0, ()), recording.Layout(3, ()), recording.Layout(2, (0, 3, 1))])
@pytest.mark.parametrize("shape", [(), (4,), (2, 4)])
def test_a_record_survives_being_one_row(layout, shape):
    random = np.random.default_rng(0)
    numbers = lambda *tail: jnp.asarray(random.integers(-5, 90, (*shape, *tail)), jnp.int32)  # noqa: E731
    k = layout.num_checkpoints
    record = recording.Record(
        length=numbers(),
        slot=numbers(),
        approximate=numbers() > 40,
        first=tuple(numbers() for _ in layout.window_pages),
        checkpoints=Checkpoints(
            numbers(k), numbers(k), numbers(k), tuple(numbers(k, size) for size in layout.window_pages)
        ),
    )
    values = recording.pack(record)
    assert values.shape == (*shape, layout.width)
    same_tree("record", recording.unpack(values, layout), record)
    fields = jax.tree.leaves(recording.unpack(jnp.arange(layout.width, dtype=jnp.int32), layout))
    assert sum(field.size for field in fields) == layout.width  # and none is read twice


def test_an_exchange_is_its_parts_one_after_the_other():
    """Ids taken, then holders added, then holders gone: at once, with the same ids in the same order."""
    random, pool = np.random.default_rng(1), pools.init(12)
    holders: list[int] = []
    for _ in range(200):
        wanted = random.random(3) < 0.4
        wanted &= np.cumsum(wanted) <= int(pool.num_free)
        shared = [random.choice(holders) if holders and random.random() < 0.5 else -1 for _ in range(3)]
        left = [holders[i] for i in random.permutation(len(holders))[: random.integers(0, 4)]]
        left_ids = jnp.array((left + [-1] * 3)[:3], jnp.int32)
        shared_ids = jnp.array(shared, jnp.int32)
        taken, expected_ids = pools.allocate(pool, jnp.asarray(wanted))
        expected = pools.release(pools.share(taken, shared_ids), left_ids)
        pool, ids = pools.exchange(pool, left_ids, wanted=jnp.asarray(wanted), shared=shared_ids)
        same_tree("pool", pool, expected)
        same_tree("ids", ids, expected_ids)
        holders += [int(i) for i in ids if i >= 0] + [i for i in shared if i >= 0]
        for i in left:
            holders.remove(i)
        assert pool.ref_count.tolist() == np.bincount(holders, minlength=12).tolist()
        assert sorted(pool.free[: int(pool.num_free)].tolist()) == sorted(set(range(12)) - set(holders))
