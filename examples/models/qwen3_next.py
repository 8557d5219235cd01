"""Qwen3-Next: gated delta nets, gated attention every few layers, mixtures of experts (`model_type` qwen3_next).

Every layer is `x + mixer(norm(x))`, then `x + mlp(norm(x))`. Norms are zero-centered; RoPE turns a part of each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import Attention
from models.config import ModelConfig
from models.language_model import LanguageModel, ResidualBlock
from models.layers import GatedMLP, Linear, RMSNorm
from models.mixers import GatedDeltaNet
from models.moe import Experts, softmax_top_k
from models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class QwenConfig(ModelConfig):
    """The options that decide what is computed, without those of experts."""

    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    attention_bias: bool = False
    rope: Rope | None = None
    hidden_act: str = "silu"
    intermediate_size: int = 5632
    rms_norm_eps: float = 1e-6
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        num_layers = config.setdefault("num_hidden_layers", cls.num_hidden_layers)
        if config.get("layer_types") is None:
            interval = config.get("full_attention_interval", 4)
            config["layer_types"] = [
                "linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)
            ]
        if "full_attention" in config["layer_types"]:
            config["rope"] = Rope.from_hf(config, config.get("head_dim") or cls.head_dim, default_fraction=0.25)
        return config

    def unsupported(self) -> dict[str, bool]:
        return {
            "layer_types": self.layers_unlike("linear_attention", "full_attention"),
            "num_key_value_heads": self.has("full_attention")
            and bool(self.num_attention_heads % self.num_key_value_heads),
            "linear_num_key_heads": self.has("linear_attention")
            and bool(self.linear_num_value_heads % self.linear_num_key_heads),
            "linear_conv_kernel_dim": self.linear_conv_kernel_dim < 1,
        }

    def norm(self, features: int) -> RMSNorm:
        """A norm as it is used everywhere but in gated delta nets."""
        return RMSNorm(features, eps=self.rms_norm_eps, zero_centered=True)

    def delta_net_options(self) -> dict[str, Any]:
        """The keyword arguments of `GatedDeltaNet`."""
        return {
            "num_key_heads": self.linear_num_key_heads,
            "num_value_heads": self.linear_num_value_heads,
            "key_dim": self.linear_key_head_dim,
            "value_dim": self.linear_value_head_dim,
            "conv_width": self.linear_conv_kernel_dim,
            "act": self.hidden_act,
            "norm_eps": self.rms_norm_eps,
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(QwenConfig):
    """The options that decide what is computed."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    num_hidden_layers: int = 48
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    num_experts: int = 512
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return (
            layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )


class FusedGatedDeltaNet(GatedDeltaNet):
    """With two projections: `qkvz` and `ba`, each interleaved by heads of keys."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__(config.hidden_size, **config.delta_net_options())
        key_size, value_size = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.in_proj_qkvz = Linear(config.hidden_size, 2 * key_size + 2 * value_size)
        self.in_proj_ba = Linear(config.hidden_size, 2 * self.num_value_heads)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        by_key_head = (*x.shape[:2], self.num_key_heads, -1)
        value_size = self.num_value_heads // self.num_key_heads * self.value_dim  # of the heads that share a key
        ends = [self.key_dim, 2 * self.key_dim, 2 * self.key_dim + value_size]
        *mixed, gate = jnp.split(self.in_proj_qkvz(x).reshape(by_key_head), ends, axis=-1)
        beta, decay = jnp.split(self.in_proj_ba(x).reshape(by_key_head), 2, axis=-1)
        flat = (*x.shape[:2], -1)
        mixed = jnp.concatenate([part.reshape(flat) for part in mixed], axis=-1)
        gate = gate.reshape(*x.shape[:2], self.num_value_heads, self.value_dim)
        return mixed, gate, beta.reshape(flat), decay.reshape(flat)


class SparseMLP(nnx.Module):
    """The likeliest of many experts, and a gated one that all tokens share."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        size, act = config.hidden_size, config.hidden_act
        self.gate = Linear(size, config.num_experts)
        self.experts = Experts(config.num_experts, size, config.moe_intermediate_size, act=act, gated=True)
        self.shared_expert = GatedMLP(size, config.shared_expert_intermediate_size, act=act)
        self.shared_expert_gate = Linear(size, 1)
        self.num_active = config.num_experts_per_tok
        self.normalized = config.norm_topk_prob

    def __call__(self, x: jax.Array) -> jax.Array:
        experts, weights = softmax_top_k(self.gate(x), self.num_active, normalized=self.normalized)
        shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, experts, weights) + shared


def block_of(config: QwenConfig, layer_type: str, delta_net: type[GatedDeltaNet], mlp: nnx.Module) -> ResidualBlock:
    """A layer of this type: gated delta net or gated attention, then `mlp`."""
    norm = partial(config.norm, config.hidden_size)
    if layer_type == "linear_attention":
        return ResidualBlock("linear_attn", delta_net(config), mlp, norm)
    attention = Attention(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope=config.rope,
        norm=config.norm,
        gated=True,
        bias=config.attention_bias,
        output_bias=config.attention_bias,
    )
    return ResidualBlock("self_attn", attention, mlp, norm)


class QwenModel(LanguageModel):
    """What a checkpoint of Qwen3-Next or Qwen3.5 calls its parts."""

    CHECKPOINT_NAMES = {  # noqa: RUF012 - declared a ClassVar in the base
        "final_norm": "norm",
        "mixer_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }


class Qwen3Next(QwenModel):
    """Qwen3-Next with its language modelling head."""

    Config = Qwen3NextConfig

    def __init__(self, config: Qwen3NextConfig) -> None:
        dense = partial(GatedMLP, config.hidden_size, config.intermediate_size, act=config.hidden_act)
        mlps = [SparseMLP(config) if config.has_experts(i) else dense() for i in range(config.num_hidden_layers)]
        blocks = [
            block_of(config, layer_type, FusedGatedDeltaNet, mlp)
            for layer_type, mlp in zip(config.layer_types, mlps, strict=True)
        ]
        super().__init__(config, blocks, config.norm(config.hidden_size))
