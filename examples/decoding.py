"""Running a model over a cache: passes, prefill in repeated shapes, and decoding as one compiled loop.

The outermost jit is here, so this is where the cache is donated: the one passed in is gone, go on with the one
returned. Statuses are sticky: a pass behind one that was refused is refused for the same reason. However many run
before somebody looks at the status, no token is put behind one that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax import lax

import rcache
from models import LanguageModel


def num_compiled() -> int:
    """How many programs were compiled so far, of all that this module runs models with."""
    return sum(function._cache_size() for function in (run, _run_to_last, _generate))


class SplitModel(struct.PyTreeNode):
    """A model as an argument of compiled functions: the weights are its leaves, the architecture is static."""

    weights: Any  # by name, nested dicts of plain arrays: an nnx.State takes 0.1 ms longer to hand over at each call
    graphdef: Any = struct.field(pytree_node=False)

    def merge(self) -> LanguageModel:
        return nnx.merge(self.graphdef, self.weights)


def split(model: LanguageModel) -> SplitModel:
    """The model as something to hand to `run`, `prefill` and `generate`."""
    graphdef, weights = nnx.split(model)
    return SplitModel(nnx.to_pure_dict(weights), graphdef)


@partial(jax.jit, static_argnames="context", donate_argnames="cache")
def run(
    model: SplitModel, cache: rcache.Cache, tokens: jax.Array, batch: rcache.Batch, *, context: int | None = None
) -> tuple[rcache.Cache, jax.Array, jax.Array]:
    """One pass: tokens i32[B, T] to the cache, logits f32[B, T, V] and a status i32[]."""
    cache, forward, status = rcache.start_forward(cache, batch, context=context)
    logits, cache = model.merge()(tokens, cache, forward)
    return cache, logits, status


@partial(jax.jit, static_argnames="context", donate_argnames="cache")
def _run_to_last(
    model: SplitModel, cache: rcache.Cache, tokens: jax.Array, batch: rcache.Batch, *, context: int | None
) -> tuple[rcache.Cache, jax.Array, jax.Array]:
    """As `run`, with only the logits f32[B, V] of each row's last token."""
    cache, forward, status = rcache.start_forward(cache, batch, context=context)
    merged = model.merge()
    hidden, cache = merged.hidden(tokens, cache, forward)
    last = jnp.maximum(forward.lengths - 1, 0)[:, None, None]
    return cache, merged.logits(jnp.take_along_axis(hidden, last, axis=1)[:, 0]), status


def prefill(
    model: SplitModel,
    cache: rcache.Cache,
    prompts: Sequence[Sequence[int]],
    sequences: Sequence[int],
    *,
    num_rows: int | None = None,
    buckets: Sequence[int] = (16, 64, 256),
    captures: Sequence[Sequence[int]] | None = None,
    num_captures: int | None = None,
    context: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[rcache.Cache, jax.Array, jax.Array]:
    """Appends `prompts[b]` to `sequences[b]`, in as many passes as the longest needs.

    Passes are padded to one of a few shapes, so that they are compiled once: `num_rows` rows (default: as many as there
    are prompts) of one of `buckets` tokens.

    Args:
      model: the model.
      cache: the cache; donated.
      prompts: at least one token each.
      sequences: their sequence ids.
      num_rows: rows of a pass.
      buckets: lengths of a pass, ascending. Longer prompts run in passes of the last one.
      captures: for each prompt, ascending numbers of its tokens after which to keep a checkpoint.
      num_captures: captures that a pass has room for in each row; default: the most that a prompt asks for.
      context: as in `rcache.start_forward`.
      progress: called after each pass with the tokens of all prompts that are through; passes are waited for then.

    Returns:
      The cache, logits f32[num_rows, V] after the last token of each prompt, and a status i32[]. If it is not OK,
      sequences hold what ran before the pass that was refused.
    """
    if not all(map(len, prompts)):
        raise ValueError("a prompt is empty: at least one token must run to have logits")
    num_rows = len(prompts) if num_rows is None else num_rows
    captures = [()] * len(prompts) if captures is None else captures
    num_captures = max(map(len, captures)) if num_captures is None else num_captures
    row_ids = np.full(num_rows, -1, np.int32)
    row_ids[: len(prompts)] = sequences
    logits = None
    status = jnp.int32(rcache.Status.OK)  # as those that passes return: other kinds of arguments compile anew
    start = 0
    while start < max(map(len, prompts)):
        num_tokens = bucket_of(max(map(len, prompts)) - start, buckets)
        tokens = np.zeros((num_rows, num_tokens), np.int32)
        lengths = np.zeros(num_rows, np.int32)
        offsets = np.full((num_rows, num_captures), -1, np.int32)
        for row, (prompt, wanted) in enumerate(zip(prompts, captures, strict=True)):
            chunk = prompt[start : start + num_tokens]
            lengths[row] = len(chunk)
            tokens[row, : len(chunk)] = chunk
            inside = [offset - start for offset in wanted if start < offset <= start + len(chunk)]
            offsets[row, : len(inside)] = inside
        batch = rcache.make_batch(row_ids, lengths, num_tokens, captures=offsets).replace(status=status)
        cache, new, status = _run_to_last(model, cache, tokens, batch, context=context)
        logits = new if logits is None else jnp.where((lengths > 0)[:, None], new, logits)
        start += num_tokens
        if progress is not None:
            jax.block_until_ready(logits)
            progress(sum(min(len(prompt), start) for prompt in prompts))
    return cache, logits, status


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest of `buckets` (ascending) that is not less than `length`; the last one if none is."""
    return next((bucket for bucket in buckets if bucket >= length), buckets[-1])


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
      temperature: logits are divided by it; 0: the likeliest token (greedy).
      top_k: only the `top_k` likeliest tokens; None: all.
      top_p: only the likeliest tokens that together have this probability, at least one.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number that is not negative, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 or None, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


GREEDY = Sampling()
RUN_TOKENS = 32  # planned at once when decoding


def sample(logits: jax.Array, keys: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of each row: logits f32[B, V], keys key[B] and positions i32[B] to i32[B].

    The draw depends on the row's key and the token's position only, not on how the tokens before it were run.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        kth = lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if sampling.top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < sampling.top_p
        least = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    draw = lambda key, position, row: jax.random.categorical(jax.random.fold_in(key, position), row)  # noqa: E731
    return jax.vmap(draw)(keys, positions, logits).astype(jnp.int32)


class Generated(struct.PyTreeNode):
    """What `B` rows were answered: their first `lengths` tokens, a stop token included; 0 behind."""

    tokens: jax.Array  # i32[B, M]
    lengths: jax.Array  # i32[B]


def generate(
    model: SplitModel,
    cache: rcache.Cache,
    sequences: jax.Array,
    logits: jax.Array,
    *,
    max_new_tokens: int,
    limits: jax.Array | None = None,
    stop_tokens: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    keys: jax.Array | None = None,
    context: int | None = None,
) -> tuple[rcache.Cache, Generated, jax.Array]:
    """Continues sequences token by token, in one compiled loop. Rows that have stopped are padding from then on.

    Args:
      model: the model.
      cache: the cache; donated.
      sequences: i32[B] sequence ids, -1 for rows of padding.
      logits: f32[B, V] after the last token of each, as from `prefill`.
      max_new_tokens: `M`, room for the tokens of a row.
      limits: i32[B]: the most new tokens of each row; None: `M`.
      stop_tokens: a row ends with the first of these.
      sampling: how tokens are chosen.
      keys: key[B], one PRNG key a row; not needed for greedy decoding.
      context: as in `rcache.start_forward`.

    Returns:
      The cache, what was generated, and a status i32[]. A sequence holds all its tokens but the last, which was chosen
      and not run. If the status is not OK, the loop ended there.
    """
    if keys is None and sampling.temperature > 0:
        raise ValueError("keys must be given where temperature > 0")
    num_rows = sequences.shape[0]
    stops = np.full(-(-max(1, len(stop_tokens)) // 8) * 8, -1, np.int32)  # one shape for up to 8
    stops[: len(stop_tokens)] = stop_tokens
    return _generate(
        model,
        cache,
        sequences,
        logits,
        jnp.full(num_rows, max_new_tokens, jnp.int32) if limits is None else limits,
        jnp.asarray(stops),
        jax.random.split(jax.random.key(0), num_rows) if keys is None else keys,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        context=context,
    )


@partial(jax.jit, static_argnames=("max_new_tokens", "sampling", "context"), donate_argnames="cache")
def _generate(
    model: SplitModel,
    cache: rcache.Cache,
    sequences: jax.Array,
    logits: jax.Array,
    limits: jax.Array,
    stops: jax.Array,
    keys: jax.Array,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    context: int | None,
) -> tuple[rcache.Cache, Generated, jax.Array]:
    num_rows = sequences.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    limits = jnp.minimum(limits, jnp.int32(max_new_tokens))
    starts = rcache.lengths(cache)[jnp.maximum(sequences, 0)]
    merged = model.merge()

    def choose(generated: Generated, active: jax.Array, logits: jax.Array) -> tuple[Generated, jax.Array]:
        """Appends a token to active rows: bool[B], which are no longer so when they have stopped."""
        token = sample(logits, keys, starts + generated.lengths, sampling)
        column = jnp.where(active, generated.lengths, jnp.int32(max_new_tokens))
        tokens = generated.tokens.at[rows, column].set(token, mode="drop")
        lengths = generated.lengths + active.astype(jnp.int32)
        stopped = jnp.any(token[:, None] == stops[None, :], axis=1) | (lengths >= limits)
        return Generated(tokens, lengths), active & ~stopped

    def goes_on(carry: tuple) -> jax.Array:
        _, _, active, _, status = carry
        return jnp.any(active) & (status == rcache.Status.OK)

    def run(carry: tuple) -> tuple:
        """Up to `num_tokens` i32[] tokens of each row. If there is no room for as many, one token is tried next."""
        cache, generated, active, num_tokens, _ = carry
        wanted = jnp.where(active, jnp.minimum(limits - generated.lengths, num_tokens), 0)
        batch = rcache.make_batch(jnp.where(active, sequences, -1), wanted, run_tokens)
        run, status = rcache.start_run(cache, batch, context=context)
        planned = run.plan.lengths

        def token_goes_on(carry: tuple) -> jax.Array:
            _, _, active, index = carry
            return jnp.any(active & (index < planned))

        def step(carry: tuple) -> tuple:
            run, generated, active, index = carry
            token = generated.tokens[rows, jnp.maximum(generated.lengths - 1, 0)]
            forward = rcache.run_token(run, index, active)
            logits, run = merged(token[:, None], run, forward)
            generated, active = choose(generated, forward.lengths > 0, logits[:, 0])
            return run, generated, active, index + 1

        run, generated, still, _ = lax.while_loop(token_goes_on, step, (run, generated, active, jnp.int32(0)))
        cache = rcache.finish_run(run)
        ok = status == rcache.Status.OK
        is_answer = ok | (num_tokens == 1)
        return (
            cache,
            generated,
            jnp.where(ok, still, active),
            jnp.where(ok, num_tokens, 1),
            jnp.where(is_answer, status, jnp.int32(rcache.Status.OK)),
        )

    run_tokens = min(RUN_TOKENS, max_new_tokens, cache.config.most_pass_tokens)
    nothing = Generated(jnp.zeros((num_rows, max_new_tokens), jnp.int32), jnp.zeros(num_rows, jnp.int32))
    generated, active = choose(nothing, (sequences >= 0) & (limits > 0), logits)
    state = (cache, generated, active, jnp.int32(run_tokens), jnp.int32(rcache.Status.OK))
    cache, generated, _, _, status = lax.while_loop(goes_on, run, state)
    return cache, generated, status
