"""The contract in NumPy, dictionaries and lists: what the JAX side is tested against. It shares no code with it.

Written to be read, not to be fast. Nothing is counted: a slot or a page is in use while a sequence or a checkpoint
refers to it, which is found by walking all of them. Nothing is undone: an operation works on a copy of the bookkeeping
and the copy takes its place, or is dropped.

Readings of the rules where their text leaves a choice:

- An operation looks at ids first, then at ranges, then at what was kept, then at room.
- A row of length 0 is still a row of its id (a bad or a second id is refused); nothing else of it is checked.
- Sequences that a pass leaves out let go of what lies further back than their memory only when pages are short, before
  any checkpoint gives way: otherwise a pass would change what other sequences can be rolled back to.
- `first` is a position, not the beginning of a page: page size shows in nothing but capacity.
- Whether a capture is due or extra is judged before its victim goes.
- In a round of captures, who else holds a victim's slot is judged at the beginning of the round, like the free slots.
- A cut without recurrent states keeps the sequence's approximate flag; with them the flag is the checkpoint's.
- Restoring a checkpoint leaves the sequence nothing before the checkpoint's window in groups with memory.
- A middle removal releases before it takes, and checkpoints at or after `begin` do not make a page shared: those that
  move refer to the sequence's own pages afterwards.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence as Listing
from typing import Any, Protocol

import numpy as np

from rcache.config import Config
from rcache.status import Status

StateKey = tuple[int, str]  # layer, name
KeyValue = tuple[np.ndarray, np.ndarray]  # [H, D], [H, Dv]
Shift = Callable[[np.ndarray, int, int], np.ndarray]  # keys [..., D], offset, layer


class Model(Protocol):
    """What a layer computes from a token; a token is anything the caller likes. Arrays are returned, not changed."""

    def update(self, layer: int, name: str, state: np.ndarray, token: Any) -> np.ndarray:
        """The state after one more token."""

    def key(self, layer: int, token: Any, position: int) -> np.ndarray:
        """The token's key [H, D]."""

    def value(self, layer: int, token: Any, position: int) -> np.ndarray:
        """The token's value [H, Dv]."""


@dataclasses.dataclass(eq=False)
class Slot:
    """One version of all recurrent states of a sequence. Its identity is what capacity counts."""

    states: dict[StateKey, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Page:
    """Keys and values of up to `page_size` positions. Its identity is what capacity counts."""

    tokens: dict[tuple[int, int], KeyValue] = dataclasses.field(default_factory=dict)  # of (position, layer)


@dataclasses.dataclass(frozen=True)
class Group:
    """The attention layers that see and keep the same positions; see `Attention`."""

    layers: tuple[int, ...]
    window: int | None
    chunk: int | None
    memory: int | None
    span: int | None  # tokens before itself a query may see


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A past state. `pages[group]` is the window before it, for groups with memory."""

    position: int
    slot: Slot
    extra: bool
    approximate: bool
    pages: dict[int, dict[int, Page]]


@dataclasses.dataclass
class Sequence:
    """One sequence. `pages[group]` maps position // page_size to a page; `first[group]` is the lowest kept position."""

    pages: list[dict[int, Page]]
    first: list[int]
    length: int = 0
    slot: Slot | None = None
    approximate: bool = False
    checkpoints: list[Checkpoint] = dataclasses.field(default_factory=list)  # by ascending position

    def copy(self) -> Sequence:
        """The same slots and pages in another sequence."""
        pages = [dict(group) for group in self.pages]
        return dataclasses.replace(self, pages=pages, first=list(self.first), checkpoints=list(self.checkpoints))


@dataclasses.dataclass(frozen=True)
class Row:
    """An active row of a batch."""

    sequence: int
    start: int
    tokens: list[Any]
    captures: list[int]  # -1: none
    blocks: list[int]  # tokens of equal id >= 0 see each other

    @property
    def end(self) -> int:
        """Tokens the sequence holds after the pass."""
        return self.start + len(self.tokens)


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """What an active row read, saw and kept: `visible[layer][token]` lists (position, key, value), ascending."""

    sequence: int
    start: int
    states_read: dict[StateKey, np.ndarray]
    visible: dict[int, list[list[tuple[int, np.ndarray, np.ndarray]]]]
    captures: list[int]  # positions of the checkpoints taken, those that went again in the same pass included


@dataclasses.dataclass(frozen=True)
class CheckpointSnapshot:
    """The value of a checkpoint."""

    position: int
    extra: bool
    approximate: bool
    states: dict[StateKey, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The value of a sequence: everything about it that an operation can ever show. No states: it is empty."""

    length: int
    approximate: bool
    states: dict[StateKey, np.ndarray]
    checkpoints: list[CheckpointSnapshot]
    kept: dict[int, dict[int, KeyValue]]  # of an attention layer, of a position


@dataclasses.dataclass(frozen=True)
class ReferenceCounters:
    """What happened to checkpoints since the beginning or the last `reset`."""

    captures: int = 0
    captures_skipped: int = 0
    evictions: int = 0


class ReferenceCache:
    """A cache of `config` that changes in place; operations are named like the public ones and return their answers."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.groups = _groups(config)
        self.sequences = [self._empty() for _ in range(config.max_sequences)]
        self.counters = ReferenceCounters()

    # Forward passes

    def forward(
        self,
        sequences: Listing[int],
        tokens: Listing[Listing[Any]],
        model: Model,
        *,
        lengths: Listing[int] | None = None,
        positions: Listing[Listing[int]] | None = None,
        captures: Listing[Listing[int]] | None = None,
        bidirectional: Listing[Listing[int]] | None = None,
        context: int | None = None,
    ) -> tuple[Status, list[RowPlan]]:
        """Appends `tokens[row]` (the first `lengths[row]` of them) to `sequences[row]`.

        The longest row of `tokens` is the batch's `T`; `positions` and `bidirectional` may be shorter than a row's
        tokens and are -1 from there on. Answers a status and a plan for each active row, none unless OK.
        """
        batch = list(range(len(sequences)))
        lengths = [len(tokens[r]) for r in batch] if lengths is None else lengths
        positions = [[] for _ in batch] if positions is None else positions
        captures = [[] for _ in batch] if captures is None else captures
        blocks = [[] for _ in batch] if bidirectional is None else bidirectional
        status = self._check_batch(sequences, max(map(len, tokens), default=0), lengths, positions, captures, context)
        if status is not Status.OK:
            return status, []
        rows = [
            Row(sequences[r], self.sequences[sequences[r]].length, list(tokens[r][: lengths[r]]), list(captures[r]),
                [*blocks[r], *[-1] * lengths[r]][: lengths[r]])
            for r in batch
            if sequences[r] != -1 and lengths[r] > 0
        ]  # fmt: skip
        return self._run(rows, model)

    def run(
        self,
        sequences: Listing[int],
        tokens: Listing[Listing[Any]],
        model: Model,
        *,
        planned: Listing[int],
        num_tokens: int,
        context: int | None = None,
    ) -> tuple[Status, list[RowPlan]]:
        """A run for which `planned[row]` tokens were planned, and `tokens[row]` came."""
        nothing: list[list[int]] = [[] for _ in sequences]
        status = self._check_batch(sequences, num_tokens, planned, nothing, nothing, context)
        if status is not Status.OK:
            return status, []
        active = [r for r in range(len(sequences)) if sequences[r] != -1 and planned[r] > 0]
        rows = [
            Row(sequences[r], self.sequences[sequences[r]].length, [None] * planned[r], [], [-1] * planned[r])
            for r in active
        ]
        return self._run(rows, model, [list(tokens[r]) for r in active])

    def forward_flat(
        self,
        sequences: Listing[int],
        positions: Listing[int],
        tokens: Listing[Any],
        model: Model,
        *,
        num_rows: int,
        num_tokens: int,
    ) -> tuple[Status, list[RowPlan]]:
        """A pass over a flat list of tokens: rows in order of first appearance, -1 for padding."""
        entries: dict[int, list[int]] = {}
        for entry, sequence in enumerate(sequences):
            if sequence != -1:
                entries.setdefault(sequence, []).append(entry)
        if len(entries) > num_rows or any(len(row) > num_tokens for row in entries.values()):
            return Status.BATCH_TOO_LARGE, []
        row_tokens = [[tokens[entry] for entry in row] for row in entries.values()]
        row_positions = [[positions[entry] for entry in row] for row in entries.values()]
        return self.forward(list(entries), row_tokens, model, positions=row_positions)

    def _check_batch(
        self,
        sequences: Listing[int],
        num_tokens: int,
        lengths: Listing[int],
        positions: Listing[Listing[int]],
        captures: Listing[Listing[int]],
        context: int | None,
    ) -> Status:
        named = [r for r, sequence in enumerate(sequences) if sequence != -1]
        if not all(self._exists(sequences[r]) for r in named):
            return Status.SEQUENCE_OUT_OF_RANGE
        if len({sequences[r] for r in named}) < len(named):
            return Status.DUPLICATE_SEQUENCE
        if not all(0 <= lengths[r] <= num_tokens for r in named):
            return Status.LENGTH_OUT_OF_RANGE
        active = [r for r in named if lengths[r] > 0]
        start = {r: self.sequences[sequences[r]].length for r in active}
        for r in active:
            given = enumerate(positions[r][: lengths[r]], start[r])
            if any(position not in (-1, expected) for expected, position in given):
                return Status.POSITION_MISMATCH
        room = self.config.context_length if context is None else min(context, self.config.context_length)
        if any(start[r] + lengths[r] > room for r in active):
            return Status.CONTEXT_OVERFLOW
        for r in active:
            offsets = list(captures[r])
            while offsets and offsets[-1] == -1:
                offsets.pop()
            if offsets != sorted(set(offsets)) or any(not 1 <= offset <= lengths[r] for offset in offsets):
                return Status.CAPTURES_INVALID
        return Status.OK

    def _run(self, rows: list[Row], model: Model, came: list[list[Any]] | None = None) -> tuple[Status, list[RowPlan]]:
        """A pass, or a run: then room is made for `rows`, and `came` are their tokens."""
        before = [sequence.copy() for sequence in self.sequences]
        for row in rows:
            self._slide(before[row.sequence])
        if min(self._free_pages(self._grown(before, rows)), default=0) < 0:
            for sequence in before:
                self._slide(sequence)
        evictions = 0
        while (status := self._room(after := self._grown(before, rows))) is not Status.OK:
            if not _give_way(before):
                return status, []
            evictions += 1
        if came is not None:
            rows = [dataclasses.replace(row, tokens=tokens) for row, tokens in zip(rows, came, strict=True)]
            for row in rows:
                self._shorten(after[row.sequence], row.end)
        taken, skipped = self._capture(after, rows)
        reads = [self._read(row) for row in rows]  # all of them before a slot is written
        self.sequences = after
        visible = []
        for row, read in zip(rows, reads, strict=True):
            self._write_states(row, read, taken, model)
            self._write_keys_and_values(row, model)
            visible.append(self._visible(row))
        counts = self.counters
        self.counters = ReferenceCounters(
            counts.captures + len(taken), counts.captures_skipped + skipped, counts.evictions + evictions
        )
        plans = []
        for row, read, seen in zip(rows, reads, visible, strict=True):
            captures = [row.start + offset - 1 for sequence, offset, _ in taken if sequence == row.sequence]
            plans.append(RowPlan(row.sequence, row.start, read, seen, captures))
        return Status.OK, plans

    def _slide(self, sequence: Sequence) -> None:
        """Lets go of what lies further back than the memory of each group."""
        for g, group in enumerate(self.groups):
            if group.memory is not None:
                first = max(sequence.first[g], sequence.length - group.memory)
                sequence.first[g] = first
                pages = sequence.pages[g]
                sequence.pages[g] = {i: page for i, page in pages.items() if (i + 1) * self.config.page_size > first}

    def _grown(self, sequences: list[Sequence], rows: list[Row]) -> list[Sequence]:
        """Copies with the rows' tokens, and a slot and pages that each row may write: new where others hold the old.

        Row after row, so that of several rows that share something with nobody else the last one keeps it. What is
        taken may be more than there is.
        """
        size = self.config.page_size
        grown = [sequence.copy() for sequence in sequences]
        for row in rows:
            sequence, holders = grown[row.sequence], _holders(grown)
            sequence.length = row.end
            if self.config.has_states and (sequence.slot is None or holders[sequence.slot] > 1):
                sequence.slot = Slot()
            for pages in sequence.pages:
                for i in range(row.start // size, -(-row.end // size)):
                    if i not in pages:
                        pages[i] = Page()
                    elif holders[pages[i]] > 1:
                        pages[i] = Page(dict(pages[i].tokens))
        return grown

    def _shorten(self, sequence: Sequence, length: int) -> None:
        """Lets go of what a sequence took for tokens that did not come."""
        sequence.length = length
        if length == 0:
            sequence.slot = None
        for pages in sequence.pages:
            for i in [i for i in pages if i * self.config.page_size >= length]:
                del pages[i]

    def _capture(self, sequences: list[Sequence], rows: list[Row]) -> tuple[list[tuple[int, int, Slot]], int]:
        """Takes this pass's checkpoints: (sequence, offset, slot) of each, and how many found no slot."""
        taken: list[tuple[int, int, Slot]] = []
        skipped = 0
        if self.config.num_checkpoints == 0:
            return taken, skipped

        def take(row: Row, offset: int, slot: Slot) -> None:
            sequence = sequences[row.sequence]
            extra, victim = self._is_extra(sequence, row.start + offset - 1), self._victim(sequence)
            if victim is not None:
                sequence.checkpoints.remove(victim)
            sequence.checkpoints.append(self._checkpoint(sequence, row.start + offset - 1, slot, extra))
            taken.append((row.sequence, offset, slot))

        for column in range(max((len(row.captures) for row in rows), default=0)):
            holders, free, chosen = _holders(sequences), self._free_slots(sequences), []
            for row in rows:
                offset = row.captures[column] if column < len(row.captures) else -1
                if offset == -1 or offset == len(row.tokens):
                    continue
                victim = self._victim(sequences[row.sequence])
                if victim is None or holders[victim.slot] > 1:
                    if free == 0:
                        skipped += 1
                        continue
                    free -= 1
                chosen.append((row, offset))
            for row, offset in chosen:
                take(row, offset, Slot())
        for row in rows:
            sequence = sequences[row.sequence]
            if row.tokens and (len(row.tokens) in row.captures or self._is_due(sequence)):
                assert sequence.slot is not None
                take(row, len(row.tokens), sequence.slot)
        return taken, skipped

    def _is_due(self, sequence: Sequence) -> bool:
        newest = [checkpoint.position for checkpoint in sequence.checkpoints]
        return self._is_spaced(sequence.length - 1, newest)

    def _is_extra(self, sequence: Sequence, position: int) -> bool:
        return not self._is_spaced(position, [c.position for c in sequence.checkpoints if not c.extra])

    def _is_spaced(self, position: int, others: list[int]) -> bool:
        policy = self.config.checkpoints
        return position >= policy.min_position and (not others or position >= max(others) + policy.interval)

    def _victim(self, sequence: Sequence) -> Checkpoint | None:
        """The checkpoint that makes room for another; None while there is room."""
        if len(sequence.checkpoints) < self.config.num_checkpoints:
            return None
        return min(sequence.checkpoints, key=lambda checkpoint: (not checkpoint.extra, checkpoint.position))

    def _checkpoint(self, sequence: Sequence, position: int, slot: Slot, extra: bool) -> Checkpoint:
        """A checkpoint of `sequence`, holding the pages that resuming there needs."""
        pages: dict[int, dict[int, Page]] = {}
        for g, group in enumerate(self.groups):
            if group.memory is not None:
                assert group.span is not None
                low = max(sequence.first[g], position + 1 - group.span)
                indices = {p // self.config.page_size for p in range(low, position + 1)}
                pages[g] = {i: sequence.pages[g][i] for i in sorted(indices)}
        return Checkpoint(position, slot, extra, sequence.approximate, pages)

    def _read(self, row: Row) -> dict[StateKey, np.ndarray]:
        slot = self.sequences[row.sequence].slot
        if slot is not None:
            return dict(slot.states)
        return {key: np.zeros(state.shape, np.dtype(state.dtype)) for key, state in _states(self.config).items()}

    def _write_states(
        self, row: Row, read: dict[StateKey, np.ndarray], taken: list[tuple[int, int, Slot]], model: Model
    ) -> None:
        slots: dict[int, list[Slot]] = {}  # to be written after so many tokens of this row
        for sequence, offset, slot in taken:
            if sequence == row.sequence:
                slots.setdefault(offset, []).append(slot)
        live = self.sequences[row.sequence].slot
        if live is not None:
            slots.setdefault(len(row.tokens), []).append(live)
        dtypes = {key: np.dtype(state.dtype) for key, state in _states(self.config).items()}
        states = dict(read)
        for offset, token in enumerate([None, *row.tokens]):
            if offset > 0:
                states = {(layer, name): model.update(layer, name, x, token) for (layer, name), x in states.items()}
            for slot in slots.get(offset, []):
                slot.states = {key: np.array(state, dtypes[key]) for key, state in states.items()}

    def _write_keys_and_values(self, row: Row, model: Model) -> None:
        for group, pages in zip(self.groups, self.sequences[row.sequence].pages, strict=True):
            for position, token in enumerate(row.tokens, row.start):
                for layer in group.layers:
                    dtype = np.dtype(_attention(self.config, layer).dtype)
                    key = np.array(model.key(layer, token, position), dtype)
                    value = np.array(model.value(layer, token, position), dtype)
                    pages[position // self.config.page_size].tokens[position, layer] = key, value

    def _visible(self, row: Row) -> dict[int, list[list[tuple[int, np.ndarray, np.ndarray]]]]:
        visible: dict[int, list[list[tuple[int, np.ndarray, np.ndarray]]]] = {}
        for g, group in enumerate(self.groups):
            for layer in group.layers:
                kept = self._kept(self.sequences[row.sequence], g, layer)
                visible[layer] = [
                    [(position, *kept[position]) for position in kept if _sees(group, row, query, position)]
                    for query in range(row.start, row.end)
                ]
        return visible

    def _kept(self, sequence: Sequence, g: int, layer: int) -> dict[int, KeyValue]:
        size = self.config.page_size
        positions = range(sequence.first[g], sequence.length)
        return {p: sequence.pages[g][p // size].tokens[p, layer] for p in positions}

    # Operations on sequences

    def copy_prefix(self, src: int, dst: int, length: int) -> tuple[int, Status]:
        """Makes `dst` the longest resumable prefix of `src` of at most `length` tokens: its length and a status."""
        if not self._exists(src) or not self._exists(dst):
            return 0, Status.SEQUENCE_OUT_OF_RANGE
        if not 0 <= length <= self.sequences[src].length:
            return 0, Status.RANGE_INVALID
        got = self.prepare_restore(src, length)
        self.sequences[dst] = self._prefix(self.sequences[src], got)
        return got, Status.OK

    def reorder(self, sources: Listing[int]) -> Status:
        """Sequence `i` becomes what `sources[i]` was; -1: empty."""
        if not all(source == -1 or self._exists(source) for source in sources):
            return Status.SEQUENCE_OUT_OF_RANGE
        self.sequences = [self._empty() if source == -1 else self.sequences[source].copy() for source in sources]
        return Status.OK

    def prepare_restore(self, sequence: int, target: int) -> int:
        """The longest resumable prefix of at most `target` tokens; 0 if there is none."""
        if not self._exists(sequence):
            return 0
        held = self.sequences[sequence]
        lengths = range(min(target, held.length), 0, -1)
        return next((length for length in lengths if self._resumable(held, length)), 0)

    def can_resume(self, sequence: int, position: int) -> bool:
        """Whether some prefix of 1 .. `position` tokens can be resumed."""
        if not self._exists(sequence):
            return False
        if position == 0:
            return True
        return position <= self.sequences[sequence].length and self.prepare_restore(sequence, position) >= 1

    def remove(self, sequence: int, begin: int = 0, end: int | None = None, *, shift: Shift | None = None) -> Status:
        """Removes `[begin, end)`; what is behind moves down, its keys through `shift` (None: as they are)."""
        if not self._exists(sequence):
            return Status.SEQUENCE_OUT_OF_RANGE
        if begin < 0 or (end is not None and end < begin):
            return Status.RANGE_INVALID
        if end is None or end >= self.sequences[sequence].length:
            return self._cut(sequence, begin)
        if begin == end:
            return Status.OK
        return self._remove_middle(sequence, begin, end, shift)

    def remove_exact(self, sequence: int, begin: int, end: int) -> tuple[int, Status]:
        """Cuts at `begin`; answers how many tokens behind `end` are to be run again (0 if refused), and a status."""
        if not self._exists(sequence):
            return 0, Status.SEQUENCE_OUT_OF_RANGE
        if begin < 0 or end < begin:
            return 0, Status.RANGE_INVALID
        if begin == end:
            return 0, Status.OK
        length = self.sequences[sequence].length
        status = self._cut(sequence, begin)
        return (length - min(end, length) if status is Status.OK else 0), status

    def reset(self) -> None:
        """Empties everything, counters included."""
        self.sequences = [self._empty() for _ in range(self.config.max_sequences)]
        self.counters = ReferenceCounters()

    def _exists(self, sequence: int) -> bool:
        return 0 <= sequence < self.config.max_sequences

    def _empty(self) -> Sequence:
        return Sequence([{} for _ in self.groups], [0 for _ in self.groups])

    def _resumable(self, sequence: Sequence, length: int) -> bool:
        if length in (0, sequence.length):
            return True
        if self.config.has_states:
            return length - 1 in [checkpoint.position for checkpoint in sequence.checkpoints]
        return 0 <= length <= sequence.length and self._holds_window(sequence.first, length)

    def _holds_window(self, first: list[int], length: int) -> bool:
        """Whether all that a query at position `length` may see is kept."""
        return all(f == 0 or f <= length - (g.span or 0) for f, g in zip(first, self.groups, strict=True))

    def _prefix(self, sequence: Sequence, length: int) -> Sequence:
        """The first `length` tokens, a resumable length."""
        if length == 0:
            return self._empty()
        prefix = sequence.copy()
        if length == sequence.length:
            return prefix
        prefix.length = length
        for pages in prefix.pages:
            for i in [i for i in pages if i * self.config.page_size >= length]:
                del pages[i]
        if self.config.has_states:
            prefix.checkpoints = [c for c in sequence.checkpoints if c.position < length]
            restored = prefix.checkpoints[-1]
            assert restored.position == length - 1
            prefix.slot, prefix.approximate = restored.slot, restored.approximate
            for g, pages in restored.pages.items():
                prefix.pages[g] = dict(pages)
                prefix.first[g] = max(0, length - (self.groups[g].span or 0))
        return prefix

    def _cut(self, sequence: int, begin: int) -> Status:
        held = self.sequences[sequence]
        if begin >= held.length:
            return Status.OK
        if not self._resumable(held, begin):
            return Status.NOT_RESTORABLE
        self.sequences[sequence] = self._prefix(held, begin)
        return Status.OK

    def _remove_middle(self, sequence: int, begin: int, end: int, shift: Shift | None) -> Status:
        held, gone = self.sequences[sequence], end - begin
        rest = held.copy()
        rest.length = held.length - gone
        rest.approximate = True
        rest.first = [first if first <= begin else max(begin, first - gone) for first in held.first]
        if not self._holds_window(rest.first, rest.length):
            return Status.NOT_RESTORABLE
        rest.pages = [self._closed_up(held, g, rest.first[g], begin, end, shift) for g in range(len(self.groups))]
        rest.checkpoints = [c for c in held.checkpoints if c.position < begin]
        for checkpoint in held.checkpoints:
            position = checkpoint.position - gone
            if checkpoint.position >= end and self._holds_window(rest.first, position + 1):
                rest.checkpoints.append(self._checkpoint(rest, position, checkpoint.slot, checkpoint.extra))
        sequences = [*self.sequences[:sequence], rest, *self.sequences[sequence + 1 :]]
        status = self._room(sequences)
        if status is Status.OK:
            self.sequences = sequences
        return status

    def _closed_up(
        self, held: Sequence, g: int, first: int, begin: int, end: int, shift: Shift | None
    ) -> dict[int, Page]:
        """The pages of group `g` without `[begin, end)`: those wholly before `begin` as they are, then new ones."""
        size, gone = self.config.page_size, end - begin
        length = held.length - gone
        pages: dict[int, Page] = {}
        for i in range(first // size, -(-length // size)):
            pages[i] = held.pages[g][i] if (i + 1) * size <= begin else Page()
        for layer in self.groups[g].layers:
            for position, (key, value) in self._kept(held, g, layer).items():
                if position >= end:
                    moved = key if shift is None else np.array(shift(key, -gone, layer), key.dtype)
                    pages[(position - gone) // size].tokens[position - gone, layer] = moved, value
                elif position < begin and position >= first:
                    pages[position // size].tokens[position, layer] = key, value
        return pages

    # Room

    def _room(self, sequences: list[Sequence]) -> Status:
        if self._free_slots(sequences) < 0:
            return Status.SLOTS_FULL
        if any(free < 0 for free in self._free_pages(sequences)):
            return Status.PAGES_FULL
        return Status.OK

    def _free_slots(self, sequences: list[Sequence]) -> int:
        return self.config.capacity.slots - sum(isinstance(held, Slot) for held in _holders(sequences))

    def _free_pages(self, sequences: list[Sequence]) -> tuple[int, ...]:
        used = [len({page for s in sequences for page in _pages(s, g)}) for g in range(len(self.groups))]
        return tuple(pages - n for pages, n in zip(self.config.capacity.pages, used, strict=True))

    # Queries

    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [sequence.length for sequence in self.sequences]

    def checkpoint_positions(self) -> list[list[int]]:
        """Position of the last token in each checkpoint, ascending; -1 where there is none."""
        return [self._padded([c.position for c in s.checkpoints], -1) for s in self.sequences]

    def checkpoint_approximate(self) -> list[list[bool]]:
        """Whether a checkpoint's state still contains tokens that were cut out."""
        return [self._padded([c.approximate for c in s.checkpoints], False) for s in self.sequences]

    def approximate(self) -> list[bool]:
        """Whether a sequence's state still contains tokens that were cut out."""
        return [sequence.approximate for sequence in self.sequences]

    def slots(self) -> list[int]:
        """A number for the slot of each sequence, equal where it is shared; -1: none."""
        numbers: dict[Slot, int] = {}
        return [-1 if s.slot is None else numbers.setdefault(s.slot, len(numbers)) for s in self.sequences]

    def free_slots(self) -> int:
        """State slots nobody holds."""
        return self._free_slots(self.sequences)

    def free_pages(self) -> tuple[int, ...]:
        """Pages nobody holds, of each attention group."""
        return self._free_pages(self.sequences)

    def snapshot(self, sequence: int) -> Snapshot:
        """The full observable value of a sequence."""
        held = self.sequences[sequence]
        kept = {layer: self._kept(held, g, layer) for g, group in enumerate(self.groups) for layer in group.layers}
        checkpoints = [
            CheckpointSnapshot(c.position, c.extra, c.approximate, dict(c.slot.states)) for c in held.checkpoints
        ]
        states = {} if held.slot is None else dict(held.slot.states)
        return Snapshot(held.length, held.approximate, states, checkpoints, kept)

    def _padded(self, values: list[Any], filler: Any) -> list[Any]:
        return values + [filler] * (self.config.num_checkpoints - len(values))


def _states(config: Config) -> dict[StateKey, Any]:
    return {(i, name): state for i, layer in enumerate(config.layers) for name, state in layer.states}


def _attention(config: Config, layer: int) -> Any:
    return config.layers[layer].attention


def _groups(config: Config) -> list[Group]:
    members: dict[tuple[int | None, int | None, int | None], list[int]] = {}
    for i, layer in enumerate(config.layers):
        a = layer.attention
        if a is not None:
            members.setdefault((a.sliding_window, a.chunk_size, a.memory), []).append(i)
    groups = []
    for (window, chunk, memory), layers in members.items():
        visible = window if window is not None else chunk
        groups.append(Group(tuple(layers), window, chunk, memory, None if visible is None else visible - 1))
    return groups


def _sees(group: Group, row: Row, query: int, position: int) -> bool:
    if position >= row.start:
        block = row.blocks[query - row.start]
        if block >= 0 and row.blocks[position - row.start] == block:
            return True
    if group.window is not None and position <= query - group.window:
        return False
    if group.chunk is not None and position // group.chunk != query // group.chunk:
        return False
    return position <= query


def _pages(sequence: Sequence, g: int) -> Iterable[Page]:
    """The pages of group `g` that a sequence and its checkpoints hold, once for each time they do."""
    yield from sequence.pages[g].values()
    for checkpoint in sequence.checkpoints:
        yield from checkpoint.pages.get(g, {}).values()


def _holders(sequences: list[Sequence]) -> Counter[Slot | Page]:
    """How often each slot and each page is held."""
    holders: Counter[Slot | Page] = Counter()
    for sequence in sequences:
        live = [] if sequence.slot is None else [sequence.slot]
        holders.update([*live, *(checkpoint.slot for checkpoint in sequence.checkpoints)])
        for g in range(len(sequence.pages)):
            holders.update(_pages(sequence, g))
    return holders


def _give_way(sequences: list[Sequence]) -> bool:
    """The sequence with the most checkpoints, the first of equals, gives up its lowest; False: there is none."""
    most = max(sequences, key=lambda sequence: len(sequence.checkpoints))
    if not most.checkpoints:
        return False
    del most.checkpoints[0]
    return True
