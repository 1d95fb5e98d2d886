"""The pictures of demo and examples: Fashion-MNIST from Debian's dataset-fashion-mnist, else the digits of scikit-learn."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["CLOTHES", "FOLDER", "load"]

FOLDER = Path("/usr/share/datasets/fashion-mnist")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
"""The meanings of Fashion-MNIST's labels; those of the digits mean themselves."""


def load(count: int, folder: Path = FOLDER) -> tuple[Tensor, Tensor, str]:
    """The first ``count`` pictures as float32 ``[n, 1, height, width]`` from 0 to 1, their labels as int64 ``[n]``, and what they are.

    Fashion-MNIST has 60,000 of 28 x 28, the digits 1,797 of 8 x 8; both have 10 classes and come in mixed order.
    """
    if (folder / "train-images-idx3-ubyte.gz").is_file():
        pixels, labels = _idx(folder / "train-images-idx3-ubyte.gz"), _idx(folder / "train-labels-idx1-ubyte.gz")
        scaled, name = pixels[:count] / np.float32(255), "Fashion-MNIST"
    else:
        from sklearn.datasets import load_digits  # only if the other data set is not there

        digits = load_digits()
        scaled, labels, name = digits.images[:count] / 16, digits.target, "the digits of scikit-learn"
    images = torch.from_numpy(scaled.astype(np.float32)).unsqueeze(1)
    targets = torch.from_numpy(labels[:count].astype(np.int64))
    return images, targets, f"{len(images)} pictures of {name}"


def _idx(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """An array of bytes in the format of MNIST: two zeros, the type, the number of dimensions, their sizes as big-endian int32."""
    data = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(tuple(shape))
