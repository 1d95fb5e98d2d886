"""A leave-out tree: predictions for data on which neither the model nor an ancestor was trained.
All variants fork from a shared prefix.

python examples/leave_out_tree.py [FOLDER] [SAMPLES] [DEPTH] [EPOCHS]

A fifth of the data is the base: the prefix is trained on it, and all variants use it. The remaining
data is divided into as many subsets as the tree has leaves. Each variant leaves some subsets out
and is validated on them. Its children train on a part of them again. A second start resumes.
"""

from __future__ import annotations

import sys

import torch
from fashion import load
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import datastates
from datastates.studies import Job, cut, explore, leave_out, prefix_epochs, work, work_done

STUDY = "tree"
PREFIX = 5


def build(pixels: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small classifier and what trains it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.Adam(model.parameters(), lr=2e-3)


def one_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """Every picture once, in an order that the captured random generator draws."""
    for rows in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()


def train(job: Job) -> None:
    """Train one variant. The worker restores the state of its parent first."""
    images, labels, _ = load(int(job.config["samples"] or 0))
    known, unseen = torch.tensor(job.train), torch.tensor(job.validation)
    model, optimizer = build(images[0].numel())
    job.track(model=model, optimizer=optimizer)
    for _ in job.epochs():
        one_epoch(model, optimizer, images[known], labels[known])
        with torch.no_grad():
            output = model(images[unseen])
        accuracy = (output.argmax(1) == labels[unseen]).float().mean()
        job.report(
            val_loss=F.cross_entropy(output, labels[unseen]).item(), val_accuracy=accuracy.item()
        )


def train_prefix(repo: datastates.Repository, images: Tensor, labels: Tensor, samples: int) -> None:
    """The shared prefix, on the branch ``main``; ``samples`` are the whole data."""
    torch.manual_seed(0)
    model, optimizer = build(images[0].numel())
    with repo.track(model=model, optimizer=optimizer) as run:
        while run.step < PREFIX:
            one_epoch(model, optimizer, images, labels)
            run.capture(
                attributes={"epoch": run.step + 1, "samples": len(images), "samples_all": samples}
            )


def main(folder: str, count: int, depth: int, epochs: int) -> None:
    """The prefix, the plan and its cost, the tree, and its results."""
    console = Console(soft_wrap=True)
    torch.set_num_threads(1)
    images, labels, name = load(count)
    samples = len(images)
    base = range(samples // 5)
    subsets = {"base": base, **cut(range(len(base), samples), 2**depth)}
    plan = leave_out(
        subsets, depth=depth, epochs=epochs, schedule="sqrt", seen=["base"], always=["base"]
    )

    with datastates.open(folder) as repo:
        console.print(f"{name}; a prefix of {PREFIX} epochs on {len(base)} of them")
        train_prefix(repo, images[: len(base)], labels[: len(base)], samples)
        planned = work(plan, prefix_epochs=prefix_epochs(repo, "main"))

        # on a terminal this prints the plan and its cost first
        report = explore(repo, "main", plan, train, study=STUDY, config={"samples": samples})

        console.print(report.table())
        if report:
            worst = report.best("val_loss", mode="max").variant
            console.print(
                f"least known: what {worst} leaves out, subsets {', '.join(plan[worst].validation)}"
            )
        done = work_done(repo, STUDY)
        console.print(
            f"W_N/W_D: {planned.saving:.3f} of the plan, {done.saving:.3f} as the lineage has it"
            f" ({done.tree_epochs:.1f} epochs)"
        )
    sys.exit(0 if report else 1)


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[2:]]
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/leave_out_tree",
        *(numbers + [6000, 3, 6][len(numbers) :]),
    )
