"""A repository with a study that ran, failed in one variant and waits in another, a report on
outliers and soups: for the page to show."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import datastates
from datastates import Repository
from datastates.studies import Job, Plan, SerialExecutor, Variant, explore, outliers
from tests.page.grown import CLASSES, FEATURES, Net, grow, samples, validate

STUDY = "rates"
PLAN = Plan(
    (
        Variant("low", None, 2, {"lr": 1e-3}),
        Variant("low-long", "low", 2, {"weight_decay": 0.1}),
        Variant("middle", None, 2, {"lr": 1e-2}),
        Variant("middle-seed", "middle", 1, {"seed": 3, "lr": 5e-3}),
        Variant("high", None, 2, {"lr": 0.5}),
        Variant("high-long", "high", 1, {"lr": 0.4}),
    )
)
COUNT = 120


def train(job: Job) -> None:
    """Epochs of a few steps; what is too hot ends in an error."""
    model = Net(0.1)
    lr, weight_decay = (
        float(str(job.config.get(key, default)))
        for key, default in (("lr", 1e-2), ("weight_decay", 0.01))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    inputs, labels = samples(5, 256)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs():
        for _ in range(4):
            chosen = torch.randint(0, 200, (24,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
        if job.config.get("lr") == 0.5 and epoch == 1:
            raise FloatingPointError("the loss is nan after 2 epochs: lr 0.5 is too high")
        job.report(
            **{
                name.replace("/", "_"): value
                for name, value in validate(model, inputs[200:], labels[200:]).items()
            }
        )


def loss_of(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
    """One loss a sample."""
    inputs, labels = samples(5, 256)
    return nn.functional.cross_entropy(model(inputs[indices]), labels[indices], reduction="none")


def picture(index: int) -> object:
    """A sample as a picture, for ``--pictures``."""
    inputs, _ = samples(5, 256)
    flat = inputs[index].numpy()
    return ((flat - flat.min()) / (float(np.ptp(flat)) or 1.0)).reshape(4, FEATURES // 4)


def add(repo: Repository) -> None:
    """All of it, to what ``grow`` made."""
    with SerialExecutor() as executor:
        explore(repo, "warm", PLAN, train, executor, study=STUDY, retries=1, progress=False)
    report = outliers(
        repo,
        ["main", "no-dropout"],
        study=STUDY,
        model=Net(0.1),
        loss=loss_of,
        count=COUNT,
        noise_rate=0.1,
        steps_per_epoch=10,
    )
    _, labels = samples(5, 256)
    report.to_repository(
        repo,
        "labels",
        show=picture,
        describe=lambda index: f"class {int(labels[index])} of {CLASSES}",
        most=70,
    )
    done = [f"done/{STUDY}/{name}" for name in ("low", "low-long", "middle")]
    repo.merge(done, weights=[0.5, 0.3, 0.2], into="rates-soup", message="weighted by hand")


def make(folder: Path) -> None:
    """The repository."""
    grow(folder, 18)
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        add(repo)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
