"""Room for the next capture: what a small budget costs, and what happens when nothing can be
written to make any."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import datastates
from datastates.config import BackPressure, Config, OnFailure
from datastates.engine import memory_budget, scheduler
from datastates.errors import OverBudget, Unavailable
from datastates.lineage.states import Status
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.local import LocalTier
from datastates.training.tracker import Tracker

WORDS = 3 * CHUNK_BYTES // 4
"""A state of three slots, all of which change."""


class FullDisk:
    """An ``on_step`` that lets packs be written while there is room."""

    def __init__(self) -> None:
        self.is_full = threading.Event()

    def __call__(self, step: str) -> None:
        if self.is_full.is_set() and step == "pack-written":
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk() -> FullDisk:
    return FullDisk()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again by the next capture, not seconds later."""
    monkeypatch.setattr(scheduler, "RETRY_S", 0.0)


def opened(
    folder: Path, states: float, disk: FullDisk | None = None, *, interval_s: float | None = None
) -> Repository:
    budget = int(states * 3) * CHUNK_BYTES
    config = Config(
        memory_bytes=budget, durable_interval_s=interval_s, on_step=disk, on_failure=OnFailure.RAISE
    )
    return datastates.open(folder, config=config)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def begin(repo: Repository, branch: str = "main") -> tuple[Tracker, torch.Tensor]:
    words = torch.arange(float(WORDS))  # no two chunks alike
    return repo.track(branch=branch, words=words, rng=False), words


def durable(folder: Path) -> int:
    return len(list(LocalTier(folder / "packs").uids()))


# --- what a small budget costs --------------------------------------------------------------------


@pytest.mark.parametrize("states", [2, 3])
def test_two_states_in_memory_are_enough_to_write_none_for_room(
    states: float, tmp_path: Path
) -> None:
    with opened(tmp_path, states) as repo:
        run, words = begin(repo)
        for _ in range(30):
            words += 1
            run.capture()
        run.training.runner.drain()
        assert durable(tmp_path) == 0
    assert durable(tmp_path) == 1, "the head at the end"


@pytest.mark.parametrize("states", [1, 1.67, 2, 3])
def test_captures_without_a_pause_write_no_more_than_the_cadence_asks_for(
    states: float, tmp_path: Path
) -> None:
    with opened(tmp_path, states, interval_s=3600.0) as repo:
        run, words = begin(repo)
        for _ in range(30):
            words += 1
            run.capture()
        assert run.head is not None
        assert run.head.step == 30
        assert durable(tmp_path) == 1
        assert torch.equal(repo.load("main")["words"], words)
    assert durable(tmp_path) == 2, "the first, and the head at the end"


def test_the_budget_that_a_refusal_names_is_enough(tmp_path: Path) -> None:
    with opened(tmp_path, 0.5) as repo:
        run, _ = begin(repo)
        with pytest.raises(OverBudget, match="memory_bytes of at least") as refused:
            run.capture()
    said = int(str(refused.value).split("at least ")[1].split()[0])
    with datastates.open(
        tmp_path, config=Config(memory_bytes=said, durable_interval_s=3600.0)
    ) as repo:
        run, words = begin(repo)
        for _ in range(30):
            words += 1
            run.capture()
        run.head  # noqa: B018  # all are recorded
        assert durable(tmp_path) == 1


def test_two_branches_that_fill_memory_go_on_without_a_write_for_each_capture(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 2, interval_s=3600.0) as repo:
        first, words = begin(repo)
        second, others = begin(repo, "second")
        for step in range(1, 16):
            words += 1
            others -= 1
            for run in (first, second):
                run.capture()
                assert run.head is not None
                assert run.head.step == step
        assert durable(tmp_path) == 2
        assert torch.equal(repo.load("second")["words"], others)


def test_a_budget_without_a_second_state_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), opened(tmp_path, 1, interval_s=3600.0) as repo:
        run, words = begin(repo)
        for _ in range(5):
            words += 1
            run.capture()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("memory holds one state of 12 MiB and no second one")
    assert str(9 * CHUNK_BYTES) in said


# --- what states take beside their slots ----------------------------------------------------------


def in_memory(repo: Repository) -> list[str]:
    assert repo.core.tiers.captured is not None
    return list(repo.core.tiers.captured.uids())


def test_plain_values_and_small_arrays_count(tmp_path: Path) -> None:
    with opened(tmp_path, 2) as repo:  # six slots
        array = np.arange(7500.0)  # 60,000 bytes: no tensor of it is made
        run = repo.track(state={"array": array, "text": "x" * 1_000_000}, rng=False)
        for _ in range(40):
            array += 1
            run.capture()
        repo.flush()
        assert 2 <= len(in_memory(repo)) <= 28, "a megabyte each, in 24"
        assert repo.core.tiers.captured is not None
        assert repo.core.tiers.captured.bytes_beside <= 7 * CHUNK_BYTES
        assert run.head is not None
        assert repo.load("main")["state"]["array"][0] == 40.0


def test_captures_without_tensors_find_no_room_while_the_disk_is_slow(tmp_path: Path) -> None:
    go_on = threading.Event()

    def slow(step: str) -> None:
        assert go_on.wait(60)

    config = Config(
        memory_bytes=3 * CHUNK_BYTES,
        durable_interval_s=None,
        durable_every=1,
        back_pressure=BackPressure.SKIP,
        on_step=slow,
    )
    with datastates.open(tmp_path, config=config) as repo:
        run = repo.track(text="x" * 3_000_000, rng=False)
        captures = []
        for _ in range(12):
            captures.append(run.capture())
            repo.flush()
        held = in_memory(repo)
        go_on.set()
        assert len(held) <= 6
        assert [capture.is_skipped for capture in captures] == [False] * len(held) + [True] * (
            12 - len(held)
        )
        run.close()
        assert durable(tmp_path) == len(held)


def test_a_model_that_does_not_change_is_not_held_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastates.storage.memory.STATE_BYTES", 1 << 20)
    with opened(tmp_path, 3) as repo:
        run, words = begin(repo)
        for _ in range(200):
            run.capture().wait(timeout_s=60)
        assert 10 <= len(in_memory(repo)) <= 30, "a megabyte each, in 24 and 4"
        assert torch.equal(repo.load("main")["words"], words)
        assert durable(tmp_path) == 0


def test_captures_that_nobody_has_recorded_yet_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "_MOST_IN_FLIGHT", 3)
    with opened(tmp_path, 3) as repo:
        run = repo.track(value=1, rng=False)
        most = 0
        for _ in range(50):
            run.capture()
            most = max(most, run.training.core.engage().runner.rounds.in_flight)
        assert 1 <= most <= 3
        assert run.head is not None
        assert run.head.step == 50


# --- nothing can be written, and the training wants to be told (``test_full_disk`` has the default)


def test_a_full_disk_ends_the_wait_for_room_and_captures_go_on_when_it_has_room(
    tmp_path: Path, disk: FullDisk
) -> None:
    disk.is_full.set()
    with opened(tmp_path, 1.67, disk) as repo:
        run, words = begin(repo)
        kept = run.capture().wait()
        for _ in range(3):
            words += 1
            with pytest.raises(
                OverBudget,
                match=(
                    rf"no room for a state of 12 MiB.*{kept.uid}.*No space left on device.*delete"
                    r" tags"
                ),
            ) as refused:
                run.capture()
            assert isinstance(refused.value.__cause__, Unavailable)
        assert repo.state("main").uid == kept.uid
        assert torch.equal(repo.load("main")["words"], torch.arange(float(WORDS)))
        disk.is_full.clear()
        head = run.capture().wait()
        assert head.parents == (kept.uid,)
        assert repo.state(kept.uid).status is Status.DURABLE
        assert torch.equal(repo.load("main")["words"], words)


def test_memory_full_of_tagged_states_that_cannot_be_written_refuses_and_goes_on_later(
    tmp_path: Path, disk: FullDisk
) -> None:
    disk.is_full.set()
    with opened(tmp_path, 3, disk) as repo:
        run, words = begin(repo)
        for name in ("one", "two", "three"):
            words += 1
            repo.tag(name, run.capture().wait())
            _swallow(run)
        with pytest.raises(OverBudget, match="memory is full with 3 states"):
            run.capture()
        repo.delete_ref("two")
        words += 1
        _swallow(run)
        assert run.capture().wait().step == 5, "what nobody names gives way"
        disk.is_full.clear()
        _swallow(run)
        words += 1
        assert run.capture().wait().step > 5
        for name, value in (("one", 1.0), ("three", 3.0)):
            assert repo.load(name)["words"][0] == value
    with datastates.open(tmp_path) as repo:
        assert {repo.state(name).status for name in ("one", "three", "main")} == {Status.DURABLE}


def _swallow(run: Tracker) -> None:
    """A write that failed in the background is told by the next capture: not what is tested
    here."""
    run.training.runner.drain()
    run.training.line.error = None
