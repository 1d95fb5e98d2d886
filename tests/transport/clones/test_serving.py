"""What a repository gives out: who may come, what is pinned, and what of it outlives the process
that served it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import datastates
from datastates import Config, Conflict, NotFound, Repository, Status, Unavailable
from datastates.config import BackPressure
from datastates.errors import (
    Cancelled,
    Closed,
    Corrupt,
    Disconnected,
    InvalidInput,
    OverBudget,
    PeerFault,
    Unauthorized,
)
from datastates.lineage.query.names import replicas_of
from datastates.lineage.write import clones
from datastates.state import digest
from datastates.storage.memory import MemoryTier
from datastates.transport import loop, serving
from datastates.transport.contract import Sink, Source
from datastates.transport.protocol import Offer, RefRecord
from datastates.transport.serving import RepositoryStore
from datastates.transport.session import Session, SessionFeed
from datastates.transport.untrusted import record_of, records_of, state_of, states_of
from tests.support.forge import Forge, forge
from tests.support.records import clones_of
from tests.support.secrets_kept import keep

SLOT = 4 << 20
TOKEN = "a token that others do not know"
QUIET = Config(memory_bytes=16 * SLOT, durable_interval_s=None)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """Of two states in memory; the branch is at the second."""
    with datastates.open(tmp_path / "repo", config=QUIET) as opened:
        weights = torch.zeros(SLOT // 4)
        run = opened.track(weights={"it": weights}, rng=False)
        for number in range(2):
            weights.fill_(number)
            run.capture(metrics={"loss": float(number)}).wait()
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "other", config=QUIET) as opened:
        yield opened


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with forge(tmp_path_factory.mktemp("forge")) as opened:
        yield opened


# --- who may come ---------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["ucx://0.0.0.0:0", "ucx://[::]:0", "ucx://example.org:0"])
def test_other_machines_are_served_only_with_a_token(
    repo: Repository, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATASTATES_TOKEN", raising=False)
    with pytest.raises(
        InvalidInput, match=r"there is no token: set DATASTATES_TOKEN, pass token_file="
    ):
        repo.serve(url)


@pytest.mark.parametrize("how", ["token", "token_file", "environment"])
def test_the_token_comes_from_where_it_is_kept(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    keep(tmp_path / "token", f"{TOKEN}\n")
    monkeypatch.setenv("DATASTATES_TOKEN", TOKEN if how == "environment" else "")
    options: Any = {
        "token": {"token": TOKEN},
        "token_file": {"token_file": tmp_path / "token"},
        "environment": {},
    }[how]
    with repo.serve("memory://", **options) as server:
        with datastates.connect(server.url, **options) as peer:
            assert peer.state("main").uid == repo.state("main").uid
        monkeypatch.delenv("DATASTATES_TOKEN")
        with pytest.raises(Unauthorized, match="set DATASTATES_TOKEN"):
            datastates.connect(server.url)
        with pytest.raises(Unauthorized):
            datastates.connect(server.url, token=TOKEN[:-1] + "x")
        assert (server.stats().refused, server.stats().peers_ever) == (2, 1)


def test_a_token_that_can_be_guessed_is_refused(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="fewer than 16 can be guessed"):
        repo.serve("memory://", token="short")


def test_an_address_that_is_taken_is_said_to_be(repo: Repository) -> None:
    with repo.serve("memory://here"), pytest.raises(Unavailable, match="memory://here is taken"):
        repo.serve("memory://here")
    with repo.serve("memory://here") as again:
        assert again.url == "memory://here"


def test_a_server_ends_with_its_repository_and_only_once(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        server = repo.serve("memory://")
        peer = datastates.connect(server.url)
    assert "(closed)" in repr(server)
    server.close()
    with pytest.raises(Disconnected):
        peer.refs()
    peer.close()
    with pytest.raises(Closed):
        repo.serve("memory://")


def test_a_forked_child_neither_serves_nor_ends_what_its_parent_serves(repo: Repository) -> None:
    with repo.serve("ucx://127.0.0.1:0") as server, datastates.connect(server.url) as peer:
        child = os.fork()
        if child == 0:
            try:
                repo.serve("memory://")
            except Closed:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        target = torch.ones(SLOT // 4)
        peer.clone("main~1", weights={"it": target})
        assert not target.any()


def test_each_peer_of_a_server_has_the_data_plane_that_it_asked_for(repo: Repository) -> None:
    """A process that has moved bytes over UCX names its worker to every later peer, also to
    those that take none over UCX."""
    for data in ("ucx", "auto", "tcp", "ucx"):
        with (
            repo.serve("ucx://127.0.0.1:0") as server,
            datastates.connect(server.url, data=data) as peer,
        ):
            target = torch.ones(SLOT // 4)
            peer.clone("main~1", weights={"it": target})
            assert not target.any(), data


# --- what is given out ----------------------------------------------------------------------------


def test_a_capture_in_flight_is_waited_for(repo: Repository) -> None:
    weights = torch.zeros(SLOT // 4)
    run = repo.track(weights={"it": weights}, rng=False, branch="slow", durable_interval_s=1e9)
    with repo.serve("memory://") as server, datastates.connect(server.url) as peer:
        for step in range(20):
            weights.fill_(step)
            taken = run.capture(step=step)
            assert peer.state("slow").uid == taken.uid


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_source_is_a_state_without_places_whose_bytes_stay(
    repo: Repository, is_on_disk: bool
) -> None:
    state = repo.state("main")
    if is_on_disk:
        assert repo.core.running is not None
        assert repo.core.tiers.captured is not None
        repo.core.running.want(state.uid)
        repo.core.running.drain()
        repo.core.tiers.captured.remove(state.uid)
    source = RepositoryStore(repo.core).open(state.uid)
    manifest = digest.decode(source.manifest, source="the test")

    assert (manifest.origin.uid, manifest.digest, manifest.packs, manifest.refs) == (
        state.uid,
        state.digest,
        (),
        (),
    )
    chunks = [b"".join(pieces(source, index)) for index in range(len(source.lengths))]
    assert [digest.chunk_digest(chunk) for chunk in chunks] == [
        chunk.digest for chunk in manifest.content.chunks
    ]
    assert tuple(map(len, chunks)) == source.lengths
    source.close()
    source.close()


def test_a_state_that_is_cloned_keeps_its_memory_until_it_is_done(tmp_path: Path) -> None:
    with datastates.open(tmp_path, config=replace(QUIET, memory_bytes=4 * SLOT)) as repo:
        weights = torch.zeros(SLOT // 4)
        run = repo.track(weights={"it": weights}, rng=False)
        first = run.capture().wait()
        source = RepositoryStore(repo.core).open(first.uid)
        assert repo.core.running is not None
        assert repo.core.arena is not None
        for number in range(1, 20):
            weights.fill_(number)
            run.capture().wait()
            # now, not within a second: the first state has no name any more
            repo.core.running.refs_changed()
        assert repo.state(first.uid).status is Status.EVICTED
        assert not any(pieces(source, 0)[0].cast("Q"))
        held = repo.core.arena.available
        source.close()
        assert repo.core.arena.available == held + SLOT


class Pinning:
    """A reader that opens every state that it finds, and lets go of none."""

    def __init__(self, server: datastates.Server) -> None:
        self.server, self.feeds, self.seen = server, list[SessionFeed](), set[str]()
        self.session = loop.run(Session.connect(server.url))

    def open_all(self) -> None:
        for ref in loop.run(self.session.refs()):
            if ref.state not in self.seen:
                self.seen.add(ref.state)
                _, feed = loop.run(self.session.open(ref.state))
                assert feed is not None
                self.feeds.append(feed)

    def read(self, number: int) -> bytes:
        """The first chunk of a state that was opened."""
        memory = bytearray(self.feeds[number].lengths[0])
        loop.run(self.feeds[number].receive({0: [memoryview(memory)]}, lambda *_: None))
        return bytes(memory)


@pytest.mark.parametrize("back_pressure", ["wait", "skip"])
def test_a_reader_that_holds_states_open_does_not_stop_a_training(
    tmp_path: Path, back_pressure: str
) -> None:
    config = Config(
        memory_bytes=8 * SLOT, durable_interval_s=None, back_pressure=BackPressure(back_pressure)
    )
    weights = torch.zeros(SLOT // 4)
    with (
        datastates.open(tmp_path / "busy", config=config) as busy,
        busy.serve("memory://") as server,
    ):
        run = busy.track(weights={"it": weights}, rng=False)
        reader, taken = Pinning(server), 0
        for number in range(40):
            weights.fill_(number)
            capture = run.capture()
            with suppress(Unavailable):
                capture.wait(timeout_s=60)
                taken += 1
            if number == 1:
                busy.tag("kept", "main")
                busy.state("kept")
                busy.core.drain()
            reader.open_all()
        # one that would have to wait is skipped
        assert taken >= (40 if back_pressure == "wait" else 20)
        assert server.stats().pins_revoked >= 10
        with pytest.raises(Unavailable, match="clone again"):
            reader.read(5)
        assert reader.read(1) == bytes(torch.ones(SLOT // 4).numpy()), "it is on disk"
        assert reader.read(len(reader.feeds) - 1), "nobody needed its memory"
        loop.run(reader.session.close())


def test_a_byte_that_rots_on_disk_is_found_by_who_receives_it(
    repo: Repository, tmp_path: Path
) -> None:
    uid = repo.state("main").uid
    repo.close()
    pack = next((tmp_path / "repo" / "packs").glob(f"{uid}*.safetensors"))
    raw = bytearray(pack.read_bytes())
    raw[-100] ^= 1
    pack.write_bytes(raw)
    target = torch.full((SLOT // 4,), 5.0)
    with (
        datastates.open(tmp_path / "repo") as again,
        again.serve("memory://") as server,
        datastates.connect(server.url) as peer,
    ):
        clone = partial(peer.clone, "main", weights={"it": target}, atomic=True)
        with pytest.raises(Corrupt, match=r"chunk \d+ is damaged at memory://"):
            clone()
    assert target.eq(5).all()


def test_pages_of_log_and_find_meet_without_gap_or_repeat(repo: Repository) -> None:
    store = RepositoryStore(repo.core)
    first = store.log("main", 1, None)
    assert first.next is not None
    last = store.log("main", 1, first.next)

    assert [state.uid for page in (first, last) for state in page.states] == [
        state.uid for state in repo.log("main")
    ]
    assert last.next is None
    found = store.find("order by step", 1, None)
    pages = (found, store.find("order by step", 1, found.next))
    assert [state for page in pages for state in states_of(page.states, page.runs)] == repo.log(
        "main"
    )[::-1]


def test_question_of_a_peer_that_takes_too_long_is_given_up(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RepositoryStore(repo.core)
    monkeypatch.setattr(serving, "ANSWER_S", 0.0)
    asked: list[Callable[[], object]] = [
        lambda: store.find("", 10, None), lambda: store.log("main", 10, None), lambda: store.resolve("main"), store.refs
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(InvalidInput, match="ask for less"):
            ask()


# --- what is taken in -----------------------------------------------------------------------------


def offer_of(repo: Repository, **changed: object) -> Offer:
    state = repo.state("main")
    source = RepositoryStore(repo.core).open(state.uid)
    source.close()
    with repo.core.reading() as session:
        record = msgspec.structs.replace(record_of(session, state), **changed)
        ancestry, made_by = records_of(session, repo.log("main")[1:])
    return Offer(source.manifest, record, ancestry, (), made_by)


def test_a_push_whose_manifest_is_another_state_is_refused_before_memory_is_taken(
    repo: Repository, other: Repository
) -> None:
    store = RepositoryStore(other.core, is_writable=True)
    for changed in ({"uid": secrets.token_hex(12)}, {"digest": secrets.token_hex(32)}):
        with pytest.raises(InvalidInput, match="is another state's: push again"):
            store.receive(offer_of(repo, **changed))
    offer = offer_of(repo)
    with pytest.raises(Corrupt):
        store.receive(msgspec.structs.replace(offer, manifest=offer.manifest[:-9] + b"\0" * 9))
    with pytest.raises(InvalidInput, match="takes no states"):
        RepositoryStore(other.core).receive(offer)
    assert other.core.running is None, "no memory was taken"


def test_a_push_whose_ancestry_contradicts_ours_is_refused_and_leaves_nothing(
    repo: Repository, other: Repository
) -> None:
    genuine = offer_of(repo)
    forged = msgspec.structs.replace(genuine.ancestry[0], digest="f" * 64)
    with repo.serve("memory://"), other.serve("memory://", is_writable=True):
        store = RepositoryStore(other.core, is_writable=True)
        offer = msgspec.structs.replace(genuine, ancestry=(forged,))
        sink = store.receive(offer)
        fill(repo, sink)
        with other.core.database.write() as session:  # by another process, meanwhile
            clones.import_ancestry(session, [state_of(state) for state in genuine.ancestry], {})
        with pytest.raises(Conflict, match="forged"):
            store.receive(offer)
        with pytest.raises(Conflict, match="forged"):
            store.received(offer, sink)
        store.abandon(offer, sink)
    assert other.core.tiers.captured is not None
    assert other.core.arena is not None
    assert list(other.core.tiers.captured.uids()) == []
    assert other.core.arena.available == other.core.arena.capacity
    with pytest.raises(NotFound):
        other.state(genuine.state.uid)


EVIL: dict[str, Callable[[Offer], dict[str, Any]]] = {
    "name of a tag": lambda offer: {"refs": (RefRecord("bad name", "tag", offer.state.uid),)},
    "message of a tag": lambda offer: {
        "refs": (RefRecord("fine", "tag", offer.state.uid, "a\0b"),)
    },
    "tag of another state": lambda offer: {"refs": (RefRecord("fine", "tag", "ab" * 12),)},
    "tags without number": lambda offer: {
        "refs": tuple(RefRecord(f"t{n}", "tag", offer.state.uid) for n in range(1001))
    },
    "status": lambda offer: {"state": msgspec.structs.replace(offer.state, status="odd")},
    "status of an ancestor": lambda offer: {
        "ancestry": (msgspec.structs.replace(offer.ancestry[0], status="odd"),)
    },
    "message": lambda offer: {"state": msgspec.structs.replace(offer.state, message="a\0b")},
    "metric": lambda offer: {
        "ancestry": (msgspec.structs.replace(offer.ancestry[0], metrics={"": 1.0}),)
    },
    "attribute": lambda offer: {
        "state": msgspec.structs.replace(offer.state, attributes={"a": "\0"})
    },
    "step": lambda offer: {"state": msgspec.structs.replace(offer.state, step=1 << 63)},
    "micro step": lambda offer: {"state": msgspec.structs.replace(offer.state, micro_step=1 << 63)},
    "uid": lambda offer: {"ancestry": (msgspec.structs.replace(offer.ancestry[0], uid="x"),)},
    "two digests": lambda offer: {
        "ancestry": (msgspec.structs.replace(offer.state, digest="f" * 64),)
    },
}


@pytest.mark.parametrize("what", EVIL)
def test_everything_about_a_push_is_checked_before_memory_is_taken(
    repo: Repository, other: Repository, what: str
) -> None:
    store, genuine = RepositoryStore(other.core, is_writable=True), offer_of(repo)
    with pytest.raises((InvalidInput, Conflict, PeerFault)):
        store.receive(msgspec.structs.replace(genuine, **EVIL[what](genuine)))
    assert other.core.running is None, "no memory was taken"


def test_pushes_leave_a_training_the_memory_that_it_needs_even_when_nothing_can_be_written(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, pushed = torch.zeros(SLOT // 2), torch.zeros(SLOT // 4)
    with datastates.open(tmp_path / "busy", config=replace(QUIET, memory_bytes=10 * SLOT)) as busy:
        run = busy.track(weights={"it": weights}, rng=False)
        run.capture().wait()  # of two slots: six are the training's

        def full(*arguments: object, **options: object) -> None:
            raise Unavailable("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(busy.core.runner().writer, "put_all", full)
            with (
                busy.serve("memory://", is_writable=True, timeout_s=2.0) as server,
                datastates.connect(server.url) as peer,
            ):
                source = repo.track(weights={"it": pushed}, rng=False, branch="pushed")
                for number in range(4):
                    pushed.fill_(number + 0.5)
                    peer.push(source.capture().wait().uid, repo=repo)
                pushed.fill_(100)
                with pytest.raises(Unavailable, match="push again later"):
                    peer.push(source.capture().wait().uid, repo=repo)
                with pytest.raises(OverBudget, match=f"{4 * SLOT} of {10 * SLOT} are not needed"):
                    peer.push(
                        repo.track(
                            weights={"it": torch.rand(5 * SLOT // 4)}, rng=False, branch="big"
                        )
                        .capture()
                        .wait()
                        .uid,
                        repo=repo,
                    )
            for number in range(5):
                weights.fill_(number)
                assert run.capture().wait(timeout_s=60).step == number + 2
        assert busy.state("main").step == 6


def test_a_push_moves_only_what_is_missing_and_says_so(repo: Repository, other: Repository) -> None:
    with (
        other.serve("memory://", is_writable=True) as server,
        datastates.connect(server.url) as peer,
    ):
        peer.push("main~1", repo=repo)
        weights = torch.zeros(SLOT // 4)  # as in main~1
        run = repo.track(
            weights={"it": weights, "more": torch.ones(SLOT // 4)}, rng=False, branch="fork"
        )
        fork = run.capture().wait()
        told: list[tuple[int, int]] = []
        pushed = peer.push(
            "fork", repo=repo, on_progress=lambda done, total: told.append((done, total))
        )

        assert (pushed.state.uid, pushed.bytes_moved, dict(pushed.by_source)) == (
            fork.uid,
            SLOT,
            {server.url: SLOT},
        )
        assert told == [(SLOT, 2 * SLOT), (SLOT, SLOT)]
    with other.core.database.read() as session:
        assert [clone.bytes_moved for clone in clones_of(session, fork.uid)] == [SLOT]


def test_a_push_that_is_cancelled_at_once_lets_go_of_the_state(
    repo: Repository, other: Repository
) -> None:
    with (
        other.serve("memory://", is_writable=True) as server,
        datastates.connect(server.url) as peer,
    ):
        for _ in range(20):
            transfer = peer.begin_push("main", repo=repo)
            transfer.cancel()
            with suppress(Cancelled):
                transfer.wait()
    memory = repo.core.tiers.captured
    assert isinstance(memory, MemoryTier)
    assert [held.readers for held in memory._states.values() if held.readers] == []


def pieces(source: Source, index: int) -> list[memoryview]:
    """A chunk of a source."""

    async def ask() -> list[memoryview]:
        return list(await source.chunk(index))

    return asyncio.run(ask())


def fill(repo: Repository, sink: Sink) -> None:
    with repo.core.open_payload(repo.state("main")) as reader:
        for index in list(sink.missing()):
            for buffer in sink.buffers(index) or ():
                buffer[:] = reader.chunk(index)
            assert sink.accept(index)


# --- one database, two processes ------------------------------------------------------------------


def train_and_serve(say: Callable[..., object], folder: str) -> None:
    """Two captures in memory, served until somebody ends this."""
    with datastates.open(folder, config=QUIET) as repo:
        weights = torch.zeros(SLOT // 4)
        run = repo.track(weights={"it": weights}, rng=False)
        for number in range(2):
            weights.fill_(number + 1)
            run.capture().wait()
        say(repo.serve().url)
        threading.Event().wait()


def look(say: Callable[..., object], folder: str) -> None:
    """Open a repository, which settles what the dead left, and say what there is."""
    with datastates.open(folder, config=QUIET) as repo:
        for state in repo.find("order by step"):
            with repo.core.database.read() as session:
                say(
                    state.step,
                    state.status,
                    *(held.run for held in replicas_of(session, state.uid)),
                )
        say(*(f"{ref.name}={ref.state}" for ref in repo.refs()))


def test_a_clone_on_the_same_database_outlives_the_process_that_captured_the_state(
    smith: Forge, tmp_path: Path
) -> None:
    with datastates.open(tmp_path, config=QUIET) as repo:
        source = smith.start(
            "tests.transport.clones.test_serving:train_and_serve", folder=str(tmp_path)
        )
        with datastates.connect(source.lines.readline().strip()) as peer:
            state = peer.clone("main", repo=repo).state
        source.kill(signal.SIGKILL)
        source.wait()
        looked = smith.start("tests.transport.clones.test_serving:look", folder=str(tmp_path))
        first, second, names = looked.say()
        assert looked.wait() == 0

        assert first == "1 lost"
        assert second == f"2 captured {repo.core.run_uid}"
        assert names == f"main={state.uid}"
        assert repo.state("main").status is Status.CAPTURED
        assert repo.load("main")["weights"]["it"].eq(2).all()
    with datastates.open(tmp_path) as repo:
        assert repo.verify("main").status is Status.DURABLE, (
            "a branch's head, which the one that holds it writes at its end"
        )
