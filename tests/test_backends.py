"""Accelerators write rows with one scatter where the CPU writes slice after slice; the same session, both ways."""

import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from rcache import payload
from tests import small
from tests.differential import Pair

# No other test has this config, so that nothing here was compiled before, for the other way of writing.
POLICY = rcache.CheckpointPolicy(count=2, min_position=2, interval=50)
CONFIG = rcache.Config(
    small.LAYERS, 3, 23, page_size=4, checkpoints=POLICY, max_pass_tokens=6, num_slots=5, num_pages=11
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
    """Padding, forks, captures, refused passes, a middle removal: all that the reference says, by scatters."""
    pair, random = Pair(CONFIG), np.random.default_rng(5)
    text = lambda n: random.integers(0, 97, n).tolist()  # noqa: E731
    statuses = set()
    for _ in range(3):
        pair.forward([(0, text(6)), (2, text(3))], captures=[[1, 2], [1]])
        pair.copy_prefix(0, 1, pair.length(0))
        pair.forward([(1, text(2)), (-1, text(6)), (0, text(5))], captures=[[1], [3], [2, 4]])
        statuses.add(pair.forward([(2, text(6)), (1, text(6)), (0, text(6))], captures=[[1, 2]] * 3))
        pair.remove(1, 3, 5)
        pair.forward([(1, text(1)), (0, text(1))])
        pair.copy_prefix(0, 2, pair.reference.prepare_restore(0, pair.length(0) - 1))
        statuses.add(pair.forward([(2, text(4)), (9, text(1))]))
        for sequence in (1, 0):
            pair.remove(sequence, 0)
    assert rcache.Status.OK in statuses and len(statuses) > 1


def test_nothing_is_written_for_none(accelerator):
    """-1 is not the last row, of states, pages or anything."""
    rows = payload.write_rows(jnp.zeros((2, 3, 2)), jnp.int32(1), jnp.array([-1, 0, -1]), jnp.ones((3, 2)))
    np.testing.assert_array_equal(rows, np.eye(6)[3].reshape(2, 3, 1) * np.ones(2))
    tokens = payload.write_tokens(
        jnp.zeros((2, 2, 3, 2, 1)), jnp.int32(0), jnp.array([-1, 1, -1]), jnp.array([1, 0, 0]), jnp.ones((3, 2, 1))
    )
    assert np.argwhere(tokens).tolist() == [[0, 0, 1, 0, 0], [1, 0, 1, 0, 0]]
