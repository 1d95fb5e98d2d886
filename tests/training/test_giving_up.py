"""Ctrl-C while a close waits for what is being written: that is given up, nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Repository, Status, Tracker
from datastates.engine.runner import Runner


class Writer:
    """A writer thread that is in the middle of a write until ``go_on``."""

    def __init__(self) -> None:
        self.is_writing, self.go_on = threading.Event(), threading.Event()

    def on_step(self, name: str) -> None:
        self.is_writing.set()
        assert self.go_on.wait(60)


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.go_on.set()


@pytest.fixture
def repo(tmp_path: Path, writer: Writer) -> Iterator[Repository]:
    with datastates.open(
        tmp_path,
        config=Config(memory_bytes=64 << 20, durable_interval_s=None, on_step=writer.on_step),
    ) as repo:
        yield repo
        writer.go_on.set()


def give_up(run: Tracker, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close it, with Ctrl-C while that waits for a write."""
    drain = Runner.drain

    def interrupted(
        self: Runner, on_wait: Callable[[int], None] | None = None, copies_s: float | None = None
    ) -> None:
        def interrupt(pending: int) -> None:
            raise KeyboardInterrupt

        assert writer.is_writing.wait(60)
        drain(self, interrupt)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.close()


def test_a_write_that_was_given_up_is_no_error_of_the_close(
    repo: Repository, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = repo.track(weight=torch.zeros(3), rng=False)
    run.capture()
    give_up(run, writer, monkeypatch)
    repo.close()
    runner = repo.core.engage().runner
    writer.go_on.set()  # only now, as its tier is closed
    for thread in runner._threads:
        thread.join(60)
    assert runner.in_flight.errors() == []
    run.close()
    with datastates.open(repo.location.packs.parent) as again:
        assert all(each.finished_at is not None for each in again.runs())


def test_a_branch_whose_head_was_given_up_goes_back_when_the_repository_is_closed(
    repo: Repository, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = repo.track(weight=torch.zeros(3), rng=False)
    writer.go_on.set()
    kept = run.capture().wait("durable")
    writer.go_on.clear()
    writer.is_writing.clear()
    given_up = run.capture()
    give_up(run, writer, monkeypatch)
    repo.close()
    assert not writer.go_on.is_set()
    with datastates.open(repo.location.packs.parent) as again:
        assert again.state("main").uid == kept.uid
        assert again.state(given_up.uid).status is Status.EVICTED
        assert again.reflog("main")[0].old == given_up.uid


def test_what_is_captured_after_a_close_was_given_up_is_waited_for_again(
    repo: Repository, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = repo.track(weight=torch.zeros(3), rng=False)
    run.capture()
    give_up(run, writer, monkeypatch)
    writer.go_on.set()
    with repo.track(branch="next", weight=torch.ones(3), rng=False) as run:
        taken = run.capture()
    assert taken.status is Status.DURABLE


def test_what_is_tagged_after_a_close_was_given_up_is_waited_for_again(
    repo: Repository, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = repo.track(weight=torch.zeros(3), rng=False)
    first, _ = run.capture(), run.capture()
    give_up(run, writer, monkeypatch)
    writer.go_on.set()
    repo.tag("first", first.uid)
    repo.close()
    assert first.status is Status.DURABLE
