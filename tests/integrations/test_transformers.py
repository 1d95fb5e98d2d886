"""A Trainer with a lineage: where it begins, what its states hold, what it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import datastates
from datastates.errors import Conflict, InvalidInput, Unsupported
from datastates.integrations.transformers import DatastatesCallback
from tests.engine.build import Gate, held_back

from .trainers import Net, Noisy, StopAt, Stream, Told, losses


class Held(TrainerCallback):  # type: ignore[misc]  # mypy is told to skip transformers
    """Holds the copy that is begun after a step until somebody waits for it; ``waited`` says
    whether anybody had before the next update."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.waited = gate, list[bool]()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step < state.max_steps:
            self.gate.hold()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step:
            self.waited.append(self.gate.is_open)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[datastates.Repository]:
    with datastates.open(tmp_path / "runs") as opened:
        yield opened


def rates(made: Told) -> list[float]:
    return [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]


# --- where it begins ------------------------------------------------------------------------------


def test_the_callback_changes_no_loss(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    assert losses(make(DatastatesCallback(repo))) == losses(make())


def test_nothing_waits_for_a_copy_before_the_next_update(
    repo: datastates.Repository, make: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_back(monkeypatch) as gate:
        held = Held(gate)
        assert len(losses(make(DatastatesCallback(repo), held))) == 22
    assert held.waited == [False] * 21


def test_train_goes_on_where_the_branch_stands_and_ends_where_the_other_did(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    whole = make()
    expected = losses(whole)
    first = losses(make(DatastatesCallback(repo), StopAt(13)))
    again = make(DatastatesCallback(repo))
    rest = losses(again)

    assert first == expected[:13]
    assert rest == expected[13:]
    entries = [entry for entry in whole.state.log_history if "loss" in entry]
    assert [entry for entry in again.state.log_history if "loss" in entry] == entries, "the log too"
    assert again.state.epoch == whole.state.epoch == 2.0
    assert losses(make(DatastatesCallback(repo))) == [], "nothing is left to do"
    assert repo.state("main").step == 22


@pytest.mark.parametrize("stop", [11, 22])
def test_a_state_of_an_epochs_last_step_has_the_evaluation_that_follows_it(
    stop: int, repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    callback = DatastatesCallback(repo)
    losses(make(callback, StopAt(stop), eval_strategy="epoch"))
    assert repo.state("main").step == stop
    assert "eval_loss" in repo.state("main").metrics
    made = make(DatastatesCallback(repo), eval_strategy="epoch")
    losses(made)
    assert [entry["step"] for entry in made.state.log_history if "eval_loss" in entry] == [11, 22]


@pytest.mark.exact("transformers", "fork")
def test_a_fork_goes_on_as_its_parent_did_and_a_variant_by_its_own_arguments(
    repo: datastates.Repository, make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "datastates")
    expected = losses(make(DatastatesCallback(repo)))
    same = losses(make(DatastatesCallback(repo, "same", start="main@step:9")))
    variant = make(
        DatastatesCallback(repo, "slow", start="main@step:9"), learning_rate=1e-3, weight_decay=0.1
    )
    slow = losses(variant)

    assert same == expected[9:]
    assert slow[0] == expected[9], "its first loss is of the weights that it began with"
    assert slow[1:] != expected[10:]
    assert rates(variant)[1:] == pytest.approx([1e-3 * (1 - step / 22) for step in (9, 14, 19)]), (
        "the new curve, where the old one was"
    )
    assert {group["weight_decay"] for group in variant.optimizer.param_groups} >= {0.1}
    assert repo.state("slow").config["learning_rate"] == 1e-3
    assert repo.diff("main", "slow").config["learning_rate"] == (1e-2, 1e-3)
    assert [line for line in caplog.messages if "as TrainingArguments say now" in line] == [
        "branch slow: weight_decay 0.0 -> 0.1, learning_rate 0.01 -> 0.001, as TrainingArguments"
        " say now"
    ]


def test_a_fork_with_another_seed_draws_other_numbers_and_another_order(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    read: list[int] = []

    class Counted(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            read.append(index)
            return super().__getitem__(index)

    losses(make(DatastatesCallback(repo), train_dataset=Counted()))
    expected = losses(
        make(DatastatesCallback(repo, "same", start="main@step:9"), train_dataset=Counted())
    )
    same = read[-50:]
    other = losses(
        make(
            DatastatesCallback(repo, "other", start="main@step:9"), train_dataset=Counted(), seed=1
        )
    )
    assert len(other) == len(expected) == 13
    assert other != expected
    assert read[-50:-42] == same[:8], "the epoch ends with what was left of it"
    assert read[-42:] != same[8:], "the next has an order of its own"
    assert sorted(read[-42:]) == list(range(42))


def test_a_fork_may_take_the_weights_alone(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    losses(make(DatastatesCallback(repo)))
    made = make(DatastatesCallback(repo, "again", start="main", only="model"))
    said = losses(made)
    assert [step for _, step, _ in said] == list(range(22))
    assert said[0] != losses(make())[0], "by those weights"


def test_a_state_that_no_trainer_captured_gives_its_model(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    model = Net()
    with repo.track(model=model) as run:
        run.capture()
    assert len(losses(make(DatastatesCallback(repo, "tuned", start="main")))) == 22
    assert repo.state("tuned~21").step == 1


def test_resume_from_checkpoint_takes_a_revision(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    expected = losses(make(DatastatesCallback(repo)))
    assert losses(make(DatastatesCallback(repo)), resume_from_checkpoint="main~5") == expected[17:]
    assert repo.state("main").step == 22
    assert (
        losses(make(DatastatesCallback(repo, "new")), resume_from_checkpoint="main@step:4")
        == expected[4:]
    ), "a fork"
    assert losses(make(DatastatesCallback(repo, "new")), resume_from_checkpoint=True) == []
    with pytest.raises(
        datastates.NotFound, match="resume_from_checkpoint is 'nowhere', which is no folder"
    ):
        make(DatastatesCallback(repo)).train(resume_from_checkpoint="nowhere")


def test_a_folder_of_the_trainer_is_the_root_of_a_branch(
    repo: datastates.Repository, make: Callable[..., Told], tmp_path: Path
) -> None:
    class Quiet(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            with torch.random.fork_rng():
                torch.manual_seed(index)
                return {**super().__getitem__(index), "x": torch.randn(8)}

    expected = losses(make(save_strategy="steps", save_steps=9, train_dataset=Quiet()))
    folder = tmp_path / "out" / "checkpoint-9"
    assert (
        losses(
            make(DatastatesCallback(repo), StopAt(15), train_dataset=Quiet()),
            resume_from_checkpoint=str(folder),
        )
        == expected[9:15]
    )
    assert losses(make(DatastatesCallback(repo), train_dataset=Quiet())) == expected[15:]
    with pytest.raises(Conflict, match="choose another branch for what comes from it"):
        make(DatastatesCallback(repo)).train(resume_from_checkpoint=str(folder))


def test_a_callback_that_comes_late_never_begins_anew_in_silence(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    expected = losses(make(DatastatesCallback(repo), StopAt(5)))
    late = make()
    late.add_callback(DatastatesCallback(repo))
    with pytest.raises(InvalidInput, match="before trainer"):
        late.train()
    late, callback = make(), DatastatesCallback(repo)
    callback.attach(late)
    assert losses(late)[0] == losses(make())[len(expected)]


def test_a_callback_that_comes_late_to_a_new_branch_captures_it(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    late = make()
    late.add_callback(DatastatesCallback(repo))
    expected = losses(late)
    assert expected == losses(make())
    assert [state.step for state in repo.log("main")] == list(range(22, 0, -1))


def test_a_trainer_that_its_callback_was_taken_from_trains_as_without_it(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    callback = DatastatesCallback(repo)
    made = make(callback, max_steps=2)
    made.train()
    again = make(DatastatesCallback(repo), max_steps=3)
    again.pop_callback(DatastatesCallback)
    assert losses(again) == losses(make(max_steps=3))
    assert repo.state("main").step == 2
    made.remove_callback(callback)
    made.add_callback(callback)
    made.args.max_steps = 3
    assert [step for _, step, _ in losses(made)] == [2]


def test_a_callback_belongs_to_one_trainer(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    callback = DatastatesCallback(repo)
    make(callback)
    with pytest.raises(Conflict, match="make one for each"):
        make(callback)


def test_two_callbacks_of_one_trainer_are_refused(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    with pytest.raises(InvalidInput, match="two DatastatesCallbacks"):
        make(DatastatesCallback(repo), DatastatesCallback(repo, "second"))


def test_a_cell_that_is_run_again_goes_on(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    """With the model that it trained, and after an error that nobody handled."""

    class Failing(TrainerCallback):  # type: ignore[misc]  # as above
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 7:
                raise ZeroDivisionError

    expected = losses(make())
    model = Net()
    with pytest.raises(ZeroDivisionError):
        make(DatastatesCallback(repo), Failing()).train()
    assert repo.state("main").step == 6, "the step that failed is not captured"
    assert losses(make(DatastatesCallback(repo), model=model)) == expected[6:]
    assert losses(make(DatastatesCallback(repo), model=model)) == []


def test_another_optimizer_is_refused_and_nothing_is_lost(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    expected = losses(make(DatastatesCallback(repo), StopAt(5)))
    with pytest.raises(InvalidInput, match="optimizer"):
        make(DatastatesCallback(repo), optim="sgd").train()
    assert repo.state("main").step == 5
    assert (
        losses(make(DatastatesCallback(repo), StopAt(7)))
        == losses(make(StopAt(7)))[len(expected) :]
    )


def test_another_number_of_workers_is_said(
    repo: datastates.Repository, make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    expected = losses(make(DatastatesCallback(repo), StopAt(5)))
    with caplog.at_level(logging.WARNING, "datastates"):
        said = losses(make(DatastatesCallback(repo), StopAt(7), dataloader_num_workers=1))
    assert [step for _, step, _ in said] == [5, 6]
    assert "the loader had 0 workers when the state was taken, and has 1" in caplog.text
    assert len(expected) == 5


def test_other_data_begin_where_the_trainer_says(
    repo: datastates.Repository, make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    losses(make(DatastatesCallback(repo), StopAt(5)))
    with caplog.at_level(logging.WARNING, "datastates"):
        said = losses(make(DatastatesCallback(repo), train_dataset=Noisy(30)))
    assert [step for _, step, _ in said] == list(range(5, 16)), "30 items in batches of 4, twice"
    assert "loader of 11 (batches of 4), and" in caplog.text


def test_a_branch_that_is_not_to_be_resumed_is_refused(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    losses(make(DatastatesCallback(repo), max_steps=2))
    with pytest.raises(Conflict, match="resume=True"):
        make(DatastatesCallback(repo, resume=False)).train()


def test_a_model_that_the_trainer_makes_itself_goes_on(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    expected = losses(make(model_init=lambda: Net()))
    losses(make(DatastatesCallback(repo), StopAt(6), model_init=lambda: Net()))
    assert losses(make(DatastatesCallback(repo), model_init=lambda: Net())) == expected[6:]


# --- the end --------------------------------------------------------------------------------------


def test_more_epochs_go_on_from_the_end(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    losses(make(DatastatesCallback(repo), num_train_epochs=1))
    made = make(DatastatesCallback(repo), num_train_epochs=2)
    assert [step for _, step, _ in losses(made)] == list(range(11, 22))


def test_max_steps_within_an_epoch_are_not_exceeded(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    expected = losses(make(DatastatesCallback(repo), max_steps=15))
    assert len(expected) == 15
    assert losses(make(DatastatesCallback(repo), max_steps=15)) == []
    assert repo.state("main").step == 15


def test_a_training_that_was_stopped_within_an_epoch_goes_on_there(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    steady = {"lr_scheduler_type": "constant"}
    expected = losses(make(**steady))
    first = losses(make(DatastatesCallback(repo), max_steps=7, **steady))
    assert first + losses(make(DatastatesCallback(repo), max_steps=11, **steady)) == expected[:11]
    assert losses(make(DatastatesCallback(repo, "other", start="main~4"), **steady)) == expected[7:]
    assert losses(make(DatastatesCallback(repo), **steady)) == expected[11:]


def test_early_stopping_goes_on_counting_and_stays_stopped(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    def stopping(*more: Any, patience: int = 2) -> Told:
        judged = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": True,
        }
        return make(EarlyStoppingCallback(patience, 1e9), *more, **judged)

    expected = losses(stopping())
    assert len(expected) == 6, "the first evaluation, and two that are no better by so much"
    losses(stopping(DatastatesCallback(repo), StopAt(5)))
    assert losses(stopping(DatastatesCallback(repo))) == expected[5:]
    assert losses(stopping(DatastatesCallback(repo))) == []
    assert len(losses(stopping(DatastatesCallback(repo), patience=3))) == 2, "more patience goes on"


# --- what states hold -----------------------------------------------------------------------------


def test_what_is_tracked_besides_comes_back(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    class Averaging(TrainerCallback):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            self.average = torch.zeros(())

        def on_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
        ) -> None:
            self.average.lerp_(next(model.parameters()).detach().mean(), 0.1)

    whole = Averaging()
    losses(make(whole))
    first, again = Averaging(), Averaging()
    losses(make(first, DatastatesCallback(repo, objects={"average": first.average}), StopAt(8)))
    losses(make(again, DatastatesCallback(repo, objects={"average": again.average})))
    assert torch.equal(whole.average, again.average)


def test_a_log_that_outgrows_its_room_comes_back_whole(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    class Telling(TrainerCallback):  # type: ignore[misc]  # as above
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            state.log_history.append(
                {"step": state.global_step, "text": "ä" * 900, "nan": float("inf")}
            )

    whole = make(Telling())
    losses(whole)
    losses(make(Telling(), DatastatesCallback(repo), StopAt(14)))
    again = make(Telling(), DatastatesCallback(repo))
    losses(again)
    assert [entry for entry in again.state.log_history if "text" in entry] == [
        entry for entry in whole.state.log_history if "text" in entry
    ]


# --- what it is told ------------------------------------------------------------------------------


@pytest.mark.exact("transformers", "iterable")
@pytest.mark.inexact(
    "transformers",
    "iterable",
    "a stream is read again from its beginning, so it has to give the same items each time",
)
def test_a_stream_is_read_again_and_that_is_said(
    repo: datastates.Repository, make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    expected = losses(make(train_dataset=Stream(), max_steps=16))
    assert len(expected) == 16
    with caplog.at_level(logging.WARNING, "datastates"):
        first = losses(
            make(DatastatesCallback(repo), StopAt(13), train_dataset=Stream(), max_steps=16)
        )
    assert "the data is streamed" in caplog.text
    assert "dataset with a length" in caplog.text
    assert (
        first + losses(make(DatastatesCallback(repo), train_dataset=Stream(), max_steps=16))
        == expected
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"ignore_data_skip": True},
            "ignore_data_skip begins a resumed epoch with its first batch again",
        ),
        (
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "dataloader_persistent_workers=False",
        ),
        (
            {"dataloader_num_workers": 1, "dataloader_in_order": False},
            "dataloader_in_order=False hands batches out",
        ),
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
    ],
)
def test_what_cannot_be_exact_is_said_when_training_begins(
    options: dict[str, Any],
    said: str,
    repo: datastates.Repository,
    make: Callable[..., Told],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "datastates"):
        losses(make(DatastatesCallback(repo), max_steps=1, **options))
    assert sum(said in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("trl", "said"),
    [
        ({"num_iterations": 2, "steps_per_generation": 2}, "each generation is used for 4 batches"),
        ({"num_iterations": 1, "steps_per_generation": 2}, None),
        ({"sync_ref_model": True}, "sync_ref_model moves the reference model"),
    ],
)
def test_what_trls_trainers_do_not_keep_is_said(
    trl: dict[str, Any],
    said: str | None,
    repo: datastates.Repository,
    make: Callable[..., Told],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = make(DatastatesCallback(repo), max_steps=1, gradient_accumulation_steps=2)
    for name, value in trl.items():
        setattr(made.args, name, value)
    with caplog.at_level(logging.WARNING, "datastates"):
        losses(made)
    assert caplog.text == "" if said is None else said in caplog.text


def test_a_reference_model_that_is_tracked_is_not_said_to_be_lost(
    repo: datastates.Repository, make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    reference = Net()
    made: Any = make(DatastatesCallback(repo, objects={"reference": reference}), max_steps=1)
    made.ref_model, made.args.sync_ref_model = reference, True
    with caplog.at_level(logging.WARNING, "datastates"):
        losses(made)
    assert caplog.text == ""


def test_nothing_is_said_of_what_is_exact(
    repo: datastates.Repository, make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "datastates"):
        losses(make(DatastatesCallback(repo), max_steps=1, gradient_accumulation_steps=2))
    assert caplog.text == ""


def test_batches_of_another_size_begin_where_the_trainer_says(
    repo: datastates.Repository, make: Callable[..., Told], caplog: pytest.LogCaptureFixture
) -> None:
    losses(make(DatastatesCallback(repo), StopAt(5)))
    with caplog.at_level(logging.WARNING, "datastates"):
        said = losses(make(DatastatesCallback(repo), per_device_train_batch_size=6))
    assert [step for _, step, _ in said] == list(range(5, 14)), "42 items in batches of 6, twice"
    assert "per_device_train_batch_size" in caplog.text


def test_batches_that_do_not_fit_into_memory_are_made_smaller(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    class Full(TrainerCallback):  # type: ignore[misc]  # as above
        def __init__(self, step: int) -> None:
            self.step = step

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.train_batch_size >= 10 and state.global_step == self.step:
                raise RuntimeError("CUDA out of memory.")

    found = {"auto_find_batch_size": True, "per_device_train_batch_size": 10}
    made = make(DatastatesCallback(repo), Full(1), **found)
    losses(made)
    assert made.state.train_batch_size == 9
    assert [state.step for state in repo.log("main")] == list(range(10, 0, -1))
    with pytest.raises(InvalidInput, match="per_device_train_batch_size, and start again"):
        losses(make(DatastatesCallback(repo, "other"), Full(3), **found))


def test_frozen_parameters_stay_frozen(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    def frozen(*callbacks: Any) -> Told:
        model = Net()
        model.layers[0].requires_grad_(False)
        return make(*callbacks, model=model)

    torch.manual_seed(3)
    expected = losses(frozen())
    torch.manual_seed(3)
    first = losses(frozen(DatastatesCallback(repo), StopAt(6)))
    assert first + losses(frozen(DatastatesCallback(repo))) == expected


def test_reading_again_may_be_left_out(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    read: list[int] = []

    class Counted(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            read.append(index)
            return {"x": torch.full((8,), index / 41), "y": torch.zeros(1), "input_ids": [0]}

    expected = losses(make(train_dataset=Counted()))
    losses(make(DatastatesCallback(repo), StopAt(9), train_dataset=Counted()))
    read.clear()
    assert (
        losses(make(DatastatesCallback(repo, replay=False), train_dataset=Counted()))
        == expected[9:]
    )
    assert len(read) == 2 * 42 - 9 * 4


def test_what_one_branch_cannot_follow_is_refused(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    with pytest.raises(Unsupported, match="give each a Trainer, and a branch"):
        make(DatastatesCallback(repo)).train(trial={"learning_rate": 1.0})
    several = make(DatastatesCallback(repo))
    several.is_fsdp_enabled = True
    with pytest.raises(Unsupported, match="trains with fsdp"):
        several.train()


def test_a_branch_that_moves_while_a_training_begins_is_said(
    repo: datastates.Repository, make: Callable[..., Told]
) -> None:
    class Moving(TrainerCallback):  # type: ignore[misc]  # as above
        def on_train_begin(self, *args: Any, **more: Any) -> None:
            repo.move("main", "main~1", expected=repo.state("main").uid)

    losses(make(DatastatesCallback(repo), max_steps=3))
    with pytest.raises(
        Conflict, match="'main' was moved while this training began: start it again"
    ):
        make(Moving(), DatastatesCallback(repo)).train()
    assert repo.state("main").step == 2
    assert len(losses(make(DatastatesCallback(repo), max_steps=3))) == 1


def test_a_trainer_of_another_version_is_refused_by_what_it_lacks(
    repo: datastates.Repository, make: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Trainer, "_load_rng_state")
    with pytest.raises(
        Unsupported, match=r"has no _load_rng_state: datastates works with 5\.4 and newer"
    ):
        make(DatastatesCallback(repo))


def test_wrong_arguments_are_refused_by_name(repo: datastates.Repository) -> None:
    for options, name in (
        ({"every": 0}, "every"),
        ({"replay": "no"}, "replay"),
        ({"start": 3}, "start"),
        ({"branch": 1}, "branch"),
    ):
        with pytest.raises(InvalidInput, match=name):
            DatastatesCallback(repo, **options)
