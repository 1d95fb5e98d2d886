"""A repository for states that are made of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Repository


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The last bits of a sum depend on how many threads make it."""
    torch.set_num_threads(1)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """An open repository that writes only what it is asked to."""
    config = Config(memory_bytes=256 << 20, durable_interval_s=None)
    with datastates.open(tmp_path / "runs", config=config) as opened:
        yield opened
