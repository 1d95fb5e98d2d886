"""Successive halving: which variants continue, from their own states, and what that costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import datastates
from datastates import Repository
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.views.study_trees import study as shown
from datastates.ranks import SoloGroup
from datastates.studies import (
    Exploration,
    Job,
    Plan,
    SerialExecutor,
    Variant,
    explore,
    grid,
    halving,
    prefix_epochs,
    read_study,
    repeat,
    work,
)
from datastates.studies.plan import Halving
from datastates.studies.results import Work
from datastates.values import Value
from tests.studies.studies import (
    FAULTS,
    build,
    counts,
    essence,
    faults,
    one_epoch,
    prefix,
    rungs,
    train,
)
from tests.studies.test_explorer import refuse
from tests.studies.test_explorer_processes import Exploring, wait_for

PLAN = rungs()


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository with a prefix on ``main``."""
    with prefix(tmp_path / "runs") as opened:
        yield opened


def go(repo: Repository, plan: Plan = PLAN, job: Any = train, **options: Any) -> Exploration:
    """Explore in this process."""
    with SerialExecutor() as executor:
        executor = None if "group" in options else executor  # type: ignore[assignment]
        return explore(
            repo, "main", plan, job, executor, **{"study": "s", "progress": False, **options}
        )


def progress(report: Exploration) -> dict[str, str]:
    return {each.variant: str(each.progress) for each in report}


def flat(count: int, epochs: int) -> Plan:
    return grid({"number": range(count)}, epochs=epochs)


def tell(job: Job) -> None:
    """Reports what its configuration says, without training."""
    job.track(value=torch.zeros(1), strict=False)
    for _ in job.epochs():
        job.report(loss=float(job.config["loss"]))  # type: ignore[arg-type]


def told(*losses: Value, **options: Any) -> Plan:
    """A plan of variants that report these values; "nan" and "inf" are texts in it."""
    variants = tuple(
        Variant(f"v{number}", None, 3, {"loss": loss}) for number, loss in enumerate(losses, 1)
    )
    return halving(Plan(variants), "loss", **{"every": 1, "keep": 0.5, **options})


# --- the plan -------------------------------------------------------------------------------------


def test_rungs_continue_each_variant_and_change_nothing_more() -> None:
    plan = halving(grid({"lr": [0.1, 0.2], "seed": [4]}, epochs=5), "loss", every=2)
    assert [(one.name, one.parent, one.epochs, dict(one.config)) for one in plan.variants] == [
        ("rung-1/lr=0.1,seed=4", None, 2, {"lr": 0.1, "seed": 4}),
        ("rung-1/lr=0.2,seed=4", None, 2, {"lr": 0.2, "seed": 4}),
        ("rung-2/lr=0.1,seed=4", "rung-1/lr=0.1,seed=4", 2, {}),
        ("rung-2/lr=0.2,seed=4", "rung-1/lr=0.2,seed=4", 2, {}),
        ("rung-3/lr=0.1,seed=4", "rung-2/lr=0.1,seed=4", 1, {}),
        ("rung-3/lr=0.2,seed=4", "rung-2/lr=0.2,seed=4", 1, {}),
    ]
    assert plan.halving == Halving("loss", 1 / 3, "min")
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again != Plan(plan.variants)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keep": 0}, "keep is 0: give a share between 0 and 1"),
        ({"keep": 1}, "keep is 1"),
        ({"keep": -0.5}, "keep is -0.5"),
        ({"keep": math.nan}, "keep"),
        ({"every": 0}, "every is 0"),
        ({"every": 4}, "every is 4, and the variants have 4 epochs.*give at most 3"),
        ({"every": 1.5}, "every is 1.5"),
        ({"mode": "highest"}, "mode is 'highest': choose 'min' or 'max'"),
        ({"metric": ""}, "'' cannot name a metric"),
        ({"plan": Plan((Variant("a", epochs=4), Variant("b", "a", 4)))}, "fork from the start"),
        ({"plan": Plan((Variant("a", epochs=4), Variant("b", epochs=5)))}, "equal epochs"),
        ({"plan": halving(flat(4, 4), "loss", every=2)}, "halving needs variants"),
        ({"plan": flat(1001, 1000), "every": 1}, "1001 variants in 1000 rungs: give at most"),
    ],
)
def test_what_cannot_be_halved_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        halving(**{"plan": flat(9, 4), "metric": "loss", "every": 2, **given})


def test_plans_that_are_no_chains_are_refused() -> None:
    variants = (Variant("a"), Variant("b", "a"), Variant("c", "a"))
    with pytest.raises(InvalidInput, match="'a' is continued by several"):
        Plan(variants, halving=Halving("loss", 0.5))
    with pytest.raises(InvalidInput, match="halving is 'yes'"):
        Plan(variants, halving="yes")  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(InvalidInput, match=r"halving\(repeat\(plan, seeds\)"):
        repeat(PLAN, 2)


# --- who continues --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "keep", "expected"),
    [
        (81, 1 / 3, [81, 27, 9]),
        (9, 1 / 3, [9, 3, 1]),
        (10, 0.3, [10, 3, 1]),
        (4, 0.99, [4, 3, 2]),
        (2, 1 / 3, [2, 1, 1]),
        (1, 1 / 3, [1, 1, 1]),
        (50, 1e-9, [50, 1, 1]),
    ],
)
def test_as_many_continue_as_the_share_says_but_at_least_one(
    count: int, keep: float, expected: list[int]
) -> None:
    plan = halving(flat(count, 9), "loss", every=3, keep=keep)
    names = {one.name: {"loss": 0.0} for one in plan.variants}
    assert [len(rung) for rung in plan.decided((), names, ())] == expected
    cost = work(plan, prefix_epochs=2)
    assert cost == Work(2 + 3.0 * sum(expected), count * (2 + 9.0), 2.0)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, -1.0, math.nan, math.inf, -math.inf]), min_size=1),
    st.floats(0.01, 0.99),
    st.sampled_from(["min", "max"]),
)
def test_no_variant_continues_before_a_better_one(
    losses: list[float], keep: float, mode: Any
) -> None:
    found = {f"{-number}": loss for number, loss in enumerate(losses)}
    best = Halving("loss", keep, mode).best(found, len(found))
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert len(best) == min(len(finite), max(1, math.floor(len(losses) * keep + 1e-9)))
    ranked = sorted(finite, reverse=mode == "max")
    assert [found[name] for name in best] == ranked[: len(best)]
    ties = [name for name in found if found[name] == found[best[-1]]] if best else []
    chosen = [name for name in ties if name in best]
    assert chosen == ties[: len(chosen)], "the first of the plan"


def test_the_next_rung_waits_for_every_variant_and_stays_as_it_was_decided() -> None:
    plan = told(3.0, 1.0, 2.0, 4.0)
    first = {f"rung-1/v{number}": {"loss": float(loss)} for number, loss in enumerate((3, 1, 2), 1)}
    assert plan.decided((), first, ()) == [plan.rungs()[0]]
    lost = ["rung-1/v4"]
    assert plan.decided((), first, lost)[1] == ["rung-2/v2", "rung-2/v3"]
    later = {**first, "rung-1/v4": {"loss": 0.0}}
    assert plan.decided((), later, ())[1] == ["rung-2/v2", "rung-2/v4"]
    assert plan.decided({"rung-2/v2", "rung-2/v3"}, later, ())[1] == ["rung-2/v2", "rung-2/v3"]


# --- studies --------------------------------------------------------------------------------------


def test_survivors_end_with_the_bytes_of_variants_that_were_never_compared(
    repo: Repository, tmp_path: Path
) -> None:
    report = go(repo)
    assert report
    assert progress(report) == {
        "rung-1/low": "done",
        "rung-1/high": "done",
        "rung-1/mid": "done",
        "rung-1/huge": "done",
        "rung-2/low": "dropped",
        "rung-2/high": "done",
        "rung-2/mid": "done",
        "rung-2/huge": "dropped",
        "rung-3/low": "dropped",
        "rung-3/high": "done",
        "rung-3/mid": "dropped",
        "rung-3/huge": "dropped",
    }
    assert (report.work.tree_epochs, report.work.scratch_epochs) == (4 * 2 + 2 * 2 + 1, 4 * 5)
    assert report.work == work(PLAN)
    said = "trained 13 epochs over the full data; all 4 variants to the end would take 20"
    assert said in str(report.table().caption)
    whole = Plan((Variant("high", None, 5, {"lr": 3e-2}),))
    with prefix(tmp_path / "other") as other:
        assert go(other, whole)
        digests = [[state.digest for state in repo.log("done/s/rung-3/high")]]
        digests += [[state.digest for state in other.log("done/s/high")]]
    assert digests[0] == digests[1]
    again = go(repo, job=refuse)
    assert all(each.is_reused for each in again if str(each.progress) == "done")
    with repo.core.reading() as session:
        view = shown(session, "s")
    assert {one.name: str(one.stage) for one in view.variants} == dict.fromkeys(report.done, "done")


def test_what_a_variant_set_in_its_optimizer_is_continued(repo: Repository) -> None:
    rates: dict[str, list[float]] = {}

    def setting(job: Job) -> None:
        model, _, sampler = build({})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        run = job.track(model=model, optimizer=optimizer, sampler=sampler)
        if job.is_new:
            optimizer.param_groups[0]["lr"] = job.config["lr"]
        for _ in job.epochs():
            rates.setdefault(job.variant.name, []).append(optimizer.param_groups[0]["lr"])
            job.report(loss=one_epoch(model, optimizer, sampler, run))

    assert go(repo, job=setting)
    assert rates["rung-3/high"] == [3e-2]


def test_what_the_start_has_not_is_continued_too(repo: Repository) -> None:
    began: dict[str, torch.Tensor] = {}

    def heads(job: Job) -> None:
        model, _, sampler = build(job.config)
        head = torch.nn.Linear(10, 10)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
        tracked = {"model": model, "head": head, "optimizer": optimizer, "sampler": sampler}
        run = job.track(**tracked, only="model", strict=False)
        began[job.variant.name] = head.weight.detach().clone()
        for _ in job.epochs():
            both = torch.nn.Sequential(model, head)
            job.report(loss=one_epoch(both, optimizer, sampler, run))

    plan = halving(Plan((Variant("one", epochs=3),)), "loss", every=1)
    assert go(repo, plan, heads)
    for rung in (1, 2):
        ended = repo.load(f"done/s/rung-{rung}/one")["head"]["weight"]
        assert not ended.equal(began[f"rung-{rung}/one"])
        assert ended.equal(began[f"rung-{rung + 1}/one"])


def test_a_scale_that_is_better_when_it_is_high(repo: Repository) -> None:
    report = go(repo, told(1.0, 3.0, 2.0, 2.5, mode="max"), tell)
    assert {name for name in report.done if name.startswith("rung-2")} == {"rung-2/v2", "rung-2/v4"}
    assert report["rung-3/v2"].state is not None
    assert report.best("loss", mode="max").metrics["loss"] == 3.0


def test_values_that_are_not_finite_are_never_kept(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    report = go(repo, told("nan", "-inf", 7.0, "inf"), tell)
    assert report
    assert {name for name in report.done if not name.startswith("rung-1")} == {
        "rung-2/v3",
        "rung-3/v3",
    }
    report = go(repo, told("nan", "nan"), tell, study="none")
    assert report, "nothing is left to do"
    assert set(report.done) == {"rung-1/v1", "rung-1/v2"}
    assert "no variant of the rung ended with a finite loss, so none continues" in caplog.text
    with pytest.raises(NotFound, match="loss is NaN or infinite in every finished variant"):
        report.best("loss")


def test_one_variant_goes_through_all_rungs(repo: Repository) -> None:
    assert set(go(repo, told(1.0), tell).done) == {"rung-1/v1", "rung-2/v1", "rung-3/v1"}


def test_a_metric_that_nobody_reports_ends_the_study_at_the_first_result(
    repo: Repository,
) -> None:
    plan = told(1.0, 2.0, 3.0, 4.0)
    wrong = Plan(plan.variants, halving=Halving("accuracy", 0.5))
    said = "halving compares 'accuracy', and variant 'rung-1/v1' reported 'loss'"
    with pytest.raises(InvalidInput, match=said):
        go(repo, wrong, tell, workers=2)
    assert "done/s/rung-1/v3" not in {ref.name for ref in repo.refs()}
    with pytest.raises(InvalidInput, match=said):
        go(repo, wrong, tell)
    with pytest.raises(InvalidInput, match=said):
        go(repo, wrong, tell, group=SoloGroup())
    report = go(repo, plan, tell)
    assert report["rung-1/v1"].is_reused
    assert report


@pytest.mark.parametrize("how", ["executor", "group"])
def test_a_variant_that_fails_in_a_rung_is_dropped_and_stays_so(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    options: dict[str, Any] = {"group": SoloGroup()} if how == "group" else {}
    where = {"rung-1/high": "1:raise!", "rung-2/mid": "0:raise!"}
    for key, value in faults(tmp_path / "faults", **where).items():
        monkeypatch.setenv(key, value)
    report = go(repo, retries=0, **options)
    assert not report
    found = progress(report)
    assert {name for name, each in found.items() if each == "failed"} == set(where)
    assert found["rung-2/high"] == found["rung-3/high"] == found["rung-3/mid"] == "skipped"
    assert {name for name in report.done if "rung-1" not in name} == {"rung-2/low", "rung-3/low"}
    monkeypatch.delenv(FAULTS)
    before = counts(repo)
    again = go(repo, job=refuse, **options)
    assert progress(again) == found
    assert again.errors["rung-1/high"].startswith("ValueError: planned for rung-1-high\n")
    assert counts(repo) == before


def test_groups_decide_as_one_explorer_does(repo: Repository, tmp_path: Path) -> None:
    assert go(repo, group=SoloGroup())
    with prefix(tmp_path / "other") as other:
        assert go(other)
        assert essence(repo, "s", PLAN) == essence(other, "s", PLAN)


def test_a_study_from_another_one_counts_all_rungs_above_it(repo: Repository) -> None:
    go(repo)
    assert prefix_epochs(repo, "done/s/rung-3/high") == 2 + 2 + 1


@pytest.mark.long
@pytest.mark.parametrize("place", ["rung-1/mid", "rung-2/high", "rung-3/high"])
def test_a_study_killed_in_a_rung_goes_on_there(tmp_path: Path, place: str) -> None:
    with prefix(tmp_path / "expected") as other:
        go(other)
        expected = essence(other, "s", PLAN)
    with prefix(tmp_path / "runs"):
        pass
    epoch = 0 if place == "rung-3/high" else 1
    explorer = Exploring(
        "rungs", str(tmp_path / "runs"), **faults(tmp_path / "faults", **{place: f"{epoch}:hang"})
    )
    try:
        wait_for(tmp_path / "faults" / f"hangs-{place.replace('/', '-')}")
        explorer.end(9)
    finally:
        explorer.close()
    with datastates.open(tmp_path / "runs") as repo:
        done = set(read_study(repo, "s", PLAN).done)
        assert (
            len([name for name in done if name < place[:6]]) == {"1": 0, "2": 4, "3": 6}[place[5]]
        )
        before = counts(repo)
        report = go(repo)
        assert report
        assert {each.variant for each in report if each.is_reused} == done
        assert essence(repo, "s", PLAN) == expected
        after = counts(repo)
        assert {name: after[name] for name in before if name.removeprefix("done/s/") in done} == {
            name: before[name] for name in before if name.removeprefix("done/s/") in done
        }
