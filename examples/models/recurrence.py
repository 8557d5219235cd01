"""Recurrences over the tokens of a pass: in parallel over several tokens, in one step for a single one.

Each takes the state before the pass, and `offsets` i32[B, C]: it returns its outputs, and the states after the first
`offsets[b, c]` tokens of each row, read off the parallel form. Nothing behind an offset has a part in its state: the
state after a row's last token is one of them, and what pads the row behind it does not matter. An offset of 0, or a
negative one, stands for the state before the pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from models.layers import einsum


def pick(history: jax.Array, index: jax.Array) -> jax.Array:
    """Of each row of `history` [B, X, ...] what is at `index` i32[B, ...], at the first where it is negative."""
    return jax.vmap(lambda row, index: row[index])(history, jnp.maximum(index, 0))


def linear_recurrence(
    decay: jax.Array, inputs: jax.Array, state: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`h[t] = decay[t] * h[t - 1] + inputs[t]`, element by element.

    Args:
      decay: f32[B, T, W].
      inputs: f32[B, T, W].
      state: f32[B, W], `h` before the pass.
      offsets: i32[B, C].

    Returns:
      `h` f32[B, T, W], and the states at `offsets` f32[B, C, W].
    """

    def combine(earlier: tuple, later: tuple) -> tuple:
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    decays, sums = lax.associative_scan(combine, (decay, inputs), axis=1)
    outputs = decays * state[:, None] + sums
    return outputs, pick(jnp.concatenate([state[:, None], outputs], axis=1), offsets)


def linear_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    offsets: jax.Array,
    *,
    beta: jax.Array | None = None,
    chunk_size: int = 32,
) -> tuple[jax.Array, jax.Array]:
    """Attention without softmax, over a state `S` of outer products that decays from token to token.

    `S[t] = a[t] S[t - 1] + k[t] u[t]^T` and `o[t] = S[t]^T q[t]`, with `a = exp(log_decay)`. Without `beta`, what is
    written is the value, `u = v`: the state space dual of Mamba-2 (Dao and Gu, 2024). With it, it is the gated delta
    rule (Yang et al., 2024): `u[t] = beta[t] (v[t] - a[t] S[t - 1]^T k[t])` corrects what the state has at that key.

    Args:
      queries: f32[B, T, H, K].
      keys: f32[B, T, H, K].
      values: f32[B, T, H, V].
      log_decay: f32[B, T, H], not positive.
      state: f32[B, H, K, V], `S` before the pass.
      offsets: i32[B, C].
      beta: f32[B, T, H].
      chunk_size: tokens that run in parallel. It has a part in the rounding, not in the result.

    Returns:
      Outputs f32[B, T, H, V], and the states at `offsets` f32[B, C, H, K, V].
    """
    if queries.shape[1] == 1:
        first = [None if x is None else x[:, 0] for x in (queries, keys, values, log_decay, beta)]
        output, new = step(state, *first)
        after = jnp.where((offsets > 0)[..., None, None, None], new[:, None], state[:, None])
        return output[:, None], after
    return _chunks(queries, keys, values, log_decay, beta, state, offsets, min(chunk_size, queries.shape[1]))


def step(
    state: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None = None,
    *,
    in_kernel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """One token of `linear_attention`: from the state f32[..., H, K, V] to the output f32[..., H, V] and the new state.

    What key and query read is read off the old state, in one product of matrices: the state is read once for both, and
    once more where it is written. `in_kernel`: in sums, since a kernel holds the state in registers anyway, and on GPUs
    has no products of so few rows.
    """
    decay = jnp.exp(log_decay)[..., None]  # [..., H, 1]
    vectors = [query] if beta is None else [query, key]
    if in_kernel:
        reads = [jnp.sum(vector[..., None] * state, axis=-2) for vector in vectors]
    else:
        product = einsum("...rk,...kv->...rv", jnp.stack(vectors, axis=-2), state)
        reads = [product[..., r, :] for r in range(len(vectors))]
    written = value if beta is None else beta[..., None] * (value - decay * reads[1])
    output = decay * reads[0] + jnp.sum(key * query, axis=-1, keepdims=True) * written
    return output, decay[..., None] * state + key[..., None] * written[..., None, :]


def _chunks(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
    offsets: jax.Array,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Chunks of `X` tokens: what their tokens do to each other in parallel, then the states from chunk to chunk.

    Inside a chunk that began with state `S`, and with `G[t]` the sum of its log decays up to `t`, what is written is
    `u[t] = beta[t] (v[t] - exp(G[t]) S^T k[t] - sum over j < t of exp(G[t] - G[j]) (k[t] . k[j]) u[j])`: a triangular
    system, solved for `v` and for what is read from `S` before `S` is known.
    """
    num_tokens = queries.shape[1]

    def chunked(x: jax.Array) -> jax.Array:
        """[B, T, H, ...] to [N, B, H, X, ...]. What pads the last chunk is behind all tokens."""
        x = jnp.pad(x, [(0, 0), (0, -num_tokens % chunk_size)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    queries, keys, values = chunked(queries), chunked(keys), chunked(values)
    order = jnp.arange(chunk_size, dtype=jnp.int32)
    is_past = order[:, None] >= order[None, :]
    # Sums by a product of matrices: those of `cumsum` XLA on CPU computes anew for each element of `between`.
    total = einsum("nbhj,ij->nbhi", chunked(log_decay), is_past.astype(log_decay.dtype))  # [N, B, H, X]
    between = jnp.exp(jnp.where(is_past, total[..., :, None] - total[..., None, :], -jnp.inf))  # [N, B, H, X, X]
    reads = None
    if beta is not None:
        beta = chunked(beta)[..., None]
        scaled = beta * keys
        system = einsum("nbhik,nbhjk->nbhij", scaled, keys) * between  # below the diagonal, which counts as one
        sides = jnp.concatenate([beta * values, scaled * jnp.exp(total)[..., None]], axis=-1)
        solved = einsum("nbhij,nbhjw->nbhiw", _unit_lower_inverse(system), sides)
        values, reads = jnp.split(solved, [values.shape[-1]], axis=-1)

    def run_chunk(state: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple]:
        values, reads, keys, total = chunk
        written = values if reads is None else values - einsum("bhik,bhkv->bhiv", reads, state)
        keys = jnp.exp(total[..., -1:] - total)[..., None] * keys
        return _carried(total[..., -1], state) + einsum("bhik,bhiv->bhkv", keys, written), (state, written)

    _, (starts, written) = lax.scan(run_chunk, state, (values, reads, keys, total))
    outputs = jnp.exp(total)[..., None] * einsum("nbhik,nbhkv->nbhiv", queries, starts)
    outputs += einsum("nbhij,nbhjv->nbhiv", einsum("nbhik,nbhjk->nbhij", queries, keys) * between, written)
    outputs = jnp.moveaxis(outputs, (0, 2), (1, 3))  # [B, N, X, H, V]
    outputs = outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :num_tokens]

    # The state at an offset: that at the beginning of its chunk, and what the chunk's tokens before it have written.
    index = jnp.clip(offsets // chunk_size, 0, starts.shape[0] - 1)
    num_before = jnp.maximum(offsets, 0) - index * chunk_size
    rows = jnp.arange(offsets.shape[0], dtype=jnp.int32)[:, None]
    start, written, keys, total = (x[index, rows] for x in (starts, written, keys, total))  # [B, C, H, ...]
    last = jnp.maximum(num_before - 1, 0)[..., None, None]
    total_before = jnp.where(num_before[..., None] > 0, jnp.take_along_axis(total, last, axis=-1)[..., 0], 0)
    is_before = order < num_before[..., None, None]
    decay = jnp.exp(jnp.where(is_before, total_before[..., None] - total, -jnp.inf))  # [B, C, H, X]
    return outputs, _carried(total_before, start) + einsum("bchik,bchiv->bchkv", decay[..., None] * keys, written)


def _unit_lower_inverse(matrix: jax.Array) -> jax.Array:
    """Inverse of triangular matrices [..., X, X]: what is below the diagonal is read, and the diagonal counts as one.

    The inverses of two blocks on the diagonal, and what is between them, give the inverse of both together: products
    of matrices, from blocks of 8 to the whole. Unlike the powers of the matrix, whose sum it is as well, no part of it
    outgrows the result: with keys that repeat, such powers become huge, and cancel. Those of a block of 8 do not yet,
    and products of smaller blocks take longer.

    (A triangular solve would do. On CPUs it is a library call that waits for threads, and with two of them the
    backward pass of a few in parallel never ended: jax 0.10.2.)
    """
    *batch, size, _ = matrix.shape
    full_size = max(8, 1 << (size - 1).bit_length())
    matrix = jnp.pad(matrix.reshape(-1, size, size), ((0, 0), *[(0, full_size - size)] * 2))
    eights = matrix.reshape(-1, full_size // 8, 8, full_size // 8, 8)
    power = -jnp.tril(jnp.moveaxis(jnp.diagonal(eights, axis1=1, axis2=3), -1, 1).reshape(-1, 8, 8), -1)
    identity = jnp.eye(8, dtype=matrix.dtype)
    inverses = identity + power  # of the blocks on the diagonal: powers up to the first, the third and the seventh
    for _ in range(2):
        power = einsum("nij,njk->nik", power, power)
        inverses = einsum("nij,njk->nik", inverses, identity + power)
    inverses = inverses.reshape(-1, full_size // 8, 8, 8)
    while inverses.shape[1] > 1:
        num_pairs, block = inverses.shape[1] // 2, inverses.shape[-1]
        first, last = inverses[:, 0::2], inverses[:, 1::2]
        blocks = matrix.reshape(-1, num_pairs, 2, block, num_pairs, 2, block)
        between = jnp.moveaxis(jnp.diagonal(blocks[:, :, 1, :, :, 0], axis1=1, axis2=3), -1, 1)
        corner = -einsum("npij,npjk->npik", last, einsum("npij,npjk->npik", between, first))
        inverses = jnp.block([[first, jnp.zeros_like(corner)], [corner, last]])
    return inverses[:, 0, :size, :size].reshape(*batch, size, size)


def _carried(log_decay: jax.Array, state: jax.Array) -> jax.Array:
    return jnp.exp(log_decay)[..., None, None] * state
