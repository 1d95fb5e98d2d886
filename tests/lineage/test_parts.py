"""A state of several parts: invisible until every rank reported, whole or not at all."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage import Database, Edge, EdgeKind, NewState, Run, State, Status, lookup
from datastates.lineage.query import incomplete, names, pages, walk
from datastates.lineage.query.incomplete import outcomes, waiting
from datastates.lineage.query.names import holder, replicas_of
from datastates.lineage.states import Why
from datastates.lineage.views import detail
from datastates.lineage.write import parts, runs
from datastates.lineage.write.parts import PartReport, form_after, record_parts
from datastates.lineage.write.record import record, reduced
from datastates.lineage.write.replicas import evict, mark
from datastates.state.manifest import root_digest
from tests.support.effort import examples
from tests.support.records import part_digests, record_part

Make = Callable[..., NewState]


def parts_of(new: NewState, count: int) -> list[NewState]:
    """The state as so many ranks tell it; each has a loss, bytes and a memory of its own."""
    return [
        replace(
            new,
            facts=replace(
                new.facts, world_size=count, metrics={"loss": float(rank), "odd": math.nan}
            ),
            digest=secrets.token_hex(32),
            bytes_total=100 + rank,
            bytes_new=10 + rank,
            node=f"node-{rank}",
        )
        for rank in range(count)
    ]


def tell(database: Database, new: NewState, rank: int) -> State | None:
    with database.write() as session:
        return record_part(session, new, rank=rank)


def visible(database: Database, uid: str) -> bool:
    with database.read() as session:
        found = {state.uid for state in pages.find(session, "step >= 0").states}
        try:
            lookup.state(session, uid)
        except NotFound:
            assert uid not in found
            return False
        assert uid in found
        return True


def begun(database: Database, host: str = "host") -> str:
    run = Run(
        secrets.token_hex(12), host, "user", 1, ("train.py",), None, None, {}, {}, datetime.now(UTC)
    )
    with database.write() as session:
        runs.start(session, run)
    return run.uid


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_state_is_invisible_until_every_rank_reported(
    database: Database, new_state: Make, order: tuple[int, ...]
) -> None:
    told = parts_of(
        new_state(step=5, branch="main", attributes={"big": 2**64 - 1, "e": None}, message="a\nb"),
        3,
    )
    for rank in order[:-1]:
        assert tell(database, told[rank], rank) is None
        assert not visible(database, told[0].uid)
    with database.read() as session:
        (one,) = waiting(session)
        assert (one.uid, one.world_size, one.ranks) == (told[0].uid, 3, tuple(sorted(order[:-1])))
        assert (one.branch, one.step) == ("main", 5)
        assert names.refs(session) == []
        assert detail.count(session).states == 0

    state = tell(database, told[order[-1]], order[-1])

    assert state is not None
    assert visible(database, state.uid)
    assert state.digest == root_digest([part.digest for part in told])
    assert (state.bytes_total, state.bytes_new, state.world_size) == (303, 33, 3)
    assert state.metrics["loss"] == 0.0, "rank 0's"
    assert math.isnan(state.metrics["odd"])
    assert (state.attributes, state.message, state.step) == (
        {"big": 2**64 - 1, "e": None},
        "a\nb",
        5,
    )
    with database.read() as session:
        assert waiting(session) == []
        assert names.get(session, "main").state == state.uid
        assert [(each.rank, each.node, each.bytes) for each in replicas_of(session, state.uid)] == [
            (rank, f"node-{rank}", 10 + rank) for rank in range(3)
        ]
        assert part_digests(session, state.uid) == tuple(part.digest for part in told)


def test_a_state_of_one_part_is_recorded_at_once_and_leaves_no_part(
    database: Database, new_state: Make
) -> None:
    new = new_state(step=1, branch="main")
    state = tell(database, new, 0)
    assert state is not None
    assert state.digest == new.digest
    assert tell(database, new, 0) == state
    with pytest.raises(Conflict, match="was told with the digest"):
        tell(database, replace(new, digest=secrets.token_hex(32)), 0)
    with database.read() as session:
        assert part_digests(session, state.uid) == (new.digest,)
        assert session.exec_driver_sql("SELECT count(*) FROM part").scalar() == 0


def test_a_part_that_is_told_again_changes_nothing(database: Database, new_state: Make) -> None:
    told = parts_of(new_state(step=1, branch="main"), 2)
    for _ in range(2):
        assert tell(database, told[1], 1) is None
    state = tell(database, told[0], 0)
    assert state is not None
    assert [tell(database, told[rank], rank) for rank in (0, 1)] == [state, state]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_part_that_contradicts_is_refused(
    database: Database, new_state: Make, is_whole: bool
) -> None:
    parent = new_state(step=0)
    with database.write() as session:
        record(session, parent)
    told = parts_of(new_state(parent.uid, step=1), 3)
    for rank in range(3 if is_whole else 2):
        tell(database, told[rank], rank)
    with pytest.raises(Conflict, match="was told with the digest"):
        tell(database, replace(told[1], digest=secrets.token_hex(32)), 1)
    for size in (1, 2, 4):
        with pytest.raises(Conflict, match=f"world_size {size} and not 3"):
            tell(database, replace(told[0], facts=replace(told[0].facts, world_size=size)), 0)
    if is_whole:
        return
    other = (Edge(parent.uid, EdgeKind.MERGE),)
    wrong: list[dict[str, Any]] = [
        {"step": 2},
        {"parent": None},
        {"branch": "main"},
        {"micro_step": 1},
        {"edges": other},
    ]
    for changes in wrong:
        with pytest.raises(Conflict, match=f"{next(iter(changes))} .* and not"):
            tell(database, replace(told[2], facts=replace(told[2].facts, **changes)), 2)
    assert tell(database, told[2], 2) is not None


def test_parts_captured_after_unlike_numbers_of_updates_are_no_state(
    database: Database, new_state: Make
) -> None:
    first, second = parts_of(new_state(step=1, branch="main"), 2)
    with database.write() as session:
        record_parts(session, [PartReport(first, 0, form=form_after("one", 4))])
    with (
        pytest.raises(Conflict, match=r"rank 1 of state .* after 5 steps .* rank 0 after 4"),
        database.write() as session,
    ):
        record_parts(session, [PartReport(second, 1, form=form_after("one", 5))])
    with pytest.raises(Conflict, match="another tree"), database.write() as session:
        record_parts(session, [PartReport(second, 1, form=form_after("another", 4))])
    with database.write() as session:
        record_parts(session, [PartReport(second, 1, form=form_after("one", 4))])
    assert visible(database, first.uid)


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("wrong", ["form", "step", "world_size"])
def test_parts_that_do_not_fit_each_other_are_no_state(
    database: Database, new_state: Make, wrong: str, is_together: bool
) -> None:
    first, second = parts_of(new_state(step=1, branch="main"), 2)
    if wrong != "form":
        changes: dict[str, Any] = {wrong: 3}
        second = replace(second, facts=replace(second.facts, **changes))
    told = [
        PartReport(first, 0, form="one"),
        PartReport(second, 1, form="another" if wrong == "form" else "one"),
    ]
    said = (
        "rank 1 of state .* has another tree than rank 0"
        if wrong == "form"
        else f"rank 1 of state .* says {wrong} 3 and not"
    )
    if not is_together:
        with database.write() as session:
            record_parts(session, told[:1])
    with pytest.raises(Conflict, match=said), database.write() as session:
        record_parts(session, told if is_together else told[1:])
    assert not visible(database, first.uid)
    with database.write() as session:
        record_parts(
            session, [told[0], replace(told[1], new=replace(second, facts=first.facts), form="one")]
        )
    assert visible(database, first.uid)


def test_ranks_that_are_none_are_refused(database: Database, new_state: Make) -> None:
    told = parts_of(new_state(), 2)
    for rank in (-1, 2):
        with pytest.raises(InvalidInput, match=f"none of rank {rank}"):
            tell(database, told[0], rank)
    with pytest.raises(InvalidInput, match="has the status lost"):
        tell(database, replace(told[0], status=Status.LOST), 0)
    with pytest.raises(NotFound, match="no run"):
        tell(database, replace(told[0], facts=replace(told[0].facts, run="0" * 24)), 0)


def test_a_uid_that_another_state_has_is_refused(database: Database, new_state: Make) -> None:
    new = new_state()
    with database.write() as session:
        record(session, new)
    with pytest.raises(Conflict, match="there is a state"):
        tell(database, parts_of(new, 2)[1], 1)


def chain(new_state: Make, count: int, length: int) -> list[list[NewState]]:
    """So many states in a row on ``main``, each as its ranks tell it."""
    found: list[list[NewState]] = []
    for step in range(length):
        found.append(
            parts_of(
                new_state(found[-1][0].uid if found else None, step=step, branch="main"), count
            )
        )
    return found


def skip(database: Database, new: NewState, rank: int, why: Why = Why.SKIPPED) -> None:
    with database.write() as session:
        parts.skip_part(session, new.facts, rank=rank, why=why, reason="the arena had no room")


def log_of(database: Database, branch: str = "main") -> list[str]:
    """The uids of a branch, the oldest first."""
    with database.read() as session:
        found = {ref.name: ref.state for ref in names.refs(session)}
        return (
            [state.uid for state in walk.log(session, found[branch])][::-1]
            if branch in found
            else []
        )


def test_a_state_whose_parent_waits_waits_too_and_both_become_visible_together(
    database: Database, new_state: Make
) -> None:
    states = chain(new_state, 2, 4)
    for told in states[1:]:
        for rank in range(2):
            assert tell(database, told[rank], rank) is None
    tell(database, states[0][1], 1)
    assert log_of(database) == []
    with database.read() as session:
        (late,) = [each for each in waiting(session) if each.uid == states[1][0].uid]
    assert str(late).endswith("has all its 2 parts, and waits for the state before it")
    assert tell(database, states[0][0], 0) is not None
    assert log_of(database) == [told[0].uid for told in states]
    with database.read() as session:
        assert session.exec_driver_sql("SELECT count(*) FROM part WHERE rank < 0").scalar() == 0


def test_what_one_rank_skipped_is_given_up_for_all_and_the_next_hangs_on_the_one_before(
    database: Database, new_state: Make
) -> None:
    states = chain(new_state, 2, 5)
    uids = [told[0].uid for told in states]
    for number, told in enumerate(states):
        skipping = {1: 0, 2: 1}.get(number)
        for rank in (1, 0):
            if rank == skipping:
                skip(database, told[rank], rank)
            else:
                tell(database, told[rank], rank)
    skip(database, states[3][0], 0)
    assert log_of(database) == [uids[0], uids[3], uids[4]], "what is whole stays"
    assert not any(visible(database, uid) for uid in uids[1:3])
    with database.read() as session:
        found, forgotten = outcomes(session, {**dict.fromkeys(uids, 1), "0" * 24: 1})
        assert waiting(session) == []
    assert forgotten == ["0" * 24]
    assert {
        uid: (each.given_up.rank, each.given_up.why) for uid, each in found.items() if each.given_up
    } == {
        uids[1]: (0, Why.SKIPPED),
        uids[2]: (1, Why.SKIPPED),
    }
    first, third = found[uids[0]].state, found[uids[3]]
    assert first is not None
    assert third.state is not None
    assert third.state.parents == (uids[0],)
    assert third.parent_digests == (first.digest,)
    assert third.state.digest == root_digest(
        [part.digest for part in states[3]], third.parent_digests
    )


def test_a_rank_that_tells_nothing_is_named_and_what_waited_behind_goes_on(
    database: Database, new_state: Make
) -> None:
    states = chain(new_state, 3, 3)
    for rank in range(3):
        tell(database, states[0][rank], rank)
        tell(database, states[2][rank], rank)
    tell(database, states[1][0], 0)
    tell(database, states[1][2], 2)
    with database.write() as session:
        parts.give_up(
            session,
            [states[1][0].uid, states[0][0].uid],
            why=Why.LATE,
            reason="it told no part within 1 s",
        )
    assert log_of(database) == [states[0][0].uid, states[2][0].uid]
    assert tell(database, states[1][1], 1) is None, "too late"
    with database.read() as session:
        found, _ = outcomes(session, {states[1][0].uid: 0})
    assert str(found[states[1][0].uid].given_up) == "rank 1 (late): it told no part within 1 s"


def test_what_the_lineage_refuses_is_given_up_for_all_and_says_why(
    database: Database, new_state: Make
) -> None:
    states = chain(new_state, 2, 2)
    for rank in range(2):
        tell(database, states[0][rank], rank)
    with database.write() as session:
        record(session, new_state(states[0][0].uid, step=9, branch="main"))
    for rank in range(2):
        tell(database, states[1][rank], rank)
    with database.read() as session:
        found, _ = outcomes(session, {states[1][0].uid: 0})
    given_up = found[states[1][0].uid].given_up
    assert given_up is not None
    assert given_up.why is Why.REFUSED
    assert "branch 'main' is at" in given_up.reason


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_whatever_order_parts_come_in_the_states_that_nobody_skipped_make_one_path(
    database: Database, new_state: Make, data: st.DataObject
) -> None:
    ranks, length = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 5))
    branch = f"branch-{secrets.token_hex(4)}"
    told = chain(new_state, ranks, length)
    states = [
        [replace(part, facts=replace(part.facts, branch=branch)) for part in each] for each in told
    ]
    skipped = data.draw(
        st.sets(st.tuples(st.integers(0, length - 1), st.integers(0, ranks - 1)), max_size=4)
    )
    order = data.draw(
        st.permutations([(step, rank) for step in range(length) for rank in range(ranks)])
    )
    with database.write() as session:
        for step, rank in order:
            if (step, rank) in skipped:
                parts.skip_part(
                    session, states[step][rank].facts, rank=rank, why=Why.TORN, reason="it tore"
                )
            else:
                record_part(session, states[step][rank], rank=rank)
    assert log_of(database, branch) == [
        states[step][0].uid
        for step in range(length)
        if not any((step, rank) in skipped for rank in range(ranks))
    ]
    with database.read() as session:
        assert not [each for each in waiting(session) if each.branch == branch]


def test_metrics_of_ranks_are_reduced_as_rank_0_says(database: Database, new_state: Make) -> None:
    told = parts_of(new_state(branch="main"), 3)
    measured = [
        {"loss": 1.0, "top": 2.0, "n": 5.0},
        {"loss": 2.0, "top": 7.0, "own": 1.0},
        {"loss": 6.0, "top": math.nan, "n": 2.0},
    ]
    reduce = {"loss": "mean", "top": "max", "n": "sum", "own": "each"}
    for rank in (2, 1, 0):
        facts = replace(told[rank].facts, metrics=measured[rank])
        with database.write() as session:
            made = record_part(
                session,
                replace(told[rank], facts=facts),
                rank=rank,
                reduce=reduce if rank == 0 else "first",
            )
    assert made is not None
    assert math.isnan(made.metrics.pop("top"))
    assert made.metrics == {"loss": 3.0, "n": 7.0, "own": 1.0, "own@1": 1.0}
    with (
        pytest.raises(InvalidInput, match="say one of first, each, mean, max, min, sum"),
        database.write() as session,
    ):
        record_part(session, parts_of(new_state(), 2)[0], rank=0, reduce="median")


@pytest.mark.parametrize(
    ("way", "measured", "expected"),
    [
        ("mean", [1e308, 1e308, -1e308], 1e308 / 3),
        ("mean", [1.7e308] * 3, 1.7e308),
        ("sum", [1e308, 1e308, -1e308], 1e308),
        ("sum", [-1.7e308] * 3, -math.inf),
        ("mean", [0.1] * 3, 0.1),
        ("mean", [1.0, math.inf, 2.0], math.inf),
    ],
)
def test_metrics_beyond_the_range_of_floats_are_reduced_as_far_as_floats_go(
    way: str, measured: list[float], expected: float
) -> None:
    assert reduced([{"loss": value} for value in measured], way) == {"loss": expected}


def test_ranks_that_report_at_the_same_moment_complete_every_state_once(
    database: Database, new_state: Make
) -> None:
    count, steps = 4, 12
    uids: list[list[NewState]] = []
    parent = None
    for step in range(steps):
        uids.append(parts_of(new_state(parent, step=step, branch="main"), count))
        parent = uids[-1][0].uid
    begin, completed, failed = threading.Barrier(count), [], []

    def rank_of(rank: int) -> None:
        try:
            for step in range(steps):
                begin.wait(60)  # each step of all ranks at once: their last parts meet
                made = tell(database, uids[step][rank], rank)
                if made is not None:
                    completed.append(made.uid)
                begin.wait(60)
        except BaseException as exc:
            failed.append(exc)
            begin.abort()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    assert completed == [told[0].uid for told in uids]
    with database.read() as session:
        assert waiting(session) == []
        assert names.get(session, "main").state == uids[-1][0].uid


def test_what_waits_for_a_run_that_died_is_removed(database: Database, new_state: Make) -> None:
    dead, alive = begun(database), begun(database)
    lost, kept, whole = (parts_of(new_state(step=step), 3) for step in range(3))
    for told, reporters in (
        (lost, [alive, dead]),
        (kept, [alive, alive]),
        (whole, [alive, alive, dead]),
    ):
        for rank, run in enumerate(reporters):
            facts = replace(told[rank].facts, run=run)
            tell(database, replace(told[rank], facts=facts, node=holder("host", run)), rank)
    with database.write() as session:
        runs.recover(session, [dead], volatile=["memory"])
    with database.read() as session:
        assert [each.uid for each in waiting(session)] == [kept[0].uid]
        assert lookup.state(session, whole[0].uid).status is Status.LOST, (
            "one of its parts was in the memory of the dead run"
        )
    assert not visible(database, lost[0].uid)


def told_by(database: Database, new: NewState, rank: int, run: str) -> State | None:
    """A part in the memory of a run."""
    return tell(
        database, replace(new, facts=replace(new.facts, run=run), node=holder("host", run)), rank
    )


def end(database: Database, run: str) -> list[incomplete.Waiting]:
    with database.write() as session:
        return runs.finish(session, run, volatile=["memory"])


def test_a_run_that_ends_takes_the_states_with_it_whose_parts_were_in_its_memory(
    database: Database, new_state: Make
) -> None:
    ending, other = begun(database), begun(database)
    mine, theirs = parts_of(new_state(step=1, branch="main"), 3), parts_of(new_state(step=2), 3)
    told_by(database, mine[0], 0, ending)
    told_by(database, mine[2], 2, other)
    told_by(database, theirs[1], 1, other)
    (lost,) = end(database, ending)
    assert (lost.uid, lost.missing) == (mine[0].uid, (1,))
    with database.read() as session:
        assert [each.uid for each in waiting(session)] == [theirs[0].uid]
    assert told_by(database, mine[1], 1, other) is None, "there is no way back for it"
    assert not visible(database, mine[0].uid)


def test_a_part_that_outlives_its_run_may_be_completed_later(
    database: Database, new_state: Make
) -> None:
    first, second = begun(database), begun(database)
    told = parts_of(new_state(step=1, branch="main"), 2)
    told_by(database, told[0], 0, first)
    with database.write() as session:
        assert (
            mark(session, told[0].uid, Status.DURABLE, tier="local", node="packs", rank=0, bytes=7)
            is Status.DURABLE
        )
        assert (
            mark(session, told[0].uid, Status.CAPTURED, tier="memory", node="late", rank=0)
            is Status.DURABLE
        )
    assert end(database, first) == []
    with database.read() as session:
        (one,) = waiting(session)
    assert one.has_ended
    assert (
        str(one)
        == f"state {told[0].uid} (branch main, step 1) is incomplete: it lacks the parts of rank 1"
        " of 2, and the runs that told the others have ended; run all its ranks again"
    )
    state = told_by(database, told[1], 1, second)
    assert state is not None
    assert (state.status, state.bytes_new) == (Status.CAPTURED, 7 + 11)
    with database.read() as session:
        assert [(each.rank, each.tier) for each in replicas_of(session, state.uid)] == [
            (0, "local"),
            (1, "memory"),
        ]


def test_a_state_waits_while_one_of_its_runs_goes_on(database: Database, new_state: Make) -> None:
    lasting, ending = begun(database), begun(database)
    told = parts_of(new_state(step=4), 3)
    told_by(database, told[0], 0, lasting)
    told_by(database, told[1], 1, ending)
    with database.write() as session:
        mark(session, told[1].uid, Status.DURABLE, tier="local", node="packs", rank=1)
    assert end(database, ending) == []
    with database.read() as session:
        (one,) = waiting(session)
    assert (
        str(one) == f"state {told[0].uid} (branch None, step 4) waits for the parts of rank 2 of 3"
    )


def test_a_part_that_nobody_told_cannot_be_marked(database: Database, new_state: Make) -> None:
    told = parts_of(new_state(), 2)
    tell(database, told[0], 0)
    with database.write() as session, pytest.raises(NotFound, match="no state"):
        mark(session, told[0].uid, Status.DURABLE, tier="local", node="packs", rank=1)


def test_a_state_is_as_safe_as_the_least_safe_of_its_parts(
    database: Database, new_state: Make
) -> None:
    told = parts_of(new_state(), 2)
    for rank in range(2):
        tell(database, told[rank], rank)
    uid = told[0].uid
    statuses = []
    for rank in (1, 0):
        with database.write() as session:
            statuses.append(
                mark(session, uid, Status.DURABLE, tier="local", node="packs", rank=rank, bytes=5)
            )
    assert statuses == [Status.CAPTURED, Status.DURABLE]
    with database.write() as session:
        assert evict(session, [uid], tier="memory", node="node-0") == []
        assert evict(session, [uid], tier="memory", node="node-1") == []
        assert evict(session, [uid], tier="local", node="packs") == [uid]


def test_a_state_of_which_one_part_is_gone_is_evicted(database: Database, new_state: Make) -> None:
    told = parts_of(new_state(), 2)
    for rank in range(2):
        tell(database, told[rank], rank)
    with database.write() as session:
        assert evict(session, [told[0].uid], tier="memory", node="node-1") == [told[0].uid]
