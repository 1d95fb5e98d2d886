"""Events of refs are read in the order of their ids, and none is passed over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from datastates.lineage import Database, RefEvent, RefKind, State
from datastates.lineage.query import names as names_query
from datastates.lineage.views import detail
from datastates.lineage.write import refs

Grow = Callable[..., State]


def read(
    database: Database, after: int = 0, horizon: detail.Horizon | None = None, limit: int = 500
) -> detail.Events:
    with database.read() as session:
        return detail.read(session, after, horizon=horizon, limit=limit)


def names(found: detail.Events) -> list[str]:
    return [event.name for event in found.items]


def tag(database: Database, name: str, state: State) -> None:
    with database.write() as session:
        refs.tag(session, name, state.uid)


@contextmanager
def open_tag(database: Database, name: str, state: State, *, keep: bool = True) -> Iterator[None]:
    """A transaction on another thread that has written its event, and commits (or not) at the
    end of the block."""
    has_written, end = threading.Event(), threading.Event()

    def write() -> None:
        with database.write() as session:
            refs.tag(session, name, state.uid)
            has_written.set()
            assert end.wait(30)
            if not keep:
                session.rollback()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        assert has_written.wait(30)
        yield
    finally:
        end.set()
        thread.join(30)


def test_events_come_by_their_ids_with_all_that_the_reflog_says(
    database: Database, grow: Grow
) -> None:
    state = grow(branch="main", count=2)
    tag(database, "v1", state)
    with database.write() as session:
        refs.delete_ref(session, "v1")
    found = read(database)
    assert found.horizon is None
    assert [(event.name, event.kind, event.reason) for event in found.items] == [
        ("main", RefKind.BRANCH, "capture"),
        ("main", RefKind.BRANCH, "capture"),
        ("v1", RefKind.TAG, "tag"),
        ("v1", RefKind.TAG, "delete"),
    ]
    with database.read() as session:
        logged: list[RefEvent] = [
            *names_query.reflog(session, "main"),
            *names_query.reflog(session, "v1"),
        ]
        assert detail.newest_events(session) == detail.Horizon(found.items[-1].id, frozenset())
    assert list(found.items) == sorted(logged, key=lambda event: event.id)
    assert read(database, found.items[-1].id) == detail.Events((), None)


def test_pages_follow_each_other(database: Database, grow: Grow) -> None:
    grow(branch="main", count=7)
    seen: list[int] = []
    while found := read(database, seen[-1] if seen else 0, limit=3).items:
        assert len(found) <= 3
        seen += [event.id for event in found]
    assert seen == [event.id for event in read(database).items]
    assert len(seen) == 7


def test_an_empty_lineage_has_no_events(database: Database) -> None:
    assert read(database) == detail.Events((), None)
    with database.read() as session:
        assert detail.newest_events(session) == detail.Horizon(0, frozenset())


@pytest.fixture
def shared(postgresql_url: str) -> Iterator[Database]:
    """A lineage where transactions write at the same time."""
    opened = Database(postgresql_url)
    yield opened
    opened.close()


@pytest.fixture
def state(shared: Database, new_state: Callable[..., object]) -> State:
    from datastates.lineage.write import record

    with shared.write() as session:
        # it makes what is to be recorded
        return record.record(session, new_state(branch="main"))  # type: ignore[arg-type]


def test_an_event_committed_after_a_younger_one_is_not_missed(
    shared: Database, state: State
) -> None:
    last = read(shared).items[-1].id
    with open_tag(shared, "older", state):
        tag(shared, "younger", state)
        found = read(shared, last)
        assert found.items == ()
        assert found.horizon is not None
        assert not found.horizon.is_settled
        assert read(shared, last, found.horizon) == found
    after = read(shared, last, found.horizon)
    assert names(after) == ["older", "younger"]
    assert after.horizon is None


def test_what_lies_before_the_hole_is_read_at_once(shared: Database, state: State) -> None:
    last = read(shared).items[-1].id
    tag(shared, "before", state)
    with open_tag(shared, "older", state):
        tag(shared, "younger", state)
        found = read(shared, last)
        assert names(found) == ["before"]
    assert names(read(shared, found.items[-1].id, found.horizon)) == ["older", "younger"]


def test_an_event_that_was_rolled_back_holds_up_nothing(shared: Database, state: State) -> None:
    last = read(shared).items[-1].id
    with open_tag(shared, "older", state, keep=False):
        tag(shared, "younger", state)
        found = read(shared, last)
        assert names(found) == []
    found = read(shared, last, found.horizon)
    assert found.horizon is not None
    assert found.horizon.is_settled
    assert names(read(shared, last, found.horizon)) == ["younger"]


def test_writers_that_began_later_are_not_waited_for(shared: Database, state: State) -> None:
    last = read(shared).items[-1].id
    with open_tag(shared, "first", state, keep=False):
        tag(shared, "second", state)
        found = read(shared, last)
    with open_tag(shared, "third", state):
        tag(shared, "fourth", state)
        found = read(shared, last, found.horizon)
        assert found.horizon is not None
        assert found.horizon.is_settled
        found = read(shared, last, found.horizon)
        assert names(found) == ["second"]
        assert found.horizon is not None
    assert names(read(shared, found.items[-1].id, found.horizon)) == ["third", "fourth"]


def test_who_begins_at_the_newest_event_waits_for_those_before_it(
    shared: Database, state: State
) -> None:
    with open_tag(shared, "older", state):
        tag(shared, "younger", state)
        with shared.read() as session:
            horizon = detail.newest_events(session)
        with shared.read() as session:
            assert not detail.settle(session, horizon).is_settled
    with shared.read() as session:
        settled = detail.settle(session, horizon)
    assert settled.is_settled
    assert names(read(shared, settled.id)) == []
    assert names(read(shared, settled.id - 2)) == ["older", "younger"]


def test_a_lock_that_writes_nothing_is_not_waited_for(shared: Database, state: State) -> None:
    with shared.read() as session:
        session.execute(text("SELECT id FROM ref_event"))
        with shared.read() as other:
            assert detail.newest_events(other).is_settled


def test_many_writers_at_once_are_read_completely_and_in_order(
    shared: Database, state: State
) -> None:
    done = threading.Event()

    def write(writer: int) -> None:
        for number in range(25):
            tag(shared, f"t{writer}-{number}", state)

    writers = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(6)]
    seen = [event.id for event in read(shared).items]
    for thread in writers:
        thread.start()
    horizon = None
    while not done.is_set():
        if not any(thread.is_alive() for thread in writers):
            done.set()
        for _ in range(3):
            # what is left when the writers have ended takes a settled horizon at most
            found = read(shared, seen[-1], horizon)
            seen, horizon = seen + [event.id for event in found.items], found.horizon
    with shared.read() as session:
        assert seen == list(session.execute(text("SELECT id FROM ref_event ORDER BY id")).scalars())
    assert len(seen) == 1 + 6 * 25
