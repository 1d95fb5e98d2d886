"""Nothing is left half done: by an interrupt in the middle of a commit, by a commit that fails,
by a training that never began."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

import datastates
from datastates import Config, Repository, Status, Unavailable
from datastates.engine.runner import Runner
from datastates.errors import InvalidInput
from datastates.maintenance.retention_pass import evict
from tests.transport.clones.peers.pairs import Made, Training, train


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield Made(tmp_path, stack)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whoever tells the engine of a state is interrupted just before; the uids of those that it
    was told of all the same."""
    adopt, told = Runner._adopt, list[str]()

    def late(self: Runner, uid: str, *options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        adopt(self, uid, *options)
        told.append(uid)

    monkeypatch.setattr(Runner, "_adopt", late)
    return told


def held(repo: Repository) -> list[str]:
    """Uids of what is in memory and what the engine does not know of."""
    assert repo.core.tiers.captured is not None
    assert repo.core.running is not None
    return [
        uid
        for uid in repo.core.tiers.captured.uids()
        if repo.core.running.in_flight.line_of(uid) is None
    ]


def test_a_merge_that_is_interrupted_as_it_commits_is_known_to_all_or_to_none(
    made: Made, interrupted: list[str]
) -> None:
    repo = made.repo()
    run = train(repo, Training(0))
    with pytest.raises(KeyboardInterrupt):
        repo.merge(["main", "main~1"], tag="soup")
    (uid,) = interrupted
    assert repo.state(uid).status is Status.CAPTURED
    assert held(repo) == []
    repo.verify_merge(uid)
    run.close()


def test_a_clone_that_is_interrupted_as_it_lands_is_known_to_all_or_to_none(
    made: Made, interrupted: list[str]
) -> None:
    source, repo = made.repo(), made.repo()
    train(source, Training(0))
    peer = made.peer(source.serve("memory://"))
    with pytest.raises(KeyboardInterrupt):
        peer.clone("main", repo=repo)
    (uid,) = interrupted
    assert repo.state(uid).digest == source.state("main").digest
    assert held(repo) == []
    repo.verify(uid)


def test_an_eviction_whose_commit_fails_drops_nothing(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = made.repo()
    train(repo, Training(0))
    old = repo.state("main~2")
    before = repo.load(old.uid)["model"]

    def fail(self: Connection) -> None:
        raise OperationalError("COMMIT", {}, OSError("disk I/O error"))

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "commit", fail)
        with pytest.raises(Unavailable):
            evict(repo.core, old.uid)
    assert repo.state(old.uid).status is Status.CAPTURED
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in repo.load(old.uid)["model"].items()
    )
    assert evict(repo.core, old.uid) > 0
    assert repo.state(old.uid).status is Status.EVICTED


def test_a_training_that_never_began_leaves_no_line_behind(tmp_path: Path) -> None:
    with datastates.open(
        tmp_path, config=Config(memory_bytes=64 << 20, durable_interval_s=None)
    ) as repo:
        with repo.track(weight=torch.zeros(3), rng=False) as run:
            run.capture()
        with pytest.raises(InvalidInput, match="weight"):
            repo.track(weight=torch.zeros(4), rng=False)
        assert repo.core.engage().runner._engine._lines == {}
