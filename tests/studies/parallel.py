"""Trainings of several ranks that tests of studies run: a model that FSDP2 shards over them, on
scikit-learn's digits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import datastates
from datastates import PermutationSampler, Repository
from datastates.ranks import Group
from datastates.studies import Job
from datastates.studies.records import Outcome
from tests.studies.studies import EVERY_STATE, ROWS, meet, one_epoch
from tests.support.jobs import Say

RANKS = "DATASTATES_TEST_RANKS"


def build(
    group: Group, rate: float = 1e-2
) -> tuple[nn.Module, torch.optim.Optimizer, PermutationSampler]:
    """A model that draws random numbers while it trains, sharded where there are several ranks."""
    model = nn.Sequential(nn.Linear(64, 33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 10))
    if group.size > 1:
        fully_shard(model)
    sampler = PermutationSampler(ROWS, seed=3, rank=group.rank, num_replicas=group.size)
    return model, torch.optim.Adam(model.parameters(), lr=rate), sampler


def train_prefix(folder: str, say: Say) -> None:
    """An epoch on ``main`` by all ranks."""
    with datastates.open(folder, config=EVERY_STATE) as repo:
        torch.manual_seed(5)
        group = datastates.ranks.find()
        model, optimizer, sampler = build(group)
        torch.manual_seed(5 + group.rank)
        with repo.track(model=model, optimizer=optimizer, sampler=sampler, reduce="mean") as run:
            loss = one_epoch(model, optimizer, sampler, run)
            say(run.capture(metrics={"loss": loss}).wait("durable").world_size)


def fork_by_hand(folder: str, rate: float, epochs: int, say: Say) -> None:
    """What a variant does, without a study."""
    with datastates.open(folder, config=EVERY_STATE) as repo:
        model, optimizer, sampler = build(datastates.ranks.find(), rate)
        with repo.track(
            branch="by-hand",
            start="main",
            model=model,
            optimizer=optimizer,
            sampler=sampler,
            reduce="mean",
        ) as run:
            for group in optimizer.param_groups:
                group["lr"] = rate
            run.training.loops.note_other_counter(is_between=True)
            for _ in range(epochs):
                run.capture(
                    metrics={
                        "loss": one_epoch(model, optimizer, sampler, run),
                        "draw": torch.rand(1).item(),
                    }
                )
        say("done")


def train(job: Job) -> None:
    """What tests train; each rank says that it is here, meets the faults that are planned for
    it, and reports its own rate."""
    mark(job, "begun")
    # a number
    model, optimizer, sampler = build(job.group, job.config["lr"])  # type: ignore[arg-type]
    options: dict[str, Any] = {"reduce": "each"} if job.group.size > 1 else {}
    run = job.track(model=model, optimizer=optimizer, sampler=sampler, **options)
    for epoch in job.epochs():
        loss = one_epoch(model, optimizer, sampler, run)
        meet(f"{job.variant.name}@{job.group.rank}", epoch, run)
        job.report(loss=loss, rate=optimizer.param_groups[0]["lr"], draw=torch.rand(1).item())


def hang(folder: str) -> Outcome:
    """Say that this process is here, and do nothing more."""
    (Path(folder) / str(os.getpid())).touch()
    while True:
        signal.pause()


def mark(job: Job, what: str) -> None:
    """Say which process this rank is."""
    folder = os.environ.get(RANKS)
    if folder is not None:
        (Path(folder) / f"{what}-{job.variant.name}-{job.group.rank}-{os.getpid()}").touch()


def model_of(repo: Repository, rev: str) -> dict[str, torch.Tensor]:
    """The tensors of a state's model."""
    found: dict[str, torch.Tensor] = repo.load(rev)["model"]
    return found


def pids(folder: Path, variant: str = "*") -> list[int]:
    """The processes that trained."""
    return [int(path.name.rsplit("-", 1)[1]) for path in folder.glob(f"begun-{variant}-*")]
