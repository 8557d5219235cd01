"""The example models over the cache: loading, every way through the cache to the same logits, decoding, the chat."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import chat
import decoding
import models
import rcache
import verify
from models import moe, recurrence
from models.config import ModelConfig
from models.lfm2 import Lfm2Config
from models.mixers import CausalConv
from models.rope import Rope
from text import ByteTokenizer

HF = Path(__file__).parent / "data" / "hf"
FAMILIES = ("granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5", "qwen3_next", "recurrent_gemma")
LFM2 = HF / "lfm2"


@pytest.fixture(scope="module")
def verifier():
    return verify.Verifier(LFM2)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return verify.Verifier(HF / request.param)


@pytest.mark.parametrize("check", verify.CHECKS)
def test_logits_states_and_tokens_equal_the_expected_ones(family, check):
    result = verify.verify(family, check)
    assert result.ok, verify.line_of(result)


def test_verify_notices_wrong_logits_and_states(verifier, monkeypatch):
    monkeypatch.setattr(verifier, "logits", verifier.logits + np.float32(1e-3))
    assert not verify.verify(verifier, "whole prefill").ok
    monkeypatch.undo()
    wrong = {"conv": [state + np.float32(1e-3) * np.abs(state).max() for state in verifier.fresh_states["conv"]]}
    monkeypatch.setitem(vars(verifier), "fresh_states", wrong)
    assert not verify.verify(verifier, "whole prefill").ok


# Loading


def folder_with(tmp_path, *, config=None, tensors=None):
    """The LFM2 folder, with other options or tensors (None: without that tensor)."""
    folder = tmp_path / "model"
    shutil.copytree(LFM2, folder)
    options = json.loads((LFM2 / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(options))
    weights = load_file(LFM2 / "model.safetensors") | (tensors or {})
    save_file({name: array for name, array in weights.items() if array is not None}, folder / "model.safetensors")
    return folder


def weights_of(model):
    return jax.tree.map(np.asarray, decoding.split(model).weights)


def test_shards_of_bfloat16_are_loaded_as_float32(tmp_path):
    rounded = {name: a.astype(ml_dtypes.bfloat16) for name, a in load_file(LFM2 / "model.safetensors").items()}
    plain = models.load(folder_with(tmp_path, tensors={name: a.astype(np.float32) for name, a in rounded.items()}))
    folder = tmp_path / "model"
    (folder / "model.safetensors").unlink()
    shards = {f"model-{i}-of-3.safetensors": list(rounded)[i::3] for i in range(3)}
    for shard, names in shards.items():
        save_file({name: rounded[name] for name in names}, folder / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(np.testing.assert_array_equal, weights_of(models.load(folder)), weights_of(plain))
    (folder / "model-1-of-3.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1-of-3\.safetensors"):
        models.load(folder)


def test_tensors_that_do_not_fit_are_named_all_at_once(tmp_path):
    wrong = {
        "model.embedding_norm.weight": None,
        "model.layers.9.ffn_norm.weight": np.ones(64, np.float32),
        "model.layers.0.conv.conv.weight": np.ones((64, 1, 4), np.float32),
    }
    with pytest.raises(ValueError, match="do not fit") as error:
        models.load(folder_with(tmp_path, tensors=wrong))
    assert "missing: model.embedding_norm.weight [64]" in str(error.value)
    assert "unexpected: model.layers.9.ffn_norm.weight" in str(error.value)
    assert "mis-shaped: model.layers.0.conv.conv.weight is [64, 1, 4], the config says [64, 1, 3]" in str(error.value)


def test_a_tied_head_may_be_stored_and_one_of_its_own_counts(tmp_path):
    embedding = load_file(LFM2 / "model.safetensors")["model.embed_tokens.weight"]
    folder = folder_with(tmp_path, tensors={"lm_head.weight": embedding})
    jax.tree.map(np.testing.assert_array_equal, weights_of(models.load(folder)), weights_of(models.load(LFM2)))
    shutil.rmtree(folder)
    own = models.load(folder_with(tmp_path, tensors={"lm_head.weight": embedding + 1}))
    assert not own.config.tie_word_embeddings
    np.testing.assert_array_equal(own.lm_head.weight[...], embedding + 1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model_type", "lfm3"),
        ("layer_types", ["conv", "full_attention", "conv", "sliding_attention"]),
        ("num_hidden_layers", 5),
        ("num_key_value_heads", 3),
        ("conv_L_cache", 0),
        ("quantization_config", {"bits": 4}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}),
    ],
)
def test_unsupported_options_are_named(tmp_path, option, value):
    name = "rope_type" if option == "rope_parameters" else option
    with pytest.raises(ValueError, match=name):
        models.load(folder_with(tmp_path, config={option: value}))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_are_not_there_are_named(tmp_path, name):
    folder = folder_with(tmp_path)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        models.load(folder)


def test_broken_files_and_missing_options_are_named(tmp_path):
    folder = folder_with(tmp_path)
    with pytest.raises(ValueError, match="missing config options: hidden_size, num_hidden_layers"):
        ModelConfig.from_hf({"vocab_size": 256})
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds no JSON object"):
        models.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: Expecting"):
        models.load(folder)
    shutil.copy(LFM2 / "config.json", folder)
    contents = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(contents[: len(contents) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        models.load(folder)


def test_loading_tells_how_far_it_is():
    told = []
    models.load(LFM2, progress=lambda *bytes_of: told.append(bytes_of))
    size = (LFM2 / "model.safetensors").stat().st_size
    assert told == sorted(told) and told[-1] == (size, size) and len(told) > 10


def test_lfm2_options():
    config = json.loads((LFM2 / "config.json").read_text())

    def options(**changes):
        return Lfm2Config.from_hf(config | changes)

    assert options().mlp_size == 64  # two thirds of 96, a multiple of 16
    assert options(block_multiple_of=48).mlp_size == 96
    assert options(block_ffn_dim_multiplier=1.3).mlp_size == 96  # 83, rounded up
    assert options(block_auto_adjust_ff_dim=False).mlp_size == 96
    assert options(block_ff_dim=48).mlp_size == 32  # the old name
    assert options(layer_types=None, full_attn_idxs=[3]).layer_types == ("conv", "conv", "conv", "full_attention")
    assert options().head_dim == 16 and options(head_dim=32).head_dim == 32
    assert not options(tie_embedding=False).tie_word_embeddings  # the old name
    assert len(options(rope_parameters={"partial_rotary_factor": 0.5}).rope.frequencies) == 8  # as transformers has it
    with_theta = options(rope_parameters=None, rope_theta=100.0).rope.frequencies
    np.testing.assert_allclose(with_theta, 100.0 ** (-np.arange(8) / 8), rtol=1e-6)
    linear = options(rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}).rope.frequencies
    np.testing.assert_allclose(linear, np.array(with_theta) / 4, rtol=1e-6)


def rope_of(**options):
    """Of 8 pairs, of which the first turns 9,995 times in 62,800 tokens, and each other 3.16 times less."""
    parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 62800} | options
    return Rope.from_hf({"rope_parameters": parameters}, 16)


def test_rope_types_slow_down_the_pairs_that_turn_rarely():
    plain = np.array(rope_of().frequencies)
    np.testing.assert_allclose(plain, 1e4 ** (-np.arange(8) / 8), rtol=1e-6)
    llama = rope_of(rope_type="llama3", factor=4.0, low_freq_factor=10.0, high_freq_factor=1000.0)
    turns = 62800 * plain / (2 * np.pi)
    kept = np.clip((turns - 10) / 990, 0, 1)
    np.testing.assert_allclose(np.array(llama.frequencies) / plain, kept + (1 - kept) / 4, rtol=1e-4)
    assert kept[1] == 1 and 0 < kept[4] < 1 and kept[7] == 0 and llama.scale == 1
    # 32 turns at pair 4.99, one at pair 8: in whole pairs, from 4 to 8.
    yarn = rope_of(rope_type="yarn", factor=4.0)
    slowed = np.array([0, 0, 0, 0, 0, 1, 2, 3]) / 4
    np.testing.assert_allclose(np.array(yarn.frequencies) / plain, 1 - slowed + slowed / 4, rtol=1e-6)
    assert yarn.scale == pytest.approx(1 + 0.1 * np.log(4))
    assert rope_of(rope_type="yarn", factor=4.0, attention_factor=1.5).scale == 1.5
    both = rope_of(rope_type="yarn", factor=4.0, mscale=2.0, mscale_all_dim=1.0)
    assert both.scale == pytest.approx((1 + 0.2 * np.log(4)) / (1 + 0.1 * np.log(4)))
    exact = rope_of(rope_type="yarn", factor=4.0, truncate=False, beta_fast=100.0, beta_slow=10.0)  # pairs 4 to 6
    slowed = np.array([0, 0, 0, 0, 0, 1, 2, 2]) / 2
    np.testing.assert_allclose(np.array(exact.frequencies) / plain, 1 - slowed + slowed / 4, rtol=1e-3)
    with pytest.raises(ValueError, match=r"llama3.*needs other options"):
        rope_of(rope_type="llama3", factor=4.0)


def test_an_odd_number_of_rotated_components_turns_one_more():
    rope = Rope.from_hf({"rope_parameters": {"partial_rotary_factor": 0.3125}}, 16, default_fraction=1.0)  # 5 of 16
    np.testing.assert_allclose(rope.frequencies, 1e4 ** (-np.array([0, 2, 4]) / 5), rtol=1e-6)
    for fraction in (0.01, 1.5):
        with pytest.raises(ValueError, match="partial_rotary_factor"):
            Rope.from_hf({"rope_parameters": {"partial_rotary_factor": fraction}}, 16, default_fraction=1.0)


@pytest.mark.parametrize(
    ("family", "nonsense"),
    [
        ("lfm2", {"layer_types": ["conv"] * 4, "num_attention_heads": 32, "rope_parameters": {"rope_type": "other"}}),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba"] * 4, "num_key_value_heads": 3, "position_embedding_type": "rope", "head_dim": 9},
        ),
        ("granitemoehybrid", {"layer_types": ["attention"] * 4, "mamba_n_groups": 5, "mamba_d_head": 7}),
        ("nemotron_h", {"layers_block_type": ["mamba"] * 4, "num_key_value_heads": 3}),
        ("nemotron_h", {"layers_block_type": ["attention"] * 4, "n_groups": 5}),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4, "num_key_value_heads": 3}),
        ("qwen3_5", {"layer_types": ["full_attention"] * 4, "linear_num_key_heads": 3}),
        ("recurrent_gemma", {"block_types": ["recurrent"], "num_key_value_heads": 3}),
        ("recurrent_gemma", {"block_types": ["attention"], "lru_width": 50}),
    ],
)
def test_options_of_layers_that_are_not_there_do_not_matter(family, nonsense):
    config = json.loads((HF / family / "config.json").read_text()) | {"num_hidden_layers": 4} | nonsense
    model_class = models.MODELS[config["model_type"]]
    options = model_class.Config.from_hf(config)
    nnx.eval_shape(lambda: model_class(options))


# Layers


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_convolution_goes_on_from_its_state_wherever_rows_end(width):
    """Rows of no token, of fewer than the width and of many; states in the middle are those of shorter rows."""
    rng = np.random.default_rng(0)
    lengths, num_tokens, channels = [0, 1, width - 1, 7], 7, 2
    state = rng.normal(size=(4, width - 1, channels)).astype(np.float32)
    inputs = rng.normal(size=(4, num_tokens, channels)).astype(np.float32)
    offsets = np.array([[-1, -1], [1, -1], [1, width - 1], [2, 6]], np.int32)
    conv = CausalConv(channels, width, bias=True)
    conv.weight[...] = jnp.asarray(rng.normal(size=(channels, 1, width)), jnp.float32)
    conv.bias[...] = jnp.asarray(rng.normal(size=channels), jnp.float32)
    asked = jnp.concatenate([jnp.array(lengths, jnp.int32)[:, None], offsets], axis=1)
    outputs, after = conv(jnp.asarray(inputs), {"conv": jnp.asarray(state)}, asked)
    outputs, ends, inside = np.asarray(outputs), np.asarray(after["conv"])[:, :1], np.asarray(after["conv"])[:, 1:]
    for row, length in enumerate(lengths):
        past = np.concatenate([state[row], inputs[row, :length]])
        np.testing.assert_array_equal(ends[row, 0], past[-(width - 1) :])
        for column, offset in enumerate(offsets[row].tolist()):
            if offset >= 0:
                np.testing.assert_array_equal(inside[row, column], past[: width - 1 + offset][-(width - 1) :])
        for token in range(length):
            expected = (past[token : token + width].T * np.asarray(conv.weight[...])[:, 0]).sum(1) + conv.bias[...]
            np.testing.assert_allclose(outputs[row, token], expected, rtol=1e-5, atol=1e-6)


def test_rope_turns_pairs_and_leaves_the_rest():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 6)).astype(np.float32)
    turned = np.asarray(Rope((1.0, 0.25))(jnp.asarray(x), jnp.array([[0, 1, 7]], jnp.int32)))
    angles = np.array([0, 1, 7])[:, None, None] * np.array([1.0, 0.25])
    pairs = (x[..., :2] + 1j * x[..., 2:4]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned, np.concatenate([pairs.real, pairs.imag, x[..., 4:]], -1), rtol=1e-5, atol=1e-6)


def stepwise(queries, keys, values, log_decay, state, beta):
    """The recurrence as it is defined, in float64, token by token: outputs, and the states after 0, 1, ... tokens."""
    outputs, states = [], [state]
    for t in range(queries.shape[1]):
        state = np.exp(log_decay[:, t])[..., None, None] * state
        written = values[:, t]
        if beta is not None:
            written = beta[:, t, :, None] * (written - np.einsum("bhkv,bhk->bhv", state, keys[:, t]))
        state = state + keys[:, t, ..., None] * written[:, :, None]
        outputs.append(np.einsum("bhkv,bhk->bhv", state, queries[:, t]))
        states.append(state)
    return np.stack(outputs, 1), np.stack(states, 1)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("num_tokens", "chunk_size"), [(1, 64), (5, 64), (12, 4), (13, 5), (7, 1)])
def test_linear_attention_in_chunks_is_the_recurrence(delta, group, num_tokens, chunk_size):
    """Chunks that divide and that do not; states before the pass, at ends of chunks, inside them, and at the end."""
    rng = np.random.default_rng(num_tokens)
    rows, key_heads, key_dim, value_dim = 2, 2, 4, 6
    heads = key_heads * group
    shape = (rows, num_tokens, heads)
    queries, keys = rng.normal(size=(2, rows, num_tokens, key_heads, key_dim))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    values, log_decay = rng.normal(size=(*shape, value_dim)), -rng.uniform(0, 2, shape)
    beta = rng.uniform(0, 1, shape) if delta else None
    state = rng.normal(size=(rows, heads, key_dim, value_dim))
    offsets = np.stack([[-1, 0, *range(1, num_tokens + 1)], [num_tokens, *range(num_tokens + 1)]]).astype(np.int32)
    for_each_head = (np.repeat(x, group, axis=2) for x in (queries, keys))
    expected, states = stepwise(*for_each_head, values, log_decay, state, beta)
    single = [None if x is None else jnp.asarray(x, jnp.float32) for x in (queries, keys, values, log_decay, state)]
    got, after = recurrence.linear_attention(
        *single,
        jnp.asarray(offsets),
        beta=None if beta is None else jnp.asarray(beta, jnp.float32),
        chunk_size=chunk_size,
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    at_offsets = states[np.arange(rows)[:, None], np.maximum(offsets, 0)]
    np.testing.assert_allclose(after, at_offsets, rtol=1e-4, atol=1e-5)


def test_what_pads_a_row_has_no_part_in_its_states():
    """Not even if it is as large as numbers get."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 8, 2, 4)).astype(np.float32) for _ in range(3)]
    log_decay = -rng.uniform(0, 1, (1, 8, 2)).astype(np.float32)
    state, offsets = jnp.ones((1, 2, 4, 4)), jnp.array([[5, 3, 0]], jnp.int32)
    _, clean = recurrence.linear_attention(*map(jnp.asarray, (*arrays, log_decay)), state, offsets, chunk_size=3)
    for array in arrays:
        array[:, 5:] = 1e18
    _, padded = recurrence.linear_attention(*map(jnp.asarray, (*arrays, log_decay)), state, offsets, chunk_size=3)
    np.testing.assert_array_equal(padded, clean)
    np.testing.assert_array_equal(clean[:, 2], state)


def test_linear_recurrence_is_the_recurrence():
    rng = np.random.default_rng(0)
    decay, inputs = rng.uniform(0, 1, (2, 9, 3)), rng.normal(size=(2, 9, 3))
    state, offsets = rng.normal(size=(2, 3)), np.array([[9, -1, 4], [0, 1, 8]], np.int32)
    states = [state]
    for t in range(9):
        states.append(decay[:, t] * states[-1] + inputs[:, t])
    states = np.stack(states, 1)
    single = [jnp.asarray(x, jnp.float32) for x in (decay, inputs, state)]
    outputs, after = recurrence.linear_recurrence(*single, jnp.asarray(offsets))
    np.testing.assert_allclose(outputs, states[:, 1:], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, states[np.arange(2)[:, None], np.maximum(offsets, 0)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", [moe.chosen_experts, moe.all_experts, None])
def test_a_mixture_is_the_weighted_sum_of_each_tokens_experts(run):
    """However a platform runs it; some experts have no token."""
    rng = np.random.default_rng(0)
    num_experts, rows, tokens, size, hidden = 5, 2, 6, 4, 3
    x = rng.normal(size=(rows, tokens, size))
    gate, up = rng.normal(size=(2, num_experts, hidden, size))
    down = rng.normal(size=(num_experts, size, hidden))
    chosen = rng.permuted(np.tile([0, 1, 3, 4], (rows, tokens, 1)), axis=-1)[..., :2]
    weights = rng.uniform(0, 1, chosen.shape)
    expected = np.zeros_like(x)
    for row, token, place in np.ndindex(chosen.shape):
        expert, vector = chosen[row, token, place], x[row, token]
        output = down[expert] @ (np.tanh(gate[expert] @ vector) * (up[expert] @ vector))
        expected[row, token] += weights[row, token, place] * output
    act = lambda gate, up: jnp.tanh(gate) * up  # noqa: E731
    single = [jnp.asarray(value, jnp.float32) for value in (x, weights, gate, up, down)]
    x, weights, gate, up, down = single
    routed = moe.Routed(x, jnp.asarray(chosen, jnp.int32), weights, (gate, up), down)
    got = moe.mixture(*routed[:4], act, down) if run is None else run(act, routed)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


# Decoding


def draws(logits, sampling, num_rows=4000, position=3):
    keys = jax.random.split(jax.random.key(1), num_rows)
    rows = jnp.tile(jnp.array(logits, jnp.float32), (num_rows, 1))
    return np.asarray(decoding.sample(rows, keys, jnp.full(num_rows, position, jnp.int32), sampling))


def test_sampling_keeps_to_the_likeliest():
    logits = np.log([0.05, 0.5, 0.3, 0.15])
    assert set(draws(logits, decoding.Sampling())) == {1}
    assert set(draws(logits, decoding.Sampling(1.0))) == {0, 1, 2, 3}
    assert set(draws(logits, decoding.Sampling(1.0, top_k=2))) == {1, 2}
    assert set(draws(logits, decoding.Sampling(1.0, top_k=9))) == {0, 1, 2, 3}
    assert set(draws(logits, decoding.Sampling(1.0, top_p=0.4))) == {1}
    assert set(draws(logits, decoding.Sampling(1.0, top_p=0.9))) == {1, 2, 3}
    shares = np.bincount(draws(logits, decoding.Sampling(1.0)), minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.05, 0.5, 0.3, 0.15], atol=0.03)


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_refuses_what_makes_no_sense(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        decoding.Sampling(**options)


def prefilled(verifier, prompts, sequences):
    """In the shapes that the checks have compiled."""
    return decoding.prefill(
        verifier.model,
        rcache.init(verifier.config),
        prompts,
        sequences,
        num_rows=verifier.num_rows,
        buckets=(verify.CHUNK,),
    )


def test_generate_stops_each_row_where_it_should(verifier):
    """At a stop token, at a limit, and all of them where the context is full. A row of padding answers nothing."""
    prompt, expected = verifier.greedy[0, :20].tolist(), verifier.greedy[0, 20:].tolist()
    stop = expected[4]
    assert stop not in expected[:4]

    def answer(prompts, limits):
        cache, logits, status = prefilled(verifier, prompts, [2, 0])
        rcache.raise_if_error(status)
        return decoding.generate(
            verifier.model,
            cache,
            jnp.array([2, 0, -1], jnp.int32),
            logits,
            max_new_tokens=verify.NUM_GREEDY,
            limits=jnp.array(limits, jnp.int32),
            stop_tokens=(stop,),
        )

    cache, generated, status = answer([prompt, prompt], [9, 2, 9])
    assert status == rcache.Status.OK
    assert generated.lengths.tolist() == [5, 2, 0]
    assert generated.tokens.tolist() == [expected[:5] + [0] * 11, expected[:2] + [0] * 14, [0] * 16]
    # The last token of each was chosen, and not run.
    assert rcache.lengths(cache).tolist() == [21, 0, 24, 0, 0, 0]

    full = verifier.config.context_length
    cache, generated, status = answer([[3] * (full - 2), prompt], [9, 9, 9])
    assert status == rcache.Status.CONTEXT_OVERFLOW
    assert generated.lengths.tolist() == [3, 3, 0]
    assert generated.tokens[1, :3].tolist() == expected[:3]
    assert rcache.lengths(cache).tolist() == [22, 0, full, 0, 0, 0]


def test_a_refused_pass_refuses_those_behind_it(verifier):
    """A prompt longer than the context. No token may be put behind tokens that are missing."""
    full = verifier.config.context_length
    assert full % verify.CHUNK == 0
    cache, _, status = prefilled(verifier, [[5] * 20, [6] * (full + 2 * verify.CHUNK)], [0, 1])
    assert status == rcache.Status.CONTEXT_OVERFLOW
    assert rcache.lengths(cache).tolist() == [20, full, 0, 0, 0, 0]


def test_an_empty_prompt_has_no_logits(verifier):
    with pytest.raises(ValueError, match="empty"):
        decoding.prefill(verifier.model, rcache.init(verifier.config), [[1], []], [0, 1])


# The chat


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"
    assert tokenizer.decode([104, 105, 255, 300, 33]) == "hi\\xff<300>!"


def test_common_prefix():
    assert chat.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert chat.common_prefix([1, 2], [1, 2, 4]) == 2
    assert chat.common_prefix([], [1]) == 0


def test_chat_reuses_restores_and_equals_cold_runs(capsys, monkeypatch):
    kept = []
    monkeypatch.setattr(chat, "scripted", lambda c, script=chat.scripted: (kept.append(c), script(c)))
    assert chat.main(["--max-new-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert "restored to a checkpoint" in printed and "copied" in printed
    assert "All answers are those of a cold run." in printed
    [session] = kept
    again = session.turns[-1]
    assert again.run == 1 and again.reused == len(again.prompt) - 1  # the same question again
    assert all(turn.reused > 0 for turn in session.turns[2:])
    tampered = session.turns[3].answer
    tampered[2] = (tampered[2] + 1) % 256
    assert not session.check()
    assert "differs at token 3" in capsys.readouterr().out
