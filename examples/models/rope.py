"""Rotary position embeddings (RoPE)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from models.layers import einsum


@dataclass(frozen=True)
class Rope:
    """Turns pairs of components of queries and keys by their position (Su et al., RoFormer, 2021).

    Attributes:
      frequencies: radians a token of each of the `R` pairs.
      scale: what turned components are multiplied by.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        head_dim: int,
        *,
        default_theta: float = 1e4,
        default_fraction: float | None = None,
    ) -> Self:
        """From the options of a `config.json`, old and new.

        Args:
          config: the options.
          head_dim: size of a head.
          default_theta: `rope_theta` where there is none.
          default_fraction: of a head that is turned, where there is no `partial_rotary_factor`: `int(fraction *
            head_dim)` components, one more if that is odd. None: the architecture turns all, whatever the option says.

        Raises:
          ValueError: a `rope_type` that is not here, one whose options are missing, or a fraction that makes no sense.
        """
        options = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = options.get("rope_theta") or config.get("rope_theta") or default_theta
        fraction = 1.0
        if default_fraction is not None:
            fraction = options.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default_fraction
        rope_type = options.get("rope_type") or options.get("type") or "default"
        options.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        rotary_dim = int(fraction * head_dim)
        num_pairs = -(-rotary_dim // 2)
        if not 0 < num_pairs <= head_dim // 2:
            raise ValueError(
                f"unsupported config option: partial_rotary_factor = {fraction}, which is {rotary_dim} of {head_dim}"
            )
        exponents = np.arange(num_pairs, dtype=np.float32) * np.float32(2) / np.float32(rotary_dim)
        frequencies = np.float32(1) / np.float32(theta) ** exponents
        try:
            frequencies, scale = _scaled(rope_type, frequencies, options)
        except (KeyError, TypeError) as error:
            raise ValueError(f"rope_type {rope_type!r} needs other options than {options}") from error
        return cls(tuple(frequencies.astype(np.float32).tolist()), scale)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Turns the leading components of `x` f32[B, T, H, D], those of `positions` i32[B, T].

        Components `i` and `R + i` are a pair; those from `2 R` on stay as they are.
        """
        num_pairs = len(self.frequencies)
        angles = positions.astype(x.dtype)[..., None] * jnp.array(self.frequencies, x.dtype)  # [B, T, R]
        # Once for both components of a pair, by a product of matrices. XLA keeps the result of one, but what is as
        # cheap as a cosine it would compute anew for every head, and everything the positions come from with it.
        both = np.tile(np.eye(num_pairs), 2) * self.scale  # [R, 2 R]
        cos = einsum("btr,rd->btd", jnp.cos(angles), jnp.asarray(both, x.dtype))[:, :, None]
        opposite = both * np.repeat([-1, 1], num_pairs)
        sin = einsum("btr,rd->btd", jnp.sin(angles), jnp.asarray(opposite, x.dtype))[:, :, None]
        first, second, rest = jnp.split(x, [num_pairs, 2 * num_pairs], axis=-1)
        turned = x[..., : 2 * num_pairs] * cos + jnp.concatenate([second, first], axis=-1) * sin
        return jnp.concatenate([turned, rest], axis=-1)


def _scaled(rope_type: str, frequencies: np.ndarray, options: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Frequencies for contexts longer than a model was trained on, and the scale: slow pairs are slowed down further.

    A pair that has turned often within the trained context is left as it is; one that has not even turned once gets
    `1 / factor` of its frequency; between, it is interpolated. Types differ in where, and over what.
    """
    if rope_type == "default":
        return frequencies, 1.0
    if rope_type not in ("linear", "llama3", "yarn"):
        raise ValueError(
            f"unsupported config option: rope_type = {rope_type!r} (supported: 'default', 'linear', 'llama3', 'yarn')"
        )
    factor = options["factor"]
    if rope_type == "linear":
        return frequencies / factor, 1.0
    turns = options["original_max_position_embeddings"] * frequencies.astype(np.float64) / (2 * math.pi)
    if rope_type == "llama3":  # over the number of turns
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (kept + (1 - kept) / factor), 1.0
    return _yarn(frequencies, turns, factor, options)


def _yarn(
    frequencies: np.ndarray, turns: np.ndarray, factor: float, options: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., 2023): over the index of pairs, between those that turn 32 times and once; scores grow."""
    # The logarithm of the turns falls linearly with the index: where it would be that of 32, and that of one.
    step = math.log(turns[0] / turns[1]) if len(turns) > 1 else 1.0
    ends = [math.log(turns[0] / (options.get(name) or turn)) / step for name, turn in _YARN_TURNS.items()]
    if options.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], 2 * len(turns) - 1)
    slowed = np.clip((np.arange(len(turns)) - first) / (last - first or 1e-3), 0, 1)
    scale = options.get("attention_factor")
    if scale is None:
        of_scores, of_all = options.get("mscale"), options.get("mscale_all_dim")
        growth = 0.1 * math.log(max(factor, 1))
        scale = (growth * of_scores + 1) / (growth * of_all + 1) if of_scores and of_all else growth + 1
    return frequencies * (1 - slowed + slowed / factor), scale


_YARN_TURNS = {"beta_fast": 32, "beta_slow": 1}
