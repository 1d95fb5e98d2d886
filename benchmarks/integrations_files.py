"""A loop that saves at every step by ``torch.save``, or by ``datastates.save``.

A part of ``integrations.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from integrations import Save, Setting, Steps, Way, saving

import datastates
from datastates.config import Config

_KEPT = 3


def ways() -> list[Way]:
    """A floor, and the ways to save."""
    durable = "own loop, datastates, every step durable"
    return [
        Way("files", _loop(None)),
        Way("files, torch.save", _loop(_to_file), "files", durable),
        Way("files, torch.save and fsync", _loop(_to_disk), "files", durable),
        Way("files, datastates.save", _by_state, "files", durable),
    ]


def _loop(save: Save | None) -> Callable[[Setting, Path], Steps]:
    return lambda setting, folder: saving(setting, folder, save)


def _by_state(setting: Setting, folder: Path) -> Steps:
    with datastates.open(folder, config=Config(retention="latest:3")) as repo:
        yield from saving(
            setting, folder, lambda state, where, step: datastates.save(state, "main", repo=repo)
        )


def _to_file(state: dict[str, Any], folder: Path, step: int) -> object:
    torch.save(state, folder / f"{step}.pt")
    (folder / f"{step - _KEPT}.pt").unlink(missing_ok=True)
    return None


def _to_disk(state: dict[str, Any], folder: Path, step: int) -> object:
    _to_file(state, folder, step)
    with (folder / f"{step}.pt").open("rb") as file:
        os.fsync(file.fileno())
    return None
