"""Numbers about a lineage."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime

from datastates.lineage import Database, NewState, Run, Status
from datastates.lineage.views import detail
from datastates.lineage.views.detail import KeyStats
from datastates.lineage.write import record, refs, replicas, runs


def test_everything_is_counted(database: Database, new_state: Callable[..., NewState]) -> None:
    run = Run(
        "a" * 24,
        "host",
        "user",
        1,
        ("train",),
        None,
        None,
        {"lr": 0.1, "seed": 1},
        {},
        datetime.now(UTC),
    )
    first = new_state(
        run=run.uid,
        branch="main",
        metrics={"loss": 2.0, "B": math.inf},
        attributes={"note": "x", "tries": 2},
    )
    second = new_state(first.uid, branch="main", metrics={"loss": math.nan}, status=Status.DURABLE)
    with database.write() as session:
        runs.start(session, run)
        for new in (first, second):
            record.record(session, new)
        refs.tag(session, "warm", first.uid)
        replicas.mark(session, second.uid, Status.DURABLE, rank=0, tier="local", node="n", bytes=5)
    with database.read() as session:
        found, newest = detail.count(session), detail.newest_stats(session)

    assert (found.states, found.statuses, found.branches, found.tags, found.runs) == (
        2,
        {"captured": 1, "durable": 1},
        1,
        1,
        1,
    )
    assert found.metrics == (KeyStats("B", 1, math.inf, math.inf), KeyStats("loss", 2, 2.0, 2.0))
    assert found.attributes == ("note", "tries")
    assert found.config == ("lr", "seed")
    assert newest is not None
    assert newest.uid == second.uid


def test_nothing_is_counted_too(database: Database) -> None:
    with database.read() as session:
        found, newest = detail.count(session), detail.newest_stats(session)

    assert (found.states, found.statuses, found.metrics, found.attributes, found.config) == (
        0,
        {},
        (),
        (),
        (),
    )
    assert newest is None
