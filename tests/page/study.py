"""A study of sixty variants over a tiny model, forked from a shared prefix: what comparing is
looked at and tested with.

python -m tests.page.study FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import datastates
from datastates.studies import Job, explore, grid
from datastates.studies.executors import SerialExecutor
from datastates.values import Value

STUDY = "sweep"
GRID: dict[str, Sequence[Value]] = {
    "lr": [0.001, 0.003, 0.01, 0.03, 0.1],
    "weight_decay": [0.0, 0.01, 0.1],
    "dropout": [0.0, 0.3],
    "activation": ["relu", "tanh"],
}
FEATURES, CLASSES = 16, 4


class Net(nn.Module):
    """A classifier whose activation and dropout a variant may choose."""

    def __init__(self, activation: str, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 24)
        self.last = nn.Linear(24, CLASSES)
        self.activation = {"relu": torch.relu, "tanh": torch.tanh}[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.last(self.dropout(self.activation(self.first(inputs))))
        return logits


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy enough that variants differ."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, FEATURES, generator=generator)
    rule = torch.randn(FEATURES, CLASSES, generator=generator)
    return inputs, (inputs @ rule + 2 * torch.randn(256, CLASSES, generator=generator)).argmax(1)


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """One pass over most samples; the rest tells how well."""
    inputs, labels = samples()
    model.train()
    for start in range(0, 192, 48):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(inputs[start : start + 48]), labels[start : start + 48]
        )
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(inputs[192:])
        val_loss = float(nn.functional.cross_entropy(logits, labels[192:]))
    accuracy = float((logits.argmax(1) == labels[192:]).double().mean())
    return {"loss": float(loss.detach()), "val_loss": val_loss, "val_accuracy": accuracy}


def train(job: Job) -> None:
    """One variant."""
    model = Net(str(job.config["activation"]), float(job.config["dropout"] or 0))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=float(job.config["lr"] or 0),
        weight_decay=float(job.config["weight_decay"] or 0),
    )
    job.track(model=model, optimizer=optimizer)
    for _ in job.epochs():
        job.report(**epoch(model, optimizer))


def study(folder: Path) -> None:
    """``main`` has four epochs, the last of them tagged ``warm``; each variant of ``sweep`` goes
    on from there for two."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config: dict[str, Value] = {
        "lr": 0.005,
        "weight_decay": 0.0,
        "dropout": 0.1,
        "activation": "relu",
        "width": 24,
        "batch": 48,
    }
    with datastates.open(folder, memory_bytes=128 << 20) as repo:
        model = Net("relu", 0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.0)
        with repo.track(model=model, optimizer=optimizer, config=config) as run:
            for _ in range(4):
                run.capture(metrics=epoch(model, optimizer))
        repo.tag("warm", "main")
        explore(
            repo,
            "warm",
            grid(GRID, epochs=2),
            train,
            SerialExecutor(),
            study=STUDY,
            config=config,
            progress=False,
        )


if __name__ == "__main__":
    study(Path(sys.argv[1]))
