"""What upkeep does with states of several parts: after kills, damage and the loss of the
lineage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import datastates
from datastates.engine.outbox import Outbox
from datastates.lineage.query.incomplete import waiting
from datastates.lineage.states import Status, Why
from datastates.maintenance.reindex import reindex
from datastates.ranks import SoloGroup, latest
from datastates.state.digest import decode, digest_of, encode
from tests.support.ranks import Rank, problems_of, ranks_of

if TYPE_CHECKING:
    import pytest


def step(ranks: list[Rank], status: str = "durable") -> datastates.State:
    captures = [rank.capture() for rank in ranks]
    return [capture.wait(status, timeout_s=60) for capture in captures][-1]


def in_child(body: Callable[[], None]) -> None:
    """Run it in a process that is killed afterwards."""
    child = os.fork()
    if not child:
        try:
            body()
        finally:
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)


def test_the_newest_state_that_counts_is_one_of_which_every_part_verifies(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as ranks:
        states = [step(ranks) for _ in range(3)]
    pack = next((tmp_path / "packs").glob(f"{states[2].uid}.1*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    (tmp_path / "packs" / f"{states[1].uid}.0.manifest").unlink()
    with datastates.open(tmp_path) as repo:
        assert problems_of(repo, states[2]) == ["rank 1: Corrupt"]
        assert problems_of(repo, states[1]) == ["rank 0: NotFound"]
        assert latest(repo, group=SoloGroup()).uid == states[0].uid
        assert {(each.state, each.rank) for each in repo.verify().damage} == {
            (states[2].uid, 1),
            (states[1].uid, 0),
        }


def test_a_lineage_of_several_ranks_is_rebuilt_from_their_folder(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as ranks:
        states = [step(ranks), step(ranks)]
    (tmp_path / "packs" / f"{states[1].uid}.1.manifest").rename(tmp_path / "gone")
    for name in tmp_path.glob("lineage.db*"):
        name.unlink()
    report = reindex(tmp_path)
    assert report.restorable == 1
    with datastates.open(tmp_path) as repo:
        again = repo.state("main")
        assert (again.uid, again.digest, again.status) == (
            states[0].uid,
            states[0].digest,
            Status.DURABLE,
        )
        assert repo.verify(again.uid).uid == states[0].uid
        assert problems_of(repo, again) == []


def test_a_rank_that_died_before_it_said_that_its_part_is_on_disk_has_it_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        monkeypatch.setattr(Outbox, "_send_marks", lambda self, placed: None)
        with ranks_of(tmp_path, None, 2) as ranks:
            first = step(ranks, "captured")
            for rank in ranks:
                rank.repo.core.engage().runner.want(first.uid)
            written = [tmp_path / "packs" / f"{first.uid}.{rank}.manifest" for rank in range(2)]
            while not all(path.exists() for path in written):
                os.sched_yield()
            os.kill(os.getpid(), 9)

    in_child(body)
    with datastates.open(tmp_path) as repo:
        assert repo.state("main").status is Status.DURABLE
        assert problems_of(repo, repo.state("main")) == []


def test_what_waits_is_listed_and_what_will_never_be_whole_is_removed(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2, group_patience_s=0.2) as ranks:
        whole = step(ranks)
        ranks[0].capture()
        ranks[0].repo.flush()
        (said,) = ranks[1].repo.verify().partial
        assert "(branch main, step 2) waits for the parts of rank 1 of 2" in said
        part = tmp_path / "packs" / f"{whole.uid}.1.manifest"
    with datastates.open(tmp_path) as repo:
        with repo.core.reading() as session:
            assert waiting(session) == []
        given_up = next(iter(never_whole(repo)))
        like = decode(part.read_bytes(), source="the manifest")
        for rank in range(2):
            origin = msgspec.structs.replace(like.origin, uid=given_up, rank=rank)
            copied = encode(
                msgspec.structs.replace(like, origin=origin, digest=digest_of(like.content, origin))
            )
            (tmp_path / "packs" / f"{given_up}.{rank}.manifest").write_bytes(copied)
        assert repo.gc(dry_run=True).states == (given_up,)
        assert repo.gc().states == (given_up,)
        assert sorted(path.name for path in (tmp_path / "packs").glob("*.manifest")) == [
            f"{whole.uid}.{rank}.manifest" for rank in range(2)
        ]
        assert repo.verify("main").uid == whole.uid


def never_whole(repo: datastates.Repository) -> list[str]:
    with repo.core.reading() as session:
        rows = session.exec_driver_sql(
            f"SELECT state_uid FROM part WHERE status = '{Why.LATE.value}'"
        )
        return [str(row[0]) for row in rows]
