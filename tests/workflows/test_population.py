"""Members train side by side; the worst go on from copies of the best, and the lineage says who came from whom."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Conflict, InvalidInput, Repository, Unavailable
from datastates.workflows import (
    Choice,
    Job,
    LogUniform,
    Plan,
    Population,
    SerialExecutor,
    Uniform,
    Variant,
    explore,
    perturbed,
    population,
    reconfigure,
)
from datastates.workflows.plans.builders import Distribution
from datastates.workflows.running.record import done_tag
from tests.support.effort import part
from tests.workflows.studies import CONFIG, prefix
from tests.workflows.studies import train as train_digits

SEARCH = {"lr": LogUniform(1e-3, 1e-1)}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        with opened.track(model=nn.Linear(1, 1), trained=0.0, rates=[]) as run:
            run.capture()
        yield opened


def train(job: Job) -> None:
    """Adds to a number what the rate says: the best rate is 0.02. ``rates`` remembers all that a member went through."""
    run = job.track(model=nn.Linear(1, 1), trained=0.0, rates=(rates := []))
    rate = float(job.config["lr"])  # type: ignore[arg-type]  # a number, by SEARCH
    for _ in job.epochs():
        trained = run.values["trained"]
        assert isinstance(trained, float)
        score = run.values["trained"] = trained + 1 - abs(math.log(rate / 0.02))
        rates.append(rate)
        job.report(score=score)


def evolve(repo: Repository, **options: Any) -> Population:
    chosen = {"members": 6, "rounds": 4, "mode": "max", "exploit": 0.34, "seed": 2, **options}
    return population(
        repo,
        "main",
        chosen.pop("train", train),
        study="pbt",
        search=SEARCH,
        metric="score",
        executor=SerialExecutor(),
        progress=False,
        **chosen,
    )


def summary(found: Population) -> list[Any]:
    return [(each.variant, each.parent, dict(each.config), each.value, each.state and each.state.digest) for each in found]


def test_the_worst_go_on_from_copies_of_the_best(repo: Repository) -> None:
    found = evolve(repo)
    assert len(found) == 24
    for round_ in (1, 2, 3):
        before = sorted((each for each in found if each.round == round_), key=lambda each: -each.value)
        after = {each.number: each for each in found if each.round == round_ + 1}
        best, worst = {each.variant for each in before[:2]}, {each.number for each in before[-2:]}
        for each in before:
            following = after[each.number]
            assert following.is_copy == (each.number in worst)
            assert following.parent in (best if following.is_copy else {each.variant})


def test_a_copy_has_the_state_of_the_better_one_and_a_changed_configuration(repo: Repository) -> None:
    found = evolve(repo)
    known = {each.variant: each for each in found}
    copies = [each for each in found if each.is_copy]
    assert len(copies) == 6
    for each in copies:
        assert each.parent is not None
        assert each.state is not None
        donor = known[each.parent]
        assert donor.state is not None
        assert each.state.parents == (donor.state.uid,)
        rates = repo.load(each.state.uid)["rates"]
        assert rates == [step.config["lr"] for step in found.path(each)]
        assert rates[-1] != rates[-2]
        assert each.config["seed"] != donor.config["seed"]
        assert 1e-3 <= rates[-1] <= 1e-1
    moved = [
        each
        for each in copies
        if each.config["lr"] in {float(str(known[str(each.parent)].config["lr"])) * factor for factor in (0.8, 1.25)}
    ]
    assert len(moved) >= 3, "of the donor's, but for the quarter that is drawn anew"


def test_the_best_gets_further_than_the_best_of_as_many_that_copy_nobody(repo: Repository) -> None:
    found, alone = evolve(repo), None
    with datastates.open(repo.location.packs.parent / "alone", config=CONFIG) as other:
        with other.track(model=nn.Linear(1, 1), trained=0.0, rates=[]) as run:
            run.capture()
        alone = evolve(other, exploit=0)
        assert not any(each.is_copy for each in alone)
        assert {len(each.changes) for each in alone if each.round > 1} == {0}
    assert summary(found)[0][2:4] == summary(alone)[0][2:4], "they begin alike"
    assert found.best.value > alone.best.value


def test_called_again_it_trains_nothing_and_with_more_rounds_only_those(repo: Repository) -> None:
    found = evolve(repo, rounds=3)
    states = len(repo.find("step >= 0"))
    assert summary(evolve(repo, rounds=3)) == summary(found)
    assert len(repo.find("step >= 0")) == states
    longer = evolve(repo, rounds=5)
    assert summary(longer)[:18] == summary(found)
    assert len(repo.find("step >= 0")) == states + 12


def test_after_a_death_in_any_round_it_goes_on_to_the_same_end(tmp_path: Path, repo: Repository) -> None:
    found = evolve(repo)
    for place in part(("r1/m3", "r2/m1", "r4/m6")):
        died: list[str] = []

        def dying(job: Job, place: str = place, died: list[str] = died) -> None:
            if job.variant.name == place and not died:
                died.append(place)
                raise KeyboardInterrupt
            train(job)

        with datastates.open(tmp_path / place.replace("/", "-"), config=CONFIG) as other:
            with other.track(model=nn.Linear(1, 1), trained=0.0, rates=[]) as run:
                run.capture()
            with pytest.raises(KeyboardInterrupt):
                evolve(other, train=dying)
            again = evolve(other, train=dying)
        assert [line[:4] for line in summary(again)] == [line[:4] for line in summary(found)]


def test_other_arguments_for_the_same_study_are_refused(repo: Repository) -> None:
    evolve(repo, rounds=2)
    with pytest.raises(Conflict, match="another plan"):
        evolve(repo, rounds=2, seed=3)


def failing(job: Job) -> None:
    """Three members fail, in every attempt; another one reports NaN: more than the worst third."""
    if job.variant.name in ("r1/m2", "r1/m3", "r2/m4"):
        raise ValueError(f"planned for {job.variant.name}")
    if job.variant.name == "r1/m5":
        job.track(model=nn.Linear(1, 1), trained=0.0, rates=[])
        for _ in job.epochs():
            job.report(score=math.nan)
        return
    train(job)


def test_members_that_failed_go_on_from_copies(repo: Repository) -> None:
    found = evolve(repo, train=failing, retries=0)
    known = {each.variant: each for each in found}
    assert "planned for r1/m2" in (known["r1/m2"].error or "")
    for variant in ("r2/m2", "r2/m3", "r2/m5", "r3/m4"):
        assert known[variant].is_copy
        assert known[variant].is_alive
    assert "failed" in [cell for column in found.table().columns for cell in column._cells]
    assert "r1/m2" not in found.picture().plain


def test_who_failed_and_was_replaced_is_not_tried_again(repo: Repository) -> None:
    found = evolve(repo, train=failing, retries=0)
    again = evolve(repo, retries=0)
    assert summary(again) == summary(found)
    assert done_tag("pbt", "r1/m2") not in {ref.name for ref in repo.refs()}


def test_when_everybody_failed_that_is_an_error(repo: Repository) -> None:
    def never(job: Job) -> None:
        raise ValueError("out of luck")

    with pytest.raises(Unavailable, match=r"round 1; r1/m1: ValueError: out of luck"):
        evolve(repo, train=never, retries=0)


def test_a_metric_that_nobody_reported_is_an_error(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="did not report 'loss': it reported score"):
        population(repo, "main", train, study="x", search=SEARCH, metric="loss", members=2, executor=SerialExecutor(), progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 0}, "count from 1"),
        ({"rounds": 0}, "count from 1"),
        ({"exploit": 0.6}, "from 0 to 0.5"),
        ({"mode": "least"}, "'min' or 'max'"),
        ({"initial": [{}] * 7}, "7 initial configurations for 6 members"),
    ],
)
def test_what_means_nothing_is_refused(repo: Repository, options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        evolve(repo, **options)


def test_initial_configurations_and_a_rule_of_ones_own_are_used(repo: Repository) -> None:
    def to_fixed(config: Any, search: Any, source: random.Random) -> dict[str, Any]:
        return {"lr": 0.02}

    found = evolve(repo, rounds=2, initial=[{"lr": 0.05}, {"lr": 0.002}], perturb=to_fixed)
    assert [each.config["lr"] for each in found][:2] == [0.05, 0.002]
    assert {each.config["lr"] for each in found if each.is_copy} == {0.02}


def test_a_seed_in_the_configuration_is_everybodys(repo: Repository) -> None:
    found = evolve(repo, rounds=2, config={"seed": 5})
    assert {each.config["seed"] for each in found} == {5}


def test_a_single_member_trains_alone(repo: Repository) -> None:
    found = evolve(repo, members=1, rounds=3)
    assert [each.parent for each in found] == [None, "r1/m1", "r2/m1"]


def test_the_picture_shows_who_came_from_whom(repo: Repository) -> None:
    found = evolve(repo, members=3, rounds=2)
    lines = found.picture().plain.splitlines()
    (copy,) = [each for each in found if each.is_copy]
    nodes = [line for line in lines if "*" in line]
    assert len(nodes) == 7
    assert any(f"{copy.variant}  score=" in line and f"copy of {copy.parent}" in line for line in nodes)
    assert sum(line.endswith("best") for line in nodes) == 1
    assert "start" in nodes[-1]
    assert any("╯" in line for line in lines)
    donor = next(each for each in found if each.variant == copy.parent)
    cells = [cell for column in found.table().columns for cell in column._cells]
    assert f"{copy.value:.4g} < {donor.number}" in cells


def test_values_move_a_little_or_are_drawn_anew_and_stay_within_bounds() -> None:
    search: dict[str, Distribution] = {"lr": LogUniform(1e-4, 1e-1), "drop": Uniform(0.0, 0.5), "width": Choice((8, 16, 32))}
    config = {"lr": 1e-2, "drop": 0.2, "width": 16}
    found = [perturbed(config, search, random.Random(number)) for number in range(400)]
    moved: dict[str, set[object]] = {"lr": {8e-3, 1.25e-2}, "drop": {0.2 - 0.05, 0.2 + 0.05}, "width": {8, 32}}
    for key, values in moved.items():
        near = sum(each[key] in values for each in found)
        assert 260 < near < 400, key
    for end in ({"lr": 1e-1, "drop": 0.5, "width": 32}, {"lr": 1e-4, "drop": 0.0, "width": 8}):
        for number in range(50):
            lr, drop, width = perturbed(end, search, random.Random(number)).values()
            assert isinstance(lr, float)
            assert isinstance(drop, float)
            assert 1e-4 <= lr <= 1e-1
            assert 0 <= drop <= 0.5
            assert width in (8, 16, 32)
    assert perturbed({"lr": None}, {"lr": SEARCH["lr"]}, random.Random(1))["lr"] is not None


@pytest.mark.slow
def test_digits_in_processes_come_to_the_same_as_one_after_the_other(tmp_path: Path) -> None:
    found = []
    for name, executor in (("one", SerialExecutor()), ("many", None)):
        with prefix(tmp_path / name) as repo:
            options: Any = {"study": "pbt", "search": SEARCH, "metric": "loss", "members": 3, "rounds": 2, "progress": False}
            found.append(population(repo, "main", train_digits, executor=executor, **options))
    assert [line[:4] for line in summary(found[0])] == [line[:4] for line in summary(found[1])]
    assert sum(each.is_copy for each in found[0]) == 1


# --- what an optimizer owns ------------------------------------------------------------------------------------------------


def reconfigured(repo: Repository, *, is_used: bool, config: dict[str, Any], scheduled: bool = False) -> dict[str, Any]:
    """The options of an optimizer in a variant of a parent that was trained with 0.01."""
    seen: dict[str, Any] = {}

    def with_optimizer(job: Job) -> None:
        model = nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 1e-3, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled else None
        job.track(model=model, optimizer=optimizer, **({"scheduler": scheduler} if scheduler else {}))
        seen["set"] = reconfigure(job, optimizer, scheduler) if is_used else None
        for _ in job.epochs():
            seen["groups"] = [dict(group) for group in optimizer.param_groups]
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            seen["after"] = [group["lr"] for group in optimizer.param_groups]
            job.report(loss=1.0)

    plan = Plan((Variant("parent"), Variant("child", "parent", 1, config)))
    with datastates.open(repo.location.packs.parent / "own", config=CONFIG) as other:
        with other.track(nothing=0) as run:
            run.capture()
        assert explore(other, "main", plan, _loosely(with_optimizer), SerialExecutor(), study="s", progress=False)
    return seen


def _loosely(train: Any) -> Any:
    """The first variant forks from a state that has nothing of it."""

    def loose(job: Job) -> None:
        track = job.track
        job.track = lambda **objects: track(strict=False, **objects)  # type: ignore[method-assign]  # for this job alone
        train(job)

    return loose


def test_a_restored_optimizer_keeps_the_rate_of_the_parent(repo: Repository) -> None:
    seen = reconfigured(repo, is_used=False, config={"lr": 0.05})
    assert [group["lr"] for group in seen["groups"]] == [1e-2, 1e-3]


def test_reconfigure_sets_what_the_variant_changes_and_scales_all_rates(repo: Repository) -> None:
    seen = reconfigured(repo, is_used=True, config={"lr": 0.05, "weight_decay": 0.3, "depth": 3})
    assert seen["set"] == {"lr": 0.05, "weight_decay": 0.3}
    assert [group["lr"] for group in seen["groups"]] == pytest.approx([0.05, 0.005])
    assert seen["groups"][0]["lr"] == 0.05
    assert [group["weight_decay"] for group in seen["groups"]] == [0.3, 0.0], "biases stay without"


def test_reconfigure_goes_on_along_the_same_schedule(repo: Repository) -> None:
    seen = reconfigured(repo, is_used=True, config={"lr": 0.05}, scheduled=True)
    assert [group["lr"] for group in seen["groups"]] == pytest.approx([0.025, 0.0025]), "after one halving"
    assert seen["after"] == pytest.approx([0.0125, 0.00125])


class New:
    """All that ``reconfigure`` asks of a job."""

    is_new = True
    variant = Variant("child", "parent", 1, {"lr": 0.05})


def test_reconfigure_sets_the_rates_from_which_a_plateau_goes_on() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    assert reconfigure(New(), optimizer, scheduler) == {"lr": 0.05}  # type: ignore[arg-type]  # all that it asks of a job
    for _ in range(3):
        scheduler.step(1.0)
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [0.0125]


def test_reconfigure_reaches_the_schedulers_that_a_scheduler_is_made_of() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    parts = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch, share=share: share) for share in (1.0, 0.25)]  # type: ignore[misc]  # of no type
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [*parts], milestones=[1])
    reconfigure(New(), optimizer, scheduler)  # type: ignore[arg-type]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125


def test_reconfigure_begins_the_schedule_of_an_optimizer_whose_parent_had_none() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    optimizer.load_state_dict(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).state_dict())
    reconfigure(New(), optimizer, scheduler)  # type: ignore[arg-type]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_reconfigure_leaves_alone_what_was_resumed(repo: Repository) -> None:
    class Resumed:
        is_new = False

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert reconfigure(Resumed(), optimizer) == {}  # type: ignore[arg-type]  # all that it asks of a job
