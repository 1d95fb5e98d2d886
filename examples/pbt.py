"""Population-based training: learning rates and dropout that change while the networks train, against the same budget without copying.

python examples/pbt.py [FOLDER] [SAMPLES] [MEMBERS] [ROUNDS] [EPOCHS]

Each member trains a round of EPOCHS epochs; then the worst quarter goes on from copies of the best, with rates that are changed a little.
Both searches begin with the same members. Start it again and it goes on where it stopped.
"""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import datastates
from datastates.demo.images import load
from datastates.workflows import Distribution, Job, LogUniform, Population, Uniform, population, reconfigure

SEARCH: dict[str, Distribution] = {"lr": LogUniform(1e-4, 1.0), "dropout": Uniform(0.0, 0.6)}


def build(pixels: int, dropout: float = 0.0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A small classifier and what trains it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """Every picture once, in an order that the captured random generator draws."""
    model.train()
    for rows in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()


def train(job: Job) -> None:
    """One round of one member; its worker puts it where it, or the member that it copies, stood."""
    images, labels, _ = load(int(job.config["samples"] or 0))
    known, unseen = torch.tensor(job.train), torch.tensor(job.validation)
    model, optimizer = build(images[0].numel(), float(job.config["dropout"] or 0))
    job.track(model=model, optimizer=optimizer)
    reconfigure(job, optimizer)  # the restored optimizer has the rate of whom it comes from
    for _ in job.epochs():
        one_epoch(model, optimizer, images[known], labels[known])
        model.eval()
        with torch.no_grad():
            output = model(images[unseen])
        accuracy = (output.argmax(1) == labels[unseen]).float().mean()
        job.report(val_loss=F.cross_entropy(output, labels[unseen]).item(), val_accuracy=accuracy.item())


def search(repo: datastates.Repository, study: str, exploit: float, *, samples: int, members: int, rounds: int, epochs: int) -> Population:
    """A fifth of the data is held out, and says who is best."""
    held = samples // 5
    return population(
        repo,
        "main",
        train,
        study=study,
        search=SEARCH,
        metric="val_loss",
        members=members,
        rounds=rounds,
        epochs_per_round=epochs,
        exploit=exploit,
        config={"samples": samples},
        data={"subsets": {"held": range(held), "rest": range(held, samples)}, "train": ["rest"], "validation": ["held"]},
    )


def main(folder: str, count: int, members: int, rounds: int, epochs: int) -> None:
    """The common start, both searches, and who came from whom."""
    console = Console(soft_wrap=True)
    torch.set_num_threads(1)
    images, _, name = load(count)
    size = {"samples": len(images), "members": members, "rounds": rounds, "epochs": epochs}

    with datastates.open(folder) as repo:
        console.print(f"{name}; {members} members, {rounds} rounds of {epochs} epochs")
        torch.manual_seed(0)
        model, optimizer = build(images[0].numel())
        with repo.track(model=model, optimizer=optimizer) as run:
            if run.head is None:
                run.capture(step=0, message="untrained")

        evolved = search(repo, "pbt", 0.25, **size)
        alone = search(repo, "alone", 0.0, **size)

        console.print(evolved.table(), evolved.picture(), "")
        for found in (evolved, alone):
            best = found.best
            rates = " -> ".join(f"{step.config['lr']:.2g}" for step in found.path(best))
            accuracy = "" if best.state is None else f", accuracy {best.state.metrics['val_accuracy']:.3f}"
            console.print(f"{found.study}: best {best.variant}, validation loss {best.value:.4f}{accuracy}; learning rates {rates}")


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[2:]]
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/pbt", *(numbers + [6000, 8, 5, 2][len(numbers) :]))
