"""Histories from parents in memory: against walks in SQL, while states are recorded, also late
ones."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given
from sqlalchemy import insert

from datastates.lineage import Database, Edge, EdgeKind, NewState
from datastates.lineage.lookup import id_of, ids_of, uids_of
from datastates.lineage.query import walk
from datastates.lineage.query.walk import Topology, position, starts
from datastates.lineage.schema import STATE
from datastates.lineage.write import record
from tests.lineage.conftest import Grow


@pytest.fixture(
    autouse=True, params=[(0, 0), (0, 1000), (1000, 1)], ids=["run by run", "state by state", "few"]
)
def _any_length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has long runs is looked at as what has none, what is long as what is short, and the
    other way round."""
    few, short = request.param
    monkeypatch.setattr(walk, "FEW", few)
    monkeypatch.setattr(walk, "SHORT", short)


def history(database: Database, topology: Topology, *heads: str) -> list[str]:
    """Newest first."""
    with database.read() as session:
        ids = ids_of(session, heads)
        topology.refresh(session, ids)
        return uids_of(session, list(reversed(topology.history(ids))))


def test_a_history_is_that_of_a_walk(
    database: Database, grow: Grow, new_state: Callable[..., NewState]
) -> None:
    root = grow(count=5)
    left, right = grow(root, count=4), grow(root, count=3)
    soup = new_state(
        parent=left.uid, edges=(Edge(right.uid, EdgeKind.SOUP), Edge(root.uid, EdgeKind.MERGE))
    )
    with database.write() as session:
        record.record(session, soup)
    grow(count=2)
    topology = Topology()

    with database.read() as session:
        expected = [state.uid for state in walk.log(session, soup.uid)]
    assert history(database, topology, soup.uid) == expected
    with database.read() as session:
        assert topology.parents(id_of(session, soup.uid)) == tuple(
            ids_of(session, [left.uid, right.uid, root.uid])
        )


@given(data=st.data())
def test_starts_are_found_in_any_ids(data: st.DataObject) -> None:
    first = array("q", [0])
    for id_ in range(1, data.draw(st.integers(1, 30), label="states") + 1):
        first.append(data.draw(st.sampled_from((id_ - 1, id_ - 1, 0, id_ // 2)), label="parent"))
    ids = range(1, len(first))
    some = array("q", sorted(data.draw(st.sets(st.sampled_from(ids)), label="some")))
    begin = data.draw(st.sampled_from(ids), label="begin")
    for chosen in (some, ids[begin - 1 :], array("q", ids[:begin])):
        expected = [
            place
            for place, id_ in enumerate(chosen)
            if not place or first[id_] != chosen[place - 1]
        ]
        assert starts(first, chosen) == expected
        assert starts(dict(enumerate(first)), chosen) == expected


def test_what_is_recorded_later_is_read_then(database: Database, grow: Grow) -> None:
    topology = Topology()
    first = grow(count=3)
    assert len(history(database, topology, first.uid)) == 3
    second = grow(first, count=2)
    assert history(database, topology, second.uid)[2:] == history(database, topology, first.uid)


def test_ids_that_are_committed_late_are_read_when_something_leads_to_them(
    database: Database, grow: Grow
) -> None:
    topology = Topology()
    root = grow(count=2)
    with database.read() as session:
        base = id_of(session, root.uid)
    insert_state(database, base + 5, base)
    history(database, topology, root.uid)
    assert (topology.first[base + 5], topology.first[base + 4]) == (base, -1)

    insert_state(database, base + 3, base)
    late = insert_state(database, base + 4, base + 3)
    top = insert_state(database, base + 9, base + 4)
    assert len(history(database, topology, late)) == 4
    assert history(database, topology, top)[1:] == history(database, Topology(), late)


def insert_state(database: Database, id_: int, parent: int) -> str:
    """As a transaction does that began early and committed late."""
    uid = secrets.token_hex(12)
    values = {
        "id": id_, "uid": uid, "digest": uid, "parent_id": parent, "generation": 0, "step": 0, "micro_step": 0, "created_at": 0,
        "status": "durable", "bytes_total": 0, "bytes_new": 0, "world_size": 1,
    }  # fmt: skip
    with database.write() as session:
        session.execute(insert(STATE), values)
    return uid


def test_since_has_what_is_on_top_and_nothing_else(database: Database, grow: Grow) -> None:
    topology = Topology()
    root = grow(count=3)
    other = grow(root, count=2)
    tip = grow(root, count=2)
    grown = grow(tip, count=2)
    with database.read() as session:
        topology.refresh(session)
        old, new, aside = (id_of(session, one.uid) for one in (tip, grown, other))
    order = topology.history([old])

    assert list(topology.since(order, [new]) or ()) == [new - 1, new]
    assert list(topology.since(order, [old]) or ()) == []
    assert topology.since(order, [new, aside]) is None
    assert position(order, aside) is None
    assert position(order, old) == len(order) - 1
