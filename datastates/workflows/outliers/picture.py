"""Samples as pictures, by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from datastates.errors import InvalidInput, Unsupported

from .ranking import SampleScore
from .scores import Floats

__all__ = ["sheet", "thumbnail"]

COLUMNS = 8


def sheet(samples: Sequence[SampleScore], path: Path, show: Callable[[int], object], describe: Callable[[int], str] | None) -> Path:
    """Write a grid of the samples, each under its rank and index; suspects in red."""
    columns = min(COLUMNS, max(1, len(samples)))
    rows = max(1, math.ceil(len(samples) / columns))
    figure = _figure(1.5 * columns, 1.9 * rows + 0.5)
    figure.suptitle("Most suspicious samples", x=0.01, ha="left", fontsize=13, fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, sample in zip(grid, samples, strict=False):
        _draw(axes, _array(show(sample.index), sample.index))
        text = f"{sample.rank}: #{sample.index}" + (f"\n{describe(sample.index)}" if describe is not None else "")
        # A user's text is no formula: parse_math would take its dollar signs for one.
        axes.set_title(text, fontsize=8, color="#b3261e" if sample.is_suspect else "#1b1f24", parse_math=False)
    for axes in grid:
        axes.set_axis_off()
    figure.savefig(path, dpi=150, facecolor="white")
    return path


def thumbnail(found: object, index: int) -> bytes:
    """One sample as PNG: a picture pixel by pixel, a curve drawn."""
    array, file = _array(found, index), io.BytesIO()
    figure = _figure(1.2, 1.2)
    if array.ndim == 1:
        axes = figure.subplots()
        _draw(axes, array)
        axes.set_axis_off()
        figure.savefig(file, dpi=80, format="png")
    else:
        from matplotlib.image import imsave

        imsave(file, array, format="png", cmap="gray")
    return file.getvalue()


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise Unsupported("pictures are drawn by matplotlib: pip install 'datastates[workflows]', or leave show out") from exc
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(axes: Any, array: Floats) -> None:
    if array.ndim == 1:
        axes.plot(array, color="#0072b2", linewidth=1)
    else:
        axes.imshow(array, cmap="gray", interpolation="nearest")


def _array(found: object, index: int) -> Floats:
    """A curve ``[n]``, a grey picture ``[h, w]`` or a coloured one ``[h, w, 3 or 4]`` from 0 to 1.

    :raises InvalidInput: it is none of these, nor ``[1 or 3 or 4, h, w]``.
    """
    array = np.asarray(found.detach().cpu() if isinstance(found, Tensor) else found)
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    array = np.nan_to_num(array.astype(np.float64) / scale)
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.size == 0 or not (array.ndim in (1, 2) or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise InvalidInput(f"show({index}) gave an array of shape {array.shape}: give [h, w], [h, w, 3], [3, h, w], or [n] for a curve")
    return np.clip(array, 0.0, 1.0) if array.ndim == 3 else array
