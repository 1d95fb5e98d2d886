"""Giving up bytes on purpose: nothing goes that a ref counts on."""

from __future__ import annotations

import pytest

from datastates.errors import Conflict, NotFound, Unsupported
from datastates.lineage import Database, Status
from datastates.lineage.lookup import ids_of, state
from datastates.lineage.query import retained
from datastates.lineage.query.names import holder, replicas_of
from datastates.lineage.write import refs, replicas
from datastates.lineage.write.replicas import withdraw, withdraw_all
from datastates.storage.tiers import VOLATILE
from tests.lineage.conftest import Grow

HERE = [("local", "node"), ("memory", holder("node", None))]


def placed(database: Database, grow: Grow, count: int, branch: str = "main") -> list[str]:
    """The uids of durable states of a branch, oldest first."""
    head = grow(branch=branch, count=count, node="node")
    with database.write() as session:
        uids = [head.uid]
        while (parents := state(session, uids[0]).parents) != ():
            uids.insert(0, parents[0])
        for uid in uids:
            replicas.mark(session, uid, Status.DURABLE, tier="local", node="node", bytes=7)
    return uids


def test_withdrawn_state_is_evicted_and_stays_in_the_lineage(
    database: Database, grow: Grow
) -> None:
    first, second, _ = placed(database, grow, 3)
    with database.write() as session:
        withdrawn = withdraw(session, second, HERE, volatile=VOLATILE)
        assert (withdrawn.uid, withdrawn.status) == (second, Status.EVICTED)
        assert withdraw(session, first, HERE, volatile=VOLATILE).status is Status.EVICTED
    with database.read() as session:
        assert state(session, second).parents == (first,)
        assert replicas_of(session, second) == []


def test_state_that_others_hold_keeps_what_they_give_it(database: Database, grow: Grow) -> None:
    first, second, third, _ = placed(database, grow, 4)
    with database.write() as session:
        replicas.mark(session, first, Status.DURABLE, tier="local", node="other", bytes=7)
        replicas.mark(
            session, second, Status.CAPTURED, tier="memory", node=holder("node", "0" * 24), bytes=7
        )
        assert withdraw(session, first, HERE, volatile=VOLATILE).status is Status.DURABLE
        assert withdraw(session, second, HERE, volatile=VOLATILE).status is Status.CAPTURED
        assert withdraw(session, third, HERE, volatile=VOLATILE).status is Status.EVICTED


def test_refs_count_on_what_they_lead_to(database: Database, grow: Grow) -> None:
    first, second, third = placed(database, grow, 3)
    with database.write() as session:
        refs.tag(session, "warm", second)
    for uid in (second, third):
        with pytest.raises(Conflict, match=r"main|warm"), database.write() as session:
            withdraw(session, uid, HERE, volatile=VOLATILE)
    with database.write() as session:
        assert (
            withdraw(session, third, HERE, volatile=VOLATILE, is_forced=True).status
            is Status.EVICTED
        )
    with (
        pytest.raises(Conflict, match="branch 'main'"),
        database.write() as session,
    ):
        # both names lead to it now
        withdraw(session, second, HERE, volatile=VOLATILE)
    with database.write() as session:
        assert (
            withdraw(session, second, HERE, volatile=VOLATILE, is_forced=True).status
            is Status.EVICTED
        )
    for is_forced in (False, True):
        with pytest.raises(Conflict, match="all that can be restored"), database.write() as session:
            withdraw(session, first, HERE, volatile=VOLATILE, is_forced=is_forced)


def test_a_head_in_memory_does_not_stand_for_its_branch(database: Database, grow: Grow) -> None:
    first, second = placed(database, grow, 2)
    with database.read() as session:
        head = state(session, second)
    assert grow(head, branch="main", node="node").status is Status.CAPTURED
    with pytest.raises(Conflict, match="branch 'main' leads to"), database.write() as session:
        withdraw(session, second, HERE, volatile=VOLATILE)
    with database.write() as session:
        assert (
            withdraw(session, second, HERE, volatile=VOLATILE, is_forced=True).status
            is Status.EVICTED
        )
    with pytest.raises(Conflict, match="all that can be restored"), database.write() as session:
        withdraw(session, first, HERE, volatile=VOLATILE, is_forced=True)


def test_tag_alone_gives_way_to_force(database: Database, grow: Grow) -> None:
    (only,) = placed(database, grow, 1)
    with database.write() as session:
        refs.tag(session, "warm", only)
        refs.delete_ref(session, "main")
    with database.write() as session:
        assert (
            withdraw(session, only, HERE, volatile=VOLATILE, is_forced=True).status
            is Status.EVICTED
        )


def test_what_is_not_there_or_held_by_several_ranks_is_refused(
    database: Database, grow: Grow
) -> None:
    wide = grow(world_size=2, node="node")
    with pytest.raises(NotFound), database.write() as session:
        withdraw(session, "0" * 24, HERE, volatile=VOLATILE)
    with pytest.raises(Unsupported, match="2 ranks"), database.write() as session:
        withdraw(session, wide.uid, HERE, volatile=VOLATILE)


def test_of_many_at_once_those_go_that_nobody_counts_on(database: Database, grow: Grow) -> None:
    uids = placed(database, grow, 8)
    with database.read() as session:
        fork = state(session, uids[4])
    forked = grow(fork, branch="fork", node="node")
    with database.write() as session:
        refs.tag(session, "warm", uids[1])
        replicas.mark(session, uids[2], Status.DURABLE, tier="local", node="other", bytes=7)
        replicas.mark(
            session, uids[3], Status.CAPTURED, tier="memory", node=holder("node", "0" * 24), bytes=7
        )
        replicas.evict(session, uids, tier="memory", node="node")
        ids = ids_of(session, uids)
    own = {"tier": "local", "node": "node"}
    with database.write() as session:
        gone = withdraw_all(session, ids, **own, volatile=VOLATILE, holder=holder("node", "1" * 24))
        assert gone == [uids[0], uids[2], uids[5], uids[6]]
    with database.read() as session:
        statuses = [state(session, uid).status for uid in uids]
        assert statuses[0] is statuses[5] is statuses[6] is Status.EVICTED
        assert statuses[2] is Status.DURABLE, "another folder has it"
        assert forked.status is Status.CAPTURED
    (page,) = retained.durable(database, **own)
    assert [each.uid for each in page] == [uids[1], uids[3], uids[4], uids[7]]
    counted = retained.needed_states(database, {each.id for each in page})
    assert {counted[ids[1]], counted[ids[4]], counted[ids[7]]} == {
        "what tag 'warm' names",
        "the newest durable state of branch 'fork'",
        "the head of branch 'main'",
    }
    with database.write() as session:
        assert withdraw_all(
            session, ids, **own, volatile=VOLATILE, holder=holder("node", "0" * 24)
        ) == [uids[3]]
        assert state(session, uids[3]).status is Status.CAPTURED, "its process has it in memory"


def test_facts_come_in_pages_with_the_metrics_that_are_asked_for(
    database: Database, grow: Grow, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = placed(database, grow, 7)
    monkeypatch.setattr(retained, "_PAGES", retained._PAGES.limit(3))
    monkeypatch.setattr(retained, "_PAGE", 3)
    pages = list(retained.durable(database, tier="local", node="node", keys=["loss"]))
    assert [len(page) for page in pages] == [3, 3, 1]
    found = [each for page in pages for each in page]
    with database.read() as session:
        assert [each.uid for each in found] == uids
        assert [each.generation for each in found] == list(range(7))
        assert all(
            each.metrics
            == {
                key: value
                for key, value in state(session, each.uid).metrics.items()
                if key == "loss"
            }
            for each in found
        )
        assert {each.segment for each in found} == {
            key for key, (branch, _) in retained.segments_of(session).items() if branch == "main"
        }
        assert retained.newest_settings(session, "datastates.retention") == {}
