"""A training with a broken batch, and later with a learning rate that is far too large. It still
reaches a normal loss.

python examples/rewind.py [FOLDER] [STEPS]

The guard restores the last good state from memory, skips the batches since then, and keeps the
failed steps on separate branches.
"""

from __future__ import annotations

import math
import sys

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import datastates
from datastates import PermutationSampler
from datastates.demo.outliers import load

BATCH = 32


def build(pixels: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small classifier and what trains it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 10),
    )
    return model, torch.optim.Adam(model.parameters(), lr=3e-3)


def main(folder: str, steps: int) -> None:
    """Train with two failures, and show what the lineage has recorded."""
    console = Console(soft_wrap=True)
    torch.set_num_threads(1)
    images, labels, name = load(1600)
    model, optimizer = build(images[0].numel())
    sampler = PermutationSampler(len(images))
    broken, hot = steps // 3, 2 * steps // 3
    console.print(
        f"{name}; batch {broken} is NaN, after batch {hot} the update is 1000 times too large"
    )

    with (
        datastates.open(folder) as repo,
        repo.track(model=model, optimizer=optimizer, sampler=sampler, batches=0) as run,
    ):
        guard = run.guard(keep=["batches"])
        for rows in run.steps(sampler.batches(BATCH, epochs=None)):
            batch = run.values["batches"] = int(str(run.values["batches"])) + 1
            inputs = images[rows] * (math.nan if batch == broken else 1.0)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels[rows])
            loss.backward()
            optimizer.param_groups[0]["lr"] = 3.0 if batch == hot else 3e-3
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 3e-3

            if guard.rewound(loss):
                rewind = guard.rewinds[-1]
                console.print(
                    f"step {rewind.step}: the loss {rewind.problem}; back at step"
                    f" {rewind.good.step}, see {rewind.branch}"
                )
                continue
            run.capture(metrics={"loss": loss.item()})
            if run.step >= steps:
                break

        losses = [state.metrics["loss"] for state in repo.log("main", limit=10)]
        console.print(
            f"step {run.step}: mean loss {sum(losses) / len(losses):.3f} of the last {len(losses)}"
            " steps"
        )
        for rewind in guard.rewinds:
            console.print(f"\n{rewind.branch}")
            for state in repo.log(rewind.branch, limit=rewind.step - rewind.good.step + 1):
                console.print(
                    f"  step {state.step:4}  loss {state.metrics['loss']:<8.3g}"
                    f" {state.message or ''}".rstrip()
                )
    console.print(f"\nlook at it: datastates log --all --repo {folder}")


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/rewind",
        int(sys.argv[2]) if len(sys.argv) > 2 else 240,
    )
