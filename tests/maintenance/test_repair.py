"""What is damaged comes back from where else it is, byte for byte; and what does not is said,
with what to restore instead."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

import datastates
from datastates import Config, NotFound, Repository
from datastates.state.digest import encode
from datastates.storage.local import LocalTier
from tests.support.colliding import collide_somewhere

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)
COUNT = 3


def train(folder: Path, config: Config = QUIET, start: float = 0) -> list[str]:
    """Three durable states, the oldest first; a frozen tensor of 6 MiB is stored once."""
    frozen, weight = torch.arange(1_572_864.0), torch.full((300,), float(start))
    with (
        datastates.open(folder, config=config) as repo,
        repo.track(objects={"frozen": frozen}, weight=weight, rng=False) as run,
    ):
        uids = []
        for _ in range(COUNT):
            weight += 1
            uids.append(run.capture().wait("durable").uid)
        return uids


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "runs"
    train(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def uids(repo: Repository) -> list[str]:
    return [state.uid for state in repo.log("main")][::-1]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def check(repo: Repository) -> None:
    assert not repo.verify().damage
    for state in repo.log("main"):
        tree = repo.load(state)
        assert tree["weight"].tolist() == [state.step] * 300
        assert torch.equal(tree["frozen"], torch.arange(1_572_864.0))


@pytest.mark.parametrize("kind", ["chunk", "shared", "header", "cut", "missing", "everything"])
def test_damaged_packs_come_back_from_another_folder(folder: Path, made: Path, kind: str) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        names = uids(repo)
        first = repo.location.packs / f"{names[0]}.0.safetensors"
        if kind == "everything":
            for path in repo.location.packs.glob("*.safetensors"):
                path.unlink()
        elif kind == "missing":
            first.unlink()
        elif kind == "cut":
            first.write_bytes(first.read_bytes()[:5000])
        elif kind == "header":
            flip(first, 20)
        elif kind == "chunk":
            flip(repo.location.packs / f"{names[1]}.0.safetensors", -1)
        else:
            flip(first, first.stat().st_size - 5000)
        assert repo.verify().damage
        done = repo.repair(source=made)
        assert done.hurt == ()
        assert done.repaired
        check(repo)
        repo.gc()
        check(repo)


def test_a_damaged_header_needs_no_other_place(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        flip(repo.location.packs / f"{uids(repo)[0]}.0.safetensors", 20)
        assert len(repo.repair().repaired) == COUNT
        check(repo)


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("kind", ["flipped", "missing"])
def test_a_damaged_manifest_comes_back(
    folder: Path, made: Path, kind: str, is_sealed: bool
) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        if is_sealed:
            repo.verify(uids(repo)[1])
        path = repo.location.packs / f"{uids(repo)[1]}.0.manifest"
        path.unlink() if kind == "missing" else flip(path, 30)
        (hurt,) = repo.repair().hurt
        assert (hurt.state, hurt.nearest) == (uids(repo)[1], uids(repo)[0])
        assert "no other place has it" in hurt.problem
        assert repo.repair(source=made / "packs").repaired == (uids(repo)[1],)
        check(repo)
        assert repo.gc().bytes_freed < 16 << 10, "what it shares was not written again"
        check(repo)


def test_memory_of_this_process_gives_what_it_has(tmp_path: Path) -> None:
    frozen, weight = torch.arange(1_572_864.0), torch.zeros(300)
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as repo,
        repo.track(objects={"frozen": frozen}, weight=weight, rng=False) as run,
    ):
        for _ in range(COUNT):
            weight += 1
            run.capture().wait("durable")
        first = repo.location.packs / f"{uids(repo)[0]}.0.safetensors"
        flip(first, first.stat().st_size - 5000)
        assert len(repo.repair().repaired) == COUNT
        check(repo)


class Other(LocalTier):
    """Another folder, as a user's tier."""

    name = "other"


def test_further_tiers_give_what_they_have(tmp_path: Path) -> None:
    def config() -> Config:
        return Config(
            memory_bytes=64 << 20, durable_interval_s=None, tiers=[Other(tmp_path / "other")]
        )

    train(tmp_path / "runs", config())
    with datastates.open(tmp_path / "runs", config=config()) as repo:
        for path in repo.location.packs.glob("*.safetensors"):
            flip(path, -1)
        assert len(repo.repair().repaired) == COUNT
        check(repo)


def test_what_is_nowhere_else_stays_hurt_and_names_the_nearest_ancestor(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        names = uids(repo)
        flip(repo.location.packs / f"{names[2]}.0.safetensors", -1)
        (hurt,) = repo.repair().hurt
        assert (hurt.state, hurt.nearest) == (names[2], names[1])
        assert "no other place has chunk" in hurt.problem
        assert hurt.nearest is not None
        repo.restore(hurt.nearest, weight=torch.zeros(300), frozen=torch.zeros(1_572_864))


@pytest.mark.parametrize("kind", ["safetensors", "manifest"])
def test_another_state_of_the_same_uid_gives_nothing(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    train(tmp_path / "other", start=7.0)
    with datastates.open(folder, config=QUIET) as repo:
        uid = uids(repo)[2]
        flip(repo.location.packs / f"{uid}.0.{kind}", -1 if kind == "safetensors" else 30)
        with datastates.open(tmp_path / "other", config=QUIET) as other:
            theirs = uids(other)[2]
            manifest = other.core.tiers.durable.manifest(theirs)
        packs = tmp_path / "other" / "packs"
        # whole, and forged: all of it agrees with itself
        origin = msgspec.structs.replace(manifest.origin, uid=uid)
        (packs / f"{uid}.0.manifest").write_bytes(
            encode(msgspec.structs.replace(manifest, origin=origin))
        )
        assert repo.repair(source=tmp_path / "other").hurt[0].state == uid
        with pytest.raises(NotFound, match="there is no folder"):
            repo.repair(source=tmp_path / "nothing")


def test_forged_bytes_of_the_same_digest_do_not_come_into_a_state_that_was_sealed(
    folder: Path, tmp_path: Path
) -> None:
    forged = Path(shutil.copytree(folder, tmp_path / "forged"))
    with datastates.open(folder, config=QUIET) as repo:
        uid = uids(repo)[0]
        repo.verify(uid)  # which seals it
        manifest = repo.core.tiers.durable.manifest(uid)
        index = max(
            range(len(manifest.refs)), key=lambda each: manifest.content.chunks[each].length
        )
        ref, chunk = manifest.refs[index], manifest.content.chunks[index]
        path = forged / "packs" / f"{uid}.0.safetensors"
        data = bytearray(path.read_bytes())
        data[ref.offset : ref.offset + chunk.length] = collide_somewhere(
            memoryview(data)[ref.offset : ref.offset + chunk.length], Random(0)
        )
        path.write_bytes(data)
        flip(repo.location.packs / path.name, ref.offset + 3)
        hurt = {each.state: each.problem for each in repo.repair(source=forged).hurt}
        assert "other bytes than when it was sealed" in hurt[uid]
