"""Mixers whose memory is recurrent states: the convolution before them, gated delta nets and Mamba-2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import rcache
from models.layers import Activation, Linear, RMSNorm, activation, l2_norm, parameter, silu
from models.passes import Pass
from models.recurrence import linear_attention, pick

States = dict[str, jax.Array]


class RecurrentMixer(nnx.Module):
    """A mixer that remembers states. A subclass says which they are, and what a pass makes of them."""

    def states(self) -> dict[str, rcache.State]:
        """By name, the states of one sequence."""
        raise NotImplementedError

    def mix(self, x: jax.Array, positions: jax.Array, states: States, offsets: jax.Array) -> tuple[jax.Array, States]:
        """A pass from `states` on.

        Args:
          x: f32[B, T, D].
          positions: i32[B, T].
          states: by name [B, ...], before the pass.
          offsets: i32[B, C].

        Returns:
          f32[B, T, D], and by name the states after the first `offsets[b, c]` tokens of each row: [B, C, ...].
        """
        raise NotImplementedError

    def cache_layer(self) -> rcache.Layer:
        """What it remembers."""
        return rcache.Layer(self.states())

    def __call__(
        self, x: jax.Array, cache: rcache.Cache | None, forward: Pass, layer: int
    ) -> tuple[jax.Array, rcache.Cache | None]:
        """f32[B, T, D] to the same shape, and the cache with the states after the pass and those it was asked for."""
        offsets = jnp.concatenate([forward.lengths[:, None], forward.capture_offsets], axis=1)
        if x.shape[1] == 1:  # a row without this token writes no state: there is nothing to choose from
            offsets = jnp.ones_like(offsets)
        if cache is None or not self.states():
            states = {name: jnp.zeros((x.shape[0], *state.shape), x.dtype) for name, state in self.states().items()}
            return self.mix(x, forward.positions, states, offsets)[0], cache
        states = rcache.read_state(cache, forward, layer)
        x, after = self.mix(x, forward.positions, states, offsets)
        ends = {name: value[:, 0] for name, value in after.items()}
        captured = {name: value[:, 1:] for name, value in after.items()} if offsets.shape[1] > 1 else None
        return x, rcache.update_state(cache, forward, layer, ends, captured=captured)


class CausalConv(nnx.Module):
    """A causal depthwise convolution: `weight` f32[channels, 1, width], the last tap for the newest input.

    Its state is its last `width - 1` inputs. One of width 1 has none.
    """

    def __init__(self, channels: int, width: int, *, bias: bool, act: Activation | None = None) -> None:
        self.weight = parameter(channels, 1, width)
        if bias:
            self.bias = parameter(channels)
        self.act = act

    def states(self) -> dict[str, rcache.State]:
        channels, _, width = self.weight.shape
        return {"conv": rcache.State((width - 1, channels))} if width > 1 else {}

    def __call__(self, x: jax.Array, states: States, offsets: jax.Array) -> tuple[jax.Array, States]:
        """f32[B, T, H] to the same shape, and the state at `offsets` f32[B, C, W - 1, H].

        Rows with fewer than `W - 1` tokens keep some of their old state.
        """
        taps = self.weight[...][:, 0, :]
        width, num_tokens = taps.shape[1], x.shape[1]
        history = jnp.concatenate([states["conv"], x], axis=1) if width > 1 else x  # [B, W - 1 + T, H]
        y = sum(history[:, j : j + num_tokens] * taps[:, j] for j in range(width))
        y = y + self.bias[...] if hasattr(self, "bias") else y
        y = y if self.act is None else self.act(y)
        if width == 1:
            return y, {}
        window = jnp.maximum(offsets, 0)[..., None] + jnp.arange(width - 1, dtype=jnp.int32)  # [B, C, W - 1]
        return y, {"conv": pick(history, window)}


class GatedDeltaNet(RecurrentMixer):
    """Linear attention by the gated delta rule (Yang et al., 2024), behind a convolution of queries, keys and values.

    A subclass projects its input. Heads of values that stand together share a head of queries and keys.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        act: str,
        norm_eps: float,
    ) -> None:
        self.conv1d = CausalConv(
            2 * num_key_heads * key_dim + num_value_heads * value_dim, conv_width, bias=False, act=activation(act)
        )
        self.A_log = parameter(num_value_heads)
        self.dt_bias = parameter(num_value_heads)
        self.norm = RMSNorm(value_dim, eps=norm_eps)
        self.out_proj = Linear(num_value_heads * value_dim, hidden_size)
        self.num_key_heads = num_key_heads
        self.num_value_heads = num_value_heads
        self.key_dim = key_dim
        self.value_dim = value_dim

    def states(self) -> dict[str, rcache.State]:
        delta = rcache.State((self.num_value_heads, self.key_dim, self.value_dim))
        return self.conv1d.states() | {"delta": delta}

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """f32[B, T, D] to queries, keys and values side by side f32[B, T, 2 Hk K + Hv V], the gate of the output
        f32[B, T, Hv, V], and what `beta` and the decay come from, f32[B, T, Hv] each."""
        raise NotImplementedError

    def mix(self, x: jax.Array, positions: jax.Array, states: States, offsets: jax.Array) -> tuple[jax.Array, States]:
        mixed, gate, beta, decay = self.project(x)
        mixed, after = self.conv1d(mixed, states, offsets)
        key_size = self.num_key_heads * self.key_dim
        queries, keys, values = jnp.split(mixed, [key_size, 2 * key_size], axis=-1)
        queries, keys = self._normed(queries), self._normed(keys)
        values = values.reshape(gate.shape)
        log_decay = -jnp.exp(self.A_log[...]) * jax.nn.softplus(decay + self.dt_bias[...])
        y, after["delta"] = linear_attention(
            queries * self.key_dim**-0.5,
            keys,
            values,
            log_decay,
            states["delta"],
            offsets,
            beta=jax.nn.sigmoid(beta),
        )
        y = self.norm(y) * silu(gate)
        return self.out_proj(y.reshape(*y.shape[:2], -1)), after

    def _normed(self, x: jax.Array) -> jax.Array:
        """f32[B, T, Hk K] to f32[B, T, Hk, K]."""
        return l2_norm(x.reshape(*x.shape[:2], self.num_key_heads, self.key_dim))


class Mamba2(RecurrentMixer):
    """The state space model of Mamba-2 (Dao and Gu, 2024), behind a convolution of its inputs `x`, `B` and `C`.

    Heads that stand together, in `num_groups` groups, share `B` and `C`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        conv_width: int,
        conv_bias: bool,
        bias: bool,
        act: str,
        time_step_limit: tuple[float, float],
        norm_eps: float,
    ) -> None:
        inner_size = num_heads * head_dim
        conv_size = inner_size + 2 * num_groups * state_size
        self.in_proj = Linear(hidden_size, inner_size + conv_size + num_heads, bias=bias)
        self.conv1d = CausalConv(conv_size, conv_width, bias=conv_bias, act=activation(act))
        self.A_log = parameter(num_heads)
        self.D = parameter(num_heads)
        self.dt_bias = parameter(num_heads)
        self.norm = RMSNorm(inner_size, eps=norm_eps, group_size=inner_size // num_groups)
        self.out_proj = Linear(inner_size, hidden_size, bias=bias)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.state_size = state_size
        self.num_groups = num_groups
        self.time_step_limit = time_step_limit

    def states(self) -> dict[str, rcache.State]:
        return self.conv1d.states() | {"ssm": rcache.State((self.num_heads, self.state_size, self.head_dim))}

    def mix(self, x: jax.Array, positions: jax.Array, states: States, offsets: jax.Array) -> tuple[jax.Array, States]:
        inner_size, group_size = self.num_heads * self.head_dim, self.num_groups * self.state_size
        gate, mixed, time_step = jnp.split(self.in_proj(x), [inner_size, 2 * inner_size + 2 * group_size], axis=-1)
        mixed, after = self.conv1d(mixed, states, offsets)
        inputs, keys, queries = jnp.split(mixed, [inner_size, inner_size + group_size], axis=-1)
        inputs = inputs.reshape(*x.shape[:2], self.num_heads, self.head_dim)
        time_step = jnp.clip(jax.nn.softplus(time_step + self.dt_bias[...]), *self.time_step_limit)
        y, after["ssm"] = linear_attention(
            self._groups(queries),
            self._groups(keys),
            inputs * time_step[..., None],
            -jnp.exp(self.A_log[...]) * time_step,
            states["ssm"],
            offsets,
        )
        y = (y + self.D[...][:, None] * inputs).reshape(gate.shape)
        return self.out_proj(self.norm(y * silu(gate))), after

    def _groups(self, x: jax.Array) -> jax.Array:
        """f32[B, T, G N] to f32[B, T, G, N]."""
        return x.reshape(*x.shape[:2], self.num_groups, self.state_size)
