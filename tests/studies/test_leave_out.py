"""Leave-out trees on real data: nothing leaks, and the lineage itself tells what the tree saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fashion import load
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import datastates
from datastates import Config, Repository
from datastates.errors import InvalidInput, NotFound
from datastates.studies import (
    Job,
    Plan,
    SerialExecutor,
    Variant,
    cut,
    ensemble,
    epochs_at,
    explore,
    leave_out,
    prefix_epochs,
    work,
    work_done,
)
from datastates.studies.results import Work

COUNT = 240
SCHEDULES = ("flat", "linear", "log", "sqrt")
given_to: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
"""What the train function was really given, by variant."""
seen: list[int] = []
"""How many samples each epoch had that was really trained."""


# --- no sample leaks ------------------------------------------------------------------------------


def test_no_real_picture_that_validates_a_variant_trained_an_ancestor_of_it() -> None:
    images, labels, _ = load(1600)
    plan = leave_out(cut(len(images), 27, seed=4), depth=3, fan_out=3, epochs=2)
    pictures = {row: images[row].numpy().tobytes() for row in range(len(images))}
    assert len(plan) == 39
    for variant in plan.variants:
        validation = plan.rows(variant.validation)
        trained = {row for step in plan.path(variant.name) for row in plan.rows(step.train or ())}
        assert trained.isdisjoint(validation)
        assert {pictures[row] for row in trained}.isdisjoint(pictures[row] for row in validation), (
            "nor a copy of one under another index"
        )
        assert trained.union(validation) == set(range(len(images)))
        assert len(labels[torch.tensor(validation)].unique()) >= 8, "a mixture, not a class"


# --- what it saves --------------------------------------------------------------------------------


def formula(
    schedule: str, depth: int, fan_out: int, epochs: int, prefix: int
) -> tuple[float, float]:
    """W_D and W_N of a tree whose parts are of one size."""
    # one of them
    at = [epochs_at(schedule, epochs, stage, depth) for stage in range(1, depth + 1)]  # type: ignore[arg-type]
    tree = prefix + sum((fan_out**stage - 1) * at[stage - 1] for stage in range(1, depth + 1))
    scratch = sum(
        (fan_out**stage - 1) * (prefix + sum(at[:stage])) for stage in range(1, depth + 1)
    )
    return tree, scratch


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(1, 20),
    st.integers(0, 9),
)
def test_work_of_a_plan_is_the_closed_formula(
    schedule: str, depth: int, fan_out: int, epochs: int, prefix: int
) -> None:
    plan = leave_out(
        cut(fan_out**depth, fan_out**depth),
        depth=depth,
        fan_out=fan_out,
        epochs=epochs,
        schedule=schedule,  # type: ignore[arg-type]
    )
    found = work(plan, prefix_epochs=prefix)
    assert (found.tree_epochs, found.scratch_epochs) == formula(
        schedule, depth, fan_out, epochs, prefix
    )


def test_formula_is_that_of_a_tree_counted_by_hand() -> None:
    # Stage 1: 2 variants of 6 epochs on 1/2; stage 2: 4 of 3 on 3/4. From scratch: 2 of 11 on 1/2,
    # 4 of 14 on 3/4.
    assert formula("log", 2, 2, 6, 5) == (5 + 6 + 9, 11 + 42)
    found = work(leave_out(cut(4, 4), depth=2, epochs=6, schedule="log"), prefix_epochs=5)
    assert found == Work(20.0, 53.0, 5.0)
    assert found.saving == 53 / 20


def alone(plan: Plan, epochs: int, spent: float) -> float:
    """W_N / W_D as in the paper on high-bypass learning: each leaf alone, next to ``spent``. Epochs
    count alike, whatever data they have."""
    return len([one for one in plan.variants if not plan.children(one.name)]) * epochs / spent


@pytest.mark.parametrize(
    ("schedule", "published", "saving"),
    [
        ("flat", 0.75, 4.68),
        ("sqrt", 1.62, 6.65),
        ("linear", 2.83, 11.03),
        ("log", 8.57, 21.88),
    ],
)
def test_tree_of_the_published_size_has_the_published_ratios(
    schedule: Any, published: float, saving: float
) -> None:
    plan = leave_out(cut(4**5, 4**5), depth=5, fan_out=4, epochs=50, schedule=schedule)
    assert len(plan) == 4 + 16 + 64 + 256 + 1024
    assert round(alone(plan, 50, sum(one.epochs for one in plan.variants)), 2) == published
    assert round(work(plan).saving, 2) == saving, "the table in docs/guide/studies.md"


def test_variants_that_share_nothing_save_nothing() -> None:
    assert work(ensemble(4, epochs=3)) == Work(12.0, 12.0)
    assert work(ensemble(4, epochs=3), prefix_epochs=9).saving == (4 * 12) / (9 + 12)


@pytest.mark.parametrize("epochs", [-1.0, float("nan"), float("inf")])
def test_prefix_that_is_no_number_of_epochs_is_refused(epochs: float) -> None:
    with pytest.raises(InvalidInput, match="prefix_epochs is"):
        work(ensemble(2, 1), prefix_epochs=epochs)


# --- as the lineage has it ------------------------------------------------------------------------


def build(pixels: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def one_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train(job: Job) -> None:
    """Notes what it was given; captures something of its own between reports."""
    given_to[job.variant.name] = (job.train, job.validation)
    images, labels, _ = load(COUNT)
    model, optimizer = build(images[0].numel())
    run = job.track(model=model, optimizer=optimizer)
    known, unseen = (
        torch.tensor(job.train or range(COUNT)),
        torch.tensor(job.validation or range(COUNT)),
    )
    for _ in job.epochs():
        seen.append(len(known))
        loss = one_epoch(model, optimizer, images[known], labels[known])
        run.capture(metrics={"loss": loss})
        with torch.no_grad():
            job.report(val_loss=F.cross_entropy(model(images[unseen]), labels[unseen]).item())


def begin(folder: Path, epochs: int) -> Repository:
    """A repository whose ``main`` was trained on all the data, left open."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels, _ = load(COUNT)
    model, optimizer = build(images[0].numel())
    repo = datastates.open(folder, config=Config(memory_bytes=64 << 20, durable_interval_s=None))
    with repo.track(model=model, optimizer=optimizer) as run:
        for epoch in range(1, epochs + 1):
            one_epoch(model, optimizer, images, labels)
            run.capture(attributes={"epoch": epoch})
        run.capture(message="and one that says nothing")
    return repo


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["flat", "log"])
def test_work_in_the_lineage_is_the_formula(tmp_path: Path, schedule: str) -> None:
    # one of them
    plan = leave_out(cut(COUNT, 8), depth=3, epochs=4, schedule=schedule)  # type: ignore[arg-type]
    given_to.clear()
    seen.clear()
    with begin(tmp_path, epochs=3) as repo:
        assert prefix_epochs(repo, "main") == 3
        report = explore(repo, "main", plan, train, SerialExecutor(), study="tree", progress=False)
        assert report
        assert report.work == work(plan)
    with datastates.open(tmp_path) as repo:
        done = work_done(repo, "tree")
        for variant in plan.variants:
            above = {
                state.attributes["variant"]
                for state in repo.log(f"done/tree/{variant.name}")
                if state.attributes.get("study") == "tree"
            }
            assert above == {step.name for step in plan.path(variant.name)}
            for name in above:
                assert set(given_to[variant.name][1]).isdisjoint(given_to[str(name)][0]), (
                    "what workers were given leaks as little"
                )
    assert (done.tree_epochs, done.scratch_epochs) == formula(schedule, 3, 2, 4, 3)
    assert done == work(plan, prefix_epochs=3)
    planned = alone(plan, 4, sum(one.epochs for one in plan.variants))
    assert alone(plan, 4, len(seen)) == pytest.approx(planned, rel=0.02), "what was really trained"
    assert sum(seen) / COUNT == pytest.approx(done.tree_epochs - 3, rel=0.02)


def failing(job: Job) -> None:
    """Variants ``1.2`` and ``2`` end after an epoch."""
    images, labels, _ = load(COUNT)
    model, optimizer = build(images[0].numel())
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs():
        if job.variant.name in ("1.2", "2") and epoch == 1:
            raise ValueError("enough")
        one_epoch(model, optimizer, images, labels)
        job.report(val_loss=0.0)


def test_study_that_is_not_over_has_the_work_done_so_far(tmp_path: Path) -> None:
    plan = leave_out(cut(COUNT, 4), depth=2, epochs=3)
    with begin(tmp_path, epochs=2) as repo:
        assert not explore(
            repo, "main", plan, failing, SerialExecutor(), study="tree", retries=0, progress=False
        )
        repo.branch("tree/2.1", "main")  # forked, and nothing reported yet
        begun = Work(2 + 3 / 2 + 4 * 3 / 4 + 1 / 2, 5 / 2 + (8 + 6) * 3 / 4 + 3 / 2, 2.0)
        assert work_done(repo, "tree") == begun, (
            "1 and 1.1 as planned, one epoch of 1.2 and of 2, nothing below 2"
        )

        # as when its worker died and what it reported is lost
        repo.move("tree/1.2", "done/tree/1", expected="tree/1.2")
        assert work_done(repo, "tree") == Work(
            begun.tree_epochs - 3 / 4, begun.scratch_epochs - 6 * 3 / 4, 2.0
        )


def test_study_from_another_study_counts_its_path_as_the_prefix(tmp_path: Path) -> None:
    with begin(tmp_path, epochs=2) as repo:
        explore(
            repo,
            "main",
            leave_out(cut(COUNT, 4), depth=2, epochs=4),
            train,
            SerialExecutor(),
            study="tree",
            progress=False,
        )
        assert prefix_epochs(repo, "done/tree/1.2") == 2 + 4 / 2 + 4 * 3 / 4
        explore(
            repo,
            "done/tree/1.2",
            Plan((Variant("a", epochs=3),)),
            train,
            SerialExecutor(),
            study="tree/next",
            progress=False,
        )
        assert work_done(repo, "tree/next") == Work(10.0, 10.0, 7.0)
        assert work_done(repo, "tree") == work(
            leave_out(cut(COUNT, 4), depth=2, epochs=4), prefix_epochs=2
        )


def test_there_is_no_work_of_a_study_that_is_not_there(tmp_path: Path) -> None:
    with begin(tmp_path, epochs=1) as repo, pytest.raises(NotFound, match="start/tree"):
        work_done(repo, "tree")
