"""Samples as small pictures: of arrays, drawn by matplotlib; or of images that are encoded
already."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from .errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES = 1 << 20
"""The largest image that is kept or served."""

_BEGINNINGS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def media_type(image: bytes) -> str | None:
    """The type of an encoded picture, by its first bytes: PNG, JPEG, GIF or WebP. None: another,
    such as SVG, which may hold a script."""
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "image/webp"
    return next((type_ for beginning, type_ in _BEGINNINGS if image.startswith(beginning)), None)


def image_of(found: object, index: int) -> bytes:
    """What a user's function returned for a sample, as an encoded picture: encoded bytes as they
    are, an array as ``thumbnail`` draws it.

    :raises InvalidInput: it is neither, or larger than ``MOST_BYTES``.
    :raises Unsupported: it is an array, and matplotlib is not installed.
    """
    image = (
        bytes(found)
        if isinstance(found, bytes | bytearray | memoryview)
        else thumbnail(found, index)
    )
    if len(image) > MOST_BYTES:
        raise InvalidInput(
            f"the picture of sample {index} has {len(image):,} bytes: give at most {MOST_BYTES:,}"
        )
    if media_type(image) is None:
        raise InvalidInput(
            f"the picture of sample {index} begins with {image[:8]!r}: give a PNG, JPEG, GIF or"
            " WebP, or an array"
        )
    return image


def thumbnail(found: object, index: int) -> bytes:
    """One sample as PNG: a picture pixel by pixel, a curve drawn."""
    array, file = array_of(found, index), io.BytesIO()
    if array.ndim == 1:
        drawn = figure(1.2, 1.2)
        axes = drawn.subplots()
        draw(axes, array)
        axes.set_axis_off()
        drawn.savefig(file, dpi=80, format="png")
    else:
        figure(1.2, 1.2)
        from matplotlib.image import imsave

        imsave(file, array, format="png", cmap="gray")
    return file.getvalue()


def figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches.

    :raises Unsupported: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise Unsupported(
            "pictures are drawn by matplotlib: pip install 'datastates[workflows]', or leave"
            " show out"
        ) from exc
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def draw(axes: Any, array: NDArray[np.float64]) -> None:
    """Draw a curve or a picture into axes."""
    if array.ndim == 1:
        axes.plot(array, color="#0072b2", linewidth=1)
    else:
        axes.imshow(array, cmap="gray", interpolation="nearest")


def array_of(found: object, index: int) -> NDArray[np.float64]:
    """A curve ``[n]``, a grey picture ``[h, w]`` or a coloured one ``[h, w, 3 or 4]`` from 0 to 1.

    :raises InvalidInput: it is none of these, nor ``[1 or 3 or 4, h, w]``.
    """
    array = np.asarray(found.detach().cpu() if isinstance(found, Tensor) else found)
    if array.dtype.kind not in "biuf":
        raise InvalidInput(
            f"show({index}) gave {array.dtype} of shape {array.shape}: give numbers, [h, w], [h, w,"
            " 3], [3, h, w], or [n] for a curve"
        )
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    array = np.nan_to_num(array.astype(np.float64) / scale)
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.size == 0 or not (
        array.ndim in (1, 2) or (array.ndim == 3 and array.shape[2] in (3, 4))
    ):
        raise InvalidInput(
            f"show({index}) gave an array of shape {array.shape}: give [h, w], [h, w, 3], [3, h,"
            " w], or [n] for a curve"
        )
    return np.clip(array, 0.0, 1.0) if array.ndim == 3 else array
