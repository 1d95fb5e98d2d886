"""What ranks tell: all of them at once, twice, or wrongly.

Nothing is told twice with effect, and nothing is lost."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from datastates.engine.rank_reports import Reply, Report, Skip, report
from datastates.errors import Conflict, NotFound
from datastates.lineage import Database, NewState, Status
from datastates.lineage.schema import EVENT, PART, REPLICA, STATE
from datastates.lineage.states import Why
from datastates.lineage.write.parts import PartReport
from datastates.lineage.write.replicas import Mark
from tests.support.lineages import told

SIZE = 3


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"sqlite:///{tmp_path / 'lineage.db'}"


@pytest.fixture
def databases(url: str) -> Iterator[list[Database]]:
    """A connection for each rank."""
    opened = [Database(url) for _ in range(SIZE)]
    yield opened
    for each in opened:
        each.close()


@pytest.fixture
def database(databases: list[Database]) -> Database:
    return databases[0]


def at_once(databases: Sequence[Database], said: Sequence[Report]) -> list[Reply]:
    """What each rank hears; all of them tell at the same time."""
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(report, databases, said, timeout=30))


def part(uid: str, rank: int, parent: str | None = None, step: int = 1) -> NewState:
    facts: dict[str, Any] = {
        "world_size": SIZE,
        "metrics": {"loss": rank / 7},
        "attributes": {"note": None},
    }
    return told(
        uid,
        secrets.token_hex(32),
        parent,
        "main",
        None,
        step,
        node=f"node-{rank}",
        bytes_total=9,
        bytes_new=rank,
        **facts,
    )


def parts(parent: str | None = None, step: int = 1) -> list[NewState]:
    uid = secrets.token_hex(12)
    return [part(uid, rank, parent, step) for rank in range(SIZE)]


def said_of(news: Sequence[NewState]) -> list[Report]:
    """Each rank tells its part of one state, and asks what became of it."""
    return [
        Report(parts=(PartReport(new, rank),), asked={new.uid: rank})
        for rank, new in enumerate(news)
    ]


def content(database: Database) -> list[Any]:
    with database.read() as session:
        rows = [
            session.execute(select(each)).mappings().all() for each in (PART, STATE, REPLICA, EVENT)
        ]
    return [sorted(repr({**row, "told_at": 0}) for row in each) for each in rows]


def test_of_ranks_that_tell_at_once_the_last_hears_that_the_state_is_whole_and_the_others_once_they_ask(
    databases: list[Database],
) -> None:
    parent = None
    for step in range(1, 6):
        news = parts(parent, step)
        parent = news[0].uid
        heard = at_once(databases, said_of(news))
        assert [len(one.outcomes) for one in heard].count(1) == 1, "that of the last rank"
        for one in at_once(databases, [Report(asked={parent: rank}) for rank in range(SIZE)]):
            whole = one.outcomes[parent].state
            assert whole is not None
            assert (whole.uid, whole.world_size, whole.metrics, whole.attributes) == (
                parent,
                SIZE,
                {"loss": 0.0},
                {"note": None},
            )
    marks = [
        Mark(news[0].uid, Status.DURABLE, "local", f"folder-{rank}", rank, 5)
        for rank in range(SIZE)
    ]
    marked = at_once(databases, [Report(marks=(mark,), is_durable=True) for mark in marks])
    assert [one.marked[news[0].uid] for one in marked].count(Status.DURABLE) == 1, (
        "that of the last rank"
    )


def test_each_rank_hears_what_the_others_skip_want_and_put_on_their_disks(
    database: Database,
) -> None:
    first = parts()
    second, third = parts(first[0].uid, 2), parts(first[0].uid, 3)
    for said in said_of(first):
        report(database, said)
    for rank in range(SIZE):
        report(
            database,
            Report(
                parts=(PartReport(second[rank], rank),),
                skips=(Skip(third[rank].facts, rank, Why.SKIPPED, "no room"),) if rank == 1 else (),
                wishes={first[0].uid: 0} if rank == 0 else {},
                marks=(Mark(first[0].uid, Status.DURABLE, "local", f"folder-{rank}", rank, 5),),
            ),
        )
    for rank in range(SIZE):
        asked = {second[0].uid: rank, third[0].uid: rank}
        heard = report(
            database, Report(asked=asked, wanted=(first[0].uid,), halves=(first[0].uid,))
        )
        assert heard.outcomes[second[0].uid].state is not None
        assert str(heard.outcomes[third[0].uid].given_up) == "rank 1 (skipped): no room"
        assert heard.wanted == {first[0].uid: False}
        assert heard.statuses == {first[0].uid: Status.DURABLE}


def test_to_tell_everything_twice_changes_nothing(database: Database) -> None:
    first = parts()
    second, third, late = parts(first[0].uid, 2), parts(first[0].uid, 3), parts(first[0].uid, 4)
    said = [
        *said_of(first),
        *said_of(second),
        Report(skips=(Skip(third[1].facts, 1, Why.SKIPPED, "no room"),)),
        *said_of(late)[:2],
        Report(late=(late[0].uid,), patience_s=0.1),
        *(
            Report(marks=(Mark(first[0].uid, Status.DURABLE, "local", f"folder-{rank}", rank, 5),))
            for rank in range(SIZE)
        ),
        Report(wishes={first[0].uid: 2}),
        *(
            Report(evicted=(second[0].uid,), tier="memory", holder=f"node-{rank}")
            for rank in range(SIZE)
        ),
    ]
    for each in said:
        report(database, each)
    before = content(database)
    assert len(before[1]) == 2
    for each in [*said, *reversed(said)]:
        report(database, each)
    assert content(database) == before


def test_of_what_is_refused_nothing_is_told(database: Database) -> None:
    first = parts()
    for said in said_of(first):
        report(database, said)
    second, before = parts(first[0].uid, 2), content(database)
    wrong = PartReport(replace(first[0], digest="ab" * 32), 0)
    with pytest.raises(Conflict):
        report(database, Report(parts=(PartReport(second[0], 0), wrong)))
    unknown, known = (
        Mark(uid, Status.DURABLE, "local", "folder", 0, 5) for uid in ("0" * 24, first[0].uid)
    )
    with pytest.raises(NotFound):
        report(database, Report(marks=(known, unknown), is_durable=True))
    assert content(database) == before


def test_each_rank_hears_whether_its_own_part_is_known(database: Database) -> None:
    news = parts()
    for said in (said_of(news)[0], said_of(news)[2]):
        report(database, said)
    heard = [report(database, Report(asked={news[0].uid: rank})) for rank in range(SIZE)]
    assert [one.forgotten for one in heard] == [(), (news[0].uid,), ()]
