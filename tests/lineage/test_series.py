"""Curves along first parents, and where paths part."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastates.lineage import Database, Edge, EdgeKind, NewState, State
from datastates.lineage.lookup import ids_of
from datastates.lineage.query.curves import Curve, Fork, curve, forks
from datastates.lineage.write import record
from tests.lineage.conftest import Grow
from tests.support.effort import examples


def read(
    database: Database, head: State, key: str = "loss", base: tuple[State, State] | None = None
) -> Curve:
    with database.read() as session:
        (id_,) = ids_of(session, [head.uid])
        if base is None:
            return curve(session, id_, key)
        before, above = ids_of(session, [one.uid for one in base])
        return curve(session, id_, key, base=curve(session, before, key), above=above)


def test_a_curve_has_the_values_of_the_first_parents_in_order(
    database: Database, new_state: Callable[..., NewState]
) -> None:
    side = new_state(metrics={"loss": 99.0})
    states, parent = [], None
    with database.write() as session:
        record.record(session, side)
        for step in range(60):
            metrics = (
                {} if step % 3 else {"loss": math.nan if step == 30 else float(step), "other": 1.0}
            )
            edges = (Edge(side.uid, EdgeKind.MERGE),) if step == 40 else ()
            state = record.record(
                session, new_state(parent, step=step, metrics=metrics, edges=edges)
            )
            states.append(state)
            parent = state.uid
    found = read(database, states[-1])

    with database.read() as session:
        assert list(found.ids) == ids_of(session, [state.uid for state in states[::3]])
    assert list(found.steps) == list(range(0, 60, 3))
    assert [value for value in found.values if not math.isnan(value)] == [
        float(step) for step in range(0, 60, 3) if step != 30
    ]
    assert math.isnan(found.values[10])
    assert not read(database, states[-1], "nothing").ids


def test_a_curve_goes_on_from_what_was_read(database: Database, grow: Grow) -> None:
    shared = grow(count=10, metrics={"loss": 1.0})
    left, right = (
        grow(shared, count=5, metrics={"loss": 2.0}),
        grow(shared, count=4, metrics={"loss": 3.0}),
    )

    assert read(database, right, base=(left, shared)) == read(database, right)
    assert read(database, left, base=(shared, shared)) == read(database, left)
    assert read(database, shared, base=(left, shared)) == read(database, shared)
    assert list(read(database, right).values) == [1.0] * 10 + [3.0] * 4


def test_paths_part_where_their_children_differ(database: Database, grow: Grow) -> None:
    root = grow(count=4)
    warm = grow(root, count=3)
    one, two, three = (grow(warm, count=2) for _ in range(3))
    early, alone = grow(root, count=9), grow(count=2)
    heads = [one, warm, two, early, alone, three, root]

    with database.read() as session:
        ids = dict(
            zip(
                [head.uid for head in heads],
                ids_of(session, [head.uid for head in heads]),
                strict=True,
            )
        )
        found = forks(session, list(ids.values()))
        assert forks(session, [ids[one.uid], ids[one.uid], ids[warm.uid]]) == []

    assert found == [Fork(ids[warm.uid], (0, 2, 5)), Fork(ids[root.uid], (0, 1, 2, 3, 5))]


@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_partings_are_those_of_paths(
    database: Database, new_state: Callable[..., NewState], data: st.DataObject
) -> None:
    uids: list[str] = []
    parents: dict[str, str | None] = {}
    with database.write() as session:
        for _ in range(data.draw(st.integers(1, 15))):
            parent = (
                data.draw(st.sampled_from([None, *uids]))
                if len(uids) < 3
                else data.draw(st.sampled_from(uids))
            )
            new = record.record(session, new_state(parent))
            uids.append(new.uid)
            parents[new.uid] = parent
    heads = data.draw(st.lists(st.sampled_from(uids), min_size=1, max_size=6))
    with database.read() as session:
        ids = dict(zip(uids, ids_of(session, uids), strict=True))
        found = forks(session, [ids[head] for head in heads])

    expected: dict[int, set[int]] = {}
    for (place, one), (other_place, other) in combinations(enumerate(heads), 2):
        first, second = path(parents, one), path(parents, other)
        shared = [uid for uid in first if uid in second]
        if shared and shared[0] not in (one, other):
            expected.setdefault(ids[shared[0]], set()).update((place, other_place))
    assert {parting.id: set(parting.heads) for parting in found} == expected
    assert [parting.id for parting in found] == sorted(expected, reverse=True)


def path(parents: dict[str, str | None], head: str) -> list[str]:
    found: list[str] = []
    at: str | None = head
    while at is not None:
        found.append(at)
        at = parents[at]
    return found
