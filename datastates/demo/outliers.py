"""The end of the main job: two runs on pictures, and from the states that they left, the
pictures whose labels are wrong."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from datastates.config import Config
from datastates.repository import Repository
from datastates.repository import open as open_repository
from datastates.studies import outliers
from datastates.studies.outlier_report import tables

if TYPE_CHECKING:
    from rich.console import Console

    from .model import Size

FOLDER = Path("/usr/share/datasets/fashion-mnist")
CLOTHES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
"""The meanings of Fashion-MNIST's labels; those of the digits mean themselves."""


def load(count: int, folder: Path = FOLDER) -> tuple[Tensor, Tensor, str]:
    """The first ``count`` pictures as float32 ``[n, 1, height, width]`` from 0 to 1, their labels
    as int64 ``[n]``, and what they are.

    Fashion-MNIST has 60,000 of 28 x 28, the digits 1,797 of 8 x 8; both have 10 classes and come in
    mixed order.
    """
    if (folder / "train-images-idx3-ubyte.gz").is_file():
        pixels, labels = (
            _idx(folder / "train-images-idx3-ubyte.gz"),
            _idx(folder / "train-labels-idx1-ubyte.gz"),
        )
        scaled, name = pixels[:count] / np.float32(255), "Fashion-MNIST"
    else:
        from sklearn.datasets import load_digits  # only if the other data set is not there

        digits = load_digits()
        scaled, labels, name = (
            digits.images[:count] / 16,
            digits.target,
            "the digits of scikit-learn",
        )
    images = torch.from_numpy(scaled.astype(np.float32)).unsqueeze(1)
    targets = torch.from_numpy(labels[:count].astype(np.int64))
    return images, targets, f"{len(images)} pictures of {name}"


def _idx(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """An array of bytes in the format of MNIST: two zeros, the type, the number of dimensions,
    their sizes as big-endian int32."""
    data = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(tuple(shape))


# The end of the main job: two runs on pictures, and from the states that they left, the pictures
# whose labels are wrong.


WRONG = 0.1
SEEDS = (0, 1)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures; ``labels`` are ``truth`` except at ``wrong``, where they were changed to another
    class on purpose."""

    images: Tensor
    labels: Tensor
    truth: Tensor
    wrong: frozenset[int]
    name: str

    def describe(self, index: int) -> str:
        """A text with the present label and the original one."""
        words = CLOTHES if "Fashion" in self.name else "0123456789"
        made = f", made wrong: was {words[self.truth[index]]}" if index in self.wrong else ""
        return f"labelled {words[self.labels[index]]}{made}"

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        return cross_entropy(model(self.images[rows]), self.labels[rows], reduction="none")


def find_outliers(root: Path, size: Size, console: Console) -> None:
    """Train in a separate repository at ``root``, capture each epoch, score every picture, write
    the page. Print the highest ranked pictures, and how many of the planted ones were found."""
    pictures = spoil(size.pictures)
    with open_repository(root, config=Config(durable_every=1)) as repo:
        branches = [train(repo, pictures, size.epochs, seed) for seed in SEEDS]
        report = outliers(
            repo, branches, model=build(pictures), loss=pictures.loss, count=len(pictures.images)
        )
    show = pictures.images[:, 0].numpy()
    page = report.to_html(
        root.parent / "outliers.html",
        title=f"Outliers in {pictures.name}",
        show=lambda index: show[index],
        describe=pictures.describe,
    )
    console.print(
        f"\n{pictures.name}; {len(pictures.wrong)} labels were made wrong on purpose, and"
        f" {len(SEEDS)} runs trained on them"
    )
    for part in tables(report, most=8, describe=pictures.describe):
        console.print(part)
    suspects = report.suspects()
    found = sum(sample.index in pictures.wrong for sample in suspects)
    console.print(
        f"{found} of {len(suspects)} suspects are among the {len(pictures.wrong)} that were made"
        " wrong"
    )
    console.print(f"page: {os.path.relpath(page)}", soft_wrap=True)


def spoil(count: int) -> Pictures:
    """Pictures of which a tenth are labelled as another class."""
    images, truth, name = load(count)
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(truth), generator=generator)[: round(WRONG * len(truth))]
    labels = truth.clone()
    labels[wrong] = (truth[wrong] + torch.randint(1, 10, (len(wrong),), generator=generator)) % 10
    return Pictures(images, labels, truth, frozenset(wrong.tolist()), name)


def build(pictures: Pictures) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pictures.images[0].numel(), 128), nn.ReLU(), nn.Linear(128, 10)
    )


def train(repo: Repository, pictures: Pictures, epochs: int, seed: int) -> str:
    """Train one run on its own branch, with a state for each epoch; returns the branch."""
    torch.manual_seed(seed)
    model = build(pictures)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with repo.track(branch=f"seed-{seed}", model=model, optimizer=optimizer) as run:
        for epoch in range(1, epochs + 1):
            for rows in torch.randperm(len(pictures.images)).split(64):
                optimizer.zero_grad()
                pictures.loss(model, rows).mean().backward()
                optimizer.step()
            run.capture(attributes={"epoch": epoch})
    return run.branch
