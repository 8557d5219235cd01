"""What the example models are made of. Parameters are named and laid out as in Hugging Face checkpoints.

Activations are float32, `[B, T, ...]`: rows of a batch, tokens of a row, padded on the right. Whatever padding holds,
it stays finite and reaches no real token.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import rcache

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)  # float32 proper, on accelerators too


def parameter(*shape: int) -> nnx.Param:
    """A float32 parameter; its value comes from a checkpoint (models are built abstractly, see `loading`)."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))


class Linear(nnx.Module):
    """`x @ weight.T + bias`: f32[..., in] to f32[..., out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        self.weight = parameter(out_features, in_features)
        if bias:
            self.bias = parameter(out_features)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = einsum("...i,oi->...o", x, self.weight[...])
        return y + self.bias[...] if hasattr(self, "bias") else y


class Embedding(nnx.Module):
    """Tokens to vectors, and back to logits where the model ties the two."""

    def __init__(self, num_embeddings: int, features: int) -> None:
        self.weight = parameter(num_embeddings, features)

    def __call__(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """i32[B, T] to f32[B, T, D]; padding reads the first vector, whatever id it has."""
        return self.weight[...][jnp.where(token_mask, tokens, 0)]

    def attend(self, x: jax.Array) -> jax.Array:
        """f32[..., D] to logits f32[..., V]."""
        return einsum("...i,oi->...o", x, self.weight[...])


class RMSNorm(nnx.Module):
    """Scales the last axis to a root mean square of one, then by `weight`."""

    def __init__(self, features: int, *, eps: float) -> None:
        self.weight = parameter(features)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * lax.rsqrt(mean_square + self.eps) * self.weight[...]


class SwiGLU(nnx.Module):
    """`w2(silu(w1 x) * w3 x)`."""

    def __init__(self, features: int, hidden: int) -> None:
        self.w1 = Linear(features, hidden)
        self.w2 = Linear(hidden, features)
        self.w3 = Linear(features, hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


class DepthwiseConv(nnx.Module):
    """A causal depthwise convolution: `weight` f32[channels, 1, width], the last tap for the newest input."""

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        self.weight = parameter(channels, 1, width)
        if bias:
            self.bias = parameter(channels)

    def __call__(self, history: jax.Array) -> jax.Array:
        """f32[B, W-1+T, H], the inputs with the `W-1` before them, to f32[B, T, H]."""
        taps = self.weight[...][:, 0, :]
        num_tokens = history.shape[1] - taps.shape[1] + 1
        y = sum(history[:, j : j + num_tokens] * taps[:, j] for j in range(taps.shape[1]))
        return y + self.bias[...] if hasattr(self, "bias") else y


def conv_state(channels: int, width: int) -> dict[str, rcache.State]:
    """The state of a causal convolution: its last `width - 1` inputs. One of width 1 has none."""
    return {"conv": rcache.State((width - 1, channels))} if width > 1 else {}


def conv_history(state: jax.Array, inputs: jax.Array) -> jax.Array:
    """State f32[B, W-1, H] and inputs f32[B, T, H] in one line, oldest first: f32[B, W-1+T, H]."""
    return jnp.concatenate([state, inputs], axis=1)


def conv_state_after(history: jax.Array, num_tokens: jax.Array, width: int) -> jax.Array:
    """The states after the first `num_tokens` i32[B, C] inputs of each row of `history`: f32[B, C, W-1, H].

    Rows with fewer than `W-1` inputs keep some of their old state, rows with none all of it. Negative: as for none.
    """
    window = jnp.maximum(num_tokens, 0)[..., None] + jnp.arange(width - 1, dtype=jnp.int32)  # [B, C, W-1]
    return jax.vmap(lambda row, index: row[index])(history, window)


def causal_conv(
    conv: DepthwiseConv, inputs: jax.Array, cache: rcache.Cache, forward: rcache.Forward, layer: int
) -> tuple[jax.Array, rcache.Cache]:
    """Convolves `inputs` f32[B, T, H] with what came before them, for a layer whose only state is the convolution's."""
    width = conv.weight.shape[-1]
    if width == 1:
        return conv(inputs), cache
    history = conv_history(rcache.read_state(cache, forward, layer)["conv"], inputs)
    state = conv_state_after(history, forward.lengths[:, None], width)[:, 0]
    captured = None
    if forward.capture_offsets.shape[1]:
        captured = {"conv": conv_state_after(history, forward.capture_offsets, width)}
    cache = rcache.update_state(cache, forward, layer, {"conv": state}, captured=captured)
    return conv(history), cache


def rope_frequencies(config: Mapping[str, Any], rotary_dim: int, *, default_theta: float) -> tuple[float, ...]:
    """Radians a token of each of `rotary_dim / 2` pairs, from a Hugging Face config's RoPE options, old and new.

    Raises:
      ValueError: a `rope_type` other than default and linear.
    """
    options = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = options.pop("rope_theta", config.get("rope_theta") or default_theta)
    rope_type = options.pop("rope_type", options.pop("type", "default"))
    if rope_type not in ("default", "linear"):
        raise ValueError(f"unsupported config option: rope_type = {rope_type!r} (supported: 'default', 'linear')")
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    if rope_type == "linear":
        if "factor" not in options:
            raise ValueError(f"rope_type 'linear' needs a factor, got {options}")
        frequencies = frequencies / np.float32(options["factor"])
    return tuple(frequencies.tolist())


def rope(x: jax.Array, positions: jax.Array, frequencies: tuple[float, ...]) -> jax.Array:
    """Rotates the leading components of `x` f32[B, T, H, D] by `positions` i32[B, T] times the `R` frequencies.

    Components `i` and `R + i` are a pair (Su et al., RoFormer, 2021); those from `2 R` on stay as they are.
    """
    num_pairs = len(frequencies)
    angles = positions.astype(jnp.float32)[..., None, None] * jnp.array(frequencies, jnp.float32)  # [B, T, 1, R]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second, rest = jnp.split(x, [num_pairs, 2 * num_pairs], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def cached_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cache: rcache.Cache,
    forward: rcache.Forward,
    layer: int,
    *,
    scale: float,
) -> tuple[jax.Array, rcache.Cache]:
    """Stores keys and values f32[B, T, H, D] and attends to all the cache has for `queries` f32[B, T, H * G, D].

    Query heads `h * G .. h * G + G - 1` share key head `h`. Returns f32[B, T, H * G * Dv] and the cache. Padding sees
    no key, and gets some finite mean.
    """
    cache = rcache.put(cache, forward, layer, keys, values)
    keys, values, mask = rcache.get(cache, forward, layer)  # [B, X, H, D], [B, X, H, Dv], [B, T, X]
    num_rows, num_tokens, num_heads, head_dim = queries.shape
    grouped = queries.reshape(num_rows, num_tokens, keys.shape[2], num_heads // keys.shape[2], head_dim)
    scores = einsum("bthgd,bxhd->bhgtx", grouped, keys) * scale
    lowest = jnp.finfo(scores.dtype).min
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, lowest), axis=-1)
    attended = einsum("bhgtx,bxhd->bthgd", weights, values)
    return attended.reshape(num_rows, num_tokens, -1), cache


class LanguageModel(nnx.Module):
    """What every model here offers."""

    def cache_layers(self) -> tuple[rcache.Layer, ...]:
        """What each layer remembers: the layers of an `rcache.Config`."""
        raise NotImplementedError

    def hidden(self, tokens: jax.Array, cache: rcache.Cache, forward: rcache.Forward) -> tuple[jax.Array, rcache.Cache]:
        """Runs all layers but the head: tokens i32[B, T] to f32[B, T, D] and the cache."""
        raise NotImplementedError

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head: f32[..., D] to f32[..., V]."""
        raise NotImplementedError

    def __call__(
        self, tokens: jax.Array, cache: rcache.Cache, forward: rcache.Forward
    ) -> tuple[jax.Array, rcache.Cache]:
        """Tokens i32[B, T] of the pass `forward` to logits f32[B, T, V] and the cache."""
        hidden, cache = self.hidden(tokens, cache, forward)
        return self.logits(hidden), cache

    @staticmethod
    def checkpoint_name(path: str) -> str:
        """Name of a parameter in a Hugging Face checkpoint, given its path in this module."""
        return path if path.startswith("lm_head.") else f"model.{path}"
