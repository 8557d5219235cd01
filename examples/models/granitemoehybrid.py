"""Granite 4: Mamba-2, a few attention layers, and experts beside an MLP (`model_type` granitemoehybrid).

Every layer is `x + scale * mixer(norm(x))`, then `x + scale * mlp(norm(x))`; embeddings and logits are scaled as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import rcache
from models.attention import Attention
from models.config import ModelConfig, current_layer_types
from models.language_model import Block, LanguageModel
from models.layers import Linear, RMSNorm, activation, parameter
from models.mixers import Mamba2
from models.moe import mixture, softmax_top_k
from models.passes import Pass
from models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(ModelConfig):
    """The options that decide what is computed."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0  # 0: as many as of queries
    head_dim: int = 0  # 0: an equal part of hidden_size
    attention_bias: bool = False
    attention_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    rope: Rope | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    intermediate_size: int = 11008  # of an expert
    shared_intermediate_size: int = 1024
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | str = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        num_layers = config.setdefault("num_hidden_layers", cls.num_hidden_layers)
        layer_types = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * num_layers
        config["layer_types"] = current_layer_types(layer_types)
        num_heads = config.setdefault("num_attention_heads", cls.num_attention_heads)
        config["head_dim"] = config.get("head_dim") or config.get("hidden_size", cls.hidden_size) // num_heads
        if config.get("position_embedding_type") == "rope" and "full_attention" in config["layer_types"]:
            config["rope"] = Rope.from_hf(config, config["head_dim"])
        if not config.get("num_key_value_heads"):
            config["num_key_value_heads"] = num_heads
        return config

    def unsupported(self) -> dict[str, bool]:
        return {
            "layer_types": self.layers_unlike("linear_attention", "full_attention"),
            "num_key_value_heads": self.has("full_attention")
            and bool(self.num_attention_heads % self.num_key_value_heads),
            "mamba_n_groups": self.has("linear_attention") and bool(self.mamba_n_heads % self.mamba_n_groups),
            "mamba_d_head": self.has("linear_attention")
            and self.mamba_head_dim * self.mamba_n_heads != self.mamba_expand * self.hidden_size,
            "mamba_d_conv": self.mamba_d_conv < 1,
        }

    @property
    def mamba_head_dim(self) -> int:
        inner_size = self.mamba_expand * self.hidden_size
        return inner_size // self.mamba_n_heads if isinstance(self.mamba_d_head, str) else self.mamba_d_head


class FusedMLP(nnx.Module):
    """`output(act(a) * b)`, where `a` and `b` are one projection of the input."""

    def __init__(self, config: GraniteMoeHybridConfig) -> None:
        self.input_linear = Linear(config.hidden_size, 2 * config.shared_intermediate_size)
        self.output_linear = Linear(config.shared_intermediate_size, config.hidden_size)
        self.act = activation(config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, x = jnp.split(self.input_linear(x), 2, axis=-1)
        return self.output_linear(self.act(gate) * x)


class FusedExperts(nnx.Module):
    """One weight for all experts of a projection: f32[experts, out, in]."""

    def __init__(self, *shape: int) -> None:
        self.weight = parameter(*shape)


class SparseMLP(nnx.Module):
    """The likeliest of many experts."""

    def __init__(self, config: GraniteMoeHybridConfig) -> None:
        num_experts, size, hidden = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.router = nnx.Dict(layer=Linear(size, num_experts))
        self.input_linear = FusedExperts(num_experts, 2 * hidden, size)
        self.output_linear = FusedExperts(num_experts, size, hidden)
        self.act = activation(config.hidden_act)
        self.num_active = config.num_experts_per_tok

    def __call__(self, x: jax.Array) -> jax.Array:
        def gated(both: jax.Array) -> jax.Array:
            gate, up = jnp.split(both, 2, axis=-1)
            return self.act(gate) * up

        experts, weights = softmax_top_k(self.router["layer"](x), self.num_active, normalized=True)
        inner, outer = self.input_linear.weight[...], self.output_linear.weight[...]
        return mixture(x, experts, weights, (inner,), gated, outer)


class GraniteMoeHybridBlock(Block):
    """Mamba-2 or attention, then an MLP and experts beside it."""

    def __init__(self, config: GraniteMoeHybridConfig, layer_type: str) -> None:
        if layer_type == "linear_attention":
            self.mamba = Mamba2(
                config.hidden_size,
                num_heads=config.mamba_n_heads,
                head_dim=config.mamba_head_dim,
                state_size=config.mamba_d_state,
                num_groups=config.mamba_n_groups,
                conv_width=config.mamba_d_conv,
                conv_bias=config.mamba_conv_bias,
                bias=config.mamba_proj_bias,
                act=config.hidden_act,
                time_step_limit=config.time_step_limit,
                norm_eps=config.rms_norm_eps,
            )
        else:
            self.self_attn = Attention(
                config.hidden_size,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                scale=config.attention_multiplier,
                rope=config.rope,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.shared_mlp = FusedMLP(config)
        if config.num_local_experts:
            self.block_sparse_moe = SparseMLP(config)
        self.scale = config.residual_multiplier

    @property
    def mixer(self) -> Mamba2 | Attention:
        return self.mamba if hasattr(self, "mamba") else self.self_attn

    def __call__(
        self, x: jax.Array, cache: rcache.Cache | None, forward: Pass, layer: int
    ) -> tuple[jax.Array, rcache.Cache | None]:
        mixed, cache = self.mixer(self.input_layernorm(x), cache, forward, layer)
        x = x + self.scale * mixed
        normed = self.post_attention_layernorm(x)
        y = self.shared_mlp(normed)
        if hasattr(self, "block_sparse_moe"):
            y = y + self.block_sparse_moe(normed)
        return x + self.scale * y, cache


class GraniteMoeHybrid(LanguageModel):
    """Granite 4 with its language modelling head."""

    Config = GraniteMoeHybridConfig

    def __init__(self, config: GraniteMoeHybridConfig) -> None:
        blocks = [GraniteMoeHybridBlock(config, layer_type) for layer_type in config.layer_types]
        super().__init__(config, blocks, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def embed(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        return self.config.embedding_multiplier * super().embed(tokens, token_mask)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return super().logits(hidden) / self.config.logits_scaling
