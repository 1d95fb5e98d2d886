"""States from peers whose chunks were made to have the digests of others: what a training
captures is its own bytes, now and later."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

import datastates
from datastates import Conflict, Repository
from datastates.lineage.write import clones
from tests.support.colliding import collide_somewhere
from tests.transport.clones.peers.pairs import MIB, Made

SIZE = 50_000
TOKEN = "the token of whoever may write"


def forged(seed: int = 0) -> torch.Tensor:
    """Numbers whose bytes have the digest of so many zeros."""
    data = collide_somewhere(bytes(4 * SIZE), Random(seed))
    return torch.from_numpy(np.frombuffer(bytearray(data), np.float32).copy())


def zeros() -> torch.Tensor:
    return torch.zeros(SIZE)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def holds(repo: Repository, rev: str, expected: torch.Tensor) -> bool:
    """What is loaded, and what is restored."""
    into = torch.ones(SIZE)
    repo.restore(rev, box={"w": into})
    return bits(repo.load(rev)["box"]["w"]) == bits(into) == bits(expected)


def test_a_pushed_chunk_is_not_what_a_capture_of_its_digest_refers_to(
    made: Made, url: str, tmp_path: Path
) -> None:
    attacker, victim = made.repo(), made.repo(tmp_path / "victim")
    theirs = attacker.track(rng=False, box={"w": forged()})
    theirs.capture().wait()
    peer = made.peer(victim.serve(url, is_writable=True, token=TOKEN), token=TOKEN)
    pushed = peer.push("main", repo=attacker).state

    ours = victim.track(rng=False, box={"w": zeros()})
    state = ours.capture().wait()

    assert state.bytes_new == 4 * SIZE, "its chunk has a slot of its own"
    assert holds(victim, "main", zeros())
    assert holds(victim, pushed.uid, forged())
    victim.tag("pushed", pushed.uid)
    victim.tag("ours", "main")
    victim.close()
    with datastates.open(tmp_path / "victim") as again:
        assert holds(again, "ours", zeros())
        assert holds(again, "pushed", forged())
        assert again.verify("ours").uid == state.uid


def test_a_training_that_goes_on_from_a_foreign_state_writes_its_own_bytes(
    made: Made, url: str, tmp_path: Path
) -> None:
    attacker, victim = made.repo(), made.repo(tmp_path / "victim")
    attacker.track(rng=False, box={"w": forged()}).capture().wait()
    cloned = made.peer(attacker.serve(url)).clone("main", repo=victim).state
    victim.tag("theirs", cloned.uid)
    box = {"w": forged()}
    run = victim.track(rng=False, branch="on", start="theirs", box=box)
    assert bits(box["w"]) == bits(forged())
    box["w"].zero_()
    run.capture().wait("durable")
    victim.close()
    with datastates.open(tmp_path / "victim") as again:
        assert holds(again, "on", zeros())
        assert holds(again, "theirs", forged())


def test_a_peer_s_state_is_not_made_of_chunks_that_another_peer_sent(made: Made, url: str) -> None:
    attacker, honest, victim = made.repo(), made.repo(), made.repo()
    attacker.track(rng=False, box={"w": forged()}).capture().wait()
    honest.track(rng=False, box={"w": zeros()}).capture().wait()
    made.peer(attacker.serve(url)).clone("main", repo=victim)
    cloned = made.peer(honest.serve(url)).clone("main", repo=victim)
    assert cloned.bytes_moved == 4 * SIZE
    assert holds(victim, cloned.state.uid, zeros())


def test_a_state_of_ours_cannot_be_replaced_by_one_that_is_pushed(
    made: Made, url: str, tmp_path: Path
) -> None:
    """Same uid, same digest, other bytes: while ours is in memory, which is then not asked for,
    and when it is only on disk."""
    victim = made.repo(tmp_path / "victim")
    victim.track(rng=False, box={"w": zeros()}).capture().wait("durable")
    attacker = forger(made, victim, tmp_path)
    assert (
        made.peer(victim.serve(url, is_writable=True, token=TOKEN), token=TOKEN)
        .push("main", repo=attacker)
        .bytes_moved
        == 0
    )
    assert holds(victim, "main", zeros())
    victim.close()
    again = made.repo(tmp_path / "victim")
    with pytest.raises(Conflict, match="forged"):
        made.peer(again.serve(url, is_writable=True, token=TOKEN), token=TOKEN).push(
            "main", repo=attacker
        )
    assert holds(again, "main", zeros())
    again.verify("main")


def forger(made: Made, victim: Repository, tmp_path: Path) -> Repository:
    """A copy of a repository whose packs hold other bytes of the same digest."""
    shutil.copytree(victim.location.packs.parent, tmp_path / "copy")
    (pack,) = (tmp_path / "copy" / "packs").glob("*.safetensors")
    data = bytearray(pack.read_bytes())
    at = -(-len(data.rstrip(b"\0")) // 4096) * 4096
    data[at : at + 4 * SIZE] = bits(forged())
    pack.write_bytes(data)
    return made.repo(tmp_path / "copy")


def test_only_states_of_ours_and_of_the_same_party_lend_their_chunks(made: Made, url: str) -> None:
    source, repo = made.repo(), made.repo()
    source.track(rng=False, box={"w": zeros()}).capture().wait()
    own = repo.track(rng=False, box={"w": zeros()}).capture().wait()
    server = source.serve(url)
    cloned = made.peer(server).clone("main", repo=repo).state
    with repo.core.database.read() as session:
        both = [own.uid, cloned.uid, "f" * 24]
        assert clones.trusted(session, both, party=server.url) == both[:2]
        assert clones.trusted(session, both, party="ucx://elsewhere:1") == both[:1]


def test_equal_chunks_of_a_clone_and_of_a_capture_share_their_memory(made: Made, url: str) -> None:
    source, repo = made.repo(), made.repo()
    source.track(rng=False, box={"w": torch.arange(float(MIB))}).capture().wait()
    made.peer(source.serve(url)).clone("main", repo=repo)
    state = repo.track(rng=False, box={"w": torch.arange(float(MIB))}).capture().wait()
    assert state.bytes_new == 0
