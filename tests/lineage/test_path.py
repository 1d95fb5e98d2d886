"""Paths between states, and what is known of all of them at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import networkx as nx
import pytest

from datastates.lineage import Database, Edge, EdgeKind, NewState, Status
from datastates.lineage.lookup import ids_of
from datastates.lineage.query.walk import metric_along, path_ids, restorable_along
from datastates.lineage.write import record
from tests.support.effort import seeds

Make = Callable[..., NewState]


@pytest.mark.parametrize("seed", seeds(5))
def test_a_path_leads_from_parent_to_child_wherever_there_is_one(
    database: Database, new_state: Make, seed: int
) -> None:
    chance = random.Random(seed)
    graph: nx.DiGraph[int] = nx.DiGraph()
    made: list[str] = []
    with database.write() as session:
        for number in range(40):
            parent = chance.choice(made) if made and chance.random() < 0.95 else None
            others = [
                each
                for each in chance.sample(made, min(len(made), 2))
                if each != parent and chance.random() < 0.3
            ]
            edges = (
                tuple(Edge(each, EdgeKind.MERGE) for each in others) if parent is not None else ()
            )
            new = new_state(parent, step=number, edges=edges)
            record.record(session, new)
            made.append(new.uid)
            graph.add_node(number)
            graph.add_edges_from((made.index(each), number) for each in new.facts.parents)
        ids = ids_of(session, made)
        for old in range(40):
            for new_one in range(40):
                path = [ids.index(id_) for id_ in path_ids(session, ids[old], ids[new_one])]
                assert bool(path) == nx.has_path(graph, old, new_one)
                assert not path or (path[0], path[-1]) == (old, new_one)
                assert all(graph.has_edge(*pair) for pair in pairwise(path))


def test_metrics_and_bytes_are_told_of_the_path_alone(database: Database, new_state: Make) -> None:
    with database.write() as session:
        news: list[NewState] = []
        for step in range(6):
            metrics = {} if step == 3 else {"loss": math.nan if step == 4 else float(step)}
            status = Status.EVICTED if step == 2 else Status.CAPTURED
            news.append(
                new_state(news[-1].uid if news else None, step=step, metrics=metrics, status=status)
            )
            record.record(session, news[-1])
        beside = new_state(news[0].uid, step=9, metrics={"loss": 9.0})
        record.record(session, beside)
        ids = ids_of(session, [new.uid for new in news])
        path = path_ids(session, ids[1], ids[5])
        found = metric_along(session, path, "loss")
        assert list(found) == [ids[1], ids[2], ids[4], ids[5]]
        assert math.isnan(found.pop(ids[4]))
        assert list(found.values()) == [1.0, 2.0, 5.0]
        assert restorable_along(session, path) == {ids[1], ids[3], ids[4], ids[5]}
