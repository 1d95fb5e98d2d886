"""The picture of the main job: the losses of every branch, read back from the lineage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datastates.lineage.states import State

__all__ = ["draw"]

PREFIX = "#8a8f98"
COLOURS = ("#1b1f24", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def draw(path: Path, branches: Mapping[str, Sequence[State]], *, resumed: Sequence[State], tag: State, best: State, title: str) -> None:
    """Write a PNG: training loss on the left, held-out loss from the tag on to the right.

    ``branches`` holds the states of each branch, oldest first, back to the root; the part that they share up to ``tag`` is drawn
    once, in grey. ``resumed`` is drawn as circles around the points that it should repeat.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    first = next(iter(branches.values()))
    prefix = [state for state in first if state.step <= tag.step]
    _line(left, prefix, "loss", PREFIX, window=10)
    _line(right, prefix[-max(1, len(prefix) // 3) :], "val_loss", PREFIX)
    for (name, states), colour in zip(branches.items(), COLOURS, strict=False):
        own = [state for state in states if state.step >= tag.step]
        _line(left, own, "loss", colour, window=10, before=prefix)
        _line(right, own, "val_loss", colour, label=name)
    points = [(state.step, state.metrics["val_loss"]) for state in resumed if "val_loss" in state.metrics]
    if points:
        style = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgecolor": COLOURS[0], "linestyle": ""}
        right.plot(*zip(*points, strict=True), **style, label="main resumed in a fresh process")
    _finish(left, right, tag, best)
    figure.savefig(path, dpi=150, facecolor="white")


def _line(
    axes: Any, states: Sequence[State], metric: str, colour: str, *, window: int = 1, label: str | None = None, before: Sequence[State] = ()
) -> None:
    points = [(state.step, state.metrics[metric]) for state in states if metric in state.metrics]
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    if window > 1:
        axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
        earlier = [state.metrics[metric] for state in before if state.step < steps[0]][-window:]
        values = _smooth([*earlier, *values], window)[len(earlier) :]
    marker = None if window > 1 else "o"
    axes.plot(steps, values, color=colour, linewidth=1.8, label=label, marker=marker, markersize=3.5, solid_capstyle="round")


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value with those around it."""
    parts = (values[max(0, at - window // 2) : at + window // 2 + 1] for at in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _finish(left: Any, right: Any, tag: State, best: State) -> None:
    for axes in (left, right):
        axes.axvline(tag.step, color=PREFIX, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("step")
        axes.margins(x=0.02)
    left.annotate("tag: warm", (tag.step, 1), xycoords=("data", "axes fraction"), xytext=(5, -10), textcoords="offset points", color="#555")
    left.set_ylabel("nats a byte")
    left.set_title("training loss (mean of 10 steps; each step faint)", loc="left", fontsize=11)
    right.set_title("held-out loss", loc="left", fontsize=11)
    label = f"best: {best.metrics['val_loss']:.3f} at step {best.step}"
    style = {"marker": "*", "markersize": 15, "color": "#e69f00", "markeredgecolor": "#1b1f24", "linestyle": ""}
    right.plot(best.step, best.metrics["val_loss"], **style, zorder=5, label=label)
    right.legend(frameon=False, loc="upper right")
