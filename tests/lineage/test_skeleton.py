"""The forks of a history: against what its definition says of every state, also after captures."""

from __future__ import annotations

import itertools
from array import array

from hypothesis import given
from hypothesis import strategies as st

from datastates.lineage.query.walk import Topology
from datastates.lineage.views.graph import Skeleton, draw_nodes, opened, owners, skeleton
from tests.lineage.test_drawing import Parents, graphs, heads_of, topology_of


def check(made: Skeleton, topology: Topology, order: list[int], keep: set[int]) -> None:
    """Every state is in one node; what says how the history goes is a node of its own; nothing
    else is, next to another such."""
    children = {id_: [one for one in order if topology.first[one] == id_] for id_ in order}
    merged = {parent for id_ in order for parent in topology.further.get(id_, ())}
    members: dict[int, list[int]] = {}
    for id_ in order:
        members.setdefault(made.node(id_), []).append(id_)
    assert set(members) == set(made.first) == set(made.order())
    for node, states in members.items():
        if node in made.counts:
            assert (len(states), states[0], states[-1]) == (
                made.counts[node],
                node,
                made.newest[node],
            )
            assert all(topology.first[id_] == before for before, id_ in itertools.pairwise(states))
        else:
            assert states == [node]
        parent = topology.first[node]
        assert made.first[node] == (made.node(parent) if parent > 0 else 0)
    for id_ in order:
        if (
            id_ in keep
            or len(children[id_]) != 1
            or id_ in topology.further
            or id_ in merged
            or topology.first[id_] == 0
        ):
            assert id_ in made.first
            assert id_ not in made.counts


def none_is_left(made: Skeleton) -> None:
    """No stretch goes on in another."""
    assert not [node for node in made.counts if made.first[node] in made.counts]


@given(st.data())
def test_a_skeleton_has_what_says_how_the_history_goes(data: st.DataObject) -> None:
    parents = data.draw(graphs())
    topology, heads = topology_of(parents), data.draw(heads_of(parents))
    order = topology.history(heads)
    keep = {*heads, *data.draw(st.sets(st.sampled_from(list(order)), max_size=3))}

    made = skeleton(topology, order, keep)

    check(made, topology, list(order), keep)
    none_is_left(made)


@given(st.data())
def test_captures_make_of_it_what_it_would_be_anew(data: st.DataObject) -> None:
    parents = data.draw(graphs())
    topology = topology_of(parents)
    tips: set[int] = set()
    old: Skeleton | None = None
    for upto in sorted(
        {len(parents), *data.draw(st.sets(st.sampled_from(sorted(parents)), max_size=6))}
    ):
        tips = {
            id_
            for id_ in range(1, upto + 1)
            if not any(id_ in parents[child] for child in range(id_ + 1, upto + 1))
        }
        order = array("q", range(1, upto + 1))
        old = skeleton(topology, order, tips, old=old)
        check(old, topology, list(order), tips)
    anew = skeleton(topology, array("q", sorted(parents)), tips)
    assert old is not None
    assert (old.first, old.counts, old.newest) == (anew.first, anew.counts, anew.newest)


def chain(count: int) -> Parents:
    return {id_: (id_ - 1,) if id_ > 1 else () for id_ in range(1, count + 1)}


def test_a_training_that_captures_is_three_nodes_however_long_it_is() -> None:
    topology = topology_of(chain(50))
    made = skeleton(topology, array("q", range(1, 41)), {40})
    grown = skeleton(topology, array("q", range(1, 51)), {50}, old=made)

    assert (dict(made.counts), list(made.order())) == ({2: 38}, [1, 2, 40])
    assert (dict(grown.counts), list(grown.order())) == ({2: 48}, [1, 2, 50])
    assert list(made.order()) == [1, 2, 40], "the one before stays what it was"


@given(st.data())
def test_an_open_stretch_has_a_node_for_each_state_and_parts_where_it_is_told(
    data: st.DataObject,
) -> None:
    parents = data.draw(graphs())
    topology = topology_of(parents)
    heads = data.draw(heads_of(parents))
    order = topology.history(heads)
    some = st.lists(st.sampled_from(list(order)), max_size=4)
    whole, alone = data.draw(some), data.draw(some)
    base = skeleton(topology, order, heads)

    made = opened(base, whole, alone)

    shown = {id_ for id_ in order if base.node(id_) in {base.node(one) for one in whole}}
    check(made, topology, list(order), set(heads))
    assert all(made.counts.get(made.node(id_), 1) == 1 for id_ in shown | set(alone))
    drawn = draw_nodes(made, frozenset(heads), made.order(), trunk=min(heads), preferred={})
    assert [one.id for one in drawn.rows(0, drawn.total)] == sorted(made.first, reverse=True)


def test_what_branches_have_in_common_belongs_to_the_first_of_them() -> None:
    topology = topology_of({1: (), 2: (1,), 3: (2,), 4: (3,), 5: (3,), 6: (5,)})
    made = skeleton(topology, array("q", range(1, 7)), {4, 6})
    assert owners(made, {4: 0, 6: 1}) == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 1}
    assert owners(made, {4: 1, 6: 0}) == {1: 0, 2: 0, 3: 0, 4: 1, 5: 0, 6: 0}


def test_the_trunk_stands_in_the_first_column_whatever_leads_to_it() -> None:
    topology = topology_of({1: (), 2: (1,), 3: (2,), 4: (3,), 5: (2,)})
    drawn = draw_nodes(
        made := skeleton(topology, array("q", range(1, 6)), {3, 4, 5}),
        frozenset((3, 4, 5)),
        made.order(),
        trunk=3,
        preferred={},
    )
    assert {one.id: one.lane for one in drawn.rows(0, 9)} == {1: 0, 2: 0, 3: 0, 4: 2, 5: 1}
