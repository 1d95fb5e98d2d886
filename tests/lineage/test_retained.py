"""What a folder of packs holds, and what of it is counted on."""

from __future__ import annotations

import math
from collections.abc import Callable

from datastates.lineage import Database, State, Status
from datastates.lineage.change import refs
from datastates.lineage.change.record import mark
from datastates.lineage.lookup import id_of
from datastates.lineage.search import retained

Grow = Callable[..., State]
HERE = {"tier": "local", "node": "here"}


def held(database: Database, state: State, node: str = "here") -> None:
    with database.write() as session:
        mark(session, state.uid, Status.DURABLE, tier="local", node=node, bytes=1)


def test_the_oldest_state_that_is_held_is_what_a_name_leads_to(database: Database, grow: Grow) -> None:
    root = grow(branch="main")
    oldest = grow(root, branch="main")
    head = grow(grow(oldest, branch="main"), branch="main")
    held(database, oldest)
    held(database, root, node="elsewhere")
    with database.write() as session:
        refs.tag(session, "early", root.uid)
    with database.read() as session:
        assert retained.counted_on(session, **HERE) == {id_of(session, oldest.uid): "the newest durable state of branch 'main'"}
        assert retained.counted_on(session, tier="local", node="nowhere") == {}
    held(database, head)
    with database.read() as session:
        assert retained.counted_on(session, **HERE) == {id_of(session, head.uid): "the head of branch 'main'"}


def test_states_that_are_held_come_with_the_metrics_that_are_numbers(database: Database, grow: Grow) -> None:
    first = grow(branch="main", metrics={"loss": 2.0, "other": 1.0})
    second = grow(first, branch="main", metrics={"loss": math.nan, "val": 0.5})
    grow(second, branch="main", metrics={"loss": 0.5})
    for state in (first, second):
        held(database, state)
    with database.read() as session:
        found = {each.uid: each.metrics for each in retained.durable(session, **HERE, keys={"loss", "val"})}
    assert found == {first.uid: {"loss": 2.0}, second.uid: {"val": 0.5}}
