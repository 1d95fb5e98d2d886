"""A desk answers many at once, each what it asked, and nobody who does not know the key."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from datastates.errors import Disconnected
from datastates.transport.session import desk
from datastates.transport.session.desk import Asked, Caller, Desk, Place

SEATS = 5


class Work:
    """Says each back, and waits for ``goes_on`` before; ``batches`` are what it was asked at once."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.awaited: list[bool] = []
        self.goes_on.set()

    def __call__(self, asked: Sequence[Asked]) -> list[bytes]:
        self.batches.append([each.said for each in asked])
        self.began.set()
        assert self.goes_on.wait(60)
        self.awaited = [each.is_awaited for each in asked]
        return [b"heard " + each.said for each in asked]


@contextmanager
def opened(work: Callable[[Sequence[Asked]], Sequence[bytes]], seats: int = SEATS) -> Iterator[Place]:
    place = Place.drawn()
    kept = Desk(place, work, seats=seats)
    assert kept.open()
    yield place
    kept.close()


class Room:
    """Callers of a test, whose connections end with it."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def __call__(self, place: Place) -> Caller:
        self.callers.append(Caller(place))
        return self.callers[-1]


@pytest.fixture
def caller_at() -> Iterator[Room]:
    room = Room()
    yield room
    for caller in room.callers:
        caller.close()


@pytest.fixture
def work() -> Work:
    return Work()


def in_threads(callers: Sequence[Caller], say: Callable[[int], bytes], pool: ThreadPoolExecutor) -> list[Future[bytes]]:
    return [pool.submit(caller.ask, say(number)) for number, caller in enumerate(callers)]


def test_what_is_handed_in_meanwhile_is_answered_together_and_each_hears_its_own(work: Work, caller_at: Room) -> None:
    work.goes_on.clear()
    with opened(work) as place, ThreadPoolExecutor(SEATS + 1) as pool:
        first = pool.submit(caller_at(place).ask, b"first")
        assert work.began.wait(60)
        asked = in_threads([caller_at(place) for _ in range(SEATS)], lambda number: b"%d" % number * (1 + number * 100_000), pool)
        assert desk_has(place, SEATS + 1)
        work.goes_on.set()
        assert first.result(20) == b"heard first"
        assert [each.result(20) for each in asked] == [b"heard " + b"%d" % number * (1 + number * 100_000) for number in range(SEATS)]
        assert len(work.batches) < SEATS
        assert sorted(each for batch in work.batches for each in batch)[-1] == b"first"


def desk_has(place: Place, count: int) -> bool:
    """Wait until so many connections stand at this desk, as the kernel counts them: the callers' ends have no name."""
    name = f"@{place.name}"
    for _ in range(10_000):
        lines = Path("/proc/net/unix").read_text().splitlines()
        if sum(line.endswith(name) for line in lines) >= count + 1:  # and the one that listens
            return True
        os.sched_yield()
    return False


def test_who_turned_away_is_seen_while_the_work_goes_on(work: Work, caller_at: Room) -> None:
    work.goes_on.clear()
    with opened(work) as place, ThreadPoolExecutor(2) as pool:
        caller = caller_at(place)
        asked = pool.submit(caller.ask, b"stays")
        assert work.began.wait(60)
        work.goes_on.set()
        asked.result(20)
        assert work.awaited == [True]
        work.goes_on.clear()
        work.began.clear()
        leaves = pool.submit(caller.ask, b"leaves")
        assert work.began.wait(60)
        assert caller._connection is not None
        caller._connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Disconnected):
            leaves.result(20)
        work.goes_on.set()
    assert work.awaited == [False]


def test_a_desk_that_does_not_answer_is_left_and_not_asked_again_for_a_while(
    work: Work, caller_at: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "ANSWER_S", 0.1)
    work.goes_on.clear()
    with opened(work) as place:
        caller = caller_at(place)
        with pytest.raises(Disconnected, match="does not answer"):
            caller.ask(b"too late")
        with pytest.raises(Disconnected, match="lately"):
            caller.ask(b"not yet")
        work.goes_on.set()
        monkeypatch.setattr(desk, "ANSWER_S", 20.0)
        caller._not_before = 0.0
        assert caller.ask(b"again") == b"heard again"
    assert work.awaited == [True]
    assert [b"too late"] in work.batches
    assert [b"not yet"] not in work.batches


def test_work_that_fails_leaves_it_to_those_who_asked_and_goes_on(caller_at: Room) -> None:
    def fails(asked: Sequence[Asked]) -> list[bytes]:
        if asked[0].said == b"bad":
            raise ValueError("of whatever kind")
        return [b"well"] * len(asked)

    with opened(fails) as place:
        caller = caller_at(place)
        assert caller.ask(b"bad") == b""
        assert caller.ask(b"good") == b"well"


def test_a_desk_that_closes_answers_what_it_works_on_and_nothing_else(work: Work, caller_at: Room) -> None:
    place = Place.drawn()
    kept = Desk(place, work, seats=2)
    assert kept.open()
    work.goes_on.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(caller_at(place).ask, b"first")
        assert work.began.wait(60)
        second = pool.submit(caller_at(place).ask, b"second")
        assert desk_has(place, 2)
        closing = pool.submit(kept.close)
        work.goes_on.set()
        closing.result(20)
        assert first.result(20) == b"heard first"
        with suppress(Disconnected):  # it may have come to the desk before that closed, or not
            assert second.result(20) == b""
    assert work.batches == [[b"first"]]
    with pytest.raises(Disconnected):
        caller_at(place).ask(b"late")


class _ClosedMeanwhile(asyncio.StreamReader):
    """While the request itself is read the desk closes."""

    def __init__(self, kept: Desk) -> None:
        super().__init__()
        self._kept = kept

    async def readexactly(self, n: int) -> bytes:
        found = await super().readexactly(n)
        if found == b"late":
            await self._kept._close()
        return found


def test_what_is_read_as_a_desk_closes_is_handed_back_at_once(work: Work) -> None:
    """It came when the last of those who waited had been told already, and nobody was left to tell it."""
    kept = Desk(Place.drawn(), work, seats=1)

    async def handed_in() -> bytes:
        assert await kept._open()
        reader = _ClosedMeanwhile(kept)
        reader.feed_data(struct.pack(">I", 4) + b"late")
        here, there = socket.socketpair()
        with here, there:
            there.settimeout(20)
            _, writer = await asyncio.open_connection(sock=here)
            await asyncio.wait_for(kept._serve(reader, writer), 20)
            writer.close()
            return there.recv(100)

    assert asyncio.run(handed_in()) == struct.pack(">I", 0)
    assert work.batches == []


def test_who_does_not_know_the_key_learns_and_changes_nothing(work: Work, caller_at: Room) -> None:
    with opened(work) as place:
        with pytest.raises(Disconnected):
            caller_at(replace(place, key=secrets.token_bytes(32))).ask(b"stranger")
        for said in (b"", b"\0" * 64, secrets.token_bytes(1 << 16)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.settimeout(20)
                stranger.connect("\0" + place.name)
                heard = b""
                with suppress(OSError):
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    while more := stranger.recv(1 << 16):
                        heard += more
                assert len(heard) in {0, 32}, "a random number at most"
        assert caller_at(place).ask(b"ours") == b"heard ours"
    assert work.batches == [[b"ours"]]


def test_whoever_sits_at_the_place_without_the_key_is_told_nothing(caller_at: Room) -> None:
    place = Place.drawn()
    heard = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor, ThreadPoolExecutor(1) as pool:
        impostor.bind("\0" + place.name)
        impostor.listen()
        asked = pool.submit(caller_at(place).ask, b"a secret")
        connection, _ = impostor.accept()
        with connection:
            connection.settimeout(20)
            heard += connection.recv(32)
            connection.sendall(secrets.token_bytes(32))
            heard += connection.recv(32)
            connection.sendall(secrets.token_bytes(32))
            with suppress(OSError):
                heard += connection.recv(1 << 16)
        with pytest.raises(Disconnected, match="somebody else"):
            asked.result(20)
    assert len(heard) == 64
    assert b"secret" not in heard


def test_what_is_too_long_is_not_taken(work: Work, caller_at: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MOST_BYTES", 1000)
    with opened(work) as place:
        with pytest.raises(Disconnected):
            caller_at(place).ask(b"x" * 1001)
        assert caller_at(place).ask(b"x" * 990) == b"heard " + b"x" * 990
        assert caller_at(place).ask(b"x" * 1000) == b"", "nor is such an answer"


def test_callers_beyond_the_seats_do_it_by_themselves(work: Work, caller_at: Room) -> None:
    with opened(work, seats=1) as place:
        here = [caller_at(place) for _ in range(2)]
        assert [caller.ask(b"ours") for caller in here] == [b"heard ours"] * 2
        with pytest.raises(Disconnected):
            caller_at(place).ask(b"one too many")
        here[0].close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_of_the_node_is_turned_away(work: Work) -> None:
    with opened(work) as place:
        pid = os.fork()
        if pid == 0:
            _visit_as(12345, place)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert work.batches == []


def _visit_as(user: int, place: Place) -> None:
    """In a child: another user that has come to know the key. It never returns."""
    code = 1
    try:
        os.setuid(user)
        desk.__dict__["who"] = lambda connection: (0, user, 0)  # it does not mind whose desk that is
        Caller(place).ask(b"of another user")
    except Disconnected:
        code = 3
    finally:
        os._exit(code)
