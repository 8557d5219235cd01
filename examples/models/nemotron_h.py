"""Nemotron-H: layers that are one thing each, Mamba-2, attention, MLP or mixture of experts (`model_type` nemotron_h).

Every layer is `x + mixer(norm(x))`. Attention is grouped-query, without any encoding of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import rcache
from models.attention import Attention
from models.config import ModelConfig, current_layer_types
from models.language_model import Block, LanguageModel
from models.layers import MLP, Linear, RMSNorm, einsum, parameter
from models.mixers import Mamba2
from models.moe import Experts
from models.passes import Pass

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    """The options that decide what is computed."""

    vocab_size: int = 131072
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    layer_norm_epsilon: float = 1e-5
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    ssm_state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_min: float = 0.001
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        layer_types = config.get("layers_block_type") or config.get("layer_types")
        if layer_types is None:
            layer_types = [_PATTERN.get(letter, letter) for letter in config.get("hybrid_override_pattern", "ME*-")]
        layer_types = current_layer_types(layer_types)
        old_names = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min"}
        old_names |= {"mamba_conv_bias": "use_conv_bias"}
        old_names |= {"num_local_experts": "n_routed_experts"}
        renamed = {new: config[old] for old, new in old_names.items() if old in config}
        ignored = {"tie_word_embeddings": False}  # these models have a head of their own, whatever the option says
        return config | renamed | ignored | {"layer_types": layer_types, "num_hidden_layers": len(layer_types)}

    def unsupported(self) -> dict[str, bool]:
        return {
            "layers_block_type": self.layers_unlike(*_PATTERN.values()),
            "num_key_value_heads": self.has("full_attention")
            and bool(self.num_attention_heads % self.num_key_value_heads),
            "n_groups": self.has("linear_attention") and bool(self.mamba_num_heads % self.n_groups),
            "conv_kernel": self.conv_kernel < 1,
        }


class Router(nnx.Module):
    """Chooses the best experts out of the best groups; scores are sigmoids, with a correction for the choice only."""

    def __init__(self, config: NemotronHConfig) -> None:
        self.weight = parameter(config.n_routed_experts, config.hidden_size)
        self.e_score_correction_bias = parameter(config.n_routed_experts)
        self.config = config

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """f32[B, T, D] to experts i32[B, T, A] and their weights f32[B, T, A]."""
        config = self.config
        scores = jax.nn.sigmoid(einsum("...i,oi->...o", x, self.weight[...]))
        corrected = scores + self.e_score_correction_bias[...]
        groups = corrected.reshape(*x.shape[:2], config.n_group, -1)
        group_scores = jnp.sum(lax.top_k(groups, 2)[0], axis=-1)
        _, best_groups = lax.top_k(group_scores, config.topk_group)
        is_best = jnp.any(best_groups[..., None] == jnp.arange(config.n_group), axis=-2)
        corrected = jnp.where(is_best[..., None], groups, -jnp.inf).reshape(scores.shape)
        _, experts = lax.top_k(corrected, config.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor


class SparseMLP(nnx.Module):
    """The chosen of many experts, which may work in a smaller space, and one that all tokens share."""

    def __init__(self, config: NemotronHConfig) -> None:
        size, latent_size = config.hidden_size, config.moe_latent_size
        mlp = partial(MLP, act=config.mlp_hidden_act, bias=config.mlp_bias)
        self.gate = Router(config)
        self.experts = Experts(
            config.n_routed_experts,
            latent_size or size,
            config.moe_intermediate_size,
            act=config.mlp_hidden_act,
            gated=False,
        )
        self.shared_experts = mlp(size, config.moe_shared_expert_intermediate_size)
        if latent_size:
            self.fc1_latent_proj = Linear(size, latent_size, bias=config.mlp_bias)
            self.fc2_latent_proj = Linear(latent_size, size, bias=config.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        experts, weights = self.gate(x)
        if not hasattr(self, "fc1_latent_proj"):
            return self.experts(x, experts, weights) + self.shared_experts(x)
        routed = self.experts(self.fc1_latent_proj(x), experts, weights)
        return self.fc2_latent_proj(routed) + self.shared_experts(x)


def mixer_of(config: NemotronHConfig, layer_type: str) -> nnx.Module:
    """What a layer of this type does."""
    if layer_type == "linear_attention":
        return Mamba2(
            config.hidden_size,
            num_heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            state_size=config.ssm_state_size,
            num_groups=config.n_groups,
            conv_width=config.conv_kernel,
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
            act=config.mamba_hidden_act,
            time_step_limit=(config.time_step_min, float("inf")),
            norm_eps=config.layer_norm_epsilon,
        )
    if layer_type == "full_attention":
        return Attention(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
    if layer_type == "moe":
        return SparseMLP(config)
    return MLP(config.hidden_size, config.intermediate_size, act=config.mlp_hidden_act, bias=config.mlp_bias)


class NemotronHBlock(Block):
    """`x + mixer(norm(x))`."""

    def __init__(self, config: NemotronHConfig, layer_type: str) -> None:
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.part = mixer_of(config, layer_type)

    @property
    def mixer(self) -> Mamba2 | Attention | None:
        return self.part if isinstance(self.part, Mamba2 | Attention) else None

    def __call__(
        self, x: jax.Array, cache: rcache.Cache | None, forward: Pass, layer: int
    ) -> tuple[jax.Array, rcache.Cache | None]:
        normed = self.norm(x)
        if self.mixer is None:
            return x + self.part(normed), cache
        mixed, cache = self.mixer(normed, cache, forward, layer)
        return x + mixed, cache


class NemotronH(LanguageModel):
    """Nemotron-H with its language modelling head."""

    Config = NemotronHConfig
    CHECKPOINT_PREFIX = "backbone"
    CHECKPOINT_NAMES = {"embed_tokens": "embeddings", "final_norm": "norm_f", "part": "mixer"}  # noqa: RUF012

    def __init__(self, config: NemotronHConfig) -> None:
        blocks = [NemotronHBlock(config, layer_type) for layer_type in config.layer_types]
        super().__init__(config, blocks, RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon))
