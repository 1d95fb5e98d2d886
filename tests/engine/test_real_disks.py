"""File systems that are really full or really stall, and a PostgreSQL server that stops: every loss
is that of the undisturbed training.

Nothing that was called durable is lost, and all that is kept becomes durable once what is below is
well again.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import datastates
from datastates import Capture, Config, Repository, Status
from datastates.engine import outbox, runner, scheduler, writer
from datastates.state.manifest import CHUNK_BYTES
from tests.support.effort import effort

if TYPE_CHECKING:
    from tests.conftest import Postgresql

STEPS = 40
Between = Callable[[int], None]


class Job:
    """A training with a capture after each step.

    ``between`` is called before each; all that was captured is in ``captures``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(256, 256)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.captures: list[Capture] = []
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.model(torch.randn(8, 256)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self, repo: datastates.Repository, between: Between) -> datastates.Tracker:
        run = repo.track(model=self.model, optimizer=self.optimizer)
        for number in range(STEPS):
            between(number)
            self.step()
            self.captures.append(run.capture(metrics={"loss": self.losses[-1]}))
        return run


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    job = Job()
    for _ in range(STEPS):
        job.step()
    return job.losses


@contextmanager
def mounted(folder: Path, *what: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(
        ["mount", *what, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """40 MiB in memory."""
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=40m", "tmpfs") as folder:
        yield folder


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A file system on a loop device, which can be frozen: whoever writes then waits in the
    kernel."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    if shutil.which("mkfs.ext4") is None or shutil.which("fsfreeze") is None:
        pytest.skip("a file system that stalls needs mkfs.ext4 and fsfreeze")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    with mounted(tmp_path / "stalling", "-o", "loop", str(image)) as folder:
        try:
            yield folder
        finally:
            subprocess.run(["fsfreeze", "-u", str(folder)], check=False, capture_output=True)


def config(*, every: int = 2, memory: int = 16) -> Config:
    return Config(
        memory_bytes=memory * CHUNK_BYTES,
        durable_interval_s=None,
        durable_every=every,
        retention="all",
    )


def check(folder: Path | str, job: Job, promised: set[str], packs: Path | None = None) -> None:
    """What was called durable, by the handles and before, is there in another process's eyes;
    the head is the last step."""
    with datastates.open(folder, packs=packs) as repo:
        log = {state.uid: state for state in repo.log("main")}
        assert max(state.step for state in log.values()) == STEPS
        assert repo.state("main").uid == job.captures[-1].uid
        for uid in promised:
            assert log[uid].status is Status.DURABLE
            weight = repo.load(uid)["model"]["weight"]
            assert weight.shape == (256, 256)
        assert torch.equal(repo.load("main")["model"]["weight"], job.model.weight.detach())


def promised_by(job: Job) -> set[str]:
    return {capture.uid for capture in job.captures if capture.status is Status.DURABLE}


def wait_for_trouble(repo: Repository) -> None:
    """Until it is said that states cannot be written."""
    deadline = time.monotonic() + 60
    while repo.trouble is None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@pytest.mark.parametrize("lies", ["with its lineage", "apart"])
def test_a_disk_that_is_really_full_for_a_while(
    tmp_path: Path,
    small_disk: Path,
    undisturbed: list[float],
    lies: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "LAST_RETRY_S", 0.2)
    folder, packs = (
        (small_disk / "runs", None)
        if lies == "with its lineage"
        else (tmp_path / "runs", small_disk)
    )
    filler, job = small_disk / "filler", Job()
    before: set[str] = set()

    def fill(number: int) -> None:
        if number == 5:
            job.captures[-1].wait("durable", timeout_s=60)
            before.update(promised_by(job))
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

    with datastates.open(folder, packs=packs, config=config()) as repo:
        run = job.train(repo, fill)
        assert job.losses == undisturbed
        wait_for_trouble(repo)
        assert repo.trouble is not None
        assert "No space left" in repo.trouble or "full" in repo.trouble
        filler.unlink()
        assert job.captures[-1].wait("durable", timeout_s=60).step == STEPS
        assert before <= promised_by(job)
        run.close()
        assert repo.trouble is None
    assert len(promised_by(job)) >= 4
    check(folder, job, promised_by(job), packs)


def test_a_file_system_that_really_stalls(
    tmp_path: Path, ext4: Path, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "STALL_S", 0.5)
    job = Job()
    with datastates.open(tmp_path / "runs", packs=ext4, config=config(memory=6)) as repo:

        def freeze(number: int) -> None:
            if number == 5:
                job.captures[-1].wait("durable", timeout_s=60)
                subprocess.run(["fsfreeze", "-f", str(ext4)], check=True)

        run = job.train(repo, freeze)
        assert job.losses == undisturbed
        assert run.head is not None
        assert run.head.step == STEPS
        wait_for_trouble(repo)
        assert repo.trouble is not None
        assert "has made no progress for" in repo.trouble
        assert str(ext4) in repo.trouble
        before = promised_by(job)
        subprocess.run(["fsfreeze", "-u", str(ext4)], check=True)
        assert job.captures[-1].wait("durable", timeout_s=60).step == STEPS
        assert before <= promised_by(job)
        run.close()
    check(tmp_path / "runs", job, promised_by(job), ext4)


def test_a_database_server_that_stops_for_a_while(
    tmp_path: Path,
    mortal_postgresql: Postgresql,
    undisturbed: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "CHECK_EVERY_S", 0.05)
    job, packs = Job(), tmp_path / "packs"
    url = mortal_postgresql.migrated()
    away_s = float(effort(20, 2))
    again = threading.Timer(away_s, mortal_postgresql.start_again)

    def stop(number: int) -> None:
        if number == 10:
            job.captures[-1].wait(timeout_s=60)
            mortal_postgresql.stop()
            again.start()

    with datastates.open(url, packs=packs, config=config(memory=64)) as repo:
        began = time.monotonic()
        run = job.train(repo, stop)
        assert job.losses == undisturbed
        assert time.monotonic() - began < away_s + outbox.PATIENCE_S / 2
        again.join()
        assert job.captures[-1].wait("durable", timeout_s=outbox.PATIENCE_S).step == STEPS
        assert [capture.wait(timeout_s=60).step for capture in job.captures] == list(
            range(1, STEPS + 1)
        )
        run.close()
    check(url, job, promised_by(job), packs)
