"""Several states in one go: the lineage is as if they had come one by one, for a few statements."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select

from datastates.errors import Conflict, NotFound
from datastates.lineage import Database, Edge, EdgeKind, NewState, Run, Status, lookup, schema
from datastates.lineage.query import names as names_query
from datastates.lineage.schema import (
    ATTRIBUTE,
    EDGE,
    EVENT,
    METRIC,
    REF,
    REPLICA,
    STATE,
)
from datastates.lineage.write import runs
from datastates.lineage.write.record import record, record_all
from tests.support.effort import seeds
from tests.support.lineages import told

Make = Callable[..., NewState]

START = datetime(2026, 11, 1, tzinfo=UTC)
A_RUN = Run("f" * 24, "host", "user", 1, (), None, None, {}, {}, START)


@pytest.fixture
def one_by_one(tmp_path: Path) -> Iterator[Database]:
    """A lineage of its own."""
    opened = Database(f"sqlite:///{tmp_path / 'one-by-one.db'}")
    yield opened
    opened.close()


def plan(seed: int, count: int) -> list[NewState]:
    """Branches that grow by turns, forks, states of no branch, merges."""
    rng = random.Random(seed)
    heads: dict[str, str] = {}
    news: list[NewState] = []
    for index in range(count):
        branch = rng.choice(["main", "main", "main", "fork", "other", None])
        parent = heads.get(branch or "") or (
            rng.choice(news).uid if news and rng.random() < 0.9 else None
        )
        further = (
            {rng.choice(news).uid for _ in range(2)} if news and rng.random() < 0.2 else set[str]()
        )
        new = told(
            uid=f"{rng.getrandbits(96):024x}",
            digest=f"{index:064x}",
            parent=parent,
            branch=branch,
            run=rng.choice([A_RUN.uid, A_RUN.uid, None]),
            step=rng.choice([index, 0]),
            metrics={
                key: rng.choice([0.5, math.nan, math.inf])
                for key in ("acc", "loss")
                if rng.random() < 0.5
            },
            attributes={
                key: rng.choice(["x", 3, 2**62, None, True])
                for key in ("a", "b")
                if rng.random() < 0.3
            },
            created_at=START + timedelta(seconds=index),
            status=rng.choice([Status.CAPTURED, Status.CAPTURED, Status.EVICTED]),
            edges=tuple(Edge(uid, EdgeKind.MERGE, 0.5) for uid in sorted(further)),
            bytes_new=index,
            node="here",
        )
        news.append(new)
        if branch is not None:
            heads[branch] = new.uid
    return news


def rows(database: Database) -> dict[str, list[dict[str, Any]]]:
    """All that a lineage says of states, with uids for row ids, which may have gaps."""
    found: dict[str, list[dict[str, Any]]] = {}
    with database.read() as session:
        names: dict[str, dict[int, str]] = {
            "state": {row.id: row.uid for row in session.execute(select(STATE.c.id, STATE.c.uid))},
            "run": {
                row.id: row.uid
                for row in session.execute(select(schema.RUN.c.id, schema.RUN.c.uid))
            },
        }
        for model in (STATE, EDGE, METRIC, ATTRIBUTE, REPLICA, REF, EVENT):
            read = [dict(row._mapping) for row in session.execute(select(model))]
            found[model.name] = sorted((_named(row, names) for row in read), key=repr)
        found["order"] = [
            {"uid": uid}
            for uid in session.execute(select(STATE.c.uid).order_by(STATE.c.id)).scalars()
        ]
        events = session.execute(select(EVENT.c.new_id).order_by(EVENT.c.id)).scalars()
        found["events"] = [{"new": names["state"].get(id_ or 0)} for id_ in events]
    return found


def _named(row: dict[str, Any], names: dict[str, dict[int, str]]) -> dict[str, Any]:
    row.pop("id", None)
    return {
        key: (
            names["run" if key == "run_id" else "state"].get(value)
            if key.endswith("_id")
            else value
        )
        for key, value in row.items()
    }


def begin(database: Database) -> None:
    with database.write() as session:
        runs.start(session, A_RUN)


# 289545018: a branch begins in the same call at a state without a branch
@pytest.mark.parametrize("seed", [*seeds(5), 289545018])
def test_states_recorded_together_are_as_if_they_had_come_one_by_one(
    database: Database, one_by_one: Database, seed: int
) -> None:
    news, rng = plan(seed, 150), random.Random(seed)
    begin(one_by_one)
    for new in news:
        with one_by_one.write() as session:
            record(session, new)
    begin(database)
    left = list(news)
    while left:
        count = rng.choice([1, 2, 7, 30])
        batch, left = left[:count], left[count:]
        with database.write() as session:
            recorded = record_all(session, batch)
        with database.read() as session:
            # NaN is not equal to itself
            assert repr([lookup.state(session, new.uid) for new in batch]) == repr(recorded)
    expected = rows(one_by_one)
    for name, found in rows(database).items():
        assert found == expected[name], name


def test_many_states_take_as_many_statements_as_two(database: Database, new_state: Make) -> None:
    chain = [new_state(None, branch="main", metrics={"loss": 1.0})]
    for step in range(1, 200):
        chain.append(new_state(chain[-1].uid, branch="main", step=step, metrics={"loss": 1.0}))
    said: list[str] = []
    event.listen(
        database._engine, "before_cursor_execute", lambda *arguments: said.append(arguments[2])
    )
    for batch in (chain[:2], chain[2:]):
        said.clear()
        with database.write() as session:
            record_all(session, batch)
        assert 0 < len(said) < 12


def test_one_of_several_that_cannot_be_recorded_leaves_none(
    database: Database, new_state: Make
) -> None:
    first = new_state(branch="main")
    with database.write() as session:
        record(session, first)
    before = rows(database)
    second = new_state(first.uid, branch="main")
    wrong = [
        (
            [second, new_state(first.uid, branch="main")],
            Conflict,
            f"branch 'main' is at {second.uid}, not at {first.uid}",
        ),
        (
            [second, new_state(branch="main")],
            Conflict,
            f"branch 'main' is at {second.uid}, not at its beginning",
        ),
        (
            [second, replace(second, facts=replace(second.facts, branch=None, parent=None))],
            Conflict,
            f"there is a state .*{second.uid}",
        ),
        ([second, new_state(secrets.token_hex(12), branch="other")], NotFound, "to be the parent"),
        ([second, new_state(second.uid, run="nobody")], NotFound, "no run 'nobody'"),
        (
            [second, new_state(second.uid, edges=(Edge("0" * 24, EdgeKind.MERGE),))],
            NotFound,
            "0{24}",
        ),
    ]
    for batch, error, problem in wrong:
        with pytest.raises(error, match=problem), database.write() as session:
            record_all(session, batch)
    assert rows(database) == before
    with database.write() as session:
        assert record_all(session, []) == []
        record_all(session, [second])
    with database.read() as session:
        assert names_query.get(session, "main").version == 2
