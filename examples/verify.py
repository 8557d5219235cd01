"""Checks models against the logits Hugging Face transformers computed: python examples/verify.py [FOLDER ...]

A folder has a checkpoint and `expected.npz`: `input_ids` i32[B, L], `logits` f32[B, L, V], and `greedy` i32[B, G],
beginnings of `input_ids` with their greedy continuations. Every way through the cache must lead to those logits, and
each recurrent state to that of a fresh prefill.

Logits may be off by 1e-4. Where float32 itself is worse, because a model divides by what nearly cancels out, they may
be off by four times what its own logits in float32 are off from those in float64, or those of the same model with
weights that are off by their last bit: that is then said in the table.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import decoding
import models
import rcache
from models.passes import WholePass

HF_FOLDERS = Path(__file__).resolve().parent.parent / "tests" / "data" / "hf"
TOLERANCE = 1e-4
NUM_GREEDY = 16
NUM_CAPTURES = 3
CHUNK = 8
NUM_NUDGED = 8
EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Outcome:
    """What a check found, and the cache it ended with: row `b` in sequence `first + b`, for each first."""

    error: float  # the largest difference of a logit
    cache: rcache.Cache
    firsts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Result:
    """`error` is the largest difference of a logit, or the number of tokens that differ.

    `states`, by name: the largest difference of a state from that of a fresh prefill, as a part of the largest value.
    """

    check: str
    error: float
    allowed: float
    states: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and all(error <= TOLERANCE for error in self.states.values())


def poisoned(cache: rcache.Cache) -> rcache.Cache:
    """An empty cache with the worst that a former tenant can have left behind: NaN everywhere."""
    states, keys, values = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, jnp.nan), (cache.states, cache.keys, cache.values)
    )
    return cache.replace(states=states, keys=keys, values=values)


class Verifier:
    """One model, and one configuration of a cache for all checks, so that shapes repeat."""

    def __init__(self, folder: Path) -> None:
        model = models.load(folder)
        with np.load(folder / "expected.npz") as expected:
            self.tokens, self.logits, self.greedy = (expected[name] for name in ("input_ids", "logits", "greedy"))
        self.num_rows, self.length = self.tokens.shape
        self.model = decoding.split(model)
        self.config = rcache.Config(
            model.cache_layers(),
            max_sequences=2 * self.num_rows,
            context_length=max(self.length, self.greedy.shape[1]) + CHUNK,
            checkpoints=rcache.CheckpointPolicy(count=24, min_position=2, interval=max(3, self.length // 12)),
        )
        self.rows = np.arange(self.num_rows)
        self.wrong_tokens = (self.tokens + 1) % self.logits.shape[-1]

    def empty_cache(self) -> rcache.Cache:
        return poisoned(rcache.init(self.config))

    def run(
        self,
        cache: rcache.Cache,
        tokens: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        *,
        width: int,
        first: int = 0,
        captures: np.ndarray | None = None,
    ) -> tuple[rcache.Cache, np.ndarray]:
        """Runs `tokens[b, begins[b]:ends[b]]` of each row in sequence `first + b`, in one pass padded to `width`.

        Returns the cache and logits [B, L, V], NaN where nothing was run. What pads a row are real tokens, not zeros.
        There is always room for captures, so that passes with and without are of one shape.
        """
        captures = np.full((self.num_rows, NUM_CAPTURES), -1) if captures is None else captures
        lengths = ends - begins
        index = (begins[:, None] + np.arange(width)) % self.length
        batch = rcache.make_batch(np.where(lengths > 0, self.rows + first, -1), lengths, width, captures=captures)
        window = np.take_along_axis(tokens, index, axis=1)
        cache, logits, status = decoding.run(self.model, cache, window, batch)
        rcache.raise_if_error(status)
        if not np.isfinite(logits).all():
            raise FloatingPointError("logits are not finite, in padding or elsewhere")
        placed = np.full(self.logits.shape, np.nan, np.float32)
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            placed[row, begin:end] = np.asarray(logits)[row, : end - begin]
        return cache, placed

    def run_chunks(
        self,
        cache: rcache.Cache,
        begins: np.ndarray,
        ends: np.ndarray,
        *,
        tokens: np.ndarray | None = None,
        width: int = CHUNK,
        first: int = 0,
        seed: int = 0,
    ) -> tuple[rcache.Cache, np.ndarray]:
        """As `run`, in passes of random length 0 .. `width` for each row."""
        rng = np.random.default_rng(seed)
        merged = np.full(self.logits.shape, np.nan, np.float32)
        while (begins < ends).any():
            steps = rng.integers(0, width + 1, self.num_rows) if width > 1 else np.ones(self.num_rows, int)
            stops = np.minimum(begins + steps, ends)
            chosen = self.tokens if tokens is None else tokens
            cache, logits = self.run(cache, chosen, begins, stops, width=width, first=first)
            merged = np.where(np.isnan(merged), logits, merged)
            begins = stops
        return cache, merged

    def each(self, value: int) -> np.ndarray:
        return np.full(self.num_rows, value)

    def error(self, logits: np.ndarray, begins: np.ndarray | int = 0) -> float:
        """The largest difference from the expected logits, from token `begins` of each row on."""
        wanted = np.arange(self.length) >= np.broadcast_to(begins, self.num_rows)[:, None]
        return float(np.max(np.abs(logits - self.logits)[wanted]))

    @cached_property
    def rounding(self) -> float:
        """How far logits in float32 are off from those in float64, also if every weight is off by its last bit.

        Where outputs nearly cancel, one order of summation says little of another, such as the reference's: the worst
        of several models that float32 cannot tell from this one says more.
        """
        lengths = jnp.full(self.num_rows, self.length, jnp.int32)
        tokens = jnp.asarray(self.tokens, jnp.int32)

        @jax.jit
        def logits(model: decoding.SplitModel) -> jax.Array:
            return model.merge()(tokens, None, WholePass.of(lengths, self.length))[0]

        def nudged(seed: int) -> decoding.SplitModel:
            generator = np.random.default_rng(seed)
            nudge = lambda leaf: leaf * (1 + generator.choice([-1, 0, 1], leaf.shape) * EPSILON).astype(leaf.dtype)  # noqa: E731
            return self.model.replace(weights=jax.tree.map(nudge, self.model.weights))

        singles = [np.asarray(logits(self.model)), *(np.asarray(logits(nudged(seed))) for seed in range(NUM_NUDGED))]
        with jax.enable_x64(True):
            weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), self.model.weights)
            double = np.asarray(logits(self.model.replace(weights=weights)))
        return float(np.max([np.abs(single - double).max() for single in singles]))

    def states(self, cache: rcache.Cache, first: int = 0) -> dict[str, list[np.ndarray]]:
        """The states of all rows, by name: [L, B, ...] for each group of equal layers."""
        slots = np.asarray(rcache.slots(cache))[self.rows + first]
        states: dict[str, list[np.ndarray]] = {}
        for group in self.config.state_groups:
            states.setdefault(group.name, []).append(np.asarray(cache.states[group.key])[:, slots])
        return states

    @cached_property
    def fresh_states(self) -> dict[str, list[np.ndarray]]:
        return self.states(self.whole().cache)

    def state_errors(self, outcome: Outcome) -> dict[str, float]:
        """By name: the largest difference of a state from that of a fresh prefill, as a part of the largest value."""
        errors = dict.fromkeys(self.fresh_states, 0.0)
        for first in outcome.firsts:
            for name, states in self.states(outcome.cache, first).items():
                for state, fresh in zip(states, self.fresh_states[name], strict=True):
                    error = np.max(np.abs(state - fresh)) / np.max(np.abs(fresh))
                    errors[name] = float(np.maximum(errors[name], error))  # unlike max, NaN where one is
        return errors

    def whole(self) -> Outcome:
        begins, ends = self.each(0), self.each(self.length)
        cache, logits = self.run(self.empty_cache(), self.tokens, begins, ends, width=self.length)
        return Outcome(self.error(logits), cache)

    def ragged_chunks(self) -> Outcome:
        cache, logits = self.run_chunks(self.empty_cache(), self.each(0), self.each(self.length))
        return Outcome(self.error(logits), cache)

    def token_by_token(self) -> Outcome:
        cache, logits = self.run_chunks(self.empty_cache(), self.each(0), self.each(self.length), width=1)
        return Outcome(self.error(logits), cache)

    def _fork_all(self, cache: rcache.Cache) -> rcache.Cache:
        for row in self.rows:
            length = rcache.lengths(cache)[row]
            cache, got, status = rcache.copy_prefix(cache, row, row + self.num_rows, length)
            rcache.raise_if_error(status)
            assert got == length, f"a fork at the end, {length}, got {got} tokens"
        return cache

    def fork(self) -> Outcome:
        """Forks go a wrong way and are made anew; then the originals, and after them the forks, go the right way."""
        half = self.each(self.length // 2)
        cache, _ = self.run_chunks(self.empty_cache(), self.each(0), half)
        cache = self._fork_all(cache)
        ends = np.minimum(half + 2 * CHUNK, self.length)
        cache, _ = self.run_chunks(cache, half, ends, tokens=self.wrong_tokens, first=self.num_rows, seed=1)
        cache = self._fork_all(cache)
        cache, original = self.run_chunks(cache, half, self.each(self.length), seed=2)
        cache, fork = self.run_chunks(cache, half, self.each(self.length), first=self.num_rows, seed=3)
        error = float(np.max([self.error(original, half), self.error(fork, half)]))
        return Outcome(error, cache, firsts=(0, self.num_rows))

    def _roll_back_and_run(self, cache: rcache.Cache, target: int) -> tuple[rcache.Cache, float]:
        """Rolls all rows back to a checkpoint at or before `target`, and runs the right tokens from there."""
        resume = np.array([rcache.prepare_restore(cache, row, target) for row in self.rows])
        assert (resume > 0).all() and (resume <= target).all(), f"no checkpoint to roll back to: {resume}"
        for row in self.rows:
            cache, status = rcache.remove(cache, row, resume[row])
            rcache.raise_if_error(status)
        cache, logits = self.run_chunks(cache, resume, self.each(self.length), seed=4)
        return cache, self.error(logits, resume)

    def rollback(self) -> Outcome:
        """The first two thirds are right, then come wrong tokens; twice back to where they were still right."""
        right = self.length * 2 // 3
        early = max(3, self.length // 4)  # a checkpoint of every row, however long the chunks behind it are
        cache, _ = self.run_chunks(self.empty_cache(), self.each(0), self.each(early), seed=5)
        cache, _ = self.run_chunks(cache, self.each(early), self.each(right))
        cache, _ = self.run_chunks(cache, self.each(right), self.each(self.length), tokens=self.wrong_tokens, seed=1)
        cache, first = self._roll_back_and_run(cache, right - 1)
        cache, second = self._roll_back_and_run(cache, self.length // 2)
        return Outcome(float(np.max([first, second])), cache)  # unlike max, NaN where one is

    def captures(self) -> Outcome:
        """As rollback, to states that were asked for inside one long pass; the first is younger than a convolution."""
        offsets = np.array([1, self.length // 2 - 1, self.length // 2])
        cache, _ = self.run(
            self.empty_cache(),
            self.tokens,
            self.each(0),
            self.each(self.length),
            width=self.length,
            captures=np.tile(offsets, (self.num_rows, 1)),
        )
        errors = []
        for offset in offsets[::-1]:
            cache, error = self._roll_back_and_run(cache, int(offset))
            errors.append(error)
        return Outcome(float(np.max(errors)), cache)

    def freed_slots(self) -> Outcome:
        """Other tokens fill every sequence, and all of them are removed, before the right tokens come."""
        cache = self.empty_cache()
        for first in (0, self.num_rows):
            begins, ends = self.each(0), self.each(self.length)
            cache, _ = self.run_chunks(cache, begins, ends, tokens=self.wrong_tokens, first=first)
        for sequence in range(self.config.max_sequences):
            cache, status = rcache.remove(cache, sequence)
            rcache.raise_if_error(status)
        cache = poisoned(cache)
        cache, logits = self.run(cache, self.tokens, self.each(0), self.each(self.length), width=self.length)
        return Outcome(self.error(logits), cache)

    def prompt_length(self) -> int:
        """Tokens of `greedy` that were given: what all rows have in common with the inputs, else all but the last 16.

        Should the first greedy tokens equal the inputs in every row, they are taken as given, and one fewer is checked.
        """
        width = min(self.length, self.greedy.shape[1])
        same = (self.greedy[:, :width] == self.tokens[:, :width]).all(axis=0)
        num_same = int(np.logical_and.accumulate(same).sum())
        return num_same if 0 < num_same < self.greedy.shape[1] else self.greedy.shape[1] - NUM_GREEDY

    def greedy_tokens(self) -> int:
        """How many tokens of the compiled loop differ."""
        prompt_length = self.prompt_length()
        prompts = [row[:prompt_length].tolist() for row in self.greedy]
        cache, logits, status = decoding.prefill(
            self.model, self.empty_cache(), prompts, self.rows.tolist(), buckets=(CHUNK,)
        )
        rcache.raise_if_error(status)
        sequences = jnp.asarray(self.rows, jnp.int32)
        num_new = self.greedy.shape[1] - prompt_length
        _, generated, status = decoding.generate(self.model, cache, sequences, logits, max_new_tokens=num_new)
        rcache.raise_if_error(status)
        return int(np.sum(np.asarray(generated.tokens) != self.greedy[:, prompt_length:]))

    def recompilations(self) -> int:
        """How often something is compiled for later turns, of other lengths than the first."""
        sequences = jnp.asarray(self.rows, jnp.int32)
        num_new = self.greedy.shape[1] - self.prompt_length()  # the shape of the loop, which ends sooner
        cache, counts = self.empty_cache(), []
        for turn in range(3):
            prompts = [self.tokens[row, : 1 + (3 * turn + row) % CHUNK].tolist() for row in self.rows]
            cache, logits, status = decoding.prefill(self.model, cache, prompts, self.rows.tolist(), buckets=(CHUNK,))
            rcache.raise_if_error(status)
            limits = jnp.asarray(1 + (self.rows + turn) % 3, jnp.int32)
            cache, _, status = decoding.generate(
                self.model, cache, sequences, logits, max_new_tokens=num_new, limits=limits
            )
            rcache.raise_if_error(status)
            counts.append(decoding.num_compiled())
        return counts[-1] - counts[0]


CHECKS: dict[str, Callable[[Verifier], Outcome | int]] = {
    "whole prefill": Verifier.whole,
    "ragged chunks": Verifier.ragged_chunks,
    "token by token": Verifier.token_by_token,
    "after a fork": Verifier.fork,
    "after a rollback": Verifier.rollback,
    "after a rollback to a requested capture": Verifier.captures,
    "in freed slots": Verifier.freed_slots,
    "greedy tokens that differ": Verifier.greedy_tokens,
    "recompilations between turns": Verifier.recompilations,
}


def verify(verifier: Verifier, check: str) -> Result:
    """Runs one check."""
    try:
        outcome = CHECKS[check](verifier)
        if not isinstance(outcome, Outcome):
            return Result(check, outcome, allowed=0)
        allowed = TOLERANCE if outcome.error <= TOLERANCE else max(TOLERANCE, 4 * verifier.rounding)
        return Result(check, outcome.error, allowed, verifier.state_errors(outcome))
    except (rcache.CacheError, AssertionError, FloatingPointError) as failure:
        return Result(f"{check}: {failure}", math.nan, TOLERANCE)


def line_of(result: Result) -> str:
    """A row of the table."""
    error = f"{result.error}" if isinstance(result.error, int) else f"{result.error:.1e}"
    states = "  ".join(f"{name} {error:.1e}" for name, error in result.states.items())
    verdict = "yes" if result.ok else "NO"
    if result.ok and result.allowed > TOLERANCE:
        verdict += f" (allowed: {result.allowed:.1e}, four times the rounding of float32)"
    return f"{result.check:<40} {error:>13}  {states:<27}  {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks models over the cache against expected logits.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="default: those in tests/data/hf")
    folders = parser.parse_args(arguments).folders or sorted(path.parent for path in HF_FOLDERS.glob("*/expected.npz"))
    width = max(len(folder.name) for folder in folders)
    print(f"{'folder':<{width}}  {'check':<40} {'max abs error':>13}  {'states, relative':<27}  ok")
    all_ok = True
    for folder in folders:
        try:
            verifier = Verifier(folder)
        except (ValueError, OSError) as error:  # options or weights the models here do not have, or no such file
            print(f"{folder.name:<{width}}  {error}", flush=True)
            all_ok = False
            continue
        for check in CHECKS:
            result = verify(verifier, check)
            print(f"{folder.name:<{width}}  {line_of(result)}", flush=True)
            all_ok &= result.ok
    print("all equal" if all_ok else "NOT equal: an error above what is allowed, or a folder that was not read")
    return 0 if all_ok else 1


if __name__ == "__main__":
    sys.exit(main())
