"""Small pictures of samples. matplotlib draws arrays, and encoded images are used as they are.

Also the pictures and small files that are captured with a state."""

from __future__ import annotations

import io
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import values
from .errors import Corrupt, InvalidInput, Unsupported
from .state.adapters import FILES
from .state.encoding import decode_values
from .state.geometry import bytes_of, rebuild
from .state.skeleton import carve, decode_skeleton
from .state.tree import unflatten
from .storage.reading import read_flat, specs_of
from .system.files import read_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .storage.tier import Reader

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


# Files that are captured with a state. They are tensors of bytes in its tree. Therefore its digest
# covers them, and every copy of the state has them.


FILES_BYTES = 4 << 20
"""The most bytes that the files of one state have together."""

MOST_FILES = 32

_NAME = re.compile(r"\w(?:[\w .,+=@()-]{0,98}[\w)])?")


def files_to_capture(given: object) -> dict[str, Tensor]:
    """The files of ``capture(files=…)`` as bytes, by name. Figures are drawn, and paths are read.

    A name without a suffix gets the suffix of the path, or ``.png`` for a figure.

    :raises InvalidInput: a name, a figure or a path cannot be used, or the files are too large.
    """
    if given is None:
        return {}
    files: dict[str, Tensor] = {}
    for key, found in values.named(given, "files").items():
        what = f"files[{values.shown(key)}]"
        content, suffix = _content(found, what)
        name = key if "." in key else key + suffix
        if _NAME.fullmatch(name) is None or name in files:
            raise InvalidInput(
                f"{what} cannot be called {values.shown(name)}: give each file another name of up"
                " to 100 letters, digits, spaces and .,+=@()_-, without a path"
            )
        files[name] = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if content
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
    size = sum(file.numel() for file in files.values())
    if size > FILES_BYTES or len(files) > MOST_FILES:
        raise InvalidInput(
            f"{len(files)} files have {size:,} bytes: a state holds at most {MOST_FILES} files of"
            f" {FILES_BYTES:,} bytes together; draw smaller figures, or store a path as attribute"
        )
    return files


def _content(found: object, what: str) -> tuple[bytes, str]:
    """The bytes of a file, and the suffix for a name that has none."""
    if isinstance(found, bytes):
        return found, ""
    draw_into = values.attribute(found, "savefig")
    if callable(draw_into):
        drawn = io.BytesIO()
        try:
            draw_into(drawn, format="png")
        except Exception as exc:  # the figure's own code may raise anything
            raise InvalidInput(f"{what} cannot be drawn ({type(exc).__name__}: {exc})") from exc
        return drawn.getvalue(), ".png"
    if not isinstance(found, str | os.PathLike):
        raise InvalidInput(
            f"{what} is {values.shown(found)}: give the path of a file, a figure of matplotlib, or"
            " bytes"
        )
    path = values.path(found, what)
    try:
        content = read_regular(os.path.realpath(path), most=FILES_BYTES)
    except (OSError, Corrupt) as exc:
        raise InvalidInput(
            f"{what} cannot be read ({exc}): give the path of a file of at most {FILES_BYTES:,}"
            " bytes"
        ) from exc
    return content, os.path.splitext(path)[1]


def files_of(reader: Reader) -> dict[str, bytes]:
    """The files of an open state, by name. Only these chunks are read.

    :raises Corrupt: a chunk fails its digest, or there is something else in place of the files.
    """
    content, specs = reader.manifest.content, specs_of(reader)
    carved = carve(content, lambda path: path.partition("/")[0] == FILES)
    if len(carved.specs) > MOST_FILES or sum(map(bytes_of, carved.specs)) > FILES_BYTES:
        raise Corrupt("the state has more files, or larger ones, than can be captured")
    tree = unflatten(
        decode_skeleton(carved.skeleton),
        decode_values(carved.values),
        [
            rebuild(read_flat(reader, specs[source]), spec)
            for source, spec in zip(carved.sources, carved.specs, strict=True)
        ],
        is_sketch=True,  # objects of other types are not decoded
    )
    found = tree.get(FILES, {})
    if not (isinstance(found, dict) and all(_is_file(*item) for item in found.items())):
        raise Corrupt("the state has something else in place of its files")
    # several names may share one tensor
    if len(found) > MOST_FILES or sum(file.numel() for file in found.values()) > FILES_BYTES:
        raise Corrupt("the state has more files, or larger ones, than can be captured")
    return {name: bytes(file.contiguous().numpy().data) for name, file in found.items()}


def _is_file(name: object, found: object) -> bool:
    if not isinstance(name, str) or not isinstance(found, Tensor):
        return False
    return _NAME.fullmatch(name) is not None and found.dtype is torch.uint8 and found.dim() == 1
