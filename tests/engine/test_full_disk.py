"""A disk that is full, away or stalled: the training goes on, and what it captured becomes
durable when the disk is well again."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sqlalchemy import event

import datastates
from datastates import Config, OnFailure, Status, Unavailable
from datastates.engine import runner, scheduler, writer
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.testing import FaultyDatabase, FaultyDisk
from datastates.training.tracker import Tracker

WORDS = CHUNK_BYTES // 4
"""A state of one slot."""


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(scheduler, "LAST_RETRY_S", 0.01)
    monkeypatch.setattr(writer, "CLOSING_S", 0.0)
    monkeypatch.setattr(runner, "_SAY_AGAIN_S", 0.01)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    with FaultyDisk(tmp_path / "packs") as disk:
        yield disk


def opened(
    folder: Path,
    slots: int = 16,
    *,
    every: int | None = 1,
    on_failure: OnFailure = OnFailure.CONTINUE,
) -> Repository:
    config = Config(
        memory_bytes=slots * CHUNK_BYTES,
        durable_interval_s=None,
        durable_every=every,
        on_failure=on_failure,
    )
    return datastates.open(folder, config=config)


def begin(
    repo: Repository, branch: str = "main", size: int = WORDS
) -> tuple[Tracker, torch.Tensor]:
    words = torch.zeros(size)
    return repo.track(branch=branch, words=words, rng=False), words


def capture(run: Tracker, words: torch.Tensor, count: int = 1) -> list[datastates.Capture]:
    made = []
    for _ in range(count):
        words += 1
        made.append(run.capture())
    return made


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_the_training_goes_on_and_all_that_it_kept_becomes_durable(
    tmp_path: Path, disk: FaultyDisk, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as repo:
        run, words = begin(repo)
        first = capture(run, words)[0].wait("durable", timeout_s=60)
        disk.fail(number)
        handles = capture(run, words, 5)
        assert disk.is_met.wait(60)
        handles[2].wait("captured", timeout_s=60)
        with pytest.raises(
            TimeoutError,
            match=(
                r"is not durable after 0.01 s; it is captured; nothing can be written since .*wait"
                r" in memory"
            ),
        ):
            handles[2].wait("durable", timeout_s=0.01)
        assert handles[0].error is None
        assert repo.trouble is not None
        assert "as the test wants it" in repo.trouble
        assert repo.state(first.uid).status is Status.DURABLE
        disk.mend()
        assert [handle.wait("durable", timeout_s=60).step for handle in handles] == [2, 3, 4, 5, 6]
        assert repo.trouble is None
    with datastates.open(tmp_path) as repo:
        assert {state.status for state in repo.log("main")} == {Status.DURABLE}
        assert [float(repo.load(handle.uid)["words"][0]) for handle in handles] == [
            2.0,
            3.0,
            4.0,
            5.0,
            6.0,
        ]
    began, ended = said(caplog)
    assert began.startswith(
        "states cannot be written for now; the training goes on, and they wait in memory: state "
    )
    assert ended.startswith("states are written again, after ")


def test_small_states_that_share_packs_survive_a_disk_that_is_full_again_and_again(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    handles = []
    with opened(tmp_path, 128) as repo:
        run, words = begin(repo, size=25)
        for _ in range(4):
            handles += capture(run, words, 12)
            disk.is_met.clear()
            disk.fail()
            handles += capture(run, words, 12)
            assert disk.is_met.wait(60)
            disk.mend()
            handles[-1].wait("durable", timeout_s=60)
        steps = [handle.wait("durable", timeout_s=60).step for handle in handles]
        assert repo.trouble is None
    assert steps == list(range(1, len(handles) + 1))
    assert len(list((tmp_path / "packs").glob("*.manifest"))) < len(handles), "some share a file"
    with datastates.open(tmp_path) as repo:
        assert not repo.verify().damage
        assert {state.status for state in repo.log("main")} == {Status.DURABLE}
        assert [float(repo.load(handle.uid)["words"][0]) for handle in handles] == steps


def test_memory_that_fills_lets_the_oldest_go_and_keeps_the_head_and_what_tags_name(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, 6) as repo:
        run, words = begin(repo)
        first = capture(run, words)[0].wait("durable", timeout_s=60)
        disk.fail()
        kept = capture(run, words)[0]
        repo.tag("kept", kept.wait(timeout_s=60))
        handles = capture(run, words, 30)
        assert run.step == 32
        assert not any(handle.is_skipped for handle in handles)
        assert repo.trouble is not None
        assert "left it unwritten as it was full" in repo.trouble
        with pytest.raises(
            Unavailable,
            match=r"left memory, which was full, before it could be written: .*No space left",
        ):
            handles[0].wait("durable")
        assert repo.state("main").uid == handles[-1].uid
        assert float(repo.load("main")["words"][0]) == 32.0
        assert float(repo.load("kept")["words"][0]) == 2.0
        disk.mend()
        assert handles[-1].wait("durable", timeout_s=60).status is Status.DURABLE
        assert kept.wait("durable", timeout_s=60).status is Status.DURABLE
        assert repo.state(first.uid).status is Status.DURABLE
    assert len(said(caplog)) == 2


def test_memory_for_one_state_keeps_the_newest(tmp_path: Path, disk: FaultyDisk) -> None:
    with opened(tmp_path, 1) as repo:
        disk.fail()
        run, words = begin(repo)
        handles = capture(run, words, 10)
        assert run.head is not None
        assert run.head.uid == handles[-1].uid
        disk.mend()
        assert handles[-1].wait("durable", timeout_s=60).step == 10


def test_a_capture_is_skipped_when_memory_holds_only_what_may_not_give_way(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with opened(tmp_path, 1) as repo:
        disk.fail()
        run, words = begin(repo)
        repo.tag("kept", capture(run, words)[0].wait(timeout_s=60))
        (skipped,) = capture(run, words)
        assert skipped.is_skipped
        with pytest.raises(
            Unavailable, match=r"step 2 was skipped: nothing can be written since .*No space left"
        ):
            skipped.wait()
        assert repo.trouble is not None
        assert "skipped" in repo.trouble
        disk.mend()
        assert repo.state("kept").step == 1
        while (next_one := capture(run, words)[0]).is_skipped:
            assert run.step < 100_000
        assert next_one.wait("durable", timeout_s=60).parents == (repo.state("kept").uid,)


def test_whoever_wants_the_error_gets_it_at_the_next_capture(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with opened(tmp_path, on_failure=OnFailure.RAISE) as repo:
        run, words = begin(repo)
        disk.fail()
        (failed,) = capture(run, words)
        with pytest.raises(Unavailable, match="No space left"):
            failed.wait("durable", timeout_s=60)
        with pytest.raises(Unavailable, match="No space left"):
            capture(run, words)
        disk.mend()


def test_closing_says_what_is_lost_and_goes_back_to_what_is_durable(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    repo = opened(tmp_path)
    run, words = begin(repo)
    first = capture(run, words)[0].wait("durable", timeout_s=60)
    disk.fail(errno.EIO)
    capture(run, words, 2)
    with pytest.raises(
        Unavailable,
        match=(
            r"2 states are in memory only, and are lost with this process: main step 3 \(.*main"
            r" step 2 .*Input/output"
        ),
    ):
        run.close()
    with pytest.raises(Unavailable, match="2 states are in memory only"):
        repo.close()
    disk.mend()
    with datastates.open(tmp_path) as again:
        assert again.state("main").uid == first.uid


def test_a_full_disk_makes_no_new_repository_and_says_so(tmp_path: Path, disk: FaultyDisk) -> None:
    disk.fail()
    with pytest.raises(Unavailable, match=r"packs cannot be made a home of states .*No space left"):
        opened(tmp_path)
    disk.mend()
    opened(tmp_path).close()


def test_closing_writes_what_can_be_written_by_then(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSING_S", 60.0)
    with opened(tmp_path) as repo:
        run, words = begin(repo)
        disk.fail()
        capture(run, words, 3)
        assert disk.is_met.wait(60)
        threading.Timer(0.3, disk.mend).start()
    with datastates.open(tmp_path) as repo:
        assert [state.status for state in repo.log("main")] == [Status.DURABLE] * 3


# --- a disk that stalls ---------------------------------------------------------------------------


@pytest.fixture
def _soon_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "STALL_S", 0.2)


@pytest.mark.usefixtures("_soon_stalled")
def test_a_stalled_write_is_named_and_the_training_goes_on(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, 4) as repo:
        run, words = begin(repo)
        disk.stall()
        handles = capture(run, words, 20)
        assert run.head is not None
        assert run.head.step == 20
        assert repo.trouble is not None
        assert f"{tmp_path / 'packs'}/.tmp-{handles[0].uid}" in repo.trouble
        assert "has made no progress for" in repo.trouble
        disk.mend()
        assert handles[0].wait("durable", timeout_s=60).status is Status.DURABLE
        assert handles[-1].wait("durable", timeout_s=60).status is Status.DURABLE
        assert repo.trouble is None
    assert "states cannot be written for now" in said(caplog)[0]


@pytest.mark.usefixtures("_soon_stalled")
def test_closing_does_not_wait_for_a_write_that_stalls(tmp_path: Path, disk: FaultyDisk) -> None:
    repo = opened(tmp_path)
    run, words = begin(repo)
    first = capture(run, words)[0].wait("durable", timeout_s=60)
    disk.stall()
    (stalled,) = capture(run, words)
    with pytest.raises(
        Unavailable,
        match=rf"main step 2 \({stalled.uid[:10]}\) is in memory only.*has made no progress",
    ):
        run.close()
    with pytest.raises(Unavailable, match="has made no progress"):
        repo.close()
    writer = repo.core.engage().runner.writer.thread
    assert writer.is_alive()
    disk.mend()
    writer.join(60)
    with datastates.open(tmp_path) as again:
        assert again.state("main").uid in (first.uid, stalled.uid)


# --- a database that does not say a word ----------------------------------------------------------


def test_a_mute_database_stops_neither_the_training_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "STALL_S", 0.2)
    monkeypatch.setattr(writer, "STUCK_S", 0.2)
    repo = opened(tmp_path, 4, every=None)
    with FaultyDatabase(repo) as database:
        run, words = begin(repo)
        capture(run, words)[0].wait(timeout_s=60)
        database.stall()
        handles = capture(run, words, 12)
        assert any(handle.is_skipped for handle in handles)
        with pytest.raises(
            Unavailable,
            match=r"captures are not recorded: asking the lineage .* has made no progress",
        ):
            repo.flush()
        monkeypatch.undo()  # what comes now may take its time
        database.mend()
        repo.flush()
        assert run.head is not None
        assert capture(run, words)[0].wait("durable", timeout_s=60).step == 14
        run.close()
        repo.close()


def test_the_head_is_the_newest_recorded_state_while_the_lineage_cannot_be_written(
    tmp_path: Path,
) -> None:
    repo = opened(tmp_path, every=None)
    run, words = begin(repo)
    recorded = capture(run, words)[0].wait(timeout_s=60)

    def refuse(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith("INSERT"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    event.listen(repo.core.database._engine, "before_cursor_execute", refuse)
    capture(run, words, 3)
    assert run.head == recorded
    event.remove(repo.core.database._engine, "before_cursor_execute", refuse)
    repo.flush()
    assert run.head is not None
    assert run.head.step == 4
    run.close()
    repo.close()


def test_a_mute_database_is_an_error_for_a_training_that_wants_its_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "STALL_S", 0.2)
    monkeypatch.setattr(writer, "STUCK_S", 0.2)
    repo = opened(tmp_path, 4, every=None, on_failure=OnFailure.RAISE)
    with FaultyDatabase(repo) as database:
        run, words = begin(repo)
        capture(run, words)[0].wait(timeout_s=60)
        database.stall()
        with pytest.raises(
            Unavailable,
            match=r"captures are not recorded: asking the lineage .* has made no progress",
        ):
            capture(run, words, 12)
        monkeypatch.undo()  # what comes now may take its time
        database.mend()
        repo.flush()
        repo.close()


def test_what_a_trouble_has_cost_is_said_seldom(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    one = writer.Trouble(clock=lambda: now[0])
    for _ in range(5):
        one.begin("the disk is full")
    one.note_left(3)
    one.note_skipped()
    one.remind(2)
    now[0] = 601.0
    for _ in range(3):
        one.remind(2)
    now[0] = 602.0
    one.end(1)
    one.end(0)
    began, again, over = said(caplog)
    assert began.endswith("the disk is full")
    cost = "3 left it unwritten as it was full, 1 capture skipped"
    assert (
        again
        == f"still nothing can be written since 601 s, and 2 states wait in memory, {cost}: the"
        " disk is full"
    )
    assert over == f"states are written again, after 602 s; 1 more to write, {cost}"
    assert one.describe(0) is None
