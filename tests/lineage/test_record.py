"""The commit point, and what tiers hold afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import select, text

from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage import (
    Database,
    Edge,
    EdgeKind,
    NewState,
    Ref,
    RefKind,
    State,
    Status,
    lookup,
)
from datastates.lineage.query import names
from datastates.lineage.schema import REPLICA, STATE, metadata
from datastates.lineage.write import refs
from datastates.lineage.write.record import record
from datastates.lineage.write.replicas import evict, mark

Make = Callable[..., NewState]
Grow = Callable[..., State]


def count_rows(database: Database) -> dict[str, int]:
    with database.read() as session:
        return {
            table.name: int(
                session.execute(text(f'SELECT count(*) FROM "{table.name}"')).scalar_one()
            )
            for table in metadata.sorted_tables
        }


def read_state(database: Database, uid: str) -> State:
    with database.read() as session:
        return lookup.state(session, uid)


def replicas(database: Database, uid: str) -> set[tuple[int, str, str, int]]:
    query = select(REPLICA.c.rank, REPLICA.c.tier, REPLICA.c.node, REPLICA.c.bytes).join(
        STATE, STATE.c.id == REPLICA.c.state_id
    )
    with database.read() as session:
        return {
            (rank, tier, node, size)
            for rank, tier, node, size in session.execute(query.where(STATE.c.uid == uid))
        }


def test_a_state_comes_back_as_it_was_recorded(
    database: Database, new_state: Make, grow: Grow
) -> None:
    root, other = grow(), grow()
    new = new_state(
        root.uid,
        branch="main",
        step=7,
        micro_step=3,
        metrics={"loss": 0.1, "best": math.inf, "worst": -math.inf, "tiny": 5e-324, "größe": -0.0},
        attributes={
            "s": "é\n",
            "i": -3,
            "big": 2**64 - 1,
            "low": -(2**63),
            "f": 2.5,
            "t": True,
            "n": None,
            "e": "",
            "x" * 255: 0,
        },
        message="a message\nof two lines",
        created_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2))),
        edges=(Edge(other.uid, EdgeKind.SOUP, 0.25), Edge(root.uid, EdgeKind.MERGE)),
        bytes_total=2**40,
        bytes_new=12,
        world_size=4,
        node="here",
    )
    with database.write() as session:
        recorded = record(session, new)
    assert read_state(database, new.uid) == recorded
    for field in ("digest", "bytes_total", "bytes_new"):
        assert getattr(recorded, field) == getattr(new, field), field
    assert recorded.facts == replace(new.facts, branch=None)
    assert {
        key: type(value) for key, value in read_state(database, new.uid).attributes.items()
    } == {key: type(value) for key, value in new.facts.attributes.items()}
    assert recorded.created_at == new.facts.created_at
    assert recorded.created_at.tzinfo is UTC
    assert (recorded.status, recorded.parents, recorded.generation) == (
        Status.CAPTURED,
        (root.uid, other.uid, root.uid),
        1,
    )
    assert replicas(database, new.uid) == {(0, "memory", "here", 12)}


def test_nan_comes_back_as_nan(database: Database, grow: Grow) -> None:
    state = read_state(
        database, grow(metrics={"loss": math.nan, "acc": 1.0}, attributes={"x": math.nan}).uid
    )
    assert math.isnan(state.metrics["loss"])
    assert isinstance(state.attributes["x"], float)
    assert math.isnan(state.attributes["x"])
    assert state.metrics["acc"] == 1.0
    with database.read() as session:
        # and compares like NaN in queries, though PostgreSQL's own is above all numbers
        assert session.execute(
            text("SELECT key FROM metric WHERE value > 0 OR value <= 0")
        ).scalars().all() == ["acc"]


def test_a_capture_makes_its_branch_and_moves_it(database: Database, grow: Grow) -> None:
    first = grow(branch="main")
    second = grow(first, branch="main")
    with database.read() as session:
        assert names.get(session, "main") == Ref("main", RefKind.BRANCH, second.uid, 2)
        events = [(event.old, event.new, event.reason) for event in names.reflog(session, "main")]
    assert events == [(first.uid, second.uid, "capture"), (None, first.uid, "capture")]


def test_a_new_branch_forks_where_its_parent_is(database: Database, grow: Grow) -> None:
    trunk = grow(branch="main", count=3)
    fork = grow(trunk, branch="fork")
    with database.read() as session:
        assert {ref.name: ref.state for ref in names.refs(session)} == {
            "main": trunk.uid,
            "fork": fork.uid,
        }


def test_a_state_without_a_branch_moves_none(database: Database, grow: Grow) -> None:
    trunk = grow(branch="main")
    grow(trunk)
    with database.read() as session:
        assert [ref.state for ref in names.refs(session)] == [trunk.uid]


@pytest.mark.parametrize("stale", [True, False])
def test_a_branch_that_moved_on_is_a_conflict_and_nothing_is_recorded(
    database: Database, new_state: Make, grow: Grow, stale: bool
) -> None:
    first = grow(branch="main")
    second = grow(first, branch="main")
    before = count_rows(database)
    late = new_state(first.uid if stale else None, branch="main", metrics={"loss": 1.0})
    with (
        pytest.raises(Conflict, match=f"branch 'main' is at {second.uid}, not at"),
        database.write() as session,
    ):
        record(session, late)
    assert count_rows(database) == before


def test_a_capture_does_not_move_a_tag(database: Database, new_state: Make, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        refs.tag(session, "v1", state.uid)
    before = count_rows(database)
    with pytest.raises(Conflict, match="'v1' is a tag"), database.write() as session:
        record(session, new_state(state.uid, branch="v1"))
    assert count_rows(database) == before


def test_a_state_that_is_somewhere_is_recorded_with_its_tier(
    database: Database, new_state: Make
) -> None:
    with pytest.raises(InvalidInput, match="name the tier"), database.write() as session:
        record(session, new_state(tier=""))
    gone = new_state(tier="", status=Status.EVICTED)
    with database.write() as session:
        record(session, gone)
    assert replicas(database, gone.uid) == set()


def test_a_uid_is_recorded_once(database: Database, new_state: Make, grow: Grow) -> None:
    state = grow(branch="main")
    before = count_rows(database)
    with (
        pytest.raises(Conflict, match=f"there is a state {state.uid} already"),
        database.write() as session,
    ):
        record(session, new_state(uid=state.uid))
    assert count_rows(database) == before


@pytest.mark.parametrize(
    ("fields", "error", "problem"),
    [
        ({"parent": "0" * 24}, NotFound, "no state '0{24}' to be the parent"),
        ({"run": "no-run"}, NotFound, "no run 'no-run'"),
        ({"edges": (Edge("0" * 24, EdgeKind.MERGE),)}, NotFound, "no state '0{24}'"),
        (
            {"edges": (Edge("0" * 24, EdgeKind.MERGE), Edge("0" * 24, EdgeKind.MERGE, 0.5))},
            InvalidInput,
            "twice",
        ),
        ({"uid": "ABC"}, InvalidInput, "24 lower-case hex digits"),
        ({"branch": "a b"}, InvalidInput, "'a b' cannot name a branch"),
        ({"metrics": {"": 1.0}}, InvalidInput, "cannot name a metric"),
        ({"metrics": {"m" * 256: 1.0}}, InvalidInput, "cannot name a metric"),
        ({"attributes": {"x": [1]}}, InvalidInput, "attribute 'x' is a list"),
        ({"attributes": {"x": "\x00"}}, InvalidInput, "NUL"),
        ({"message": "\ud800"}, InvalidInput, "half a character"),
        ({"step": 2**63}, InvalidInput, "64 bits"),
        ({"world_size": 0}, InvalidInput, "0 parts: a state has 1 to 1048576"),
        ({"world_size": 2**20 + 1}, InvalidInput, "1048577 parts: a state has 1 to 1048576"),
    ],
)
def test_what_cannot_be_stored_is_named_and_nothing_is_recorded(
    database: Database,
    new_state: Make,
    fields: dict[str, Any],
    error: type[Exception],
    problem: str,
) -> None:
    new = new_state(**({"branch": "main", "metrics": {"loss": 1.0}} | fields))
    with pytest.raises(error, match=problem), database.write() as session:
        record(session, new)
    assert {name: count for name, count in count_rows(database).items() if count} == {
        "repository": 1
    }


def test_jump_pointers_follow_the_skew_binary_rule(database: Database, grow: Grow) -> None:
    """The jump of generation n goes back by the smallest weight (1, 3, 7, …) of n written in
    skew-binary digits."""
    grow(count=400)
    with database.read() as session:
        rows = session.execute(select(STATE.c.id, STATE.c.generation, STATE.c.jump_id)).all()
    generation = {row.id: row.generation for row in rows}
    for row in rows:
        rest, weight = row.generation, 511
        smallest = 0
        while rest:
            if weight <= rest:
                rest, smallest = rest - weight, weight
            else:
                weight = (weight - 1) // 2
        assert (None if row.generation == 0 else generation[row.jump_id]) == (
            None if row.generation == 0 else row.generation - smallest
        )


def test_a_status_rises_and_never_falls(database: Database, grow: Grow) -> None:
    uid = grow().uid
    with database.write() as session:
        assert mark(session, uid, Status.REPLICATED, tier="partner", node="b") is Status.REPLICATED
        assert mark(session, uid, Status.DURABLE, tier="local", node="a") is Status.REPLICATED
        assert (
            mark(session, uid, Status.CAPTURED, tier="memory", node="a", rank=1)
            is Status.REPLICATED
        )
        assert mark(session, uid, Status.EXTERNAL, tier="external", node="") is Status.EXTERNAL
    assert read_state(database, uid).status is Status.EXTERNAL
    assert {(rank, tier) for rank, tier, _, _ in replicas(database, uid)} == {
        (0, "memory"),
        (1, "memory"),
        (0, "partner"),
        (0, "local"),
        (0, "external"),
    }


def test_marking_again_renews_the_replica(database: Database, grow: Grow) -> None:
    first = grow()
    with database.write(durable=True) as session:
        mark(session, first.uid, Status.DURABLE, tier="local", node="a", bytes=5)
        mark(session, first.uid, Status.DURABLE, tier="local", node="a", bytes=7)
    assert (0, "local", "a", 7) in replicas(database, first.uid)


def test_what_is_new_in_a_state_is_what_it_added_to_the_disk_once_it_is_durable(
    database: Database, grow: Grow
) -> None:
    first, parted = (
        grow(bytes_total=100, bytes_new=7),
        grow(bytes_total=100, bytes_new=7, world_size=2),
    )
    with database.write() as session:
        for uid in (first.uid, parted.uid):
            mark(session, uid, Status.CAPTURED, tier="memory", node="b", bytes=50)
            mark(session, uid, Status.DURABLE, tier="local", node="a", bytes=100)
            mark(session, uid, Status.DURABLE, tier="local", node="b", bytes=3)
    assert read_state(database, first.uid).bytes_new == 100
    assert read_state(database, parted.uid).bytes_new == 7, "one rank's part is not the state's"
    assert (0, "local", "b", 3) in replicas(database, first.uid)


def test_a_state_cannot_be_marked_as_gone_nor_one_that_is_unknown(
    database: Database, grow: Grow
) -> None:
    uid = grow().uid
    with pytest.raises(InvalidInput, match="cannot be marked lost"), database.write() as session:
        mark(session, uid, Status.LOST, tier="memory", node="")
    with pytest.raises(NotFound, match="no state"), database.write() as session:
        mark(session, "0" * 24, Status.DURABLE, tier="local", node="")


def test_only_states_that_nobody_holds_any_more_are_evicted(database: Database, grow: Grow) -> None:
    only, durable, elsewhere = grow(node="a"), grow(node="a"), grow(node="b")
    with database.write() as session:
        mark(session, durable.uid, Status.DURABLE, tier="local", node="a")
        assert evict(session, [elsewhere.uid, durable.uid, only.uid], tier="memory", node="a") == [
            only.uid
        ]
        assert evict(session, [only.uid], tier="memory", node="a") == []
    assert [read_state(database, state.uid).status for state in (only, durable, elsewhere)] == [
        "evicted",
        "durable",
        "captured",
    ]
    assert replicas(database, durable.uid) == {(0, "local", "a", 0)}


def test_an_evicted_state_that_is_here_again_can_be_restored(
    database: Database, grow: Grow
) -> None:
    uid = grow(metrics={"loss": 1.0}).uid
    with database.write() as session:
        evict(session, [uid], tier="memory", node="")
    gone = read_state(database, uid)
    with database.write() as session:
        mark(session, uid, Status.CAPTURED, tier="memory", node="")
    assert (gone.status, gone.metrics) == (Status.EVICTED, {"loss": 1.0})
    assert read_state(database, uid) == replace(gone, status=Status.CAPTURED)


def test_evicting_an_unknown_state_evicts_none(database: Database, grow: Grow) -> None:
    uid = grow().uid
    with pytest.raises(NotFound, match=r"0{24}"), database.write() as session:
        evict(session, [uid, "0" * 24], tier="memory", node="")
    assert read_state(database, uid).status is Status.CAPTURED


def test_a_state_recorded_without_bytes_has_no_replica(database: Database, grow: Grow) -> None:
    assert replicas(database, grow(status=Status.EVICTED).uid) == set()


@pytest.mark.parametrize(
    "value", [2**64, -(2**63) - 1, 10**400], ids=["above", "below", "far above"]
)
def test_an_integer_of_more_than_64_bits_is_refused(
    database: Database, new_state: Callable[..., NewState], value: int
) -> None:
    with (
        database.write() as session,
        pytest.raises(InvalidInput, match=r"attribute 'huge' is .*more than 64 bits"),
    ):
        record(session, new_state(attributes={"huge": value}))
