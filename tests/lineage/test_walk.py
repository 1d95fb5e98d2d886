"""Looking up and walking, on graphs with first and further parents."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from datastates.errors import Ambiguous, InvalidInput, NotFound
from datastates.lineage import Database, Edge, EdgeKind, NewState, State, Status, lookup
from datastates.lineage.query import walk
from datastates.lineage.write import record
from tests.lineage.looking import by_prefix, nth_ancestor
from tests.support.effort import examples

Make = Callable[..., NewState]
Grow = Callable[..., State]
Graph = list[tuple[int | None, list[int]]]


@pytest.fixture
def chain(database: Database, new_state: Make) -> list[str]:
    """The uids of 700 states, each the only child of the one before."""
    news: list[NewState] = []
    with database.write() as session:
        for step in range(700):
            news.append(
                new_state(
                    news[-1].uid if news else None,
                    step=step,
                    metrics={"loss": 1.0},
                    attributes={"a": 1},
                )
            )
            record.record(session, news[-1])
    return [new.uid for new in news]


@contextmanager
def counted(database: Database) -> Iterator[list[str]]:
    """The statements that run inside."""
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        statements.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def uids(states: list[State]) -> list[str]:
    return [state.uid for state in states]


def test_states_come_in_the_order_asked_in_a_few_queries(
    database: Database, chain: list[str]
) -> None:
    asked = random.Random(1).choices(chain, k=900)
    with database.read() as session, counted(database) as statements:
        assert uids(lookup.states(session, asked)) == asked
        assert lookup.states(session, []) == []
    assert len(statements) == 5


def test_an_unknown_state_is_named(database: Database, chain: list[str]) -> None:
    with database.read() as session:
        with pytest.raises(NotFound, match=r"no state 'x'"):
            lookup.state(session, "x")
        with pytest.raises(NotFound, match=r"no state 'x'"):
            lookup.states(session, [chain[0], "x"])
        with pytest.raises(NotFound, match=r"no state with row id 9999"):
            lookup.states(session, [1, 9999])
        for function in (
            walk.log,
            walk.ancestors,
            walk.descendants,
            walk.children,
            walk.nearest_restorable,
        ):
            with pytest.raises(NotFound, match=r"no state 'x'"):
                function(session, "x")
        for a, b in ((chain[0], "x"), ("x", chain[0])):
            with pytest.raises(NotFound, match=r"no state 'x'"):
                walk.is_ancestor(session, a, b)
            with pytest.raises(NotFound, match=r"no state 'x'"):
                walk.merge_base(session, a, b)


def test_a_prefix_finds_the_one_state_it_begins(database: Database, grow: Grow) -> None:
    states = [
        grow(uid=uid)
        for uid in ("abcd0" + "0" * 19, "abcdf" + "f" * 19, "abce" + "0" * 20, "f" * 24)
    ]
    with database.read() as session:
        for prefix, state in (
            ("abcd0", states[0]),
            ("ABCDF", states[1]),
            ("abce", states[2]),
            ("ffff", states[3]),
            ("f" * 24, states[3]),
        ):
            assert by_prefix(session, prefix) == state
        with pytest.raises(
            Ambiguous,
            match=f"'abcd' begins several uids: .*{states[0].uid} .step 0.*give more digits",
        ):
            by_prefix(session, "abcd")
        with pytest.raises(NotFound, match=r"no state's uid begins with 'abcd1'"):
            by_prefix(session, "abcd1")
        for bad in ("abc", "main", "%%%%", "f" * 25, ""):
            with pytest.raises(InvalidInput, match=r"4 to 24 hex digits"):
                by_prefix(session, bad)


def test_many_candidates_are_cut_short(database: Database, grow: Grow) -> None:
    for digit in "0123456":
        grow(uid="abcd" + digit * 20)
    with database.read() as session, pytest.raises(Ambiguous) as caught:
        by_prefix(session, "abcd")
    assert str(caught.value).count("step") == 5
    assert "..." in str(caught.value)


def test_a_long_chain_is_walked_in_pages_newest_first(database: Database, chain: list[str]) -> None:
    with database.read() as session, counted(database) as statements:
        assert len(walk.ancestor_ids(session, chain[-1])) == 699
    assert len(statements) <= 6
    with database.read() as session:
        assert uids(walk.log(session, chain[-1])) == chain[::-1]
        assert uids(walk.ancestors(session, chain[-1])) == chain[-2::-1]
        assert uids(walk.log(session, chain[-1], limit=3)) == chain[:-4:-1]
        assert uids(walk.ancestors(session, chain[-1], limit=3)) == chain[-2:-5:-1]
        assert walk.log(session, chain[-1], limit=0) == walk.ancestors(session, chain[0]) == []


def test_a_page_of_log_reads_no_more_than_a_page(database: Database, chain: list[str]) -> None:
    with database.read() as session, counted(database) as statements:
        walk.log(session, chain[-1], limit=20)
    assert len(statements) == 7


def test_the_nth_ancestor_is_one_statement_away(database: Database, chain: list[str]) -> None:
    with database.read() as session:
        for n in (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 511, 698, 699):
            assert nth_ancestor(session, chain[-1], n).uid == chain[-1 - n]
        with counted(database) as statements:
            nth_ancestor(session, chain[-1], 600)
        assert len(statements) == 6
        with pytest.raises(NotFound, match="699 first parents up to its root: ~700 goes beyond"):
            nth_ancestor(session, chain[-1], 700)
        with pytest.raises(InvalidInput, match="-1 is no number of generations"):
            nth_ancestor(session, chain[-1], -1)


def test_ancestry_along_first_parents_takes_few_statements(
    database: Database, chain: list[str], grow: Grow
) -> None:
    with database.read() as session:
        trunk = lookup.state(session, chain[400])
    fork = grow(trunk, count=90)
    with database.read() as session, counted(database) as statements:
        assert walk.is_ancestor(session, chain[3], chain[-1])
        assert not walk.is_ancestor(session, chain[401], fork.uid)
        assert not walk.is_ancestor(session, chain[-1], chain[3])
        assert walk.merge_base(session, fork.uid, chain[-1]) == trunk
    assert len(statements) <= 4 + 5 + 2 + 10


def test_histories_that_never_meet_have_no_merge_base(database: Database, grow: Grow) -> None:
    one, other = grow(count=3), grow(count=8)
    with database.read() as session:
        assert walk.merge_base(session, one.uid, other.uid) is None
        assert not walk.is_ancestor(session, one.uid, other.uid)
    # now there are further parents, the way of looking is another
    grow(one, edges=(Edge(one.uid, EdgeKind.MERGE),))
    with database.read() as session:
        assert walk.merge_base(session, one.uid, other.uid) is None


def test_children_come_through_first_and_further_parents_once(
    database: Database, grow: Grow
) -> None:
    root, other = grow(), grow()
    first = grow(root)
    both = grow(root, edges=(Edge(root.uid, EdgeKind.MERGE),))
    further = grow(other, edges=(Edge(root.uid, EdgeKind.SOUP, 0.5),))
    grow(first)
    with database.read() as session:
        assert walk.children(session, root.uid) == [first, both, further]
        assert walk.children(session, other.uid) == [further]


def test_limited_descendants_are_the_nearest(
    database: Database, chain: list[str], grow: Grow
) -> None:
    with database.read() as session:
        root = lookup.state(session, chain[0])
        assert uids(walk.descendants(session, chain[0])) == chain[1:]
        assert uids(walk.descendants(session, chain[0], limit=4)) == chain[1:5]
        assert walk.descendants(session, chain[-1]) == []
    near = grow(root)
    with database.read() as session:
        assert uids(walk.descendants(session, chain[0], limit=2)) == [chain[1], near.uid]


def test_the_nearest_restorable_state_is_up_the_first_parents(
    database: Database, grow: Grow
) -> None:
    base = grow()
    lost = grow(base, count=50, status=Status.LOST)
    evicted = grow(lost, status=Status.EVICTED, edges=(Edge(grow().uid, EdgeKind.MERGE),))
    alone = grow(status=Status.LOST)
    with database.read() as session:
        assert walk.nearest_restorable(session, evicted.uid) == base
        assert walk.nearest_restorable(session, base.uid) == base
        assert walk.nearest_restorable(session, alone.uid) is None


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """For each state its first parent and its further parents, all of them earlier states."""
    has_further = draw(st.booleans())
    graph: Graph = [(None, [])]
    for size in range(1, draw(st.integers(2, 24))):
        near = st.integers(max(0, size - 3), size - 1)
        first = draw(st.none() | near | near | near | st.integers(0, size - 1))
        further = (
            draw(st.lists(st.integers(0, size - 1), max_size=2, unique=True))
            if has_further and draw(st.integers(0, 3)) == 0
            else []
        )
        graph.append((first, further))
    return graph


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(graph=graphs(), data=st.data())
def test_walks_agree_with_brute_force(
    database: Database,
    new_state: Make,
    graph: list[tuple[int | None, list[int]]],
    data: st.DataObject,
) -> None:
    with database.write() as session:
        # what earlier examples left is other graphs; further parents among them change the way of
        # looking
        session.exec_driver_sql("DELETE FROM edge")
    model: nx.DiGraph[int] = nx.DiGraph()
    states: list[State] = []
    with database.write() as session:
        for number, (first, further) in enumerate(graph):
            edges = tuple(Edge(states[parent].uid, EdgeKind.MERGE) for parent in further)
            states.append(
                record.record(
                    session, new_state(None if first is None else states[first].uid, edges=edges)
                )
            )
            model.add_node(number)
            model.add_edges_from(
                (parent, number) for parent in {*further, first} - {None} if parent is not None
            )
    number_of = {state.uid: number for number, state in enumerate(states)}
    pairs = st.tuples(st.integers(0, len(states) - 1), st.integers(0, len(states) - 1))
    with database.read() as session:
        for a, b in data.draw(st.lists(pairs, min_size=1, max_size=8)):
            above = {number: nx.ancestors(model, number) for number in (a, b)}
            found = [number_of[state.uid] for state in walk.ancestors(session, states[a].uid)]
            assert found == sorted(above[a], reverse=True)
            assert [
                number_of[state.uid] for state in walk.descendants(session, states[a].uid)
            ] == sorted(nx.descendants(model, a))
            assert {number_of[state.uid] for state in walk.children(session, states[a].uid)} == set(
                model.successors(a)
            )
            assert walk.is_ancestor(session, states[a].uid, states[b].uid) == (
                a == b or a in above[b]
            )
            common = (above[a] | {a}) & (above[b] | {b})
            base = walk.merge_base(session, states[a].uid, states[b].uid)
            assert (None if base is None else number_of[base.uid]) == max(common, default=None)
            at: int | None = a
            for n in range(states[a].generation + 1):
                assert at is not None
                assert number_of[nth_ancestor(session, states[a].uid, n).uid] == at
                at = graph[at][0]
            assert at is None
