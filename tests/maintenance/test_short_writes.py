"""Files of which the kernel takes only a part: what was not written whole is not called written."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Unavailable
from datastates.maintenance.backup import BACKUP, back_up
from datastates.maintenance.lease import LEASES
from datastates.system.files import hold, is_held

QUIET = Config(memory_bytes=16 << 20, durable_interval_s=None)


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """The kernel takes what lies below, and refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_backup_of_which_the_disk_takes_a_part_leaves_the_earlier_one(tmp_path: Path) -> None:
    with datastates.open(tmp_path, config=QUIET) as repo:
        with repo.track(weight=torch.zeros(3), rng=False) as run:
            run.capture()
        back_up(repo.core.database, repo.location)
        before = (tmp_path / "packs" / BACKUP).read_bytes()
        repo.tag("later", "main")
        with no_file_beyond(8192), pytest.raises(OSError, match="cannot be written"):
            back_up(repo.core.database, repo.location)
        assert (tmp_path / "packs" / BACKUP).read_bytes() == before
        assert not (tmp_path / "packs" / f".{BACKUP}").exists()
        back_up(repo.core.database, repo.location)
        assert (tmp_path / "packs" / BACKUP).read_bytes() != before


def test_a_note_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    held = hold(tmp_path / "held")
    assert held is not None
    with no_file_beyond(10):
        with pytest.raises(OSError, match="File too large") as raised:
            held.write("a uid and another uid")
        assert raised.value.errno == errno.EFBIG
        assert (tmp_path / "held").read_text() == ""
        held.write("a uid")
    assert (tmp_path / "held").read_text() == "a uid"
    held.close()


def test_a_lease_that_could_not_be_written_is_not_held(tmp_path: Path) -> None:
    with datastates.open(tmp_path, config=QUIET) as repo:
        run = "0" * 24
        with no_file_beyond(10), pytest.raises(Unavailable, match="no lease can be made"):
            repo.core.home.lease(run)
        path = tmp_path / "packs" / LEASES / run
        assert not path.exists() or not is_held(path)
