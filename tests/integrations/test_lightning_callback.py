"""What the callback for Lightning records, where it begins, and what it says and refuses."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as L
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from torch.utils.data import DataLoader

import datastates
from datastates import Repository
from datastates.errors import Conflict, InvalidInput, Unsupported
from datastates.integrations.lightning import DatastatesCallback
from datastates.integrations.lightning.data import Data
from tests.integrations.lightning_jobs import BATCHES, Automatic, Items, Plateau, trainer_of

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("UserWarning", "FutureWarning", "DeprecationWarning")
]


def fit(
    repo: Any,
    tmp_path: Path,
    *,
    seed: int = 3,
    module: type[Automatic] = Automatic,
    lr: float = 0.01,
    more: Any = (),
    **settings: Any,
) -> list[str]:
    """What a training says; options of the callback and of the Trainer by name."""
    said: list[str] = []
    options = {
        name: settings.pop(name)
        for name in ("branch", "start", "every", "config", "gradients", "keep_best")
        if name in settings
    }
    ckpt_path = settings.pop("ckpt_path", None)
    torch.manual_seed(seed)
    callbacks = [*more, *([] if repo is None else [DatastatesCallback(repo, **options)])]
    trainer = trainer_of("plain", tmp_path, callbacks, settings)
    model = module(lambda *words: said.append(" ".join(map(str, words))), lr)
    trainer.fit(
        model,
        DataLoader(Items(), batch_size=4, shuffle=True),
        DataLoader(Items(), batch_size=13),
        ckpt_path=ckpt_path,
    )
    return said


def test_every_step_is_a_state_with_its_metrics_and_hyperparameters(
    repo: Repository, tmp_path: Path
) -> None:
    said = fit(repo, tmp_path, max_epochs=2, config={"note": "first"})
    states = list(repo.log("main"))
    assert [state.step for state in states] == list(range(2 * BATCHES, 0, -1))
    losses = [float.fromhex(line.split()[-1]) for line in said if not line.startswith("validated")]
    assert [state.metrics["loss"] for state in reversed(states)] == losses
    assert ["val_loss" in state.metrics for state in states] == (
        [True] + [False] * (BATCHES - 1)
    ) * 2
    validated = [float.fromhex(line.split()[-1]) for line in said if line.startswith("validated")]
    assert [
        state.metrics["val_loss"] for state in reversed(states) if "val_loss" in state.metrics
    ] == validated
    assert [state.attributes["epoch"] for state in reversed(states)] == [0] * BATCHES + [
        1
    ] * BATCHES
    assert repo.find("config.lr = 0.01 and config.note = 'first' limit 1")
    assert set(repo.load("main")) == {"model", "optimizer", "scheduler", "trainer", "data", "rng"}


@pytest.mark.long
@pytest.mark.exact("lightning", "fork")
def test_two_variants_fork_where_the_parent_stood(repo: Repository, tmp_path: Path) -> None:
    whole = fit(repo, tmp_path)
    repo.tag("warm", f"main@step:{BATCHES + 3}")
    same = fit(repo, tmp_path, seed=99, branch="same", start="warm")
    assert same == whole[-len(same) :]
    other = fit(repo, tmp_path, seed=99, branch="other", start="warm", gradient_clip_val=0.001)
    assert len(other) == len(same)
    assert other[0] == same[0], "nothing was updated yet"
    assert other[1:] != same[1:]
    assert repo.state(f"same~{len([line for line in same if line[0] != 'v'])}") == repo.state(
        "warm"
    )
    assert repo.state("main").step == 3 * BATCHES


@pytest.mark.long
def test_a_training_that_is_over_goes_on_with_more_epochs(repo: Repository, tmp_path: Path) -> None:
    whole = fit(None, tmp_path, max_epochs=3)
    first = fit(repo, tmp_path, max_epochs=1)
    assert fit(repo, tmp_path, max_epochs=1) == [], "nothing is left to do"
    rest = fit(repo, tmp_path, seed=99, max_epochs=3)
    assert first + rest == whole


@pytest.mark.long
@pytest.mark.parametrize("steps", [3, BATCHES, BATCHES + 2])
def test_a_training_by_steps_goes_on_with_more_steps(
    repo: Repository, tmp_path: Path, steps: int
) -> None:
    whole = fit(None, tmp_path, max_steps=17, max_epochs=-1)
    first = fit(repo, tmp_path, max_steps=steps, max_epochs=-1)
    rest = fit(repo, tmp_path, seed=99, max_steps=17, max_epochs=-1)
    assert first + rest == whole


@pytest.mark.long
def test_captures_are_as_often_as_asked_for(repo: Repository, tmp_path: Path) -> None:
    fit(repo, tmp_path, branch="some", every=4)
    assert [state.step for state in repo.log("some")] == [
        21,
        20,
        16,
        14,
        12,
        8,
        7,
        4,
    ], "every fourth, and those that were validated"
    fit(repo, tmp_path, branch="epochs", every=None)
    assert [state.step for state in repo.log("epochs")] == [21, 14, 7]
    fit(repo, tmp_path, branch="accumulated", accumulate_grad_batches=3)
    assert [state.step for state in repo.log("accumulated")] == list(range(9, 0, -1))


class Validating(L.Callback):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """Notes what each validation finds, and at which step."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.found[trainer.global_step] = trainer.callback_metrics["val_loss"].item()


@pytest.mark.long
def test_a_validated_step_is_a_state_however_seldom_captures_are(
    repo: Repository, tmp_path: Path
) -> None:
    noted = Validating()
    fit(repo, tmp_path, every=5, val_check_interval=3, max_epochs=2, more=[noted])
    assert sorted(noted.found) == [3, 6, 10, 13]
    assert [state.step for state in repo.log("main")] == [14, 13, 10, 6, 5, 3]
    assert {
        state.step: state.metrics["val_loss"]
        for state in repo.log("main")
        if "val_loss" in state.metrics
    } == noted.found
    fit(repo, tmp_path, every=5, max_epochs=3)
    assert [state.step for state in repo.log("main", limit=3)] == [
        21,
        20,
        15,
    ], "every fifth, wherever the training ended before"


class RateLimitFilter(Automatic):
    """It logs something in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if self.trainer.global_step == 2:
            self.log("third", 3.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.long
def test_no_state_has_the_metrics_of_an_earlier_step(repo: Repository, tmp_path: Path) -> None:
    fit(repo, tmp_path, module=RateLimitFilter, every=3, max_epochs=1)
    assert ["third" in state.metrics for state in repo.log("main")] == [False, False, True]
    fit(repo, tmp_path, module=RateLimitFilter, every=5, branch="seldom", max_epochs=1)
    assert not any("third" in state.metrics for state in repo.log("seldom"))
    noted = Validating()
    fit(
        repo,
        tmp_path,
        branch="amid",
        accumulate_grad_batches=2,
        val_check_interval=3,
        max_epochs=1,
        more=[noted],
    )
    assert sorted(noted.found) == [
        1,
        3,
    ], "one of them amid an accumulation, after the state whose weights it had"
    assert [(state.step, state.metrics.get("val_loss")) for state in repo.log("amid")] == [
        (4, None),
        (3, noted.found[3]),
        (2, None),
        (1, None),
    ]


@pytest.mark.long
def test_ends_of_epochs_are_captured_after_a_resume_and_no_other_steps(
    repo: Repository, tmp_path: Path
) -> None:
    fit(repo, tmp_path, every=None, max_epochs=1)
    fit(repo, tmp_path, every=None, max_epochs=3)
    assert [state.step for state in repo.log("main")] == [21, 14, 7]


@pytest.mark.long
def test_the_loss_of_a_step_is_not_the_share_that_was_accumulated(
    repo: Repository, tmp_path: Path
) -> None:
    fit(repo, tmp_path, accumulate_grad_batches=3, max_epochs=1)
    for state in repo.log("main"):
        assert state.metrics["loss"] == pytest.approx(state.metrics["train_loss"])


class Remembering(Automatic):
    """It keeps something in its checkpoints by hand."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.trainer.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.say("seen", checkpoint["seen"])


@pytest.mark.long
def test_hooks_on_checkpoints_are_called(repo: Repository, tmp_path: Path) -> None:
    fit(repo, tmp_path, module=Remembering, max_epochs=1)
    assert fit(repo, tmp_path, module=Remembering, max_epochs=2)[0] == f"seen {BATCHES}"


@pytest.mark.long
def test_an_error_makes_the_head_durable_and_goes_on_its_way(
    repo: Repository, tmp_path: Path
) -> None:
    class Failing(L.Callback):  # type: ignore[misc]  # Lightning is not looked at by mypy
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                raise ValueError("the training's own")

    with pytest.raises(ValueError, match="the training's own"):
        fit(repo, tmp_path, more=[Failing()])
    assert (repo.state("main").step, repo.state("main").status) == (5, "durable")
    whole = fit(None, tmp_path)
    assert fit(repo, tmp_path, seed=99) == whole[5:]


@pytest.mark.long
def test_ctrl_c_loses_nothing_and_the_same_callback_goes_on(
    repo: Repository, tmp_path: Path
) -> None:
    class Interrupting(L.Callback):  # type: ignore[misc]  # Lightning is not looked at by mypy
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 9:
                raise KeyboardInterrupt

    whole = [line for line in fit(None, tmp_path) if not line.startswith("validated")]
    ours, said = DatastatesCallback(repo), list[str]()
    for callbacks, seed in (([ours, Interrupting()], 3), ([ours], 99)):
        torch.manual_seed(seed)
        module = Automatic(lambda *words: said.append(" ".join(map(str, words))))
        with suppress(KeyboardInterrupt, SystemExit):
            trainer_of("plain", tmp_path, callbacks, {}).fit(
                module, DataLoader(Items(), batch_size=4, shuffle=True), DataLoader(Items(), 13)
            )
    assert [line for line in said if not line.startswith("validated")] == whole
    assert repo.state("main").step == 3 * BATCHES


@pytest.mark.long
def test_a_callback_within_a_fit_is_in_no_other(repo: Repository, tmp_path: Path) -> None:
    ours = DatastatesCallback(repo)

    class Nesting(L.Callback):  # type: ignore[misc]  # likewise
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer_of("plain", tmp_path, [ours], {}).fit(
                    Automatic(print), DataLoader(Items(), batch_size=4)
                )

    with pytest.raises(Conflict, match="is in a fit of another Trainer"):
        trainer_of("plain", tmp_path, [ours, Nesting()], {}).fit(
            Automatic(lambda *_: None), DataLoader(Items(), batch_size=4)
        )
    assert repo.state("main").step == 2


@pytest.mark.long
def test_another_optimizer_is_refused_and_nothing_is_lost(repo: Repository, tmp_path: Path) -> None:
    whole = fit(repo, tmp_path, branch="whole")
    fit(repo, tmp_path, max_epochs=1)
    with pytest.raises(InvalidInput, match="optimizer"):
        fit(repo, tmp_path, module=Plateau)
    assert fit(repo, tmp_path, seed=99) == whole[BATCHES + 1 :]


@pytest.mark.long
def test_early_stopping_counts_on(repo: Repository, tmp_path: Path) -> None:
    def stopping() -> Any:
        return EarlyStopping("val_loss", patience=2, min_delta=10.0)

    fit(repo, tmp_path, max_epochs=2, more=[stopping()])
    later = stopping()
    fit(repo, tmp_path, max_epochs=9, more=[later])
    assert later.stopped_epoch == 2


@pytest.mark.long
def test_metrics_of_the_repository_choose_the_best(repo: Repository, tmp_path: Path) -> None:
    fit(repo, tmp_path, keep_best="val_loss")
    best = repo.state("main@best:val_loss")
    assert best.metrics["val_loss"] == min(
        state.metrics["val_loss"] for state in repo.log("main") if "val_loss" in state.metrics
    )


@pytest.mark.inexact(
    "lightning",
    "iterable",
    "an iterator has no position to return to, so pass the object that it iterates over",
)
def test_what_cannot_be_exact_is_said_at_the_start(
    repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Once:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> torch.Tensor:
            return torch.ones(4, 8)

    trainer = trainer_of(
        "plain",
        tmp_path,
        [DatastatesCallback(repo)],
        {"max_steps": 2, "reload_dataloaders_every_n_epochs": 2},
    )
    with caplog.at_level(logging.WARNING, "datastates"):
        trainer.fit(Automatic(lambda *_: None), Once())
    said = [record.getMessage() for record in caplog.records if "may differ" in record.getMessage()]
    assert len(said) == 1
    assert "is an iterator" in said[0]
    assert "reload_dataloaders_every_n_epochs=2" in said[0]


@pytest.mark.long
def test_stochastic_weight_averaging_is_said_to_be_inexact(
    repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "datastates"):
        fit(repo, tmp_path, max_epochs=1, more=[StochasticWeightAveraging(swa_lrs=0.01)])
    assert any(
        "StochasticWeightAveraging has a schedule of its own" in record.getMessage()
        for record in caplog.records
    )


def test_nothing_is_said_of_what_is_exact(
    repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "datastates"):
        fit(repo, tmp_path, max_epochs=1)
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []


@pytest.mark.long
def test_what_makes_no_sense_is_refused(repo: Repository, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="evry"):
        DatastatesCallback(repo, evry=2)  # type: ignore[call-arg]  # on purpose
    with pytest.raises(InvalidInput, match="every"):
        DatastatesCallback(repo, every=0)
    with pytest.raises(InvalidInput, match="repo is 3"):
        DatastatesCallback(3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidInput, match="two DatastatesCallbacks"):
        fit(repo, tmp_path, more=[_Second(repo, branch="second")])
    fit(repo, tmp_path, max_epochs=1)
    with pytest.raises(Conflict, match="does not descend"):
        fit(repo, tmp_path, branch="b", start="main~3") and fit(
            repo, tmp_path, branch="main", start="b"
        )
    with pytest.raises(Conflict, match="resume=True"):
        trainer_of("plain", tmp_path, [DatastatesCallback(repo, resume=False)], {}).fit(
            Automatic(print), DataLoader(Items(), batch_size=4)
        )


class _Second(DatastatesCallback):
    """Lightning takes two callbacks of one class only if their keys differ."""

    @property
    def state_key(self) -> str:
        return "second"


def test_several_processes_are_refused_before_the_training(
    repo: Repository, tmp_path: Path
) -> None:
    trainer = trainer_of("plain", tmp_path, [], {})
    trainer.strategy._lightning_module = None

    class Two:
        fast_dev_run, world_size, callbacks, strategy = False, 2, (), trainer.strategy

    with pytest.raises(
        Unsupported, match=r'2 processes by SingleDeviceStrategy, .* use strategy="ddp"'
    ):
        DatastatesCallback(repo).setup(Two(), None, "fit")


def test_an_epoch_that_other_processes_shared_is_refused() -> None:
    class Two:
        world_size = 2

    for is_over, said in (
        (False, "within an epoch that 1 processes shared, and this Trainer has 2: use devices=1"),
        (True, None),
    ):
        with pytest.raises(InvalidInput, match=said) if said else nullcontext():
            Data(Two(), lambda _: None).load_state_dict({"loaders": [{"is_over": is_over}]})


@pytest.mark.long
def test_a_folder_is_opened_for_each_fit(tmp_path: Path) -> None:
    fit(tmp_path / "runs", tmp_path, max_epochs=1)
    fit(tmp_path / "runs", tmp_path, max_epochs=2)
    with datastates.open(tmp_path / "runs") as repo:
        assert repo.state("main").step == 2 * BATCHES
