"""Worst-case planning: compile the largest step and read off its memory, without running or allocating anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of a compiled step on one device, as the compiler plans them.

    `aliased` are the outputs that reuse donated arguments. While the step runs it needs `peak` bytes.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


def reserve(
    step: Callable[..., Any], *args: Any, donate_argnums: int | tuple[int, ...] = 0, **kwargs: Any
) -> tuple[jax.stages.Compiled, StepMemory]:
    """Compiles `step` for arguments that need not exist.

    Args:
      step: the function to be compiled; one that `jax.jit` returned is taken as it is, `donate_argnums` aside.
      *args: arrays, or trees of `jax.ShapeDtypeStruct` such as `rcache.abstract(config)`.
      donate_argnums: which of them the step may overwrite: the cache.
      **kwargs: further arguments of the step.

    Returns:
      The compiled step, to be called with arrays of these shapes, and the bytes it takes.
    """
    jitted = step if hasattr(step, "lower") else jax.jit(step, donate_argnums=donate_argnums)
    compiled = jitted.lower(*args, **kwargs).compile()
    analysis = compiled.memory_analysis()
    return compiled, StepMemory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
    )
