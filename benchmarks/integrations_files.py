"""A loop that saves at every step by ``torch.save``, or by ``datastates.save``. A part of ``integrations.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from integrations import Setting, Steps, Way

import datastates
from datastates.config import Config

__all__ = ["ways"]

_KEPT = 3

Save = Callable[[dict[str, Any], Path, int], object]


def ways() -> list[Way]:
    """A floor, and each way to save beside it."""
    durable = "own loop, datastates, every step durable"
    return [
        Way("files", _loop(None)),
        Way("files, torch.save", _loop(_to_file), "files", durable),
        Way("files, torch.save and fsync", _loop(_to_disk), "files", durable),
        Way("files, datastates.save", _by_state, "files", durable),
    ]


def _loop(save: Save | None) -> Callable[[Setting, Path], Steps]:
    return lambda setting, folder: _steps(setting, folder, save)


def _by_state(setting: Setting, folder: Path) -> Steps:
    with datastates.open(folder, config=Config(retention="latest:3")) as repo:
        yield from _steps(setting, folder, lambda state, where, step: datastates.save(state, "main", repo=repo))


def _steps(setting: Setting, folder: Path, save: Save | None) -> Iterator[object]:
    folder.mkdir(exist_ok=True, parents=True)
    model = setting.model()
    optimizer, loader = setting.optimizer(model), setting.loader()
    step = 0
    while True:
        for (tokens,) in loader:
            optimizer.zero_grad()
            loss: torch.Tensor = model(tokens)
            loss.backward()
            optimizer.step()
            step += 1
            if save is not None:
                save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder, step)
            yield loss


def _to_file(state: dict[str, Any], folder: Path, step: int) -> object:
    torch.save(state, folder / f"{step}.pt")
    (folder / f"{step - _KEPT}.pt").unlink(missing_ok=True)
    return None


def _to_disk(state: dict[str, Any], folder: Path, step: int) -> object:
    _to_file(state, folder, step)
    with (folder / f"{step}.pt").open("rb") as file:
        os.fsync(file.fileno())
    return None
