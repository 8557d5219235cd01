"""What the example models are made of. Parameters are named and laid out as in Hugging Face checkpoints.

Activations are float32, `[B, T, ...]`: rows of a batch, tokens of a row, padded on the right. Whatever padding holds,
it stays finite and reaches no real token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)  # float32 proper, on accelerators too

FEW_ROWS = 32  # of a product with a weight: those of a decode step, not those of a prompt

Activation = Callable[[jax.Array], jax.Array]


def silu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(x)`.

    The division comes last on purpose. XLA computes one once and keeps its result; what ends in a product it computes
    anew wherever it is used, so that a step of the delta rule ran the convolution before it again for each element of
    the state. (The exponential is held where it and its derivative are finite.)
    """
    return x / (1 + jnp.exp(-jnp.maximum(x, -80)))


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def activation(name: str) -> Activation:
    """The elementwise function of this name in Hugging Face configs."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unsupported activation {name!r} (supported: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def parameter(*shape: int) -> nnx.Param:
    """A float32 parameter; its value comes from a checkpoint (models are built abstractly, see `loading`)."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T`: f32[..., in] and f32[out, in] to f32[..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] > FEW_ROWS:
        return einsum("...i,oi->...o", x, weight)
    # On CPU the right operand is put into another order first. With few rows that takes as long as the product, so the
    # weight is the left one; the barrier keeps the compiler from exchanging the two.
    columns = lax.optimization_barrier(einsum("oi,ri->or", weight, rows))
    return columns.T.reshape(*x.shape[:-1], -1)


class Linear(nnx.Module):
    """`x @ weight.T + bias`: f32[..., in] to f32[..., out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        self.weight = parameter(out_features, in_features)
        if bias:
            self.bias = parameter(out_features)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = product(x, self.weight[...])
        return y + self.bias[...] if hasattr(self, "bias") else y


class Embedding(nnx.Module):
    """Tokens to vectors, and back to logits where the model ties the two."""

    def __init__(self, num_embeddings: int, features: int) -> None:
        self.weight = parameter(num_embeddings, features)

    def __call__(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """i32[B, T] to f32[B, T, D]; padding reads the first vector, whatever id it has."""
        return self.weight[...][jnp.where(token_mask, tokens, 0)]

    def attend(self, x: jax.Array) -> jax.Array:
        """f32[..., D] to logits f32[..., V]."""
        return product(x, self.weight[...])


class RMSNorm(nnx.Module):
    """Scales the last axis to a root mean square of one, then by `weight`, or by `1 + weight` if it is zero-centered.

    With `group_size`, each group of the last axis is scaled by itself.
    """

    def __init__(
        self, features: int, *, eps: float, zero_centered: bool = False, group_size: int | None = None
    ) -> None:
        self.weight = parameter(features)
        self.eps = eps
        self.zero_centered = zero_centered
        self.group_size = features if group_size is None else group_size

    def __call__(self, x: jax.Array) -> jax.Array:
        # A last axis that is one group is left as it is: over [..., 1, D] XLA on CPU takes 30 times as long to add up.
        groups = x if x.shape[-1] == self.group_size else x.reshape(*x.shape[:-1], -1, self.group_size)
        mean_square = jnp.mean(jnp.square(groups), axis=-1, keepdims=True)
        normed = (groups * lax.rsqrt(mean_square + self.eps)).reshape(x.shape)
        weight = self.weight[...]
        return normed * (1 + weight if self.zero_centered else weight)


def l2_norm(x: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """Scales the last axis to a length of one."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


class MLP(nnx.Module):
    """`down(act(up(x)))`."""

    def __init__(self, features: int, hidden: int, *, act: str, bias: bool = False) -> None:
        self.up_proj = Linear(features, hidden, bias=bias)
        self.down_proj = Linear(hidden, features, bias=bias)
        self.act = activation(act)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.act(self.up_proj(x)))


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`: SwiGLU where `act` is SiLU."""

    def __init__(self, features: int, hidden: int, *, act: str, bias: bool = False) -> None:
        self.gate_proj = Linear(features, hidden, bias=bias)
        self.up_proj = Linear(features, hidden, bias=bias)
        self.down_proj = Linear(hidden, features, bias=bias)
        self.act = activation(act)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
