"""Files in a repository that are no regular files, and folders whose names must be durable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import datastates
from datastates import DatastatesError, Unavailable


@pytest.mark.parametrize(
    "name", ["packs", "packs/.identity", "packs/.lock", "packs/leases", "lineage.db"]
)
def test_a_repository_with_a_fifo_in_it_is_refused_by_name(tmp_path: Path, name: str) -> None:
    fifo = tmp_path / name
    fifo.parent.mkdir(exist_ok=True)
    os.mkfifo(fifo)
    with pytest.raises(DatastatesError, match=str(fifo)), datastates.open(tmp_path) as repo:
        repo.track(weight=torch.zeros(3)).capture().wait("durable")


def test_pruning_with_a_fifo_in_place_of_its_lock_is_refused_by_name(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        with repo.track(weight=torch.zeros(3)) as run:
            run.capture().wait("durable")
        os.mkfifo(tmp_path / "packs" / ".prune")
        with pytest.raises(Unavailable, match=r"packs/\.prune cannot be locked"):
            repo.prune("latest:1")


def test_the_name_of_a_new_repository_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = set[str](), os.fsync

    def noting(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    with datastates.open(tmp_path / "a" / "runs"):
        assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "runs")} <= synced
