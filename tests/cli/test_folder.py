"""What ``show`` and ``doctor`` say of a folder of packs from which another process deletes at
that moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from datastates.cli import doctor
from datastates.storage.pack import bytes_of_packs
from tests.cli.conftest import Invoke, uid


@pytest.fixture
def packs(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pack of 2 KiB and one of 1 KiB, which is deleted as soon as the folder was
    listed."""
    packs, listing = root / "packs", os.scandir
    (packs / f"{uid('1', 3)}.0.safetensors").write_bytes(bytes(2048))
    gone = packs / f"{uid('1', 4)}.0.safetensors"
    gone.write_bytes(bytes(1024))

    @contextmanager
    def scandir(folder: Any) -> Iterator[Iterator[os.DirEntry[str]]]:
        with listing(folder) as entries:
            found = list(entries)
        gone.unlink(missing_ok=True)
        yield iter(found)

    monkeypatch.setattr(os, "scandir", scandir)
    return packs


def test_stats_count_the_packs_that_are_still_there(packs: Path, invoke: Invoke) -> None:
    assert invoke("show", "--json").json["bytes_stored"] == 2048


def test_doctor_counts_the_packs_that_are_still_there(
    packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASTATES_RETENTION", "all at-most:100G")
    assert "states take 2.0 KiB" in doctor._retention(packs, free=1 << 40).detail


def test_folder_that_does_not_exist_takes_nothing(tmp_path: Path) -> None:
    assert bytes_of_packs(tmp_path / "nowhere") == 0
