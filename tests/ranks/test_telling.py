"""The first rank of a node tells the lineage what all of its ranks have to tell; without it each tells by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.config import Config
from datastates.errors import Unavailable
from datastates.modules.telling import Heard, Said, Teller
from datastates.transport.session import desk
from datastates.transport.session.desk import Asked
from tests.support.jobs import Say, job, run

HERE = "tests.ranks.test_telling"
SIZE = 3


def counted() -> list[int]:
    """How many ranks' words each transaction of this process tells, from now on."""
    found: list[int] = []
    transact = Teller._transact

    def counting(teller: Teller, said: Sequence[Said], asked: Sequence[Asked] = ()) -> list[Heard]:
        found.append(len(said))
        return transact(teller, said, asked)

    replaced: Any = counting
    Teller._transact = replaced  # type: ignore[method-assign]  # this process ends with the test
    return found


def train(url: str, packs: str, say: Say, steps: int) -> None:
    """Capture, wait for each state, and say how many transactions that took here."""
    transactions, model = counted(), torch.nn.Linear(4, 4)
    with datastates.open(url, packs=packs, memory_bytes=64 << 20) as repo:
        run = repo.track(model=model, durable_interval_s=None)
        for _ in range(steps):
            say("whole", run.capture().wait(timeout_s=60).uid)
        run.capture().wait("durable", timeout_s=60)
        say("told", len(transactions), max(transactions, default=0))
        torch.distributed.barrier()


def lose(url: str, packs: str, say: Say, pid_of_first: str, is_stopping: bool) -> None:
    """Capture on and on, until rank 0 is killed, or stands still; and then once more."""
    rank = torch.distributed.get_rank()
    desk.ANSWER_S = 1.0
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
    return str(request.getfixturevalue("postgresql_url")) if request.param == "postgresql" else str(tmp_path / "runs")


@pytest.mark.in_turn("telling")
def test_one_rank_of_a_node_tells_for_all(url: str, tmp_path: Path) -> None:
    said = run(SIZE, f"{HERE}:train", url=url, packs=str(tmp_path / "packs"), steps=5)
    assert said[0][:5] == said[1][:5] == said[2][:5]
    told = [[int(word) for word in lines[5].split()[1:]] for lines in said]
    assert told[1:] == [[0, 0]] * (SIZE - 1), "the others told nothing by themselves"
    assert told[0][1] > 1, "several ranks in one transaction"


@pytest.mark.in_turn("telling")
@pytest.mark.parametrize("is_stopping", [False, True], ids=["killed", "stopped"])
def test_without_the_one_that_tells_each_rank_tells_by_itself(url: str, tmp_path: Path, is_stopping: bool) -> None:
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
