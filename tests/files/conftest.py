"""Two repositories between which bundles are carried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

import datastates
from datastates import Config, Repository


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def opened(folder: Path) -> Repository:
    """A repository that writes no state to disk until it is asked to."""
    return datastates.open(
        folder, config=Config(memory_bytes=128 << 20, durable_interval_s=None, direct_io=False)
    )


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """Where bundles come from."""
    with opened(tmp_path / "ours") as repository:
        yield repository


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Repository]:
    """Where they go to."""
    with opened(tmp_path / "theirs") as repository:
        yield repository


def rewrite(folder: Path, change: Any) -> None:
    """Change the lineage, and its digest too: as somebody would who means to."""
    plain = json.loads((folder / "lineage.json").read_text(encoding="utf-8"))
    change(plain)
    body = json.dumps(plain).encode()
    (folder / "lineage.json").write_bytes(body)
    (folder / "lineage.blake3").write_text(blake3(body).hexdigest(), encoding="ascii")
