"""What the lineage tells people of a study: the tree, what each variant took and came to, and
which failed and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from datastates import NotFound, Repository
from datastates.lineage.schema import VARIANT
from datastates.lineage.states import Life
from datastates.lineage.views.study_trees import Stage, StudyDetail, StudyVariant, studies, study
from datastates.lineage.write import attachments
from datastates.lineage.write.attachments import ERROR_CHARACTERS, PlannedVariant
from datastates.studies import Exploration, Job, Plan, SerialExecutor, Variant, explore
from tests.studies.studies import FAULTS, faults, prefix, train, tree

PLAN = tree()


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository with a prefix on ``main``."""
    with prefix(tmp_path / "runs") as opened:
        yield opened


def go(repo: Repository, plan: Plan = PLAN, job: Any = train, **options: Any) -> Exploration:
    """Explore in this process."""
    with SerialExecutor() as executor:
        return explore(
            repo, "main", plan, job, executor, **{"study": "s", "progress": False, **options}
        )


def shown(repo: Repository, **asked: Any) -> tuple[StudyDetail, dict[str, StudyVariant]]:
    """The study ``s``, and its variants by name."""
    with repo.core.reading() as session:
        detail = study(session, "s", **asked)
    return detail, {variant.name: variant for variant in detail.variants}


def fail_high(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for key, value in faults(folder / "faults", high="1:raise!").items():
        monkeypatch.setenv(key, value)


def test_a_study_is_a_tree_with_cost_and_result(repo: Repository) -> None:
    report = go(repo)
    detail, variants = shown(repo)
    assert [(each.name, each.depth) for each in detail.variants] == [
        ("low", 0),
        ("low-a", 1),
        ("low-b", 1),
        ("high", 0),
        ("high-a", 1),
    ]
    assert {each.stage for each in detail.variants} == {Stage.DONE}
    assert (detail.metric, detail.metrics, detail.total) == ("loss", ("loss",), 5)
    for name, each in variants.items():
        state = report[name].state
        assert state is not None
        own = repo.log(f"s/{name}", limit=PLAN[name].epochs)
        assert (each.state, each.value, each.step) == (state.uid, state.metrics["loss"], state.step)
        assert (each.epoch, each.epochs, each.states) == (
            PLAN[name].epochs,
            PLAN[name].epochs,
            PLAN[name].epochs,
        )
        assert (each.config, each.parent) == (dict(PLAN[name].config), PLAN[name].parent)
        assert each.bytes == sum(one.bytes_new for one in own)
        assert each.attempts == 1
        assert each.took_s is not None
        assert 0 < each.took_s < 60
    ranked = sorted(variants.values(), key=lambda each: each.rank or 0)
    assert [each.rank for each in ranked] == [1, 2, 3, 4, 5]
    assert [each.value for each in ranked] == sorted(each.value or 0 for each in ranked)
    assert ranked[0].name == report.best("loss").variant
    assert variants["low"].set == "lr 0.01 -> 0.001"

    with repo.core.reading() as session:
        (summary,) = studies(session).items
    assert summary == detail.study
    assert (summary.variants, summary.done, summary.failed, summary.start) == (
        5,
        5,
        0,
        repo.state("start/s").uid,
    )
    assert summary.bytes == sum(each.bytes for each in variants.values())
    assert summary.took_s == pytest.approx(sum(each.took_s or 0 for each in variants.values()))


def test_a_variant_that_failed_says_why_and_its_descendants_are_skipped(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_high(monkeypatch, tmp_path)
    report = go(repo)
    _, variants = shown(repo)
    high = variants["high"]
    assert (high.stage, high.epoch, high.epochs, high.attempts, high.rank) == (
        Stage.FAILED,
        1,
        2,
        2,
        None,
    )
    assert high.error == report["high"].error
    assert high.error is not None
    assert high.error.startswith("ValueError: planned for high\n")
    assert "Traceback" in high.error
    assert high.took_s is not None
    assert high.took_s > 0
    assert (variants["high-a"].stage, variants["high-a"].error) == (
        Stage.SKIPPED,
        "high failed, from which it was to go on",
    )
    assert variants["low-a"].stage is Stage.DONE

    monkeypatch.delenv(FAULTS)
    before = high.took_s
    go(repo)
    _, variants = shown(repo)
    high = variants["high"]
    assert (high.stage, high.error, high.attempts) == (Stage.DONE, None, 3)
    assert high.took_s is not None
    assert high.took_s > before
    assert variants["low"].attempts == 1  # it was reused


def test_what_is_planned_is_there_before_it_begins(repo: Repository) -> None:
    seen: list[dict[str, Stage]] = []

    def look(job: Job) -> None:
        seen.append({name: each.stage for name, each in shown(repo)[1].items()})
        train(job)

    go(repo, job=look)
    assert seen[0] == {
        "low": Stage.BEGUN,
        "low-a": Stage.WAITING,
        "low-b": Stage.WAITING,
        "high": Stage.WAITING,
        "high-a": Stage.WAITING,
    }
    assert (seen[-1]["low"], seen[-1]["high"]) == (Stage.DONE, Stage.DONE)


def test_a_variant_whose_training_lives_is_running(repo: Repository) -> None:
    def look(job: Job) -> None:
        train_slowly(job)

    def train_slowly(job: Job) -> None:
        train(job)
        stages.append(shown(repo, living=lambda run: Life.RUNNING)[1][job.variant.name].stage)
        stages.append(shown(repo, living=lambda run: Life.ENDED)[1][job.variant.name].stage)

    stages: list[Stage] = []
    go(repo, Plan((Variant("a", None, 1, {}),)), look)
    assert stages == [Stage.RUNNING, Stage.BEGUN]


def test_a_study_of_before_is_known_by_its_branches(repo: Repository) -> None:
    go(repo)
    _, before = shown(repo)
    with repo.core.writing() as session:
        session.execute(delete(VARIANT))
    repo.branch("s/not-of-it", "main")
    detail, variants = shown(repo)
    assert set(variants) == set(before)
    for name, each in variants.items():
        was = before[name]
        assert (each.stage, each.parent, each.state, each.value, each.rank) == (
            was.stage,
            was.parent,
            was.state,
            was.value,
            was.rank,
        )
        assert (each.took_s, each.epochs, each.attempts, each.config) == (None, None, 0, {})
    assert detail.study.planned_at is None


def test_variants_that_ended_with_the_same_bytes_are_named(repo: Repository) -> None:
    def ignore(job: Job) -> None:
        from tests.studies.studies import build

        model, optimizer, sampler = build({})
        job.track(model=model, optimizer=optimizer, sampler=sampler)
        for _ in job.epochs():
            job.report(loss=1.0)

    go(
        repo,
        Plan((Variant("a", None, 1, {"depth": 2}), Variant("b", None, 1, {"depth": 3}))),
        ignore,
    )
    _, variants = shown(repo)
    assert (variants["a"].alike, variants["b"].alike) == (("b",), ("a",))
    assert (variants["a"].rank, variants["b"].rank) == (1, 1)


def test_variants_are_ranked_by_what_is_asked_for(repo: Repository) -> None:
    def report(job: Job) -> None:
        from tests.studies.studies import build

        model, optimizer, sampler = build({})
        job.track(model=model, optimizer=optimizer, sampler=sampler)
        for _ in job.epochs():
            job.report(accuracy=float(str(job.config["a"])), other=math.nan)

    go(
        repo,
        Plan(tuple(Variant(f"v{number}", None, 1, {"a": number}) for number in range(4))),
        report,
    )
    detail, variants = shown(repo)
    assert (detail.metric, detail.direction) == ("accuracy", "max")
    assert [variants[f"v{number}"].rank for number in range(4)] == [4, 3, 2, 1]
    _, variants = shown(repo, metric="other")
    assert {(each.value, each.rank) for each in variants.values()} == {(None, None)}
    detail, _ = shown(repo, limit=2)
    assert ([each.name for each in detail.variants], detail.total) == (["v0", "v1"], 4)


def test_names_that_differ_in_the_size_of_letters_are_two_studies(repo: Repository) -> None:
    go(repo, Plan((Variant("a", None, 1, {}),)))
    go(repo, Plan((Variant("b", None, 1, {}),)), study="S")
    with repo.core.reading() as session:
        assert {each.name: each.variants for each in studies(session).items} == {"s": 1, "S": 1}
    with repo.core.writing() as session:
        session.execute(delete(VARIANT))
    with repo.core.reading() as session:
        assert {each.name: each.variants for each in studies(session).items} == {"s": 1, "S": 1}
        assert [each.name for each in study(session, "S").variants] == ["b"]


def test_there_is_no_study_of_another_name(repo: Repository) -> None:
    with repo.core.reading() as session, pytest.raises(NotFound, match="there is no study 's'"):
        study(session, "s")


def test_plans_that_say_nonsense_end_too(repo: Repository) -> None:
    with repo.core.writing() as session:
        attachments.plan(
            session,
            "s",
            [
                PlannedVariant("a", "b", 1, {}),
                PlannedVariant("b", "a", 1, {}),
                PlannedVariant("c", "gone", 1, {}),
            ],
        )
        session.execute(update(VARIANT).where(VARIANT.c.name == "a").values(error="no"))
    _, variants = shown(repo)
    assert {name: each.stage for name, each in variants.items()} == {
        "a": Stage.FAILED,
        "b": Stage.SKIPPED,
        "c": Stage.WAITING,
    }


def test_a_long_error_keeps_its_first_line_and_its_end_and_no_secret(repo: Repository) -> None:
    with repo.core.writing() as session:
        attachments.plan(
            session, "s", [PlannedVariant("a", None, 1, {"api_key": "sk-very-secret", "lr": 0.1})]
        )
        error = "OSError: postgresql://me:hunter2@db/x \0\ud800\n\n" + "deep\n" * 10_000 + "the end"
        attachments.fail(session, "s", "a", error)
    _, variants = shown(repo)
    said = variants["a"].error
    assert said is not None
    assert said.startswith("OSError: postgresql://me:***@db/x ??\n")
    assert said.endswith("deep\nthe end")
    assert len(said) == ERROR_CHARACTERS
    assert variants["a"].config == {"api_key": "***", "lr": 0.1}
