"""What is damaged comes back from other processes: from their memory or from their disk, and
only the damaged chunks are moved."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

import datastates
from datastates import Repository
from datastates.errors import InvalidInput
from datastates.transport.peer import Peer
from tests.maintenance.test_repair import COUNT, QUIET, train
from tests.support import warm
from tests.support.colliding import collide_somewhere
from tests.support.ranks import ranks_of
from tests.support.records import clones_of

TOKEN = "a token of at least sixteen characters"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "runs"
    train(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


@contextmanager
def served(folder: Path) -> Iterator[Peer]:
    """A repository over TCP."""
    with (
        datastates.open(folder, config=QUIET) as theirs,
        theirs.serve("tcp://127.0.0.1:0", token=TOKEN) as server,
        datastates.connect(server.url, token=TOKEN) as peer,
    ):
        yield peer


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def uids(repo: Repository) -> list[str]:
    return [state.uid for state in repo.log("main")][::-1]


def check(repo: Repository) -> None:
    assert not repo.verify().damage
    for state in repo.log("main"):
        tree = repo.load(state)
        assert tree["weight"].tolist() == [state.step] * 300
        assert torch.equal(tree["frozen"], torch.arange(1_572_864.0))


def a_chunk(packs: Path, names: list[str]) -> None:
    flip(packs / f"{names[1]}.0.safetensors", -1)


def a_shared_chunk(packs: Path, names: list[str]) -> None:
    first = packs / f"{names[0]}.0.safetensors"
    flip(first, first.stat().st_size - 5000)


def a_manifest(packs: Path, names: list[str]) -> None:
    flip(packs / f"{names[1]}.0.manifest", 30)


def a_missing_pack(packs: Path, names: list[str]) -> None:
    (packs / f"{names[0]}.0.safetensors").unlink()


@pytest.mark.parametrize("damage", [a_chunk, a_shared_chunk, a_manifest, a_missing_pack])
def test_what_is_damaged_comes_back_from_a_peer_and_says_whose_it_is(
    folder: Path, made: Path, tmp_path: Path, damage: Callable[[Path, list[str]], None]
) -> None:
    with (
        datastates.open(folder, config=QUIET) as repo,
        served(Path(shutil.copytree(made, tmp_path / "theirs"))) as peer,
    ):
        damage(repo.location.packs, uids(repo))
        hurt = repo.verify().hurt
        assert hurt
        assert {each.state for each in repo.repair().hurt} == set(hurt)
        done = repo.repair(peers=[peer])
        assert (set(done.repaired), done.hurt) == (set(hurt), ())
        check(repo)
        for uid in hurt:
            with repo.core.reading() as session:
                (came,) = clones_of(session, uid)
            assert came.source == peer.urls[0]
            assert (
                came.bytes_moved < 16 << 20
                if damage is a_missing_pack or damage is a_manifest
                else came.bytes_moved <= 4 << 20
            )
        repo.gc()
        check(repo)


def test_memory_of_another_process_gives_what_no_disk_has(tmp_path: Path) -> None:
    """Their disk lost it, and their memory has it still."""
    frozen, weight = torch.arange(1_572_864.0), torch.zeros(300)
    with (
        datastates.open(tmp_path / "theirs", config=QUIET) as theirs,
        theirs.track(objects={"frozen": frozen}, weight=weight, rng=False) as run,
    ):
        for _ in range(COUNT):
            weight += 1
            run.capture().wait("durable")
        shutil.copytree(tmp_path / "theirs", tmp_path / "runs")
        for path in theirs.location.packs.glob("*.safetensors"):
            path.unlink()
        with (
            theirs.serve("tcp://127.0.0.1:0", token=TOKEN) as server,
            datastates.connect(server.url, token=TOKEN) as peer,
            datastates.open(tmp_path / "runs", config=QUIET) as repo,
        ):
            a_shared_chunk(repo.location.packs, uids(repo))
            assert len(repo.repair(peers=[peer]).repaired) == COUNT
            check(repo)


def test_one_peer_that_has_nothing_and_one_that_is_gone_hinder_nobody(
    folder: Path, made: Path, tmp_path: Path
) -> None:
    datastates.open(tmp_path / "empty", config=QUIET).close()
    with ExitStack() as stack:
        repo = stack.enter_context(datastates.open(folder, config=QUIET))
        a_chunk(repo.location.packs, uids(repo))
        with served(tmp_path / "empty") as gone:
            pass
        empty = stack.enter_context(served(tmp_path / "empty"))
        (hurt,) = repo.repair(peers=[gone, empty]).hurt
        assert "no other place has chunk" in hurt.problem
        whole = stack.enter_context(served(Path(shutil.copytree(made, tmp_path / "theirs"))))
        assert repo.repair(peers=[gone, empty, whole]).hurt == ()
        check(repo)


def test_forged_bytes_of_a_peer_do_not_come_into_a_state_that_was_sealed(
    folder: Path, tmp_path: Path
) -> None:
    theirs = Path(shutil.copytree(folder, tmp_path / "theirs"))
    with datastates.open(folder, config=QUIET) as repo:
        uid = uids(repo)[0]
        repo.verify(uid)  # which seals it
        manifest = repo.core.tiers.durable.manifest(uid)
        index = max(
            range(len(manifest.refs)), key=lambda each: manifest.content.chunks[each].length
        )
        ref, chunk = manifest.refs[index], manifest.content.chunks[index]
        path = theirs / "packs" / f"{uid}.0.safetensors"
        data = bytearray(path.read_bytes())
        data[ref.offset : ref.offset + chunk.length] = collide_somewhere(
            memoryview(data)[ref.offset : ref.offset + chunk.length], Random(0)
        )
        path.write_bytes(data)
        flip(repo.location.packs / path.name, ref.offset + 3)
        with served(theirs) as peer:
            hurt = {each.state: each.problem for each in repo.repair(peers=[peer]).hurt}
        assert "other bytes than when it was sealed" in hurt[uid]


def test_a_part_of_a_state_of_several_ranks_comes_from_a_peer(tmp_path: Path) -> None:
    with ranks_of(tmp_path / "runs", None, 2) as ranks:
        captures = [rank.capture() for rank in ranks]
        state = [capture.wait("durable", timeout_s=60) for capture in captures][-1]
    theirs = Path(shutil.copytree(tmp_path / "runs", tmp_path / "theirs"))
    with datastates.open(tmp_path / "runs", config=QUIET) as repo, served(theirs) as peer:
        pack = next(repo.location.packs.glob(f"{state.uid}.1*.safetensors"))
        flip(pack, pack.stat().st_size - 1)
        assert [(each.state, each.rank) for each in repo.verify().damage] == [(state.uid, 1)]
        assert repo.repair(peers=[peer]).repaired == (state.uid,)
        assert not repo.verify().damage
        assert repo.verify(state.uid).uid == state.uid


def test_what_is_no_peer_is_refused(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        for wrong in ("tcp://127.0.0.1:1", repo, 5, [None]):
            with pytest.raises(InvalidInput, match=r"give peers, as peers=|give a list"):
                repo.repair(peers=wrong)  # type: ignore[arg-type]  # what nobody should give


_KILLED = """
import sys
import datastates
from datastates.testing import crash_at
config = datastates.Config(memory_bytes=64 << 20, durable_interval_s=None, on_step=crash_at(sys.argv[4]))
with datastates.open(sys.argv[1], config=config) as repo, datastates.connect(sys.argv[2], token=sys.argv[3]) as peer:
    repo.repair(peers=[peer])
"""


@pytest.mark.parametrize("step", ["pack-moved", "pack-renamed", "manifest-replaced"])
def test_a_repair_that_is_killed_is_done_again(
    folder: Path, made: Path, tmp_path: Path, step: str
) -> None:
    with served(Path(shutil.copytree(made, tmp_path / "theirs"))) as peer:
        with datastates.open(folder, config=QUIET) as repo:
            a_shared_chunk(repo.location.packs, uids(repo))
        command = [sys.executable, "-c", _KILLED, str(folder), peer.urls[0], TOKEN, step]
        done = warm.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 137, done.stderr
        with datastates.open(folder, config=QUIET) as repo:
            repo.repair(peers=[peer])
            check(repo)
            repo.gc()
            check(repo)
