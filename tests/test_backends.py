"""A row that is read alone is read in a loop on CPU and gathered elsewhere; the same session, as elsewhere."""

import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from rcache import payload
from tests import small
from tests.differential import Pair

# No other test has this config, so that nothing here was compiled before, for the other way of reading.
POLICY = rcache.CheckpointPolicy(count=2, min_position=2, interval=5)
CONFIG = rcache.Config(
    small.LAYERS, 1, 23, page_size=4, checkpoints=POLICY, max_pass_tokens=6, num_slots=3, num_pages=11
)  # fmt: skip


@pytest.fixture
def accelerator(monkeypatch):
    """`platform_dependent` chooses as it would anywhere but on a CPU."""
    chosen = []

    def choose(*args, default, **others):
        chosen.append(sorted(others))
        return default(*args)

    monkeypatch.setattr(payload.lax, "platform_dependent", choose)
    yield
    assert chosen and all(others == ["cpu"] for others in chosen)


def test_a_session_as_on_an_accelerator(accelerator):
    """Padding, captures, rollbacks to a shared slot, refused passes, a middle removal: all that the reference says."""
    pair, random = Pair(CONFIG), np.random.default_rng(5)
    text = lambda n: random.integers(0, 97, n).tolist()  # noqa: E731
    statuses = set()
    for _ in range(3):
        pair.forward([(0, text(6))], captures=[[1, 2]])
        pair.forward([(0, text(5))], captures=[[3, 4]])
        pair.remove(0, pair.reference.prepare_restore(0, pair.length(0) - 1))
        pair.forward([(0, text(2))])
        pair.forward([(-1, text(6))])
        statuses.add(pair.forward([(1, text(6))]))
        pair.remove(0, 3, 5)
        pair.forward([(0, text(1))])
        pair.remove(0, 0)
    assert statuses == {rcache.Status.SEQUENCE_OUT_OF_RANGE}


@pytest.mark.parametrize("slot", [-1, 0, 2])
def test_one_row_is_read_alike_anywhere(slot, monkeypatch):
    """-1 is not the last row, and what it reads is zero even where the pool is not finite."""
    buffer = jnp.arange(12, dtype=jnp.float32).reshape(2, 3, 2).at[:, 1].set(jnp.nan)
    buffer = jnp.full_like(buffer, jnp.nan) if slot < 0 else buffer
    expected = np.zeros((1, 2)) if slot < 0 else np.array(buffer)[1, [slot]]
    slots = jnp.array([slot], jnp.int32)
    np.testing.assert_array_equal(payload.read_rows(buffer, 1, slots), expected)
    monkeypatch.setattr(payload.lax, "platform_dependent", lambda *args, default, cpu: default(*args))
    np.testing.assert_array_equal(payload.read_rows(buffer, 1, slots), expected)


def test_nothing_is_written_for_none():
    """-1 is not the last row, of states, pages or anything."""
    rows = payload.write_rows(jnp.zeros((2, 3, 2)), 1, jnp.array([-1, 0, -1]), jnp.ones((3, 2)))
    np.testing.assert_array_equal(rows, np.eye(6)[3].reshape(2, 3, 1) * np.ones(2))
    tokens = payload.write_tokens(
        jnp.zeros((2, 2, 3, 2, 1)), 0, jnp.array([-1, 1, -1]), jnp.array([1, 0, 0]), jnp.ones((3, 2, 1))
    )
    assert np.argwhere(tokens).tolist() == [[0, 0, 1, 0, 0], [1, 0, 1, 0, 0]]
