"""The Trainer of transformers: bare, with the callback, and with a checkpoint folder at every step.
A part of ``integrations.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from integrations import DURABLE, MEMORY, Setting, Steps, Turns, Way
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from datastates.config import Config
from datastates.demo.model import GPT
from datastates.integrations.transformers import DatastatesCallback
from datastates.repository import open as open_repository


class Lossy(nn.Module):
    """A model as a Trainer wants it."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(tokens)}


class Waiting(TrainerCallback):  # type: ignore[misc]  # mypy is told to skip transformers
    """Begins a step in its turn, after the last step was logged, captured or saved, and the next
    batch was read."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = self.turns.wait()


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of a TensorDataset."""
    return {"tokens": torch.stack([tokens for (tokens,) in rows])}


def loop(cadence: Mapping[str, Any] | None, **options: Any) -> Callable[[Setting, Path], Steps]:
    """A Trainer; ``cadence`` are options of ``track``, None captures nothing."""

    def begin(setting: Setting, folder: Path) -> Steps:
        turns = Turns()

        def train() -> None:
            quiet: dict[str, Any] = {
                "report_to": [],
                "disable_tqdm": True,
                "use_cpu": True,
                "save_strategy": "no",
                "logging_steps": 1_000,
            }
            sizes = {
                "per_device_train_batch_size": setting.batch,
                "max_steps": 100_000,
                "max_grad_norm": 0.0,
                "learning_rate": 1e-4,
                "optim": "adamw_torch",
            }
            args = TrainingArguments(str(folder / "out"), **{**quiet, **sizes, **options})
            callbacks: list[Any] = [Waiting(turns)]
            if cadence is not None:
                repo = open_repository(folder / "runs", config=Config(retention="latest:3"))
                callbacks = [DatastatesCallback(repo, **cadence), Waiting(turns)]
            trainer = Trainer(
                Lossy(setting.model()),
                args,
                train_dataset=setting.data(),
                data_collator=collate,
                callbacks=callbacks,
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            if cadence is not None:
                repo.close()

        return turns.steps(train)

    return begin


def ways() -> list[Way]:
    """The part."""
    return [
        Way("Trainer", loop(None)),
        Way("Trainer, datastates", loop(MEMORY), "Trainer", "own loop, datastates"),
        Way(
            "Trainer, datastates, every step durable",
            loop(DURABLE),
            "Trainer",
            "own loop, datastates, every step durable",
        ),
        Way(
            "Trainer, save_steps=1",
            loop(None, save_strategy="steps", save_steps=1, save_total_limit=2),
            "Trainer",
        ),
    ]
