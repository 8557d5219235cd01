"""RecurrentGemma: real-gated linear recurrent units and attention to a sliding window (`model_type` recurrent_gemma).

Every layer is `x + temporal(norm(x))`, then `x + mlp(norm(x))` (De et al., Griffin, 2024). Norms are zero-centered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

import rcache
from models.attention import Attention
from models.config import ModelConfig
from models.language_model import LanguageModel, ResidualBlock
from models.layers import GatedMLP, Linear, RMSNorm, activation, einsum, parameter
from models.mixers import CausalConv, RecurrentMixer, States
from models.recurrence import linear_recurrence
from models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class RecurrentGemmaConfig(ModelConfig):
    """The options that decide what is computed."""

    vocab_size: int = 256000
    hidden_size: int = 2560
    num_hidden_layers: int = 26
    tie_word_embeddings: bool = True
    num_attention_heads: int = 10
    num_key_value_heads: int = 0  # 0: as many as of queries
    head_dim: int = 0  # 0: an equal part of hidden_size
    attention_bias: bool = False
    attention_window_size: int = 2048
    rope: Rope | None = None
    intermediate_size: int = 7680  # of both halves of the gated MLP together
    hidden_activation: str = "gelu_pytorch_tanh"
    lru_width: int = 0  # 0: hidden_size
    conv1d_width: int = 4
    rms_norm_eps: float = 1e-6
    logits_soft_cap: float = 30.0

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        num_layers = config.setdefault("num_hidden_layers", cls.num_hidden_layers)
        block_types = config.get("block_types") or ["recurrent", "recurrent", "attention"]
        config["layer_types"] = [block_types[index % len(block_types)] for index in range(num_layers)]
        hidden_size = config.setdefault("hidden_size", cls.hidden_size)
        num_heads = config.setdefault("num_attention_heads", cls.num_attention_heads)
        config["num_key_value_heads"] = config.get("num_key_value_heads") or num_heads
        config["lru_width"] = config.get("lru_width") or hidden_size
        config["head_dim"] = config.get("head_dim") or hidden_size // num_heads
        config["attention_window_size"] = config.get("sliding_window") or config.get("attention_window_size")
        if "attention" in config["layer_types"]:
            config["rope"] = Rope.from_hf(config, config["head_dim"], default_fraction=0.5)
        return config

    def unsupported(self) -> dict[str, bool]:
        return {
            "block_types": self.layers_unlike("recurrent", "attention"),
            "num_key_value_heads": self.has("attention") and bool(self.num_attention_heads % self.num_key_value_heads),
            "lru_width": self.has("recurrent") and bool(self.lru_width % self.num_attention_heads),
            "conv1d_width": self.conv1d_width < 1,
        }

    def norm(self) -> RMSNorm:
        """A norm as it is used everywhere."""
        return RMSNorm(self.hidden_size, eps=self.rms_norm_eps, zero_centered=True)


class RGLRU(nnx.Module):
    """The real-gated linear recurrent unit: gates of the input and of the decay are linear in blocks of channels."""

    def __init__(self, width: int, num_blocks: int) -> None:
        block_width = width // num_blocks
        self.input_gate_weight = parameter(num_blocks, block_width, block_width)
        self.input_gate_bias = parameter(num_blocks, block_width)
        self.recurrent_gate_weight = parameter(num_blocks, block_width, block_width)
        self.recurrent_gate_bias = parameter(num_blocks, block_width)
        self.recurrent_param = parameter(width)

    def __call__(
        self, x: jax.Array, positions: jax.Array, state: jax.Array, offsets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """f32[B, T, W] and the state f32[B, W] to f32[B, T, W] and the states at `offsets` f32[B, C, W].

        The first token of a sequence is taken as it is.
        """
        input_gate = self._gate(x, self.input_gate_weight[...], self.input_gate_bias[...])
        recurrent_gate = self._gate(x, self.recurrent_gate_weight[...], self.recurrent_gate_bias[...])
        log_decay = -8.0 * recurrent_gate * jax.nn.softplus(self.recurrent_param[...])
        is_first = positions[..., None] == 0
        scale = jnp.where(is_first, 1.0, jnp.sqrt(-jnp.expm1(2 * log_decay)))
        decay = jnp.where(is_first, 0.0, jnp.exp(log_decay))
        return linear_recurrence(decay, x * input_gate * scale, state, offsets)

    @staticmethod
    def _gate(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        blocks = x.reshape(*x.shape[:2], *bias.shape)
        return jax.nn.sigmoid(einsum("bthi,hio->btho", blocks, weight) + bias).reshape(x.shape)


class RecurrentBlock(RecurrentMixer):
    """`out(lru(conv(linear_x(x))) * act(linear_y(x)))`."""

    def __init__(self, config: RecurrentGemmaConfig) -> None:
        size, width = config.hidden_size, config.lru_width
        self.linear_x = Linear(size, width, bias=True)
        self.linear_y = Linear(size, width, bias=True)
        self.conv_1d = CausalConv(width, config.conv1d_width, bias=True)
        self.rg_lru = RGLRU(width, config.num_attention_heads)
        self.linear_out = Linear(width, size, bias=True)
        self.act = activation(config.hidden_activation)
        self.width = width

    def states(self) -> dict[str, rcache.State]:
        return self.conv_1d.states() | {"lru": rcache.State((self.width,))}

    def mix(self, x: jax.Array, positions: jax.Array, states: States, offsets: jax.Array) -> tuple[jax.Array, States]:
        gate = self.act(self.linear_y(x))
        x, after = self.conv_1d(self.linear_x(x), states, offsets)
        x, after["lru"] = self.rg_lru(x, positions, states["lru"], offsets)
        return self.linear_out(x * gate), after


def block_of(config: RecurrentGemmaConfig, layer_type: str) -> ResidualBlock:
    """A layer of this type: a recurrent block or attention to a sliding window, then a gated MLP."""
    size = config.hidden_size
    if layer_type == "recurrent":
        mixer = RecurrentBlock(config)
    else:
        mixer = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope=config.rope,
            bias=config.attention_bias,
            output_bias=True,
            sliding_window=config.attention_window_size,
        )
    mlp = GatedMLP(size, config.intermediate_size // 2, act=config.hidden_activation, bias=True)
    return ResidualBlock("temporal_block", mixer, mlp, config.norm)


class RecurrentGemma(LanguageModel):
    """RecurrentGemma with its language modelling head."""

    Config = RecurrentGemmaConfig
    CHECKPOINT_NAMES = {  # noqa: RUF012 - declared a ClassVar in the base
        "mixer_norm": "temporal_pre_norm",
        "mlp_norm": "channel_pre_norm",
        "mlp": "mlp_block",
    }

    def __init__(self, config: RecurrentGemmaConfig) -> None:
        blocks = [block_of(config, layer_type) for layer_type in config.layer_types]
        super().__init__(config, blocks, config.norm())

    def embed(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        scale = np.float32(ml_dtypes.bfloat16(self.config.hidden_size**0.5))  # it was trained with the rounded one
        return scale * super().embed(tokens, token_mask)

    def logits(self, hidden: jax.Array) -> jax.Array:
        cap = self.config.logits_soft_cap
        return cap * jnp.tanh(super().logits(hidden) / cap)
