"""LFM2: gated short convolutions and a few attention layers (Liquid AI, 2025; `model_type` lfm2 at Hugging Face).

Every layer is `x + operator(norm(x))`, then `x + mlp(norm(x))`. The operator of a convolution layer gates its input,
convolves it over a handful of tokens and gates the result; that of an attention layer is grouped-query attention with
normalised, rotated queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import rcache
from models.attention import Attention
from models.config import ModelConfig
from models.language_model import LanguageModel, ResidualBlock
from models.layers import GatedMLP, Linear, RMSNorm
from models.mixers import CausalConv, RecurrentMixer, States
from models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ModelConfig):
    """The options that decide what is computed."""

    vocab_size: int = 65536
    hidden_size: int = 2560
    num_hidden_layers: int = 32
    tie_word_embeddings: bool = True
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 0  # 0: an equal part of hidden_size
    rope: Rope | None = None
    conv_L_cache: int = 3  # the width of a convolution
    conv_bias: bool = False
    norm_eps: float = 1e-5
    intermediate_size: int = 12288
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        num_layers = config.setdefault("num_hidden_layers", cls.num_hidden_layers)
        if config.get("layer_types") is None:
            attention = config.get("full_attn_idxs")
            attention = range(num_layers) if attention is None else attention
            config["layer_types"] = ["full_attention" if i in attention else "conv" for i in range(num_layers)]
        config["intermediate_size"] = config.get(
            "block_ff_dim", config.get("intermediate_size")
        )  # the older name first
        config["tie_word_embeddings"] = config.get("tie_embedding", config.get("tie_word_embeddings"))
        if not config.get("head_dim"):
            heads = config.get("num_attention_heads", cls.num_attention_heads)
            config["head_dim"] = config.get("hidden_size", cls.hidden_size) // heads
        if "full_attention" in config["layer_types"]:
            config["rope"] = Rope.from_hf(config, config["head_dim"], default_theta=1e6)
        return config

    def unsupported(self) -> dict[str, bool]:
        return {
            "layer_types": self.layers_unlike("conv", "full_attention"),
            "num_key_value_heads": self.has("full_attention")
            and bool(self.num_attention_heads % self.num_key_value_heads),
            "conv_L_cache": self.conv_L_cache < 1,
        }

    @property
    def mlp_size(self) -> int:
        """Hidden size of the MLPs."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size = int(2 * self.intermediate_size / 3)  # three matrices instead of two, for the same number of weights
        if self.block_ffn_dim_multiplier is None:
            return size
        return -(-int(self.block_ffn_dim_multiplier * size) // self.block_multiple_of) * self.block_multiple_of


class ShortConv(RecurrentMixer):
    """`out(c * conv(b * x))`, where `b, c, x` are projections of the input."""

    def __init__(self, config: Lfm2Config) -> None:
        size, bias = config.hidden_size, config.conv_bias
        self.in_proj = Linear(size, 3 * size, bias=bias)
        self.conv = CausalConv(size, config.conv_L_cache, bias=bias)
        self.out_proj = Linear(size, size, bias=bias)

    def states(self) -> dict[str, rcache.State]:
        return self.conv.states()

    def mix(self, x: jax.Array, positions: jax.Array, states: States, offsets: jax.Array) -> tuple[jax.Array, States]:
        before, after, x = jnp.split(self.in_proj(x), 3, axis=-1)
        x, states = self.conv(before * x, states, offsets)
        return self.out_proj(after * x), states


def block_of(config: Lfm2Config, layer_type: str) -> ResidualBlock:
    """A layer of this type."""
    norm = partial(RMSNorm, eps=config.norm_eps)
    mlp = GatedMLP(config.hidden_size, config.mlp_size, act="silu")
    if layer_type == "conv":
        return ResidualBlock("conv", ShortConv(config), mlp, partial(norm, config.hidden_size))
    attention = Attention(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope=config.rope,
        norm=norm,
    )
    return ResidualBlock("self_attn", attention, mlp, partial(norm, config.hidden_size))


class Lfm2(LanguageModel):
    """LFM2 with its language modelling head."""

    Config = Lfm2Config
    CHECKPOINT_NAMES = {  # noqa: RUF012 - declared a ClassVar in the base
        "final_norm": "embedding_norm",
        "mixer_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "mlp": "feed_forward",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }

    def __init__(self, config: Lfm2Config) -> None:
        blocks = [block_of(config, layer_type) for layer_type in config.layer_types]
        super().__init__(config, blocks, RMSNorm(config.hidden_size, eps=config.norm_eps))
