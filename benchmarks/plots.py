"""The plots of the README, from what the benchmarks measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from measure import Measure

BLUE, ORANGE, GREY = "#31688e", "#d95f02", "#9a9a9a"
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "font.size": 10,
    "savefig.bbox": "tight",
    "savefig.dpi": 144,
    "svg.hashsalt": "rcache",  # the same numbers give the same file
}


def draw(measures: Sequence[Measure], folder: Path) -> list[Path]:
    """Writes a PNG and an SVG of each plot whose numbers are all there; returns the paths."""
    plots: dict[str, Callable[[dict[str, Measure]], None]] = {"decode": _decode, "bookkeeping": _bookkeeping}
    plots |= {"versus": _versus}
    written, named = [], {measure.name: measure for measure in measures}
    with mpl.rc_context(STYLE):
        for name, plot in plots.items():
            try:
                plot(named)
            except KeyError:  # a benchmark that did not run
                plt.close()
                continue
            for path in (folder / f"{name}.png", folder / f"{name}.svg"):
                plt.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
                written.append(path)
            plt.close()
    return written


def _bars(axes: Axes, labels: Sequence[str], values: Sequence[float], colors: Sequence[str], form: str) -> None:
    """Horizontal bars, the first on top, each with its number."""
    bars = axes.barh(range(len(labels)), values, color=colors)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.bar_label(bars, [form.format(value) for value in values], padding=3)
    axes.set_xlim(0, 1.18 * max(values))


def _decode(named: dict[str, Measure]) -> None:
    """A decode step in the four ways."""
    labels = ["states copied once", "plain arrays, no cache", "rcache, a run", "rcache, planned step by step"]
    figure, panels = plt.subplots(1, 2, figsize=(10, 2.2), layout="constrained", sharey=True)
    copy = named["decode_floor"].seconds["copy"]
    for axes, name, title in zip(
        panels, ["decode_state", "decode_trivial"], ["Gated delta rule", "Cheapest update"], strict=True
    ):
        run, by_pass = named[name], named[f"{name}, by pass"]
        seconds = [copy, run.seconds["dense"], run.seconds["run"], by_pass.seconds["pass"]]
        _bars(axes, labels, [1e3 * value for value in seconds], [GREY, GREY, BLUE, BLUE], "{:.2f}")
        axes.set_title(f"{title}: ms a step")
    figure.suptitle("Decoding, 8 layers, 8 sequences of a 64-slot pool, 8 heads of 64 x 64 float32", x=0.01, ha="left")


def _bookkeeping(named: dict[str, Measure]) -> None:
    """Forks, restores and removals at two state sizes, and planning at several sizes of the table."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 2.4), layout="constrained")
    names = ["fork", "restore", "remove"]
    pairs = [named[f"{name}, 64 x state size"].seconds for name in names]
    labels = [f"{name}{size}" for name in names for size in ("", ", states 64 x as large")]
    _bars(left, labels, [1e6 * value for pair in pairs for value in pair.values()], [BLUE, GREY] * 3, "{:.0f}")
    left.set_title("One call, 64 layers, 256 sequences: us")
    first = named["plan_scale, a step"].value
    scales = {"64 sequences, 1k pages": first}
    for measure in named.values():
        if measure.name.startswith("plan_scale, ") and measure.seconds:
            [(label, value)] = measure.seconds.items()
            scales[label] = 1e6 * value
    _bars(right, list(scales), list(scales.values()), [BLUE] * len(scales), "{:.1f}")
    right.set_title("A decode step planned inside a compiled loop: us")


def _versus(named: dict[str, Measure]) -> None:
    """Tokens a second over those of Hugging Face transformers, each family."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 2.6), layout="constrained", sharey=True)
    for axes, kind, title in zip(
        panels, ("decode", "prefill"), ("Decode, 8 rows", "Prefill, one row of 512"), strict=True
    ):
        prefix = f"versus {kind}, "
        found = {name.removeprefix(prefix): measure for name, measure in named.items() if name.startswith(prefix)}
        goal = next(iter(found.values())).goal if found else named[prefix].goal
        _bars(axes, list(found), [measure.value for measure in found.values()], [BLUE] * len(found), "{:.1f}")
        if goal is not None:
            axes.axvline(goal, color=ORANGE, linewidth=1)
        axes.set_title(f"{title} (line: goal)")
    what = "Tokens a second, over those of Hugging Face transformers on PyTorch, the same weights, two CPU cores"
    figure.suptitle(what, x=0.01, ha="left")
