"""One token through a kernel is one token through the plain path, bit by bit: every slot of the pool, every output.

The kernels run in interpret mode here. The one for TPUs also runs as a TPU would run it, copies in flight and races
looked for; the one for GPUs also with its programs in the opposite order, since on a GPU they have none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import rcache
from models import recurrence
from rcache import kernels
from tests.small import same_tree

B = 5
delta, ssm = rcache.State((12, 4, 8)), rcache.State((2, 128, 4))  # 12 heads are a block and a half
half, flat = rcache.State((3, 4, 8), "bfloat16"), rcache.State((8, 4))
LAYERS = (
    rcache.Layer({"delta": delta}),
    rcache.Layer({"half": half, "flat": flat}),
    rcache.Layer({"delta": delta, "ssm": ssm}),
)
POLICY = rcache.CheckpointPolicy(count=1, min_position=2, interval=3)
CONFIG = rcache.Config(LAYERS, B, 64, checkpoints=POLICY, num_slots=7)
KERNELS = {
    "tpu": ("pallas_tpu", True),
    "tpu, races": ("pallas_tpu", pltpu.InterpretParams(detect_races=True)),
    "gpu": ("pallas_gpu", True),
    "gpu, backwards": ("pallas_gpu", True),
}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """A kernel by name; it works on a part of the heads at a time."""
    monkeypatch.setattr(kernels, "_BLOCK_SIZE", 0)  # 8 heads
    if request.param == "tpu, races":  # JAX 0.10 interprets whole blocks only
        monkeypatch.setattr(kernels, "heads_of_block", lambda pool: min(pool.shape[2], 6 if pool.ndim == 5 else 8))
    if request.param == "gpu, backwards":
        number = kernels.pl.program_id
        monkeypatch.setattr(kernels.pl, "program_id", lambda axis: B - 1 - number(0) if axis == 0 else number(axis))
    return request.param


def fold(state, key, value, add):
    """Exact on small integers: halves, and an outer product."""
    new = state.astype(jnp.float32) / 2 + key[..., None] * value[..., None, :] + add[..., None, None]
    return new.sum(-2), new.astype(state.dtype)


def fold_flat(state, key, add):
    new = state / 2 + key * add[..., None]
    return new.sum(-1), new


def layers(cache, forward, random, kernel="xla", interpret=False):
    """All states of all layers, one step each; the outputs."""
    numbers = lambda *shape: jnp.asarray(random.integers(-4, 5, (B, *shape)), jnp.float32)  # noqa: E731
    outputs = []
    for index, layer in enumerate(LAYERS):
        for name, state in layer.states:
            h, k, *v = state.shape
            step, inputs = (fold, (numbers(h, k), numbers(h, *v), numbers(h)))
            if not v:
                step, inputs = fold_flat, (numbers(h, k), numbers(h))
            cache, y = rcache.step_state(
                cache, forward, index, name, step, inputs, kernel=kernel, interpret=interpret
            )  # fmt: skip
            outputs.append(y)
    return cache, outputs


@functools.cache
def compiled(kernel):
    """A pass of one token of each row, whose inputs are drawn once."""

    def run(cache, batch):
        cache, forward, status = rcache.start_forward(cache, batch)
        options = KERNELS.get(kernel, (kernel, False))
        cache, outputs = layers(cache, forward, np.random.default_rng(7), *options)
        return cache, outputs, forward, status

    return jax.jit(run)


def batch(*sequences, captures=None):
    return rcache.make_batch(sequences, [int(s >= 0) for s in sequences], 1, captures=captures)


@functools.cache
def used():
    """Sequences 0, 1 and 2 have states in slots 0, 1 and 2; in all other slots is NaN."""
    cache = rcache.init(CONFIG)
    cache = cache.replace(states={key: jnp.full_like(x, jnp.nan) for key, x in cache.states.items()})
    cache, _, forward, status = compiled("xla")(cache, batch(0, 1, 2, -1, -1))
    rcache.raise_if_error(status)
    assert forward.write_slots.tolist() == [0, 1, 2, -1, -1]
    return cache


def after(cache, *passes):
    for sequences in passes:
        cache, _, _, status = compiled("xla")(cache, batch(*sequences))
        rcache.raise_if_error(status)
    return cache


def forked(cache, source, *destinations):
    for destination in destinations:
        cache, _, status = rcache.copy_prefix(cache, source, destination, rcache.lengths(cache)[source])
        rcache.raise_if_error(status)
    return cache


SCENARIOS = {
    "padding first": lambda: (used(), (-1, -1, 1, 0, 2)),
    "padding in the middle": lambda: (used(), (2, -1, 0, -1, 1)),
    "padding last": lambda: (used(), (1, 0, 2, -1, -1)),
    "padding around one row": lambda: (used(), (-1, -1, 1, -1, -1)),
    "padding alone": lambda: (used(), (-1,) * B),
    "new sequences": lambda: (used(), (3, 0, 4, -1, 1)),
    "nothing but new sequences": lambda: (rcache.reset(used()), (4, -1, 2, 0, 1)),
    "a fork and its source": lambda: (forked(used(), 0, 3), (0, 1, 3, -1, 2)),
    "a fork before its source": lambda: (forked(used(), 2, 4), (4, -1, 2, 0, 1)),
    "three of one slot": lambda: (forked(used(), 1, 3, 4), (4, 0, 1, -1, 3)),
    "three of one slot, and padding first": lambda: (forked(used(), 0, 3, 4), (-1, 0, 4, 3, 1)),
    "two forks of an idle source": lambda: (forked(used(), 1, 3, 4), (3, -1, 4, 0, 2)),
    "two pairs": lambda: (forked(forked(used(), 0, 3), 1, 4), (0, 1, 4, 3, 2)),
    "a checkpoint holds the slot": lambda: (after(used(), (0, 1, -1, -1, -1), (0, -1, -1, -1, -1)), (1, 0, -1, 2, 3)),
    "checkpoint and forks hold it": lambda: (forked(after(used(), *[(0, -1, -1, -1, -1)] * 2), 0, 3), (0, 3, 1, -1, 2)),
    "every sequence": lambda: (after(used(), (4, 3, -1, -1, -1)), (4, 2, 3, 1, 0)),
    "every slot": lambda: (after(used(), *[(0, 1, 2, 3, 4)] * 5), (2, 0, 1, 4, 3)),
    "a refused pass": lambda: (used(), (1, 0, 0, 2, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kernel_is_the_plain_path(name, kernel, capfd):
    cache, sequences = SCENARIOS[name]()
    before = jax.tree.map(np.array, cache)
    expected, got = (compiled(k)(cache, batch(*sequences)) for k in ("xla", kernel))
    same_tree(name, got, expected)
    same_tree("the cache that was given", cache, before)
    if (got[2].write_slots < 0).all():
        same_tree("states", got[0].states, cache.states)
    assert not any(np.isnan(y).any() for y in got[1])
    assert "RACE" not in capfd.readouterr().out


def test_the_scenarios_have_what_makes_them_hard():
    plans = [compiled("xla")(cache, batch(*rows))[2] for cache, rows in (make() for make in SCENARIOS.values())]
    plans = [(plan.read_slots.tolist(), plan.write_slots.tolist()) for plan in plans]
    written = {slot for _, writes in plans for slot in writes}
    assert written == {-1, *range(CONFIG.capacity.slots)}
    kept = [[reads[:b].count(slot) for b, slot in enumerate(writes) if slot >= 0] for reads, writes in plans]
    assert {0, 1, 2} == {n for row in kept for n in row}  # so many earlier rows read a slot that a later one keeps
    assert any(slot >= 0 > read for reads, writes in plans for read, slot in zip(reads, writes, strict=True))
    assert any(slot >= 0 and reads.count(slot) > 1 and slot not in writes for reads, writes in plans for slot in reads)


@pytest.mark.parametrize("kernel", ["tpu", "gpu"], indirect=True)
@pytest.mark.parametrize("beta", [False, True], ids=["mamba2", "gated delta"])
def test_a_recurrence_through_a_kernel(kernel, beta):
    """Over the layers with a loop, in a jit that donates; a fork and its source, a new sequence, and padding."""
    random = np.random.default_rng(0)
    k, v = delta.shape[1:]
    numbers = lambda *shape: jnp.asarray(random.normal(size=(B, 12, *shape)), jnp.float32)  # noqa: E731
    inputs = [numbers(k), numbers(k), numbers(v), -jnp.abs(numbers())]
    inputs += [jax.nn.sigmoid(numbers())] if beta else []

    def run(cache, kernel, interpret):
        cache, forward, status = rcache.start_forward(cache, batch(-1, 3, 0, 4, 1))

        def layer(i, carry):
            cache, outputs = carry
            step = functools.partial(recurrence.step, in_kernel=kernel != "xla")
            cache, y = rcache.step_state(
                cache, forward, 2 * i, "delta", step, inputs, like=0, kernel=kernel, interpret=interpret
            )  # fmt: skip
            return cache, outputs.at[i].set(y)

        outputs = jnp.zeros((2, B, 12, v))
        return *jax.lax.fori_loop(0, 2, layer, (cache, outputs)), forward, status

    jitted = jax.jit(run, static_argnums=(1, 2), donate_argnums=0)
    cache = forked(used(), 0, 3)
    expected, got = (jitted(jax.tree.map(jnp.copy, cache), *how) for how in (("xla", False), KERNELS[kernel]))
    written = np.asarray(got[2].write_slots[1:])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)  # noqa: E731
    close(got[1], expected[1])
    for key, states in got[0].states.items():
        rows, others = (np.asarray(tree.states[key]) for tree in (expected[0], got[0]))
        if key == CONFIG.state_groups[0].key:
            close(states[:, written], rows[:, written])
        kept = np.setdiff1d(np.arange(states.shape[1]), written)
        assert others[:, kept].tobytes() == rows[:, kept].tobytes()


def test_a_run_takes_the_plain_path():
    """Its states lie in no slots. (A kernel that is not interpreted would not even compile for a CPU.)"""

    @functools.partial(jax.jit, static_argnums=1)
    def decode(cache, kernel):
        run, _ = rcache.start_run(cache, batch(3, -1, 0, 4, 1))
        run, outputs = layers(run, rcache.run_token(run, 0), np.random.default_rng(7), kernel)
        return rcache.finish_run(run), outputs

    cache = forked(used(), 0, 3)
    same_tree("run", decode(cache, "pallas_tpu"), decode(cache, "xla"))


def test_where_there_is_no_kernel_the_plain_path_is_taken():
    cache = forked(used(), 0, 3)
    same_tree("pass", *(compiled(kernel)(cache, batch(3, -1, 0, 4, 1)) for kernel in ("pallas", "xla")))


def test_a_batch_without_rows():
    cache, forward, _ = rcache.start_forward(used(), batch())
    inputs = (jnp.ones((0, 12, 4)), jnp.ones((0, 12, 8)), jnp.ones((0, 12)))
    for kernel in ("tpu", "gpu"):
        how, interpret = KERNELS[kernel]
        same, y = rcache.step_state(cache, forward, 0, "delta", fold, inputs, kernel=how, interpret=interpret)
        assert y.shape == (0, 12, 8)
        same_tree("cache", same, cache)


def test_a_pass_that_asks_for_captures():
    """After one token there is nothing to capture but its end, and that is no copy."""
    cache = forked(used(), 0, 3)
    asked, plain = (compiled("xla")(cache, batch(3, -1, 0, 4, 1, captures=c)) for c in (np.full((B, 1), 1), None))
    assert rcache.checkpoint_positions(asked[0]).tolist() == [[1], [1], [-1], [1], [0]]
    same_tree("states", asked[0].states, plain[0].states)


def test_what_is_refused():
    cache, forward, _ = rcache.start_forward(used(), batch(0, 1, 2, 3, 4))
    step = functools.partial(rcache.step_state, cache, forward, 0)
    inputs = (jnp.ones((B, 12, 4)), jnp.ones((B, 12, 8)), jnp.ones((B, 12)))
    with pytest.raises(ValueError, match="kernel must be one of"):
        step("delta", fold, inputs, kernel="cuda")
    with pytest.raises(ValueError, match=r"has states \['delta'\], not 'ssm'"):
        step("ssm", fold, inputs)
    with pytest.raises(AssertionError, match="input 2 must be"):
        step("delta", fold, (*inputs[:2], inputs[2][:, :4]))
    with pytest.raises(AssertionError, match=r"must keep its state float32\[5, 12, 4, 8\]"):
        step("delta", lambda state: (state, state.astype(jnp.bfloat16)), ())
    with pytest.raises(AssertionError, match="the step's output must be"):
        step("delta", lambda state: (state.sum(1), state), ())
    with pytest.raises(ValueError, match="pallas_gpu cannot step a state"):
        step("delta", lambda state, x: (x, state), (jnp.ones((B, 12, 3)),), kernel="pallas_gpu")
    cache, forward, _ = rcache.start_forward(used(), rcache.make_batch([0, 1], [2, 1], 2))
    with pytest.raises(ValueError, match="one token of each row, and this pass has 2"):
        rcache.step_state(cache, forward, 0, "delta", fold, ())


# JAX 0.12 lowers for a GPU only if told for which, and says that this way to GPUs will go.
H100 = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "xla.gpu.triton")])
@pytest.mark.parametrize(
    ("heads", "k", "v", "beta", "dtype"),
    [(32, 128, 128, True, "float32"), (64, 128, 64, False, "float32"), (128, 128, 64, False, "bfloat16")],
)
def test_it_lowers_for_accelerators(platform, call, heads, k, v, beta, dtype):
    """At the sizes of Qwen3-Next and of Mamba-2. What compiles the kernel further is not on this machine."""
    layer = rcache.Layer({"state": rcache.State((heads, k, v), dtype)})
    config = rcache.Config((layer,) * 3, 16, 64, num_slots=64, checkpoints=POLICY)

    def step(state, *inputs):
        output, new = recurrence.step(state.astype(jnp.float32), *inputs, in_kernel=True)
        return output, new.astype(state.dtype)

    def run(cache, batch, *inputs):
        cache, forward, _ = rcache.start_forward(cache, batch)
        return rcache.step_state(cache, forward, 1, "state", step, inputs, kernel="pallas")

    sizes = [(k,), (k,), (v,), ()] + [()] * beta
    inputs = [jax.ShapeDtypeStruct((16, heads, *size), jnp.float32) for size in sizes]
    batch = jax.eval_shape(lambda: rcache.make_batch([0] * 16, [1] * 16, 1))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=H100)):
        traced = jax.jit(run, donate_argnums=0).trace(rcache.abstract(config), batch, *inputs)
        assert call in traced.lower(lowering_platforms=(platform,)).as_text()
