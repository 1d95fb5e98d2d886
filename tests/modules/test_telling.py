"""What several ranks tell together has the effect of each telling by itself; nothing is told twice with effect, and nothing is lost."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from datastates.errors import Conflict, NotFound, Unavailable
from datastates.lineage import Database, NewState, Status
from datastates.lineage.change.parts import Telling
from datastates.lineage.schema import PartRow, RefEventRow, ReplicaRow, StateRow
from datastates.lineage.states import Why
from datastates.modules import telling
from datastates.modules.telling import Heard, Mark, Said, Skip, Teller, tell
from datastates.transport.session import desk
from datastates.transport.session.desk import Place
from tests.support.lineages import told

SIZE = 3


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"sqlite:///{tmp_path / 'lineage.db'}"


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database(url)
    yield opened
    opened.close()


class Node:
    """The tellers of some ranks of one node, each with a connection of its own."""

    def __init__(self, url: str, count: int, pool: ThreadPoolExecutor) -> None:
        self.databases = [Database(url) for _ in range(count)]
        self.tellers = [Teller(database) for database in self.databases]
        self.pool = pool
        self.transactions: list[int] = []
        place = Place.drawn()
        for number, teller in enumerate(self.tellers):
            teller._transact = self.counted(teller._transact)  # type: ignore[method-assign]  # as it was, but counted
            teller.join(place, seats=count, is_first=number == 0)

    def counted(self, transact: Callable[..., list[Heard]]) -> Callable[..., list[Heard]]:
        def count(said: Sequence[Said], *more: Any) -> list[Heard]:
            self.transactions.append(len(said))
            return transact(said, *more)

        return count

    def tell(self, said: Sequence[Said]) -> list[Any]:
        """What each heard, or the error that it got."""
        told = [self.pool.submit(teller.tell, each) for teller, each in zip(self.tellers, said, strict=True)]
        return [each.exception(30) or each.result(30) for each in told]


@contextmanager
def node_of(url: str, count: int = SIZE) -> Iterator[Node]:
    with ThreadPoolExecutor(count) as pool:
        node = Node(url, count, pool)
        yield node
        for teller in reversed(node.tellers):
            teller.leave()
        for database in node.databases:
            database.close()


def part(uid: str, rank: int, parent: str | None = None, step: int = 1, size: int = SIZE) -> NewState:
    facts: dict[str, Any] = {"world_size": size, "metrics": {"loss": rank / 7}, "attributes": {"note": None}}
    return told(uid, secrets.token_hex(32), parent, "main", None, step, node=f"node-{rank}", bytes_total=9, bytes_new=rank, **facts)


def parts(parent: str | None = None, step: int = 1, size: int = SIZE) -> list[NewState]:
    uid = secrets.token_hex(12)
    return [part(uid, rank, parent, step, size) for rank in range(size)]


def said_of(news: Sequence[NewState]) -> list[Said]:
    """Each rank tells its part of one state, and asks what became of it."""
    return [Said(parts=(Telling(new, rank),), asked={new.uid: rank}) for rank, new in enumerate(news)]


def content(database: Database) -> list[Any]:
    with database.read() as session:
        rows = [session.execute(select(each.__table__)).mappings().all() for each in (PartRow, StateRow, ReplicaRow, RefEventRow)]
    return [sorted(repr({**row, "told_at": 0}) for row in each) for each in rows]


def test_the_parts_of_a_node_are_told_in_one_transaction_and_each_rank_hears_that_the_state_is_whole(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_MEET_S", "ANSWER_S"):
        monkeypatch.setattr(desk, limit, 60.0)  # however slow the machine is, none tells alone
    with node_of(url) as node:
        node.tell([Said()] * SIZE)
        for limit in ("LINGER_S", "LINGER_FOR_EACH_S"):
            monkeypatch.setattr(desk, limit, 20.0)  # the desk waits until all have come
        node.transactions.clear()
        parent = None
        for step in range(1, 6):
            news = parts(parent, step)
            heard = node.tell(said_of(news))
            parent = news[0].uid
            for one in heard:
                whole = one.outcomes[parent].state
                assert (whole.uid, whole.world_size, whole.metrics, whole.attributes) == (parent, SIZE, {"loss": 0.0}, {"note": None})
        assert node.transactions == [SIZE] * 5
        marks = [Mark(news[0].uid, Status.DURABLE, "local", f"folder-{rank}", rank, 5) for rank in range(SIZE)]
        marked = node.tell([Said(marks=(mark,), is_durable=True) for mark in marks])
        assert [one.marked[news[0].uid] for one in marked].count(Status.DURABLE) == 1, "that of the last rank"
        assert node.transactions == [SIZE] * 6


def test_telling_together_has_the_effect_of_each_telling_by_itself(url: str, database: Database) -> None:
    first = parts()
    second, third = parts(first[0].uid, 2), parts(first[0].uid, 3)
    with database.write() as session:
        tell(session, said_of(first))
        rounds = [
            Said(
                parts=(Telling(second[rank], rank),),
                skips=(Skip(third[rank].facts, rank, Why.SKIPPED, "no room"),) if rank == 1 else (),
                wishes={first[0].uid: 0} if rank == 0 else {},
                asked={first[0].uid: rank, second[rank].uid: rank, third[rank].uid: rank},
                wanted=(first[0].uid,),
                halves=(first[0].uid,),
                marks=(Mark(first[0].uid, Status.DURABLE, "local", f"folder-{rank}", rank, 5),),
            )
            for rank in range(SIZE)
        ]
        together = tell(session, rounds)
        session.rollback()
    with database.write() as session:
        tell(session, said_of(first))
        alone = [tell(session, [said])[0] for said in rounds]
    assert [list(heard.marked.values()) for heard in together] == [list(heard.marked.values()) for heard in alone]
    with database.read() as session:
        questions = [replace(said, parts=(), skips=(), wishes={}, marks=()) for said in rounds]
        assert tell(session, questions) == [tell(session, [question])[0] for question in questions]
        last = tell(session, questions)
    assert all(heard.outcomes[second[0].uid].state is not None for heard in last)
    assert all(str(heard.outcomes[third[0].uid].given_up) == "rank 1 (skipped): no room" for heard in last)
    assert all(heard.wanted == (first[0].uid,) and heard.statuses == {first[0].uid: Status.DURABLE} for heard in last)
    # what the last of them heard it heard together with the others, whoever was last
    assert set(together[0].outcomes) == set(together[1].outcomes) == set(together[2].outcomes) == set(alone[2].outcomes)


def test_to_tell_everything_twice_changes_nothing(url: str, database: Database) -> None:
    first = parts()
    second, third, late = parts(first[0].uid, 2), parts(first[0].uid, 3), parts(first[0].uid, 4)
    said = [
        *said_of(first),
        *said_of(second),
        Said(skips=(Skip(third[1].facts, 1, Why.SKIPPED, "no room"),)),
        *said_of(late)[:2],
        Said(late=(late[0].uid,), patience_s=0.1),
        *(Said(marks=(Mark(first[0].uid, Status.DURABLE, "local", f"folder-{rank}", rank, 5),)) for rank in range(SIZE)),
        Said(wishes={first[0].uid: 2}),
        *(Said(evicted=(second[0].uid,), tier="memory", holder=f"node-{rank}") for rank in range(SIZE)),
    ]
    for each in said:
        with database.write() as session:
            tell(session, [each])
    before = content(database)
    assert len(before[1]) == 2
    for each in [*said, *reversed(said)]:
        with database.write() as session:
            tell(session, [each])
    with database.write() as session:
        tell(session, said)
    assert content(database) == before


def test_what_is_wrong_with_one_is_heard_by_that_one_and_the_others_are_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with node_of(url) as node:
        first = parts()
        assert all(isinstance(heard, Heard) for heard in node.tell(said_of(first)))
        second = parts(first[0].uid, 2)
        wrong = [Telling(replace(first[0], digest="ab" * 32), 0), Telling(second[0], 0)]
        heard = node.tell([Said(parts=tuple(wrong)), *said_of(second)[1:]])
        assert isinstance(heard[0], Conflict)
        assert all(isinstance(one, Heard) for one in heard[1:])
        unknown = Mark("0" * 24, Status.DURABLE, "local", "folder", 0, 5)
        marked = Mark(first[0].uid, Status.DURABLE, "local", "folder", 1, 5)
        heard = node.tell([Said(marks=(unknown,), is_durable=True), Said(marks=(marked,), is_durable=True), said_of(second)[0]])
        assert isinstance(heard[0], NotFound)
        assert heard[1].marked == {first[0].uid: Status.CAPTURED}
        assert heard[2].outcomes[second[0].uid].state.metrics == {"loss": 0.0}, "its part was not told with the wrong one"
    assert not caplog.records, "nothing failed at the desk: it leaves to each what it refuses"


def test_what_nobody_waits_for_any_more_is_not_told(url: str, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    news, is_told, goes_on = parts(size=2), threading.Event(), threading.Event()

    def slow(*args: Any) -> list[Heard]:
        heard = tell(*args)
        is_told.set()
        assert goes_on.wait(60)
        return heard

    def away(*args: Any) -> list[Heard]:
        raise Unavailable("the database is away for this rank")

    monkeypatch.setattr(telling, "tell", slow)
    with node_of(url, 2) as node:
        monkeypatch.setattr(node.tellers[1], "_transact", away)
        leaving = node.pool.submit(node.tellers[1].tell, said_of(news)[1])
        assert is_told.wait(60)
        caller = node.tellers[1]._caller
        assert caller is not None
        assert caller._connection is not None
        caller._connection.shutdown(socket.SHUT_RDWR)  # it waits no longer, and would tell by itself
        goes_on.set()
        with pytest.raises(Unavailable):
            leaving.result(30)
        node.tellers[0].leave()
    assert content(database)[0] == []


def test_each_rank_hears_whether_its_own_part_is_known(url: str, database: Database) -> None:
    news = parts()
    with database.write() as session:
        tell(session, [said_of(news)[0], said_of(news)[2]])
    with database.read() as session:
        heard = tell(session, [Said(asked={news[0].uid: rank}) for rank in range(SIZE)])
    assert [one.forgotten for one in heard] == [(), (news[0].uid,), ()]


def test_without_its_desk_each_tells_by_itself(url: str) -> None:
    with node_of(url) as node:
        news = parts()
        node.tell([said_of(news)[0], Said(), Said()])
        node.tellers[0].leave()
        node.transactions.clear()
        heard = node.tell([Said(), *said_of(news)[1:]])
        assert node.transactions == [1, 1, 1]
        assert any(news[0].uid in one.outcomes for one in heard)
