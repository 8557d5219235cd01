"""Trains the small model that chat.py talks with: `python examples/train.py SDIST OUT`

A Qwen3.5 of 0.9 million parameters over bytes, 1.8 MB in bfloat16, that answers in the words of Lewis Carroll and
William Shakespeare. Its text is in the public domain, and comes from the source package of `brotli` 1.2.0, which
compresses it in tests:

    pip download --no-deps --no-binary brotli brotli==1.2.0

The sentences of "Alice's Adventures in Wonderland" and "As You Like It", in their order, become the lines of a
conversation, as chat.py writes one down: one is asked, the next is the answer. Nothing is cached: the loss runs the
model over whole rows, `WholePass`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file

from models import loading
from models.passes import WholePass
from models.qwen3_5 import Qwen3_5

STORY = "alice29.txt"
PLAY = "asyoulik.txt"
SENTENCE_BYTES = range(8, 161)
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "eos_token_id": ord("\n"),  # a message is a line
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 352,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
}
ROW_TOKENS = 384
LEARNING_RATE = 3e-3


def read_texts(sdist: Path, names: Sequence[str]) -> Iterator[str]:
    """The contents of files in a source package, by name, in that order."""
    with tarfile.open(sdist) as archive:
        members = {Path(member.name).name: member for member in archive if member.isfile()}
        if missing := [name for name in names if name not in members]:
            raise ValueError(f"{sdist} does not contain {', '.join(missing)}")
        for name in names:
            yield archive.extractfile(members[name]).read().decode("ascii")


def spoken_lines(play: str) -> str:
    """A play without who speaks and what happens on stage: names stand before a tab, the rest in brackets."""
    play = play[play.index("\nACT I\n") :]
    play = re.sub(r"\[[^]]*\]", " ", play)
    play = re.sub(r"^(ACT|SCENE)\b.*$", "", play, flags=re.MULTILINE)
    return re.sub(r"^[^\t\n]+\t", "\n\n", play, flags=re.MULTILINE)


def sentences(text: str) -> list[str]:
    """Those that are neither too short nor too long; parts up to a semicolon or a colon count as well.

    The quotes and brackets they begin or end in are left out, and so are headings, which end in no full stop.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.replace("`", "'").replace('"', "'").split())
        for part in re.split(r"(?<=[.!?;:])['()]*\s+", words):
            sentence = re.sub(r"[;:]$", ".", part.strip("'()"))
            if len(sentence) in SENTENCE_BYTES and sentence[0].isalpha() and sentence[-1] in ".!?":
                found.append(sentence[0].upper() + sentence[1:])
    return found


def conversation(lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Lines as chat.py writes a conversation down: its bytes u8[N], and where in them questions begin i64[M].

    Each is once the question and once the answer.
    """
    text = []
    for first in (0, 1):
        for question, answer in zip(lines[first::2], lines[first + 1 :: 2], strict=False):
            text.append(f"user: {question}\nassistant: {answer}\n".encode())
    return np.frombuffer(b"".join(text), np.uint8), np.cumsum([0, *map(len, text[:-1])])


def initial_weights(seed: int) -> dict[str, np.ndarray]:
    """By name in a checkpoint, as Qwen's own are begun: f32 of every shape."""
    generator = np.random.default_rng(seed)
    model = nnx.eval_shape(lambda: Qwen3_5(Qwen3_5.Config.from_hf(CONFIG)))
    shapes = {
        Qwen3_5.checkpoint_name(".".join(map(str, path))): leaf.shape
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    }

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("A_log"):
            return np.log(generator.uniform(1, 16, shape))
        if name.endswith("dt_bias"):  # what softplus makes a time step of
            return np.log(np.expm1(np.exp(generator.uniform(np.log(1e-3), np.log(1e-1), shape))))
        if name.endswith("linear_attn.norm.weight"):
            return np.ones(shape)
        if name.endswith("norm.weight"):  # stored as its distance from one
            return np.zeros(shape)
        if "conv1d" in name:
            return generator.uniform(-0.5, 0.5, shape)
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "out_proj.weight", "down_proj.weight")):
            return generator.normal(0, 0.02, shape)
        return generator.normal(0, shape[-1] ** -0.5, shape)

    return {name: draw(name, shape).astype(np.float32) for name, shape in shapes.items()}


def train(text: np.ndarray, starts: np.ndarray, *, steps: int, rows: int, seed: int) -> Iterator[nnx.State]:
    """The parameters after every 500 of `steps` steps, and after the last; prints the loss.

    Args:
      text: u8[N].
      starts: i64[M], where in it rows may begin.
      steps: of the optimizer.
      rows: of a step, each of `ROW_TOKENS` bytes and the one after.
      seed: of weights and rows.
    """
    weights = initial_weights(seed)
    model = loading.build(lambda: Qwen3_5(Qwen3_5.Config.from_hf(CONFIG)), weights, name_of=Qwen3_5.checkpoint_name)
    graphdef, params = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(0, LEARNING_RATE, steps // 20, steps, LEARNING_RATE / 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))

    def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        """Nats a byte, of all but the first of each row: i32[B, T]."""
        lengths = jnp.full((tokens.shape[0],), tokens.shape[1] - 1, jnp.int32)
        forward = WholePass.of(lengths, tokens.shape[1] - 1)
        logits, _ = nnx.merge(graphdef, params)(tokens[:, :-1], None, forward)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    @jax.jit
    def step(params: nnx.State, moments: Any, tokens: jax.Array) -> tuple[nnx.State, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    moments = optimizer.init(params)
    generator = np.random.default_rng(seed)
    offsets = np.arange(ROW_TOKENS + 1)
    losses, began = [], time.perf_counter()
    for index in range(1, steps + 1):
        tokens = text[(generator.choice(starts, (rows, 1)) + offsets) % len(text)]
        params, moments, value = step(params, moments, jnp.asarray(tokens, jnp.int32))
        losses.append(value)
        if index % 100 == 0 or index == steps:
            mean = np.mean(losses[-100:])
            print(f"step {index:>5}: {mean:.3f} nats a byte, {time.perf_counter() - began:,.0f} s", flush=True)
        if index % 500 == 0 or index == steps:
            yield params


def save(folder: Path, params: nnx.State) -> None:
    """Writes the model as Hugging Face does: config.json, and the parameters in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    tensors = {
        Qwen3_5.checkpoint_name(".".join(map(str, path))): np.asarray(leaf[...]).astype(ml_dtypes.bfloat16)
        for path, leaf in nnx.to_flat_state(params)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains the model that chat.py talks with.")
    parser.add_argument("sdist", type=Path, help="brotli-1.2.0.tar.gz")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--steps", type=int, default=2000, help="of the optimizer (%(default)s)")
    parser.add_argument("--rows", type=int, default=8, help=f"of {ROW_TOKENS} bytes in a step (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows (%(default)s)")
    options = parser.parse_args(arguments)
    story, play = read_texts(options.sdist, (STORY, PLAY))
    lines = sentences(story[story.index("\n  Alice was beginning") :]) + sentences(spoken_lines(play))
    text, starts = conversation(lines)
    print(f"{len(lines):,} sentences, {len(text):,} bytes")
    for params in train(text, starts, steps=options.steps, rows=options.rows, seed=options.seed):
        save(options.out, params)
    return 0


if __name__ == "__main__":
    sys.exit(main())
