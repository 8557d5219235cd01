"""Planning one forward pass: which tokens, which slots and pages to read and write, which checkpoints to take.

`start_forward` does all the bookkeeping of a pass at once, before any payload moves, and either all of it or none.
"""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rcache import captures as capturing, pages as paging, pool as pools, room, rows as batch_rows, table as tables
from rcache.arguments import check_integer
from rcache.batch import Batch, Rows
from rcache.cache import Cache
from rcache.config import Config
from rcache.indexing import NONE
from rcache.pages import PagePlan
from rcache.records import Record
from rcache.status import Status, first_error
from rcache.table import Table


class Forward(struct.PyTreeNode):
    """The plan of one pass over `B` rows of `T` tokens. Rows of padding, and all rows of a refused pass, have length 0.

    A state is read from `read_slots` and written to `write_slots`, so that what is shared is never overwritten and
    nothing is ever copied for it.
    """

    sequences: jax.Array  # i32[B]; -1: padding
    starts: jax.Array  # i32[B]: tokens the sequence held before this pass
    lengths: jax.Array  # i32[B]: tokens of this pass
    positions: jax.Array  # i32[B, T]; 0 for padding
    token_mask: jax.Array  # bool[B, T]: real tokens
    read_slots: jax.Array  # i32[B]; -1: the state is zero
    write_slots: jax.Array  # i32[B]; -1: nothing is written
    capture_offsets: jax.Array  # i32[B, C]: tokens of this pass folded into a requested capture; -1: none
    capture_slots: jax.Array  # i32[B, C]: where such a state goes; -1: nowhere (the end of the pass needs no copy)
    bidirectional: jax.Array  # i32[B, T]: tokens of equal id >= 0 see each other
    pages: tuple[PagePlan, ...]  # one for each page group
    config: Config = struct.field(pytree_node=False)
    in_run: bool = struct.field(pytree_node=False, default=False)  # a token of a run


def start_forward(cache: Cache, batch: Batch, *, context: int | None = None) -> tuple[Cache, Forward, jax.Array]:
    """Plans a pass: the sequences of `batch` grow by its tokens.

    Args:
      cache: the cache.
      batch: which tokens of which sequences.
      context: how many tokens of a sequence attention may look at, this pass included: a static bucket, so that short
        sequences need not pay for `config.context_length`.

    Returns:
      The cache with the sequences grown, the plan for the layers, and a status i32[]: BATCH_TOO_LARGE,
      SEQUENCE_OUT_OF_RANGE, DUPLICATE_SEQUENCE, LENGTH_OUT_OF_RANGE, POSITION_MISMATCH, CONTEXT_OVERFLOW,
      CAPTURES_INVALID, SLOTS_FULL, PAGES_FULL or OK. If it is not OK, the cache is the one given, and the plan lets the
      layers run without touching anything.

    Raises:
      ValueError: more rows than `max_sequences`, more tokens than `max_pass_tokens`, or `context` out of range.
    """
    context = check_pass(batch, cache.config, context)
    table, forward, status = _start_forward(cache.table, batch, cache.config, context)
    return cache.replace(table=table), forward, status


def check_pass(batch: Batch, config: Config, context: int | None) -> int:
    """Refuses what is wrong with a batch at any values, and gives `context` its default."""
    _check_shapes(batch)
    num_rows, num_tokens = batch.positions.shape
    if num_rows > config.max_sequences:
        raise ValueError(f"the batch has {num_rows} rows, but Config.max_sequences is {config.max_sequences}")
    if num_tokens > config.most_pass_tokens:
        raise ValueError(
            f"the batch has rows of {num_tokens} tokens, but Config.max_pass_tokens is {config.most_pass_tokens}"
        )
    if context is None:
        context = config.context_length
    check_integer("context", context, 1, config.context_length)
    return context


def _check_shapes(batch: Batch) -> None:
    """Batches can be built without `make_batch`, and shapes that broadcast would pass for others."""
    chex.assert_rank(batch.positions, 2, custom_message="Batch.positions must be int32[B, T]")
    num_rows, num_tokens = batch.positions.shape
    chex.assert_rank(batch.captures, 2, custom_message="Batch.captures must be int32[B, C]")
    shapes = {
        "sequences": (num_rows,),
        "lengths": (num_rows,),
        "positions": (num_rows, num_tokens),
        "captures": (num_rows, batch.captures.shape[1]),
        "bidirectional": (num_rows, num_tokens),
        "status": (),
    }
    for name, shape in shapes.items():
        value, what = getattr(batch, name), f"Batch.{name} must be int32{list(shape)}"
        chex.assert_shape(value, shape, custom_message=what)
        if value.dtype != jnp.int32:
            raise AssertionError(f"{what}, got {value.dtype}{list(value.shape)}")


@partial(jax.jit, static_argnames=("config", "context"))
def _start_forward(table: Table, batch: Batch, config: Config, context: int) -> tuple[Table, Forward, jax.Array]:
    table, rows, record, forward, status = plan_pass(table, batch, config, context)
    table, capture_slots = grow(table, rows, record, forward.write_slots, config)
    return table, forward.replace(capture_slots=capture_slots), status


def plan_pass(
    table: Table, batch: Batch, config: Config, context: int
) -> tuple[Table, Rows, Record, Forward, jax.Array]:
    """Takes slots and pages for a pass, or nothing.

    The table, the rows and their new record, which the table does not have yet, the plan without captures, a status.
    """
    held = tables.read(table, batch.sequences)
    status = batch_rows.check(batch, held.length, config, context)
    rows = batch_rows.resolve(batch, held.length, status == Status.OK)
    roomy, slots_short, pages_short = room.make_room(table, rows, jnp.where(rows.active, held.slot, NONE), config)
    no_room = first_error((slots_short, Status.SLOTS_FULL), (pages_short, Status.PAGES_FULL))
    status = jnp.where(status != Status.OK, status, no_room)
    ok = status == Status.OK
    table = room.take_if(ok, roomy, table, config)

    # From here on nothing can fail.
    rows = batch_rows.resolve(batch, held.length, ok)
    record = tables.read(table, rows.index)
    read_slots = record.slot
    table, write_slots = _take_slots(table, rows, read_slots, config)
    table, copies = _take_pages(table, rows, config)

    offsets = jnp.arange(rows.num_tokens, dtype=jnp.int32)
    positions = jnp.where(rows.token_mask, rows.starts[:, None] + offsets[None, :], 0)
    forward = Forward(
        sequences=jnp.where(rows.active, batch.sequences, jnp.int32(NONE)),
        starts=rows.starts,
        lengths=rows.lengths,
        positions=positions,
        token_mask=rows.token_mask,
        read_slots=read_slots,
        write_slots=write_slots,
        capture_offsets=rows.captures,
        capture_slots=jnp.full_like(rows.captures, NONE),
        bidirectional=jnp.where(rows.token_mask, batch.bidirectional, jnp.int32(NONE)),
        pages=tuple(
            paging.plan(page_table, group, rows, first, positions, copy, config.page_size, context)
            for page_table, group, first, copy in zip(
                table.page_tables, config.page_groups, record.first, copies, strict=True
            )
        ),
        config=config,
    )
    return table, rows, record.replace(slot=write_slots), forward, status


def grow(table: Table, rows: Rows, record: Record, write_slots: jax.Array, config: Config) -> tuple[Table, jax.Array]:
    """The rows get their tokens and checkpoints. Also where each state asked for goes: i32[B, C]."""
    table, record, capture_slots = capturing.capture(table, rows, record, write_slots, config)
    return tables.write(table, rows.index, record.replace(length=rows.ends)), capture_slots


def _take_slots(table: Table, rows: Rows, held: jax.Array, config: Config) -> tuple[Table, jax.Array]:
    """The slots rows write that hold `held` i32[B]: i32[B]."""
    if not config.has_states:
        return table, held
    leaves = room.leaves_slot(table, rows, held)
    pool, ids = pools.exchange(table.slot_pool, jnp.where(leaves, held, jnp.int32(NONE)), wanted=leaves)
    return table.replace(slot_pool=pool), jnp.where(leaves, ids, held)


def _take_pages(table: Table, rows: Rows, config: Config) -> tuple[Table, list[tuple[jax.Array, jax.Array]]]:
    """The pages rows grow into, and for each page group which page each row copies where: i32[B], i32[B]."""
    page_tables, copies = [], []
    for page_table in table.page_tables:
        extended, copy_from, copy_to = paging.extend(page_table, rows, config.page_size)
        page_tables.append(extended)
        copies.append((copy_from, copy_to))
    return table.replace(page_tables=tuple(page_tables)), copies
