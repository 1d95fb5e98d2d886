"""States beside each other, and branches by settings and metrics, beside brute force over a
random lineage."""

from __future__ import annotations

import math
from typing import Any

import pytest

from datastates.errors import InvalidInput, SyntaxProblem
from datastates.lineage import Database, Run, State, lookup
from datastates.lineage.views.comparison import (
    MOST_COMPARED,
    AxisKind,
    Comparison,
    Parallels,
    Taken,
    compare,
    parallels,
)
from datastates.lineage.views.text import Direction, direction_of
from datastates.lineage.write import record, runs
from tests.lineage.conftest import Grow
from tests.lineage.oracle import METRICS, START, grow
from tests.support.effort import seeds
from tests.support.lineages import told


def same(one: Any, other: Any) -> bool:
    """Whether two values are one: of one sort, NaN like NaN."""
    return bool(
        (isinstance(one, bool) == isinstance(other, bool) and one == other)
        or (one != one and other != other)
    )


@pytest.mark.parametrize("seed", seeds(10))
def test_states_stand_beside_each_other_as_they_are(database: Database, seed: int) -> None:
    lineage = grow(database, seed, 40)
    with database.read() as session:
        picked = [lookup.state(session, lineage.states[place].uid) for place in (-1, 5, 17, -1)]
        found = compare(session, ["a", "b", "c", "d"], picked)
    assert [each.rev for each in found] == ["a", "b", "c", "d"]
    for each, state in zip(found, picked, strict=True):
        assert each.state == state
        chain = (
            one.uid for one in lineage.chain(lineage.by_uid[state.uid]) if one.status.is_restorable
        )
        assert (each.nearest and each.nearest.uid) == next(chain, None)
        owners = {
            name
            for name, uids in lineage.moves.items()
            if name in lineage.branches and state.uid in uids
        }
        assert owners <= {each.branch}
        assert [ref.name for ref in each.refs] == sorted(
            [
                name
                for name, uid in (*lineage.branches.items(), *lineage.tags.items())
                if uid == state.uid
            ]
        )
    for rows, have in (
        (found.config, [state.config for state in picked]),
        (found.metrics, [state.metrics for state in picked]),
        (found.attributes, [state.attributes for state in picked]),
    ):
        values: list[dict[str, Any]] = [dict(each) for each in have]
        assert {row.key for row in rows} == {key for each in values for key in each}
        for row in rows:
            assert all(
                same(value, each.get(row.key))
                for value, each in zip(row.values, values, strict=True)
            )
            is_equal = all(
                row.key in each and same(each[row.key], values[0].get(row.key)) for each in values
            )
            assert row.differs is not is_equal
        assert [row.differs for row in rows] == sorted(
            (row.differs for row in rows), reverse=True
        ), "what differs comes first"


def test_a_setting_that_one_lacks_differs_from_none_and_true_from_one(database: Database) -> None:
    configs: list[dict[str, Any]] = [{"x": None, "flag": True, "same": 1}, {"flag": 1, "same": 1}]
    found = beside(database, configs)
    assert [(row.key, row.values, row.differs) for row in found.config] == [
        ("flag", (True, 1), True),
        ("x", (None, None), True),
        ("same", (1, 1), False),
    ]


def test_code_and_versions_are_compared_too(database: Database) -> None:
    found = beside(database, [{}, {}], commits=["abc", "abd"])
    assert [(row.key, row.values, row.differs) for row in found.code] == [
        ("commit", ("abc", "abd"), True),
        ("torch", ("2", "2"), False),
    ]


def test_so_many_stand_beside_each_other_and_no_more(database: Database, grow: Grow) -> None:
    state = grow(branch="main")
    with database.read() as session:
        assert (
            len(compare(session, ["main"] * MOST_COMPARED, [state] * MOST_COMPARED))
            == MOST_COMPARED
        )
        with pytest.raises(InvalidInput, match="parallel coordinates"):
            compare(session, ["main"] * (MOST_COMPARED + 1), [state] * (MOST_COMPARED + 1))
        with pytest.raises(InvalidInput, match="two states"):
            compare(session, ["main"], [state])


@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.parametrize("taken", list(Taken))
def test_axes_have_what_brute_force_finds(database: Database, seed: int, taken: Taken) -> None:
    lineage = grow(database, seed, 60)
    with database.read() as session:
        found = parallels(session, taken=taken)
    names = sorted(lineage.branches)
    assert [(each.branch, each.head) for each in found.branches] == [
        (name, lineage.branches[name]) for name in names
    ]
    assert (found.total, found.matching) == (len(names), len(names))
    for place, name in enumerate(names):
        own = [lineage.by_uid[uid] for uid in lineage.moves[name]]
        run = own[-1].run
        config = {} if run is None else lineage.runs[run].config
        for axis in found.axes:
            kind, _, key = axis.key.partition(".")
            want = config.get(key) if kind == "config" else value_of(own, key, taken)
            assert same(axis.values[place], want), axis.key
    assert {axis.key for axis in found.axes if axis.kind is AxisKind.METRIC} == {
        f"metrics.{key}"
        for key in METRICS
        if any(key in lineage.by_uid[uid].metrics for name in names for uid in lineage.moves[name])
    }
    check_order(found)


def value_of(own: list[State], key: str, taken: Taken) -> float | None:
    """Of the states that a branch has to itself."""
    values = [state.metrics[key] for state in own if key in state.metrics]
    finite = [value for value in values if math.isfinite(value)]
    if taken is Taken.LAST:
        return values[-1] if values and math.isfinite(values[-1]) else None
    return (min if direction_of(key) is Direction.MIN else max)(finite, default=None)


def check_order(found: Parallels) -> None:
    """Settings come first, those that vary before the others."""
    kinds = [
        (axis.kind is AxisKind.METRIC, axis.kind is AxisKind.SETTING and not axis.varies)
        for axis in found.axes
    ]
    assert kinds == sorted(kinds)
    for axis in found.axes:
        distinct: list[Any] = []
        for value in axis.values:
            if not any(same(value, other) for other in distinct) and value == value:
                distinct.append(value)
        assert axis.varies is (len(distinct) > 1), axis


def test_branches_are_chosen_by_a_condition_a_name_and_a_limit(
    database: Database, grow: Grow
) -> None:
    for number in range(5):
        grow(branch=f"b{number}", metrics={"loss": float(number)})
    with database.read() as session:
        found = parallels(session, "metrics.loss >= 1", limit=2)
        assert ([each.branch for each in found.branches], found.matching, found.total) == (
            ["b1", "b2"],
            4,
            5,
        )
        assert found.axes[0].values == (1.0, 2.0)
        assert [each.branch for each in parallels(session, name="3").branches] == ["b3"]
        with pytest.raises(SyntaxProblem):
            parallels(session, "metrics.loss >=")
        for limit in (0, 1001):
            with pytest.raises(InvalidInput):
                parallels(session, limit=limit)


def test_an_empty_lineage_has_neither_branches_nor_axes(database: Database) -> None:
    with database.read() as session:
        assert parallels(session) == Parallels((), (), 0, 0)


def test_a_notebook_shows_what_differs_and_escapes_it(database: Database) -> None:
    html = beside(database, [{"<b>": "<script>", "same": 1}, {"<b>": "x", "same": 1}])._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "config.same" not in html
    assert "1 more" in html or "2 more" in html


def beside(
    database: Database, configs: list[dict[str, Any]], commits: list[str] | None = None
) -> Comparison:
    """A state of each configuration, compared."""
    found: list[State] = []
    with database.write() as session:
        for number, config in enumerate(configs):
            commit = commits[number] if commits else None
            run = Run(
                f"{number}" * 24,
                "host",
                "me",
                1,
                (),
                commit,
                False,
                config,
                {"torch": "2"} if commits else {},
                START,
            )
            runs.start(session, run)
            found.append(
                record.record(
                    session,
                    told(f"{number:024x}", f"{number:064x}", None, f"b{number}", run.uid, 0),
                )
            )
    with database.read() as session:
        return compare(
            session,
            [f"b{number}" for number in range(len(found))],
            [lookup.state(session, state.uid) for state in found],
        )
