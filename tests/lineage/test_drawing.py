"""Rows of a drawing, whatever rows, against the lanes of the whole; also after heads moved."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.lineage import State, Status
from datastates.lineage.query import walk
from datastates.lineage.query.walk import Topology
from datastates.lineage.views import graph
from datastates.lineage.views.graph import Drawing, draw_history, lanes

Parents = dict[int, tuple[int, ...]]


@pytest.fixture(autouse=True, params=[0, 1000], ids=["run by run", "state by state"])
def _short_strides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small graphs have many places that are kept; and what has long runs is drawn as
    what has none, and the other way round."""
    monkeypatch.setattr(graph, "STRIDE", 4)
    for module in (graph, walk):
        monkeypatch.setattr(module, "SHORT", request.param)


def topology_of(parents: Parents) -> Topology:
    topology = Topology()
    topology.first = array(
        "q", [0, *(parents[id_][0] if parents[id_] else 0 for id_ in sorted(parents))]
    )
    topology.further = {id_: these[1:] for id_, these in parents.items() if len(these) > 1}
    return topology


def state(id_: int, parents: tuple[int, ...]) -> State:
    return State(
        uid=str(id_), digest="", step=0, micro_step=0, metrics={}, attributes={}, message=None, created_at=datetime.now(UTC),
        status=Status.CAPTURED, parents=tuple(map(str, parents)), edges=(), run=None, generation=0, bytes_total=0, bytes_new=0,
    )  # fmt: skip


def check(made: Drawing, parents: Parents) -> None:
    """Every window of the drawing is that of the lanes of all its states, when these prefer its
    tips' columns."""
    seen: set[int] = set()
    open_ = list(made.heads)
    while open_:
        id_ = open_.pop()
        if id_ not in seen:
            seen.add(id_)
            open_.extend(parents[id_])
    states = [state(id_, parents[id_]) for id_ in sorted(seen, reverse=True)]
    whole = list(lanes(states, preferred={str(tip): lane for tip, lane in made.tips.items()}))
    assert made.total == len(whole)
    for first in range(made.total + 1):
        for row, one in zip(made.rows(first, 5), whole[first : first + 5], strict=True):
            assert (str(row.id), row.lane, row.above, row.below) == (
                one.uid,
                one.lane,
                one.above,
                one.below,
            )
            assert (row.joins, row.parents) == (one.joins, one.parents)
            assert made.row_of(row.id) == whole.index(one)
    columns = {column for row in whole for column in (row.lane, *row.above, *row.below)}
    assert made.width == max(columns, default=-1) + 1


@st.composite
def graphs(draw: st.DrawFn, most: int = 40) -> Parents:
    """States with up to three older parents each; most go on from a recent one, as captures do."""
    count = draw(st.integers(1, most))
    parents: Parents = {}
    for id_ in range(1, count + 1):
        near = st.integers(max(1, id_ - 3), max(1, id_ - 1))
        anywhere = st.integers(1, max(1, id_ - 1))
        wanted = draw(
            st.one_of(
                st.lists(near, min_size=1, max_size=1), st.lists(anywhere, max_size=3, unique=True)
            )
        )
        parents[id_] = tuple(wanted) if id_ > 1 else ()
    return parents


@st.composite
def heads_of(draw: st.DrawFn, parents: Parents) -> frozenset[int]:
    return frozenset(draw(st.sets(st.sampled_from(sorted(parents)), min_size=1, max_size=5)))


@given(st.data())
def test_windows_are_those_of_all_lanes(data: st.DataObject) -> None:
    parents = data.draw(graphs())
    made = draw_history(topology_of(parents), data.draw(heads_of(parents)))
    assert made is not None
    check(made, parents)
    fresh = list(lanes(state(id_, parents[id_]) for id_ in reversed(made.order)))
    assert [row.lane for row in made.rows(0, made.total)] == [row.lane for row in fresh], (
        "a first drawing prefers nothing"
    )


@given(st.data())
def test_windows_are_those_of_all_lanes_after_heads_moved(data: st.DataObject) -> None:
    parents = data.draw(graphs())
    made = draw_history(topology_of(parents), data.draw(heads_of(parents)))
    for _ in range(3):
        assert made is not None
        before = made
        for _ in range(data.draw(st.integers(0, 6))):  # captures, forks and merges
            new = len(parents) + 1
            tips = sorted(before.heads | {new - 1})
            parents[new] = tuple(
                dict.fromkeys(data.draw(st.lists(st.sampled_from(tips), min_size=1, max_size=2)))
            )
        keeps = data.draw(st.booleans())
        heads = frozenset(range(len(parents) - 2, len(parents) + 1)) - {0, -1} | (
            before.heads if keeps else frozenset()
        )
        made = draw_history(topology_of(parents), heads, old=before)
        assert made is not None
        check(made, parents)


def braided(count: int, branches: int) -> Parents:
    """Branches that fork from state 1 and are captured in turn."""
    return {id_: () if id_ == 1 else (max(1, id_ - branches),) for id_ in range(1, count + 1)}


def test_branches_stay_in_their_columns_and_what_is_old_is_not_drawn_again() -> None:
    parents = braided(401, 4)
    old = draw_history(topology_of(parents), frozenset(range(398, 402)))
    assert old is not None
    grown = parents | {402: (400,), 403: (402,), 404: (399,)}
    heads = frozenset((398, 401, 403, 404))

    new = draw_history(topology_of(grown), heads, old=old, budget_rows=20)

    assert new is not None, "within the budget: most of the old drawing was used"
    assert new.tips == {
        403: old.tips[400],
        404: old.tips[399],
        398: old.tips[398],
        401: old.tips[401],
    }
    assert sum(one is old.kept.get(place) for place, one in new.kept.items()) > 45
    check(new, grown)


def test_a_new_branch_stands_beside_those_that_are_there() -> None:
    parents = braided(401, 4)
    old = draw_history(topology_of(parents), frozenset(range(398, 402)))
    assert old is not None
    grown = parents | {402: (201,), 403: (402,)}

    new = draw_history(topology_of(grown), old.heads | {403}, old=old)

    assert new is not None
    assert new.tips == {**old.tips, 403: 4}
    check(new, grown)


def test_a_drawing_beyond_the_budget_is_left_to_the_background() -> None:
    parents = braided(401, 4)
    topology = topology_of(parents)
    old = draw_history(topology, frozenset(range(398, 402)))

    assert draw_history(topology, frozenset((398, 400)), old=old, budget_rows=100) is None
    paused: list[None] = []
    new = draw_history(topology, frozenset((398, 400)), old=old, pause=lambda: paused.append(None))
    assert new is not None
    assert len(paused) > 20
    check(new, parents)


def test_the_version_tells_drawings_apart() -> None:
    parents = braided(41, 4)
    topology = topology_of(parents)
    one, other = (draw_history(topology, frozenset(heads)) for heads in ((41, 40), (41, 39)))
    again = draw_history(topology_of(parents), frozenset((40, 41)))
    assert one is not None
    assert other is not None
    assert again is not None
    assert one.version == again.version != other.version


def test_many_open_lines_are_kept_at_few_places() -> None:
    parents: Parents = {
        1: (),
        **dict.fromkeys(range(2, 202), (1,)),
        **{id_: (id_ - 200,) for id_ in range(202, 402)},
    }
    made = draw_history(topology_of(parents), frozenset(range(202, 402)))
    assert made is not None
    assert made.width == 200
    assert sum(len(one.awaited) for one in made.kept.values()) < made.total
    check(made, parents)


def test_nothing_is_a_drawing_without_rows() -> None:
    made = draw_history(Topology(), frozenset())
    assert made is not None
    assert (made.total, made.width, made.rows(0, 10)) == (0, 0, [])
