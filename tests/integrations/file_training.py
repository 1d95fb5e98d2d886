"""Trainings that ``test_file_kills`` kills: plain scripts that save at every step, by
torch.distributed.checkpoint or ``datastates.save``.

Each says its losses exactly, and a state only once the call that saved it has returned. Data are
shuffled anew in each epoch, the model has dropout, and a step is of two batches in mixed precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import nn

# it has no stubs
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates.integrations.dcp import Reader, Stateful, Writer

dcp: Any = torch.distributed.checkpoint  # type checkers are told that it exports nothing
Say = Callable[..., object]

BATCH, ITEMS = 8, 40


class Progress:
    """How many steps were made, and where the loader is."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self.step, self.loader = 0, loader
        self._batches: Iterator[torch.Tensor] = iter(())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.loader.load_state_dict(state["loader"])
        self._batches = iter(self.loader)

    def next(self) -> torch.Tensor:
        """The next batch."""
        for batch in self._batches:
            return batch
        self._batches = iter(self.loader)
        return next(self._batches)


class Job:
    """What is trained: a step is of two batches, in bf16."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(0)
        loader = StatefulDataLoader(
            torch.randn(ITEMS, 16), batch_size=BATCH, shuffle=True, num_workers=workers
        )
        self.model = nn.Sequential(
            nn.Linear(16, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7, gamma=0.7)
        self.progress = Progress(loader)

    def update(self) -> float:
        """One step; its last loss."""
        self.optimizer.zero_grad()
        for _ in range(2):
            batch = self.progress.next()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (self.model(batch) - batch.sum(dim=1, keepdim=True)).float().square().mean()
            loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress.step += 1
        return float(loss.detach())


def train(folder: str, kind: str, steps: int, say: Say, workers: int = 0) -> None:
    """Go on from the newest state, up to so many steps; ``kind`` is how it saves."""
    warnings.simplefilter("ignore", UserWarning)  # that torch saves from one process
    {"save": by_dcp, "async_save": by_dcp_later, "files": by_files, "nothing": by_nothing}[kind](
        Job(workers), folder, steps, say
    )


def by_nothing(job: Job, folder: str, steps: int, say: Say) -> None:
    """The training that nothing interrupts."""
    while job.progress.step < steps:
        say("loss", job.progress.step, job.update().hex())


def by_dcp(job: Job, folder: str, steps: int, say: Say) -> None:
    """``dcp.save`` after each step."""
    app = _restored(job, folder)
    say("begin", job.progress.step)
    while job.progress.step < steps:
        say("loss", job.progress.step, job.update().hex())
        metadata = dcp.save({"app": app}, storage_writer=Writer(folder, step=job.progress.step))
        say("saved", job.progress.step, metadata.storage_meta.save_id)


def by_dcp_later(job: Job, folder: str, steps: int, say: Say) -> None:
    """``dcp.async_save`` after each step, one at a time."""
    app = _restored(job, folder)
    say("begin", job.progress.step)
    waiting: tuple[int, Future[Any]] | None = None
    while job.progress.step < steps:
        say("loss", job.progress.step, job.update().hex())
        if waiting is not None:
            say("saved", waiting[0], waiting[1].result().storage_meta.save_id)
        waiting = (
            job.progress.step,
            dcp.async_save({"app": app}, storage_writer=Writer(folder, step=job.progress.step)),
        )
    if waiting is not None:
        say("saved", waiting[0], waiting[1].result().storage_meta.save_id)


def _restored(job: Job, folder: str) -> Stateful:
    app = Stateful(
        model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, progress=job.progress
    )
    if _is_begun(folder):
        dcp.load({"app": app}, storage_reader=Reader(folder))
    return app


def by_files(job: Job, folder: str, steps: int, say: Say) -> None:
    """``datastates.save`` after each step, as scripts use ``torch.save``."""
    parts: dict[str, Any] = {
        "model": job.model,
        "optimizer": job.optimizer,
        "scheduler": job.scheduler,
        "progress": job.progress,
    }
    if _is_begun(folder):
        found = datastates.load(f"{folder}/main")
        for name, part in parts.items():
            part.load_state_dict(found[name])
        torch.set_rng_state(found["random"])
    say("begin", job.progress.step)
    while job.progress.step < steps:
        say("loss", job.progress.step, job.update().hex())
        obj = {name: part.state_dict() for name, part in parts.items()} | {
            "random": torch.get_rng_state(),
            "step": job.progress.step,
        }
        say("saved", job.progress.step, datastates.save(obj, f"{folder}/main"))


def _is_begun(folder: str) -> bool:
    if not (Path(folder) / "lineage.db").exists():
        return False
    with datastates.open(folder) as repo:
        return any(ref.name == "main" for ref in repo.refs())
