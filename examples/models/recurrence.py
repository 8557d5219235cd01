"""Recurrences over the tokens of a pass: in parallel over several tokens, in one step for a single one.

Each takes the state before the pass, and `offsets` i32[B, C]: it returns its outputs, and the states after the first
`offsets[b, c]` tokens of each row, read off the parallel form. Nothing behind an offset has a part in its state: the
state after a row's last token is one of them, and what pads the row behind it does not matter. An offset of 0, or a
negative one, stands for the state before the pass.
"""

from __future__ import annotations

from collections.abc import Callable

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
      queries: f32[B, T, Hk, K].
      keys: f32[B, T, Hk, K]. Heads of values that stand together, `G = H / Hk` of them, share one of these.
      values: f32[B, T, H, V].
      log_decay: f32[B, T, H], not positive.
      state: f32[B, H, K, V], `S` before the pass.
      offsets: i32[B, C].
      beta: f32[B, T, H].
      chunk_size: tokens that run in parallel. It has a part in the rounding, not in the result. Log decays are summed
        over a chunk: behind many of -100, say, a weak one has an error of 1e-4, where `step` has none.

    Returns:
      Outputs f32[B, T, H, V], and the states at `offsets` f32[B, C, H, K, V].
    """
    num_tokens, num_key_heads = keys.shape[1:3]
    if num_tokens == 1:
        queries, keys = (jnp.repeat(x, state.shape[1] // num_key_heads, axis=2) for x in (queries, keys))
        first = [None if x is None else x[:, 0] for x in (queries, keys, values, log_decay, beta)]
        output, new = step(state, *first)
        after = jnp.where((offsets > 0)[..., None, None, None], new[:, None], state[:, None])
        return output[:, None], after
    return _chunks(queries, keys, values, log_decay, beta, state, offsets, min(chunk_size, num_tokens))


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

    Inside a chunk that began with state `S`, and with `L[t]` the sum of its log decays up to `t`, what is written is
    `u[t] = beta[t] (v[t] - exp(L[t]) S^T k[t] - sum over j < t of exp(L[t] - L[j]) (k[t] . k[j]) u[j])`: a triangular
    system, solved for `v` and for what reads `S` before `S` is known, `u = values - reads S`. So the state after a
    chunk is a matrix times the one before it, plus another matrix, and both are known for all chunks at once.

    Shapes: N chunks, B rows, heads h of Hk with g of G each, X tokens i and j.
    """
    num_tokens, heads = queries.shape[1], (keys.shape[2], state.shape[1] // keys.shape[2])

    def chunked(x: jax.Array, heads: tuple[int, ...] = heads) -> jax.Array:
        """[B, T, Hk * G, ...] to [N, B, Hk, G, X, ...]. What pads the last chunk is behind all tokens."""
        x = jnp.pad(x, [(0, 0), (0, -num_tokens % chunk_size)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, chunk_size, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))

    queries, keys = chunked(queries, heads[:1]), chunked(keys, heads[:1])  # [N, B, Hk, X, K]
    values = chunked(values)
    state = state.reshape(state.shape[0], *heads, *state.shape[2:])  # [B, Hk, G, K, V]
    order = jnp.arange(chunk_size, dtype=jnp.int32)
    is_past = order[:, None] >= order[None, :]
    # Sums by a product of matrices: those of `cumsum` XLA on CPU computes anew for each element of `between`.
    total = einsum("nbhgj,ij->nbhgi", chunked(log_decay), is_past.astype(log_decay.dtype))
    between = jnp.exp(jnp.where(is_past, total[..., :, None] - total[..., None, :], -jnp.inf))  # [N, B, Hk, G, X, X]
    last = jnp.exp(total[..., -1])[..., None, None]  # [N, B, Hk, G, 1, 1]
    to_end = jnp.exp(total[..., -1:] - total)[..., None]  # [N, B, Hk, G, X, 1]
    if beta is None:
        added = einsum("nbhik,nbhgiv->nbhgkv", keys, to_end * values)
        starts = _states_before(state, added, lambda state, last: last * state, last)
        written = values
    else:
        beta = chunked(beta)[..., None]
        system = beta * (einsum("nbhik,nbhjk->nbhij", keys, keys)[:, :, :, None] * between)  # its diagonal is not read
        sides = jnp.concatenate([beta * values, beta * jnp.exp(total)[..., None] * keys[:, :, :, None]], axis=-1)
        solved = einsum("nbhgij,nbhgjw->nbhgiw", _unit_lower_inverse(system), sides)
        values, reads = jnp.split(solved, [values.shape[-1]], axis=-1)
        moved = einsum("nbhik,nbhgiw->nbhgkw", keys, to_end * solved)
        added, taken = jnp.split(moved, [values.shape[-1]], axis=-1)
        kept = last * jnp.eye(keys.shape[-1], dtype=keys.dtype) - taken  # [N, B, Hk, G, K, K]
        starts = _states_before(state, added, lambda state, kept: einsum("bhgkl,bhglv->bhgkv", kept, state), kept)
        written = values - einsum("nbhgik,nbhgkv->nbhgiv", reads, starts)
    outputs = jnp.exp(total)[..., None] * einsum("nbhik,nbhgkv->nbhgiv", queries, starts)
    scores = einsum("nbhik,nbhjk->nbhij", queries, keys)[:, :, :, None] * between
    outputs += einsum("nbhgij,nbhgjv->nbhgiv", scores, written)
    outputs = jnp.moveaxis(outputs, (0, 4), (1, 2))  # [B, N, X, Hk, G, V]
    outputs = outputs.reshape(outputs.shape[0], -1, heads[0] * heads[1], outputs.shape[-1])[:, :num_tokens]

    # The state at an offset: that at the beginning of its chunk, and what the chunk's tokens before it have written.
    index = jnp.clip(offsets // chunk_size, 0, starts.shape[0] - 1)
    num_before = (jnp.maximum(offsets, 0) - index * chunk_size)[..., None, None]  # [B, C, 1, 1]
    rows = jnp.arange(offsets.shape[0], dtype=jnp.int32)[:, None]
    start, written, keys, total = (x[index, rows] for x in (starts, written, keys, total))  # [B, C, Hk, ...]
    at_end = jnp.maximum(num_before - 1, 0)[..., None]
    total_before = jnp.where(num_before > 0, jnp.take_along_axis(total, at_end, axis=-1)[..., 0], 0)  # [B, C, Hk, G]
    is_before = order < num_before[..., None]
    decay = jnp.exp(jnp.where(is_before, total_before[..., None] - total, -jnp.inf))[..., None]  # [B, C, Hk, G, X, 1]
    # What is behind the offset is not there at all: it may be as large as numbers get.
    written = jnp.where(is_before[..., None], decay * written, 0)
    states = jnp.exp(total_before)[..., None, None] * start + einsum("bchik,bchgiv->bchgkv", keys, written)
    return outputs, states.reshape(*offsets.shape, -1, *states.shape[-2:])


def _states_before(
    state: jax.Array, added: jax.Array, keep: Callable[[jax.Array, jax.Array], jax.Array], kept: jax.Array
) -> jax.Array:
    """The states before each chunk [N, B, ...], of which the first is `state`: `keep(state, kept[n]) + added[n]`."""

    def next_chunk(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kept, added = chunk
        return keep(state, kept) + added, state

    return lax.scan(next_chunk, state, (kept, added))[1]


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
