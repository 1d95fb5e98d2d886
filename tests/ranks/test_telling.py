"""The ranks of a job tell the lineage what each of them captured, and go on without one that is
killed or stands still."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.config import Config
from datastates.errors import Unavailable
from tests.support.jobs import Say, job, run

HERE = "tests.ranks.test_telling"
SIZE = 3


def train(url: str, packs: str, say: Say, steps: int) -> None:
    """Capture, and wait for each state."""
    with datastates.open(url, packs=packs, memory_bytes=64 << 20) as repo:
        run = repo.track(model=torch.nn.Linear(4, 4), durable_interval_s=None)
        for _ in range(steps):
            say("whole", run.capture().wait(timeout_s=60).uid)
        say("durable", run.capture().wait("durable", timeout_s=60).uid)
        torch.distributed.barrier()


def lose(url: str, packs: str, say: Say, pid_of_first: str, is_stopping: bool) -> None:
    """Capture on and on, until rank 0 is killed, or stands still; and then once more."""
    rank = torch.distributed.get_rank()
    config = Config(memory_bytes=64 << 20, durable_interval_s=None, group_patience_s=5.0)
    with datastates.open(url, packs=packs, config=config) as repo:
        run = repo.track(model=torch.nn.Linear(4, 4))
        taken = run.capture().wait("durable", timeout_s=60)
        if is_stopping:
            if rank == 0:
                Path(pid_of_first).write_text(str(os.getpid()))
            torch.distributed.barrier()
            if rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            while not is_stopped(int(Path(pid_of_first).read_text())):
                os.sched_yield()
        say("whole", taken.uid)
        try:
            while True:
                run.capture().wait(timeout_s=60)
        except Unavailable as error:
            say("given up", error)
        assert run.head is not None
        say("head", run.head.step >= taken.step)


def is_stopped(pid: int) -> bool:
    """Whether a process stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        str(request.getfixturevalue("postgresql_url"))
        if request.param == "postgresql"
        else str(tmp_path / "runs")
    )


def test_every_rank_hears_of_every_state(url: str, tmp_path: Path) -> None:
    said = run(SIZE, f"{HERE}:train", url=url, packs=str(tmp_path / "packs"), steps=5)
    assert said[0] == said[1] == said[2]
    assert len(set(said[0])) == 6


@pytest.mark.parametrize("is_stopping", [False, True], ids=["killed", "stopped"])
def test_without_one_rank_the_others_give_up_what_it_has_not_told(
    url: str, tmp_path: Path, is_stopping: bool
) -> None:
    given: dict[str, Any] = {
        "url": url,
        "packs": str(tmp_path / "packs"),
        "pid_of_first": str(tmp_path / "pid"),
        "is_stopping": is_stopping,
    }
    with job(SIZE, f"{HERE}:lose", **given) as ranks:
        for rank in range(1 if is_stopping else 0, SIZE):
            ranks.heard(rank, "whole")
        if not is_stopping:
            ranks.kill(0)
        for rank in range(1, SIZE):
            assert "because of rank 0 (late)" in ranks.heard(rank, "given up")
            assert ranks.heard(rank, "head") == "head True"
