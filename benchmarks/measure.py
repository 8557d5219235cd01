"""Timing two things in turn, and what comes out of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class Measure:
    """One number of a benchmark, beside its goal."""

    name: str
    value: float
    unit: str = "x"  # x: a ratio
    goal: float | None = None
    at_least: bool = False  # the goal is a lower bound; else an upper one
    seconds: dict[str, float] = field(default_factory=dict)  # what was timed, a median each
    compile_seconds: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None: there is none."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"goal {'>=' if self.at_least else '<='} {self.goal:g}"
        compiled = "" if self.compile_seconds is None else f"compiled in {self.compile_seconds:.1f} s"
        verdict = "not met" if self.met is False else ""
        line = f"{self.name:<34} {self.value:>10.2f} {self.unit:<8} {goal:<14} {verdict:<8} {compiled} {self.note}"
        return line.rstrip()


class Unavailable(Exception):
    """What a benchmark compares with is not here; the message says what to do."""


@dataclass
class Call:
    """Something to time, compiled already."""

    run: Callable[[], Any]
    compile_seconds: float = 0.0


def carried(function: Callable[..., tuple[Any, ...]], carry: Any, *rest: Any) -> Call:
    """`function(carry, *rest)` as a call that donates its carry and goes on with the first of what is returned."""
    start = time.perf_counter()
    compiled = jax.jit(function, donate_argnums=0).lower(carry, *rest).compile()
    compile_seconds = time.perf_counter() - start
    held = [carry]

    def call() -> Any:
        held[0], *outputs = compiled(held[0], *rest)
        return held[0], outputs

    return Call(call, compile_seconds)


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes until everything it returns is there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def in_turn(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, all called once a round, after one round that does not count."""
    for call in calls.values():
        seconds(call.run)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call.run))
    return times


def medians(times: dict[str, list[float]], per: int = 1) -> dict[str, float]:
    """Median seconds of each, for one of the `per` things a call does."""
    return {name: statistics.median(values) / per for name, values in times.items()}


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Median of the ratios of two things timed in turn: what slows both down for a while is in neither."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))
