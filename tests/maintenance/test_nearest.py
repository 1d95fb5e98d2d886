"""A step whose bytes are gone: the error names the nearest steps that were kept, and
``nearest=True`` takes one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Conflict, Repository, Unavailable
from datastates.errors import InvalidInput
from datastates.lineage.query import walk
from datastates.lineage.states import Status
from datastates.lineage.views import branches
from datastates.maintenance.retention_pass import evict
from tests.support.thread_ranks import ThreadGroup, on_threads

CONFIG = Config(memory_bytes=64 << 20, durable_every=1, durable_interval_s=None, retention="all")
STEPS = 12
GONE = range(4, 10)  # 3 and 10 are kept: 3 is the nearest to 4, 5 and 6, and 10 to 7, 8 and 9


def train(folder: Path, config: Config = CONFIG) -> None:
    """A branch whose weight is the number of the step."""
    weight = torch.zeros(3)
    with (
        datastates.open(folder, config=config) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        for _ in range(STEPS):
            weight += 1
            run.capture(metrics={"loss": float(weight[0])}).wait(
                "durable" if config is CONFIG else "captured"
            )


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A branch of which some steps have no bytes."""
    train(tmp_path / "runs")
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        for step in GONE:
            evict(opened.core, opened.state(f"main@step:{step}").uid)
        yield opened


def at(step: int) -> str:
    return f"main@step:{step}"


def asking(repo: Repository, rev: str) -> list[Callable[[], object]]:
    return [
        lambda: repo.load(rev),
        lambda: repo.restore(rev, weight=torch.zeros(3)),
        lambda: repo.track(branch="fork", start=rev, weight=torch.zeros(3), rng=False),
    ]


@pytest.mark.parametrize(("step", "kept"), [(5, 3), (8, 10)])
def test_the_error_names_the_nearest_kept_steps_before_and_after(
    repo: Repository, step: int, kept: int
) -> None:
    before, after = repo.state(at(3)).uid[:10], repo.state(at(10)).uid[:10]
    named = (
        rf"is evicted; the nearest ancestor that can is {before} \(step 3\); the nearest later"
        rf" state that can is {after} \(step 10\)"
    )
    for ask in asking(repo, at(step)):
        with pytest.raises(
            Unavailable,
            match=f"{named}; track, load and restore take step {kept} with nearest=True",
        ) as caught:
            ask()
        assert caught.value.nearest == repo.state(at(kept)).uid
    assert [ref.name for ref in repo.refs()] == ["main"]


@pytest.mark.parametrize(("step", "kept"), [(2, 2), (4, 3), (6, 3), (7, 10), (9, 10), (11, 11)])
def test_nearest_takes_the_kept_step_that_is_nearest(
    repo: Repository, step: int, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "datastates")
    assert repo.load(at(step), nearest=True)["weight"].tolist() == [kept] * 3
    weight = torch.zeros(3)
    report = repo.restore(at(step), weight=weight, nearest=True)
    assert (weight.tolist(), report.step, report.state) == (
        [kept] * 3,
        kept,
        repo.state(at(kept)).uid,
    )
    asked, taken = (repo.state(at(one)).uid[:10] for one in (step, kept))
    lines = [
        record.message
        for record in caplog.records
        if record.__dict__.get("event") == "nearest.taken"
    ]
    assert lines == (
        []
        if step == kept
        else [f"state {asked} (step {step}) is evicted: takes {taken} (step {kept})"] * 2
    )


@pytest.mark.parametrize(("step", "kept"), [(5, 3), (8, 10)])
def test_a_fork_of_a_step_that_is_gone_begins_at_the_kept_one(
    repo: Repository, step: int, kept: int
) -> None:
    for count in range(3):  # begun, begun again without a capture, and gone on with
        weight = torch.zeros(3)
        with repo.track(
            branch="fork", start=at(step), nearest=True, weight=weight, rng=False
        ) as run:
            assert run.resumed_from is not None
            assert run.resumed_from.uid == (
                repo.state(at(kept)).uid if count < 2 else repo.state("fork").uid
            )
            assert weight.tolist() == [kept + max(count - 1, 0)] * 3
            if count:
                weight += 1
                run.capture().wait("durable")
    assert [state.step for state in repo.log("fork", limit=3)] == [kept + 2, kept + 1, kept]
    with repo.core.reading() as session:
        (fork,) = [each for each in branches.branches(session) if each.name == "fork"]
    assert fork.fork is not None
    assert fork.fork.state == repo.state(at(kept)).uid
    with pytest.raises(Conflict, match="does not descend from"):
        repo.track(branch="fork", start="main", nearest=True, weight=torch.zeros(3), rng=False)


def test_a_step_whose_files_were_deleted_is_as_one_that_was_evicted(repo: Repository) -> None:
    for path in repo.location.packs.glob(f"{repo.state(at(11)).uid}.*"):
        path.unlink()
    with pytest.raises(
        Unavailable, match=r"its files are not in .*; the nearest later state that can is"
    ):
        repo.load(at(11))
    assert repo.load(at(11), nearest=True)["weight"].tolist() == [10] * 3
    with repo.track(
        branch="fork", start=at(11), nearest=True, weight=(weight := torch.zeros(3)), rng=False
    ):
        assert weight.tolist() == [10] * 3


def test_steps_that_were_lost_with_their_process_name_the_ones_that_were_kept(
    tmp_path: Path,
) -> None:
    train(
        tmp_path / "runs",
        Config(memory_bytes=64 << 20, durable_every=5, durable_interval_s=None, retention="all"),
    )
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        assert {repo.state(at(step)).status for step in (6, 7, 8)} <= {Status.LOST, Status.EVICTED}
        assert [int(repo.load(at(step), nearest=True)["weight"][0]) for step in (4, 6, 8, 11)] == [
            5,
            5,
            10,
            10,
        ]


def test_without_any_kept_step_near_it_nearest_raises_too(repo: Repository) -> None:
    with repo.track(branch="lone", weight=torch.zeros(3), rng=False) as run:
        first = run.capture().wait("durable")
        run.capture().wait("durable")
    evict(repo.core, first.uid)
    assert repo.load(first.uid, nearest=True)["weight"].tolist() == [0] * 3, "the later one"
    with pytest.raises(
        Unavailable, match="nor can any ancestor; the nearest later state that can is"
    ):
        repo.load(first.uid)
    for path in repo.location.packs.glob(f"{repo.state('lone').uid}.*"):
        path.unlink()
    assert repo.location.root is not None
    with (
        datastates.open(repo.location.root) as other,
        pytest.raises(Unavailable, match=r"nor can any ancestor$") as caught,
    ):
        other.load(first.uid, nearest=True)
    assert caught.value.nearest is None


def test_a_tracker_goes_back_to_the_nearest_kept_step(repo: Repository) -> None:
    weight = torch.zeros(3)
    with repo.track(weight=weight, rng=False) as run:
        with pytest.raises(Unavailable, match="take step 3 with nearest=True"):
            run.restore(at(5))
        assert run.restore(at(5), nearest=True).step == 3
        assert (weight.tolist(), run.step) == ([3] * 3, 3)
        weight += 1
        assert run.capture().wait("durable").parents == (repo.state("main~1").uid,)
    assert [state.step for state in repo.log("main", limit=2)] == [4, 3]


def test_ranks_take_the_same_kept_step(repo: Repository) -> None:
    def work(group: ThreadGroup) -> tuple[list[float], int]:
        weight = torch.zeros(3)
        report = repo.restore(at(8), weight=weight, nearest=True, group=group)
        return weight.tolist(), report.step

    assert on_threads(2, work)[0] == [([10] * 3, 10)] * 2
    done = on_threads(
        2,
        lambda group: repo.restore(
            at(8), weight=torch.zeros(3), nearest=group.rank == 0, group=group
        ),
    )[0]
    assert [type(each) for each in done] == [InvalidInput] * 2


def test_every_kept_step_can_be_looked_back_at(repo: Repository) -> None:
    """Forks, diffs and bisections of any two steps that were kept."""
    kept = [step for step in range(1, STEPS + 1) if step not in GONE]
    for step in kept:
        with repo.track(
            branch=f"from-{step}", start=at(step), weight=(weight := torch.zeros(3)), rng=False
        ) as run:
            assert weight.tolist() == [step] * 3
            weight += 100
            assert run.capture().wait("durable").parents == (repo.state(at(step)).uid,)
        assert not repo.diff(at(step), "main").lacking
    found = repo.bisect(at(1), "main", lambda tree: bool(tree["weight"][0] >= 10))
    assert (found.good.step, found.bad.step) == (3, 10)


def test_the_states_after_one_are_those_of_its_branch(repo: Repository) -> None:
    with repo.track(branch="fork", start=at(3), weight=torch.zeros(3), rng=False) as run:
        run.capture().wait("durable")
    with repo.core.reading() as session:
        later = list(walk.later_restorable(session, repo.state(at(5)).uid))
    assert later == [repo.state(at(step)).uid for step in (10, 11, 12)]


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_nearest_is_true_or_false(repo: Repository, wrong: object) -> None:
    with pytest.raises(InvalidInput, match="nearest is"):
        repo.load(at(5), nearest=wrong)  # type: ignore[arg-type] # that is what is refused
