"""Population-based training on top of studies, against the same budget without copies.

python examples/pbt.py [FOLDER] [SAMPLES] [MEMBERS] [ROUNDS] [EPOCHS]

Some members train side by side, in rounds of EPOCHS epochs. After a round the worst quarter
continue from forks of the best quarter, with a changed learning rate and dropout (Jaderberg et al.,
2017). A member in a round is a variant of one study. Its parent is the variant that it continues,
so the lineage shows which member came from which. A second start resumes.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
from fashion import load
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import datastates
from datastates.studies import (
    Choice,
    Distribution,
    Exploration,
    Job,
    LogUniform,
    Plan,
    Uniform,
    explore,
    sample,
)
from datastates.values import Value

SEARCH: dict[str, Distribution] = {
    "lr": LogUniform(1e-4, 1.0),
    "dropout": Uniform(0.0, 0.6),
    "seed": Choice(range(2**31)),
}


def build(
    pixels: int, lr: float = 1e-3, dropout: float = 0.0
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A small classifier and what trains it."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10)
    )
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def one_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """Every picture once, in an order that the captured random generator draws."""
    for rows in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()


def train(job: Job) -> None:
    """One round of one member, in a worker."""
    images, labels, _ = load(int(job.config["samples"] or 0))
    known, unseen = torch.tensor(job.train), torch.tensor(job.validation)
    model, optimizer = build(
        images[0].numel(), float(job.config["lr"] or 0), float(job.config["dropout"] or 0)
    )
    # restored from the parent, except the learning rate
    job.track(model=model, optimizer=optimizer)
    for _ in job.epochs():
        one_epoch(model, optimizer, images[known], labels[known])
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(images[unseen]), labels[unseen])
        model.train()
        job.report(val_loss=loss.item())


def perturbed(config: Mapping[str, Value], source: random.Random) -> dict[str, Value]:
    """The changes of a copy: a learning rate and a dropout near the values of the copied member,
    and a new seed."""
    rate = float(config["lr"] or 0) * source.choice((0.8, 1.25))
    dropout = float(config["dropout"] or 0) + source.choice((-0.06, 0.06))
    return {"lr": rate, "dropout": min(max(dropout, 0.0), 0.6), "seed": source.getrandbits(31)}


def with_next_round(
    plan: Plan, report: Exploration, number: int, members: int, copies: int
) -> Plan:
    """The plan with another round.

    It depends only on the losses in the lineage, so a repeated call gives the same plan."""
    last = plan.variants[-members:]
    losses = {each.name: report[each.name].metrics["val_loss"] for each in last}
    ranking = sorted(
        losses, key=lambda name: math.inf if math.isnan(losses[name]) else losses[name]
    )
    best, worst = ranking[:copies], ranking[members - copies :]
    added = []
    for index, member in enumerate(last, 1):
        source = random.Random(f"{number}/{index}")
        parent = source.choice(best) if member.name in worst else member.name
        changes = perturbed(plan.config(parent), source) if member.name in worst else {}
        added.append(replace(member, name=f"r{number}/m{index}", parent=parent, config=changes))
    return replace(plan, variants=(*plan.variants, *added))


def search(
    repo: datastates.Repository,
    study: str,
    copies: int,
    *,
    samples: int,
    members: int,
    rounds: int,
    epochs: int,
) -> Exploration:
    """All rounds of a population.

    A held-out fifth of the data chooses the best members."""
    subsets = {"held": range(samples // 5), "rest": range(samples // 5, samples)}
    plan = sample(
        SEARCH, members, seed=0, epochs=epochs, subsets=subsets, train=["rest"], validation=["held"]
    )
    plan = replace(
        plan,
        variants=tuple(
            replace(each, name=f"r1/m{index}") for index, each in enumerate(plan.variants, 1)
        ),
    )
    for number in range(1, rounds + 1):
        report = explore(repo, "main", plan, train, study=study, config={"samples": samples})
        if not report:
            sys.exit(f"{report.table()}\n{report.errors}")
        plan = with_next_round(plan, report, number + 1, members, copies)
    return report


def main(folder: str, count: int, members: int, rounds: int, epochs: int) -> None:
    """The common start, both searches, and the ancestry of the members."""
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
        evolved, alone = (
            search(repo, "pbt", max(1, members // 4), **size),
            search(repo, "alone", 0, **size),
        )
        console.print(evolved.table())
        for found in (evolved, alone):
            best = found.best("val_loss")
            rates = " -> ".join(
                f"{found.plan.config(step.name)['lr']:.2g}"
                for step in found.plan.path(best.variant)
            )
            console.print(
                f"{found.study}: best {best.variant}, validation loss"
                f" {best.metrics['val_loss']:.4f}; learning rates {rates}"
            )


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[2:]]
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/pbt",
        *(numbers + [6000, 8, 5, 2][len(numbers) :]),
    )
