"""A repository for what a framework trains, and what makes a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import datastates
from datastates import Config, Repository

if TYPE_CHECKING:
    from .trainers import Told


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository, which writes what it is told to."""
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=64 << 20, durable_interval_s=None)
    ) as opened:
        yield opened


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Told]:
    """Makes a Trainer of ``trainers`` with these callbacks and options."""
    from .trainers import trainer  # not every test of this folder has transformers

    def made(*callbacks: Any, **options: Any) -> Told:
        return trainer(tmp_path / "out", callbacks=callbacks, **options)

    return made
