"""The train and eval modes of modules are part of a state: a training that resumes has them, a
fork does what its script sets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Repository


def made() -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 3),
        nn.BatchNorm1d(3),
        nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)),
        nn.Linear(3, 1),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    repo: Repository, until: int, *, freezes_at: int = 3, is_wrapped: bool = False, **options: Any
) -> list[float]:
    """Go on, or begin, on a branch; one batch norm freezes on the way.

    Returns the losses from there."""
    model, optimizer = made()
    losses = []
    tracked = nn.DataParallel(model) if is_wrapped else model
    with repo.track(model=tracked, optimizer=optimizer, **options) as run:
        for number in range(run.step, until):
            if number == freezes_at:
                model[1].eval()
                model[2].eval()
            optimizer.zero_grad()
            loss = model(torch.randn(8, 2)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.capture()
    return losses


@pytest.mark.parametrize("stop", [2, 3, 4, 6])
def test_a_stopped_training_resumes_with_the_modes_that_it_had(tmp_path: Path, stop: int) -> None:
    with datastates.open(tmp_path / "whole") as repo:
        expected = train(repo, 8)
    with datastates.open(tmp_path / "stopped") as repo:
        assert train(repo, stop) + train(repo, 8, is_wrapped=True) == expected


def test_a_module_that_the_script_begins_in_eval_mode_is_in_train_mode_again(
    tmp_path: Path,
) -> None:
    with datastates.open(tmp_path) as repo:
        model, optimizer = made()
        model[1].eval()
        with repo.track(model=model, optimizer=optimizer) as run:
            run.capture()
            model[1].train()
            run.capture()
        model, optimizer = made()
        model[1].eval()
        with repo.track(model=model, optimizer=optimizer):
            assert model[1].training


def test_a_fork_keeps_the_modes_of_its_script_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "datastates")
    with datastates.open(tmp_path) as repo:
        train(repo, 5)
        model, optimizer = made()
        with repo.track(branch="fork", start="main", model=model, optimizer=optimizer) as run:
            assert all(part.training for part in model.modules())
            assert run.report is not None
            assert run.report.in_eval == ("model/1", "model/2", "model/2.0", "model/2.1")
    line = (
        "branch fork: 4 modules (model/1, model/2, …) are in eval mode where it begins, and in"
        " training mode here"
    )
    assert caplog.text.count(line) == 1


@pytest.mark.parametrize("is_frozen", [False, True])
def test_only_an_evaluation_puts_all_of_a_trained_model_into_eval_mode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_frozen: bool
) -> None:
    """A model without a parameter that is trained, such as a teacher, is put back."""
    caplog.set_level(logging.INFO, "datastates")
    with datastates.open(tmp_path) as repo:
        model, _ = made()
        model.requires_grad_(not is_frozen)
        with repo.track(model=model) as run:
            model.eval()
            run.capture()
        assert repo.load("main")["module_modes"].split() == [
            "model",
            *(f"model/{name}" for name, _ in model.named_modules() if name),
        ]
        model, _ = made()
        model.requires_grad_(not is_frozen)
        with repo.track(model=model):
            assert model.training is not is_frozen
        assert (
            "in eval mode where it goes on, and in training mode here; the mode stays"
            in caplog.text
        ) is not is_frozen
        assert ("in eval mode again" in caplog.text) is is_frozen


def test_a_second_phase_of_a_script_keeps_the_modes_that_it_set(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        model, optimizer = made()
        with repo.track(model=model, optimizer=optimizer) as run:
            run.capture()
        model[1].eval()
        with repo.track(model=model, optimizer=optimizer):
            assert not model[1].training


def test_going_back_restores_modes_unless_an_evaluation_is_going_on(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        model, optimizer = made()
        with repo.track(model=model, optimizer=optimizer) as run:
            model[1].eval()
            frozen = run.capture().wait()
            model[1].train()
            train_state = run.capture().wait()
            run.restore(frozen.uid)
            assert not model[1].training
            run.restore(train_state.uid)
            assert model[1].training
            model.eval()
            run.restore(train_state.uid)
            assert not any(part.training for part in model.modules())


def test_a_part_of_a_model_is_restored_without_modes(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        train(repo, 5)
        model, _ = made()
        assert repo.restore("main", model=model, only="model/1.*").in_eval == ()
        assert repo.restore("main", model=model).in_eval
        assert model[1].training


def test_a_training_whose_modules_are_all_in_training_mode_stores_no_modes(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        train(repo, 2)
        assert repo.load("main").keys() == {"model", "optimizer", "rng"}
