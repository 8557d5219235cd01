"""The cache as a value: its table, its payload, its config; making one, and asking it what it holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from rcache import checkpoints as ckpt, table as tables
from rcache.config import Config
from rcache.table import Counters, Table


class Cache(struct.PyTreeNode):
    """What a model remembers of `N` sequences. Immutable: every operation returns a new one.

    `states[key]` is `[L, S, *shape]`; `keys[key]` and `values[key]` are `[H, L, P, page_size, D]`. With heads outside
    and layers beside pages, `keys[key].reshape(H, L * P, page_size, D)` is a pool of pages that paged-attention kernels
    read as it is, layer `l` of the group at page numbers `l * P + page`.
    """

    table: Table
    states: dict[str, jax.Array]
    keys: dict[str, jax.Array]
    values: dict[str, jax.Array]
    config: Config = struct.field(pytree_node=False)


def init(config: Config) -> Cache:
    """An empty cache, of `config.memory().total` bytes."""
    num_slots, num_pages = config.capacity
    states = {g.key: jnp.zeros((len(g.layers), num_slots, *g.state.shape), g.state.dtype) for g in config.state_groups}
    keys, values = {}, {}
    for g in config.kv_groups:
        a = g.attention
        shape = (a.num_kv_heads, len(g.layers), num_pages[g.page_group], config.page_size)
        keys[g.key] = jnp.zeros((*shape, a.head_dim), a.dtype)
        values[g.key] = jnp.zeros((*shape, a.value_dim), a.dtype)
    return Cache(tables.init(config), states, keys, values, config)


def abstract(config: Config) -> Cache:
    """The same tree of `jax.ShapeDtypeStruct`: to compile for without allocating."""
    return jax.eval_shape(lambda: init(config))


def lengths(cache: Cache) -> jax.Array:
    """Tokens of each sequence: i32[N]; 0: empty."""
    return cache.table.sequences.length


def slots(cache: Cache) -> jax.Array:
    """The state slot of each sequence: i32[N]; -1: none."""
    return cache.table.sequences.slot


def approximate(cache: Cache) -> jax.Array:
    """Whether a sequence's state still contains tokens that were cut out of its middle: bool[N]."""
    return cache.table.sequences.approximate


def checkpoint_positions(cache: Cache) -> jax.Array:
    """Position of the last token in each checkpoint: i32[N, K], ascending, -1 where there is none."""
    return cache.table.sequences.checkpoints.positions


def checkpoint_approximate(cache: Cache) -> jax.Array:
    """Whether a checkpoint's state still contains tokens that were cut out: bool[N, K]."""
    return cache.table.sequences.checkpoints.flags & ckpt.APPROXIMATE != 0


def free_slots(cache: Cache) -> jax.Array:
    """State slots without a holder: i32[]."""
    return cache.table.slot_pool.num_free


def free_pages(cache: Cache) -> tuple[jax.Array, ...]:
    """Pages without a holder, of each page group: i32[] each."""
    return tuple(page_table.pool.num_free for page_table in cache.table.page_tables)


def counters(cache: Cache) -> Counters:
    """Captures taken and skipped, and checkpoints evicted, since `init`."""
    return cache.table.counters
