"""What a model remembers between forward passes, layer by layer, and how much room there is for it.

Everything here is static and hashable: it never enters a compiled function as data. Every wrong value is a `ValueError`
that names it and says what would work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import dtypes

from rcache.arguments import check_integer

_KV_DTYPES = ("float32", "bfloat16", "float16")


def _dtype_name(dtype: Any, what: str) -> str:
    try:
        name = np.dtype("none" if dtype is None else dtype).name
        canonical = np.dtype(dtypes.canonicalize_dtype(name)).name
        if not jnp.issubdtype(canonical, jnp.number):
            raise TypeError(f"{canonical} is not a number")
    except TypeError as error:
        raise ValueError(f"{what} must be a dtype of numbers such as 'float32', got {dtype!r}") from error
    if canonical != name:
        raise ValueError(f"{what} is {name!r}, which JAX would turn into {canonical!r}; say {canonical!r}")
    return str(name)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclasses.dataclass(frozen=True)
class State:
    """One recurrent state of a layer: `shape` for one sequence, without batch axis, and the `dtype` it is kept in."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple | list):
            raise ValueError(f"State.shape must be a tuple of integers such as (8, 64), got {self.shape!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        for size in self.shape:
            check_integer("every size in State.shape", size, 1)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype, "State.dtype"))

    @property
    def num_bytes(self) -> int:
        """Bytes of this state for one sequence."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Attention:
    """What an attention layer remembers: keys `[num_kv_heads, head_dim]`, values `[num_kv_heads, value_dim]` a token.

    Args:
      num_kv_heads: heads of keys and values.
      head_dim: size of a key.
      value_dim: size of a value; `head_dim` if None.
      sliding_window: a query sees itself and the `sliding_window - 1` tokens before it; None: everything before it.
      chunk_size: a query sees the tokens of its own chunk up to itself (positions `chunk_size * n` and on); None: no
        chunks.
      memory: tokens kept before the first token of a pass, so that a sequence can be rolled back that far. At least
        what a query can see before itself. None: the window for a sliding window, everything otherwise.
      dtype: of keys and values: float32, bfloat16 or float16.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    sliding_window: int | None = None
    chunk_size: int | None = None
    memory: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_integer("Attention.num_kv_heads", self.num_kv_heads, 1)
        check_integer("Attention.head_dim", self.head_dim, 1)
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        check_integer("Attention.value_dim", self.value_dim, 1)
        for name in ("sliding_window", "chunk_size"):
            if getattr(self, name) is not None:
                check_integer(f"Attention.{name}", getattr(self, name), 1, 2**30)
        if self.sliding_window is not None and self.chunk_size is not None:
            raise ValueError(
                f"Attention has sliding_window={self.sliding_window} and chunk_size={self.chunk_size}: give one of them"
            )
        if self.memory is None:
            object.__setattr__(self, "memory", self.sliding_window)
        else:
            if self.span is None:
                raise ValueError(
                    f"Attention.memory={self.memory} without a sliding_window or chunk_size: "
                    "such a layer sees everything and keeps everything; leave memory out"
                )
            check_integer("Attention.memory (of a window or chunk this size)", self.memory, self.span, 2**30)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype, "Attention.dtype"))
        if self.dtype not in _KV_DTYPES:
            raise ValueError(f"Attention.dtype must be one of {', '.join(_KV_DTYPES)}, got {self.dtype!r}")

    @property
    def span(self) -> int | None:
        """How many tokens before itself a query may see; None: all of them."""
        if self.sliding_window is not None:
            return self.sliding_window - 1
        if self.chunk_size is not None:
            return self.chunk_size - 1
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the key and the value of one token."""
        assert self.value_dim is not None
        itemsize = np.dtype(self.dtype).itemsize
        return self.num_kv_heads * (self.head_dim + self.value_dim) * itemsize


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer remembers: named recurrent states, keys and values, both (parallel hybrids), or nothing (MLP)."""

    states: tuple[tuple[str, State], ...] = ()
    attention: Attention | None = None

    def __init__(self, states: Mapping[str, State] | tuple = (), attention: Attention | None = None) -> None:
        if not isinstance(states, Mapping | tuple):
            raise ValueError(f"Layer.states must map names to State, got {states!r}; attention= takes an Attention")
        pairs = tuple(states.items()) if isinstance(states, Mapping) else states
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise ValueError(f"Layer.states must map names to State, got {states!r}")
            if not isinstance(pair[1], State):
                raise ValueError(f"Layer.states[{pair[0]!r}] must be a State, got {pair[1]!r}")
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError(f"Layer.states names a state twice: {[name for name, _ in pairs]}")
        if attention is not None and not isinstance(attention, Attention):
            raise ValueError(f"Layer.attention must be an Attention or None, got {attention!r}")
        object.__setattr__(self, "states", tuple(sorted(pairs)))
        object.__setattr__(self, "attention", attention)


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """Which past states are kept.

    A state is captured at the end of a pass when its position is at least `min_position` and at least `interval` tokens
    past the newest checkpoint. A sequence keeps at most `count`; 0 switches checkpoints off.
    """

    count: int = 24
    min_position: int = 16
    interval: int = 1664

    def __post_init__(self) -> None:
        check_integer("CheckpointPolicy.count", self.count, 0)
        check_integer("CheckpointPolicy.min_position", self.min_position, 0)
        check_integer("CheckpointPolicy.interval", self.interval, 1)


@dataclasses.dataclass(frozen=True)
class StateGroup:
    """The equal states of several layers: one payload array `[L, S, *shape]` under `key`."""

    key: str
    name: str
    state: State
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """The equal attention layers: one array of keys and one of values, `[H, L, P, page_size, D]`, under `key`.

    `page_group` is the index of the page tables they share with other layers of the same window.
    """

    key: str
    attention: Attention
    layers: tuple[int, ...]
    page_group: int


@dataclasses.dataclass(frozen=True)
class PageGroup:
    """The attention layers that see and keep the same positions: one page table for all of them.

    `span`: tokens before itself a query may see (None: all); `memory`: tokens kept before a pass (None: all).
    """

    sliding_window: int | None
    chunk_size: int | None
    memory: int | None
    span: int | None
    bytes_per_page: int
    checkpoint_pages: int


class Capacity(NamedTuple):
    """Room: state slots (`S`), and pages (`P`) of each page group."""

    slots: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of a configuration, by part. `total` is what `init` allocates."""

    states: dict[str, int]
    keys_and_values: dict[str, int]
    table: int

    @property
    def total(self) -> int:
        return sum(self.states.values()) + sum(self.keys_and_values.values()) + self.table

    def __str__(self) -> str:
        parts = {f"states {k}": v for k, v in self.states.items()}
        parts |= {f"keys and values {k}": v for k, v in self.keys_and_values.items()}
        parts |= {"table": self.table, "total": self.total}
        width = max(len(name) for name in parts)
        return "\n".join(f"{name:<{width}}  {size:>16,} bytes" for name, size in parts.items())


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a cache. `capacity` says how many slots and pages it has, `memory()` how many bytes.

    Args:
      layers: one `Layer` for each layer of the model, in order; layers that remember nothing are `Layer()`.
      max_sequences: sequences (`N`); ids are 0 .. max_sequences - 1.
      context_length: the most tokens one sequence may hold.
      page_size: tokens of a page of keys and values.
      checkpoints: which past states are kept.
      num_slots: state slots (`S`), for live states and checkpoints together. None: enough for every sequence to have
        all its checkpoints, unless `byte_budget` says less.
      num_pages: pages (`P`) of each page group, one number for all or a tuple. None: enough for every sequence to be
        `context_length` long (less for groups with a `memory`), unless `byte_budget` says less.
      byte_budget: bytes the whole cache may take. Slots and pages not given explicitly shrink until it fits.
      max_pass_tokens: the most tokens (`T`) of one row of a batch; `context_length` if None. Sizes windowed groups.

    Raises:
      ValueError: naming the value, and what would work.
    """

    layers: tuple[Layer, ...]
    max_sequences: int
    context_length: int
    page_size: int = dataclasses.field(default=16, kw_only=True)
    checkpoints: CheckpointPolicy = dataclasses.field(default=CheckpointPolicy(), kw_only=True)
    num_slots: int | None = dataclasses.field(default=None, kw_only=True)
    num_pages: int | tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    byte_budget: int | None = dataclasses.field(default=None, kw_only=True)
    max_pass_tokens: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple | list):
            raise ValueError(f"Config.layers must be a tuple of Layer, one for each layer, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise ValueError(f"Config.layers[{index}] must be a Layer, got {layer!r}")
        if not any(layer.states or layer.attention for layer in self.layers):
            raise ValueError("Config.layers remembers nothing: give at least one layer states or attention")
        check_integer("Config.max_sequences", self.max_sequences, 1)
        check_integer("Config.context_length", self.context_length, 1, 2**30)
        check_integer("Config.page_size", self.page_size, 1, 2**30)
        if not isinstance(self.checkpoints, CheckpointPolicy):
            raise ValueError(f"Config.checkpoints must be a CheckpointPolicy, got {self.checkpoints!r}")
        if self.max_pass_tokens is not None:
            check_integer("Config.max_pass_tokens", self.max_pass_tokens, 1, 2**30)
        if self.num_slots is not None:
            check_integer("Config.num_slots", self.num_slots, 1)
        if self.byte_budget is not None:
            check_integer("Config.byte_budget", self.byte_budget, 1, None)
        _ = self.capacity  # which may not fit the byte budget

    @cached_property
    def capacity(self) -> Capacity:
        """Slots and pages: those asked for, or ample ones, shrunk to the byte budget."""
        ample_slots = self.max_sequences * (1 + self.num_checkpoints) if self.has_states else 0
        slots = self.num_slots if self.num_slots is not None and self.has_states else ample_slots
        pages = tuple(self._ample_pages(group) for group in self.page_groups)
        if self.num_pages is not None:
            given = self.num_pages if isinstance(self.num_pages, tuple) else (self.num_pages,) * len(pages)
            if len(given) != len(pages):
                raise ValueError(f"Config.num_pages has {len(given)} entries, but the layers form {len(pages)} groups")
            for number in given:
                check_integer("Config.num_pages", number, 1)
            pages = given
        capacity = Capacity(slots, pages)
        return capacity if self.byte_budget is None else self._fit_budget(capacity)

    def _ample_pages(self, group: PageGroup) -> int:
        everything = self.max_sequences * self.pages_per_sequence
        if group.memory is None:
            return everything
        live = _ceil_div(group.memory + self.most_pass_tokens, self.page_size) + 1
        kept = live + self.num_checkpoints * group.checkpoint_pages
        most = self.pages_per_sequence + self.num_checkpoints  # a checkpoint's last page may have been copied
        return self.max_sequences * min(most, kept)

    def _fit_budget(self, ample: Capacity) -> Capacity:
        """The largest slots and pages within the byte budget, those not given shrunk in the same proportion."""
        budget = self.byte_budget
        assert budget is not None
        slots = ample.slots if self.num_slots is not None else min(ample.slots, self.max_sequences)
        pages = ample.pages
        if self.num_pages is None:
            pages = tuple(min(number, self.pages_per_sequence) for number in pages)
        least = Capacity(slots, pages)

        def at(share: float) -> Capacity:
            shrink = lambda low, high: low + int((high - low) * share)  # noqa: E731
            return Capacity(shrink(least.slots, ample.slots), tuple(map(shrink, least.pages, ample.pages)))

        def fits(share: float) -> bool:
            return self._memory(at(share)).total <= budget

        if not fits(0.0):
            raise ValueError(
                f"Config.byte_budget={self.byte_budget} is too small: {self._memory(least).total} bytes are needed for "
                f"{least.slots} slots and {sum(least.pages)} pages"
            )
        low, high = (1.0, 1.0) if fits(1.0) else (0.0, 1.0)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return at(low)

    def __getstate__(self) -> dict[str, Any]:
        # Without what is derived: hashes of strings differ from process to process.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __hash__(self) -> int:
        # Every call of a compiled operation hashes its config, and that walks all layers.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    # What follows is derived; `cached_property` keeps it out of equality and hashing.

    @cached_property
    def has_states(self) -> bool:
        return any(layer.states for layer in self.layers)

    @cached_property
    def most_pass_tokens(self) -> int:
        """The most tokens of one row of a batch."""
        return self.context_length if self.max_pass_tokens is None else self.max_pass_tokens

    @cached_property
    def num_checkpoints(self) -> int:
        """Checkpoints a sequence may have (`K`): none where no layer has a state to keep."""
        return self.checkpoints.count if self.has_states else 0

    @cached_property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence (`M`)."""
        return _ceil_div(self.context_length, self.page_size)

    @cached_property
    def state_groups(self) -> tuple[StateGroup, ...]:
        layers_of: dict[tuple[str, State], list[int]] = {}
        for index, layer in enumerate(self.layers):
            for name, state in layer.states:
                layers_of.setdefault((name, state), []).append(index)
        groups: dict[str, StateGroup] = {}
        for (name, state), layers in layers_of.items():
            key, suffix = name, 1
            while key in groups:
                key, suffix = f"{name}_{suffix}", suffix + 1
            groups[key] = StateGroup(key, name, state, tuple(layers))
        return tuple(groups.values())

    @cached_property
    def page_groups(self) -> tuple[PageGroup, ...]:
        members: dict[tuple[int | None, int | None, int | None], list[Attention]] = {}
        for layer in self.layers:
            if layer.attention is not None:
                a = layer.attention
                members.setdefault((a.sliding_window, a.chunk_size, a.memory), []).append(a)
        groups = []
        for (window, chunk, memory), attentions in members.items():
            span = attentions[0].span
            checkpoint_pages = 0
            if memory is not None and span:
                checkpoint_pages = min(self.pages_per_sequence, _ceil_div(span, self.page_size) + 1)
            bytes_per_page = self.page_size * sum(a.num_bytes for a in attentions)
            groups.append(PageGroup(window, chunk, memory, span, bytes_per_page, checkpoint_pages))
        return tuple(groups)

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        windows = [(g.sliding_window, g.chunk_size, g.memory) for g in self.page_groups]
        layers_of: dict[Attention, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.attention is not None:
                layers_of.setdefault(layer.attention, []).append(index)
        return tuple(
            KVGroup(f"kv_{i}", a, tuple(layers), windows.index((a.sliding_window, a.chunk_size, a.memory)))
            for i, (a, layers) in enumerate(layers_of.items())
        )

    def memory(self) -> MemoryReport:
        """Bytes this cache takes, computed without allocating anything."""
        return self._memory(self.capacity)

    def _memory(self, capacity: Capacity) -> MemoryReport:
        num_slots, num_pages = capacity
        states = {g.key: len(g.layers) * num_slots * g.state.num_bytes for g in self.state_groups}
        kv = {
            g.key: len(g.layers) * num_pages[g.page_group] * self.page_size * g.attention.num_bytes
            for g in self.kv_groups
        }
        n, k, m = self.max_sequences, self.num_checkpoints, self.pages_per_sequence
        table = 3 * n + (2 * num_slots + 1) + 3 * n * k + 3
        for group, pages in zip(self.page_groups, num_pages, strict=True):
            table += n + n * m + (2 * pages + 1) + n * k * group.checkpoint_pages
        return MemoryReport(states, kv, 4 * table)
