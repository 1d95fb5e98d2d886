"""What ``explore`` makes of a plan, here in this process: names, attributes, resuming, failures,
refusals."""

from __future__ import annotations

import logging
import math
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Conflict, NotFound, Repository, State, Status
from datastates.errors import InvalidInput
from datastates.studies import (
    Exploration,
    Job,
    Plan,
    Progress,
    SerialExecutor,
    Variant,
    explore,
    read_study,
)
from datastates.studies.records import SET, Claim, claim_name, claims_folder
from tests.studies.studies import (
    CONFIG,
    FAULTS,
    build,
    counts,
    essence,
    faults,
    meet,
    one_epoch,
    prefix,
    train,
    tree,
)

PLAN = tree()


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository with a prefix on ``main``."""
    with prefix(tmp_path / "runs") as opened:
        yield opened


def go(
    repo: Repository, plan: Plan = PLAN, job: Any = train, start: str = "main", **options: Any
) -> Exploration:
    """Explore in this process."""
    with SerialExecutor() as executor:
        return explore(
            repo, start, plan, job, executor, **{"study": "s", "progress": False, **options}
        )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the plan gives when nothing goes wrong."""
    with prefix(tmp_path_factory.mktemp("expected") / "runs") as repo:
        assert go(repo)
        return essence(repo, "s", PLAN)


def test_a_study_is_branches_tags_and_attributes(repo: Repository) -> None:
    report = go(repo, config={"momentum": 0.5})
    assert report
    start = repo.state("start/s")
    assert start.uid == repo.state("main").uid == report.start.uid
    assert {ref.name for ref in repo.refs()} == {
        "main",
        "start/s",
        *(f"s/{v.name}" for v in PLAN.variants),
        *(f"done/s/{v.name}" for v in PLAN.variants),
    }
    for variant in PLAN.variants:
        state = repo.state(f"done/s/{variant.name}")
        assert state == report[variant.name].state
        assert state.status is Status.DURABLE
        assert state.uid == repo.state(f"s/{variant.name}").uid
        assert {key: value for key, value in state.attributes.items() if key != SET} == {
            "study": "s",
            "variant": variant.name,
            "variant_digest": PLAN.digest(variant.name, {"momentum": 0.5}),
            "epoch": variant.epochs,
        }
        parent = "start/s" if variant.parent is None else f"done/s/{variant.parent}"
        assert repo.state(f"done/s/{variant.name}~{variant.epochs}").uid == repo.state(parent).uid
        assert state.step == repo.state(parent).step + 8 * variant.epochs


def test_a_job_has_the_configuration_of_its_path_and_the_rows_of_its_subsets(
    repo: Repository,
) -> None:
    plan = Plan(
        (
            Variant("a", None, 1, {"lr": 1e-3}, train=("x", "y"), validation=("z",)),
            Variant("b", "a", 1, {"depth": 2}),
        ),
        {"x": (3, 1), "y": (2,), "z": (9,)},
    )
    seen: dict[str, Any] = {}

    def noting(job: Job) -> None:
        seen[job.variant.name] = (dict(job.config), job.train, job.validation)
        train(job)

    assert go(repo, plan, noting, config={"lr": 1.0, "width": 4})
    assert seen == {
        "a": ({"lr": 1e-3, "width": 4}, (1, 2, 3), (9,)),
        "b": ({"lr": 1e-3, "width": 4, "depth": 2}, (), ()),
    }
    assert repo.state("done/s/a").attributes["samples"] == 3
    assert "samples" not in repo.state("done/s/b").attributes


def test_finished_variants_are_not_trained_again(repo: Repository) -> None:
    first = go(repo)
    before = counts(repo)
    assert not any(result.is_reused for result in first)
    again = go(repo, job=refuse)
    assert again
    assert all(result.is_reused for result in again)
    assert [result.state for result in again] == [result.state for result in first]
    assert counts(repo) == before


def test_a_plan_may_grow(repo: Repository) -> None:
    go(repo)
    before = counts(repo)
    more = Plan((*PLAN.variants, Variant("low-a-x", "low-a", 1, {"seed": 9})))
    report = go(repo, more)
    assert [result.variant for result in report if not result.is_reused] == ["low-a-x"]
    assert repo.state("done/s/low-a-x~1").uid == repo.state("done/s/low-a").uid
    assert {name: count for name, count in counts(repo).items() if name in before and name} == {
        name: count for name, count in before.items() if name
    }


@pytest.mark.parametrize("change", ["done", "begun"])
def test_a_plan_that_changed_is_refused_before_anything_runs(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "begun":
        for key, value in faults(tmp_path / "faults", low="1:raise!").items():
            monkeypatch.setenv(key, value)
    go(repo, retries=0)
    before = counts(repo)
    changed = Plan((Variant("new"), Variant("low", None, 2, {"lr": 0.5})))
    with pytest.raises(Conflict, match="variant 'low' of study 's' was trained by another plan"):
        go(repo, changed)
    assert counts(repo) == before


def test_a_start_that_moved_on_is_refused(repo: Repository) -> None:
    go(repo, Plan((Variant("a"),)))
    model, optimizer, sampler = build({})
    with repo.track(model=model, optimizer=optimizer, sampler=sampler) as run:
        run.capture()
    with pytest.raises(
        Conflict, match=r"study 's' began from .* 'main' is .* now: start from 'start/s'"
    ):
        go(repo, Plan((Variant("a"), Variant("b"))))
    assert go(repo, Plan((Variant("a"), Variant("b"))), start="start/s")


def test_the_start_is_durable_before_anything_forks(tmp_path: Path) -> None:
    forked = threading.Event()
    statuses = []

    def looking(job: Job) -> None:
        forked.set()
        statuses.append(opened.state("start/s").status)
        train(job)

    def slow(step: str) -> None:
        forked.wait(0.3)

    with prefix(tmp_path / "runs", config=replace(CONFIG, on_step=slow)) as opened:
        model, optimizer, sampler = build({})
        with opened.track(model=model, optimizer=optimizer, sampler=sampler) as run:
            assert run.capture().wait().status is Status.CAPTURED
            go(opened, Plan((Variant("a"),)), looking)
    assert statuses == [Status.DURABLE]


@pytest.mark.parametrize("how", ["raise", "interrupt"])
def test_a_variant_that_was_stopped_half_way_ends_bit_for_bit_as_one_that_was_not(
    repo: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    how: str,
) -> None:
    for key, value in faults(
        tmp_path / "faults", low=f"1:{how}", low_a=f"1:{how}", high_a=f"0:{how}"
    ).items():
        monkeypatch.setenv(key, value)
    if how == "interrupt":
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                go(repo)
    else:
        assert not go(repo, retries=0)
        assert read_study(repo, "s", PLAN)["low"].progress is Progress.BEGUN
    high = counts(repo)["s/high"]
    assert go(repo)
    assert essence(repo, "s", PLAN) == expected
    assert counts(repo)["s/high"] == high


def test_an_interruption_says_that_the_study_goes_on(
    repo: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for key, value in faults(tmp_path / "faults", high="0:interrupt").items():
        monkeypatch.setenv(key, value)
    with caplog.at_level(logging.WARNING, "datastates"), pytest.raises(KeyboardInterrupt):
        go(repo)
    assert "the same call goes on from here" in caplog.text


def test_a_failure_is_retried_and_then_reported_and_what_comes_from_it_is_skipped(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in faults(tmp_path / "faults", low="1:raise!", high="0:raise").items():
        monkeypatch.setenv(key, value)
    report = go(repo)
    assert not report
    assert {each.variant: str(each.progress) for each in report} == {
        "low": "failed",
        "high": "done",
        "low-a": "skipped",
        "low-b": "skipped",
        "high-a": "done",
    }
    assert list(report.errors) == ["low"]
    assert report.errors["low"].startswith("ValueError: planned for low\n")
    assert 'raise ValueError(f"planned for {variant}")' in report.errors["low"]
    assert report["low"].state == repo.state("s/low")
    assert report["low"].epochs == 1
    with pytest.raises(NotFound, match="low"):
        repo.state("done/s/low")
    monkeypatch.delenv(FAULTS)
    assert go(repo)


def test_a_stop_rule_ends_a_variant_early_and_resumes_to_the_same_end(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def third(history: Sequence[State]) -> bool:
        assert [state.attributes["epoch"] for state in history] == list(range(1, len(history) + 1))
        assert all(state.attributes["variant"] == "a" for state in history)
        return len(history) == 3 and history[2].metrics["loss"] < history[0].metrics["loss"]

    plan = Plan((Variant("a", None, 9, {"lr": 1e-2}),))
    assert go(repo, plan, stop=third)
    done = repo.state("done/s/a")
    assert done.attributes["epoch"] == 3
    with prefix(tmp_path / "other") as other:
        for key, value in faults(tmp_path / "faults", a="2:raise").items():
            monkeypatch.setenv(key, value)
        assert go(other, plan, stop=third)
        assert other.state("done/s/a").digest == done.digest


def test_a_variant_that_reached_its_end_untagged_is_not_trained_again(repo: Repository) -> None:
    plan = Plan((Variant("a", None, 2),))
    go(repo, plan)
    done = repo.state("done/s/a")
    repo.delete_ref("done/s/a")
    assert go(repo, plan, refuse)
    assert repo.state("done/s/a") == done


def test_a_seed_counts_at_the_fork_only(repo: Repository) -> None:
    plan = Plan(
        (
            Variant("one", None, 1, {"seed": 1}),
            Variant("two", None, 1, {"seed": 2}),
            Variant("same", None, 1, {"seed": 1, "name": "other"}),
            Variant("child", "one", 1),
        )
    )
    draws: dict[str, float] = {}

    def drawing(job: Job) -> None:
        model, optimizer, sampler = build(job.config)
        run = job.track(model=model, optimizer=optimizer, sampler=sampler)
        draws[job.variant.name] = float(torch.rand(()))
        for _ in job.epochs():
            job.report()
        run.close()

    go(repo, plan, drawing)
    assert draws["one"] == draws["same"] != draws["two"]
    torch.manual_seed(1)
    assert draws["one"] == float(torch.rand(()))
    assert draws["child"] == float(torch.rand(()))  # it goes on where its parent's generator stands


def test_what_the_start_has_not_begins_the_same_everywhere_and_is_restored_whole_later(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan((Variant("a", None, 2),))
    with prefix(tmp_path / "other") as other:
        torch.manual_seed(99)
        assert go(other, plan, with_a_new_head)
        for key, value in faults(tmp_path / "faults", a="1:raise").items():
            monkeypatch.setenv(key, value)
        torch.manual_seed(7)
        assert go(repo, plan, with_a_new_head)
        assert essence(repo, "s", plan) == essence(other, "s", plan)


def test_only_one_explorer_at_a_time(repo: Repository) -> None:
    with Claim.take(claims_folder(repo), claim_name(repo, "s"), "process 7 on moon") or pytest.fail(
        "it is free"
    ):
        with pytest.raises(Conflict, match="study 's' is being explored by process 7 on moon"):
            go(repo)
        assert go(repo, study="another")
    assert go(repo)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        pytest.param(
            "reports_nothing", "ended without a result: call job.report", id="nothing reported"
        ),
        pytest.param(
            "forgets_an_epoch",
            "epoch 0 of variant 'a' was not reported",
            id="an epoch not reported",
        ),
        pytest.param(
            "reports_too_much", "has 1 epochs and reported one more", id="too much reported"
        ),
        pytest.param(
            "reports_early", "reported before it tracked anything", id="reported before tracking"
        ),
        pytest.param("tracks_twice", "track was called twice", id="tracked twice"),
        pytest.param("names_a_branch", "branch: the plan decides that", id="a branch named"),
    ],
)
def test_what_a_train_function_does_wrong_is_said(repo: Repository, job: str, message: str) -> None:
    report = go(repo, Plan((Variant("a"),)), globals()[job], retries=0)
    assert message in report.errors["a"]


def test_executors_that_would_share_random_number_generators_are_refused(repo: Repository) -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(InvalidInput, match="threads of one process"),
    ):
        explore(repo, "main", PLAN, train, threads, study="s")
    with pytest.raises(InvalidInput, match="threads of one process"):
        explore(repo, "main", PLAN, train, ThreadPoolExecutor, study="s")
    context = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(1, mp_context=context) as forked,
        pytest.raises(InvalidInput, match="mp_context"),
    ):
        explore(repo, "main", PLAN, train, forked, study="s")
    assert [ref.name for ref in repo.refs() if ref.name.startswith("s/")] == []


def test_wrong_arguments_are_refused(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="retries is -1"):
        go(repo, retries=-1)
    with pytest.raises(InvalidInput, match="threads is 0"):
        go(repo, threads=0)
    with pytest.raises(InvalidInput, match="cannot name a branch"):
        go(repo, study="my study")
    with pytest.raises(InvalidInput, match="train is 'train'"):
        go(repo, job="train")
    with pytest.raises(InvalidInput, match="the executor is 4"):
        # that is the mistake
        explore(repo, "main", PLAN, train, 4, study="s")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="train does not pickle"):
        explore(repo, "main", PLAN, lambda job: None, study="s")
    with pytest.raises(NotFound, match="no study 'other'"):
        read_study(repo, "other", PLAN)


def test_a_result_is_found_by_name_and_by_metric(repo: Repository) -> None:
    report = go(repo)
    best = report.best("loss")
    assert best.metrics["loss"] == min(result.metrics["loss"] for result in report)
    assert report.best("loss", mode="max").metrics["loss"] == max(
        result.metrics["loss"] for result in report
    )
    with pytest.raises(NotFound, match="'accuracy': there are loss"):
        report.best("accuracy")
    with pytest.raises(InvalidInput, match="mode is 'highest': choose 'min' or 'max'"):
        report.best("loss", mode="highest")
    # each has a state
    diverged = {
        name: replace(each, state=replace(each.state, metrics={"loss": math.nan}))  # type: ignore[type-var]
        for name, each in report.results.items()
    }
    first = next(iter(report.results))
    assert (
        replace(report, results={**report.results, first: diverged[first]}).best("loss").variant
        != first
    )
    with pytest.raises(
        NotFound, match="loss is NaN or infinite in every finished variant of study"
    ):
        replace(report, results=diverged).best("loss")
    with pytest.raises(InvalidInput, match="no variant 'x'"):
        report["x"]
    assert [result.variant for result in report] == [variant.name for variant in PLAN.variants]
    assert report.table().row_count == len(report) == 5
    assert report.storage is not None
    assert report.table().caption == str(report.storage)
    assert report.storage.states >= 6, "the start and what the tags name are on disk"


def test_a_study_is_read_back_by_another_process_s_repository(
    repo: Repository, tmp_path: Path
) -> None:
    report = go(repo)
    with datastates.open(tmp_path / "runs") as other:
        assert {each.variant: each.state for each in read_study(other, "s", PLAN)} == report.done


def refuse(job: Job) -> None:
    raise AssertionError(f"{job.variant.name} is trained again")


def with_a_new_head(job: Job) -> None:
    """Of the start it takes the model alone; the head and its optimizer are new."""
    model, _, sampler = build(job.config)
    head = torch.nn.Linear(10, 10)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
    both = torch.nn.Sequential(model, head)
    run = job.track(
        model=model, head=head, optimizer=optimizer, sampler=sampler, only="model", strict=False
    )
    for epoch in job.epochs():
        loss = one_epoch(both, optimizer, sampler, run)
        meet(job.variant.name, epoch, run)
        job.report(loss=loss)


def reports_nothing(job: Job) -> None:
    pass


def forgets_an_epoch(job: Job) -> None:
    job.track(value=torch.zeros(1), strict=False)
    for _ in job.epochs():
        pass


def reports_too_much(job: Job) -> None:
    job.track(value=torch.zeros(1), strict=False)
    for _ in range(2):
        job.report()


def reports_early(job: Job) -> None:
    job.report()


def tracks_twice(job: Job) -> None:
    for _ in range(2):
        job.track(value=torch.zeros(1), strict=False)


def names_a_branch(job: Job) -> None:
    job.track(value=torch.zeros(1), branch="main")
