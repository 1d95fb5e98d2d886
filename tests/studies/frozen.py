"""A fine-tuning whose model is frozen to four fifths, and its variants; in this process and, as
a script's target, in others."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import datastates
from datastates import Config, Tracker

STUDY = "fine"


def make(seed: int, *, is_frozen: bool = True) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """20 MiB of parameters, of which the last layer's 4 MiB are trained; or all."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(5)))
    model[:4].requires_grad_(not is_frozen)
    return model, torch.optim.SGD(
        [each for each in model.parameters() if each.requires_grad], lr=0.1
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change every trained parameter."""
    optimizer.zero_grad()
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()


def open_at(folder: Path) -> datastates.Repository:
    """Nothing becomes durable but tags and heads."""
    return datastates.open(folder, config=Config(memory_bytes=128 << 20, durable_interval_s=None))


def begin(folder: Path, *, is_frozen: bool = True) -> None:
    """The start, as the study's tag."""
    with open_at(folder) as repo:
        model, optimizer = make(0, is_frozen=is_frozen)
        with repo.track(model=model, optimizer=optimizer) as run:
            step(model, optimizer)
            run.capture().wait("durable")
        repo.tag(f"start/{STUDY}", "main")


def fork(repo: datastates.Repository, number: int, start: str = f"start/{STUDY}") -> Tracker:
    """One variant with one epoch reported."""
    model, optimizer = make(100 + number)
    run = repo.track(
        model=model, optimizer=optimizer, branch=f"{STUDY}/{number}", start=start, strict=False
    )
    torch.manual_seed(number)
    step(model, optimizer)
    run.capture(attributes={"study": STUDY, "variant": str(number), "epoch": 1})
    return run


def fork_alone(folder: Path, number: int) -> None:
    """One variant by a repository of its own, as a worker's first."""
    torch.set_num_threads(1)
    with open_at(folder) as repo, fork(repo, number):
        pass
