"""Ranks of a node that report through one process: the same results as without it, in fewer
transactions."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from datastates.agent.messages import FOLDER, connect, who
from datastates.engine import node_reports
from datastates.engine.node_reports import NodeReports
from datastates.engine.rank_reports import Report
from datastates.errors import Conflict, Unavailable
from datastates.lineage.database import Database
from datastates.lineage.states import Status
from datastates.lineage.write.parts import PartReport
from datastates.lineage.write.replicas import Mark
from tests.engine.test_telling import SIZE, parts, said_of

_WAIT_S = 60.0


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the sockets, so that each test has a process of its own."""
    with tempfile.TemporaryDirectory(prefix="ds-", dir="/tmp") as made:
        monkeypatch.setenv(FOLDER, made)
        yield Path(made)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "postgresql":
        url = str(request.getfixturevalue("postgresql_url"))
    else:
        url = f"sqlite:///{tmp_path / 'lineage.db'}"
    made = Database(url)
    yield made
    made.close()


@pytest.fixture
def ranks(database: Database) -> Iterator[list[NodeReports]]:
    """Ranks that are connected to the process."""
    made = [NodeReports(database) for _ in range(SIZE)]
    for each in made:
        until(lambda each=each: connects(each), "the process listens")  # type: ignore[misc]
    yield made
    for each in made:
        each.close()
    with suppress(Unavailable):
        os.kill(pid_of(database), signal.SIGKILL)  # it has a connection to the database


def connects(reports: NodeReports) -> bool:
    try:
        reports._connection = reports._connect()
    except Unavailable:
        return False
    return True


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)  # nothing reports that a process listens


def pid_of(database: Database) -> int:
    """The process that records for the ranks."""
    with connect(node_reports._address(database.url)) as connection:
        return who(connection)[0]


def test_the_last_rank_is_told_that_the_state_is_whole(
    database: Database, ranks: list[NodeReports]
) -> None:
    news = parts()
    for rank, said in enumerate(said_of(news)):
        replied = ranks[rank].report(said)
        assert (news[0].uid in replied.outcomes) == (rank == SIZE - 1)
    state = replied.outcomes[news[0].uid].state
    assert state is not None
    assert (state.uid, state.world_size, state.metrics) == (news[0].uid, SIZE, {"loss": 0.0})
    mark = Mark(news[0].uid, Status.DURABLE, "local", "folder", 0, 5)
    assert ranks[0].report(Report(marks=(mark,), is_durable=True)).marked == {
        news[0].uid: Status.CAPTURED
    }
    assert pid_of(database) != os.getpid()


def test_an_error_comes_as_what_it_was(database: Database, ranks: list[NodeReports]) -> None:
    first, *_ = news = parts()
    ranks[0].report(said_of(news)[0])
    wrong = PartReport(replace(first, digest=secrets.token_hex(32)), 0)
    with pytest.raises(Conflict):
        ranks[0].report(Report(parts=(wrong,)))


def test_a_process_that_is_killed_costs_nothing(
    database: Database, ranks: list[NodeReports]
) -> None:
    news = parts()
    said = said_of(news)
    ranks[0].report(said[0])
    pid = pid_of(database)
    os.kill(pid, signal.SIGKILL)
    for rank in range(SIZE):
        replied = ranks[rank].report(said[rank])  # that of rank 0 comes again
    assert replied.outcomes[news[0].uid].state is not None
    ranks[0]._started_at = 0.0
    until(lambda: connects(ranks[0]), "the next process listens")
    ranks[0].report(said[0])
    assert pid_of(database) not in {pid, os.getpid()}


@pytest.mark.timeout(60)
def test_a_process_that_does_not_answer_is_not_waited_for(
    database: Database, ranks: list[NodeReports], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_reports, "PATIENCE_S", 0.2)
    pid = pid_of(database)
    os.kill(pid, signal.SIGSTOP)
    news = parts()
    for rank, said in enumerate(said_of(news)):
        replied = ranks[rank].report(said)
    assert replied.outcomes[news[0].uid].state is not None
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_one_refused_report_does_not_hinder_the_others(
    database: Database, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    news, other = parts(), parts()
    said = said_of(news)
    if is_wrong:
        node_reports._answers(database, [said_of(other)[0]])
        changed = replace(other[0], digest=secrets.token_hex(32))
        said.insert(1, Report(parts=(PartReport(changed, 0),)))
    writes, write = [], database.write

    def counted(*, durable: bool = False) -> object:
        writes.append(durable)
        return write(durable=durable)

    monkeypatch.setattr(database, "write", counted)
    answers = node_reports._answers(database, said)
    assert len(writes) == (1 if not is_wrong else 1 + len(said))
    failed = [answer for answer in answers if isinstance(answer, node_reports._Failed)]
    assert [each.kind for each in failed] == ["Conflict"] * is_wrong
    last = answers[-1]
    assert isinstance(last, node_reports._Replied)
    assert last.reply.outcomes[news[0].uid].state is not None


def test_without_a_process_the_rank_reports_itself(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_reports, "start", lambda *_: None)
    reports = NodeReports(database)
    news = parts()
    for said in said_of(news):
        replied = reports.report(said)
    assert replied.outcomes[news[0].uid].state is not None
