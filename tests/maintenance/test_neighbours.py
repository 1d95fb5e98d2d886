"""The other lineages of a folder: the states that they name, read from what is new in their
chronicles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Repository
from datastates.lineage.chronicle import Entry
from datastates.maintenance import lease
from datastates.maintenance.chronicle import CHRONICLES, Chronicle, chronicles, read_chronicle
from datastates.maintenance.lease import Neighbours

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


def captured(folder: Path, packs: Path, count: int = 2) -> list[str]:
    with (
        datastates.open(folder, packs=packs, config=QUIET) as repo,
        repo.track(weight=torch.zeros(3), rng=False) as run,
    ):
        return [run.capture().wait("durable").uid for _ in range(count)]


def named(repo: Repository, found: Neighbours, uids: list[str]) -> dict[str, str]:
    with repo.core.reading() as session:
        return found.naming(session, uids)


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    """A folder of packs for two lineages, ``first`` and ``second``."""
    for name in ("first", "second"):
        datastates.open(tmp_path / name, packs=tmp_path / "packs").close()
    return tmp_path / "packs"


def test_a_lineage_alone_in_its_folder_reads_nothing(
    packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = captured(packs.parent / "first", packs)
    monkeypatch.delattr(lease, "read_chronicle")
    with datastates.open(packs.parent / "first", packs=packs, config=QUIET) as repo:
        assert named(repo, Neighbours(packs), ours) == {}


def test_only_what_is_new_in_the_chronicle_of_another_lineage_is_read(
    packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = captured(packs.parent / "first", packs)
    theirs = captured(packs.parent / "second", packs)
    starts: list[int] = []

    def counted(
        packs: Path, lineage: str, start: int, *, take: Callable[[Entry], None]
    ) -> Chronicle:
        starts.append(start)
        found = read_chronicle(packs, lineage, start, take=take)
        assert found.entries == ()  # they are taken one by one, and none of them is kept
        return found

    monkeypatch.setattr(lease, "read_chronicle", counted)
    with datastates.open(packs.parent / "first", packs=packs, config=QUIET) as repo:
        found = Neighbours(packs)
        for _ in range(2):
            assert named(repo, found, [*ours, *theirs]).keys() == set(theirs)
        assert starts == [0]
        (path,) = [
            each
            for each in (packs / CHRONICLES).iterdir()
            if each.name in named(repo, found, theirs)[theirs[0]]
        ]
        size = path.stat().st_size
        more = captured(packs.parent / "second", packs)
        assert named(repo, found, [*ours, *theirs, *more]).keys() == {*theirs, *more}
        assert starts == [0, size]


@pytest.mark.parametrize("kind", ["flipped", "newer", "link"])
def test_a_chronicle_that_cannot_be_read_whole_may_name_every_state(packs: Path, kind: str) -> None:
    ours = captured(packs.parent / "first", packs)
    (own,) = chronicles(packs)
    captured(packs.parent / "second", packs)
    (path,) = [each for each in (packs / CHRONICLES).iterdir() if each.name != own.lineage]
    whole = path.read_bytes()
    data = bytearray(whole)
    with datastates.open(packs.parent / "first", packs=packs, config=QUIET) as repo:
        assert named(repo, Neighbours(packs), ours) == {}
        path.unlink()
        if kind == "link":
            path.symlink_to("/etc/hostname")
        else:
            data[60 if kind == "flipped" else 8] ^= 2
            path.write_bytes(data)
        found = Neighbours(packs)
        assert ["may name it" in why for why in named(repo, found, ours).values()] == [True] * len(
            ours
        )
        path.unlink()
        path.write_bytes(whole)
        assert named(repo, found, ours) == {}
