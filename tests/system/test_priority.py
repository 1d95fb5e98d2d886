"""Threads that write checkpoints give way at the disk, and no other thread does."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config
from datastates.system.threads import LOWEST, yield_disk

IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


def disk_priority(thread: int = 0) -> int | None:
    """The priority of a thread by its native id (0: this one); None if the kernel gives none."""
    number = IOPRIO_GET.get(os.uname().machine) if sys.platform == "linux" else None
    found = -1 if number is None else int(ctypes.CDLL(None).syscall(number, 1, thread))
    return None if found < 0 else found


needs_priorities = pytest.mark.skipif(
    disk_priority() is None, reason="this system says nothing of priorities at the disk"
)


@needs_priorities
def test_a_thread_that_yields_is_last_at_the_disk_and_alone_in_that() -> None:
    before, found = disk_priority(), list[object]()

    def run() -> None:
        found.extend([disk_priority(), yield_disk(), disk_priority()])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before, True, LOWEST]
    assert disk_priority() == before


@needs_priorities
def test_the_writer_yields_to_the_training(tmp_path: Path) -> None:
    before = disk_priority()
    config = Config(memory_bytes=32 << 20, durable_interval_s=None)
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(rng=False, box={"w": torch.ones(3)}) as run,
    ):
        run.capture().wait("durable")
        writers = [
            thread.native_id
            for thread in threading.enumerate()
            if thread.name == "datastates-writer"
        ]
        assert [disk_priority(writer or 0) for writer in writers] == [LOWEST] * len(writers)
        assert writers
    assert disk_priority() == before


def test_where_the_system_knows_no_priorities_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert not yield_disk()
