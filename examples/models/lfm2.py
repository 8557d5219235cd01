"""LFM2: gated short convolutions and a few attention layers (Liquid AI, 2025; `model_type` lfm2 at Hugging Face).

Every layer is `x + operator(norm(x))`, then `x + mlp(norm(x))`. The operator of a convolution layer gates its input,
convolves it over a handful of tokens and gates the result; that of an attention layer is grouped-query attention with
normalised, rotated queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import rcache
from models import layers


@dataclass(frozen=True)
class Lfm2Config:
    """The options of a Hugging Face config that decide what is computed."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    layer_types: tuple[str, ...]  # "conv" or "full_attention" each
    num_heads: int
    num_kv_heads: int
    head_dim: int
    conv_width: int
    conv_bias: bool
    norm_eps: float
    tie_embeddings: bool
    rope_frequencies: tuple[float, ...]  # head_dim / 2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Lfm2Config:
        """From the contents of `config.json`; what is not there has Hugging Face's default.

        Raises:
          ValueError: an option this implementation does not have, or one that makes no sense.
        """
        num_layers = config.get("num_hidden_layers", 32)
        layer_types = config.get("layer_types")
        if layer_types is None:
            attention = config.get("full_attn_idxs")
            attention = range(num_layers) if attention is None else attention
            layer_types = ["full_attention" if index in attention else "conv" for index in range(num_layers)]
        num_heads = config.get("num_attention_heads", 32)
        hidden_size = config.get("hidden_size", 2560)
        head_dim = config.get("head_dim") or hidden_size // num_heads
        options = cls(
            vocab_size=config.get("vocab_size", 65536),
            hidden_size=hidden_size,
            mlp_size=_mlp_size(config),
            layer_types=tuple(layer_types),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads", 8),
            head_dim=head_dim,
            conv_width=config.get("conv_L_cache", 3),
            conv_bias=config.get("conv_bias", False),
            norm_eps=config.get("norm_eps", 1e-5),
            tie_embeddings=config.get("tie_embedding", config.get("tie_word_embeddings", True)),
            rope_frequencies=layers.rope_frequencies(config, head_dim, default_theta=1e6),
        )
        unsupported = {
            "layer_types": set(options.layer_types) - {"conv", "full_attention"},
            "num_hidden_layers": len(options.layer_types) != num_layers,
            "num_key_value_heads": options.num_heads % options.num_kv_heads,
            "head_dim": options.head_dim % 2,
            "conv_L_cache": options.conv_width < 1,
            "is_causal": not config.get("is_causal", True),
            "quantization_config": config.get("quantization_config"),
        }
        if found := [f"{name} = {config.get(name)!r}" for name, wrong in unsupported.items() if wrong]:
            raise ValueError(f"unsupported config options: {', '.join(found)}")
        return options


def _mlp_size(config: Mapping[str, Any]) -> int:
    size = config.get("block_ff_dim", config.get("intermediate_size", 12288))
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)  # three matrices instead of two, for the same number of weights
    multiplier = config.get("block_ffn_dim_multiplier", 1.0)
    if multiplier is None:
        return size
    multiple = config.get("block_multiple_of", 256)
    return -(-int(multiplier * size) // multiple) * multiple


class ShortConv(nnx.Module):
    """`out(c * conv(b * x))`, where `b, c, x` are projections of the input."""

    def __init__(self, config: Lfm2Config) -> None:
        size, bias = config.hidden_size, config.conv_bias
        self.in_proj = layers.Linear(size, 3 * size, bias=bias)
        self.conv = layers.DepthwiseConv(size, config.conv_width, bias=bias)
        self.out_proj = layers.Linear(size, size, bias=bias)

    def __call__(
        self, x: jax.Array, cache: rcache.Cache, forward: rcache.Forward, layer: int
    ) -> tuple[jax.Array, rcache.Cache]:
        before, after, x = jnp.split(self.in_proj(x), 3, axis=-1)
        x, cache = layers.causal_conv(self.conv, before * x, cache, forward, layer)
        return self.out_proj(after * x), cache


class Attention(nnx.Module):
    """Grouped-query attention; each head of queries and keys is normalised, then rotated."""

    def __init__(self, config: Lfm2Config) -> None:
        self.config = config
        hidden_size, head_dim = config.hidden_size, config.head_dim
        self.q_proj = layers.Linear(hidden_size, config.num_heads * head_dim)
        self.k_proj = layers.Linear(hidden_size, config.num_kv_heads * head_dim)
        self.v_proj = layers.Linear(hidden_size, config.num_kv_heads * head_dim)
        self.out_proj = layers.Linear(config.num_heads * head_dim, hidden_size)
        self.q_layernorm = layers.RMSNorm(head_dim, eps=config.norm_eps)
        self.k_layernorm = layers.RMSNorm(head_dim, eps=config.norm_eps)

    def __call__(
        self, x: jax.Array, cache: rcache.Cache, forward: rcache.Forward, layer: int
    ) -> tuple[jax.Array, rcache.Cache]:
        heads = (*x.shape[:2], -1, self.config.head_dim)
        queries = self.q_layernorm(self.q_proj(x).reshape(heads))
        keys = self.k_layernorm(self.k_proj(x).reshape(heads))
        queries = layers.rope(queries, forward.positions, self.config.rope_frequencies)
        keys = layers.rope(keys, forward.positions, self.config.rope_frequencies)
        values = self.v_proj(x).reshape(heads)
        scale = self.config.head_dim**-0.5
        x, cache = layers.cached_attention(queries, keys, values, cache, forward, layer, scale=scale)
        return self.out_proj(x), cache


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Lfm2Config, layer_type: str) -> None:
        if layer_type == "conv":
            self.conv = ShortConv(config)
        else:
            self.self_attn = Attention(config)
        self.operator_norm = layers.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn_norm = layers.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = layers.SwiGLU(config.hidden_size, config.mlp_size)

    def __call__(
        self, x: jax.Array, cache: rcache.Cache, forward: rcache.Forward, layer: int
    ) -> tuple[jax.Array, rcache.Cache]:
        operator = self.conv if hasattr(self, "conv") else self.self_attn
        mixed, cache = operator(self.operator_norm(x), cache, forward, layer)
        x = x + mixed
        return x + self.feed_forward(self.ffn_norm(x)), cache


class Lfm2(layers.LanguageModel):
    """LFM2 with its language modelling head."""

    Config = Lfm2Config

    def __init__(self, config: Lfm2Config) -> None:
        self.config = config
        self.embed_tokens = layers.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([Block(config, layer_type) for layer_type in config.layer_types])
        self.embedding_norm = layers.RMSNorm(config.hidden_size, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.lm_head = layers.Linear(config.hidden_size, config.vocab_size)

    def cache_layers(self) -> tuple[rcache.Layer, ...]:
        config = self.config
        conv = rcache.Layer(layers.conv_state(config.hidden_size, config.conv_width))
        attention = rcache.Layer(attention=rcache.Attention(config.num_kv_heads, config.head_dim))
        return tuple(conv if layer_type == "conv" else attention for layer_type in config.layer_types)

    def hidden(self, tokens: jax.Array, cache: rcache.Cache, forward: rcache.Forward) -> tuple[jax.Array, rcache.Cache]:
        x = self.embed_tokens(tokens, forward.token_mask)
        for index, block in enumerate(self.layers):
            x, cache = block(x, cache, forward, index)
        return self.embedding_norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.embed_tokens.attend(hidden) if self.config.tie_embeddings else self.lm_head(hidden)
