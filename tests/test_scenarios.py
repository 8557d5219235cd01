"""What has gone wrong in other caches with this job: one test for each sequence of operations that did.

`tests/oracle.py` has the expected values: a fresh prefill of exactly the current tokens. `Lineage` holds every state,
checkpoint, key and value against it after every operation, so most tests here only say what is done, and what else
must hold. Payload begins as NaN. Every scenario runs twice on one cache: cold, and then warm, over what it left behind.

Sizes are those of the reports divided by about ten (an interval of 20 for one of 1664 at most, passes of 6 or 8 tokens
for 128), so that a test takes milliseconds. Saving, sharding and models are tested elsewhere.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from rcache import Status
from tests.differential import same
from tests.oracle import CHUNK, NUM_CAPTURES, Lineage, same_caches, same_states, step, twice

LAYERS = (
    rcache.Layer({"conv": rcache.State((3, 2)), "sum": rcache.State((2, 2))}),
    rcache.Layer(attention=rcache.Attention(2, 3)),
    rcache.Layer({"conv": rcache.State((3, 2))}),
)
CONV_WIDTH = 4  # three inputs are kept

MAIN = rcache.Config(LAYERS, 8, 160, page_size=4, max_pass_tokens=CHUNK, checkpoints=rcache.CheckpointPolicy(6, 6, 20))
# As many slots as sequences, and nothing else to fall back on.
TIGHT = rcache.Config(
    LAYERS, 4, 40, page_size=4, max_pass_tokens=CHUNK, num_slots=4, checkpoints=rcache.CheckpointPolicy(0)
)
# Fewer slots than sequences; every pass leaves a checkpoint.
PINNED = rcache.Config(
    LAYERS, 4, 40, page_size=4, max_pass_tokens=CHUNK, num_slots=3, checkpoints=rcache.CheckpointPolicy(6, 0, 1)
)


def window(layer, tokens):
    """What a conv state is: the last inputs of the layer, zero before the first."""
    inputs = [[token + 7 * layer, token + 7 * layer + 1] for token in tokens]
    return np.array([[0, 0]] * (CONV_WIDTH - 1) + inputs, np.float32)[-(CONV_WIDTH - 1) :]


def counts(cache):
    """Counters and free counts, as integers."""
    free = (rcache.free_slots(cache), *rcache.free_pages(cache))
    return [int(number) for number in (*jax.tree.leaves(rcache.counters(cache)), *free)]


def solo(config, *passes):
    """A virgin cache in which sequence 0 alone ran these passes."""
    alone = Lineage(config)
    for tokens in passes:
        alone.run({0: tokens})
    return alone


# Stale state


@pytest.mark.parametrize("passes", [(1, 1), (7,), (8, 8, 3), (2,)], ids=["decode", "prefill", "chunks", "below conv"])
def test_freed_slot_starts_from_zero(passes):
    """A sequence that moves into the only free slot equals the same sequence in a virgin cache."""
    for cache, text in twice(TIGHT):
        cache.prefill({sequence: text(11) for sequence in range(4)})
        assert int(rcache.free_slots(cache.cache)) == 0
        for sequence in (0, 2):
            cache.cut(sequence)
            given = [text(n) for n in passes]
            for tokens in given:
                cache.run({sequence: tokens})
            same_states("the new tenant", cache.states(sequence), solo(TIGHT, *given).states(0))
            same(
                "conv only",
                cache.states(sequence)[2, "conv"],
                window(2, [token for tokens in given for token in tokens]),
            )


def test_preempted_sequence_is_recomputed_from_the_beginning():
    """A sequence pushed out under pressure and run again from position 0 forgets what its slot held."""
    for cache, text in twice(TIGHT):
        tokens = text(13)
        cache.prefill({1: tokens, 2: text(9)})
        before = cache.states(1)
        cache.cut(1)
        cache.run({1: tokens[:8]}, positions={1: range(8)})
        cache.run({1: tokens[8:]}, positions={1: range(8, 13)})
        same_states("recomputed", cache.states(1), before)


def test_unwritten_payload_is_never_read():
    """With every element NaN at first, nothing that comes out of a pass, a fork, a restore or a removal is NaN."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(27), 3: text(5)}, captures={0: [10, 13]})
        cache.fork(0, 1)
        cache.fork(0, 2, 13)
        forward, read, visible = cache.run({2: text(3), 4: text(1), 1: text(8)})
        cache.cut(1, 14, 19)
        _, moved, seen = cache.run({1: text(2)})
        for leaf in jax.tree.leaves((read, visible, moved, seen)):
            assert np.all(np.isfinite(leaf))
        assert np.all(np.asarray(forward.positions) >= 0)


def test_reused_sequence_has_no_entry_of_the_old_one():
    """Whatever the table says about a sequence and its slot is what it says in a virgin cache."""
    for cache, text in twice(MAIN):
        cache.prefill({5: text(60)}, captures={5: [4, 30, 33]})
        cache.fork(5, 6)
        cache.cut(5, 20, 25)
        assert np.asarray(rcache.approximate(cache.cache))[5]
        cache.cut(5)
        tokens, before = text(10), counts(cache.cache)
        virgin = Lineage(MAIN)
        cache.prefill({5: tokens})
        virgin.prefill({5: tokens})
        for now, new in zip(_entries(cache.cache, 5), _entries(virgin.cache, 5), strict=True):
            same("entry", now, new)
        gained = np.array(counts(cache.cache)) - before
        same("counters", gained, np.array(counts(virgin.cache)) - counts(rcache.init(MAIN)))


def _entries(cache, sequence):
    """All of the table about one sequence; of slots and pages, whether there is one and how many hold it."""
    table = jax.tree.map(np.asarray, cache.table)
    held = lambda pool, ids: np.where(ids >= 0, pool.ref_count[ids], -1)  # noqa: E731
    record = jax.tree.map(lambda leaf: leaf[sequence], table.sequences)
    yield from (record.length, record.approximate, record.checkpoints.positions, record.checkpoints.flags)
    yield held(table.slot_pool, record.slot)
    yield held(table.slot_pool, record.checkpoints.slots)
    for page_table, first in zip(table.page_tables, record.first, strict=True):
        yield from (first, held(page_table.pool, page_table.pages[sequence]))


# Padding


def test_padded_batch_is_bit_equal_to_the_unpadded_one():
    """Three live rows padded to eight leave every bit, slot 0 and the last slot included, as three rows do."""
    for cache, text in twice(MAIN):
        cache.prefill({7: text(9), 0: text(4), 4: text(15)}, captures={0: [2]})
        rows = {0: text(3), 7: text(8), 4: text(1)}
        _, tokens, batch = cache.batch(rows, num_rows=3)
        narrow, plan, status, read, visible = step(cache.cache, jnp.asarray(tokens), batch)
        assert int(status) == Status.OK
        forward, read_padded, visible_padded = cache.run(rows)
        same_caches(narrow, cache.cache)
        live = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf)[:3], tree)  # noqa: E731
        same_caches((read, visible, plan.positions), live((read_padded, visible_padded, forward.positions)))


def test_sequences_left_out_are_untouched():
    """A batch of four, then one of two and padding: the other two sequences keep every bit."""
    for cache, text in twice(MAIN):
        cache.prefill({sequence: text(12) for sequence in range(4)})
        before = {sequence: cache.states(sequence) for sequence in (0, 3)}
        row = jax.tree.map(np.asarray, list(_entries(cache.cache, 3)))
        slots = np.asarray(rcache.slots(cache.cache))
        for _ in range(3):
            cache.run({2: text(5), 1: text(1)})
        for sequence, states in before.items():
            same_states("left out", cache.states(sequence), states)
            same("slot", np.asarray(rcache.slots(cache.cache))[sequence], slots[sequence])
        for now, new in zip(_entries(cache.cache, 3), row, strict=True):
            same("entry", now, new)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_ragged_prefill_does_not_decay_over_padding(num_rows):
    """Rows of 7, 3 and 1 tokens in passes of 8: states stop at the last real token, conv windows end with it."""
    for cache, text in twice(MAIN if num_rows > 1 else TIGHT):
        for rows in [{0: text(7), 1: text(3), 2: text(1)}, {0: text(8), 1: text(1), 2: text(2)}]:
            if num_rows == 1:
                for sequence, tokens in rows.items():
                    cache.run({sequence: tokens}, num_rows=1)
            else:
                cache.run(rows)
            for sequence in rows:
                for layer in (0, 2):
                    expected = window(layer, cache.tokens(sequence))
                    same("conv window", cache.states(sequence)[layer, "conv"], expected)


def test_one_token_row_beside_verifying_rows():
    """A decoding row padded to the K + 1 positions of a draft equals a decoding row among its like."""
    for cache, text in twice(MAIN):
        tokens, drafts = text(12), text(5)
        cache.prefill({0: tokens, 1: tokens, 2: text(9)})
        cache.run({0: [5]})
        cache.run({2: drafts, 1: [5]}, captures={2: [1, 2, 3, 4]})
        same_states("padded", cache.states(1), cache.states(0))
        cache.run({0: [6], 1: [6]})
        same_states("after it", cache.states(1), cache.states(0))


def test_padding_is_finite_and_in_no_reduction():
    """Rows of padding read zeros and see nothing, so a softmax or a mean under the masks is finite without them."""
    for cache, text in twice(MAIN):
        cache.prefill({3: text(12), 1: text(9)})
        forward, read, visible = jax.tree.map(np.asarray, cache.run({1: text(4), 3: []}))
        assert forward.token_mask.sum() == 4 and forward.lengths.tolist() == [4] + [0] * 7
        assert not forward.positions[1:].any() and forward.sequences.tolist() == [1] + [-1] * 7
        for leaf in jax.tree.leaves(read):
            assert not leaf[1:].any()
        for keys, values, mask in visible.values():
            assert not mask[1:].any() and not mask[0, 4:].any() and mask[0, :4].any(axis=1).all()
            assert not keys[1:].any() and not values[1:].any()


def test_slots_are_a_permutation_of_sequences():
    """Slot numbers and sequence ids are both small integers; nothing takes one for the other."""
    for cache, text in twice(TIGHT):
        for slot in np.asarray(cache.cache.table.slot_pool.free)[::-1].tolist():  # handed out in this order
            cache.run({(slot + 1) % 4: text(3)})
        assert np.asarray(rcache.slots(cache.cache)).tolist() == [3, 0, 1, 2]
        cache.run({1: text(2), 3: text(8)})
        cache.cut(2)
        cache.run({0: text(1), 2: text(5)})
        cache.run({3: text(1), 1: text(4), 0: text(7)})


# Sharing


def test_fork_and_run_less_than_the_conv_width():
    """The fork's conv window mixes shared and own inputs; the source keeps every bit."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(18)})
        cache.fork(0, 1)
        before, tokens = cache.states(0), text(2)
        cache.run({1: tokens})
        same_states("source", cache.states(0), before)
        expected = window(0, cache.tokens(0)[-1:] + tuple(tokens))
        same("the fork's window", cache.states(1)[0, "conv"], expected)
        cache.run({0: text(1), 1: text(1)})


def test_removed_twice():
    """A second removal frees nothing again: two new sequences get two slots, and counts stay conserved."""
    for cache, text in twice(TIGHT):
        cache.prefill({sequence: text(6) for sequence in range(4)})
        for sequence in (1, 1, 2):
            cache.cut(sequence)
            assert int(rcache.free_slots(cache.cache)) == (1 if sequence == 1 else 2)
        cache.run({1: text(3), 2: text(4)})
        slots = np.asarray(rcache.slots(cache.cache)).tolist()
        assert sorted(slots) == [0, 1, 2, 3]


def test_plan_made_and_abandoned():
    """Reserving slots and pages in a value that is dropped takes nothing from the value before it."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(10)})
        cache.fork(0, 1)
        before, value = counts(cache.cache), cache.cache
        _, tokens, batch = cache.batch({0: text(8), 1: text(8), 2: text(3)}, captures={0: [2]})
        reserved, _, status = rcache.start_forward(cache.cache, batch)
        assert int(status) == Status.OK and counts(reserved) != before
        step(cache.cache, jnp.asarray(tokens), batch)
        assert counts(cache.cache) == before and cache.cache is value
        cache.run({0: text(2), 2: text(5)})


def test_beam_search_reorder():
    """Sequences [2, 0, 0]: states, checkpoints, keys and free counts are those of the sources."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(40), 1: text(9), 2: text(30)}, captures={0: [5, 22], 2: [12]})
        states, kept = [cache.states(s) for s in range(3)], [cache.kept(s) for s in range(3)]
        assert len(set(map(tuple, kept))) == 3
        checkpoints = [[cache.checkpoint(s, p) for p in kept[s]] for s in range(3)]
        before = counts(cache.cache)
        cache.permute([2, 0, 0, -1, -1, -1, -1, -1])
        for sequence, source in enumerate([2, 0, 0]):
            same_states("beam", cache.states(sequence), states[source])
            assert cache.kept(sequence) == kept[source]
            for position, saved in zip(kept[source], checkpoints[source], strict=True):
                same_states("checkpoint", cache.checkpoint(sequence, position), saved)
        assert counts(cache.cache)[:3] == before[:3]  # counters
        assert counts(cache.cache)[3] >= before[3] and counts(cache.cache)[4] == before[4] + 3  # 9 tokens, 3 pages
        for _ in range(3):
            cache.run({0: text(1), 1: text(1), 2: text(1)})


def test_questions_have_no_side_effect():
    """Slots, lengths and where to resume: asked twice, same answer, same cache."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(33), 1: text(3)})
        value = jax.tree.map(np.array, cache.cache)
        answers = []
        for _ in range(2):
            asked = [cache.resume(sequence, target) for sequence in (0, 1, 2) for target in (0, 3, 20, 33, 60)]
            answers.append((asked, np.asarray(rcache.slots(cache.cache)).tolist()))
        assert answers[0] == answers[1]
        same_caches(value, cache.cache)


def test_decoded_together_equals_decoded_alone():
    """Four sequences in one batch equal each alone in a cache of its own."""
    for cache, text in twice(MAIN):
        prompts, answers = [text(n) for n in (3, 8, 5, 1)], [text(6) for _ in range(4)]
        cache.run(dict(enumerate(prompts)))
        for tokens in zip(*answers, strict=True):
            cache.run({sequence: [token] for sequence, token in enumerate(tokens)})
        for sequence, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            alone = solo(MAIN, prompt, *[[token] for token in answer])
            same_states("alone", cache.states(sequence), alone.states(0))
            assert cache.kept(sequence) == alone.kept(0)


# Checkpoint labels


def test_captures_inside_chunks_of_a_batch():
    """Prefills of 50, 70 and 90 tokens in passes of 6, captures at odd places: those of each alone (500, 700, 900)."""
    for cache, text in twice(MAIN):
        texts = {0: text(50), 1: text(70), 2: text(90)}
        wanted = {0: [17, 41], 1: [18, 20, 69], 2: [2, 89]}
        cache.prefill(texts, chunk=6, captures=wanted)
        for sequence, tokens in texts.items():
            alone = Lineage(MAIN)
            alone.prefill({0: tokens}, chunk=6, captures={0: wanted[sequence]})
            assert cache.kept(sequence) == alone.kept(0)
            assert {c - 1 for c in wanted[sequence]} <= set(cache.kept(sequence))
            for position in cache.kept(sequence):
                fresh = cache.model.prefill(tokens[: position + 1])
                same_states("checkpoint", cache.checkpoint(sequence, position), fresh)


def test_chunks_do_not_divide_the_interval():
    """93 tokens and 58 more in passes of 6 (1866 and 1160), a capture wanted at 102 (2048): labels are exact."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(93)}, chunk=6)
        # Passes end at 6, 12, ...: the first past position 6 is 11, then the first at least 20 further, and so on.
        assert cache.kept(0) == [11, 35, 59, 83]
        cache.prefill({0: text(30)}, chunk=6, captures={0: [102]})
        assert cache.kept(0) == [11, 35, 59, 83, 101, 122]
        assert cache.resume(0, 110) == 102
        cache.fork(0, 1, 102)
        cache.run({1: text(5)})
        cache.prefill({0: text(28)}, chunk=6)
        # The store was full; the one that was asked for beyond the interval went.
        assert cache.kept(0) == [11, 35, 59, 83, 122, 146]


def test_two_equal_prompts_in_one_batch():
    """The second prompt cannot resume from what the first is only about to compute."""
    for cache, text in twice(MAIN):
        tokens = text(8)
        assert cache.resume(0, 8) == cache.resume(1, 8) == 0
        _, read, visible = cache.run({0: tokens, 1: tokens})
        for leaf in jax.tree.leaves(read):
            assert not np.asarray(leaf).any()
        for _, _, mask in visible.values():
            assert np.asarray(mask)[1].sum() == 36  # its own tokens only
        same_states("second", cache.states(1), cache.states(0))
        assert cache.kept(0) == cache.kept(1) == [7]
        cache.run({0: text(4), 1: text(3)})


def test_capture_planned_and_pass_abandoned():
    """A checkpoint belongs to the value the pass returned; the value before it has none."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(4)})
        _, tokens, batch = cache.batch({0: text(8)}, captures={0: [1, 3]})
        after, *_ = step(cache.cache, jnp.asarray(tokens), batch)
        assert np.asarray(rcache.checkpoint_positions(after))[0].tolist()[:4] == [4, 6, -1, -1]
        assert cache.kept(0) == [] and cache.resume(0, 3) == 0
        cache.run({0: text(8)}, captures={0: [2]})
        assert cache.kept(0) == [5]  # taken there, none is due at 11
        cache.cut(0, 6)


def test_restored_twice():
    """Checkpoint, roll back, append, roll back to the same checkpoint, append something else."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(24)}, captures={0: [21]})
        saved = cache.checkpoint(0, 20)
        for num_tokens in (8, 3, 1):
            cache.cut(0, 21)
            same_states("restored", cache.states(0), saved)
            for _ in range(2):
                cache.run({0: text(num_tokens)})
            same_states("kept", cache.checkpoint(0, 20), saved)


def test_keys_reach_further_than_states():
    """KV of 59 tokens match, states are few: resume at the last one, and look again after every cut."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(60)}, captures={0: [10, 13]})
        assert cache.kept(0) == [7, 9, 12, 39, 59]
        for target, expected in [(59, 40), (39, 13), (31, 13), (12, 10), (9, 8), (7, 0)]:
            assert cache.resume(0, target) == expected
            cache.fork(0, 1, target, got=expected)
        cache.cut(0, 59, status=Status.NOT_RESTORABLE)
        for length in (40, 13, 10, 8):
            cache.cut(0, length)
            assert cache.resume(0, length) == length and cache.kept(0)[-1] == length - 1
        assert cache.resume(0, 7) == 0


# Resume


def test_next_turn_continues():
    """A turn that only adds recomputes nothing; one that edits the last answer goes back to the nearest checkpoint."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(50)})
        assert cache.kept(0) == [7, 31]
        length = cache.resume(0, 50)
        assert length == 50
        forward, _, _ = cache.run({0: text(5)})
        assert int(np.asarray(forward.starts)[0]) == 50
        length = cache.resume(0, 45)
        assert length == 32 and 45 - length < MAIN.checkpoints.interval + CHUNK
        cache.cut(0, length)
        cache.prefill({0: text(20)})


def test_identical_prompt_again():
    """Logits need the last token run again, but a state cannot step back one: the checkpoint before it decides."""
    for cache, text in twice(MAIN):
        tokens = text(29)
        cache.prefill({0: tokens})
        states = cache.states(0)
        length = cache.resume(0, len(tokens) - 1)
        assert length == 8
        cache.cut(0, length)
        cache.prefill({0: tokens[length:]}, captures={0: [len(tokens) - 1]})
        same_states("again", cache.states(0), states)
        assert cache.resume(0, len(tokens) - 1) == len(tokens) - 1  # captured one token early: one to run
        cache.cut(0, len(tokens) - 1)
        cache.run({0: tokens[-1:]})
        same_states("and again", cache.states(0), states)


@pytest.mark.parametrize(
    ("captured", "expected"),
    [((1, 3, 4, 5), 3), ((1, 4, 5), 1), ((4, 5), 0), ((3,), 3), ((1, 5), 1), ((), 0)],
)
def test_checkpoints_around_a_divergence(captured, expected):
    """Texts part at p = 3; checkpoints at 0, p - 1, p and p + 1: none that holds the token at p is ever used."""
    for cache, text in twice(MAIN):
        cache.run({0: text(6)}, captures={0: captured})
        assert cache.kept(0) == [length - 1 for length in captured]
        assert cache.resume(0, 3) == expected
        cache.fork(0, 1, 3, got=expected)
        assert cache.kept(1) == [length - 1 for length in captured if length <= expected]
        cache.run({1: text(5)})
        cache.cut(0, expected)
        cache.run({0: text(4)})


@pytest.mark.parametrize("length", [1, 3, 5, 6, 7, 19])
def test_short_prompts(length):
    """Shorter than a page (4), than min_position (6), than the interval (20): whole or from the beginning."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(length)})
        assert cache.kept(0) == ([] if length < 7 else [min(length, 8) - 1])
        assert cache.resume(0, length) == length
        assert cache.resume(0, length - 1) == (8 if length > 8 else 0)
        cache.fork(0, 1)
        cache.run({0: text(2), 1: text(8)})


def test_forced_captures_leave_the_store_reaching_back():
    """A capture every four tokens fills the store; the checkpoints of the interval stay, over the whole context."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(100)}, captures={0: range(4, 101, 4)})
        assert cache.kept(0) == [7, 27, 47, 67, 87, 99]
        for target, expected in [(99, 88), (60, 48), (30, 28), (9, 8)]:
            assert cache.resume(0, target) == expected
        cache.cut(0, 28)
        cache.run({0: text(3)})


def test_prefill_cancelled_and_retried():
    """Cancelled at 60 percent, in the middle of a pass: the retry continues after the last pass that came back."""
    for cache, text in twice(MAIN):
        tokens = text(100)
        cache.prefill({0: tokens[:56]})
        _, padded, batch = cache.batch({0: tokens[56:64]})
        step(cache.cache, jnp.asarray(padded), batch)  # never looked at
        assert cache.resume(0, 100) == 56
        cache.prefill({0: tokens[56:]})
        whole = Lineage(MAIN)
        whole.prefill({0: tokens})
        same_states("retried", cache.states(0), whole.states(0))
        assert cache.kept(0) == whole.kept(0)


def test_refused_cut_while_active():
    """A cut to where no state was kept is a status; the sequence goes on as if it had not been asked."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(21), 1: text(6)})
        cache.cut(0, 15, status=Status.NOT_RESTORABLE)
        cache.cut(0, -1, status=Status.RANGE_INVALID)
        cache.cut(0, 9, 5, status=Status.RANGE_INVALID)
        assert len(cache.tokens(0)) == 21
        cache.run({0: text(8), 1: text(1)})
        cache.cut(0, 8)


# Speculation


@pytest.mark.parametrize("accepted", range(5))
def test_draft_of_four(accepted):
    """Accept 0 to 4 of a draft; a plain step; reject everything; conv and recurrent states each step back exactly."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(13)})
        kept = cache.kept(0)
        for accept in (accepted, 0):
            length = len(cache.tokens(0))
            cache.run({0: text(5)}, captures={0: [1, 2, 3, 4]})
            cache.cut(0, length + 1 + accept)
            assert len(cache.tokens(0)) == length + 1 + accept
            fresh, states = cache.model.prefill(cache.tokens(0)), cache.states(0)
            for layer in (0, 2):
                same("conv", states[layer, "conv"], window(layer, cache.tokens(0)))
            same("recurrent", states[0, "sum"], fresh[0, "sum"])
            cache.run({0: text(1)})
        assert cache.kept(0)[0] == kept[0]


def test_batch_that_mixes_everything():
    """Verifying, prefilling, new and padding rows in one pass equal each alone."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(11), 1: text(24), 2: text(8)})
        cache.fork(1, 6)
        for _ in range(2):
            length = len(cache.tokens(0))
            rows = {4: text(3), 0: text(5), 2: text(8), 1: text(1), 5: []}
            cache.run(rows, captures={0: [1, 2, 3, 4], 2: [3]})
            cache.cut(0, length + 3)
            cache.cut(4)


@pytest.mark.parametrize("accepted", range(5))
def test_draft_that_ends_on_a_page_boundary(accepted):
    """11 tokens and a draft up to 16, four pages of four: pages follow the accepted length, no more and no fewer."""
    for cache, text in twice(MAIN):
        free = int(rcache.free_pages(cache.cache)[0])
        cache.prefill({0: text(11)})
        cache.run({0: text(5)}, captures={0: [1, 2, 3, 4]})
        assert int(rcache.free_pages(cache.cache)[0]) == free - 4
        cache.cut(0, 12 + accepted)
        assert int(rcache.free_pages(cache.cache)[0]) == free - (3 if accepted == 0 else 4)
        cache.run({0: text(1)})
        cache.run({0: text(5)})


def test_passes_of_five_and_three_equal_one_of_eight():
    """Several tokens on a warm cache: how they are split does not matter."""
    for cache, text in twice(MAIN):
        start, tokens = text(9), text(8)
        cache.prefill({0: start, 1: start})
        cache.run({0: tokens})
        cache.run({1: tokens[:5]})
        cache.run({1: tokens[5:]})
        same_states("split", cache.states(1), cache.states(0))


# Memory and shape


def test_slots_are_for_live_states_and_checkpoints():
    """With every sequence live and every checkpoint taken, all slots are in use and nothing had to give way."""
    for cache, text in twice(MAIN):
        before = counts(cache.cache)
        cache.prefill({s: text(26) for s in range(8)}, captures={s: [1, 5, 9, 13, 17, 21] for s in range(8)})
        after = counts(cache.cache)
        assert all(cache.kept(s) == [0, 4, 8, 12, 16, 20] for s in range(8))
        assert after[0] == before[0] + 48 and after[1:3] == before[1:3]
        assert MAIN.capacity.slots == 56 and int(rcache.free_slots(cache.cache)) == 0
        cache.run({s: text(1) for s in range(8)})


def test_bytes_are_reported_before_anything_is_allocated():
    """A configuration's bytes are known from shapes alone, and a budget holds."""
    for config in (MAIN, TIGHT, PINNED):
        nbytes = sum(
            int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(rcache.abstract(config))
        )
        assert config.memory().total == nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(rcache.init(config)))
    whole = MAIN.memory().total
    some = rcache.Config(
        LAYERS, 8, 160, page_size=4, checkpoints=MAIN.checkpoints, max_pass_tokens=CHUNK, byte_budget=whole // 2
    )
    assert 0.9 * (whole // 2) < some.memory().total <= whole // 2
    assert 8 <= some.capacity.slots < MAIN.capacity.slots
    with pytest.raises(ValueError, match="byte_budget"):
        rcache.Config(LAYERS, 8, 160, page_size=4, checkpoints=MAIN.checkpoints, byte_budget=1000)


def test_checkpoints_give_way_to_a_new_sequence():
    """Every slot is pinned: the fullest sequence gives up its lowest checkpoint, then only live states are left."""
    for cache, text in twice(PINNED):
        before = counts(cache.cache)
        for _ in range(3):
            cache.run({0: text(2)})
        assert cache.kept(0) == [1, 3, 5] and int(rcache.free_slots(cache.cache)) == 0
        cache.run({1: text(3)})
        assert cache.kept(0) == [3, 5] and cache.kept(1) == [2]
        assert counts(cache.cache)[2] == before[2] + 1
        cache.run({2: text(8)})
        assert cache.kept(0) == [5] and cache.kept(1) == [2] and cache.kept(2) == [7]
        cache.run({3: text(1)}, status=Status.SLOTS_FULL)
        assert counts(cache.cache)[2] == before[2] + 2  # what would not have been enough was not given up
        cache.cut(1)
        cache.run({3: text(4), 0: text(1)})


def test_compilations_stop():
    """A random session compiles what it needs in its beginning, and nothing afterwards."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    random, cache = np.random.default_rng(3), rcache.init(MAIN)
    helper = Lineage(MAIN)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        grown = []
        for _ in range(4):
            for _ in range(40):
                cache = _random_operation(random, cache, helper)
            grown.append(len(compiled))
            if len(grown) == 1:
                jax.jit(lambda x: x + 41)(jnp.ones(17))  # so the listener is seen to listen
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(compiled) > 0 and grown[1] == grown[2] == grown[3]


def _random_operation(random, cache, helper):
    lengths = np.asarray(rcache.lengths(cache))
    one, other = (int(sequence) for sequence in random.integers(0, 8, 2))
    match random.integers(0, 6):
        case 0:
            target = int(rcache.prepare_restore(cache, one, int(random.integers(0, 60))))
            return rcache.remove(cache, one, target)[0]
        case 1:
            return rcache.copy_prefix(cache, one, other, int(random.integers(0, lengths[one] + 1)))[0]
        case 2:
            return rcache.reorder(cache, random.permutation(8).astype(np.int32))[0]
        case _:
            rows = {int(s): random.integers(1, 89, random.integers(1, 9)).tolist() for s in random.permutation(8)[:5]}
            captures = {s: [1] for s in rows}
            _, tokens, batch = helper.batch(rows, captures=captures)
            return step(cache, jnp.asarray(tokens), batch)[0]


def test_ten_thousand_steps_in_constant_memory():
    """Decoding, with an emptied sequence now and then: same buffers, same number of arrays, same free counts."""

    def one(cache, token):
        tokens = jnp.broadcast_to(token, (1, 1))
        cache, _, status, _, _ = step(cache, tokens, rcache.make_batch([0], [1], 1))
        return cache, status

    def decode(cache, tokens):
        return jax.lax.scan(one, cache, tokens)

    decode = jax.jit(decode, donate_argnums=0)
    cache, text = rcache.init(PINNED), jnp.arange(30, dtype=jnp.int32)
    sizes, free = set(), set()
    for turn in range(10_000 // len(text) + 1):
        cache, statuses = decode(cache, text)
        cache, status = rcache.remove(cache, 0, 0)
        if turn % 100 == 99:
            assert not np.asarray(statuses).any() and int(status) == Status.OK
            sizes.add(sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted()))
            free.add(tuple(counts(cache)[3:]))
    assert len(free) == 1 and len(sizes) == 1


# Dtype and structure

MIXED = rcache.Config(
    (
        rcache.Layer({"wide": rcache.State((4,)), "narrow": rcache.State((4,), "bfloat16")}),
        rcache.Layer(attention=rcache.Attention(1, 4, dtype="bfloat16")),
    ), 4, 16, page_size=4, max_pass_tokens=1, checkpoints=rcache.CheckpointPolicy(2, 0, 2),
)  # fmt: skip


@jax.jit
def _bfloat16_step(cache, x, batch):
    """x: bf16[B, 4]. The state gathers a sum that bfloat16 could not."""
    cache, forward, status = rcache.start_forward(cache, batch)
    states = rcache.read_state(cache, forward, 0)
    after = {name: state + x.astype(state.dtype) for name, state in states.items()}
    cache = rcache.update_state(cache, forward, 0, after)
    cache = rcache.put(cache, forward, 1, x[:, None, None], x[:, None, None])
    return cache, states, rcache.get(cache, forward, 1), status


def _updated(cache, states, batch):
    cache, forward, _ = rcache.start_forward(cache, batch)
    return rcache.update_state(cache, forward, 0, states)


def test_state_keeps_its_dtype_under_bfloat16_activations():
    """A float32 state is never rounded to bfloat16: update, fork, capture, restore, an empty sequence joining."""
    cache = rcache.init(MIXED)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(cache)]
    for turn in range(2):
        inputs = [jnp.full((3, 4), 256 + 2 * turn, jnp.bfloat16), *[jnp.full((3, 4), 0.25, jnp.bfloat16)] * 3]
        for x in inputs:
            batch = rcache.make_batch([0, -1, -1], [1, 0, 0], 1)
            cache, _, _, status = _bfloat16_step(cache, x, batch)
            assert int(status) == Status.OK
        cache, got, _ = rcache.copy_prefix(cache, 0, 1, 3)
        assert int(got) == 3
        cache, _, _ = rcache.copy_prefix(cache, 3, 2, 0)
        # Sequence 1 is the restored one, 0 the live one, 2 an empty one that joins.
        batch = rcache.make_batch([1, 0, 2], [1, 1, 1], 1)
        cache, read, (keys, values, _), _ = _bfloat16_step(cache, inputs[-1], batch)
        exact = np.array([[256.5 + 2 * turn], [256.75 + 2 * turn], [0]], np.float32) * np.ones(4, np.float32)
        same("float32 state", read["wide"], exact)
        rounded = np.array(256 + 2 * turn, jnp.bfloat16)
        for _ in range(2):
            rounded = (rounded + np.array(0.25, jnp.bfloat16)).astype(jnp.bfloat16)
        same("bfloat16 state", np.asarray(read["narrow"])[0], np.full(4, rounded))
        assert read["wide"].dtype == jnp.float32 and read["narrow"].dtype == keys.dtype == values.dtype == jnp.bfloat16
        assert [leaf.dtype for leaf in jax.tree.leaves(cache)] == dtypes
        cache = rcache.reset(cache)
    wrong = {"wide": read["wide"].astype(jnp.bfloat16), "narrow": read["narrow"]}
    with pytest.raises(AssertionError, match="float32"):
        jax.eval_shape(_updated, cache, wrong, batch)


def test_every_leaf_makes_the_round_trip():
    """Taken apart into NumPy leaves and put together again, counters and flags included, the cache goes on."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(45), 1: text(30)}, captures={0: [11]})
        cache.fork(0, 2, 11)
        cache.cut(1, 3, 9)
        assert np.asarray(rcache.approximate(cache.cache)).tolist()[:3] == [False, True, False]
        leaves, structure = jax.tree.flatten(cache.cache)
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        copied = jax.tree.unflatten(structure, [jnp.asarray(np.array(leaf)) for leaf in leaves])
        same_caches(cache.cache, copied)
        assert copied.config == MAIN
        original, cache.cache = cache.cache, copied
        rows = {0: text(4), 1: text(3), 2: text(8)}
        _, tokens, batch = cache.batch(rows)
        expected = step(original, jnp.asarray(tokens), batch)[0]
        cache.run(rows)
        same_caches(expected, cache.cache)
        cache.cut(0, cache.resume(0, 40))


# Middle removal


def test_a_thousand_tokens_in_a_context_of_64():
    """Whenever 64 tokens are there the oldest 30 after the first 4 go: a token a pass, nothing run again."""
    for cache, text in twice(MAIN):
        begin, removals, passes = text(4), 0, 0
        cache.prefill({0: begin})
        for token in text(1000):
            if len(cache.tokens(0)) == 64:
                cache.cut(0, 4, 34)
                removals += 1
                assert cache.tokens(0)[:4] == tuple(begin) and len(cache.tokens(0)) == 34
            cache.run({0: [token]}, check=False)
            passes += 1
        cache.run({0: text(1)})
        assert passes == 1000 and removals == 1 + (1000 - 60 - 1) // 30
        assert len(cache.histories[0].folded) == 4 + 1000 + 1  # each token went into the state once
        assert np.asarray(rcache.approximate(cache.cache))[0]


def test_cuts_at_the_very_end():
    """[len - 1, end) is the last token, [len, end) is nothing; either is exact, or refused."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(20)}, captures={0: [18]})
        for end in (20, 25):
            cache.cut(0, 20, end)
            cache.cut(0, 19, end, status=Status.NOT_RESTORABLE)
        assert len(cache.tokens(0)) == 20
        cache.cut(0, 18, 20)
        assert len(cache.tokens(0)) == 18 and not np.asarray(rcache.approximate(cache.cache))[0]
        cache.run({0: text(1)}, captures={0: []})
        cache.cut(0, 18, 19)
        cache.run({0: text(8)}, captures={0: [7]})
        cache.cut(0, len(cache.tokens(0)) - 1, len(cache.tokens(0)))
        assert len(cache.tokens(0)) == 25 and not np.asarray(rcache.approximate(cache.cache))[0]


# What a slot-and-ring implementation got wrong (DESIGN, section 3)


def test_fork_destination_leaves_no_checkpoints_to_the_next_tenant():
    """A sequence that was overwritten by a fork and then removed leaves none of its checkpoints behind."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(5), 1: text(40)}, captures={1: [3, 6]})
        assert cache.kept(1) == [2, 5, 31]
        slots = int(rcache.free_slots(cache.cache))
        cache.fork(0, 1)
        # Three checkpoints and a live state that none of them shares are free again.
        assert int(rcache.free_slots(cache.cache)) == slots + 4
        cache.cut(1)
        cache.run({1: text(6)})
        assert cache.kept(1) == [] and cache.resume(1, 5) == 0


def test_fork_of_a_sequence_without_checkpoints_leaves_no_stale_ones():
    """The destination has the source's checkpoints, also where those are none."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(6), 1: text(40)})
        cache.fork(0, 1)
        assert cache.kept(1) == []
        assert cache.resume(1, 5) == 0 and not bool(rcache.can_resume(cache.cache, 1, 5))
        cache.cut(1, 5, status=Status.NOT_RESTORABLE)
        cache.run({1: text(8)})
        assert cache.kept(1) == [13]


def test_aborted_pass_leaves_nothing():
    """Planned, some layers run, then dropped: bookkeeping and payload are still those of the pass before."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(12), 1: text(30)})
        value = jax.tree.map(np.array, cache.cache)
        _, _, batch = cache.batch({0: text(5), 2: text(8)}, captures={2: [4]})
        planned, forward, _ = rcache.start_forward(cache.cache, batch)
        _last_layer_only(planned, forward)
        same_caches(value, cache.cache)
        cache.run({0: text(1), 2: text(3)})


@jax.jit
def _last_layer_only(cache, forward):
    read = rcache.read_state(cache, forward, 2)
    captured = {"conv": jnp.full((8, NUM_CAPTURES, 3, 2), 7.0)}
    return rcache.update_state(cache, forward, 2, {"conv": read["conv"] + 1}, captured=captured)


def test_rejected_batch_extends_no_keys():
    """Whatever is wrong with a batch, no sequence of it grew, neither its keys nor its state."""
    for cache, text in twice(TIGHT):
        cache.prefill({0: text(10), 1: text(36)})
        cache.run({0: text(3), 1: text(2)}, positions={0: [10, 11, 13]}, status=Status.POSITION_MISMATCH)
        cache.run({0: text(3), 1: text(5)}, status=Status.CONTEXT_OVERFLOW)
        cache.run({0: text(3), 7: text(1)}, status=Status.SEQUENCE_OUT_OF_RANGE)
        cache.run({0: text(3)}, captures={0: [4]}, status=Status.CAPTURES_INVALID)
        assert [len(cache.tokens(s)) for s in range(4)] == [10, 36, 0, 0]
        cache.run({0: text(3), 1: text(4)})


def test_new_checkpoint_takes_a_hole_before_a_live_one():
    """After rolling back there is room in the row: new checkpoints go there, the older ones stay."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(24)}, captures={0: [1, 5, 9, 13, 17, 21]})
        cache.cut(0, 13)
        assert cache.kept(0) == [0, 4, 8, 12]
        cache.run({0: text(8)}, captures={0: [2, 5]})
        assert cache.kept(0) == [0, 4, 8, 12, 14, 17]
        cache.run({0: text(8)}, captures={0: [1]})  # full: the lowest of those asked for beyond the interval goes
        assert cache.kept(0) == [4, 8, 12, 14, 17, 21]


def test_prepared_restore_does_not_outlive_its_checkpoint():
    """A length that could be resumed when asked is refused once its checkpoint gave way, and nothing changes."""
    for cache, text in twice(PINNED):
        for _ in range(3):
            cache.run({0: text(2)})
        prepared = cache.resume(0, 3)
        assert prepared == 2
        cache.run({1: text(5)})
        cache.cut(0, prepared, status=Status.NOT_RESTORABLE)
        cache.fork(0, 2, prepared, got=0)
        assert len(cache.tokens(0)) == 6 and cache.resume(0, 3) == 0
        cache.run({0: text(1)})


def test_fork_at_a_shorter_prefix_does_not_run_on_the_whole_state():
    """Without a state at that length the fork is shorter, says so, and its state is that of its tokens."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(30)})
        _, got, status = rcache.copy_prefix(cache.cache, 0, 1, 25)
        assert (int(got), int(status)) == (8, Status.OK)
        cache.fork(0, 1, 25, got=8)
        cache.fork(0, 2, 5, got=0)
        cache.run({0: text(2), 1: text(2), 2: text(2)})


def test_removing_the_beginning_takes_keys_and_state_together():
    """[0, k) is a removal from the middle: one length, keys moved, the state named approximate; exactly, all goes."""
    for cache, text in twice(MAIN):
        tokens = text(22)
        cache.prefill({0: tokens, 1: tokens})
        cache.cut(0, 0, 9)
        assert cache.tokens(0) == tuple(tokens[9:])
        assert np.asarray(rcache.approximate(cache.cache)).tolist()[:2] == [True, False]
        forward, _, _ = cache.run({0: text(3)})
        assert int(np.asarray(forward.starts)[0]) == 13
        cut, num_rerun, status = rcache.remove_exact(cache.cache, 1, 0, 9)
        assert (int(num_rerun), int(status)) == (13, Status.OK) and int(np.asarray(rcache.lengths(cut))[1]) == 0
        cache.cut(1)
        same_caches(cut.table, cache.cache.table)
        cache.prefill({1: tokens[9:]})
        cache.cut(0)


def test_nothing_resumes_past_the_end():
    """`can_resume` is about prefixes the sequence has."""
    for cache, text in twice(MAIN):
        cache.prefill({0: text(30)})
        can = [bool(rcache.can_resume(cache.cache, 0, position)) for position in (0, 7, 8, 29, 30, 31, 100)]
        assert can == [True, False, True, True, True, False, False]
        assert not bool(rcache.can_resume(cache.cache, 1, 1)) and bool(rcache.can_resume(cache.cache, 1, 0))
        assert cache.resume(0, 100) == 30


def test_interleaved_tokens_go_to_their_own_states():
    """A flat batch with two sequences' tokens in turns, and padding among them, equals rows of each."""
    for cache, text in twice(MAIN):
        cache.prefill({2: text(5), 0: text(9)})
        rows = {2: text(3), 0: text(4)}
        sequences = [2, 0, 0, -1, 2, 0, 2, -1, 0]
        tokens = [rows[2][0], rows[0][0], rows[0][1], 88, rows[2][1], rows[0][2], rows[2][2], 88, rows[0][3]]
        positions = [5, 9, 10, -1, 6, 11, 7, -1, 12]
        flat_batch = jax.jit(partial(rcache.flat_batch, num_rows=MAIN.max_sequences, num_tokens=CHUNK))
        flat, row, column = flat_batch(np.array(sequences, np.int32), np.array(positions, np.int32))
        grid = np.full((MAIN.max_sequences + 1, CHUNK), 89, np.int32)
        grid[row, column] = tokens  # padding goes to the row after the last
        flat = flat.replace(captures=jnp.asarray(np.full((MAIN.max_sequences, NUM_CAPTURES), -1, np.int32)))
        after, _, status, _, _ = step(cache.cache, jnp.asarray(grid[:-1]), flat)
        assert int(status) == Status.OK
        cache.run(rows)
        same_caches(after, cache.cache)
