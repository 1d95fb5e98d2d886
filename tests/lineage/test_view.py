from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from datastates.lineage import Database, Edge, EdgeKind, NewState, State, Status
from datastates.lineage.views.detail import graph
from datastates.lineage.views.graph import draw, lanes
from datastates.lineage.write import record, refs


def state(uid: str, *parents: str) -> State:
    return State(
        uid=uid, digest="d" * 64, step=0, micro_step=0, metrics={}, attributes={}, message=None, created_at=datetime.now(UTC),
        status=Status.CAPTURED, parents=parents, edges=(), run=None, generation=0, bytes_total=0, bytes_new=0,
    )  # fmt: skip


def drawing(*states: State) -> list[str]:
    lines: list[str] = []
    for each, drawn in zip(states, draw(lanes(states)), strict=True):
        lines += [*drawn.before, f"{drawn.node} {each.uid}", *drawn.after]
    return lines


def test_a_chain_is_one_lane() -> None:
    assert drawing(state("c", "b"), state("b", "a"), state("a")) == ["* c", "* b", "* a"]


def test_a_fork_joins_at_its_state() -> None:
    forked = drawing(state("f", "a"), state("m", "b"), state("b", "a"), state("a"))

    assert forked == ["* f", "│ * m", "│ * b", "├─╯", "* a"]


def test_a_merge_opens_a_lane_for_each_further_parent() -> None:
    merged = drawing(
        state("m", "a", "b", "c"), state("c", "r"), state("b", "r"), state("a", "r"), state("r")
    )

    assert merged == ["* m", "├─┬─╮", "│ │ * c", "│ * │ b", "* │ │ a", "├─┴─╯", "* r"]


def test_a_criss_cross_meets_lanes_that_are_there() -> None:
    crossed = drawing(
        state("x", "a", "b"), state("y", "b", "a"), state("b", "r"), state("a", "r"), state("r")
    )

    assert crossed == ["* x", "├─╮", "│ │ * y", "├─┼─╯", "│ * b", "* │ a", "├─╯", "* r"]


def test_a_history_that_is_cut_off_keeps_its_lines() -> None:
    assert drawing(state("c", "gone"), state("x")) == ["* c", "│ * x"]


@st.composite
def histories(draw: st.DrawFn) -> list[State]:
    """Up to 30 states, newest first, each with up to three older parents."""
    count = draw(st.integers(1, 30))
    parents = [
        draw(st.lists(st.integers(0, max(0, i - 1)), max_size=min(3, i), unique=True))
        for i in range(count)
    ]
    return [state(str(i), *map(str, parents[i])) for i in reversed(range(count))]


@given(histories())
def test_every_line_leads_from_a_state_to_its_parents(history: list[State]) -> None:
    rows = {row.uid: row for row in lanes(history)}
    leads_to: dict[int, str] = {}
    for each in history:
        row = rows[each.uid]
        assert all(
            leads_to.pop(lane) == each.uid
            for lane in (*row.joins, *([row.lane] if row.lane in row.above else []))
        )
        assert each.uid not in leads_to.values(), "every line to a state ends at it"
        for lane, parent in zip(row.parents, each.parents, strict=True):
            assert leads_to.setdefault(lane, parent) == parent
        assert set(row.below) == set(leads_to)
    assert len(list(draw(lanes(history)))) == len(history)


def test_graph_holds_the_subgraph_with_kinds_and_names(
    database: Database, new_state: Callable[..., NewState]
) -> None:
    root = new_state()
    with database.write() as session:
        record.record(session, root)
    left, right = new_state(parent=root.uid), new_state(parent=root.uid)
    soup = new_state(parent=left.uid, edges=(Edge(right.uid, EdgeKind.SOUP, 0.25),))
    with database.write() as session:
        for new in (left, right, soup):
            record.record(session, new)
        refs.tag(session, "best", soup.uid)

    with database.read() as session:
        whole, part = graph(session), graph(session, of=[left.uid], ancestors=0, descendants=None)

    assert set(whole) == {root.uid, left.uid, right.uid, soup.uid}
    assert whole.edges[right.uid, soup.uid] == {"kind": "soup", "weight": 0.25}
    assert whole.edges[left.uid, soup.uid] == {"kind": "parent", "weight": 1.0}
    assert whole.nodes[soup.uid]["refs"] == ["best"]
    assert whole.nodes[root.uid]["state"].uid == root.uid
    assert set(part) == {left.uid, soup.uid}
