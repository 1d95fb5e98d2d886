"""Whatever dies, stops or lies while a clone is under way: an error in time, a destination that
is as it was or says so, and no leak."""

from __future__ import annotations

import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Peer, Repository, Transfer
from datastates.errors import (
    Cancelled,
    Dirty,
    Disconnected,
    InvalidInput,
    NotFound,
    Unauthorized,
    Unavailable,
)
from datastates.transport.data_connection import TcpTransport
from datastates.transport.protocol import FIRST_FRAME_BYTES, MAGIC, PROTOCOL_VERSION, Hello, encode
from datastates.transport.receive_objects import ObjectsSink
from datastates.transport.registry import transport_for
from tests.support.forge import Forge
from tests.transport.clones.processes import (
    AT_ONCE_S,
    MIB,
    PATIENCE_S,
    TIMEOUT_S,
    Receiver,
    Served,
    Start,
    bounded,
    eventually,
    make,
    quiet_config,
    same,
)

pytestmark = pytest.mark.usefixtures("small_requests")

CHUNKS = 16
PACE_S = 0.005
CHUNK = 4 * MIB

Act = Callable[[], object]
Progress = Callable[[int, int], None]


def at_chunk(count: int, act: Act) -> Progress:
    """A progress callback that acts once, when so many chunks are here."""
    pending = [act]

    def on_progress(done: int, total: int) -> None:
        if done >= count * CHUNK and pending:
            pending.pop()()

    return on_progress


@contextmanager
def fails_as_it_should(
    is_atomic: bool, mine: dict[str, torch.Tensor], seconds: float
) -> Iterator[Callable[[int, Act], Progress]]:
    """The clone inside fails within seconds of what is done to it by what this gives, which is
    ``at_chunk``.

    The destination is as it was, or says that it is not.
    """
    old, done_at = {name: tensor.clone() for name, tensor in mine.items()}, list[float]()

    def act_at(count: int, act: Act) -> Progress:
        def do() -> None:
            done_at.append(time.monotonic())
            act()

        return at_chunk(count, do)

    with pytest.raises(Disconnected if is_atomic else Dirty) as failure:
        yield act_at
    took = time.monotonic() - done_at[0]
    assert took < seconds, f"it took {took:.2f} s, and may take {seconds} s"
    if is_atomic:
        assert same(mine, old)
    else:
        assert isinstance(failure.value.__cause__, Disconnected)
        assert "weights" in str(failure.value)


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_killed_source_is_found_at_once(start: Start, is_atomic: bool) -> None:
    source, mine = start(pace_s=PACE_S), make(7, CHUNKS)
    with (
        datastates.connect(source.url, timeout_s=PATIENCE_S) as peer,
        fails_as_it_should(is_atomic, mine, AT_ONCE_S) as at,
    ):
        peer.clone(
            "main",
            weights=mine,
            atomic=is_atomic,
            on_progress=at(4, lambda: source.signal(signal.SIGKILL)),
        )


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_stopped_source_is_found_in_time_and_writes_nothing_when_it_goes_on(
    start: Start, is_atomic: bool
) -> None:
    source, mine = start(pace_s=PACE_S), make(7, CHUNKS)
    with datastates.connect(source.url, timeout_s=TIMEOUT_S) as peer:
        with fails_as_it_should(is_atomic, mine, TIMEOUT_S + AT_ONCE_S) as at:
            peer.clone(
                "main",
                weights=mine,
                atomic=is_atomic,
                on_progress=at(4, lambda: source.signal(signal.SIGSTOP)),
            )
        marker = torch.full((CHUNK // 4,), -1.0)
        for tensor in mine.values():
            tensor.copy_(marker)
        source.signal(signal.SIGCONT)
        eventually(lambda: source.facts()["pins"] == "0", AT_ONCE_S, source.facts)
        assert all(torch.equal(tensor, marker) for tensor in mine.values())
        peer.clone("main", weights=mine, atomic=is_atomic)
    assert same(mine, source.tensors)


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_source_that_is_closed_says_so(start: Start, is_atomic: bool) -> None:
    source, mine = start(pace_s=0.05), make(7, CHUNKS)
    told = threading.Thread(target=source.ask, args=("close",))
    with (
        datastates.connect(source.url, timeout_s=PATIENCE_S) as peer,
        fails_as_it_should(is_atomic, mine, AT_ONCE_S) as at,
    ):
        peer.clone("main", weights=mine, atomic=is_atomic, on_progress=at(2, told.start))
    told.join()
    assert source.ask("facts")[4] == "pins=0"


def test_a_destination_that_takes_its_time_is_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, mine = start(), make(7, CHUNKS)
    pause, accept = threading.Event(), ObjectsSink.accept

    def slow(self: ObjectsSink, index: int) -> bool:
        pause.wait(1.5 * TIMEOUT_S if index == 3 else 0.05)
        return accept(self, index)

    monkeypatch.setattr(ObjectsSink, "accept", slow)
    with (
        datastates.connect(source.url, timeout_s=TIMEOUT_S) as peer,
        bounded(1.5 * TIMEOUT_S + 2 * AT_ONCE_S),
    ):
        peer.clone("main", weights=mine, atomic=False)
    assert same(mine, source.tensors)
    release(source, AT_ONCE_S)


def test_a_process_whose_transport_is_held_up_is_given_up_like_one_that_stopped(
    start: Start,
) -> None:
    source, mine = start(pace_s=4 * PACE_S, timeout_s=TIMEOUT_S), make(7, CHUNKS)
    pause = threading.Event()
    with datastates.connect(source.url, timeout_s=TIMEOUT_S) as peer:
        # the data plane of a new source takes a second, then sends all at once
        peer.clone("main", weights=make(7, CHUNKS))
        with fails_as_it_should(True, mine, 2 * TIMEOUT_S + AT_ONCE_S) as at:
            peer.clone(
                "main",
                weights=mine,
                atomic=True,
                on_progress=at(3, lambda: pause.wait(2 * TIMEOUT_S)),
            )
        release(source, AT_ONCE_S)
        peer.clone("main", weights=mine, atomic=True)
    assert same(mine, source.tensors)


def release(source: Served, within_s: float) -> None:
    """Nobody is there any more, and nothing is pinned."""
    eventually(
        lambda: (facts := source.facts())["peers"] == facts["pins"] == "0", within_s, source.facts
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_lets_go_of_a_receiver_that_died_or_stopped_and_serves_the_next(
    smith: Forge, start: Start, number: int
) -> None:
    source, mine = start(pace_s=PACE_S, timeout_s=TIMEOUT_S), make(7, CHUNKS)
    clone_once(source, mine)
    eventually(lambda: source.facts()["peers"] == "0", AT_ONCE_S)
    before = source.facts()
    with Receiver(smith, source, number, at=4) as receiver:
        eventually(lambda: source.facts()["ever"] == "4", AT_ONCE_S)
        if number == signal.SIGKILL:
            assert receiver.wait() == -signal.SIGKILL
        release(source, TIMEOUT_S + AT_ONCE_S)
        clone_once(source, mine)
        eventually(lambda: source.facts()["peers"] == "0", AT_ONCE_S)
    eventually(
        lambda: (
            (facts := source.facts())["threads"] == before["threads"] and not facts["connections"]
        ),
        AT_ONCE_S,
        source.facts,
    )


def clone_once(source: Served, mine: dict[str, torch.Tensor]) -> None:
    for tensor in mine.values():
        tensor.zero_()
    with datastates.connect(source.url, timeout_s=PATIENCE_S) as peer:
        peer.clone("main", weights=mine, atomic=False)
    assert same(mine, source.tensors)


# --- who is not let in ----------------------------------------------------------------------------


def test_a_wrong_token_is_refused(start: Start) -> None:
    source = start(token="a token of these tests")
    for token in ("another token of these", None):
        with bounded(AT_ONCE_S), pytest.raises(Unauthorized):
            datastates.connect(source.url, token=token, timeout_s=PATIENCE_S)
    with datastates.connect(
        source.url, token="a token of these tests", timeout_s=PATIENCE_S
    ) as peer:
        assert [ref.name for ref in peer.refs()] == ["main"]
    assert source.facts()["refused"] == "2"


KNOCK_S = 4.0  # how long a handshake may take, where it is waited for
NOISE = random.Random(3).randbytes(100_000)
HELLO = encode(Hello(MAGIC, PROTOCOL_VERSION, bytes(32)))


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    ("sent", "gate"),
    [
        pytest.param(
            framed(encode(Hello(MAGIC, PROTOCOL_VERSION + 1, bytes(32)))),
            PATIENCE_S,
            id="another version",
        ),
        pytest.param(
            framed(encode(Hello(b"another magic"[: len(MAGIC)], PROTOCOL_VERSION, bytes(32)))),
            PATIENCE_S,
            id="another protocol",
        ),
        pytest.param(framed(NOISE[:500]), PATIENCE_S, id="noise in a frame"),
        pytest.param(NOISE, PATIENCE_S, id="noise"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", PATIENCE_S, id="another program"),
        pytest.param(struct.pack(">I", FIRST_FRAME_BYTES + 1), PATIENCE_S, id="too long"),
        pytest.param(struct.pack(">I", 0xFFFFFFFF), PATIENCE_S, id="far too long"),
        pytest.param(framed(HELLO)[:-5], KNOCK_S, id="half a frame"),
        pytest.param(framed(HELLO), KNOCK_S, id="half a handshake"),
        pytest.param(b"", KNOCK_S, id="nothing"),
    ],
    indirect=["gate"],
)
def test_what_is_no_peer_is_turned_away_and_the_server_goes_on(gate: Served, sent: bytes) -> None:
    before = int(gate.facts()["refused"])
    host, port = gate.url.removeprefix("ucx://").split(":")
    with (
        bounded(KNOCK_S + AT_ONCE_S),
        socket.create_connection((host, int(port)), timeout=KNOCK_S + AT_ONCE_S) as end,
    ):
        end.sendall(sent)
        try:
            while end.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        eventually(lambda: int(gate.facts()["refused"]) == before + 1, AT_ONCE_S)
    with bounded(AT_ONCE_S), datastates.connect(gate.url, timeout_s=PATIENCE_S) as peer:
        assert peer.state("main").uid == gate.uid


@pytest.fixture(scope="module")
def gate(
    request: pytest.FixtureRequest, smith: Forge, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server for those who knock only; it takes whoever says nothing for so long for gone."""
    with Served(
        smith, tmp_path_factory.mktemp("gate"), chunks=1, timeout_s=request.param
    ) as source:
        yield source


# --- what is asked for goes away ------------------------------------------------------------------


def test_a_state_that_is_removed_while_it_is_cloned_was_pinned_and_comes_whole(
    start: Start,
) -> None:
    source, mine = start(pace_s=0.02), make(7, CHUNKS)
    told = threading.Thread(target=source.ask, args=("remove",))
    with datastates.connect(source.url, timeout_s=PATIENCE_S) as peer:
        peer.clone("main", weights=mine, atomic=False, on_progress=at_chunk(2, told.start))
        told.join()
        assert same(mine, source.tensors)
        with bounded(AT_ONCE_S), pytest.raises(Unavailable, match=source.uid[:10]):
            peer.clone("main", weights=mine)
    assert same(mine, source.tensors)


# --- afterwards -----------------------------------------------------------------------------------


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "mine", config=quiet_config(CHUNKS)) as opened:
        yield opened


def test_what_is_half_new_is_not_captured_until_another_clone_heals_it(
    start: Start, repo: Repository
) -> None:
    source, mine = start(pace_s=PACE_S), make(7, CHUNKS)
    run = repo.track(weights=mine, rng=False)
    run.capture().wait()
    with datastates.connect(source.url, timeout_s=PATIENCE_S) as peer, pytest.raises(Dirty):
        peer.clone(
            "main",
            weights=mine,
            atomic=False,
            on_progress=at_chunk(4, lambda: source.signal(signal.SIGKILL)),
        )
    assert not same(mine, make(7, CHUNKS))
    with pytest.raises(Dirty):
        run.capture()
    clone_once(start("other", seed=2), mine)
    run.capture().wait()
    assert same(repo.load("main")["weights"], make(2, CHUNKS))


def test_of_two_sources_the_other_finishes_what_the_first_began(start: Start) -> None:
    first = start("first", pace_s=PACE_S)
    second = start("second", pace_s=20 * PACE_S, twin_of=first.url)
    mine, pending = make(7, CHUNKS), [first]

    def kill_the_first_once_it_has_brought_something(done: int, total: int) -> None:
        if pending and done > int(second.facts()["sent"]):
            pending.pop().signal(signal.SIGKILL)

    with (
        datastates.connect([first.url, second.url], timeout_s=PATIENCE_S) as peer,
        bounded(AT_ONCE_S),
    ):
        cloned = peer.clone(
            first.uid,
            weights=mine,
            atomic=False,
            on_progress=kill_the_first_once_it_has_brought_something,
        )
    assert not pending
    assert same(mine, first.tensors)
    assert cloned.bytes_moved == CHUNKS * CHUNK
    assert len(cloned.by_source) == 2


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_data_connection_that_breaks_is_made_anew(start: Start, is_atomic: bool) -> None:
    source, mine, broken = start(pace_s=PACE_S), make(7, CHUNKS), list[int]()
    with datastates.connect(source.url, timeout_s=PATIENCE_S) as peer, bounded(AT_ONCE_S):
        on_progress = at_chunk(4, lambda: broken.append(break_data_connections(source)))
        cloned = peer.clone("main", weights=mine, atomic=is_atomic, on_progress=on_progress)
    assert broken[0] > 0
    assert same(mine, source.tensors)
    assert cloned.bytes_moved == CHUNKS * CHUNK


def break_data_connections(source: Served) -> int:
    """Shut down every connection of this process over which bytes travel; how many that were."""
    transport = transport_for(source.url)
    assert isinstance(transport, TcpTransport)
    return transport.cut()


@pytest.mark.parametrize("is_atomic", [True, False])
def test_what_was_verified_is_not_moved_again_by_a_resumed_clone(
    start: Start, is_atomic: bool
) -> None:
    first = start("first", pace_s=PACE_S)
    second = start("second", twin_of=first.url)
    mine = make(7, CHUNKS)
    with (
        datastates.connect(first.url, timeout_s=PATIENCE_S) as peer,
        fails_as_it_should(is_atomic, mine, AT_ONCE_S) as at,
    ):
        transfer = peer.begin_clone(
            first.uid,
            weights=mine,
            atomic=is_atomic,
            resumable=True,
            on_progress=at(6, lambda: first.signal(signal.SIGKILL)),
        )
        transfer.wait()
    with transfer:
        with (
            datastates.connect(start("stranger", seed=3, chunks=1).url) as peer,
            pytest.raises(NotFound),
        ):
            transfer.resume(peer)
        with datastates.connect(second.url) as peer:
            cloned = transfer.resume(peer).wait()
            with pytest.raises(InvalidInput, match="nothing was kept"):
                transfer.resume(peer)
    assert same(mine, second.tensors)
    assert transfer.bytes_done + cloned.bytes_moved == CHUNKS * CHUNK
    assert transfer.bytes_done >= 6 * CHUNK
    assert int(second.facts()["sent"]) == cloned.bytes_moved


def test_what_a_repository_kept_of_a_clone_is_not_moved_again(
    start: Start, repo: Repository
) -> None:
    first = start("first", pace_s=PACE_S)
    second = start("second", twin_of=first.url)
    with datastates.connect(first.url, timeout_s=PATIENCE_S) as peer:
        transfer = peer.begin_clone(
            first.uid,
            repo=repo,
            resumable=True,
            on_progress=at_chunk(6, lambda: first.signal(signal.SIGKILL)),
        )
        with pytest.raises(Disconnected):
            transfer.wait()
    with transfer, datastates.connect(second.url) as peer:
        cloned = transfer.resume(peer).wait()
    assert transfer.bytes_done + cloned.bytes_moved == CHUNKS * CHUNK
    assert transfer.bytes_done >= 6 * CHUNK
    assert same(repo.load(first.uid)["weights"], first.tensors)


def test_what_was_kept_of_a_clone_is_let_go_when_it_is_closed(
    start: Start, repo: Repository
) -> None:
    source, mine = start(), {"t": torch.zeros(1)}
    repo.track(weights=mine, rng=False).capture().wait()
    assert repo.core.arena is not None
    before = repo.core.arena.available
    with datastates.connect(source.url) as peer:
        for resumable in (True, False):
            transfer = peer.begin_clone("main", repo=repo, resumable=resumable)
            transfer.cancel()
            with pytest.raises(Cancelled):
                transfer.wait()
            assert (repo.core.arena.available < before) == resumable
            transfer.close()
            assert repo.core.arena.available == before
        with peer.begin_clone("main", repo=repo, resumable=True):
            pass
        assert repo.core.arena.available == before


def test_a_clone_can_be_cancelled_at_any_moment_and_begun_again(start: Start) -> None:
    source = start(pace_s=0.001)
    mine, old, theirs = make(7, CHUNKS), make(7, CHUNKS), source.tensors
    choose, outcomes = random.Random(11), []
    with datastates.connect(source.url, timeout_s=PATIENCE_S) as peer:
        for number in range(30):
            is_atomic, is_by_progress = number % 2 == 0, number % 4 > 1
            # by time alone a busy machine would cancel each before anything has come
            transfer = begun(
                peer, mine, is_atomic, choose.randrange(1, CHUNKS // 2) if is_by_progress else None
            )
            if not is_by_progress:
                threading.Event().wait(choose.random() * 0.08 if number > 3 else 0.0)
                transfer.cancel()
            with bounded(AT_ONCE_S):
                try:
                    transfer.wait()
                    outcomes.append("done")
                    assert same(mine, theirs)
                except Cancelled:
                    outcomes.append("cancelled")
                    assert same(mine, old)
                except Dirty as exc:
                    outcomes.append(
                        "dirty" if isinstance(exc.__cause__, Cancelled) else repr(exc.__cause__)
                    )
            if outcomes[-1] != "cancelled":
                peer.clone("main", weights=mine, atomic=False)
                assert same(mine, theirs)
                for name, tensor in old.items():
                    mine[name].copy_(tensor)
        eventually(
            lambda: (facts := source.facts())["peers"] == "1" and facts["pins"] == "0",
            AT_ONCE_S,
            source.facts,
        )
    assert {"cancelled", "dirty"} <= set(outcomes) <= {"cancelled", "dirty", "done"}
    release(source, AT_ONCE_S)


def begun(
    peer: Peer, mine: dict[str, torch.Tensor], is_atomic: bool, cancelled_at: int | None
) -> Transfer:
    """A clone that is under way; it cancels itself when so many chunks are here."""
    made: Future[Transfer] = Future()
    on_progress = (
        None if cancelled_at is None else at_chunk(cancelled_at, lambda: made.result().cancel())
    )
    made.set_result(
        peer.begin_clone("main", weights=mine, atomic=is_atomic, on_progress=on_progress)
    )
    return made.result()
