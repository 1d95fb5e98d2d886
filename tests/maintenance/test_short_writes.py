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
from datastates.lineage.database import Database
from datastates.maintenance.chronicle import CHRONICLES, catch_up, chronicles, tell_anew
from datastates.maintenance.lease import LEASES
from datastates.maintenance.location import DATABASE
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


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A lineage of three states whose folder was told of them."""
    weight = torch.zeros(3)
    with (
        datastates.open(tmp_path, config=QUIET) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        for _ in range(3):
            run.capture()
    database = Database(f"sqlite:///{tmp_path / DATABASE}")
    with database.read():
        yield database
    database.close()


def states_told(folder: Path) -> int:
    return sum(
        len(entry.states)
        for chronicle in chronicles(folder / "packs")
        for entry in chronicle.entries
    )


def test_a_chronicle_of_which_the_disk_took_a_part_is_told_again(
    database: Database, tmp_path: Path
) -> None:
    (told,) = (tmp_path / "packs" / CHRONICLES).iterdir()
    told.unlink()
    with no_file_beyond(200), pytest.raises(OSError, match="File too large"):
        catch_up(database, tmp_path / "packs")
    assert told.stat().st_size == 200
    assert catch_up(database, tmp_path / "packs")
    assert states_told(tmp_path) == 3
    assert chronicles(tmp_path / "packs")[0].damaged_bytes == 0


def test_a_chronicle_stays_where_a_new_one_does_not_fit(database: Database, tmp_path: Path) -> None:
    with no_file_beyond(200), pytest.raises(OSError, match="File too large"):
        tell_anew(database, tmp_path / "packs")
    assert states_told(tmp_path) == 3


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
