"""A repository with forks, grown by real small trainings: what the panels are looked at and
tested with."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import nn

import datastates
from datastates import Repository

FEATURES, CLASSES = 16, 4


class Net(nn.Module):
    """A small classifier whose output layer is the embedding of the classes, shared twice."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 64),
            nn.BatchNorm1d(64),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(64, 32),
        )
        self.classes = nn.Embedding(CLASSES, 32)
        self.head = nn.Linear(32, CLASSES, bias=False)
        self.head.weight = self.classes.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.head(self.body(inputs))
        return logits


def samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around a centre for each class, noisy enough that nothing is learned at once."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return centres[labels] + 1.6 * torch.randn(count, FEATURES, generator=generator), labels


def train(
    repo: Repository,
    branch: str,
    steps: int,
    *,
    start: str | None = None,
    lr: float = 0.02,
    dropout: float = 0.1,
) -> None:
    """Train and capture every step, with a loss; with validation every fifth."""
    torch.manual_seed(11)
    model = Net(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    inputs, labels = samples(5, 256)
    with repo.track(
        model=model,
        optimizer=optimizer,
        branch=branch,
        start=start,
        durable_every=1,
        lr=lr,
        dropout=dropout,
    ) as run:
        for group in optimizer.param_groups:
            group["lr"] = lr
        for _ in range(steps):
            model.train()
            chosen = torch.randint(0, 200, (24,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            step = run.step + 1
            metrics = {"loss": float(loss.detach()), "lr": lr}
            if step % 5 == 0:
                metrics |= validate(model, inputs[200:], labels[200:])
            run.capture(
                metrics=metrics,
                attributes={"variant": branch, "dropout": dropout},
                message=f"epoch {step // 20}" if step % 20 == 0 else None,
            )


def validate(model: Net, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Loss and accuracy on what is not trained on."""
    model.eval()
    with torch.no_grad():
        logits = model(inputs)
    loss = float(nn.functional.cross_entropy(logits, labels))
    return {
        "val/loss": loss,
        "val/accuracy": float((logits.argmax(1) == labels).double().mean()),
        "val/perplexity": math.exp(min(loss, 20)),
    }


def grow(folder: Path, length: int = 60) -> None:
    """``main`` has ``length`` steps, ``warm`` at a third; ``no-dropout`` and ``hot`` fork there,
    ``hot/cooler`` from ``hot``; a merge."""
    torch.set_num_threads(1)
    third = length // 3
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        train(repo, "main", length)
        repo.tag("warm", f"main@step:{third}", message="end of the shared prefix")
        train(repo, "no-dropout", length - third, start="warm", dropout=0.0)
        train(repo, "hot", length - third, start="warm", lr=0.15)
        train(repo, "hot/cooler", third, start=f"hot@step:{2 * third}", lr=0.005)
        repo.merge(
            ["main", "no-dropout"],
            into="soup",
            tag="best-of-two",
            message="mean of main and no-dropout",
        )


def obey(folder: Path, branch: str, start: str | None) -> None:
    """A step for each line that comes in; says the uid of each state once it is recorded."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = Net(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs, labels = samples(5, 256)
    with (
        datastates.open(folder, memory_bytes=64 << 20) as repo,
        repo.track(model=model, optimizer=optimizer, branch=branch, start=start) as run,
    ):
        for _ in sys.stdin:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            taken = run.capture(metrics={"loss": float(loss.detach())}).wait("captured")
            sys.stdout.write(f"{taken.uid}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        grow(Path(sys.argv[1]))
    else:
        obey(Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None)
