"""How the key of a token changes when the token moves to another position.

A shift is called as `shift(keys, offset, layer)`: keys `[..., D]` in the KV dtype, offset i32[] (negative: towards the
beginning), layer the static layer index; it returns keys of the same shape and dtype. It must be hashable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

Shift = Callable[[jax.Array, jax.Array, int], jax.Array]


def no_shift(keys: jax.Array, offset: jax.Array, layer: int) -> jax.Array:
    """For layers without positional encoding of keys: they stay as they are."""
    del offset, layer
    return keys


@dataclasses.dataclass(frozen=True)
class RopeShift:
    """For rotary position embeddings: turns keys by the angle of the offset.

    A rotation by position p followed by one by d is the rotation by p + d, so a key need not be computed anew (Su et
    al., RoFormer, 2021, https://arxiv.org/abs/2104.09864). Rounding grows by one rotation for each removal.

    Args:
      theta: base of the frequencies `theta ** (-2 i / rotary_dim)`.
      rotary_dim: leading elements that are rotated (partial RoPE); None: all.
      interleaved: pairs are (0, 1), (2, 3), ...; otherwise (0, n/2), (1, n/2 + 1), ... of the rotary part.
      scaling: frequencies are divided by it (linear position scaling).
      inverse_frequencies: the `rotary_dim / 2` frequencies in radians a token, instead of theta and scaling.
    """

    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: float = 1.0
    inverse_frequencies: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.theta <= 0 or self.scaling <= 0:
            raise ValueError(f"RopeShift.theta and scaling must be > 0, got {self.theta} and {self.scaling}")
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(f"RopeShift.rotary_dim must be even and >= 2, got {self.rotary_dim}")
        if self.inverse_frequencies is not None:
            object.__setattr__(self, "inverse_frequencies", tuple(float(f) for f in self.inverse_frequencies))

    def __call__(self, keys: jax.Array, offset: jax.Array, layer: int) -> jax.Array:
        """`keys` [..., D] as if each stood `offset` i32[] positions further on."""
        del layer
        size = self._rotary_dim(keys.shape[-1])
        if self.inverse_frequencies is not None:
            frequencies = jnp.array(self.inverse_frequencies, jnp.float32)
        else:
            exponent = jnp.arange(0, size, 2, dtype=jnp.float32) / jnp.float32(size)
            frequencies = jnp.float32(self.theta) ** -exponent / jnp.float32(self.scaling)
        angle = offset.astype(jnp.float32) * frequencies
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        turned, rest = keys[..., :size].astype(jnp.float32), keys[..., size:]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(turned.shape)
        else:
            a, b = jnp.split(turned, 2, axis=-1)
            turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return jnp.concatenate([turned.astype(keys.dtype), rest], axis=-1)

    def _rotary_dim(self, head_dim: int) -> int:
        given = None if self.inverse_frequencies is None else 2 * len(self.inverse_frequencies)
        size = self.rotary_dim or given or head_dim
        if size > head_dim or size % 2 or given not in (None, size):
            raise ValueError(f"{self} does not fit keys of head_dim {head_dim}")
        return size
