"""States from other lineages: their place among those that are here, where they came from, and
whose death loses them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from datastates.errors import Conflict
from datastates.lineage import Database, NewState, Run, State, Status, lookup
from datastates.lineage.query import names, revision, walk
from datastates.lineage.query.names import Replica, holder, replicas_of
from datastates.lineage.states import Edge, EdgeKind
from datastates.lineage.write import clones, replicas, runs
from datastates.storage.tiers import CAPTURED, VOLATILE
from tests.lineage.test_runs import new_run
from tests.lineage.test_walk import counted
from tests.support.parts import run_job
from tests.support.records import clones_of, part_digests

Grow = Callable[..., State]
SOURCE = "ucx://10.0.0.2:4711"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Database]:
    """The lineage that a state is cloned to."""
    opened = Database(f"sqlite:///{tmp_path / 'other.db'}")
    yield opened
    opened.close()


def ancestry(database: Database, state: State) -> list[State]:
    """A state and its ancestors, newest first, as a server sends them."""
    with database.read() as session:
        return walk.log(session, state.uid)


def take(database: Database, states: list[State], made_by: Mapping[str, Run] | None = None) -> int:
    with database.write() as session:
        return clones.import_ancestry(session, states, made_by or {})


def arrive(
    database: Database, state: State, *, run: Run | None = None, node: str = "here"
) -> State:
    with database.write() as session:
        return clones.arrive(
            session,
            state,
            run=None if run is None else run.uid,
            tier=CAPTURED,
            node=node,
            bytes_new=7,
            came=clones.Provenance(SOURCE, "c" * 24, bytes_moved=5),
        )


def started(database: Database, **fields: object) -> Run:
    run = new_run(**fields)  # type: ignore[arg-type] # a host
    with database.write() as session:
        runs.start(session, run)
    return run


def die(database: Database, *dead: Run) -> None:
    with database.write() as session:
        runs.recover(session, [run.uid for run in dead], volatile=VOLATILE)


def status(database: Database, state: State) -> Status:
    with database.read() as session:
        return lookup.state(session, state.uid).status


def places(database: Database, state: State) -> list[tuple[str, str, str | None]]:
    with database.read() as session:
        return [(held.tier, held.node, held.run) for held in replicas_of(session, state.uid)]


def test_each_lineage_has_a_uid_of_its_own_which_stays(
    database: Database, other: Database, database_url: str
) -> None:
    def uid(of: Database) -> str:
        with of.read() as session:
            return clones.repository_uid(session)

    again = Database(database_url)
    assert uid(database) == uid(again) != uid(other)
    again.close()


def test_an_ancestry_is_imported_with_all_that_is_known_of_it_but_its_bytes(
    database: Database, other: Database, grow: Grow
) -> None:
    root = grow(
        branch="main", metrics={"loss": 2.5}, attributes={"lr": 0.1, "note": "x"}, message="begin"
    )
    aside = grow(root, branch="aside", count=5)
    merged = grow(
        root,
        step=9,
        edges=(Edge(aside.uid, EdgeKind.MERGE, 0.25),),
        run=started(database).uid,
        bytes_total=12,
    )
    sent = ancestry(database, merged)

    with database.read() as session:
        made_by = {
            run.uid: run
            for run in runs.by_uids(session, {state.run for state in sent if state.run is not None})
        }
    assert take(other, sent, made_by) == len(sent) == 7
    found = ancestry(other, merged)
    assert found == [
        replace(state, status=Status.EVICTED, run=each.run, bytes_new=0)
        for state, each in zip(sent, found, strict=True)
    ]
    with other.read() as session:
        came = {
            run.uid: run
            for run in runs.by_uids(
                session, {state.run for state in found if state.run is not None}
            )
        }
    assert len(came) == len(made_by) == 1
    assert not came.keys() & made_by.keys()
    with other.read() as session:
        assert names.refs(session) == [], "names stay with those who gave them"


def test_an_edge_to_a_longer_branch_comes_too(
    database: Database, other: Database, grow: Grow
) -> None:
    long = grow(count=20)
    short = grow(None, edges=(Edge(long.uid, EdgeKind.SOUP),))
    take(other, ancestry(database, short))

    assert [state.uid for state in ancestry(other, short)] == [
        state.uid for state in ancestry(database, short)
    ]


def test_revisions_walk_an_imported_ancestry_as_they_do_at_its_source(
    database: Database, other: Database, grow: Grow
) -> None:
    states = ancestry(database, grow(count=70))
    take(other, states[30:])
    take(other, states[:40])

    with database.read() as here, other.read() as there:
        for back in range(70):
            assert (
                revision.resolve(there, f"{states[0].uid}~{back}").uid
                == revision.resolve(here, f"{states[0].uid}~{back}").uid
            )
        jumps = (
            "SELECT uid, generation, jump_step, (SELECT uid FROM state up WHERE up.id ="
            " state.jump_id) FROM state ORDER BY state.uid"
        )
        assert there.execute(text(jumps)).all() == here.execute(text(jumps)).all()
        assert there.execute(text("SELECT count(*) FROM state WHERE parent_id >= id")).scalar() == 0


def test_importing_again_adds_nothing_and_harms_nothing(
    database: Database, other: Database, grow: Grow
) -> None:
    states = ancestry(database, grow(count=4))
    take(other, states[1:])
    arrive(other, states[0])

    assert take(other, states) == 0
    assert status(other, states[0]) is Status.CAPTURED


def test_a_state_whose_parent_did_not_come_begins_a_root(
    database: Database, other: Database, grow: Grow
) -> None:
    child = grow(count=3)
    take(other, [child])

    assert [state.parents for state in ancestry(other, child)] == [()]


def test_the_same_uid_with_another_digest_is_refused_and_nothing_is_recorded(
    database: Database, other: Database, grow: Grow
) -> None:
    states = ancestry(database, grow(count=3))
    take(other, states[2:])
    forged = replace(states[2], digest="f" * 64)

    with pytest.raises(
        Conflict,
        match=f"state {forged.uid} is here with the digest {states[2].digest[:16]}, not ffffffff",
    ):
        take(other, [*states[:2], forged])
    with pytest.raises(Conflict, match="forged"):
        arrive(other, forged)
    with other.read() as session:
        assert session.execute(
            text("SELECT (SELECT count(*) FROM state), (SELECT count(*) FROM clone)")
        ).one() == (1, 0)


def test_a_cloned_state_is_captured_here_and_knows_where_it_came_from(
    database: Database, other: Database, grow: Grow
) -> None:
    source = grow(count=2, metrics={"loss": 1.0}, bytes_total=11)
    run = started(other)
    take(other, ancestry(database, source)[1:])
    now = arrive(other, source, run=run)

    assert now == replace(source, status=Status.CAPTURED, bytes_new=7)
    assert places(other, source) == [("memory", "here", run.uid)]
    with other.read() as session:
        (clone,) = clones_of(session, source.uid)
    assert (clone.source, clone.source_repository, clone.node, clone.run, clone.bytes_moved) == (
        SOURCE,
        "c" * 24,
        "here",
        run.uid,
        5,
    )


def test_an_evicted_state_whose_bytes_come_is_captured_again(
    database: Database, other: Database, grow: Grow
) -> None:
    states = ancestry(database, grow(count=2))
    take(other, states)

    assert arrive(other, states[1]).status is Status.CAPTURED
    assert status(other, states[0]) is Status.EVICTED


def test_a_durable_state_stays_durable_when_it_is_cloned(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        replicas.mark(session, state.uid, Status.DURABLE, tier="local", node="here")

    assert arrive(database, state, run=started(database)).status is Status.DURABLE


@pytest.mark.parametrize("node", ["here", "there"])
def test_a_state_is_lost_only_when_the_last_process_that_holds_it_died(
    database: Database, grow: Grow, node: str
) -> None:
    a, b, c = started(database), started(database, host=node), started(database)
    state = grow(branch="main", run=a.uid, node=f"here#{a.uid}")
    unshared = grow(branch="alone", run=a.uid, node=f"here#{a.uid}")
    arrive(database, state, run=b, node=node)
    arrive(database, state, run=c)

    die(database, a)
    assert (status(database, state), status(database, unshared)) == (Status.CAPTURED, Status.LOST)
    with database.read() as session:
        assert [ref.name for ref in names.refs(session)] == ["main"]
    die(database, b)
    assert places(database, state) == [("memory", "here", c.uid)]
    die(database, c)
    assert (status(database, state), places(database, state)) == (Status.LOST, [])


def test_a_receiver_that_dies_takes_nothing_from_who_captured_the_state(
    database: Database, grow: Grow
) -> None:
    a, b = started(database), started(database)
    state = grow(run=a.uid, node=f"here#{a.uid}")
    arrive(database, state, run=b)

    with database.read() as session:
        held = [runs.in_memory(session, run.uid, volatile=VOLATILE) for run in (a, b)]
        assert held == [{state.uid: state.digest}] * 2
    die(database, b)
    assert status(database, state) is Status.CAPTURED
    assert places(database, state) == [("memory", "here", a.uid)]


def test_a_receiver_that_lets_go_leaves_the_other_replica_of_its_node(
    database: Database, grow: Grow
) -> None:
    a, b = started(database), started(database)
    state = grow(run=a.uid, node=f"here#{a.uid}", bytes_total=5, bytes_new=3)
    arrive(database, state, run=b)
    with database.write() as session:
        assert replicas.evict(session, [state.uid], tier="memory", node=f"here#{b.uid}") == []
    with database.read() as session:
        assert replicas_of(session, state.uid) == [Replica(0, "memory", "here", "ok", 3, a.uid)]


def test_ten_thousand_ancestors_take_a_few_statements_for_each_five_hundred(
    other: Database, new_state: Callable[..., NewState]
) -> None:
    states: list[State] = []
    for generation in range(10_000):
        new = new_state(step=generation, metrics={"loss": 1.0, "accuracy": 0.5})
        parents = (states[-1].uid,) if states else ()
        states.append(
            State(
                uid=secrets.token_hex(12),
                digest=new.digest,
                step=generation,
                micro_step=0,
                metrics=new.facts.metrics,
                attributes={},
                message=None,
                created_at=new_run().started_at,
                status=Status.CAPTURED,
                parents=parents,
                edges=(),
                run=None,
                generation=generation,
                bytes_total=0,
                bytes_new=0,
            )
        )
    with counted(other) as statements:
        assert take(other, states[::-1]) == 10_000

    with other.read() as session:
        assert revision.resolve(session, f"{states[-1].uid}~9999").uid == states[0].uid
    assert len(statements) < 0.05 * 10_000


def test_all_parts_of_a_state_arrive_at_once_and_go_with_their_holder(
    database: Database, other: Database
) -> None:
    uid = run_job(database).whole[-1]
    with database.read() as session:
        state, digests = lookup.state(session, uid), part_digests(session, uid)
    run = started(other)

    def come(digests: Sequence[str]) -> State:
        parts = [(digest, 5 + rank) for rank, digest in enumerate(digests)]
        came = clones.Provenance(SOURCE, "c" * 24, bytes_moved=5)
        with other.write() as session:
            return clones.arrive(
                session,
                state,
                run=run.uid,
                tier=CAPTURED,
                node="here",
                bytes_new=7,
                came=came,
                parts=parts,
            )

    take(other, ancestry(database, state)[1:])
    assert come(digests).status is Status.CAPTURED
    with other.read() as session:
        assert part_digests(session, uid) == digests
        assert runs.parts_in_memory(session, run.uid, volatile=VOLATILE) == {
            (uid, rank): digest for rank, digest in enumerate(digests)
        }
        assert [(held.rank, held.bytes) for held in replicas_of(session, uid)] == [
            (0, 5),
            (1, 6),
            (2, 7),
        ]
    with pytest.raises(Conflict, match="rank 1 of state"):
        come([digests[0], digests[2], digests[2]])
    with other.write() as session:
        assert replicas.evict(session, [uid], tier=CAPTURED, node=holder("here", run.uid)) == [uid]
    assert status(other, state) is Status.EVICTED
    assert come(digests).status is Status.CAPTURED, "all parts are here again"
    die(other, run)
    assert status(other, state) is Status.LOST
