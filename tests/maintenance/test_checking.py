"""A check of everything: each flipped bit in a pack or a manifest is found, by it and by
restore, and named."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sqlalchemy import select, update

import datastates
from datastates import Config, Conflict, Repository
from datastates.errors import Corrupt, InvalidInput, Unavailable
from datastates.lineage.schema import SEAL
from datastates.maintenance.verify import Limits, check_all
from datastates.state.digest import wrap
from datastates.storage import pack_reader
from datastates.storage.local import LocalTier
from datastates.system.files import open_regular
from datastates.testing.states import part, small
from tests.support.effort import part as some_of

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """Three durable states, which no memory holds any more; a frozen tensor of 6 MiB is stored
    once."""
    frozen, weight = torch.arange(1_572_864.0), torch.zeros(300)
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as first,
        first.track(objects={"frozen": frozen}, weight=weight, rng=False) as run,
    ):
        for _ in range(3):
            weight += 1
            run.capture().wait("durable")
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


def path_of(repo: Repository, uid: str, kind: str) -> Path:
    return repo.location.packs / f"{uid}.0.{kind}"


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        at %= path.stat().st_size
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_what_is_sound_is_read_once_and_found_sound(repo: Repository) -> None:
    told: list[tuple[int, int]] = []
    found = repo.verify(on_progress=lambda *each: told.append(each))
    assert (found.states, found.damage, found.mark) == (3, (), None)
    alone = sum(
        chunk.length
        for chunk in repo.core.tiers.durable.manifest(repo.state("main").uid).content.chunks
    )
    assert alone < found.bytes < 2 * alone, "what they share was read once"
    assert told[-1][0] == found.bytes


def test_damage_of_what_states_share_is_named_for_each_of_them(repo: Repository) -> None:
    uids = [state.uid for state in repo.log("main")]
    newest = repo.core.tiers.durable.manifest(uids[0])
    shared = next(
        ref for ref in newest.refs if newest.packs[ref.pack].name == f"{uids[-1]}.0.safetensors"
    )
    flip(path_of(repo, uids[-1], "safetensors"), shared.offset + 5)
    found = repo.verify()
    assert sorted(found.hurt) == sorted(uids)
    assert {each.tensors for each in found.damage} == {("frozen",)}
    assert all(
        "fail their digest" in each.problem and each.chunk is not None for each in found.damage
    )


def replace(path: Path, other: Path, kind: str) -> None:
    """Put something else in the place of a file; ``other`` is one like it."""
    data = path.read_bytes()
    path.unlink()
    if kind == "link":
        path.symlink_to(other)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind != "missing":
        path.write_bytes(
            {
                "cut": data[:-1],
                "longer": data + b"x",
                "newer": wrap(3, b"?"),
                "swapped": other.read_bytes(),
            }[kind]
        )


@pytest.mark.parametrize("kind", ["missing", "cut", "longer", "link", "fifo", "newer", "swapped"])
def test_a_manifest_that_is_no_manifest_is_named(repo: Repository, kind: str) -> None:
    uid, other = (state.uid for state in repo.log("main", limit=2))
    replace(path_of(repo, uid, "manifest"), path_of(repo, other, "manifest"), kind)
    found = repo.verify()
    if kind in ("link", "fifo", "newer"):
        assert (found.damage, uid in found.unread[0]) == ((), True)
    else:
        (damage,) = found.damage
        assert (damage.state, damage.chunk, found.unread) == (uid, None, ())
    with pytest.raises((Corrupt, datastates.Unavailable)):
        repo.load(uid)


@pytest.mark.parametrize("kind", ["missing", "cut", "link", "fifo", "longer"])
def test_a_pack_that_is_no_pack_is_named(repo: Repository, kind: str) -> None:
    uid, other = (state.uid for state in repo.log("main", limit=2))
    path = path_of(repo, uid, "safetensors")
    replace(path, path_of(repo, other, "safetensors"), kind)
    found = repo.verify()
    assert found.hurt == (uid,)
    assert path.name in found.damage[0].problem
    with pytest.raises(Corrupt):
        repo.load(uid)


def test_a_check_goes_on_where_it_was_ended(repo: Repository) -> None:
    uids = sorted(state.uid for state in repo.log("main"))
    seen, mark = [], None
    for _ in range(3):
        found = repo.verify(since=mark, limit_s=1e-9)
        seen.append(found.states)
        mark = found.mark
    assert (seen, mark) == ([1, 1, 1], None)
    assert repo.verify(since=uids[1]).states == 1
    with pytest.raises(InvalidInput, match="leave out the state"):
        repo.verify("main", since=uids[1])  # type: ignore[call-overload]  # what nobody should ask


def test_a_state_of_several_parts_is_no_mark_before_the_last_of_them_was_read(
    repo: Repository,
) -> None:
    tier, uid = LocalTier(repo.location.packs), "0" * 24
    for rank in range(2):
        tier.put(part(uid, rank, rank))
    marks: list[str] = []
    check_all(repo.core, Limits(threads=1), on_mark=marks.append)
    assert marks == sorted({uid, *(state.uid for state in repo.log("main"))})


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_what_may_be_sound_and_cannot_be_opened_is_unread_and_not_damaged(
    repo: Repository, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    uid = repo.state("main").uid

    def refused(path: str | Path) -> int:
        if Path(path) == path_of(repo, uid, "safetensors"):
            raise OSError(number, os.strerror(number), str(path))
        return open_regular(path)

    monkeypatch.setattr(pack_reader, "open_regular", refused)
    found = repo.verify()
    assert found.damage == ()
    assert [f"{uid}.0.safetensors" in text for text in found.unread] == [True]
    assert repo.repair().repaired == ()


def test_a_state_that_nobody_was_told_of_is_checked_too(repo: Repository) -> None:
    LocalTier(repo.location.packs).put(small("stranger", 1))
    flip(repo.location.packs / "stranger.0.safetensors", -1)
    assert repo.verify().hurt == ("stranger",)


def test_every_flip_in_a_small_pack_and_manifest_is_found_by_verify_and_by_restore(
    tmp_path: Path,
) -> None:
    """All positions (in the gate a twelfth of them); in the pack: header, its padding, chunks,
    the zeros behind them."""
    weight = torch.arange(40.0)
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as first,
        first.track(weight=weight, more=[1, "x"], rng=False) as run,
    ):
        uid = run.capture(metrics={"loss": 0.5}).wait("durable").uid
    with datastates.open(tmp_path / "runs", config=QUIET) as repo:
        for kind in ("safetensors", "manifest"):
            path = path_of(repo, uid, kind)
            size = path.stat().st_size
            assert size < 32 << 10
            missed = []
            for at in some_of(range(size)):
                flip(path, at, at % 8)
                if not _is_found(repo, uid, tensor=kind == "safetensors"):
                    missed.append(at)
                flip(path, at, at % 8)
            assert missed == [], kind
        assert not repo.verify().damage


def test_every_flip_in_an_index_of_chunks_is_found_until_the_file_is_deleted(
    tmp_path: Path,
) -> None:
    """All bytes of two entries, and some of the free ones (in the gate a twelfth of them)."""
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as repo,
        repo.track(weight=torch.arange(40_000.0), rng=False) as run,
    ):
        run.capture().wait("durable")
        path = repo.location.packs / ".chunks"
        whole = path.read_bytes()
        first, *_ = (at for at in range(0, len(whole), 64) if any(whole[at : at + 64]))
        for at in [*some_of(range(first, first + 128)), *range(first + 4096, len(whole), 4099)]:
            flip(path, at, at % 8)
            (said,) = repo.verify().unread
            assert ".chunks (1 entries" in said, at
            flip(path, at, at % 8)
        assert repo.verify().unread == ()
        path.write_bytes(whole[:-1])
        assert len(repo.verify().unread) == 1
        path.unlink()
        assert repo.verify().unread == ()


def test_every_flip_in_the_identity_of_a_folder_is_found(tmp_path: Path) -> None:
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as repo,
        repo.track(weight=torch.arange(40.0), rng=False) as run,
    ):
        run.capture().wait("durable")
        path = repo.location.packs / ".identity"
    for at in range(49):
        flip(path, at, at % 4)
        try:
            with datastates.open(tmp_path / "runs", config=QUIET) as repo:
                (said,) = repo.verify().unread
        except (Conflict, Unavailable) as exc:
            said = str(exc)
        assert ".identity" in said, at
        flip(path, at, at % 4)
    with datastates.open(tmp_path / "runs", config=QUIET) as repo:
        assert repo.verify().unread == ()


def test_every_change_of_a_seal_is_found_by_verify(tmp_path: Path) -> None:
    """Each of its digits (in the gate a twelfth of them)."""
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as repo,
        repo.track(weight=torch.arange(40.0), rng=False) as run,
    ):
        uid = run.capture().wait("durable").uid
        repo.verify(uid)
        with repo.core.database.read() as session:
            sealed = session.execute(select(SEAL.c.digest)).scalar_one()
        for at in some_of(range(len(sealed))):
            changed = sealed[:at] + "0123456789abcdef"[int(sealed[at], 16) ^ 1] + sealed[at + 1 :]
            with repo.core.database.write() as session:
                session.execute(update(SEAL).values(digest=changed))
            with pytest.raises(
                Corrupt, match=f"state {uid} holds other bytes than when it was sealed"
            ):
                repo.verify(uid)
        with repo.core.database.write() as session:
            session.execute(update(SEAL).values(digest=sealed))
        assert repo.verify(uid).uid == uid


def _is_found(repo: Repository, uid: str, *, tensor: bool) -> bool:
    state = repo.state(uid)
    try:
        with repo.core.open_payload(state) as reader:
            reader.gather(0, memoryview(bytearray(160)))
    except Corrupt:
        found = check_all(repo.core, Limits(threads=1))
        return found.hurt == (uid,) and (not tensor or found.damage[0].tensors == ("weight",))
    return False
