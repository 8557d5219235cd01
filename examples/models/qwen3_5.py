"""Qwen3.5: the layers of Qwen3-Next, with plain projections and MLPs (`model_type` qwen3_5_text).

Of a whole Qwen3.5, which also sees (`model_type` qwen3_5), the language model is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from models.layers import GatedMLP, Linear
from models.mixers import GatedDeltaNet
from models.qwen3_next import QwenConfig, QwenModel, block_of


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(QwenConfig):
    """The options that decide what is computed."""

    vocab_size: int = 248320
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_key_value_heads: int = 4
    intermediate_size: int = 12288

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        if "text_config" in config:
            tied = config.get("tie_word_embeddings", False)
            config = config["text_config"] | {"tie_word_embeddings": tied}
        return super().prepare(config)


class SplitGatedDeltaNet(GatedDeltaNet):
    """With a projection for each of its inputs."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__(config.hidden_size, **config.delta_net_options())
        key_size, value_size = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.in_proj_qkv = Linear(config.hidden_size, 2 * key_size + value_size)
        self.in_proj_z = Linear(config.hidden_size, value_size)
        self.in_proj_b = Linear(config.hidden_size, self.num_value_heads)
        self.in_proj_a = Linear(config.hidden_size, self.num_value_heads)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        gate = self.in_proj_z(x).reshape(*x.shape[:2], self.num_value_heads, self.value_dim)
        return self.in_proj_qkv(x), gate, self.in_proj_b(x), self.in_proj_a(x)


class Qwen3_5(QwenModel):
    """Qwen3.5 with its language modelling head."""

    Config = Qwen3_5Config

    def __init__(self, config: Qwen3_5Config) -> None:
        mlp = lambda: GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act)  # noqa: E731
        blocks = [block_of(config, layer_type, SplitGatedDeltaNet, mlp()) for layer_type in config.layer_types]
        super().__init__(config, blocks, config.norm(config.hidden_size))
