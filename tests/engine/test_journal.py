"""What a process tells the lineage while the database is away, or has answered only half."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sqlalchemy import create_engine, text

import datastates
from datastates.config import Config
from datastates.engine import outbox, runner
from datastates.engine.rank_reports import PendingRecord
from datastates.errors import Conflict, InvalidInput, Unavailable
from datastates.lineage.database import Database
from datastates.lineage.states import Status
from datastates.lineage.write import record as lineage_record
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.training.tracker import Tracker
from tests.support.lineages import told

if TYPE_CHECKING:
    from datastates.lineage.session import Session
    from datastates.lineage.states import NewState, State


class Away:
    """A database that answers or not, as the test says."""

    def __init__(self) -> None:
        self.is_away = threading.Event()
        self.is_mute = threading.Event()
        """Commits, and does not say so."""
        self.elsewhere: Database | None = None
        """Of a process that reaches it."""
        self.asked = threading.Semaphore(0)

    def check(self, database: Database) -> None:
        if self.is_away.is_set() and database is not self.elsewhere:
            self.asked.release()
            raise Unavailable("the database does not answer (connection refused)")


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Away:
    away, read, write = Away(), Database.read, Database.write

    @contextmanager
    def reading(self: Database) -> Iterator[Session]:
        away.check(self)
        with read(self) as session:
            yield session

    @contextmanager
    def writing(self: Database, durable: bool = False) -> Iterator[Session]:
        away.check(self)
        with write(self, durable) as session:
            yield session
        if away.is_mute.is_set():
            away.is_mute.clear()
            raise Unavailable("the connection was closed")

    monkeypatch.setattr(Database, "read", reading)
    monkeypatch.setattr(Database, "write", writing)
    monkeypatch.setattr(runner, "CHECK_EVERY_S", 0.01)
    return away


@pytest.fixture
def repo(tmp_path: Path, database: Away) -> Iterator[Repository]:
    config = Config(memory_bytes=4 * CHUNK_BYTES, durable_interval_s=None)
    with datastates.open(tmp_path, config=config) as opened:
        yield opened
        database.is_away.clear()


def begin(repo: Repository, size: int = 1000) -> tuple[Tracker, torch.Tensor]:
    weight = torch.zeros(size)
    return repo.track(weight=weight, rng=False), weight


def capture(run: Tracker, weight: torch.Tensor, count: int = 1) -> list[datastates.Capture]:
    made = []
    for _ in range(count):
        weight += 1
        made.append(run.capture())
    return made


@contextmanager
def failing(url: str, code: str, times: int) -> Iterator[None]:
    """Has a PostgreSQL server fail with an error of its own as often, before it takes a state."""
    fail = (
        f"IF nextval('tries') <= {times} THEN RAISE EXCEPTION 'as it fails' USING ERRCODE ="
        f" '{code}'; END IF; RETURN NEW;"
    )
    server = create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text("CREATE SEQUENCE tries"))
        connection.execute(
            text(
                f"CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {fail} END $$"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER fails BEFORE INSERT ON state FOR EACH STATEMENT EXECUTE FUNCTION"
                " fail()"
            )
        )
        try:
            yield
        finally:
            connection.execute(text("DROP FUNCTION fail CASCADE"))
            connection.execute(text("DROP SEQUENCE tries"))
    server.dispose()


@pytest.mark.parametrize(
    ("code", "times", "is_said"),
    [
        ("40P01", 2, False),
        ("40P01", 7, True),
        ("25006", 3, True),
        ("57014", 3, True),
        ("26000", 3, True),
        ("53200", 3, True),
    ],
)
def test_a_server_that_cannot_take_a_state_for_now_takes_it_later(
    postgresql_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: str,
    times: int,
    is_said: bool,
) -> None:
    monkeypatch.setattr(runner, "CHECK_EVERY_S", 0.01)
    with datastates.open(
        postgresql_url, packs=tmp_path / "packs", memory_bytes=4 * CHUNK_BYTES
    ) as repo:
        run, weight = begin(repo)
        first = capture(run, weight)[0].wait(timeout_s=60)
        with failing(postgresql_url, code, times):
            made = [handle.wait(timeout_s=60) for handle in capture(run, weight, 2)]
        assert [state.uid for state in repo.log("main")] == [
            *(state.uid for state in reversed(made)),
            first.uid,
        ]
    assert ("the lineage does not answer" in caplog.text) is is_said


def test_a_state_that_the_server_can_never_take_is_refused_alone(
    postgresql_url: str, tmp_path: Path
) -> None:
    with datastates.open(
        postgresql_url, packs=tmp_path / "packs", memory_bytes=4 * CHUNK_BYTES
    ) as repo:
        run, weight = begin(repo)
        first = capture(run, weight)[0].wait(timeout_s=60)
        with failing(postgresql_url, "54000", 1):
            (refused,) = capture(run, weight)
            with pytest.raises(InvalidInput, match="as it fails"):
                refused.wait(timeout_s=60)
        with pytest.raises(InvalidInput, match="as it fails"):
            run.capture()
        run.restore(first.uid)
        later = capture(run, weight)[0].wait(timeout_s=60)
        assert [state.uid for state in repo.log("main")] == [later.uid, first.uid]


def test_memory_that_fills_while_the_database_is_away_lets_go_of_old_states_and_they_are_recorded_all_the_same(
    repo: Repository, database: Away
) -> None:
    run, weight = begin(repo, CHUNK_BYTES // 4)
    handles = capture(run, weight)
    handles[0].wait()
    database.is_away.set()
    handles += capture(run, weight, 12)
    repo.flush()
    database.is_away.clear()
    assert [handle.wait(timeout_s=60).step for handle in handles] == list(range(1, 14))
    assert [state.uid for state in repo.log("main")] == [handle.uid for handle in reversed(handles)]
    capture(run, weight)[0].wait(timeout_s=60)
    assert {repo.state(handle.uid).status for handle in handles[:9]} == {Status.EVICTED}
    with pytest.raises(Unavailable, match="left memory before it became durable"):
        handles[3].wait("durable", timeout_s=60)
    assert torch.equal(repo.load("main")["weight"], weight)


def test_a_commit_whose_answer_was_lost_is_not_made_twice(repo: Repository, database: Away) -> None:
    run, weight = begin(repo)
    first = capture(run, weight)[0].wait(timeout_s=60)
    database.is_mute.set()
    second = capture(run, weight)[0].wait(timeout_s=60)
    third = capture(run, weight)[0].wait(timeout_s=60)
    assert [state.uid for state in repo.log("main")] == [third.uid, second.uid, first.uid]


def test_a_state_whose_branch_moved_on_meanwhile_is_kept_under_its_uid(
    repo: Repository, database: Away, tmp_path: Path
) -> None:
    run, weight = begin(repo)
    other = datastates.open(tmp_path)
    first, second = (handle.wait(timeout_s=60) for handle in capture(run, weight, 2))
    database.is_away.set()
    (late,) = capture(run, weight)
    repo.flush()
    with other:
        database.elsewhere = other.core.database
        other.move("main", first.uid, expected=second.uid)
    database.is_away.clear()
    assert late.wait(timeout_s=60).parents == (second.uid,)
    assert repo.state("main").uid == first.uid
    with pytest.raises(Conflict, match="branch 'main' is at"):
        run.capture()
    assert torch.equal(repo.load(late.uid)["weight"], weight)


def test_whoever_waits_for_too_long_is_told_and_may_wait_again(
    repo: Repository, database: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weight = begin(repo)
    capture(run, weight)[0].wait(timeout_s=60)
    database.is_away.set()
    monkeypatch.setattr(outbox, "PATIENCE_S", 0.0)
    (late,) = capture(run, weight)
    with pytest.raises(Unavailable, match=r"does not answer since .* 1 state waits to be recorded"):
        late.wait(timeout_s=60)
    with pytest.raises(Unavailable, match="1 state waits"):
        run.training.runner.drain()
    database.is_away.clear()
    repo.flush()
    assert late.wait(timeout_s=60).step == 2


def test_no_more_states_wait_than_can_be_kept_track_of(
    repo: Repository, database: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_MOST_WAITING", 2)
    run, weight = begin(repo)
    database.is_away.set()
    handles = capture(run, weight, 3)
    repo.flush()
    with pytest.raises(
        Unavailable,
        match=(
            r"2 states wait to be recorded, and the lineage does not answer .*connection refused.*:"
            r" bring it back"
        ),
    ):
        handles[2].wait(timeout_s=60)
    with pytest.raises(Unavailable, match="bring it back"):
        run.capture()
    database.is_away.clear()
    repo.flush()
    fourth = capture(run, weight)[0].wait(timeout_s=60)
    assert fourth.parents == (handles[1].uid,)


def test_a_state_that_cannot_be_recorded_for_any_reason_leaves_those_that_are_told_with_it_alone(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_all = lineage_record.record_all
    bad, good = (
        PendingRecord(told(letter * 24, letter * 64, None, None, None, 0), None) for letter in "bc"
    )

    def record(session: Session, news: Sequence[NewState]) -> list[State]:
        if bad.new in news:
            raise OverflowError("a number that the database does not take")
        return record_all(session, news)

    monkeypatch.setattr(lineage_record, "record_all", record)
    refused = repo.core.engage().runner.outbox.record([bad, good])
    assert [(uid, type(error)) for uid, error in refused.items()] == [(bad.new.uid, OverflowError)]
    assert repo.state(good.new.uid).uid == good.new.uid


def test_what_is_kept_to_be_told_again_is_bounded_although_nothing_becomes_durable(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_MOST_GONE", 5)
    run, weight = begin(repo, CHUNK_BYTES // 4)  # four fit into memory
    capture(run, weight, 40)
    repo.flush()
    assert len(repo.core.engage().runner.outbox._recorded) <= 4 + 5 + 4


def test_an_outage_is_two_lines_of_the_log(
    repo: Repository, database: Away, caplog: pytest.LogCaptureFixture
) -> None:
    run, weight = begin(repo)
    capture(run, weight)[0].wait(timeout_s=60)
    with caplog.at_level(logging.INFO):
        database.is_away.set()
        late = capture(run, weight, 3)
        for _ in range(20):
            assert database.asked.acquire(timeout=60)
        database.is_away.clear()
        late[-1].wait(timeout_s=60)
        repo.flush()
    said = [
        record.getMessage() for record in caplog.records if "the lineage" in record.getMessage()
    ]
    assert [line.split(":")[0].split(" after")[0] for line in said] == [
        "the lineage does not answer",
        "the lineage answers again",
    ]
    assert not any(record.exc_info for record in caplog.records)
