"""The parts of a fit that cannot be repeated exactly after a resume, each with what to do about it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from .data import KeptLoader
from .framework import StochasticWeightAveraging

__all__ = ["inexact"]


def inexact(trainer: Any, module: Any, loaders: Sequence[KeptLoader]) -> list[str]:
    """One phrase for each such part: its name, what happens, and the remedy."""
    return [*_of_data(trainer, loaders), *_of_loop(trainer, module)]


def _of_data(trainer: Any, loaders: Sequence[KeptLoader]) -> Iterator[str]:
    for index, kept in enumerate(loaders):
        name = "the train dataloader" if len(loaders) == 1 else f"train dataloader {index}"
        loader = kept.loader
        if isinstance(loader, Iterator):
            yield f"{name} is an iterator, whose place cannot be found again: give what it iterates over"
        elif getattr(loader, "persistent_workers", False):
            yield (
                f"{name} keeps its workers, where a dataset that draws random numbers draws others: persistent_workers=False repeats them"
            )
    if trainer.reload_dataloaders_every_n_epochs > 1:
        yield (
            f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs} is counted from where a training resumes: use 1"
        )


def _of_loop(trainer: Any, module: Any) -> Iterator[str]:
    step = getattr(module, "training_step", None)
    if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
        yield "training_step takes dataloader_iter, so states are taken in the middle of a step: take the batch"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval is a time, and the clock is not restored: give a count of batches"
    if any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        yield "StochasticWeightAveraging has a schedule of its own, which a resumed training does not always repeat: use WeightAveraging"
    finetuning = [
        type(each).__name__ for each in trainer.callbacks if any(kind.__name__ == "BaseFinetuning" for kind in type(each).__mro__)
    ]
    if finetuning:
        yield (f"{', '.join(finetuning)} changes the optimizer's groups before a state is restored: resume such a training by ckpt_path")
