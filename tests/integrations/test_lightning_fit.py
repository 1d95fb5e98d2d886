"""What a fit by Lightning takes up again: the rest of an epoch, a stop, averages of weights,
accumulation."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as L
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from datastates import Repository
from datastates.integrations.lightning import DatastatesCallback, DatastatesCheckpointIO
from datastates.integrations.lightning.callback import Fit
from tests.integrations.lightning_jobs import BATCHES, Automatic, Items, trainer_of

pytestmark = [
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}")
        for kind in ("UserWarning", "FutureWarning", "DeprecationWarning")
    ),
    pytest.mark.long,
]

VALIDATED = DataLoader(Items(), batch_size=13)


class Stopping(L.Callback):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """Asks the Trainer to stop after a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.at


class Failing(L.Callback):  # type: ignore[misc]  # likewise
    """Fails once a number of steps are done."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.at:
            raise ZeroDivisionError


class Clock(Timer):  # type: ignore[misc]  # likewise
    """A Timer by which two hours have passed after four steps."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            self._offset = 7200


def fit(
    repo: Repository | None,
    tmp_path: Path,
    *more: Any,
    seed: int = 3,
    validation: Any = None,
    **settings: Any,
) -> tuple[list[str], Automatic]:
    """What a training says, and what it trained; ``branch`` and ``start`` are the callback's."""
    said: list[str] = []
    options = {name: settings.pop(name) for name in ("branch", "start") if name in settings}
    torch.manual_seed(seed)
    ours = [] if repo is None else [DatastatesCallback(repo, **options)]
    model = Automatic(lambda *words: said.append(" ".join(map(str, words))))
    with suppress(ZeroDivisionError):
        trainer_of("plain", tmp_path, [*more, *ours], settings).fit(
            model, DataLoader(Items(), batch_size=4, shuffle=True), validation
        )
    return said, model


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules have the same tensors."""
    found = one.state_dict(), other.state_dict()
    return found[0].keys() == found[1].keys() and all(
        torch.equal(found[0][name], found[1][name]) for name in found[0]
    )


@pytest.mark.parametrize("at", [3, BATCHES + 2])
def test_an_epoch_within_which_a_training_was_stopped_goes_on_with_its_rest(
    repo: Repository, tmp_path: Path, at: int
) -> None:
    whole, _ = fit(None, tmp_path)
    first, _ = fit(repo, tmp_path, Stopping(at))
    rest, _ = fit(repo, tmp_path, seed=99)
    assert len(first) == at
    assert first + rest == whole


def test_a_training_that_early_stopping_ended_stays_ended(
    repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stopping() -> Any:
        return EarlyStopping("val_loss", patience=1, min_delta=10.0)

    fit(repo, tmp_path, stopping(), max_epochs=9, validation=VALIDATED)
    assert repo.state("main").step == 2 * BATCHES
    caplog.set_level(logging.INFO, "datastates")
    assert fit(repo, tmp_path, stopping(), max_epochs=9, validation=VALIDATED)[0] == []
    assert "branch main: EarlyStopping has stopped this training" in caplog.text
    assert fit(repo, tmp_path, max_epochs=3)[0] != [], "without it the training goes on"


def test_a_training_that_ran_out_of_time_goes_on_once_it_has_more(
    repo: Repository, tmp_path: Path
) -> None:
    whole, _ = fit(None, tmp_path)
    first, _ = fit(repo, tmp_path, Clock({"hours": 1}))
    assert len(first) == 4
    assert fit(repo, tmp_path, Clock({"hours": 1}), seed=99)[0] == []
    assert first + fit(repo, tmp_path, Clock({"hours": 3}), seed=99)[0] == whole


def test_an_average_of_the_weights_goes_on_where_it_stood(repo: Repository, tmp_path: Path) -> None:
    whole, averaged = fit(
        repo, tmp_path, EMAWeightAveraging(decay=0.9), branch="whole", validation=VALIDATED
    )
    fit(repo, tmp_path, EMAWeightAveraging(decay=0.9), Failing(BATCHES + 3), validation=VALIDATED)
    rest, again = fit(repo, tmp_path, EMAWeightAveraging(decay=0.9), seed=99, validation=VALIDATED)
    assert rest[-BATCHES:] == whole[-BATCHES:], "the losses of validations too"
    assert same(again, averaged)


@pytest.mark.parametrize("kind", ["moving", "stochastic"])
def test_more_epochs_begin_with_the_weights_that_were_trained_and_not_with_their_average(
    repo: Repository, tmp_path: Path, kind: str
) -> None:
    def averaging() -> Any:
        return (
            EMAWeightAveraging(decay=0.9)
            if kind == "moving"
            else _Plainly(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
        )

    whole, averaged = fit(None, tmp_path, averaging(), max_epochs=3)
    first, before = fit(repo, tmp_path, averaging(), max_epochs=2)
    nothing, kept = fit(repo, tmp_path, averaging(), seed=99, max_epochs=2)
    assert nothing == []
    assert same(kept, before), (
        "a training with nothing left to do leaves the average in the module, as Lightning does"
    )
    rest, after = fit(repo, tmp_path, averaging(), seed=99, max_epochs=3)
    assert first + rest == whole
    assert same(after, averaged)


class _Plainly(StochasticWeightAveraging):  # type: ignore[misc]  # likewise
    """Without the further epoch for the statistics of BatchNorm."""

    @staticmethod
    def pl_module_contains_batch_norm(pl_module: Any) -> bool:
        return False


def test_a_variant_accumulates_as_its_trainer_was_made_to(repo: Repository, tmp_path: Path) -> None:
    fit(repo, tmp_path, max_epochs=1, accumulate_grad_batches=3)
    assert repo.state("main").step == 3
    fit(repo, tmp_path, branch="variant", start="main", max_epochs=2)
    assert repo.state("variant").step == 3 + BATCHES


def test_a_schedule_of_accumulation_goes_on_within_an_epoch(
    repo: Repository, tmp_path: Path
) -> None:
    def schedule() -> Any:
        return GradientAccumulationScheduler({0: 1, 1: 2})

    whole, _ = fit(None, tmp_path, schedule())
    fit(repo, tmp_path, schedule(), Failing(BATCHES + 1))
    rest, _ = fit(repo, tmp_path, schedule(), seed=99)
    assert rest == whole[BATCHES + 2 :]


def test_random_numbers_of_a_validated_checkpoint_are_not_those_of_the_next_fit(
    repo: Repository, tmp_path: Path
) -> None:
    whole, _ = fit(None, tmp_path, max_epochs=2)
    said: list[str] = []
    torch.manual_seed(3)
    plugins = [LightningEnvironment(), DatastatesCheckpointIO(repo, branch="checkpoints")]
    trainer = trainer_of(
        "plain", tmp_path, [DatastatesCallback(repo)], {"max_epochs": 1, "plugins": plugins}
    )
    model = Automatic(lambda *words: said.append(" ".join(map(str, words))))
    trainer.fit(model, DataLoader(Items(), batch_size=4, shuffle=True))
    trainer.validate(model, VALIDATED, ckpt_path="datastates:main@step:3", verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, DataLoader(Items(), batch_size=4, shuffle=True))
    assert [line for line in said if not line.startswith("validated")] == whole


def test_states_of_earlier_versions_are_taken_up(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = fit(None, tmp_path, accumulate_grad_batches=2)
    taken = Fit.state_dict

    def earlier(self: Fit) -> dict[str, object]:
        later = ("made_to_accumulate", "since", "gives_buffers", "weights")
        return {name: value for name, value in taken(self).items() if name not in later}

    with monkeypatch.context() as patch:
        patch.setattr(Fit, "state_dict", earlier)
        fit(repo, tmp_path, Failing(5), accumulate_grad_batches=2)
    rest, _ = fit(repo, tmp_path, seed=99, accumulate_grad_batches=2)
    assert rest == whole[BATCHES + 2 :]
