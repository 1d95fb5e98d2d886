"""Which labels are wrong? Train a few seeds as usual, capture each epoch, and find the samples that
no model could learn.

python examples/find_outliers.py [FOLDER] [SAMPLES] [EPOCHS] [SEEDS]

A tenth of the labels is made wrong on purpose, so that you can see how many of them are found. The
report needs no training: it reads the states of the runs. A second start makes only the report.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from fashion import CLOTHES, load
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import datastates
from datastates import Config, Repository
from datastates.studies import outliers


def build(pixels: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small classifier and what trains it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def spoil(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of which a tenth is another class, and where."""
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(labels), generator=generator)[: len(labels) // 10]
    spoiled = labels.clone()
    spoiled[wrong] = (labels[wrong] + torch.randint(1, 10, (len(wrong),), generator=generator)) % 10
    return spoiled, wrong


def train(repo: Repository, images: Tensor, labels: Tensor, epochs: int, seed: int) -> str:
    """Train one seed on its own branch, with a state each epoch. An existing branch resumes."""
    model, optimizer = build(images[0].numel(), seed)
    with repo.track(branch=f"seed-{seed}", model=model, optimizer=optimizer) as run:
        while run.step < epochs:
            for rows in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[rows]), labels[rows])
                loss.backward()
                optimizer.step()
            run.capture(metrics={"loss": loss.item()}, attributes={"epoch": run.step + 1})
    return run.branch


def main(folder: str, samples: int, epochs: int, seeds: int) -> None:
    """Train, report, and compare with the labels that were changed."""
    console = Console(soft_wrap=True)
    torch.set_num_threads(1)
    images, truth, name = load(samples)
    labels, wrong = spoil(truth)
    names = CLOTHES if "Fashion" in name else tuple("0123456789")
    console.print(
        f"{name}; {len(wrong)} of the labels are made wrong; {seeds} seeds of {epochs} epochs"
    )

    with datastates.open(folder, config=Config(durable_every=1)) as repo:
        branches = [train(repo, images, labels, epochs, seed) for seed in range(seeds)]
        report = outliers(
            repo,
            branches,
            model=build(images[0].numel(), 0)[0],
            data=DataLoader(TensorDataset(images, labels), batch_size=1024),
            names=lambda index: f"picture {index}",
            classes=names,
            subsets={
                name: torch.nonzero(labels == each).flatten().tolist()
                for each, name in enumerate(names)
            },
        )

    console.print(report)
    planted = set(wrong.tolist())
    found = [sample for sample in report.suspects() if sample.index in planted]
    console.print(
        f"{len(found)} of {len(report.suspects())} suspects are among the {len(planted)} labels"
        " that were made wrong"
    )

    def describe(index: int) -> str:
        return f"labelled {names[labels[index]]}" + (
            f", made wrong: was {names[truth[index]]}" if index in planted else ""
        )

    where = Path(folder)
    page = report.to_html(
        where / "outliers.html",
        title=f"Outliers in {name}",
        show=lambda index: images[index, 0],
        describe=describe,
    )
    picture = report.to_picture(
        where / "outliers.png",
        show=lambda index: images[index, 0],
        describe=lambda index: names[labels[index]],
    )
    console.print(f"written: {page}, {picture}, {report.to_csv(where / 'outliers.csv')}")


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[2:]]
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/outliers",
        *(numbers + [6000, 10, 3][len(numbers) :]),
    )
