"""The pictures that examples learn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fashion import FOLDER, load


def check(images: torch.Tensor, labels: torch.Tensor, side: int) -> None:
    assert images.shape == (500, 1, side, side)
    assert images.dtype is torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels.shape == (500,)
    assert labels.dtype is torch.int64
    assert labels.bincount().min() > 30, "every class is there, in mixed order"


def test_digits_stand_in_where_fashion_mnist_is_not(tmp_path: Path) -> None:
    images, labels, name = load(500, tmp_path)
    check(images, labels, 8)
    assert name == "500 pictures of the digits of scikit-learn"
    assert len(load(10_000, tmp_path)[0]) == 1797, "as many as there are"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_fashion_mnist_is_read_as_it_was_published() -> None:
    images, labels, name = load(500)
    check(images, labels, 28)
    assert name == "500 pictures of Fashion-MNIST"
    assert labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert 0.1 < float(images.mean()) < 0.5
