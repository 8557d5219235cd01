"""Runs: several tokens planned at once that come one at a time. Random ones are in test_differential.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from tests.differential import NUM_TOKENS, add_offset, layers, run_step, step
from tests.small import CONFIG, QUERIES, batch, same_tree, tokens, used


def run_batch(sequences, lengths):
    return rcache.make_batch(sequences, lengths, NUM_TOKENS)


def pass_batch(sequences, lengths):
    return rcache.make_batch(sequences, lengths, NUM_TOKENS, captures=np.full((len(lengths), 1), -1))


def run(cache, seed, sequences, planned, came):
    cache, _, status, _, _ = run_step(cache, tokens(seed), run_batch(sequences, planned), jnp.array(came, jnp.int32))
    rcache.raise_if_error(status)
    return cache


def same_cache(got, expected):
    """All that can be asked, and all that a next pass reads and sees."""
    for query in QUERIES:
        same_tree(query.__name__, query(got), query(expected))
    passes = [step(cache, tokens(9), pass_batch([0, 1, 2, 3], [1, 1, 1, 1])) for cache in (got, expected)]
    same_tree("read", passes[0][3], passes[1][3])
    same_tree("seen", passes[0][4], passes[1][4])


@pytest.mark.parametrize(
    ("sequences", "planned", "came"),
    [
        ([1, 0, 3, 2], [6, 5, 4, 3], [6, 5, 4, 3]),  # a fork and its source, a new one, one that resumes inside a page
        ([1, 0, 3, 2], [6, 6, 6, 6], [6, 2, 1, 3]),
        ([2, -1, 1, -1], [1, 6, 6, 0], [1, 0, 4, 0]),
        ([3, -1, -1, -1], [6, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_a_run_is_a_pass_of_the_tokens_that_came(sequences, planned, came):
    cache = used()
    for seed in (5, 6):  # once more on what the first left behind
        by_run = run(cache, seed, sequences, planned, came)
        by_pass, _, status, _, _ = step(cache, tokens(seed), pass_batch(sequences, came))
        rcache.raise_if_error(status)
        same_cache(by_run, by_pass)
        cache = by_run


def test_a_run_begins_inside_a_page_that_is_shared_with_a_checkpoint():
    """What the sequence and the checkpoint share is copied before it is read."""
    cache, _ = rcache.remove(used(), 0, 8)  # resumes at 8, and pages hold 3
    rcache.raise_if_error(_)
    by_pass = step(cache, tokens(5), pass_batch([0, -1, -1, -1], [6, 0, 0, 0]))[0]
    same_cache(run(cache, 5, [0, -1, -1, -1], [6, 0, 0, 0], [6, 0, 0, 0]), by_pass)


def test_an_abandoned_run_leaves_the_cache_as_it_was():
    cache = used()
    before = jax.tree.map(np.array, cache)
    rcache.start_run(cache, run_batch([0, 3, 2, -1], [6, 6, 6, 0]))
    same_tree("cache", jax.tree.map(np.array, cache), before)


def test_a_refused_run_changes_nothing():
    cache = used()
    refused, status = rcache.start_run(cache, run_batch([0, 0, 2, -1], [6, 6, 6, 0]))
    assert status == rcache.Status.DUPLICATE_SEQUENCE
    assert not rcache.run_token(refused, 0).token_mask.any()
    same_tree("cache", rcache.finish_run(refused), cache)


def test_what_came_is_what_layers_wrote():
    """A run that ends early, and tokens out of order: nobody has to say how many came."""
    cache = used()
    unused, status = rcache.start_run(cache, run_batch([0, 1, 2, 3], [6, 6, 6, 6]))
    rcache.raise_if_error(status)
    unused = rcache.finish_run(unused)  # its rows may have slots of their own now, and nothing else
    assert rcache.lengths(unused).tolist() == rcache.lengths(cache).tolist()
    passes = [step(c, tokens(9), pass_batch([0, 1, 2, 3], [1, 1, 1, 1])) for c in (unused, cache)]
    same_tree("read and seen", passes[0][3:], passes[1][3:])

    def three_of_six(cache, indices):
        run_, status = rcache.start_run(cache, run_batch([0, 1, 2, 3], [6, 6, 2, 0]))
        for index in indices:
            token = jax.lax.dynamic_slice_in_dim(tokens(5), max(index, 0), 1, axis=1)
            run_, _, _ = layers(run_, rcache.run_token(run_, index), token)
        return rcache.finish_run(run_), status

    by_pass = step(used(), tokens(5), pass_batch([0, 1, 2, 3], [3, 3, 2, 0]))[0]
    for indices in ((0, 1, 2), (-1, 0, 0, 2, 1, 5, 2, 0)):  # before the first, twice, not yet, and too late
        by_run, status = jax.jit(three_of_six, static_argnums=1)(used(), indices)
        rcache.raise_if_error(status)
        same_cache(by_run, by_pass)


def test_a_token_is_checked_like_other_arguments():
    run_, _ = rcache.start_run(used(), run_batch([0, 1, 2, 3], [1, 1, 1, 1]))
    assert rcache.run_token(run_, 0, [True, False, True, False]).lengths.tolist() == [1, 0, 1, 0]
    for active in (jnp.array([True]), jnp.array(True), jnp.ones((4, 1), bool), jnp.ones(4, jnp.int32)):
        with pytest.raises(AssertionError, match=r"active must be bool\[4\]"):
            rcache.run_token(run_, 0, active)
    for index in (0.0, jnp.zeros(1, jnp.int32), True):
        with pytest.raises(ValueError, match="index must be an integer"):
            rcache.run_token(run_, index)


def test_later_operations_see_nothing_of_tokens_that_did_not_come():
    by_run = run(used(), 5, [0, 1, 2, 3], [6, 6, 6, 6], [2, 1, 3, 5])
    by_pass = step(used(), tokens(5), pass_batch([0, 1, 2, 3], [2, 1, 3, 5]))[0]
    for cut in (lambda c: rcache.remove(c, 2, 1, 3, shift=add_offset)[0], lambda c: rcache.copy_prefix(c, 0, 3, 13)[0]):
        by_run, by_pass = cut(by_run), cut(by_pass)
        same_cache(by_run, by_pass)


def test_plans_and_caches_that_do_not_belong_together_are_refused():
    cache = used()
    run_, _ = rcache.start_run(cache, run_batch([0, 1, 2, 3], [1, 1, 1, 1]))
    _, forward, _ = rcache.start_forward(cache, run_batch([0, 1, 2, 3], [1, 1, 1, 1]))
    token = rcache.run_token(run_, 0)
    for other, plan in ((cache, token), (run_, forward), (run_, run_.plan)):
        with pytest.raises(ValueError, match="a run goes with the plans of run_token"):
            rcache.read_state(other, plan, 0)
        with pytest.raises(ValueError, match="a run goes with the plans of run_token"):
            rcache.get(other, plan, 1)
    one_row, _ = rcache.start_run(cache, run_batch([0], [1]))
    with pytest.raises(ValueError, match="belongs to another run, of other rows"):
        rcache.read_state(run_, rcache.run_token(one_row, 0), 0)
    with pytest.raises(ValueError, match="takes no captures"):
        rcache.start_run(cache, batch([0], [1]))
    with pytest.raises(ValueError, match="context must be"):
        rcache.start_run(cache, run_batch([0, 1, 2, 3], [1, 1, 1, 1]), context=CONFIG.context_length + 1)


def test_layers_in_one_array_can_be_traced():
    """`stacked`: a loop over equal layers with a traced index; without it, such an index is refused by name."""
    layer = rcache.Layer({"sum": rcache.State((2,))}, rcache.Attention(1, 2))
    config = rcache.Config((layer,) * 3, 2, 16, page_size=4, checkpoints=rcache.CheckpointPolicy(min_position=2))

    def token(run, index, layers, x):
        forward = rcache.run_token(run, index)

        def one(layer, carry):
            run, x = carry
            state = rcache.read_state(run, forward, layer)["sum"] + x
            run = rcache.update_state(run, forward, layer, {"sum": state})
            run = rcache.put(run, forward, layer, x[:, None, None], state[:, None, None])
            _, values, mask = rcache.get(run, forward, layer)
            return run, x + values.sum((1, 2), where=mask[:, 0, :, None, None])

        return layers(one, (run, x))

    def loop(one, carry):
        return jax.lax.fori_loop(0, 3, one, carry)

    def written_out(one, carry):
        for layer in range(3):
            carry = one(layer, carry)
        return carry

    def decode(cache, layers, stacked):
        run, status = rcache.start_run(cache, rcache.make_batch([1, 0], [4, 2], 4), stacked=stacked)
        outputs = []
        for index in range(4):
            run, y = token(run, index, layers, jnp.arange(4, dtype=jnp.float32).reshape(2, 2) + index)
            outputs.append(y)
        return rcache.finish_run(run), outputs, status

    decode = jax.jit(decode, static_argnums=(1, 2))
    cache = rcache.init(config)
    for _ in range(2):
        expected = decode(cache, written_out, False)
        same_tree("traced", decode(cache, loop, True), expected)
        same_tree("stacked", decode(cache, written_out, True), expected)
        cache = expected[0]
    with pytest.raises(ValueError, match="layer is traced: start_run"):
        decode(cache, loop, False)
