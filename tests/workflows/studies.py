"""Trainings that the tests of explorers run: a small model on scikit-learn's digits, in whatever process they are sent to."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import datastates
from datastates import Config, PermutationSampler, Repository
from datastates.workflows import Plan, Variant
from datastates.workflows.job import Job

ROWS = 400
BATCH = 50
CONFIG = Config(memory_bytes=96 << 20, durable_interval_s=None)


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels."""
    data = load_digits()
    return torch.tensor(data.data[:ROWS] / 16, dtype=torch.float32), torch.tensor(data.target[:ROWS])


def build(config: Any) -> tuple[nn.Module, torch.optim.Optimizer, PermutationSampler]:
    """A model that draws random numbers while it trains."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    return model, torch.optim.Adam(model.parameters(), lr=config.get("lr", 1e-2)), PermutationSampler(ROWS, seed=3)


def one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, sampler: PermutationSampler, run: Any) -> float:
    """Every row once; the loss of the last batch."""
    x, y = digits()
    loss = torch.zeros(())
    for rows in run.steps(sampler.batches(BATCH)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def prefix(folder: str | Path, *, packs: str | Path | None = None, config: Config = CONFIG) -> Repository:
    """A repository whose branch ``main`` was trained for an epoch; it is left open."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    repo = datastates.open(folder, packs=packs, config=config)
    model, optimizer, sampler = build({})
    with repo.track(model=model, optimizer=optimizer, sampler=sampler) as run:
        loss = one_epoch(model, optimizer, sampler, run)
        run.capture(metrics={"loss": loss})
    return repo


def train(job: Job) -> None:
    """What every test trains unless it says otherwise."""
    model, optimizer, sampler = build(job.config)
    run = job.track(model=model, optimizer=optimizer, sampler=sampler)
    if job.is_new:
        for group in optimizer.param_groups:
            group["lr"] = job.config.get("lr", 1e-2)
    for _ in job.epochs():
        job.report(loss=one_epoch(model, optimizer, sampler, run))


def tree(epochs: int = 2) -> Plan:
    """Five variants on two levels; two of them with seeds of their own."""
    return Plan(
        (
            Variant("low", None, epochs, {"lr": 1e-3}),
            Variant("high", None, epochs, {"lr": 3e-2}),
            Variant("low-a", "low", 1, {"seed": 1}),
            Variant("low-b", "low", 1, {"seed": 2}),
            Variant("high-a", "high", 1, {}),
        )
    )


def essence(repo: Repository, study: str, plan: Plan) -> dict[str, list[tuple[str, int, dict[str, float]]]]:
    """What two runs of a study must have in common, bit for bit: by variant its states' digests, steps and metrics since the start."""
    start = repo.state(f"start/{study}")
    found = {}
    for variant in plan.variants:
        path = repo.log(f"done/{study}/{variant.name}")
        own = path[: [state.uid for state in path].index(start.uid)]
        found[variant.name] = [(state.digest, state.step, state.metrics) for state in own]
    return found
