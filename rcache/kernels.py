"""One token's update of a state inside its slot, as a Pallas kernel: for TPUs, and for NVIDIA GPUs.

Without a kernel the states of a batch are gathered from the pool, stepped, and scattered back. Here a block of heads at
a time comes out of its slot and goes into its slot, and nothing else of a state is ever in memory.

Both kernels wrap any step over arrays whose leading axes are free. They compile for TPUs
and GPUs, and have run in interpret mode; no device has run them yet.

Why rows may share slots: a slot that a row writes is either fresh, and then no row reads it, or it is read only by that
row and by earlier ones (see `pool.must_leave`). So no row reads what another has written, and one thing is left to see
to: whoever reads a slot has read it before the row that keeps it writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # JAX has announced that it will go
    plgpu = None  # type: ignore[assignment]

Step = Callable[..., tuple[jax.Array, jax.Array]]

_BLOCK_SIZE = 1 << 17  # numbers of a state at a time on a TPU: in float32, 4 MiB with those in flight and in between
_WRITE, _LEAVE, _COPY = range(3)  # what a row does to the block that is its


def step_on_tpu(
    pool: jax.Array,
    row: jax.Array,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *inputs: jax.Array,
    step: Step,
    output: jax.ShapeDtypeStruct,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The pool after one token of each row, and the step's output.

    The grid is worked through in order: blocks of heads, and for each all rows. While a row is computed the state of
    the next one is fetched, and that of the one before is written. So the row that keeps a slot is computed after all
    that read it have it.

    Args:
      pool: [L, S, H, ...], with an axis behind the heads.
      row: i32[] the layer's in `pool`.
      read_slots: i32[B]; -1: the state is zero.
      write_slots: i32[B]; -1: nothing is written.
      inputs: [B, H, ...] each, with an axis behind the heads.
      step: from a state [..., H, ...] and the inputs to an output and the new state.
      output: shape and dtype of the output, [B, H, ...] with an axis behind the heads.
      interpret: as in `pallas_call`.
    """
    num_rows, num_heads = output.shape[:2]
    heads = heads_of_block(pool)
    # XLA gives an array on a TPU the layout with the least padding. Where that has the last two axes swapped, a kernel
    # that wants them in order would have the whole pool copied, before and after.
    swaps = pool.ndim > 4 and pool.shape[-1] % 128 != 0 and pool.shape[-2] % 128 == 0
    view = lambda x: x.swapaxes(-1, -2) if swaps else x  # noqa: E731
    pool = view(pool)
    active = write_slots >= 0
    # A row of padding has the block of the active row before it, or that of the first. A block that stays the same from
    # one row to the next is neither fetched again nor written in between, so only what the active row leaves there is.
    order = jnp.arange(num_rows, dtype=jnp.int32)
    before = lax.cummax(jnp.where(active, order, jnp.int32(-1)))
    nearest = jnp.where(before >= 0, before, jnp.argmax(active).astype(jnp.int32))
    # For a new sequence, which reads none, the slot that it writes is fetched: that one is nobody else's.
    sources = jnp.maximum(jnp.where(read_slots >= 0, read_slots, write_slots)[nearest], 0)
    targets = jnp.maximum(write_slots[nearest], 0)
    # Where all rows are padding, they have slot 0. It will be written, so it has to be what it was.
    modes = jnp.where(active, jnp.int32(_WRITE), jnp.where(jnp.any(active), jnp.int32(_LEAVE), jnp.int32(_COPY)))

    def kernel(row: Any, sources: Any, targets: Any, reads: Any, modes: Any, held: Any, *refs: Any) -> None:
        del row, sources, targets  # the blocks are chosen by them
        *inputs, after, output = refs
        b = pl.program_id(1)
        state = held[...]
        old = jnp.where(jnp.full(state.shape, reads[b] >= 0), state, jnp.zeros_like(state))
        output[...], new = step(view(old), *(x[...] for x in inputs))

        @pl.when(modes[b] == _WRITE)
        def _() -> None:
            after[...] = view(new)

        @pl.when(modes[b] == _COPY)
        def _() -> None:
            after[...] = state

    def of_slot(which: int) -> pl.BlockSpec:
        rest = pool.shape[3:]
        at = lambda h, b, *scalars: (scalars[0][0], scalars[which][b], h, *(0,) * len(rest))  # noqa: E731
        return pl.BlockSpec((None, None, heads, *rest), at)

    def of_row(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, *shape[2:]), lambda h, b, *scalars: (b, h, *(0,) * len(shape[2:])))

    scalars = (row.reshape(1), sources, targets, read_slots, modes)
    after, outputs = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(num_heads, heads), num_rows),
            in_specs=[of_slot(1), *(of_row(x.shape) for x in inputs)],
            out_specs=[of_slot(2), of_row(output.shape)],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype), output],
        input_output_aliases={len(scalars): 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, pool, *inputs)
    return view(after), outputs


def heads_of_block(pool: jax.Array) -> int:
    """How many heads of a state a TPU works on at a time: all, or a multiple of 8, as its tiles of other arrays are."""
    num_heads = pool.shape[2]
    most = _BLOCK_SIZE // math.prod(pool.shape[3:])
    return num_heads if num_heads <= max(most, 8) else max(most // 8 * 8, 8)


def step_on_gpu(
    pool: jax.Array,
    row: jax.Array,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *inputs: jax.Array,
    step: Step,
    output: jax.ShapeDtypeStruct,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """As `step_on_tpu`, a head at a time. All sizes behind the heads must be powers of two.

    Programs run in any order, one for each row and head. So those rows that read what a later row keeps are left to
    that one's program, which works through them before itself. (It reads its own slot then, so nobody waits for two.)
    """
    num_rows, num_heads = output.shape[:2]
    order = jnp.arange(num_rows, dtype=jnp.int32)
    keeps = (read_slots[:, None] == write_slots[None, :]) & (read_slots >= 0)[:, None]
    workers = jnp.where(jnp.any(keeps, axis=1), jnp.argmax(keeps, axis=1).astype(jnp.int32), order)

    def kernel(row: Any, workers: Any, reads: Any, writes: Any, _: Any, *refs: Any) -> None:
        *inputs, pool, output = refs
        worker, h = pl.program_id(0), pl.program_id(1)

        def turn(b: jax.Array, carry: None) -> None:
            @pl.when(workers[b] == worker)
            def _() -> None:
                read, write = reads[b], writes[b]
                state = pool[row[0], jnp.maximum(jnp.where(read >= 0, read, write), 0), pl.ds(h, 1)]
                old = jnp.where(read >= 0, state, jnp.zeros_like(state))
                output[b, pl.ds(h, 1)], new = step(old, *(x[b, pl.ds(h, 1)] for x in inputs))
                if not interpret:
                    plgpu.debug_barrier()  # threads that are ahead must not write what others have yet to read

                @pl.when(write >= 0)
                def _() -> None:
                    pool[row[0], write, pl.ds(h, 1)] = new

        lax.fori_loop(0, num_rows, turn, None)

    scalars = (row.reshape(1), workers, read_slots, write_slots)
    return pl.pallas_call(
        kernel,
        grid=(num_rows, num_heads),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype), output],
        input_output_aliases={len(scalars): 0},
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(*scalars, pool, *inputs)


def fits_tpu(pool: jax.Array) -> bool:
    """Whether `step_on_tpu` can take a pool `[L, S, H, ...]`: tiles want a second axis."""
    return pool.ndim > 3


def fits_gpu(pool: jax.Array, *arrays: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `step_on_gpu` can take `pool` [L, S, H, ...] and arrays [B, H, ...]: sizes must be powers of two."""
    sizes = [*pool.shape[3:], *(size for array in arrays for size in array.shape[2:])]
    return plgpu is not None and all(size & (size - 1) == 0 for size in sizes)
