"""Mixtures of experts: each token runs through a few of many MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.layers import activation, einsum, parameter, product

_GROUPED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def mixture(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    inner: tuple[jax.Array, ...],
    act: Callable[..., jax.Array],
    outer: jax.Array,
) -> jax.Array:
    """The sum over each token's `A` experts, of `E`, of their outputs times `weights`.

    The output of expert `e` is `outer[e] @ act(...)` of the products `x @ i[e].T`, one for each `i` of `inner`.

    Args:
      x: f32[B, T, D].
      experts: i32[B, T, A].
      weights: f32[B, T, A].
      inner: f32[E, I, D] each.
      act: from f32[..., I] each to f32[..., H].
      outer: f32[E, D, H].

    Returns:
      f32[B, T, D].
    """
    routed = Routed(x, experts, weights, inner, outer)
    return lax.platform_dependent(routed, cpu=partial(all_experts, act), default=partial(chosen_experts, act))


class Routed(NamedTuple):
    """What a mixture is made of, but for the function between its products; shapes as in `mixture`."""

    x: jax.Array
    experts: jax.Array
    weights: jax.Array
    inner: tuple[jax.Array, ...]
    outer: jax.Array


def chosen_experts(act: Callable[..., jax.Array], routed: Routed) -> jax.Array:
    """Each token, once for each of its experts, in the order of the experts: those of one stand together."""
    x, experts, weights, inner, outer = routed
    num_experts, num_active = outer.shape[0], experts.shape[-1]
    order = jnp.argsort(experts.reshape(-1), stable=True)
    group_sizes = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.int32)

    def grouped(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(x, weight, group_sizes, _GROUPED, precision=lax.Precision.HIGHEST)

    rows = x.reshape(-1, x.shape[-1])[order // num_active]
    outputs = grouped(act(*(grouped(rows, weight) for weight in inner)), outer)
    outputs = outputs[jnp.argsort(order)].reshape(*experts.shape, -1)
    return jnp.sum(outputs * weights[..., None], axis=-2)


def all_experts(act: Callable[..., jax.Array], routed: Routed) -> jax.Array:
    """Each token through all experts, the others with a weight of zero.

    On CPU XLA has no grouped product: it multiplies every row by every expert, so each token would run `A` times
    through all of them.
    """
    x, experts, weights, inner, outer = routed
    num_experts = outer.shape[0]
    shares = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=x.dtype) * weights[..., None], axis=-2)  # [B, T, E]

    def all_of(weight: jax.Array) -> jax.Array:
        return product(x, weight.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], num_experts, -1)

    hidden = act(*map(all_of, inner)) * shares[..., None]  # [B, T, E, H]
    return einsum("bteh,edh->btd", hidden, outer)


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
        up, down = self.up_proj[...], self.down_proj[...]
        if not hasattr(self, "gate_proj"):
            return mixture(x, experts, weights, (up,), self.act, down)
        gated = lambda gate, up: self.act(gate) * up  # noqa: E731
        return mixture(x, experts, weights, (self.gate_proj[...], up), gated, down)


def softmax_top_k(logits: jax.Array, num_active: int, *, normalized: bool) -> tuple[jax.Array, jax.Array]:
    """The likeliest experts i32[B, T, A] and their probabilities, if `normalized` together one: from f32[B, T, E]."""
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), num_active)
    if normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights
