"""What a training loop may do with a tracker."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Conflict, NotFound, Repository, Status, Tracker
from datastates.errors import Closed, InvalidInput
from datastates.training import start

QUIET = Config(memory_bytes=256 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository that writes only what it is asked to."""
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


def train(run: Tracker, weight: torch.Tensor, count: int) -> list[str]:
    """That many captures, each of one more; their uids."""
    uids = []
    for _ in range(count):
        weight += 1
        uids.append(run.capture(metrics={"sum": float(weight.sum())}).wait().uid)
    return uids


def test_a_branch_that_exists_goes_on_and_says_so(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    first = repo.track(weight=(weight := torch.zeros(3)))
    assert first.resumed_from is None
    assert first.head is None
    uids = train(first, weight, 4)
    first.close()
    with caplog.at_level(logging.INFO, "datastates"):
        again = repo.track(weight=(fresh := torch.zeros(3)))
    assert f"branch main goes on from state {uids[-1][:10]}, step 4" in caplog.text
    assert again.resumed_from is not None
    assert again.resumed_from.uid == uids[-1]
    assert fresh.tolist() == [4, 4, 4]
    (next_uid,) = train(again, fresh, 1)
    assert repo.state(next_uid).parents == (uids[-1],)
    assert repo.state(next_uid).step == 5


def test_a_branch_is_not_resumed_against_ones_will(repo: Repository) -> None:
    train(repo.track(weight=(weight := torch.zeros(3))), weight, 1)
    repo.tag("warm", "main")
    untouched = torch.zeros(3)
    with pytest.raises(Conflict, match=r"branch 'main' exists .* resume=True"):
        repo.track(weight=untouched, resume=False)
    with pytest.raises(Conflict, match="'warm' is a tag"):
        repo.track(weight=untouched, branch="warm")
    train(repo.track(weight=torch.zeros(3), branch="other"), torch.zeros(3), 1)
    with pytest.raises(Conflict, match="does not descend from 'other'"):
        repo.track(weight=untouched, branch="main", start="other")
    with pytest.raises(NotFound, match="nowhere"):
        repo.track(weight=untouched, branch="third", start="nowhere")
    assert untouched.tolist() == [0, 0, 0]
    assert {ref.name for ref in repo.refs()} == {"main", "warm", "other"}


def test_two_trainings_on_one_branch_are_a_conflict_not_a_mixture(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = repo.track(weight=torch.zeros(3))
    monkeypatch.setattr(start, "_open_trainings", weakref.WeakSet())  # as it is in another process
    theirs = repo.track(weight=torch.ones(3))
    mine.capture().wait()
    with pytest.raises(Conflict, match="branch 'main' is at"):
        theirs.capture().wait()
    with pytest.raises(Conflict, match="branch 'main' is at"):
        theirs.capture()


def test_a_fork_begins_where_it_is_told_and_its_script_run_again_goes_on(repo: Repository) -> None:
    main = repo.track(weight=(weight := torch.zeros(3)))
    uids = train(main, weight, 3)
    for expected in ([2.0, 2.0, 2.0], [5.0, 5.0, 5.0]):
        with repo.track(weight=(fresh := torch.zeros(3)), branch="fork", start=uids[1]) as fork:
            assert fresh.tolist() == expected
            train(fork, fresh, 3)
    assert [state.uid for state in repo.log("fork")][6:] == [uids[1], uids[0]]
    assert repo.state("main").uid == uids[-1]
    assert repo.load(uids[-1])["weight"].tolist() == [3, 3, 3]


def test_names_that_cannot_be_are_refused(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="the name 'rng' is taken"):
        repo.track(rng={"seed": 1})  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InvalidInput, match="'no good'"):
        repo.track(weight=torch.zeros(3), branch="no good")


def test_values_are_kept_and_come_back(repo: Repository) -> None:
    with repo.track(weight=torch.zeros(3), epoch=0, name="a") as run:
        run.values["epoch"] = 7
        run.capture()
    again = repo.track(weight=torch.zeros(3), epoch=0, name="b")
    assert again.values == {"epoch": 7, "name": "a"}


def test_only_what_is_asked_for_is_restored_and_the_report_says_so(repo: Repository) -> None:
    model = nn.Linear(4, 4)
    with repo.track(model=model, extra=(extra := torch.ones(3))) as run:
        run.capture()
    extra.zero_()
    fresh = nn.Linear(4, 4)
    forked = repo.track(model=fresh, extra=extra, branch="part", start="main", only="model")
    assert torch.equal(fresh.weight, model.weight)
    assert extra.tolist() == [0, 0, 0]
    assert forked.report is not None
    assert sorted(forked.report.restored) == ["model/bias", "model/weight"]


def test_a_fork_of_a_part_is_resumed_as_a_whole(repo: Repository) -> None:
    model = nn.Linear(4, 4)
    with repo.track(model=model, extra=torch.ones(3)) as run:
        run.capture()
    extra = torch.zeros(3)
    for _ in range(2):  # the second time the fork has no state of its own yet
        repo.track(model=model, extra=extra, branch="part", start="main", only="model").close()
        assert extra.tolist() == [0, 0, 0]
    with repo.track(model=model, extra=extra, branch="part", start="main", only="model") as run:
        extra += 5
        run.capture()
    fresh = torch.zeros(3)
    repo.track(model=nn.Linear(4, 4), extra=fresh, branch="part", start="main", only="model")
    assert fresh.tolist() == [5, 5, 5]


def test_an_attribute_that_no_manifest_can_hold_is_refused_at_once(repo: Repository) -> None:
    with repo.track(weight=torch.zeros(3)) as run:
        with pytest.raises(InvalidInput, match="64 bits"):
            run.capture(attributes={"seed": 2**64})
        run.capture(attributes={"seed": 2**64 - 1, "low": -(2**63)}).wait()


def test_a_model_that_fits_only_in_part_is_refused_or_reported(repo: Repository) -> None:
    with repo.track(model=nn.Sequential(nn.Linear(4, 4)), rng=False) as run:
        run.capture()
    larger = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(InvalidInput, match=r"model/1\.weight"):
        repo.track(model=larger, branch="a", start="main", rng=False)
    forked = repo.track(model=larger, branch="b", start="main", strict=False, rng=False)
    assert forked.report is not None
    assert sorted(forked.report.missing) == ["model/1.bias", "model/1.weight"]
    assert not forked.report


def test_going_back_moves_the_branch_with_a_line_in_its_reflog(repo: Repository) -> None:
    run = repo.track(weight=(weight := torch.zeros(3)))
    uids = train(run, weight, 5)
    run.restore("main~3")
    assert weight.tolist() == [2, 2, 2]
    assert run.step == 2
    assert run.head is not None
    assert run.head.uid == uids[1]
    event = repo.reflog("main")[0]
    assert (event.old, event.new) == (uids[4], uids[1])
    (uid,) = train(run, weight, 1)
    assert repo.state(uid).parents == (uids[1],)
    assert repo.load(uids[4])["weight"].tolist() == [5, 5, 5]


def test_a_tracker_that_has_no_state_yet_takes_one_over_with_its_ancestry(repo: Repository) -> None:
    (uid,) = train(repo.track(weight=(weight := torch.zeros(3))), weight, 1)
    run = repo.track(weight=(fresh := torch.zeros(3)), branch="late")
    run.restore("main")
    assert repo.state(train(run, fresh, 1)[0]).parents == (uid,)


def test_several_trackers_take_turns_without_mixing(repo: Repository) -> None:
    weights = {name: torch.zeros(30_000) for name in "abc"}
    runs = {name: repo.track(branch=name, weight=weight) for name, weight in weights.items()}
    for _ in range(5):
        for number, name in enumerate(weights):
            weights[name] += number + 1
            runs[name].capture()
    for number, name in enumerate(weights):
        values = [repo.load(state.uid)["weight"].unique().tolist() for state in repo.log(name)]
        assert values == [[float((number + 1) * step)] for step in range(5, 0, -1)]


def test_a_forked_child_cannot_use_what_is_its_parents(repo: Repository) -> None:
    run = repo.track(weight=torch.zeros(3))
    run.capture().wait()
    child = os.fork()
    if not child:
        refused = 0
        for use in (
            run.capture,
            lambda: repo.load("main"),
            lambda: repo.track(weight=torch.zeros(3)),
        ):
            try:
                use()
            except Closed:
                refused += 1
        run.close()
        repo.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert run.capture().wait("durable").status is Status.DURABLE


def test_a_closed_tracker_takes_no_more(repo: Repository) -> None:
    with repo.track(weight=torch.zeros(3)) as run:
        run.capture()
    run.close()
    with pytest.raises(Closed, match="branch main was closed"):
        run.capture()


def test_what_was_tracked_does_not_outlive_its_training_in_the_repository(repo: Repository) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    with repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(2):
            model(torch.ones(300)).sum().backward()
            optimizer.step()
            run.capture()
    gone = weakref.ref(model.weight), weakref.ref(optimizer)
    del model, optimizer, run
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_an_interrupted_capture_neither_hangs_the_exit_nor_loses_its_room(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = repo.track(weight=torch.zeros(300_000))
    run.capture().wait()
    stager = repo.core.engage().runner.stager
    real = stager._jobs.put
    for is_late in (False, True):

        def put(job: object, is_late: bool = is_late) -> None:
            monkeypatch.undo()
            if is_late:
                real(job)  # type: ignore[arg-type]  # a job
            raise KeyboardInterrupt

        # its thread may ask at any time
        monkeypatch.setattr(stager, "_jobs", SimpleNamespace(put=put, get=stager._jobs.get))
        with pytest.raises(KeyboardInterrupt):
            run.capture()
    for _ in range(200):  # more than there is room for, if any were lost
        run.capture()
    assert run.head is not None
    run.close()
