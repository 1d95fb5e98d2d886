"""Outliers from a real lineage: what is read, what it says, what it cost, what is left out."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import datastates
from datastates import Repository
from datastates.errors import InvalidInput, NotFound, Unavailable
from datastates.studies import (
    Job,
    OutlierReport,
    Plan,
    SerialExecutor,
    Variant,
    explore,
    kfold,
    outliers,
)
from datastates.studies.outlier_data import Floats, LossOf
from datastates.studies.outlier_suspects import percentiles

from . import planted
from .planted import COUNT, EPOCHS, FLIPPED, LATER, WARM, build, digits, loss, make, plan, thirds


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """Its own process's memory holds nothing: every state is read from disk."""
    folder = tmp_path_factory.mktemp("planted")
    make(folder)
    with datastates.open(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def both(repo: Repository) -> OutlierReport:
    """Both seeds along their lineage, and the study."""
    return outliers(
        repo,
        ["seed-0", "seed-1"],
        study="study",
        plan=plan(),
        model=build(),
        loss=loss,
        count=COUNT,
    )


def found_among_all(scores: Floats) -> float:
    """The area under the ROC curve: 1 says that every planted label stands before every other."""
    return float(roc_auc_score(digits().is_flipped, scores))


def brute_force(repo: Repository, revs: list[str]) -> Floats:
    """The loss of every sample under each of some states, one sample at a time.

    ``[states, samples]``."""
    rows = []
    for rev in revs:
        model = build()
        repo.restore(rev, model=model, only="model")
        model.eval()
        with torch.no_grad():
            rows.append([float(loss(model, torch.tensor([at]))) for at in range(COUNT)])
    return np.array(rows)


def test_planted_labels_rank_first_by_either_score_and_by_both(both: OutlierReport) -> None:
    assert found_among_all(both.scores.lineage) > 0.97
    assert found_among_all(both.scores.held_out) > 0.95
    assert found_among_all(both.scores.score) > 0.97
    assert sum(digits().is_flipped[sample.index] for sample in both.top(FLIPPED // 2)) >= 0.95 * (
        FLIPPED // 2
    )


def test_lineage_score_is_the_mean_loss_along_the_states_that_were_picked(repo: Repository) -> None:
    report = outliers(
        repo, ["seed-0", "seed-1"], model=build(), loss=loss, count=COUNT, states=3, batch=100
    )

    picked = [state.uid for source in report.sources for state in source.states]
    assert [[state.step for state in source.states] for source in report.sources] == [
        [2, 4, 6],
        [2, 4, 6],
    ]
    np.testing.assert_allclose(
        report.scores.lineage, brute_force(repo, picked).mean(axis=0), rtol=1e-4, atol=1e-6
    )
    assert np.isnan(report.scores.held_out).all()
    np.testing.assert_allclose(report.scores.score, percentiles(report.scores.lineage))


def test_held_out_score_is_the_mean_loss_under_the_variants_that_never_trained_on_the_sample(
    repo: Repository, both: OutlierReport
) -> None:
    total, times = np.zeros(COUNT), np.zeros(COUNT)
    held = {
        f"done/study/without-{part}~{back}": rows
        for part, rows in thirds().items()
        for back in range(LATER)
    }
    held["done/study/child"] = thirds()["c"][100:]
    for rev, rows in held.items():
        total[list(rows)] += brute_force(repo, [rev])[0, list(rows)]
        times[list(rows)] += 1

    assert sorted(set(times)) == [
        LATER,
        LATER + 1,
    ], "the child goes on holding out what it did not get back"
    np.testing.assert_allclose(both.scores.held_out, total / times, rtol=1e-4, atol=1e-6)


def test_what_branches_share_is_read_once(repo: Repository, both: OutlierReport) -> None:
    uids = [state.uid for source in both.sources for state in source.states]

    assert len(uids) == len(set(uids)) == 2 * EPOCHS + 3 * LATER + 1
    assert [source.name for source in both.sources][:3] == ["seed-0", "seed-1", "study/without-a"]
    start = outliers(repo, study="study", plan=plan(), model=build(), loss=loss, count=COUNT)
    assert start.sources[0].name == "start/study"
    assert [state.step for state in start.sources[0].states] == list(range(1, WARM + 1))


def test_cost_counts_each_training_once_and_a_forward_pass_as_a_third(both: OutlierReport) -> None:
    sizes = {name: len(rows) for name, rows in thirds().items()}
    forks = sum(LATER * (COUNT - size) / COUNT for size in sizes.values()) + 100 / COUNT
    passes = 2 * EPOCHS + LATER + (sizes["c"] - 100) / COUNT

    assert both.cost.training == pytest.approx(2 * EPOCHS + forks)
    assert both.cost.passes == pytest.approx(passes)
    assert both.cost.total == pytest.approx(2 * EPOCHS + forks + passes / 3)
    assert "1/3 epoch" in str(both.cost)


def test_spread_is_how_far_the_seeds_disagree(repo: Repository) -> None:
    two = outliers(repo, ["seed-0", "seed-1"], model=build(), loss=loss, count=COUNT)
    each = [
        percentiles(
            outliers(repo, f"seed-{seed}", model=build(), loss=loss, count=COUNT).scores.lineage
        )
        for seed in (0, 1)
    ]

    np.testing.assert_allclose(two.scores.spread, np.std(each, axis=0, ddof=1), atol=1e-6)
    assert set(two.scores.sources) == {2}
    one = outliers(repo, "seed-0", model=build(), loss=loss, count=COUNT)
    assert np.isnan(one.scores.spread).all()
    assert one.top(1)[0].spread is None


def test_as_many_are_suspects_as_the_noise_rate_says(repo: Repository, both: OutlierReport) -> None:
    given = outliers(repo, "seed-0", model=build(), loss=loss, count=COUNT, noise_rate=0.02)

    assert [sample.rank for sample in given.suspects()] == list(range(1, 19))
    assert not given.selection.is_estimated
    assert both.selection.is_estimated
    assert 0.06 < both.selection.noise_rate < 0.14, "a tenth of the labels is wrong"
    caught = sum(digits().is_flipped[sample.index] for sample in both.suspects())
    assert caught / len(both.suspects()) > 0.8
    assert caught / FLIPPED > 0.8


def test_subsets_are_scored_and_the_one_with_the_wrong_labels_comes_first(repo: Repository) -> None:
    subsets = {
        "right": np.flatnonzero(~digits().is_flipped).tolist(),
        "wrong": np.flatnonzero(digits().is_flipped).tolist(),
    }
    report = outliers(
        repo, "seed-0", model=build(), loss=loss, count=COUNT, subsets=subsets, noise_rate=0.1
    )

    assert [subset.name for subset in report.subsets] == ["wrong", "right"]
    wrong = report.subsets[0]
    scores = report.scores.score[digits().is_flipped]
    assert wrong.samples == FLIPPED
    assert wrong.score == pytest.approx(scores.mean())
    assert wrong.error == pytest.approx(scores.std(ddof=1) / np.sqrt(FLIPPED))
    assert wrong.suspects == report.selection.suspects[digits().is_flipped].sum()


def test_subsets_of_the_plan_are_scored_by_themselves(both: OutlierReport) -> None:
    assert {subset.name: subset.samples for subset in both.subsets} == {
        name: len(rows) for name, rows in plan().subsets.items()
    }


def test_model_keeps_its_modes_and_is_asked_in_evaluation_mode_without_gradients(
    repo: Repository,
) -> None:
    model, modes = build(), []
    model[0].eval()  # type: ignore[index] # a Sequential

    def watched(model: nn.Module, indices: Tensor) -> Tensor:
        modes.append(
            (
                any(module.training for module in model.modules()),
                torch.is_grad_enabled(),
                len(indices),
            )
        )
        return loss(model, indices)

    outliers(repo, "seed-0", model=model, loss=watched, count=COUNT, states=1, batch=400)
    assert modes == [(False, False, 400), (False, False, 400), (False, False, 100)]
    assert [module.training for module in model.modules()] == [True, False, True, True, True]


def test_progress_is_told_of_every_state(repo: Repository) -> None:
    told: list[tuple[int, int]] = []
    outliers(
        repo,
        ["seed-0", "seed-1"],
        model=build(),
        loss=loss,
        count=COUNT,
        states=2,
        on_progress=lambda *at: told.append(at),
    )

    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_variant_that_is_not_finished_is_left_out_and_said(repo: Repository) -> None:
    more = Plan((*plan().variants, Variant("never", train=("a",))), plan().subsets)
    report = outliers(
        repo, study="study", plan=more, model=build(), loss=loss, count=COUNT, states=1
    )

    assert [(skipped.branch, skipped.reason) for skipped in report.skipped] == [
        ("study/never", "never begun")
    ]
    assert "study/never: never begun" in shown(report)


def test_study_without_its_plan_is_read_as_branches(repo: Repository) -> None:
    report = outliers(repo, study="study", model=build(), loss=loss, count=COUNT, states=1)

    assert {source.name for source in report.sources} == {
        "start/study",
        *(f"study/{variant.name}" for variant in plan().variants),
    }
    assert all(source.held_out is None for source in report.sources)


def test_state_that_cannot_be_restored_is_left_out_and_said(tmp_path: Path) -> None:
    make(tmp_path)
    with datastates.open(tmp_path) as repo:
        gone = repo.state("seed-0~2")
        pack = next((tmp_path / "packs").glob(f"{gone.uid}*.safetensors"))
        data = bytearray(pack.read_bytes())
        data[4096:] = bytes(len(data) - 4096)  # all that comes after the header
        pack.write_bytes(bytes(data))
        report = outliers(repo, "seed-0", model=build(), loss=loss, count=COUNT)

    assert [(skipped.branch, skipped.uid, skipped.step) for skipped in report.skipped] == [
        ("seed-0", gone.uid, gone.step)
    ]
    assert gone.uid not in {state.uid for state in report.sources[0].states}
    assert len(report.sources[0].states) == EPOCHS - 1
    assert f"skipped: seed-0, step {gone.step}" in shown(report)


def test_a_state_under_which_most_losses_are_not_finite_is_left_out_and_said(
    repo: Repository,
) -> None:
    calls: list[None] = []

    def broken(model: nn.Module, indices: Tensor) -> Tensor:
        calls.append(None)
        return loss(model, indices) * float("nan") if len(calls) == 1 else loss(model, indices)

    report = outliers(repo, "seed-0", model=build(), loss=broken, count=COUNT, states=3)
    assert [(skipped.step, skipped.reason) for skipped in report.skipped] == [
        (2, f"{COUNT} of its {COUNT} losses are not finite")
    ]
    assert report.top(1)[0].strength is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_whose_loss_is_not_finite_comes_first_and_the_others_are_ranked(
    repo: Repository, tmp_path: Path, value: float
) -> None:
    calls: list[None] = []

    def broken(model: nn.Module, indices: Tensor) -> Tensor:
        calls.append(None)
        found = loss(model, indices)
        return found.index_fill(0, torch.tensor([7]), value) if len(calls) == 1 else found

    report = outliers(repo, "seed-0", model=build(), loss=broken, count=COUNT, states=3)
    assert not report.skipped
    assert not np.isnan(report.scores.score).any()
    first = report.top(1)[0]
    assert (first.index, first.score, first.strength, first.lineage_loss) == (7, 100.0, None, None)
    assert report.top(2)[1].strength is not None
    assert (
        json.loads(report.to_json(tmp_path / "scores.json").read_text())["samples"][0][
            "lineage_loss"
        ]
        is None
    )
    assert report.to_html(tmp_path / "report.html").exists()
    assert "7" in shown(report)


def test_nothing_to_read_is_unavailable(repo: Repository) -> None:
    with pytest.raises(Unavailable, match="none of 2 states could be read: the state does not fit"):
        outliers(repo, "seed-0", model=nn.Linear(3, 3), loss=loss, count=COUNT, states=2)


def shown(report: OutlierReport) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text()


def test_arguments_that_do_not_fit_are_refused_with_what_would(repo: Repository) -> None:
    def asked(*branches: str, loss: LossOf = loss, **options: Any) -> None:
        outliers(repo, branches, model=build(), loss=loss, **{"count": COUNT, **options})

    with pytest.raises(InvalidInput, match="neither branches nor a study"):
        asked()
    with pytest.raises(NotFound, match="nowhere"):
        asked("nowhere")
    with pytest.raises(NotFound, match="no study 'nothing': there are study"):
        asked(study="nothing")
    with pytest.raises(InvalidInput, match="comes without its study"):
        asked("seed-0", plan=plan())
    with pytest.raises(InvalidInput, match="has sample 898, but count is 500"):
        asked(study="study", plan=plan(), count=500)
    with pytest.raises(InvalidInput, match="subset 'x' has sample 900"):
        asked("seed-0", subsets={"x": [1, 900]})
    with pytest.raises(InvalidInput, match=r"shape \(\) for 900 indices.*reduction='none'"):
        asked("seed-0", loss=lambda model, indices: loss(model, indices).mean())
    with pytest.raises(InvalidInput, match=r"noise_rate is 1.5"):
        asked("seed-0", noise_rate=1.5)
    for wrong in ({"states": 0}, {"batch": 0}, {"steps_per_epoch": 0}, {"count": 0}):
        options: dict[str, Any] = {**wrong}
        with pytest.raises(InvalidInput, match=f"{next(iter(wrong))} is 0:"):
            asked("seed-0", **options)


def test_what_explore_trained_is_read_by_its_plan(tmp_path: Path) -> None:
    folds = kfold(2, epochs=2, samples=COUNT)

    def train(job: Job) -> None:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        job.track(model=model, optimizer=optimizer)
        for _ in job.epochs():
            for batch in torch.tensor(job.train).split(32):
                optimizer.zero_grad()
                loss(model, batch).mean().backward()
                optimizer.step()
            job.report()

    with datastates.open(tmp_path, config=datastates.Config(durable_every=1)) as repo:
        planted.train(repo, "main", torch.arange(COUNT), 2)
        explore(repo, "main", folds, train, SerialExecutor(), study="folds", progress=False)
        report = outliers(repo, study="folds", plan=folds, model=build(), loss=loss, count=COUNT)

    assert [(source.name, len(source.states)) for source in report.sources][1:] == [
        (f"folds/{each.name}", 2) for each in folds.variants
    ]
    assert not report.skipped
    assert not np.isnan(report.scores.held_out).any()
    assert report.cost.training == pytest.approx(2 + 2), "the prefix, and two epochs of each half"
    assert found_among_all(report.scores.score) > 0.9
