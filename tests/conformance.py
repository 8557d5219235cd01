"""Replays recorded operation sequences and compares every value: `python -m tests.conformance [FILE...]`.

Files are of the format described in `tests/data/conformance/README.md`; without one, those that lie there are run. Any
cache behind the `Implementation` protocol can be run; the JAX side and the NumPy reference are.

Where the recorded cache follows other rules, nothing is passed over in silence:

- A pass over rows of unequal lengths, and a removal that moves shared keys, were refused: skipped, and counted.
- `can_resume` past the end was true for causal caches, and at position 0 false for windowed ones that were empty or had
  let go of position 0. Exactly there the recorded value must be that, and ours the contract's: a deliberate difference.
- A fork shorter than its source kept the source's state until a `remove` on it; a fork here falls back by itself. Until
  then only its `prepare_restore` and `can_resume` are compared.
- A few passes leave a gap between a sequence's last position and the next one. They must be refused without a change.
  The pass is then run without the gap, and that sequence, and forks of it, are not compared until they are emptied or
  overwritten. Partial removals of it are not run.
- A pass made every windowed sequence let go of what lay further back than its memory; here only those that run do, as
  long as there is room. What is kept must be exactly that much more, and `can_resume` must follow from it on each side.
- How slots are shared is not compared for sequences that were rolled back and not run since: here they share the
  checkpoint's slot, there it was copied.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import rcache
from rcache.reference import ReferenceCache

DATA = Path(__file__).parent / "data" / "conformance"
KINDS = {"conv": 0, "recurrent": 1}
SPELLED_OUT = 10  # divergences printed of each file
OK = rcache.Status.OK

States = dict[str, dict[int, list[int]]]  # of a kind, of a layer: flat


@dataclasses.dataclass
class Row:
    """The next tokens of one sequence, and where they claim to go (-1: nowhere in particular)."""

    sequence: int
    tokens: list[int]
    positions: list[int]


@dataclasses.dataclass
class RowResult:
    """What a row read, and the [position, key, value] each of its tokens saw in each attention layer."""

    read: States
    visible: dict[int, list[list[list[int]]]]


@dataclasses.dataclass
class Observed:
    """One sequence: states of nothing if it is empty; checkpoints by ascending position."""

    length: int
    states: States
    checkpoints: list[tuple[int, States]]
    positions: list[int]  # kept by the attention layers
    cells: list[int]  # the page (of one token) of each position: equal numbers, one page


class Implementation(Protocol):
    """What a cache must do to be run."""

    def forward(self, rows: list[Row]) -> tuple[int, list[RowResult]]: ...
    def copy_prefix(self, src: int, dst: int, length: int) -> tuple[int, int]: ...  # length got, status
    def prepare_restore(self, sequence: int, target: int) -> int: ...
    def can_resume(self, sequence: int, position: int) -> bool: ...
    def remove(self, sequence: int, begin: int, end: int | None) -> int: ...
    def lengths(self) -> list[int]: ...
    def observe(self) -> list[Observed]: ...
    def slots(self) -> list[int]: ...  # equal numbers: shared; -1: none
    def free_pages(self) -> int: ...
    def fingerprint(self) -> bytes: ...  # changes whenever anything does


# The stand-in model


def next_state(kind: int, layer: int, state: Any, token: Any, xp: Any) -> Any:
    j = xp.arange(state.size, dtype=np.float32).reshape(state.shape)
    return (3 * state + token + (7 * layer + 100 * kind) + j) % 251


def key_of(layer: int, token: Any, position: Any, shape: tuple[int, int], xp: Any) -> Any:
    """Key `[*shape]`; token and position are scalars or broadcast against it."""
    d = xp.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
    return ((7 * token + 13 * layer + 3 * position + d) % 241).astype(np.float32)


def value_of(layer: int, token: Any, shape: tuple[int, int], xp: Any) -> Any:
    """Value `[*shape]`; token is a scalar or broadcasts against it."""
    d = xp.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
    return ((5 * token + 11 * layer + 3 * d) % 239).astype(np.float32)


def add_offset(keys: Any, offset: Any, layer: int) -> Any:
    """The shift of a removal in the middle."""
    del layer
    return keys + (offset.astype(keys.dtype) if isinstance(offset, jax.Array) else offset)


def as_seen(position: int, key: np.ndarray, value: np.ndarray) -> list[int]:
    return [position, *(int(x.reshape(-1) @ np.arange(1, x.size + 1, dtype=x.dtype)) for x in (key, value))]


def whole(array: np.ndarray) -> list[int]:
    """A flat list; NaN or a fraction, which no state has, is an error."""
    integers = array.astype(np.int64)
    assert (integers == array).all(), array
    return integers.reshape(-1).tolist()


# Implementations


class Reference:
    """`rcache.reference.ReferenceCache`."""

    def __init__(self, config: rcache.Config, num_tokens: int) -> None:
        self.cache = ReferenceCache(config)

    def update(self, layer: int, name: str, state: np.ndarray, token: int) -> np.ndarray:
        return next_state(KINDS[name], layer, state, token, np)

    def key(self, layer: int, token: int, position: int) -> np.ndarray:
        return key_of(layer, token, position, self._shape(layer), np)

    def value(self, layer: int, token: int, position: int) -> np.ndarray:
        return value_of(layer, token, self._shape(layer), np)

    def _shape(self, layer: int) -> tuple[int, int]:
        attention = self.cache.config.layers[layer].attention
        return attention.num_kv_heads, attention.head_dim

    def forward(self, rows: list[Row]) -> tuple[int, list[RowResult]]:
        status, plans = self.cache.forward(
            [row.sequence for row in rows],
            [row.tokens for row in rows],
            self,
            positions=[row.positions for row in rows],
        )
        results = []
        for plan in plans:
            visible = {
                layer: [[as_seen(*seen) for seen in token] for token in tokens]
                for layer, tokens in plan.visible.items()
            }
            results.append(RowResult(self._states(plan.states_read), visible))
        return status, results

    def copy_prefix(self, src: int, dst: int, length: int) -> tuple[int, int]:
        return self.cache.copy_prefix(src, dst, length)

    def prepare_restore(self, sequence: int, target: int) -> int:
        return self.cache.prepare_restore(sequence, target)

    def can_resume(self, sequence: int, position: int) -> bool:
        return self.cache.can_resume(sequence, position)

    def remove(self, sequence: int, begin: int, end: int | None) -> int:
        return self.cache.remove(sequence, begin, end, shift=add_offset)

    def lengths(self) -> list[int]:
        return self.cache.lengths()

    def observe(self) -> list[Observed]:
        observed = []
        for sequence in range(self.cache.config.max_sequences):
            value = self.cache.snapshot(sequence)
            checkpoints = [(c.position, self._states(c.states)) for c in value.checkpoints]
            positions = sorted({position for kept in value.kept.values() for position in kept})
            cells = [id(self.cache.sequences[sequence].pages[0][position]) for position in positions]
            observed.append(Observed(value.length, self._states(value.states), checkpoints, positions, cells))
        return observed

    def slots(self) -> list[int]:
        return self.cache.slots()

    def free_pages(self) -> int:
        return sum(self.cache.free_pages())

    def fingerprint(self) -> bytes:
        cache = self.cache
        values = [cache.snapshot(sequence) for sequence in range(cache.config.max_sequences)]
        return pickle.dumps((values, cache.counters, cache.slots(), cache.free_slots(), cache.free_pages()))

    def _states(self, states: dict[tuple[int, str], np.ndarray]) -> States:
        flat: States = {}
        for (layer, name), state in states.items():
            flat.setdefault(name, {})[layer] = whole(state)
        return flat


class Jax:
    """The package itself: one compiled step for each config, batches padded to all sequences and the longest pass."""

    def __init__(self, config: rcache.Config, num_tokens: int) -> None:
        self.config, self.num_tokens = config, num_tokens
        self.cache = rcache.init(config)

    def forward(self, rows: list[Row]) -> tuple[int, list[RowResult]]:
        shape = (self.config.max_sequences, self.num_tokens)
        sequences, lengths = np.full(shape[0], -1, np.int32), np.zeros(shape[0], np.int32)
        tokens, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        for r, row in enumerate(rows):
            n = len(row.tokens)
            sequences[r], lengths[r], tokens[r, :n], positions[r, :n] = row.sequence, n, row.tokens, row.positions
        batch = rcache.make_batch(sequences, lengths, self.num_tokens, positions=positions)
        self.cache, *results = step(self.cache, batch, tokens)
        status, starts, read, seen = jax.device_get(results)
        return int(status), [
            RowResult(
                self._states({layer: {name: x[r] for name, x in states.items()} for layer, states in read.items()}),
                {layer: _visible(r, int(starts[r]), len(row.tokens), *found) for layer, found in seen.items()},
            )
            for r, row in enumerate(rows)
            if status == OK
        ]

    def copy_prefix(self, src: int, dst: int, length: int) -> tuple[int, int]:
        self.cache, got, status = rcache.copy_prefix(self.cache, src, dst, length)
        return int(got), int(status)

    def prepare_restore(self, sequence: int, target: int) -> int:
        return int(rcache.prepare_restore(self.cache, sequence, target))

    def can_resume(self, sequence: int, position: int) -> bool:
        return bool(rcache.can_resume(self.cache, sequence, position))

    def remove(self, sequence: int, begin: int, end: int | None) -> int:
        self.cache, status = rcache.remove(self.cache, sequence, begin, end, shift=add_offset)
        return int(status)

    def lengths(self) -> list[int]:
        return rcache.lengths(self.cache).tolist()

    def observe(self) -> list[Observed]:
        table, payload = jax.device_get((self.cache.table, self.cache.states))
        records, observed = table.sequences, []
        for sequence in range(self.config.max_sequences):
            length, slot = int(records.length[sequence]), int(records.slot[sequence])
            kept = records.checkpoints.positions[sequence], records.checkpoints.slots[sequence]
            checkpoints = [
                (int(position), self._in_slot(payload, int(its_slot)))
                for position, its_slot in zip(*kept, strict=True)
                if position >= 0
            ]
            positions = list(range(int(records.first[0][sequence]), length))
            cells = table.page_tables[0].pages[sequence, positions].tolist()
            states = {} if slot < 0 else self._in_slot(payload, slot)
            observed.append(Observed(length, states, checkpoints, positions, cells))
        return observed

    def slots(self) -> list[int]:
        return rcache.slots(self.cache).tolist()

    def free_pages(self) -> int:
        return sum(int(pages) for pages in rcache.free_pages(self.cache))

    def fingerprint(self) -> bytes:
        return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(self.cache)))

    def _in_slot(self, payload: dict[str, np.ndarray], slot: int) -> States:
        states: dict[int, dict[str, np.ndarray]] = {}
        for group in self.config.state_groups:
            for index, layer in enumerate(group.layers):
                states.setdefault(layer, {})[group.name] = payload[group.key][index, slot]
        return self._states(states)

    def _states(self, states: dict[int, dict[str, np.ndarray]]) -> States:
        flat: States = {}
        for layer, named in states.items():
            for name, state in named.items():
                flat.setdefault(name, {})[layer] = whole(state)
        return flat


def _visible(
    r: int, start: int, num_tokens: int, keys: np.ndarray, values: np.ndarray, mask: np.ndarray
) -> list[list[list[int]]]:
    """What each token of row `r` sees. Causal attention sees a run of positions that ends with the query."""
    seen = []
    for t in range(num_tokens):
        columns = np.flatnonzero(mask[r, t])
        first = start + t - len(columns) + 1
        seen.append([as_seen(first + i, keys[r, x], values[r, x]) for i, x in enumerate(columns)])
    return seen


@functools.partial(jax.jit, donate_argnums=0)
def step(cache: rcache.Cache, batch: rcache.Batch, tokens: jax.Array) -> tuple:
    """A pass of the stand-in model: cache, status, starts, states read and keys, values and mask seen by layer."""
    cache, forward, status = rcache.start_forward(cache, batch)
    read, seen = {}, {}
    for index, layer in enumerate(cache.config.layers):
        if layer.states:
            states = read[index] = rcache.read_state(cache, forward, index)
            for t in range(tokens.shape[1]):
                states = {
                    name: jax.vmap(functools.partial(_masked_update, KINDS[name], index))(
                        x, tokens[:, t], forward.token_mask[:, t]
                    )
                    for name, x in states.items()
                }
            cache = rcache.update_state(cache, forward, index, states)
        if layer.attention:
            shape = layer.attention.num_kv_heads, layer.attention.head_dim
            token, position = tokens[:, :, None, None], forward.positions[:, :, None, None]
            keys, values = key_of(index, token, position, shape, jnp), value_of(index, token, shape, jnp)
            cache = rcache.put(cache, forward, index, keys, values)
            seen[index] = rcache.get(cache, forward, index)
    return cache, status, forward.starts, read, seen


def _masked_update(kind: int, layer: int, state: jax.Array, token: jax.Array, real: jax.Array) -> jax.Array:
    return jnp.where(real, next_state(kind, layer, state, token.astype(state.dtype), jnp), state)


IMPLEMENTATIONS = {"jax": Jax, "reference": Reference}


# Running


def window_and_memory(recorded: dict[str, Any]) -> tuple[int | None, int | None]:
    """The sliding window, this position included, and how many positions before a pass are kept; None: all."""
    before = recorded["window_before"]
    if before == 0:
        return None, None
    memory = max(recorded["window_memory"], before + (recorded["max_sequences"] > 1))
    return before + 1, memory if memory < recorded["capacity"] else None


def make_config(recorded: dict[str, Any], last_position: int) -> rcache.Config:
    """The cache that a file's `config` describes; `last_position` is the largest in the file."""
    window, memory = window_and_memory(recorded)
    context_length = max(recorded["capacity"], last_position + 1)
    attention = rcache.Attention(
        recorded["num_kv_heads"],
        recorded["head_dim"],
        sliding_window=window,
        chunk_size=recorded["chunk_size"] or None,
        memory=context_length if window and memory is None else memory,
    )
    conv = rcache.State((recorded["conv_channels"], recorded["conv_dim"])) if recorded["conv_layers"] else None
    recurrent = rcache.State((recorded["recurrent_state_size"],)) if recorded["recurrent_layers"] else None
    holders = {
        "conv": (conv, recorded["conv_layers"] or []),
        "recurrent": (recurrent, recorded["recurrent_layers"] or []),
    }
    num_layers = 1 + max(i for indices in (*(h for _, h in holders.values()), recorded["kv_layers"]) for i in indices)
    layers = [
        rcache.Layer(
            {name: state for name, (state, indices) in holders.items() if index in indices},
            attention if index in recorded["kv_layers"] else None,
        )
        for index in range(num_layers)
    ]
    cells = recorded["max_sequences"] * recorded["capacity"]
    if memory is not None:
        cells = recorded["max_sequences"] * memory + recorded["max_batch"]
    return rcache.Config(
        layers,
        max_sequences=recorded["seq_ids"],
        context_length=context_length,
        page_size=1,
        checkpoints=rcache.CheckpointPolicy(
            recorded["checkpoint_count"], recorded["checkpoint_min_position"], max(1, recorded["checkpoint_interval"])
        ),
        num_slots=recorded["max_sequences"] * (1 + recorded["checkpoint_count"]),
        num_pages=cells,
        max_pass_tokens=recorded["max_batch"],
    )


@dataclasses.dataclass
class Report:
    """What became of one file."""

    name: str
    traces: int = 0
    operations: int = 0
    values: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    deliberate: Counter[str] = dataclasses.field(default_factory=Counter)
    divergences: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        compared = f"{self.operations} operations, {self.values} values compared, {len(self.divergences)} divergences"
        lines = [f"{self.name}: {self.traces} traces, {compared}"]
        lines += [f"  skipped: {count} x {reason}" for reason, count in sorted(self.skipped.items())]
        lines += [f"  deliberate difference: {count} x {what}" for what, count in sorted(self.deliberate.items())]
        lines += [f"  DIVERGENCE {divergence}" for divergence in self.divergences[:SPELLED_OUT]]
        if len(self.divergences) > SPELLED_OUT:
            lines.append(f"  ... and {len(self.divergences) - SPELLED_OUT} more")
        return "\n".join(lines)


class TraceRun:
    """One trace on one empty cache."""

    def __init__(self, recorded: dict[str, Any], seed: int, cache: Implementation, num_pages: int, report: Report):
        self.recorded, self.seed, self.cache, self.report = recorded, seed, cache, report
        self.num_pages = num_pages
        self.window, self.memory = window_and_memory(recorded)
        self.first: Counter[int] = Counter()  # lowest position the recorded cache keeps of a sequence
        self.index, self.op = 0, ""
        self.gapped: set[int] = set()  # sequences outside the contract
        self.forked: set[int] = set()  # shorter forks the recorded cache has not cut yet
        self.rolled_back: set[int] = set()  # on a checkpoint's slot, not run since

    def run(self, ops: list[dict[str, Any]]) -> None:
        for self.index, op in enumerate(ops):
            self.op = op["op"]
            self.report.operations += 1
            getattr(self, f"_{self.op}")(op, op["result"])
            self._compare_after(op["after"])

    def compare(self, what: str, expected: Any, got: Any) -> None:
        self.report.values += _count(expected)
        if expected != got:
            where = f"trace {self.seed}, operation {self.index} ({self.op})"
            self.report.divergences.append(f"{where}: {what}: expected {expected}, got {got}")

    def compare_refused(self, what: str, status: int, allowed: set[int], before: bytes) -> None:
        names = sorted(rcache.Status(s).name for s in allowed)
        if status not in allowed:
            self.compare(f"{what}: status", " or ".join(names), rcache.Status(status).name)
        self.compare(f"{what}: cache unchanged", True, self.cache.fingerprint() == before)

    def compare_ok(self, status: int) -> None:
        self.compare("status", "OK", rcache.Status(status).name)

    # Operations

    def _forward(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        if result["error"] == "not_supported":
            self.report.skipped["pass over rows of unequal lengths"] += 1
            return
        rows: dict[int, Row] = {}
        for sequence, token, position in zip(op["sequences"], op["tokens"], op["positions"], strict=True):
            row = rows.setdefault(sequence, Row(sequence, [], []))
            row.tokens.append(token)
            row.positions.append(position)
        for row in rows.values():
            if row.sequence in self.gapped:
                row.positions = [-1] * len(row.tokens)
        before = self.cache.fingerprint()
        if result["error"] == "full":
            status, _ = self.cache.forward(list(rows.values()))
            full = {rcache.Status.SLOTS_FULL, rcache.Status.PAGES_FULL}
            self.compare_refused("full", status, full, before)
            return
        lengths = self.cache.lengths()
        gapped = [
            r for r in rows.values() if r.positions != [-1] * len(r.tokens) and r.positions[0] != lengths[r.sequence]
        ]
        if gapped:
            status, _ = self.cache.forward(list(rows.values()))
            self.compare_refused("gap in positions", status, {rcache.Status.POSITION_MISMATCH}, before)
            self.report.deliberate["pass that leaves a gap in positions: refused, and run without it"] += 1
            for row in gapped:
                row.positions = [-1] * len(row.tokens)
                self.gapped.add(row.sequence)
        status, results = self.cache.forward(list(rows.values()))
        self.compare_ok(status)
        self.rolled_back -= rows.keys()
        if self.memory is not None:
            for sequence, length in enumerate(lengths):
                self.first[sequence] = max(self.first[sequence], length - self.memory)
        if status == OK:
            self._compare_pass(op, result, dict(zip(rows, results, strict=True)))

    def _compare_pass(self, op: dict[str, Any], result: dict[str, Any], rows: dict[int, RowResult]) -> None:
        apart = self._apart()
        for sequence in apart & rows.keys():
            self.report.skipped[f"row of a pass: {self._why(sequence)}"] += 1
        if "seqs" in result:
            self.compare("rows", result["seqs"], list(rows))
        for kind in KINDS:
            for layer, states in result.get(f"{kind}_read", {}).items():
                size = len(states) // len(rows)
                for r, (sequence, row) in enumerate(rows.items()):
                    if sequence not in apart:
                        expected = states[r * size : (r + 1) * size]
                        self.compare(f"{kind} read, layer {layer}, {sequence=}", expected, row.read[kind][int(layer)])
        for layer, tokens in result["visible"].items():
            seen = {sequence: iter(row.visible[int(layer)]) for sequence, row in rows.items()}
            for t, (sequence, expected) in enumerate(zip(op["sequences"], tokens, strict=True)):
                got = next(seen[sequence])
                if sequence not in apart:
                    self.compare(f"seen by token {t}, layer {layer}", expected, got)

    def _copy_prefix(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        src, dst, length = op["src"], op["dst"], op["length"]
        source = self.cache.lengths()[src]
        if src in self._apart():
            status = self.cache.copy_prefix(src, dst, source)[1]
            self._inherit(src, dst)
        else:
            got, status = self.cache.copy_prefix(src, dst, length)
            self._inherit(src, dst)
            if got < length or (length < source and "sequences" in op["after"]):
                self.forked.add(dst)
        self.compare_ok(status)

    def _inherit(self, src: int, dst: int) -> None:
        for kind in (self.gapped, self.forked, self.rolled_back):
            kind.discard(dst)
            if src in kind:
                kind.add(dst)
        self.first[dst] = self.first[src]

    def _prepare_restore(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        if op["seq"] in self.gapped:
            self.report.skipped[f"prepare_restore: {self._why(op['seq'])}"] += 1
            return
        got = self.cache.prepare_restore(op["seq"], op["position"])
        self.compare("resume position, found", [result["resume_position"], result["value"]], [got, got > 0])

    def _can_resume(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        sequence, position = op["seq"], op["position"]
        if sequence in self.gapped:
            self.report.skipped[f"can_resume: {self._why(sequence)}"] += 1
            return
        got = self.cache.can_resume(sequence, position)
        observed, recorded_first = self.cache.observe()[sequence], self.first[sequence]
        causal = self.recorded["kind"] == "causal"
        if causal and not self.window and position > observed.length:
            self.compare("past the end: recorded, contract", [result["value"], got], [True, False])
            self.report.deliberate["can_resume past the end"] += 1
        elif causal and self.window and position == 0 and (observed.length == 0 or recorded_first > 0):
            self.compare("at position 0 of nothing: recorded, contract", [result["value"], got], [False, True])
            self.report.deliberate["can_resume at position 0 of what does not hold position 0"] += 1
        elif causal and self.window and 0 < position <= observed.length:
            expected = [first == 0 or first <= position - self.window + 1 for first in self._firsts(observed, sequence)]
            self.compare("recorded, contract", [result["value"], got], expected)
            self.report.deliberate["can_resume further back, in a sequence left out of a pass"] += (
                len(set(expected)) - 1
            )
        else:
            self.compare("answer", result["value"], got)

    def _remove(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        sequence, begin, end = op["seq"], op["begin"], op["end"]
        everything = begin == 0 and end is None
        if result["error"] == "shared_shift":
            self.report.skipped["removal that moves shared keys"] += 1
            return
        if sequence in self.gapped and not everything:
            self.report.skipped[f"partial removal: {self._why(sequence)}"] += 1
            return
        before, length = self.cache.fingerprint(), self.cache.lengths()[sequence]
        status = self.cache.remove(sequence, begin, end)
        if result["error"] == "not_supported":
            self.compare_refused("not kept", status, {rcache.Status.NOT_RESTORABLE}, before)
            return
        self.compare_ok(status)
        if everything:
            self.first[sequence] = 0
            for kind in (self.gapped, self.forked, self.rolled_back):
                kind.discard(sequence)
        elif end is None and (begin < length or sequence in self.forked):
            self.rolled_back.add(sequence)
        if len(op["after"]["kv_positions"].get(str(sequence), [])) == self.cache.lengths()[sequence]:
            self.forked.discard(sequence)

    # The state after an operation

    def _firsts(self, observed: Observed, sequence: int) -> tuple[int, int]:
        """The lowest position kept: recorded, ours (never a higher one)."""
        recorded = self.first[sequence]
        return recorded, min([recorded, *observed.positions[:1]])

    def _apart(self) -> set[int]:
        return self.gapped | self.forked

    def _why(self, sequence: int) -> str:
        return "sequence with a gap" if sequence in self.gapped else "shorter fork not cut yet"

    def _compare_after(self, after: dict[str, Any]) -> None:
        apart, everything = self._apart(), self.cache.observe()
        for sequence, observed in enumerate(everything):
            if sequence in apart:
                self.report.skipped[f"value of a sequence: {self._why(sequence)}"] += 1
                continue
            where = f"after, sequence {sequence}"
            recorded, ours = (list(range(first, observed.length)) for first in self._firsts(observed, sequence))
            self.compare(
                f"{where}: positions the recorded cache keeps", after["kv_positions"].get(str(sequence), []), recorded
            )
            self.compare(f"{where}: kept positions", ours, observed.positions)
            if recorded != ours:
                self.report.deliberate["value of a sequence left out of a pass: more is kept of it"] += 1
            if "sequences" in after:
                self._compare_states(where, after["sequences"].get(str(sequence)), observed)
        if apart:
            self.report.skipped["what is in use, while a sequence is apart"] += 1
            return
        cells = {cell for observed in everything for cell in observed.cells}
        recorded_cells = {
            cell
            for sequence, observed in enumerate(everything)
            for position, cell in zip(observed.positions, observed.cells, strict=True)
            if position >= self.first[sequence]
        }
        self.compare("after: kv cells used", after["kv_cells_used"], len(recorded_cells))
        self.compare("after: pages in use", len(cells), self.num_pages - self.cache.free_pages())
        if "sharing" in after:
            self._compare_sharing(after)

    def _compare_states(self, where: str, expected: dict[str, Any] | None, observed: Observed) -> None:
        if expected is None:
            self.compare(f"{where}: empty", [0, {}, []], [observed.length, observed.states, observed.checkpoints])
            return
        newest = observed.checkpoints[-1][0] if observed.checkpoints else -1
        self.compare(f"{where}: newest checkpoint", expected["last_checkpoint"], newest)
        self.compare(f"{where}: states", _states_of(expected), observed.states)
        checkpoints = [(c["position"], _states_of(c)) for c in expected["checkpoints"]]
        self.compare(f"{where}: checkpoints", sorted(checkpoints, key=lambda c: c[0]), observed.checkpoints)

    def _compare_sharing(self, after: dict[str, Any]) -> None:
        if self.rolled_back:
            self.report.skipped["free slots, while a sequence is on a checkpoint's slot"] += 1
        groups: dict[int, list[int]] = {}
        for sequence, slot in enumerate(self.cache.slots()):
            if slot >= 0 and sequence not in self.rolled_back:
                groups.setdefault(slot, []).append(sequence)
        expected = [[s for s in group if s not in self.rolled_back] for group in after["sharing"]]
        self.compare("after: sharing", sorted(group for group in expected if group), sorted(groups.values()))
        if not self.rolled_back:
            self.compare("after: free slots", after["free_slots"], self.recorded["max_sequences"] - len(groups))


def _states_of(recorded: dict[str, Any]) -> States:
    return {kind: {int(layer): x for layer, x in recorded[kind].items()} for kind in KINDS if kind in recorded}


def _count(value: Any) -> int:
    """How many scalars, an empty collection being one."""
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_count, value)) or 1 if isinstance(value, list | tuple) else 1


def run_file(path: Path, implementation: str = "jax") -> Report:
    """Replays all traces of one file."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        recorded = json.load(file)
    report = Report(path.name)
    last = max((p for trace in recorded["traces"] for op in trace["ops"] for p in op.get("positions", [])), default=0)
    config = make_config(recorded["config"], last)
    for trace in recorded["traces"]:
        cache = IMPLEMENTATIONS[implementation](config, recorded["config"]["max_batch"])
        report.traces += 1
        TraceRun(recorded["config"], trace["seed"], cache, sum(config.capacity.pages), report).run(trace["ops"])
    return report


def vendored() -> Iterator[Path]:
    """The files of this repository."""
    return iter(sorted(DATA.glob("*.json.gz")))


def main(arguments: list[str] | None = None) -> int:
    """0 if nothing diverges, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all of tests/data/conformance")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="jax")
    options = parser.parse_args(arguments)
    diverged = False
    for path in options.files or vendored():
        report = run_file(path, options.implementation)
        print(report, flush=True)
        diverged |= bool(report.divergences)
    return int(diverged)


if __name__ == "__main__":
    sys.exit(main())
