"""What a folder of packs holds, and what of it is counted on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Connection, event, select

from datastates.errors import Conflict
from datastates.lineage import Database, NewState, State, StateFacts, Status
from datastates.lineage.lookup import id_of
from datastates.lineage.query import names, retained, revision
from datastates.lineage.schema import STATE
from datastates.lineage.states import Edge, EdgeKind, RefKind
from datastates.lineage.write import refs
from datastates.lineage.write.record import record
from datastates.lineage.write.replicas import check_withdrawal, mark
from tests.lineage.conftest import on_one_database

if TYPE_CHECKING:
    from datastates.lineage.session import Session

Grow = Callable[..., State]
HERE = {"tier": "local", "node": "here"}


def held(database: Database, state: State, node: str = "here") -> None:
    with database.write() as session:
        mark(session, state.uid, Status.DURABLE, tier="local", node=node, bytes=1)


def needed_states(database: Database, node: str = "here") -> dict[int, str]:
    held = {
        each.id for page in retained.durable(database, tier="local", node=node) for each in page
    }
    return retained.needed_states(database, held)


def test_the_oldest_state_that_is_held_is_what_a_name_leads_to(
    database: Database, grow: Grow
) -> None:
    root = grow(branch="main")
    oldest = grow(root, branch="main")
    head = grow(grow(oldest, branch="main"), branch="main")
    held(database, oldest)
    held(database, root, node="elsewhere")
    with database.write() as session:
        refs.tag(session, "early", root.uid)
    with database.read() as session:
        oldest_id, head_id = id_of(session, oldest.uid), id_of(session, head.uid)
    assert needed_states(database) == {oldest_id: "the newest durable state of branch 'main'"}
    assert needed_states(database, "nowhere") == {}
    held(database, head)
    assert needed_states(database) == {head_id: "the head of branch 'main'"}


def test_states_that_are_held_come_with_the_metrics_that_are_numbers(
    database: Database, grow: Grow
) -> None:
    first = grow(branch="main", metrics={"loss": 2.0, "other": 1.0})
    second = grow(first, branch="main", metrics={"loss": math.nan, "val": 0.5})
    grow(second, branch="main", metrics={"loss": 0.5})
    for state in (first, second):
        held(database, state)
    (page,) = retained.durable(database, **HERE, keys={"loss", "val"})
    assert {each.uid: each.metrics for each in page} == {
        first.uid: {"loss": 2.0},
        second.uid: {"val": 0.5},
    }


@pytest.fixture
def forest(database: Database) -> Database:
    """A lineage at random: forks, further parents, equal and missing losses, some states held,
    and names anywhere."""
    rng, uids = random.Random(5), list[str]()
    facts = StateFacts("", None, None, None, 0)
    for number in range(200):
        parent = rng.choice(uids[-20:]) if uids and rng.random() < 0.97 else None
        others = rng.sample(uids[-20:], 2) if len(uids) > 5 and rng.random() < 0.1 else []
        edges = tuple(Edge(uid, EdgeKind.MERGE) for uid in others if uid != parent)
        metrics = {"loss": rng.choice((0.5, 1.0, 1.5, math.nan))} if rng.random() < 0.3 else {}
        uid = f"{number:024x}"
        new = NewState(
            replace(facts, uid=uid, parent=parent, metrics=metrics, edges=edges),
            f"{number:064x}",
            tier="memory",
            node="here",
        )
        with database.write() as session:
            record(session, new)
            if rng.random() < 0.1:
                mark(session, uid, Status.DURABLE, tier="local", node="here", bytes=1)
            if rng.random() < 0.3:
                (refs.branch if rng.random() < 0.5 else refs.tag)(
                    session, f"name-{number}", rng.choice([*uids, uid])
                )
        uids.append(uid)
    return database


def by_walking(session: Session, held: set[int]) -> dict[str, int | None]:
    """Each name, with the nearest first parent that is held, one name after the other."""
    parents = dict(session.execute(select(STATE.c.id, STATE.c.parent_id)).all())
    found: dict[str, int | None] = {}
    for ref in names.refs(session):
        at: int | None = id_of(session, ref.state)
        while at is not None and at not in held:
            at = parents[at]
        found[ref.name] = at
    return found


@pytest.mark.parametrize("page", [3, 5000])
def test_walks_that_meet_find_what_each_alone_would(
    forest: Database, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "_PAGE_MIN", page)
    monkeypatch.setattr(retained, "_PAGE", page)
    monkeypatch.setattr(retained, "_PAGES", retained._PAGES.limit(page))
    held = {each.id for some in retained.durable(forest, **HERE) for each in some}
    counted = retained.needed_states(forest, held)
    with forest.read() as session:
        walked = by_walking(session, held)
        forks = {fork for _, fork in retained.segments_of(session).values() if fork is not None}
        assert {at for at in counted if at not in forks} == {
            at for at in walked.values() if at is not None and at not in forks
        }
        for at, why in counted.items():
            if not why.endswith("forks here"):
                assert {walked[name] for name in walked if repr(name) in why} == {at}
        assert retained.leading(session, held, **HERE) == {at for at in counted if at in held}
        heads = {ref.name: id_of(session, ref.state) for ref in names.refs(session, RefKind.BRANCH)}
        one_by_one = {
            at: revision.best_id(session, at, "loss", is_max=False) for at in heads.values()
        }
        most = {at: revision.best_id(session, at, "loss", is_max=True) for at in heads.values()}
    best = retained.best_on_the_way(forest, heads.values(), "loss", is_max=False)
    assert best == {at: found for at, found in one_by_one.items() if found is not None}
    assert retained.best_on_the_way(forest, heads.values(), "loss", is_max=True) == {
        at: each for at, each in most.items() if each is not None
    }


@contextmanager
def instructions(database: Database) -> Iterator[list[int]]:
    """Counts the work of SQLite's virtual machine for each statement on a database, in hundreds
    of instructions."""
    count = [0]

    def tick() -> int:
        count[0] += 1
        return 0

    def watch(connection: Connection, *_: object) -> None:
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(tick, 100)

    event.listen(database._engine, "before_cursor_execute", watch)
    yield count
    event.remove(database._engine, "before_cursor_execute", watch)


@on_one_database
def test_what_a_state_costs_does_not_depend_on_the_number_of_names_far_above(
    database: Database, grow: Grow
) -> None:
    root = grow(branch="main")
    other = grow(root, branch="side")
    tips = [grow(root, branch="main", count=300)]
    tips += [grow(tips[0], count=1) for _ in range(100)]
    held(database, root)
    held(database, other)
    costs: dict[str, list[int]] = {"survey": [], "one batch": [], "one state": []}
    with database.read() as session:
        ids = [id_of(session, other.uid)]
    for number in range(101):
        with database.write() as session:
            refs.tag(session, f"tag-{number}", tips[number].uid)
        if number % 100:
            continue
        with instructions(database) as count:
            needed_states(database)
        costs["survey"].append(count[0])
        with instructions(database) as count, database.read() as session:
            assert retained.leading(session, ids, **HERE) == set(ids)
        costs["one batch"].append(count[0])
        with (
            instructions(database) as count,
            database.write() as session,
            pytest.raises(Conflict, match="side"),
        ):
            check_withdrawal(session, other.uid)
        costs["one state"].append(count[0])
    assert all(many <= 2 * few + 30 for few, many in costs.values()), costs
