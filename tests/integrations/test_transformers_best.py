"""The best model of a Trainer, and the metrics by which it is chosen: which states have them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import datastates
from datastates.integrations.transformers import DatastatesCallback

from .trainers import StopAt, Stream, Told, losses

JUDGED = {
    **{
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
    },
    **{"metric_for_best_model": "eval_loss", "greater_is_better": True},
}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[datastates.Repository]:
    with datastates.open(tmp_path / "runs") as opened:
        yield opened


# --- the best model -------------------------------------------------------------------------------


@pytest.mark.exact("transformers", "best")
@pytest.mark.parametrize("stop", [7, None, 16])
def test_the_best_model_comes_from_memory(
    stop: int | None, repo: datastates.Repository, make: Callable[..., Told], tmp_path: Path
) -> None:
    judged = {**JUDGED, "learning_rate": 0.3, "lr_scheduler_type": "constant"}
    whole = make(**judged)
    whole.train()
    assert 0 < whole.state.best_global_step < 22, "neither the first nor the last"
    assert (tmp_path / "out" / "checkpoint-22").exists()
    weights = {name: value.clone() for name, value in whole.model.state_dict().items()}

    out = {"output_dir": str(tmp_path / "none")}
    if stop is not None:
        losses(make(DatastatesCallback(repo, folders=False), StopAt(stop), **judged))
    callback = DatastatesCallback(repo, folders=False, every=5)
    made = make(callback, **judged)
    made.args.output_dir = out["output_dir"]
    losses(made)
    assert made.state.best_metric == whole.state.best_metric
    assert callback.best is not None
    assert callback.best.step == whole.state.best_global_step
    assert callback.best.metrics["eval_loss"] == whole.state.best_metric
    assert repo.state("best/main").uid == callback.best.uid
    assert all(torch.equal(value, weights[name]) for name, value in made.model.state_dict().items())
    assert not (tmp_path / "none").exists(), "no folder of a checkpoint"


def test_a_training_that_goes_on_from_the_best_state_loads_it_if_nothing_is_better(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    losses(make(DatastatesCallback(repo, folders=False), StopAt(3), **JUDGED, max_steps=5))
    best = repo.state("best/main")
    assert best.uid == repo.state("main").uid
    repo.delete_ref("best/main")
    for branch, start in (("main", None), ("fork", best)):
        callback = DatastatesCallback(repo, branch, start=start, folders=False)
        made = make(callback, **JUDGED, max_steps=5)
        assert len(losses(made)) == 2
        assert made.state.best_global_step == best.step == 3
        assert callback.best is not None
        assert callback.best.uid == repo.state(f"best/{branch}").uid == best.uid
        weights = repo.load(best, only="model")["model"]
        assert all(
            torch.equal(value, weights[name]) for name, value in made.model.state_dict().items()
        )


def test_a_folder_of_an_earlier_best_does_not_win_over_the_best_state(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    losses(make(DatastatesCallback(repo), StopAt(4), **JUDGED))
    callback = DatastatesCallback(repo, folders=False)
    made = make(callback, **{**JUDGED, "greater_is_better": False})
    losses(made)
    assert made.state.best_model_checkpoint is not None
    assert made.state.best_model_checkpoint.endswith("-3")
    assert made.state.best_global_step > 3
    assert callback.best is not None
    weights = repo.load(callback.best, only="model")["model"]
    assert all(torch.equal(value, weights[name]) for name, value in made.model.state_dict().items())


def test_the_best_of_a_stream_may_be_found_at_the_end_of_an_epoch(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    callback = DatastatesCallback(repo, folders=False)
    judged = {
        **JUDGED,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "greater_is_better": False,
    }
    made = make(callback, train_dataset=Stream(), max_steps=13, **judged)
    losses(made)
    assert callback.best is not None
    assert callback.best.step == made.state.best_global_step == 11


def test_a_best_model_that_has_no_state_is_said_to_be_not_loaded(
    repo: datastates.Repository, make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    class Better(TrainerCallback):  # type: ignore[misc]  # mypy is told to skip transformers
        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            state.best_global_step = 2

    made = make(DatastatesCallback(repo, folders=False), **JUDGED, max_steps=3)
    made.callback_handler.callbacks.insert(0, Better())
    with caplog.at_level(logging.WARNING, "datastates"):
        made.train()
    assert "the best model, of step 2, is not loaded: it has no state" in caplog.text


# --- metrics --------------------------------------------------------------------------------------


def test_states_have_the_metrics_of_their_step_and_the_arguments(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    callback = DatastatesCallback(repo, config={"data": "noise"})
    losses(make(callback, eval_strategy="steps", eval_steps=4, logging_steps=2))
    states = {state.step: state for state in repo.log("main")}
    assert states[2].metrics.keys() >= {"loss", "grad_norm", "learning_rate"}
    assert "eval_loss" not in states[2].metrics
    assert states[4].metrics.keys() >= {"loss", "eval_loss"}
    assert states[3].metrics == {}
    assert states[3].config["per_device_train_batch_size"] == 4
    assert states[3].config["data"] == "noise"
    assert repo.find(
        "config.learning_rate == 0.01 and metrics.eval_loss > 0 order by metrics.eval_loss limit 1"
    )


def test_states_have_no_metrics_that_are_not_of_their_step(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    made = make(DatastatesCallback(repo), max_steps=2, eval_on_start=True)
    made.evaluate()
    made.train()
    made.evaluate()
    made.args.max_steps = 4
    made.train()
    assert [(state.step, state.metrics) for state in repo.log("main")] == [
        (step, {}) for step in (4, 3, 2, 1)
    ]


def test_what_is_logged_while_a_step_is_made_is_of_that_step(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    class Aux(Told):
        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            self.log({"aux": self.state.global_step + 1.0})
            return super().training_step(*args, **options)

    losses(make(DatastatesCallback(repo, every=2), kind=Aux, max_steps=4))
    assert [(state.step, state.metrics["aux"]) for state in repo.log("main")] == [
        (4, 4.0),
        (2, 2.0),
    ]


def test_every_step_that_is_evaluated_is_captured_with_its_own_evaluation(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    made = make(
        DatastatesCallback(repo, every=5), eval_strategy="steps", eval_steps=4, max_steps=11
    )
    losses(made)
    told = {
        entry["step"]: entry["eval_loss"]
        for entry in made.state.log_history
        if "eval_loss" in entry
    }
    assert told.keys() == {4, 8, 11}
    assert {state.step: state.metrics.get("eval_loss") for state in repo.log("main")} == {
        5: None,
        10: None,
        **told,
    }


def test_every_few_steps_are_captured_and_the_last(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    expected = losses(make(DatastatesCallback(repo, every=5), StopAt(9)))
    assert [state.step for state in repo.log("main")] == [5]
    assert losses(make(DatastatesCallback(repo, every=5)))[:4] == expected[5:9], (
        "steps that no state has are made again"
    )
    assert [state.step for state in repo.log("main")] == [22, 20, 15, 10, 5]
