"""A job whose packs are in a bucket goes on when a node, and its folder, are gone."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import datastates
from datastates import Config
from datastates.maintenance import further
from tests.support.jobs import Say, job, run

if TYPE_CHECKING:
    import pytest

    from tests.support.stores import S3Server

HERE = "tests.ranks.test_bucket_jobs"
_numbers = count()


def opened(folder: str, url: str, node: str) -> datastates.Repository:
    config = Config(memory_bytes=64 << 20, group_patience_s=20.0)
    return datastates.open(folder, packs=url, scratch=str(Path(folder) / node), config=config)


def step_on(weight: torch.Tensor) -> None:
    """One step, which depends on everything before it."""
    weight.mul_(1.01).add_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(7)))


def losses(weight: torch.Tensor, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        step_on(weight)
        found.append(float(weight.sum()))
    return found


def train(folder: str, url: str, say: Say) -> None:
    """Put three states into the bucket and make two more durable; then the nodes are killed."""
    weight = torch.zeros(4000)
    with opened(folder, url, f"node-{dist.get_rank()}") as repo:
        training = repo.track(weight=weight, rng=False)
        for step in range(1, 6):
            step_on(weight)
            captured = training.capture()
            if step <= 3:
                captured.wait("external", 60)
            if step == 3:
                dist.barrier()
                repo.core.runner().copies.end_by(0.0)  # the bucket gets nothing more
        captured.wait("durable", 60)
        dist.barrier()
        say("killed")
        os._exit(0)


def go_on(folder: str, url: str, nodes: list[str], say: Say) -> None:
    further._OBSERVED_S = 4.0
    weight = torch.zeros(4000)
    with opened(folder, url, nodes[dist.get_rank()]) as repo:
        training = repo.track(weight=weight, rng=False)
        say(training.step, losses(weight, 3))
        training.capture().wait("external", 60)


def test_a_job_goes_on_from_the_bucket_with_equal_losses(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    url, folder = f"{s3.bucket('jobs')}/run-{next(_numbers)}", str(tmp_path)
    with job(2, f"{HERE}:train", folder=folder, url=url) as ranks:
        assert ranks.said() == [["killed"]] * 2
    shutil.rmtree(tmp_path / "node-1")
    expected = losses(torch.zeros(4000), 6)[3:]
    said = run(2, f"{HERE}:go_on", folder=folder, url=url, nodes=["node-2", "node-3"])
    assert said == [[f"3 {expected}"]] * 2
