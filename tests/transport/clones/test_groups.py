"""Clones of states that several ranks hold: into one process, and into the ranks of another job."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import datastates
from datastates import Config, Status
from datastates.errors import (
    Corrupt,
    DatastatesError,
    InvalidInput,
    NotFound,
    PeerFault,
    Unauthorized,
    Unavailable,
    Unsupported,
)
from datastates.ranks import TorchGroup
from datastates.state.digest import decode, encode
from datastates.state.geometry import local_of
from datastates.transport import loop, same_host, serving
from datastates.transport.protocol import Reached
from datastates.transport.session import Session
from datastates.transport.state_parts import Holder
from tests.support.jobs import Ranks, Say, job, run
from tests.transport.clones.processes import MIB, make, same

HERE = "tests.transport.clones.test_groups"
TOKEN = "a token that is long enough for a job"
CHUNKS = 8
WIRE = {same_host.SWITCH: "0", "DATASTATES_TOKEN": TOKEN}
BUDGET = 3 * (CHUNKS + 4) * 4 * MIB


def config() -> Config:
    return Config(memory_bytes=BUDGET, durable_interval_s=None)


def a_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Linear(96, 50)


def bits(model: nn.Module) -> list[bytes]:
    found = [local_of(parameter.detach()) for parameter in model.parameters()]
    return [local.numpy().tobytes() for local in found if local is not None]


# --- what ranks do --------------------------------------------------------------------------------


def serve(folder: str, say: Say, *, wait: str = "captured", wrong: str = "") -> None:
    """Capture a state, and serve it until the end; say how much was sent whenever SIGUSR1 asks."""
    if dist.get_rank() == 1 and wrong:
        {"killed": stall, "chunk": lie_about_chunks, "part": lie_about_the_part}[wrong]()
    model = a_model()
    fully_shard(model)
    with datastates.open(folder, config=config()) as repo:
        with repo.track(model=model, weights=make(0, CHUNKS), branch="other") as other:
            other.capture().wait()
        tracker = repo.track(model=model, weights=make(1, CHUNKS))
        uid = tracker.capture().wait(wait).uid
        server = repo.serve("tcp://127.0.0.1:0", group=tracker.group)
        signal.signal(signal.SIGUSR1, lambda *_: say("sent", server.stats().bytes_sent))
        say("serving", server.url, uid)
        threading.Event().wait()  # the test ends it


def stall() -> None:
    """The second chunk of this process, and those behind it, never leave: it is killed before."""
    chunk = serving.StateSource.chunk

    async def stalling(self: serving.StateSource, index: int) -> Any:
        if index:
            await asyncio.Event().wait()
        return await chunk(self, index)

    serving.StateSource.chunk = stalling  # type: ignore[method-assign]  # a process that hangs


def lie_about_chunks() -> None:
    """Bytes of this process come changed."""
    chunk = serving.StateSource.chunk

    async def lying(self: serving.StateSource, index: int) -> Any:
        return [
            memoryview(bytes(piece[:-1]) + bytes([piece[-1] ^ 1]))
            for piece in await chunk(self, index)
        ]

    serving.StateSource.chunk = lying  # type: ignore[method-assign]  # a process that is not honest
    serving.StateSource.is_whole = lambda self, index, pieces: True  # type: ignore[method-assign]


def lie_about_the_part() -> None:
    """This process's part of a state is that of another state, whose manifest agrees with
    itself."""
    open_part = serving.RepositoryStore.open_part

    def lying(self: serving.RepositoryStore, uid: str, rank: int) -> Any:
        other = self._core.state("other").uid
        source = open_part(self, other, rank)
        manifest = decode(source.manifest, source="the test")
        source.manifest = encode(
            msgspec.structs.replace(
                manifest, origin=msgspec.structs.replace(manifest.origin, uid=uid)
            )
        )
        return source

    # a process that is not honest
    serving.RepositoryStore.open_part = lying  # type: ignore[method-assign]


def take(url: str, say: Say, *, misfit: bool = False) -> None:
    """Clone the state that is served, all ranks at once."""
    rank, group = dist.get_rank(), TorchGroup()
    model, tensors = nn.Linear(95, 50) if misfit and rank == 1 else a_model(), make(2, CHUNKS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fully_shard(model)
    seen: list[tuple[int, int]] = []
    with datastates.connect(url) as peer:
        try:
            cloned = peer.clone(
                "main",
                model=model,
                weights=tensors,
                group=group,
                on_progress=lambda *said: seen.append(said),
            )
        except DatastatesError as exc:
            say(
                "failed",
                exc.kind,
                same(tensors, make(2, CHUNKS)),
                not any(map(any, bits(model))),
                str(exc)[:1000],
            )
            return
    wanted = a_model()
    fully_shard(wanted)
    say(
        "cloned",
        same(tensors, make(1, CHUNKS)),
        bits(model) == bits(wanted),
        cloned.bytes_moved,
        len(cloned.by_source),
    )
    assert seen[-1][0] == seen[-1][1] == cloned.bytes_moved


# --- into one process -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WIRE.items():
        monkeypatch.setenv(name, value)


def served(ranks: Ranks) -> tuple[list[str], str]:
    """Where each rank serves, and the uid of the state."""
    said = [ranks.heard(rank, "serving").split() for rank in range(ranks.count)]
    return [words[1] for words in said], said[0][2]


def assert_nothing_is_left(repo: datastates.Repository, uid: str) -> None:
    memory = repo.core.tiers.captured
    assert memory is not None
    assert memory.slots_held == 0
    with pytest.raises(NotFound):
        repo.state(uid)


@pytest.mark.parametrize("size", [2, 3])
def test_one_process_takes_each_part_from_the_rank_that_has_it(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(size, f"{HERE}:serve", folder=str(tmp_path / "job"), environ=WIRE) as ranks:
        urls, uid = served(ranks)
        tensors, model, seen = make(2, CHUNKS), nn.Linear(96, 50), list[tuple[int, int]]()
        with datastates.connect(urls[-1]) as peer:
            cloned = peer.clone(
                "main",
                model=model,
                weights=tensors,
                on_progress=lambda *said: seen.append(said),
            )
            assert same(tensors, make(1, CHUNKS))
            assert bits(model) == bits(a_model())
            assert {f"tcp://{name}" for name in cloned.by_source} == set(urls), (
                "each rank gave its part, found by one address"
            )
            assert seen[-1] == (cloned.bytes_moved, cloned.bytes_moved)
            for rank in range(size):
                ranks.kill(rank, signal.SIGUSR1)
                sent = int(ranks.heard(rank, "sent").split()[1])
                assert sent == cloned.by_source[urls[rank].removeprefix("tcp://")] > 0
            with datastates.open(tmp_path / "mine", memory_bytes=BUDGET) as repo:
                state = peer.clone("main", repo=repo).state
                assert (state.uid, state.world_size, state.status) == (uid, size, Status.CAPTURED)
                assert state.digest == peer.state("main").digest
                # whoever has all parts serves them too, near as well
                monkeypatch.setenv(same_host.SWITCH, "1")
                with repo.serve(token=TOKEN) as again, datastates.connect(again.url) as second:
                    fresh = make(3, CHUNKS)
                    moved = second.clone(uid, weights=fresh, atomic=False)
                    assert same(fresh, make(1, CHUNKS))
                    assert len(moved.by_source) == 1
                repo.tag("kept", uid)
            with datastates.open(tmp_path / "job", memory_bytes=BUDGET) as shared:
                # which knows the state already
                assert peer.clone("main", repo=shared).bytes_moved > 0
                assert same(shared.load(uid)["weights"], make(1, CHUNKS))
                assert not shared.core.tiers.durable.has(uid), "it came into memory"
    with datastates.open(tmp_path / "mine") as repo:  # and it was made durable, every part of it
        assert repo.state("kept").status is Status.DURABLE
        assert same(repo.load("kept")["weights"], make(1, CHUNKS))
        repo.verify("kept")


@pytest.mark.parametrize("wrong", ["killed", "chunk"])
def test_part_whose_rank_is_gone_or_lies_comes_from_another_one_that_reaches_it(
    tmp_path: Path, wrong: str
) -> None:
    with job(
        2, f"{HERE}:serve", folder=str(tmp_path), wait="durable", wrong=wrong, environ=WIRE
    ) as ranks:
        urls, _ = served(ranks)

        def on_progress(done: int, total: int) -> None:
            if done >= 2 * 4 * MIB and wrong == "killed":
                ranks.kill(1)

        tensors = make(2, CHUNKS)
        with datastates.connect(urls[0], timeout_s=20) as peer:
            cloned = peer.clone("main", weights=tensors, on_progress=on_progress)
    assert same(tensors, make(1, CHUNKS))
    assert cloned.by_source[urls[0].removeprefix("tcp://")] > CHUNKS * 4 * MIB / 2, (
        "rank 0 reached the rest in the folder of packs"
    )


@pytest.mark.parametrize("how", ["killed", "chunk", "part"])
def test_clone_of_which_a_part_cannot_be_had_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, how: str
) -> None:
    with job(2, f"{HERE}:serve", folder=str(tmp_path / "job"), wrong=how, environ=WIRE) as ranks:
        urls, uid = served(ranks)

        def on_progress(done: int, total: int) -> None:
            if done >= 2 * 4 * MIB and how == "killed":
                ranks.kill(1)

        tensors = make(2, CHUNKS)
        expected: Mapping[str, tuple[type[DatastatesError], str]] = {
            "killed": (Unavailable, f"the part of rank 1 of 2 of state {uid} cannot be had"),
            "chunk": (Corrupt, f"the part of rank 1 of 2 of state {uid} cannot be had"),
            "part": (PeerFault, f"sent parts that make another state than {uid[:10]}"),
        }
        kind, said = expected[how]
        with (
            datastates.connect(urls[0], timeout_s=20) as peer,
            datastates.open(tmp_path / "mine", memory_bytes=BUDGET) as repo,
        ):
            repo.core.engage()
            if how != "killed":
                with pytest.raises(kind, match=said):
                    peer.clone("main", repo=repo)
                assert_nothing_is_left(repo, uid)
            with pytest.raises(kind, match=said):
                peer.clone("main", weights=tensors, atomic=True, on_progress=on_progress)
            assert same(tensors, make(2, CHUNKS))
            if how == "killed":  # from the beginning
                with pytest.raises(
                    Unavailable,
                    match=rf"nobody has the part of rank 1: .*{urls[1]} does not answer",
                ):
                    peer.clone(uid, repo=repo)
                assert_nothing_is_left(repo, uid)


def test_rank_keeps_its_own_part_and_nobody_learns_of_others_without_the_token(
    tmp_path: Path,
) -> None:
    with job(2, f"{HERE}:serve", folder=str(tmp_path), environ=WIRE) as ranks:
        urls, uid = served(ranks)
        for token in ("", "another token of the same length or so"):
            with pytest.raises(Unauthorized), datastates.connect(urls[0], token=token or b"x" * 16):
                pass
        with datastates.connect(urls[0]) as peer:
            reached = loop.run(peer.sources.first(lambda session: session.reach(uid)))
            assert reached == Reached(bytes([0, 255]), (urls[1],))
            with pytest.raises(Unsupported, match="a clone as a whole takes states of one part"):
                loop.run(peer.sources.first(lambda session: session.open(uid)))
            with pytest.raises(InvalidInput, match="leave chain=True out"):
                peer.clone("main", weights=make(2, CHUNKS), chain=True)


# --- into several ---------------------------------------------------------------------------------


def test_parts_of_two_ranks_go_to_the_ranks_of_another_job_each_byte_once(tmp_path: Path) -> None:
    with job(2, f"{HERE}:serve", folder=str(tmp_path), environ=WIRE) as ranks:
        urls, uid = served(ranks)
        for size in (3, 2):
            said = run(size, f"{HERE}:take", url=urls[0], environ=WIRE)
            words = [lines[0].split() for lines in said]
            assert [each[:3] for each in words] == [["cloned", "True", "True"]] * size
            moved = [int(each[3]) for each in words]
            whole = CHUNKS * 4 * MIB
            assert whole <= sum(moved) < whole + 9 * 4 * MIB, (
                "what several want left the sources once"
            )
            assert max(moved) < whole / size + 3 * 4 * MIB
        misfit = run(2, f"{HERE}:take", url=urls[0], misfit=True, environ=WIRE)
        assert [lines[0].split()[:4] for lines in misfit] == [
            ["failed", "invalid-input", "True", "True"]
        ] * 2, "all failed, none has changed"
        assert "rank 1 of 2 could not clone main" in misfit[0][0]
        assert uid


def test_state_of_one_process_goes_to_the_ranks_of_a_job_in_equal_shares(tmp_path: Path) -> None:
    with (
        datastates.open(tmp_path, config=config()) as repo,
        repo.track(model=a_model(), weights=make(1, CHUNKS)) as tracker,
    ):
        tracker.capture().wait()
        with repo.serve(token=TOKEN) as server:
            said = run(2, f"{HERE}:take", url=server.url, environ=WIRE)
            words = [lines[0].split() for lines in said]
            assert [each[:3] for each in words] == [["cloned", "True", "True"]] * 2
            moved = [int(each[3]) for each in words]
            assert max(moved) - min(moved) <= 2 * 4 * MIB
            assert CHUNKS * 4 * MIB <= sum(moved) < (CHUNKS + 3) * 4 * MIB
            assert server.stats().bytes_sent == sum(moved)
            alone, fresh = TOKEN, make(2, CHUNKS)
            with datastates.connect(server.url, token=alone) as peer:
                with pytest.raises(InvalidInput, match="name them, as in clone"):
                    peer.clone("main", repo=repo, group=_Two())
                with pytest.raises(InvalidInput, match="call clone"):
                    peer.begin_clone("main", weights=fresh, group=_Two())


class _Two(datastates.ranks.SoloGroup):
    """A group of two of which nobody asks anything."""

    size = 2


# --- whom a source names --------------------------------------------------------------------------


class _Naming:
    """A session with a source beyond this machine, which names others."""

    identity = None
    remote = ("10.0.0.2", 4711)

    def __init__(self, *others: str) -> None:
        self.others = others

    async def reach(self, uid: str) -> Reached:
        return Reached(b"\0\0", self.others)

    async def close(self) -> None:
        pass


def test_what_a_source_names_is_dialled_under_the_rules_for_chains() -> None:
    named = (
        "tcp://127.0.0.1:22",
        "tcp://169.254.169.254:80",
        "tcp://0.0.0.0:1",
        "tcp://inside:1",
        "http://10.0.0.3:80",
        "tcp://10.0.0.3:5",
    )
    session: Any = _Naming(*named)

    async def connect(url: str) -> Session:
        found: Session = session
        return found

    assert loop.run(Holder("tcp://10.0.0.2:4711", connect).reach("x", 2)) == ["tcp://10.0.0.3:5"]
    with pytest.raises(PeerFault, match="tells of 2 parts"):
        loop.run(Holder("tcp://10.0.0.2:4711", connect).reach("x", 3))
