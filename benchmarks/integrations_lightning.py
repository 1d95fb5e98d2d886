"""Lightning's Trainer: bare, with the callback, and with a checkpoint file at every step.

A part of ``integrations.py``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from integrations import DURABLE, MEMORY, Setting, Steps, Turns, Way
from lightning.pytorch.callbacks import ModelCheckpoint

import datastates
from datastates.config import Config
from datastates.integrations.lightning import DatastatesCallback

if TYPE_CHECKING:
    import torch


class Module(L.LightningModule):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """The model as Lightning wants it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting, self.model = setting, setting.model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        loss: torch.Tensor = self.model(tokens)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.setting.optimizer(self.model)


class Waiting(L.Callback):  # type: ignore[misc]  # as above
    """Begins a step in its turn, after Lightning has fetched its batch, and captured or saved the
    last step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_batch_start(self, trainer: Any, *args: Any) -> int | None:
        trainer.should_stop = self.turns.wait()
        return -1 if trainer.should_stop else None


def loop(
    cadence: Mapping[str, Any] | None, *, saves: bool = False
) -> Callable[[Setting, Path], Steps]:
    """A Trainer; ``cadence`` are options of ``track``, None captures nothing, ``saves`` keeps
    Lightning's newest checkpoint."""

    def begin(setting: Setting, folder: Path) -> Steps:
        turns = Turns()

        def train() -> None:
            warnings.simplefilter("ignore")  # that a loader has no workers
            logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
            callbacks: list[Any] = [Waiting(turns)]
            if saves:
                callbacks.append(ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1))
            quiet = {
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": saves,
            }
            where = {
                "accelerator": "cpu",
                "devices": 1,
                "max_epochs": 1_000,
                "default_root_dir": folder,
            }
            with datastates.open(folder / "runs", config=Config(retention="latest:3")) as repo:
                if cadence is not None:
                    callbacks.append(DatastatesCallback(repo, **cadence))
                L.Trainer(callbacks=callbacks, **quiet, **where).fit(
                    Module(setting), setting.loader()
                )

        return turns.steps(train)

    return begin


def ways() -> list[Way]:
    """The part."""
    return [
        Way("Lightning", loop(None)),
        Way("Lightning, datastates", loop(MEMORY), "Lightning", "own loop, datastates"),
        Way(
            "Lightning, datastates, every step durable",
            loop(DURABLE),
            "Lightning",
            "own loop, datastates, every step durable",
        ),
        Way(
            "Lightning, ModelCheckpoint at every step",
            loop(None, saves=True),
            "Lightning",
            "own loop, datastates, every step durable",
        ),
    ]
