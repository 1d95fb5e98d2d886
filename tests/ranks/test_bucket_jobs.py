"""A job whose packs are in a bucket goes on when a node, and its folder, are gone."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import datastates
from datastates import Config
from datastates.maintenance import further
from tests.support.hosts import hosts, need_hosts
from tests.support.jobs import Say, job, run
from tests.support.stores import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from tests.support.hosts import Host
    from tests.support.stores import S3Server

HERE = "tests.ranks.test_bucket_jobs"
_numbers = count()


def opened(lineage: str, url: str, folder: str) -> datastates.Repository:
    """The repository, with the node's own folder for packs."""
    config = Config(memory_bytes=64 << 20, group_patience_s=20.0)
    return datastates.open(lineage, packs=url, scratch=folder, config=config)


def step_on(weight: torch.Tensor) -> None:
    """One step, which depends on everything before it."""
    weight.mul_(1.01).add_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(7)))


def losses(weight: torch.Tensor, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        step_on(weight)
        found.append(float(weight.sum()))
    return found


def train(lineage: str, url: str, folders: list[str], say: Say) -> None:
    """Put three states into the bucket and make two more durable; then the nodes are killed."""
    weight = torch.zeros(4000)
    with opened(lineage, url, folders[dist.get_rank()]) as repo:
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


def go_on(lineage: str, url: str, folders: list[str], say: Say) -> None:
    further._OBSERVED_S = 4.0
    weight = torch.zeros(4000)
    with opened(lineage, url, folders[dist.get_rank()]) as repo:
        training = repo.track(weight=weight, rng=False)
        say(training.step, losses(weight, 3))
        training.capture().wait("external", 60)


def resume(lineage: str, url: str, folder: Path, hosts: Sequence[Host] = ()) -> None:
    """A job trains on two nodes. One folder is deleted, and the job continues on two others."""
    nodes = [str(folder / f"node-{index}") for index in range(4)]
    places: dict[str, Any] = {"lineage": lineage, "url": url}
    with job(2, f"{HERE}:train", on=hosts[:2], folders=nodes[:2], **places) as ranks:
        assert ranks.said() == [["killed"]] * 2
    shutil.rmtree(nodes[1])
    expected = losses(torch.zeros(4000), 6)[3:]
    said = run(2, f"{HERE}:go_on", on=hosts[2:], folders=nodes[2:], **places)
    assert said == [[f"3 {expected}"]] * 2


def let(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_job_goes_on_from_the_bucket_with_equal_losses(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let(monkeypatch, s3.environment())
    resume(str(tmp_path), f"{s3.bucket('jobs')}/run-{next(_numbers)}", tmp_path)


def test_a_job_goes_on_on_other_hosts_of_a_network(
    s3: S3Server, postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks reach each other and the bucket over the network, and PostgreSQL by its socket."""
    need_hosts()
    with hosts(5) as made, FaultyProxy(s3, made[4].listen()) as proxy:
        let(monkeypatch, s3.environment(proxy.endpoint))
        url = f"{s3.bucket('jobs')}/run-{next(_numbers)}"
        resume(postgresql_url, url, tmp_path, made[:4])
        assert made[0].sent_bytes() > 0 < made[3].received_bytes()
