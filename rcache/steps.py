"""One token of each row, its state changed where it lies: `step_state`, over the plain path or a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rcache import payload
from rcache.forward import Forward
from rcache.run import CacheT, Run, written
from rcache.states import groups_of, read_state, update_state

if TYPE_CHECKING:
    from rcache.kernels import Step

Kernel = Literal["xla", "pallas", "pallas_tpu", "pallas_gpu"]


def step_state(
    cache: CacheT,
    forward: Forward,
    layer: int | jax.Array,
    name: str,
    step: Step,
    inputs: Sequence[jax.Array],
    *,
    like: int | None = None,
    kernel: Kernel = "xla",
    interpret: Any = False,
) -> tuple[CacheT, jax.Array]:
    """One token of each row: reads the state `name` of `layer`, steps it, and writes it.

    It does what `read_state`, `step` and `update_state` do; a kernel does so in one go, from slot to slot. The kernels
    compile for TPUs and NVIDIA GPUs, and have run in interpret mode; no device has run them yet. A `Run` has its states
    at hand, and takes the plain path in any case.

    Args:
      cache: the cache, or a run.
      forward: the plan of a pass of one token a row.
      layer: as in `update_state`.
      name: the state, `[H, ...]` of one sequence.
      step: `step(state, *inputs) -> (output, state)`, for arrays `[..., H, ...]` of any leading axes, and for any
        part of the `H` heads alike. It keeps the state's shape and dtype. For a kernel it closes over no arrays.
      inputs: `[B, H, ...]` each.
      like: as in `read_state`.
      kernel: "xla": no kernel. "pallas": the kernel of the platform that is compiled for, none where there is none
        (on GPUs, also where a size behind the heads is no power of two). "pallas_tpu", "pallas_gpu": that one.
      interpret: for the last two, as in `pallas_call`: runs the kernel on a CPU, step by step.

    Returns:
      The cache, and the output `[B, H, ...]`, which for rows of padding does not matter.

    Raises:
      ValueError: more than one token a row, an unknown name or kernel, or sizes that the kernel cannot take.
      AssertionError: an input is not `[B, H, ...]`, or the step changes the state's shape or dtype.
    """
    payload.check_plan(cache, forward)
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel must be one of {get_args(Kernel)}, got {kernel!r}")
    num_rows, num_tokens = forward.token_mask.shape
    if num_tokens != 1:
        raise ValueError(f"step_state takes one token of each row, and this pass has {num_tokens}")
    groups = {group.name: (group, row) for group, row in groups_of(cache, layer, like)}
    if name not in groups:
        raise ValueError(f"layer {layer} has states {sorted(groups)}, not {name!r}")
    group, row = groups[name]
    shape = group.state.shape
    if not shape:
        raise ValueError(f"state {name!r} of layer {layer} is a single number: there are no heads to step over")
    for index, array in enumerate(inputs):
        chex.assert_shape(array, (num_rows, shape[0], ...), custom_message=f"input {index} must be [B, H, ...]")
    state = jax.ShapeDtypeStruct((num_rows, *shape), jnp.dtype(group.state.dtype))
    output, new = jax.eval_shape(step, state, *inputs)
    chex.assert_shape(output, (num_rows, shape[0], ...), custom_message="the step's output must be [B, H, ...]")
    if (new.shape, new.dtype) != (state.shape, state.dtype):
        raise AssertionError(
            f"the step must keep its state {state.dtype}{list(state.shape)}, got {new.dtype}{list(new.shape)}"
        )

    if isinstance(cache, Run):
        output, new = step(read_state(cache, forward, layer, like=like)[name], *inputs)
        return update_state(cache, forward, layer, {name: new}, like=like), output
    # A capture after one token is the state at the end of the pass, and no copy of that is made: nothing else to write.
    states = dict(cache.states)
    states[group.key], output = _step_slots(
        states[group.key], jnp.int32(row), forward, step, inputs, output, kernel, interpret
    )
    return written(cache, forward, states=states), output


def _step_slots(
    pool: jax.Array,
    row: jax.Array,
    forward: Forward,
    step: Step,
    inputs: Sequence[jax.Array],
    output: jax.ShapeDtypeStruct,
    kernel: Kernel,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """The pool [L, S, H, ...] after one token of each row, and the output [B, H, ...]."""
    slots = (forward.read_slots, forward.write_slots)
    if kernel == "xla" or output.shape[0] == 0:
        return _plain(pool, row, *slots, *inputs, step=step)
    from rcache import kernels  # here, since Pallas takes a while to import

    def over_columns(state: jax.Array, *columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Kernels want an axis behind the heads, where the step may have none."""
        result, new = step(state, *(c[..., 0] if x.ndim == 2 else c for x, c in zip(inputs, columns, strict=True)))
        return _column(result) if output.ndim == 2 else result, new

    args = (pool, row, *slots, *(_column(x) if x.ndim == 2 else x for x in inputs))
    wide = jax.eval_shape(_column, output) if output.ndim == 2 else output
    ways = {}
    if kernels.fits_tpu(pool):
        ways["tpu"] = partial(kernels.step_on_tpu, step=over_columns, output=wide, interpret=interpret)
    if kernels.fits_gpu(pool, *inputs, output):
        ways["cuda"] = partial(kernels.step_on_gpu, step=over_columns, output=wide, interpret=interpret)
    if kernel == "pallas":
        pool, result = lax.platform_dependent(*args, default=partial(_plain, step=over_columns), **ways)
    else:
        way = ways.get({"pallas_tpu": "tpu", "pallas_gpu": "cuda"}[kernel])
        if way is None:
            raise ValueError(
                f"{kernel} cannot step a state {list(pool.shape[2:])} with these inputs: see rcache.kernels"
            )
        pool, result = way(*args)
    return pool, result.reshape(output.shape)


def _plain(
    pool: jax.Array,
    row: jax.Array,
    read_slots: jax.Array,
    write_slots: jax.Array,
    *inputs: jax.Array,
    step: Step,
) -> tuple[jax.Array, jax.Array]:
    output, new = step(payload.read_rows(pool, row, read_slots), *inputs)
    return payload.write_rows(pool, row, write_slots, new), output


def _column(x: jax.Array) -> jax.Array:
    return x[..., None]
