"""What runs in a worker: where its starting state comes from, and how it keeps out of the way of
others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Conflict, Processor, Repository
from datastates.errors import InvalidInput
from datastates.maintenance.environment import network_id, node_id
from datastates.studies import Job, Plan, Variant, processes, worker
from datastates.studies.processes import close_repositories
from datastates.studies.records import (
    Claim,
    Outcome,
    claim_name,
    claims_folder,
    finished,
    holder,
    make_durable,
)
from datastates.studies.sharing import NO_SHARE, Share
from datastates.studies.worker import Assignment, Explorer, Task, run
from datastates.system import files
from datastates.training import start
from tests.engine.build import held_back
from tests.studies.studies import CONFIG, build, counts, one_epoch, prefix, train
from tests.support import warm

PLAN = Plan((Variant("a", None, 3), Variant("b", "a", 1)))
HOLD = """
import sys, pathlib
from datastates.studies.records import Claim
claim = Claim.take(pathlib.Path(sys.argv[1]), sys.argv[2], "the other one")
print(claim is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository with a durable prefix on ``main``; what workers opened here ends with the
    test."""
    with prefix(tmp_path / "runs") as opened:
        make_durable(opened.core, opened.state("main").uid)
        yield opened
        close_repositories()


@pytest.fixture
def presence(repo: Repository) -> Iterator[Claim]:
    """The claim of the explorer that gives tasks."""
    claim = Claim.take(claims_folder(repo), claim_name(repo, "s"), "explorer")
    assert claim is not None
    with claim:
        yield claim


def task(repo: Repository, name: str, origin: str, job: Any = train) -> Task:
    """One variant of the plan."""
    assignment = Assignment(
        "s", PLAN[name], PLAN.digest(name), PLAN.config(name), (), (), repo.state(origin).uid
    )
    return Task(
        repo.location,
        CONFIG,
        assignment,
        job,
        None,
        Explorer(claim_name(repo, "s"), "explorer", node_id()),
        NO_SHARE,
        1,
    )


@pytest.mark.usefixtures("presence")
def test_a_parent_s_state_is_found_in_the_worker_s_own_memory(repo: Repository) -> None:
    parent = run(task(repo, "a", "main"))
    assert (parent.error, parent.source) == (None, "disk")
    child = run(task(repo, "b", "done/s/a"))
    assert (child.error, child.source) == (None, "memory")
    close_repositories()
    repo.delete_ref("done/s/b")
    repo.delete_ref("s/b")
    assert run(task(repo, "b", "done/s/a")).source == "disk"


def test_a_worker_whose_explorer_ended_stops_at_its_next_epoch(
    repo: Repository, presence: Claim
) -> None:
    def losing(job: Job) -> None:
        model, optimizer, sampler = build(job.config)
        tracker = job.track(model=model, optimizer=optimizer, sampler=sampler)
        for epoch in job.epochs():
            loss = one_epoch(model, optimizer, sampler, tracker)
            if epoch == 1:
                presence.close()
                watch = next(
                    thread
                    for thread in threading.enumerate()
                    if thread.name == "datastates-explorer-watch"
                )
                watch.join(60)
            job.report(loss=loss)

    outcome = run(task(repo, "a", "main", losing))
    assert outcome.uid is None
    assert (outcome.error or "").startswith("Cancelled: the explorer (explorer) has ended")
    assert repo.state("s/a").attributes["epoch"] == 1
    again = run(task(repo, "a", "main"))
    assert "which may have ended" in (again.error or ""), (
        "a task that waited in a queue does not begin"
    )


@pytest.mark.usefixtures("presence")
def test_a_lineage_in_sqlite_is_not_opened_on_another_machine(repo: Repository) -> None:
    """It is in a folder that both machines see."""
    given = task(repo, "a", "main")
    outcome = run(replace(given, explorer=replace(given.explorer, node="another boot")))
    assert outcome.addresses is not None
    assert "and cannot connect to it: it serves no address" in (outcome.error or "")


@pytest.mark.usefixtures("presence")
def test_a_variant_that_another_process_trains_is_waited_for(repo: Repository) -> None:
    """It comes to its end there; here nothing is trained."""
    with Holding(claims_folder(repo), claim_name(repo, "s", "a")) as other:
        outcomes: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: outcomes.append(run(task(repo, "a", "main", refuse)))
        )
        thread.start()
        theirs: dict[str, Any] = {
            "study": "s",
            "variant": "a",
            "variant_digest": PLAN.digest("a"),
            "epoch": 3,
        }
        with repo.track(branch="s/a", start="main", **objects()) as tracker:
            state = tracker.capture(attributes=theirs).wait("durable")
        repo.tag("done/s/a", state)
        assert thread.is_alive()
        other.communicate("")
        thread.join(30)
    assert outcomes == [Outcome("a", state.uid, node=network_id())]


@pytest.mark.usefixtures("presence")
def test_a_variant_that_another_process_does_not_let_go_is_a_conflict(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_PATIENCE_S", 0.2)
    with Holding(claims_folder(repo), claim_name(repo, "s", "a")) as other:
        outcome = run(task(repo, "a", "main"))
        assert "Conflict: variant 'a' is still being trained by the other one" in (
            outcome.error or ""
        )
        other.kill()
        other.communicate()
    assert run(task(repo, "a", "main")).error is None


def test_of_two_workers_that_do_not_see_each_other_s_claims_one_gives_way(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two hosts whose file system passes no locks on: branches are moved by
    compare-and-swap."""
    assignment = task(repo, "a", "main").assignment
    with datastates.open(tmp_path / "runs", config=CONFIG) as other:
        ours, theirs = Job(repo, assignment), Job(other, assignment)
        ours.track(**objects())
        monkeypatch.setattr(
            start, "_open_trainings", weakref.WeakSet()
        )  # as it is in another process
        theirs.track(**objects())
        won = ours.report(loss=1.0).wait()
        theirs.report(loss=2.0)
        with pytest.raises(Conflict, match="branch 's/a' is at"):
            theirs.close()
        ours.report(loss=0.5)
        ours.close()
        assert [state.metrics["loss"] for state in repo.log("s/a", limit=2)] == [0.5, 1.0]
        assert repo.state("s/a~1").uid == won.uid
        assert repo.state("s/a~2").uid == repo.state("main").uid


def test_a_result_that_somebody_else_tagged_first_stands(repo: Repository) -> None:
    assignment = replace(
        task(repo, "a", "main").assignment, variant=Variant("a", None, 1), digest="d"
    )
    jobs = [Job(repo, assignment) for _ in range(2)]
    jobs[0].track(**objects())
    jobs[0].report(loss=1.0)
    first = jobs[0].finish()
    jobs[0].close()
    second = Job(repo, assignment)
    assert second.is_over
    assert second.finish() == first
    assert finished(repo, "s", "a", "d") == first


@pytest.mark.usefixtures("presence")
def test_two_tasks_at_once_in_one_process_are_refused(repo: Repository) -> None:
    inside = threading.Event()
    leave = threading.Event()

    def waiting(job: Job) -> None:
        inside.set()
        leave.wait(30)
        train(job)

    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run(task(repo, "a", "main", waiting))))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(InvalidInput, match="two variants at once in one process"):
        run(task(repo, "b", "main"))
    leave.set()
    thread.join(60)
    assert [outcome.error for outcome in outcomes] == [None]


def test_a_claim_is_one_process_s_and_ends_with_it(tmp_path: Path) -> None:
    with Holding(tmp_path, "thing") as other:
        assert Claim.take(tmp_path, "thing", "ours") is None
        assert holder(tmp_path, "thing") == "the other one"
        other.kill()
        other.communicate()
        assert holder(tmp_path, "thing") is None
        with Claim.take(tmp_path, "thing", "ours") or pytest.fail("it is free"):
            assert holder(tmp_path, "thing") == "ours"
            assert Claim.take(tmp_path, "thing", "ours again") is None
    assert holder(tmp_path, "thing") is None
    assert not (tmp_path / "thing").exists()


def test_a_claim_is_on_the_file_that_others_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last holder takes the file away between our open and our lock."""
    lock = files._lock

    def late(fd: int) -> bool:
        monkeypatch.undo()
        (tmp_path / "thing").unlink()
        return lock(fd)

    monkeypatch.setattr(files, "_lock", late)
    with Claim.take(tmp_path, "thing", "ours") or pytest.fail("it is free"):
        assert (tmp_path / "thing").read_text() == "ours"


class Picky(Processor):
    """A processor of the user's, of which each task brings a copy."""

    name = "picky"
    priority = 50

    def process(self, item: object) -> None:
        self.seen = item


def test_a_process_opens_the_repository_anew_for_another_configuration_only(
    repo: Repository,
) -> None:
    config = replace(CONFIG, processors=[Picky()])

    def opened(asked: Config) -> Repository:
        return processes.repository_at(repo.location, pickle.loads(pickle.dumps(asked)), 1)

    first = opened(config)
    assert opened(config) is first
    other = opened(replace(config, durable_every=7))
    assert (first.core.is_closed, other.config.durable_every) == (True, 7)
    assert opened(replace(config, durable_every=7)) is other


@pytest.mark.usefixtures("presence")
def test_workers_share_the_memory_that_is_free(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "available_memory_bytes", lambda: 1 << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    given = replace(task(repo, "a", "main"), config=replace(CONFIG, memory_bytes=None), threads=2)
    assert run(given).error is None
    assert [
        opened.config.memory_bytes
        for opened in (kept.repository for kept in processes._repositories.values())
    ] == [(1 << 30) // 4 // 4]


def test_what_a_task_shows_holds_no_secret(repo: Repository) -> None:
    given = replace(
        task(repo, "a", "main"),
        location=replace(repo.location, database_url="postgresql://me:hush@db/runs"),
        share=Share(("ucx://127.0.0.1:1",), "hush"),
    )
    assert "hush" not in repr(given)


def test_a_variant_s_models_do_not_outlive_it_in_the_worker(repo: Repository) -> None:
    before = counts(repo)
    job = Job(repo, task(repo, "a", "main").assignment)
    job.track(**objects())
    assert len(repo.core.trainings) == 1
    job.close()
    job.close()
    assert not repo.core.trainings
    assert counts(repo)[""] == before[""]


def objects() -> dict[str, Any]:
    """What a variant tracks."""
    return dict(zip(("model", "optimizer", "sampler"), build({}), strict=True))


def refuse(job: Job) -> None:
    raise AssertionError(f"{job.variant.name} is trained again")


class Holding:
    """A process that holds a claim until its standard input ends."""

    def __init__(self, folder: Path, name: str) -> None:
        command = [sys.executable, "-c", HOLD, str(folder), name]
        self.process = warm.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
        )

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "True\n"
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        if self.process.returncode is None:
            self.process.communicate()


def test_weights_edited_right_after_a_report_cost_no_report(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(repo, task(repo, "a", "main").assignment)
    model = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(mine=model, opt=optimizer, rng=False, strict=False)
    with held_back(monkeypatch) as gate:
        gate.hold()
        job.report(loss=1.0)
        model.weight.data.zero_()
        gate.open()
        assert [state.metrics for state in job._reported()] == [{"loss": 1.0}]
    job.close()
