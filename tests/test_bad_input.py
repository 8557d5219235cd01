"""Wrong input: what names it, and that nothing changes.

Wrong arguments are a `ValueError`, wrong shapes and dtypes an `AssertionError` while tracing, wrong data a `Status`.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from rcache import Attention, CheckpointPolicy, Config, Layer, State, Status
from tests import small
from tests.differential import NUM_TOKENS, add_offset

# Wrong data


def forward(*args, **kwargs):
    return lambda cache: rcache.start_forward(cache, small.batch(*args, **kwargs))


flat_batch = jax.jit(rcache.flat_batch, static_argnames=("num_rows", "num_tokens"))


def flat(sequences):
    """A flat batch, in the shape of all the others."""

    def operation(cache):
        batch, _, _ = flat_batch(np.array(sequences), np.full(7, -1), num_rows=4, num_tokens=NUM_TOKENS)
        return rcache.start_forward(cache, batch.replace(captures=jnp.full((4, 1), -1, jnp.int32)))

    return operation


def call(operation, *args, **kwargs):
    return lambda cache: operation(cache, *args, **kwargs)


# On `small.used()`: lengths 11, 11, 4, 0; context_length 24; states kept at 6, 8 and 11.
REFUSED = {
    "a flat batch of more tokens": (flat([2] * 7), Status.BATCH_TOO_LARGE),
    "a flat batch of more sequences": (flat([0, 1, 2, 3, 4, -1, -1]), Status.BATCH_TOO_LARGE),
    "unknown sequence": (forward([0, 4], [1, 1]), Status.SEQUENCE_OUT_OF_RANGE),
    "negative sequence": (forward([-2], [1]), Status.SEQUENCE_OUT_OF_RANGE),
    "unknown sequence without tokens": (forward([99], [0]), Status.SEQUENCE_OUT_OF_RANGE),
    "sequence twice": (forward([1, 0, 1], [1, 1, 1]), Status.DUPLICATE_SEQUENCE),
    "sequence twice, once without tokens": (forward([1, 1], [1, 0]), Status.DUPLICATE_SEQUENCE),
    "negative length": (forward([0], [-1]), Status.LENGTH_OUT_OF_RANGE),
    "length past the row": (forward([3], [7]), Status.LENGTH_OUT_OF_RANGE),
    "position with a gap": (forward([2], [2], positions=[[4, 6]]), Status.POSITION_MISMATCH),
    "position from the start again": (forward([2], [2], positions=[[0, 1]]), Status.POSITION_MISMATCH),
    "position ahead": (forward([3], [1], positions=[[1]]), Status.POSITION_MISMATCH),
    "position impossible": (forward([3], [1], positions=[[-5]]), Status.POSITION_MISMATCH),
    "capture at 0": (forward([3], [3], captures=[[0]]), Status.CAPTURES_INVALID),
    "capture past the row's tokens": (forward([3], [3], captures=[[4]]), Status.CAPTURES_INVALID),
    "copy of an unknown sequence": (call(rcache.copy_prefix, 4, 0, 0), Status.SEQUENCE_OUT_OF_RANGE),
    "copy to an unknown sequence": (call(rcache.copy_prefix, 0, -1, 0), Status.SEQUENCE_OUT_OF_RANGE),
    "copy of more than there is": (call(rcache.copy_prefix, 0, 3, 12), Status.RANGE_INVALID),
    "copy of less than nothing": (call(rcache.copy_prefix, 0, 3, -1), Status.RANGE_INVALID),
    "remove of an unknown sequence": (call(rcache.remove, 4), Status.SEQUENCE_OUT_OF_RANGE),
    "remove of padding": (call(rcache.remove, -1), Status.SEQUENCE_OUT_OF_RANGE),
    "remove from before the beginning": (call(rcache.remove, 0, -1), Status.RANGE_INVALID),
    "remove where no state was kept": (call(rcache.remove, 0, 7), Status.NOT_RESTORABLE),
    "middle of an unknown sequence": (call(rcache.remove, 4, 1, 2, shift=add_offset), Status.SEQUENCE_OUT_OF_RANGE),
    "middle backwards": (call(rcache.remove, 0, 3, 2, shift=add_offset), Status.RANGE_INVALID),
    "middle to the end, no state": (call(rcache.remove, 0, 7, 11, shift=add_offset), Status.NOT_RESTORABLE),
    "exact of an unknown sequence": (call(rcache.remove_exact, -1, 1, 2), Status.SEQUENCE_OUT_OF_RANGE),
    "exact backwards": (call(rcache.remove_exact, 0, 8, 6), Status.RANGE_INVALID),
    "exact where no state was kept": (call(rcache.remove_exact, 0, 7, 9), Status.NOT_RESTORABLE),
    "reorder by unknown sequences": (call(rcache.reorder, [0, 1, 2, 4]), Status.SEQUENCE_OUT_OF_RANGE),
    "reorder by negative sequences": (call(rcache.reorder, [0, 1, -2, 3]), Status.SEQUENCE_OUT_OF_RANGE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_data_is_a_status_and_changes_nothing(name):
    operation, status = REFUSED[name]
    cache, *_, got = operation(small.used())
    assert Status(int(got)) is status
    small.same_tree("cache", cache, small.used())


@pytest.mark.parametrize(
    "name", [name for name in REFUSED if REFUSED[name][0].__qualname__.startswith(("forw", "flat"))]
)
def test_a_refused_plan_is_all_padding(name):
    cache, plan, _ = REFUSED[name][0](small.used())
    assert not plan.token_mask.any() and plan.sequences.tolist() == [-1] * 4
    small.same_tree("cache", write_ones(cache, plan), small.used())


@jax.jit
def write_ones(cache, plan):
    """What the layers of a model do, whatever the status was."""
    cache = rcache.put(cache, plan, 1, jnp.ones(KEYS), jnp.ones(VALUES))
    return rcache.update_state(cache, plan, 0, ones(STATES), captured=ones(CAPTURED))


def test_a_plan_that_was_not_refused_is_written():
    cache, plan = small.planned()
    written = write_ones(cache, plan)
    assert not np.array_equal(written.keys["kv_0"], cache.keys["kv_0"])
    assert not np.array_equal(written.states["ssm"], cache.states["ssm"])


TIGHT = Config(
    (Layer({"conv": small.conv}, Attention(1, 2)),), 4, 12, page_size=2, num_slots=2, num_pages=7,
    checkpoints=CheckpointPolicy(count=0), max_pass_tokens=NUM_TOKENS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("sequences", "lengths", "status"),
    [
        ([2], [1], Status.SLOTS_FULL),
        ([0, 1], [5, 6], Status.PAGES_FULL),
        ([0], [6], Status.CONTEXT_OVERFLOW),
        ([2, 0], [1, 6], Status.CONTEXT_OVERFLOW),  # what is wrong comes before what is full
        ([0, 1], [1, 1], Status.OK),
    ],
)
def test_a_full_cache(sequences, lengths, status):
    cache, got = rcache.init(TIGHT), Status.OK
    for batch in (small.batch([0, 1], [5, 4]), small.batch(sequences, lengths)):
        before = cache
        cache, _, got = rcache.start_forward(cache, batch, context=10)  # of the 12 that a sequence may have
    assert Status(int(got)) is status
    if status is not Status.OK:
        small.same_tree("cache", cache, before)


def test_a_sequence_longer_than_the_context():
    cache = small.used()  # sequence 0 has 11 of 24 tokens
    for length, status in ((6, Status.OK), (6, Status.OK), (2, Status.CONTEXT_OVERFLOW), (1, Status.OK)):
        before = cache
        cache, _, got = rcache.start_forward(cache, small.batch([3, 0], [1, length]))
        assert Status(int(got)) is status
        if status is not Status.OK:
            small.same_tree("cache", cache, before)


def test_every_status_is_tried_here():
    tried = {status for _, status in REFUSED.values()} | {Status.SLOTS_FULL, Status.PAGES_FULL, Status.CONTEXT_OVERFLOW}
    assert tried == set(Status) - {Status.OK}


@pytest.mark.parametrize("sequence", [-2, -1, 4, 99])
@pytest.mark.parametrize("position", [0, 1])
def test_questions_about_unknown_sequences(sequence, position):
    assert not rcache.can_resume(small.used(), sequence, position)
    assert rcache.prepare_restore(small.used(), sequence, position) == 0


@pytest.mark.parametrize("status", Status)
def test_raise_if_error_says_what_to_do(status):
    if status is Status.OK:
        rcache.raise_if_error(jnp.int32(status))
        return
    with pytest.raises(rcache.CacheError, match=re.escape(status.advice)) as caught:
        rcache.raise_if_error(jnp.int32(status))
    assert caught.value.status is status and status.name in str(caught.value)
    assert len(status.advice) > 20


# Wrong arguments


def test_batches_larger_than_planned():
    five = rcache.make_batch([0, 1, 2, 3, -1], [1] * 5, 1)
    with pytest.raises(ValueError, match=r"5 rows, but Config.max_sequences is 4"):
        rcache.start_forward(small.used(), five)
    seven = rcache.make_batch([0], [1], NUM_TOKENS + 1)
    with pytest.raises(ValueError, match=r"7 tokens, but Config.max_pass_tokens is 6"):
        rcache.start_forward(small.used(), seven)
    for context in (0, 25):
        with pytest.raises(ValueError, match=f"context must be an integer in 1 .. 24, got {context}"):
            rcache.start_forward(small.used(), small.batch([0], [1]), context=context)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (((0, 1), (1,), 3), "lengths"),
        (((0.5,), (1,), 3), "sequences"),
        (([[0]], (1,), 3), "sequences"),
        (((0,), (1.0,), 3), "lengths"),
    ],
)
def test_batches_of_other_arrays(arguments, name):
    with pytest.raises(ValueError, match=rf"^{name} must"):
        rcache.make_batch(*arguments)


@pytest.mark.parametrize("name", ["positions", "captures", "bidirectional"])
@pytest.mark.parametrize("wrong", [[0, 1, 2], [[0, 1, 2], [0, 1, 2]], [[0.0, 1.0, 2.0]]], ids=["axes", "rows", "dtype"])
def test_batches_of_other_grids(name, wrong):
    with pytest.raises(ValueError, match=rf"^{name} must"):
        rcache.make_batch([0], [3], 3, **{name: wrong})


def test_flat_batches_of_other_arrays():
    with pytest.raises(ValueError, match=r"^positions must"):
        rcache.flat_batch([0, 1], [0], num_rows=2, num_tokens=2)
    with pytest.raises(ValueError, match=r"^sequences must"):
        rcache.flat_batch([[0, 1]], [[0, 0]], num_rows=2, num_tokens=2)


@pytest.mark.parametrize("wrong", [1.0, True, "1", [1], np.float32(1)], ids=repr)
def test_numbers_that_are_no_integers(wrong):
    cache = small.used()
    for name, operation in {
        "length": lambda: rcache.copy_prefix(cache, 0, 3, wrong),
        "src": lambda: rcache.copy_prefix(cache, wrong, 3, 1),
        "target": lambda: rcache.prepare_restore(cache, 0, wrong),
        "position": lambda: rcache.can_resume(cache, 0, wrong),
        "begin": lambda: rcache.remove(cache, 0, wrong),
        "end": lambda: rcache.remove_exact(cache, 0, 0, wrong),
        "sequence": lambda: rcache.remove(cache, wrong),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name} must"):
            operation()


@pytest.mark.parametrize("length", [2**31, 2**32 + 1, -(2**32) + 1])
def test_large_numbers_do_not_wrap_around(length):
    cache, got, status = rcache.copy_prefix(small.used(), 0, 3, length)
    assert (int(got), Status(int(status))) == (0, Status.RANGE_INVALID)
    small.same_tree("cache", cache, small.used())
    _, status = rcache.remove(small.used(), 2**32)
    assert Status(int(status)) is Status.SEQUENCE_OUT_OF_RANGE


def test_the_middle_is_not_removed_without_a_shift():
    with pytest.raises(ValueError, match=r"^shift must"):
        rcache.remove(small.used(), 0, 2, 4)


def test_reorder_wants_one_source_for_each_sequence():
    with pytest.raises(ValueError, match=r"^sources must be i32\[4\]"):
        rcache.reorder(small.used(), jnp.array([0, 1, 2], jnp.int32))


# Wrong layers, names, shapes and dtypes

KEYS, VALUES = (4, NUM_TOKENS, 2, 4), (4, NUM_TOKENS, 2, 3)
STATES = {"conv": (4, 3, 2), "ssm": (4, 2, 2)}
CAPTURED = {"conv": (4, 1, 3, 2), "ssm": (4, 1, 2, 2)}


def off_by_one(shape):
    """`shape` with one size wrong, for each axis in turn; and one axis less, and one more."""
    wrong = [(*shape[:axis], size + 1, *shape[axis + 1 :]) for axis, size in enumerate(shape)]
    return [*wrong, shape[1:], (*shape, 1)]


def trace(operation, *args, **kwargs):
    """Shapes and dtypes are checked before anything runs."""
    jax.eval_shape(lambda: operation(*args, **kwargs))


def ones(shapes, dtype=jnp.float32):
    return {name: jnp.ones(shape, dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("shape", off_by_one(KEYS))
def test_keys_of_another_shape(shape):
    with pytest.raises(AssertionError, match=re.escape("keys of layer 1 must be float32[4, 6, 2, 4]")):
        trace(rcache.put, *small.planned(), 1, jnp.ones(shape), jnp.ones(VALUES))


@pytest.mark.parametrize("shape", off_by_one(VALUES))
def test_values_of_another_shape(shape):
    with pytest.raises(AssertionError, match=re.escape("values of layer 1 must be float32[4, 6, 2, 3]")):
        trace(rcache.put, *small.planned(), 1, jnp.ones(KEYS), jnp.ones(shape))


@pytest.mark.parametrize("shape", off_by_one(STATES["ssm"]))
def test_states_of_another_shape(shape):
    with pytest.raises(AssertionError, match=re.escape("state 'ssm' of layer 0 must be float32[4, 2, 2]")):
        trace(rcache.update_state, *small.planned(), 0, ones(STATES | {"ssm": shape}), captured=ones(CAPTURED))


@pytest.mark.parametrize("shape", off_by_one(CAPTURED["conv"]))
def test_captured_states_of_another_shape(shape):
    with pytest.raises(AssertionError, match=re.escape("state 'conv' of layer 0 must be float32[4, 1, 3, 2]")):
        trace(rcache.update_state, *small.planned(), 0, ones(STATES), captured=ones(CAPTURED | {"conv": shape}))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_other_dtypes(dtype):
    put, update_state = (functools.partial(trace, f, *small.planned()) for f in (rcache.put, rcache.update_state))
    other = ones(STATES) | {"ssm": jnp.ones(STATES["ssm"], dtype)}
    for what, operation in {
        "keys of layer 1": lambda: put(1, jnp.ones(KEYS, dtype), jnp.ones(VALUES)),
        "values of layer 1": lambda: put(1, jnp.ones(KEYS), jnp.ones(VALUES, dtype)),
        "state 'ssm' of layer 0": lambda: update_state(0, other, captured=ones(CAPTURED)),
        "state 'conv' of layer 0": lambda: update_state(0, ones(STATES), captured=ones(CAPTURED, dtype)),
    }.items():
        with pytest.raises(AssertionError, match=rf"{what} must be float32.* got {jnp.dtype(dtype)}"):
            operation()


@pytest.mark.parametrize("layer", [-1, 4])
def test_layers_that_do_not_exist(layer):
    for operation in every_layer_operation(layer):
        with pytest.raises(ValueError, match=rf"layer must be in 0 .. 3, got {layer}"):
            operation()


def test_layers_that_have_no_such_memory():
    for operation in every_layer_operation(0)[:2]:
        with pytest.raises(ValueError, match=r"layer 0 has no attention: layers \[1, 2, 3\] do"):
            operation()
    for operation in every_layer_operation(1)[2:]:
        with pytest.raises(ValueError, match=r"layer 1 has no states: layers \[0, 2, 3\] do"):
            operation()


def every_layer_operation(layer, cache=None):
    planned, plan = small.planned()
    cache = planned if cache is None else cache
    return [
        lambda: rcache.put(cache, plan, layer, jnp.ones(KEYS), jnp.ones(VALUES)),
        lambda: rcache.get(cache, plan, layer),
        lambda: rcache.read_state(cache, plan, layer),
        lambda: rcache.update_state(cache, plan, layer, ones(STATES), captured=ones(CAPTURED)),
    ]


def test_other_names_of_states():
    cache, plan = small.planned()
    strange = {"rnn": (4, 1)}
    with pytest.raises(ValueError, match=r"layer 0 has states \['conv', 'ssm'\], not \['rnn'\]"):
        rcache.update_state(cache, plan, 0, ones(STATES | strange), captured=ones(CAPTURED))
    with pytest.raises(ValueError, match=r"layer 0 has states \['conv', 'ssm'\], not \['rnn'\]"):
        rcache.update_state(cache, plan, 0, ones(STATES), captured=ones(CAPTURED | strange))
    with pytest.raises(ValueError, match=r"captured has \['conv'\], states has \['conv', 'ssm'\]"):
        rcache.update_state(cache, plan, 0, ones(STATES), captured=ones({"conv": CAPTURED["conv"]}))
    with pytest.raises(ValueError, match="captured must be given exactly where the batch has captures"):
        rcache.update_state(cache, plan, 0, ones(STATES))


def test_a_plan_of_another_config():
    other = rcache.init(dataclasses.replace(small.CONFIG, context_length=48))
    plan = small.planned()[1]
    for operation in [*every_layer_operation(0, other), functools.partial(rcache.ensure_writable, other, plan)]:
        with pytest.raises(ValueError, match="another config"):
            operation()


# Wrong configs

LAYER = Layer({"conv": small.conv}, small.full)


def config(*, layers=(LAYER,), max_sequences=2, context_length=8, **others):
    return Config(layers, max_sequences, context_length, **others)


WRONG = [
    (lambda: State(3), "State.shape", "3"),
    (lambda: State((0,)), "State.shape", "0"),
    (lambda: State((2.0,)), "State.shape", "2.0"),
    (lambda: State((True,)), "State.shape", "True"),
    (lambda: State((2,), "float33"), "State.dtype", "float33"),
    (lambda: State((2,), "float64"), "State.dtype", "float64"),
    (lambda: Attention(0, 4), "Attention.num_kv_heads", "0"),
    (lambda: Attention(1, 4.0), "Attention.head_dim", "4.0"),
    (lambda: Attention(1, 4, value_dim=0), "Attention.value_dim", "0"),
    (lambda: Attention(1, 4, sliding_window=0), "Attention.sliding_window", "0"),
    (lambda: Attention(1, 4, chunk_size=-1), "Attention.chunk_size", "-1"),
    (lambda: Attention(1, 4, sliding_window=4, chunk_size=5), "sliding_window=4", "chunk_size=5"),
    (lambda: Attention(1, 4, memory=4), "Attention.memory", "4"),
    (lambda: Attention(1, 4, sliding_window=9, memory=7), "Attention.memory", "7"),
    (lambda: Attention(1, 4, dtype="int8"), "Attention.dtype", "int8"),
    (lambda: Attention(1, 4, dtype="float64"), "Attention.dtype", "float64"),
    (lambda: Layer({"conv": (3, 2)}), "Layer.states['conv']", "(3, 2)"),
    (lambda: Layer({1: small.conv}), "Layer.states", "1"),
    (lambda: Layer((("conv", small.conv), ("conv", small.ssm))), "Layer.states", "conv"),
    (lambda: Layer((small.conv,)), "Layer.states", "State"),
    (lambda: Layer(attention=(1, 4)), "Layer.attention", "(1, 4)"),
    (lambda: CheckpointPolicy(count=-1), "CheckpointPolicy.count", "-1"),
    (lambda: CheckpointPolicy(min_position=-1), "CheckpointPolicy.min_position", "-1"),
    (lambda: CheckpointPolicy(interval=0), "CheckpointPolicy.interval", "0"),
    (lambda: config(layers=()), "Config.layers", "nothing"),
    (lambda: config(layers=(Layer(),)), "Config.layers", "nothing"),
    (lambda: config(layers=(LAYER, small.conv)), "Config.layers[1]", "State"),
    (lambda: config(max_sequences=0), "Config.max_sequences", "0"),
    (lambda: config(context_length="8"), "Config.context_length", "'8'"),
    (lambda: config(page_size=0), "Config.page_size", "0"),
    (lambda: config(checkpoints=3), "Config.checkpoints", "3"),
    (lambda: config(max_pass_tokens=0), "Config.max_pass_tokens", "0"),
    (lambda: config(num_slots=0), "Config.num_slots", "0"),
    (lambda: config(num_pages=0), "Config.num_pages", "0"),
    (lambda: config(num_pages=(4, 4)), "Config.num_pages", "2"),
    (lambda: config(byte_budget=0), "Config.byte_budget", "0"),
    (lambda: config(byte_budget=50), "Config.byte_budget", "50"),
]


@pytest.mark.parametrize(("build", "name", "value"), WRONG, ids=[f"{name}, {value}" for _, name, value in WRONG])
def test_wrong_values_are_named(build, name, value):
    with pytest.raises(ValueError) as caught:
        build()
    assert name in str(caught.value) and value in str(caught.value)


# Memory

CONFIGS = {
    "small": small.CONFIG,
    "tight": TIGHT,
    "no attention": config(layers=(Layer({"a": State((3,), "bfloat16"), "b": State((), "int32")}),)),
    "no states": config(layers=(Layer(attention=small.window), Layer(), Layer(attention=small.full))),
    "memory": config(
        layers=(LAYER, Layer(attention=Attention(1, 2, chunk_size=4, memory=6, dtype="float16"))), context_length=50
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_what_init_allocates(name):
    cache = rcache.init(CONFIGS[name])
    leaves = jax.tree.leaves(cache)
    report = CONFIGS[name].memory()
    assert report.total == sum(leaf.nbytes for leaf in leaves)
    assert sum(report.states.values()) == sum(leaf.nbytes for leaf in cache.states.values())
    keys_and_values = jax.tree.leaves((cache.keys, cache.values))
    assert sum(report.keys_and_values.values()) == sum(leaf.nbytes for leaf in keys_and_values)
    assert f"{report.total:,}" in str(report)


@pytest.mark.parametrize("name", CONFIGS)
def test_abstract_is_the_shape_of_init(name):
    abstract, cache = rcache.abstract(CONFIGS[name]), rcache.init(CONFIGS[name])
    assert jax.tree.structure(abstract) == jax.tree.structure(cache)
    for one, other in zip(jax.tree.leaves(abstract), jax.tree.leaves(cache), strict=True):
        assert isinstance(one, jax.ShapeDtypeStruct)
        assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)


@pytest.mark.parametrize("share", [0.35, 0.6, 0.9])
def test_a_byte_budget_is_respected_and_used(share):
    ample = Config(small.LAYERS, 4, 240, page_size=4, checkpoints=CheckpointPolicy())
    budget = int(ample.memory().total * share)
    fitted = dataclasses.replace(ample, byte_budget=budget)
    assert 0.97 * budget <= fitted.memory().total <= budget
    assert 4 <= fitted.capacity.slots < ample.capacity.slots
    assert all(60 <= few < many for few, many in zip(fitted.capacity.pages, ample.capacity.pages, strict=True))


def test_a_byte_budget_leaves_alone_what_is_given():
    ample = Config(small.LAYERS, 4, 240, page_size=4)
    fitted = dataclasses.replace(ample, num_slots=50, byte_budget=ample.memory().total * 2 // 3)
    assert fitted.capacity.slots == 50 and fitted.capacity.pages < ample.capacity.pages
    assert dataclasses.replace(ample, byte_budget=2 * ample.memory().total).capacity == ample.capacity


def test_a_byte_budget_too_small_says_how_much_is_needed():
    with pytest.raises(ValueError, match=r"(\d+) bytes are needed") as caught:
        config(byte_budget=50)
    needed = int(re.search(r"(\d+) bytes are needed", str(caught.value))[1])
    assert config(byte_budget=needed).memory().total == needed
    with pytest.raises(ValueError, match="too small"):
        config(byte_budget=needed - 1)


def test_configs_are_values():
    same = Config(
        np.array(small.LAYERS, object).tolist(), 4, 24, page_size=3, checkpoints=small.POLICY, max_pass_tokens=6
    )
    assert same == small.CONFIG and hash(same) == hash(small.CONFIG)
    assert same != TIGHT
