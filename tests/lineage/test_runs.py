"""Runs, and recovery from the death of one."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from datastates.errors import Conflict, NotFound
from datastates.lineage import Database, Recovered, Run, State, Status, lookup
from datastates.lineage.query import names, walk
from datastates.lineage.write import refs, runs
from datastates.lineage.write.replicas import evict, mark
from datastates.storage.tiers import VOLATILE

Grow = Callable[..., State]
STARTED = datetime(2026, 5, 4, 3, 2, 1, 999999, tzinfo=UTC)


def new_run(host: str = "here", **fields: object) -> Run:
    run = Run(
        uid=secrets.token_hex(12),
        host=host,
        user="me",
        pid=12,
        argv=("train.py", "--lr", "0.1"),
        git_commit="c" * 40,
        git_dirty=True,
        config={"lr": 0.1, "name": "x", "deep": True, "seed": None, "stop": math.inf, "n": 3},
        versions={"torch": "2.13"},
        started_at=STARTED,
    )
    return replace(run, **fields)  # type: ignore[arg-type] # the fields of the test


@pytest.fixture
def run(database: Database) -> Run:
    """A run that has started."""
    run = new_run()
    with database.write() as session:
        runs.start(session, run)
    return run


def recover(database: Database, *dead: Run) -> list[Recovered]:
    with database.write() as session:
        return runs.recover(session, [run.uid for run in dead], volatile=VOLATILE)


def statuses(database: Database, *states: State) -> list[Status]:
    with database.read() as session:
        return [state.status for state in lookup.states(session, [state.uid for state in states])]


def test_a_run_comes_back_as_it_started(database: Database, run: Run, grow: Grow) -> None:
    state = grow(run=run.uid)
    with database.read() as session:
        assert runs.get(session, run.uid) == run
        assert lookup.state(session, state.uid).run == run.uid


def test_a_setting_may_be_a_text_of_any_length(database: Database) -> None:
    run = new_run(config={"k" * 255: "abcdefghij" * 800, "😀" * 255: "😀" * 6000})
    with database.write() as session:
        runs.start(session, run)
        assert runs.get(session, run.uid) == run


def test_a_configuration_that_json_cannot_say_comes_back(database: Database) -> None:
    run = new_run(config={"a": math.nan, "b": -math.inf}, git_commit=None, git_dirty=None, argv=())
    with database.write() as session:
        runs.start(session, run)
        config = runs.get(session, run.uid).config
    assert config["b"] == -math.inf
    assert isinstance(config["a"], float)
    assert math.isnan(config["a"])


def test_words_that_are_no_text_are_written_out(database: Database) -> None:
    run = new_run(argv=("train.py", "\udcff", "a\0b"), user="\udce9")
    with database.write() as session:
        runs.start(session, run)
        found = runs.get(session, run.uid)
    assert (found.argv, found.user) == (("train.py", "\\udcff", "a\\x00b"), "\\udce9")


def test_a_run_starts_once(database: Database, run: Run) -> None:
    with (
        pytest.raises(Conflict, match=f"run {run.uid} was recorded before"),
        database.write() as session,
    ):
        runs.start(session, run)


def test_a_run_that_finished_keeps_its_time(database: Database, run: Run) -> None:
    with database.write() as session:
        runs.finish(session, run.uid, STARTED)
        runs.finish(session, run.uid)
        assert runs.get(session, run.uid).finished_at == STARTED
    with pytest.raises(NotFound, match="no run 'x'"), database.write() as session:
        runs.finish(session, "x")


def test_unfinished_runs_are_those_of_every_host(database: Database, run: Run) -> None:
    elsewhere, done, second = new_run("elsewhere"), new_run(finished_at=STARTED), new_run()
    with database.write() as session:
        for each in (elsewhere, done, second):
            runs.start(session, each)
        assert runs.unfinished(session) == [run, elsewhere, second]


def test_states_in_the_memory_of_a_dead_run_are_lost_and_its_branch_goes_back(
    database: Database, run: Run, grow: Grow
) -> None:
    kept = grow(branch="main", run=run.uid, count=3)
    with database.write() as session:
        mark(session, kept.uid, Status.DURABLE, tier="local", node="")
    lost = grow(kept, branch="main", run=run.uid)
    head = grow(lost, branch="main", run=run.uid)
    assert recover(database, run) == [Recovered("main", head.uid, kept.uid)]
    assert statuses(database, kept, lost, head) == [Status.DURABLE, Status.LOST, Status.LOST]
    with database.read() as session:
        assert names.get(session, "main").state == kept.uid
        event = names.reflog(session, "main")[0]
        assert (event.old, event.new) == (head.uid, kept.uid)
        assert (
            event.reason == f"recover: {head.uid} is lost, went back to the newest restorable state"
        )
        assert runs.get(session, run.uid).finished_at is not None


def test_recovering_again_changes_nothing(database: Database, run: Run, grow: Grow) -> None:
    kept = grow(branch="main", run=run.uid)
    with database.write() as session:
        mark(session, kept.uid, Status.DURABLE, tier="local", node="")
    grow(kept, branch="main", run=run.uid)
    assert len(recover(database, run)) == 1
    assert recover(database, run) == []
    assert recover(database) == []
    with database.read() as session:
        assert len(names.reflog(session, "main")) == 3


def test_no_replica_in_the_memory_of_a_dead_run_remains(
    database: Database, run: Run, grow: Grow
) -> None:
    both = grow(run=run.uid)
    with database.write() as session:
        mark(session, both.uid, Status.DURABLE, tier="local", node="")
    recover(database, run)
    with database.read() as session:
        assert session.execute(text("SELECT tier FROM replica")).scalars().all() == ["local"]


def test_the_states_of_living_runs_and_of_none_are_left_alone(
    database: Database, run: Run, grow: Grow
) -> None:
    alive = new_run()
    with database.write() as session:
        runs.start(session, alive)
    mine, other, nobody = (
        grow(run=run.uid),
        grow(branch="other", run=alive.uid),
        grow(branch="nobody"),
    )
    assert recover(database, run) == []
    assert statuses(database, mine, other, nobody) == [
        Status.LOST,
        Status.CAPTURED,
        Status.CAPTURED,
    ]
    with database.read() as session:
        assert runs.unfinished(session) == [alive]


def test_a_branch_with_nothing_left_to_go_back_to_is_deleted_and_tags_stay(
    database: Database, run: Run, grow: Grow
) -> None:
    head = grow(branch="main", run=run.uid, count=2)
    with database.write() as session:
        refs.tag(session, "v1", head.uid)
    assert recover(database, run) == [Recovered("main", head.uid, None)]
    assert recover(database, run) == []
    with database.read() as session:
        assert {ref.name: ref.state for ref in names.refs(session)} == {"v1": head.uid}
        event = names.reflog(session, "main")[0]
    assert (event.old, event.new) == (head.uid, None)
    assert event.reason == f"recover: {head.uid} is lost, no ancestor can be restored, deleted"


def test_a_name_that_recovery_deleted_can_begin_again(
    database: Database, run: Run, grow: Grow
) -> None:
    grow(branch="main", run=run.uid)
    recover(database, run)
    again = grow(branch="main")
    with database.read() as session:
        assert names.get(session, "main").state == again.uid


def test_a_branch_whose_head_was_evicted_goes_back_across_runs(
    database: Database, run: Run, grow: Grow
) -> None:
    base = grow(branch="main")
    head = grow(base, branch="main", count=40)
    forked = grow(head, branch="fork", run=run.uid)
    with database.write() as session:
        evict(
            session,
            [state.uid for state in walk.log(session, head.uid, limit=40)],
            tier="memory",
            node="",
        )
    assert recover(database, run) == [
        Recovered("fork", forked.uid, base.uid),
        Recovered("main", head.uid, base.uid),
    ]
    with database.read() as session:
        assert [event.reason for event in names.reflog(session, "main", limit=1)] == [
            f"recover: {head.uid} is evicted, went back to the newest restorable state"
        ]
