"""Mixtures of experts: each token runs through a few of many MLPs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.layers import activation, parameter

_GROUPED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_linear(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`x` f32[M, in], rows of expert 0 first, `group_sizes` i32[E], by `weight` f32[E, out, in]: f32[M, out]."""
    return lax.ragged_dot_general(x, weight, group_sizes, _GROUPED, precision=lax.Precision.HIGHEST)


def mixture(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    num_experts: int,
    run: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The sum over each token's `A` experts of their outputs, times `weights`.

    Args:
      x: f32[B, T, D].
      experts: i32[B, T, A].
      weights: f32[B, T, A].
      num_experts: `E`.
      run: all experts at once, on rows f32[B * T * A, D] that are sorted by expert, with i32[E] of each.

    Returns:
      f32[B, T, D].
    """
    num_active = experts.shape[-1]
    order = jnp.argsort(experts.reshape(-1), stable=True)
    group_sizes = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.int32)
    outputs = run(x.reshape(-1, x.shape[-1])[order // num_active], group_sizes)
    outputs = outputs[jnp.argsort(order)].reshape(*experts.shape, -1)
    return sum(outputs[..., a, :] * weights[..., a, None] for a in range(experts.shape[-1]))


class Experts(nnx.Module):
    """`num_experts` MLPs `down(act(up(x)))`, or `down(act(gate(x)) * up(x))` if they are gated."""

    def __init__(self, num_experts: int, features: int, hidden: int, *, act: str, gated: bool) -> None:
        if gated:
            self.gate_proj = parameter(num_experts, hidden, features)
        self.up_proj = parameter(num_experts, hidden, features)
        self.down_proj = parameter(num_experts, features, hidden)
        self.act = activation(act)

    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """f32[B, T, D], and for each token its experts i32[B, T, A] and their weights, to f32[B, T, D]."""

        def run(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
            hidden = grouped_linear(x, self.up_proj[...], group_sizes)
            if hasattr(self, "gate_proj"):
                hidden = self.act(grouped_linear(x, self.gate_proj[...], group_sizes)) * hidden
            else:
                hidden = self.act(hidden)
            return grouped_linear(hidden, self.down_proj[...], group_sizes)

        return mixture(x, experts, weights, self.up_proj.shape[0], run)


def softmax_top_k(logits: jax.Array, num_active: int, *, normalized: bool) -> tuple[jax.Array, jax.Array]:
    """The likeliest experts i32[B, T, A] and their probabilities, if `normalized` together one: from f32[B, T, E]."""
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), num_active)
    if normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights
