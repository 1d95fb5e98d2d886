"""Samples as a sheet of pictures, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from datastates.show.thumbnails import array_of, draw, figure

from .ranking import SampleScore

__all__ = ["sheet"]

COLUMNS = 8


def sheet(samples: Sequence[SampleScore], path: Path, show: Callable[[int], object], describe: Callable[[int], str] | None) -> Path:
    """Write a grid of the samples, each under its rank and index, with suspects in red."""
    columns = min(COLUMNS, max(1, len(samples)))
    rows = max(1, math.ceil(len(samples) / columns))
    drawn = figure(1.5 * columns, 1.9 * rows + 0.5)
    drawn.suptitle("Most suspicious samples", x=0.01, ha="left", fontsize=13, fontweight="bold")
    grid = drawn.subplots(rows, columns, squeeze=False).ravel()
    for axes, sample in zip(grid, samples, strict=False):
        draw(axes, array_of(show(sample.index), sample.index))
        text = f"{sample.rank}: #{sample.index}" + (f"\n{describe(sample.index)}" if describe is not None else "")
        # A user's text is not a formula: parse_math would treat its dollar signs as one.
        axes.set_title(text, fontsize=8, color="#b3261e" if sample.is_suspect else "#1b1f24", parse_math=False)
    for axes in grid:
        axes.set_axis_off()
    drawn.savefig(path, dpi=150, facecolor="white")
    return path
