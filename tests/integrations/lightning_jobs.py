"""Trainings by Lightning that ``test_lightning`` kills and starts again: each says the loss of
every batch exactly."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

# it has no stubs
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config
from datastates.integrations.lightning import DatastatesCallback

Say = Callable[..., object]

EPOCHS = 3
BATCHES = 7


class Items(Dataset[torch.Tensor]):
    """26 inputs, with noise that is drawn where they are read."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8.0) * (index + 1)) + 0.1 * torch.randn(8)


class Stream(IterableDataset[torch.Tensor]):
    """The same, of no length that anybody could know."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Items()[index] for index in range(26))


class Net(nn.Sequential):
    """What all of them train."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8)
        )


class Automatic(L.LightningModule):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """Automatic optimization, with a schedule a step and one that waits for a validation."""

    def __init__(self, say: Say, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["say"])
        self.net, self.say = Net(), say

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = F.mse_loss(self.net(batch), batch)
        self.log("train_loss", loss)
        self.say(
            self.trainer.fit_loop.total_batch_idx,
            batch_idx,
            self.trainer.current_epoch,
            float(loss.detach()).hex(),
        )
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch), batch))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.say(
                "validated",
                self.trainer.global_step,
                self.trainer.callback_metrics["val_loss"].item().hex(),
            )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}
        ]


class Plateau(Automatic):
    """A schedule that looks at the last validation after each step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)
        return [optimizer], [
            {"scheduler": plateau, "interval": "step", "monitor": "val_loss", "strict": False}
        ]


class Manual(Automatic):
    """Manual optimization of two optimizers, each with a schedule."""

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self.automatic_optimization = False
        self.critic = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        made = self.net(batch)
        for index, loss in enumerate(
            (
                F.mse_loss(made, batch) + self.critic(made).mean(),
                self.critic(made.detach()).square().mean(),
            )
        ):
            optimizers[index].zero_grad()
            self.manual_backward(loss)
            optimizers[index].step()
            schedulers[index].step()
            self.say(
                self.trainer.fit_loop.total_batch_idx,
                index,
                self.trainer.current_epoch,
                float(loss.detach()).hex(),
            )

    def configure_optimizers(self) -> Any:
        both = [
            torch.optim.Adam(self.net.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.5),
        ]
        return both, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both]


class Killer(L.Callback):  # type: ignore[misc]  # likewise
    """Kills this process in batch ``at``, where the seed says, and once the newest capture is
    durable or at any moment."""

    def __init__(self, at: int, seed: int, ours: DatastatesCallback) -> None:
        choose = random.Random(seed)
        self.at, self.ours = at, ours
        self.hook, self.waits = (
            choose.choice(
                ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"]
            ),
            choose.random() < 0.8,
        )

    def _reach(self, hook: str, trainer: Any) -> None:
        if hook == self.hook and trainer.fit_loop.total_batch_idx >= self.at:
            if self.waits and self.ours.newest is not None:
                self.ours.newest.wait("durable")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self._reach("on_train_batch_start", trainer)

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self._reach("on_before_optimizer_step", trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._reach("on_train_batch_end", trainer)


class Awaiting(L.Callback):  # type: ignore[misc]  # likewise
    """Waits once, in batch ``at`` or after the first step, until the newest capture is durable."""

    def __init__(self, at: int, ours: DatastatesCallback) -> None:
        self.at, self.ours, self.has_waited = at, ours, False

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        is_due = not self.has_waited and trainer.fit_loop.total_batch_idx >= self.at
        if is_due and self.ours.newest is not None:
            self.ours.newest.wait("durable")
            self.has_waited = True


def loader_of(kind: str, workers: int) -> Any:
    """The training data of a kind."""
    if kind == "stateful":
        return StatefulDataLoader(Items(), batch_size=4, shuffle=True, num_workers=workers)
    if kind == "iterable":
        return DataLoader(Stream(), batch_size=4, num_workers=workers)
    if kind == "generator":
        return DataLoader(
            Items(),
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(5),
        )
    if kind == "several":
        return {
            "a": DataLoader(Items(), batch_size=4, shuffle=True),
            "b": DataLoader(Items(), batch_size=8, shuffle=True),
        }
    return DataLoader(Items(), batch_size=4, shuffle=True, num_workers=workers)


class Several(Automatic):
    """Two loaders at once, the shorter one over and over."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.net(batch["a"]), batch["a"]) + F.mse_loss(
            self.net(batch["b"]), batch["b"]
        )
        self.say(
            self.trainer.fit_loop.total_batch_idx,
            batch_idx,
            self.trainer.current_epoch,
            float(loss.detach()).hex(),
        )
        return loss


MODULES: dict[str, type[Automatic]] = {"manual": Manual, "plateau": Plateau, "several": Several}
TRAINERS: dict[str, dict[str, Any]] = {
    "plateau": {"val_check_interval": 2},
    "validating": {"val_check_interval": 3},
    "limited": {"limit_train_batches": 5},
    "steps": {"max_steps": 17, "max_epochs": -1},
}


def trainer_of(kind: str, folder: Path, callbacks: list[Any], options: dict[str, Any]) -> Any:
    """The Trainer of a kind, which writes no files of its own."""
    further: list[Any] = []
    if kind == "callbacks":
        further = [
            EarlyStopping("val_loss", patience=1, min_delta=0.001),
            ModelCheckpoint(folder / "checkpoints", monitor="val_loss"),
        ]
    settings = {
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": kind == "callbacks",
        },
        **{
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "plugins": [LightningEnvironment()],
        },
        **TRAINERS.get(kind, {}),
        **options,
    }
    return L.Trainer(callbacks=[*further, *callbacks], **settings)


def train(
    folder: str,
    kind: str,
    say: Say,
    *,
    at: int | None = None,
    awaited: int | None = None,
    seed: int = 0,
    workers: int = 0,
    ours: bool = True,
    **options: Any,
) -> None:
    """Train to the end, or until batch ``at``; ``ours=False`` without the callback. In batch
    ``awaited``, or after the first step, a state is durable."""
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    module, loader = MODULES.get(kind, Automatic)(say), loader_of(kind, workers)
    validation = DataLoader(Items(), batch_size=13)
    if not ours:
        trainer_of(kind, Path(folder), [], options).fit(module, loader, validation)
        return
    config = Config(memory_bytes=64 << 20, durable_every=1, durable_interval_s=None)
    with datastates.open(Path(folder) / "runs", config=config) as repo:
        callback = DatastatesCallback(repo)
        killer = [] if at is None else [Killer(at, seed, callback)]
        waiter = [] if awaited is None else [Awaiting(awaited, callback)]
        trainer_of(kind, Path(folder), [*killer, *waiter, callback], options).fit(
            module, loader, validation
        )
