"""torch.distributed.checkpoint at every step, to a folder and with ``Writer`` to a repository,
synchronously and asynchronously."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from integrations import Save, Setting, Steps, Way, saving

import datastates
from datastates.config import Config
from datastates.integrations.dcp import Writer

dcp: Any = torch.distributed.checkpoint  # for type checkers it exports nothing
_KEPT = 3


def ways() -> list[Way]:
    """A floor, and the ways to save."""
    durable = "own loop, datastates, every step durable"
    return [
        Way("DCP", _loop(None)),
        Way("DCP, save to folders", _loop(_to_folder), "DCP"),
        Way("DCP, save by Writer", _by_writer(_to_state), "DCP", durable),
        Way("DCP, async_save to folders", _loop(_Later(_to_folder_later)), "DCP"),
        Way("DCP, async_save by Writer", _by_writer(_Later(_to_state_later)), "DCP", durable),
        Way("DCP, save by Writer, captured", _by_writer(_to_memory), "DCP", "own loop, datastates"),
    ]


class _Later:
    """Asynchronous saves, one at a time. The next save waits for the last."""

    def __init__(self, save: Callable[[dict[str, Any], Path, int, Any], Any]) -> None:
        self._save, self._waiting = save, None

    def __call__(self, state: dict[str, Any], folder: Path, step: int, repo: Any = None) -> object:
        if self._waiting is not None:
            self._waiting.result()
        self._waiting = self._save(state, folder, step, repo)
        return None


def _loop(save: Any) -> Callable[[Setting, Path], Steps]:
    def begin(setting: Setting, folder: Path) -> Steps:
        return _steps(setting, folder, save)

    return begin


def _by_writer(save: Any) -> Callable[[Setting, Path], Steps]:
    def begin(setting: Setting, folder: Path) -> Steps:
        with datastates.open(folder, config=Config(retention="latest:3")) as repo:
            yield from _steps(
                setting, folder, lambda state, where, step: save(state, where, step, repo)
            )

    return begin


def _steps(setting: Setting, folder: Path, save: Save | None) -> Steps:
    warnings.simplefilter("ignore", UserWarning)  # that torch saves from one process
    return saving(setting, folder, save)


def _to_folder(state: dict[str, Any], folder: Path, step: int) -> object:
    saved = dcp.save(state, checkpoint_id=folder / str(step))
    shutil.rmtree(folder / str(step - _KEPT), ignore_errors=True)
    return saved


def _to_folder_later(state: dict[str, Any], folder: Path, step: int, _: Any) -> object:
    shutil.rmtree(folder / str(step - _KEPT), ignore_errors=True)
    return dcp.async_save(state, checkpoint_id=folder / str(step))


def _to_state(state: dict[str, Any], folder: Path, step: int, repo: Any) -> object:
    return dcp.save(state, storage_writer=Writer(repo, step=step))


def _to_state_later(state: dict[str, Any], folder: Path, step: int, repo: Any) -> object:
    return dcp.async_save(state, storage_writer=Writer(repo, step=step))


def _to_memory(state: dict[str, Any], folder: Path, step: int, repo: Any) -> object:
    return dcp.save(state, storage_writer=Writer(repo, step=step, until="captured"))
