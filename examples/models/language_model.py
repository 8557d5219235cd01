"""What all models have in common: tokens to vectors, through the layers, to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from flax import nnx

import rcache
from models.config import ModelConfig
from models.layers import Embedding, Linear, RMSNorm
from models.passes import Pass


class Block(nnx.Module):
    """A layer: a mixer of tokens, and what stands around it."""

    @property
    def mixer(self) -> nnx.Module | None:
        """What remembers; None: nothing does."""
        raise NotImplementedError

    def __call__(
        self, x: jax.Array, cache: rcache.Cache | None, forward: Pass, layer: int
    ) -> tuple[jax.Array, rcache.Cache | None]:
        """f32[B, T, D] to the same shape, and the cache."""
        raise NotImplementedError


class ResidualBlock(Block):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`.

    Args:
      mixer_name: what the mixer is called in checkpoints, where it has another name for each kind.
      mixer: called as a block is.
      mlp: f32[B, T, D] to the same shape.
      norm: makes the norms before them.
    """

    def __init__(self, mixer_name: str, mixer: nnx.Module, mlp: nnx.Module, norm: Callable[[], RMSNorm]) -> None:
        setattr(self, mixer_name, mixer)
        self.mixer_name = mixer_name
        self.mlp = mlp
        self.mixer_norm = norm()
        self.mlp_norm = norm()

    @property
    def mixer(self) -> nnx.Module:
        return getattr(self, self.mixer_name)

    def __call__(
        self, x: jax.Array, cache: rcache.Cache | None, forward: Pass, layer: int
    ) -> tuple[jax.Array, rcache.Cache | None]:
        mixed, cache = self.mixer(self.mixer_norm(x), cache, forward, layer)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class LanguageModel(nnx.Module):
    """Embeddings, layers and a head.

    `CHECKPOINT_PREFIX` and `CHECKPOINT_NAMES` say where a subclass's parameters are in a checkpoint: the latter, what
    parts of their path are called there.
    """

    Config: ClassVar[type[ModelConfig]]
    CHECKPOINT_PREFIX: ClassVar[str] = "model"
    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {"final_norm": "norm"}

    def __init__(self, config: ModelConfig, blocks: Sequence[Block], final_norm: RMSNorm) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(blocks)
        self.final_norm = final_norm
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def cache_layers(self) -> tuple[rcache.Layer, ...]:
        """What each layer remembers: the layers of an `rcache.Config`."""
        mixers = [block.mixer for block in self.layers]
        return tuple(rcache.Layer() if mixer is None else mixer.cache_layer() for mixer in mixers)

    def embed(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """Tokens i32[B, T] to f32[B, T, D]."""
        return self.embed_tokens(tokens, token_mask)

    def hidden(
        self, tokens: jax.Array, cache: rcache.Cache | None, forward: Pass
    ) -> tuple[jax.Array, rcache.Cache | None]:
        """Runs all but the head: tokens i32[B, T] to f32[B, T, D] and the cache."""
        x = self.embed(tokens, forward.token_mask)
        for index, block in enumerate(self.layers):
            x, cache = block(x, cache, forward, index)
        return self.final_norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head: f32[..., D] to f32[..., V]."""
        return self.embed_tokens.attend(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden)

    def __call__(self, tokens: jax.Array, cache: Any, forward: Pass) -> tuple[jax.Array, Any]:
        """Tokens i32[B, T] of the pass `forward` to logits f32[B, T, V] and the cache."""
        hidden, cache = self.hidden(tokens, cache, forward)
        return self.logits(hidden), cache

    @classmethod
    def checkpoint_name(cls, path: str) -> str:
        """Name of a parameter in a Hugging Face checkpoint, given its path in this module."""
        parts = [cls.CHECKPOINT_NAMES.get(part, part) for part in path.split(".")]
        return ".".join(parts if parts[0] == "lm_head" else [cls.CHECKPOINT_PREFIX, *parts])
