"""Clones between hosts, each a network namespace: along a chain, over a link that is cut, from a
source that dies.

Chunks and sessions as they are, over UCX; no repository. Run as a script this file is a process on
one of those hosts.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from datastates.errors import DatastatesError, Disconnected
from datastates.transport import loop
from datastates.transport.chain import Relay
from datastates.transport.contract import Source
from datastates.transport.fetch import Fetched, fetch
from datastates.transport.protocol import Opened
from datastates.transport.registry import transport_for
from datastates.transport.requests import Chains
from datastates.transport.server import Server
from datastates.transport.session import Session, SessionFeed
from tests.support.hosts import Host, hosts, need_hosts
from tests.transport.stores import UID, MemorySink, MemoryStore, chunks

ROOT = Path(__file__).parents[2]
TOKEN = b"all of these hosts know it"
TIMEOUT_S = 3.0
IN_TIME_S = 30.0
"""TCP by itself notices after minutes that a link was cut."""
CHUNKS, CHUNK_BYTES = 16, 4 << 20
STATE_BYTES = sum(map(len, chunks(0, CHUNKS, CHUNK_BYTES)))
RATE = "200mbit"
"""Takes three seconds for the state: time to do something in the middle of it, on a busy machine
too."""


# What the processes do


def say(*words: object) -> None:
    """One line."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def make_server(store: MemoryStore, host: str) -> Server:
    """At any port of this host; to be started."""
    url = f"ucx://{host}:0"
    return Server(
        store, url, transport=transport_for(url), token=TOKEN, timeout_s=TIMEOUT_S, relays=Chains()
    )


def serve(host: str) -> None:
    """Give out the state until told to end."""
    server = make_server(MemoryStore({UID: chunks(0, CHUNKS, CHUNK_BYTES)}), host)
    loop.run(server.start())
    say("serves", server.url)
    sys.stdin.readline()
    loop.run(server.close())


class Forwarding(MemoryStore):
    """The store of a receiver that forwards what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.relay: Future[Relay] = Future()

    # a relay's is another one than that of a store in memory
    def open(self, uid: str) -> Source:  # type: ignore[override]
        return self.relay.result(10).open()


class Receiver:
    """What was accepted stays accepted, over any number of attempts."""

    def __init__(self, host: str) -> None:
        self.host, self.sink, self.seen = host, list[MemorySink](), False
        self.ends: list[Session | Server] = []

    async def take(self, urls: list[str]) -> Fetched:
        """From all of these at once."""
        opened = [await self.open(url) for url in urls]
        feeds = [feed for _, feed in opened]
        if not self.sink:
            self.sink.append(MemorySink(feeds[0].manifest))
        return await fetch(self.sink[0], feeds, timeout_s=TIMEOUT_S, on_progress=self.progress)

    async def join(self, url: str) -> Fetched:
        """In the chain of this server, forwarding what comes."""
        store = Forwarding()
        server = make_server(store, self.host)
        await server.start()
        opened, feed = await self.open(url, relay=server.url, here=False)
        if opened.upstream is not None:
            opened, feed = await self.open(opened.upstream)
        assert feed is not None
        self.sink.append(MemorySink(opened.manifest))
        store.relay.set_result(Relay(opened.manifest, self.sink[0]))
        fetched = await fetch(
            store.relay.result(), [feed], timeout_s=TIMEOUT_S, on_progress=self.progress
        )
        await feed.close()
        await store.relay.result().idle()
        self.ends.append(server)
        return fetched

    async def open(
        self, url: str, *, relay: str | None = None, here: bool = True
    ) -> tuple[Opened, SessionFeed]:
        session = await Session.connect(url, token=TOKEN, timeout_s=TIMEOUT_S)
        self.ends.append(session)
        return await session.open(UID, relay=relay, here=here)

    def progress(self, done: int, total: int) -> None:
        if not self.seen:
            self.seen = True
            say("begun")

    async def close(self) -> None:
        for end in reversed(self.ends):
            await end.close()


def receive(host: str) -> None:
    """Do as told: ``take URL …`` or ``join URL``; say what came of it."""
    receiver = Receiver(host)
    for line in sys.stdin:
        order, *urls = line.split()
        began = time.monotonic()
        try:
            fetched = loop.run(receiver.take(urls) if order == "take" else receiver.join(urls[0]))
        except DatastatesError as exc:
            say("failed", exc.kind, round(time.monotonic() - began, 2), exc)
        else:
            memory = b"".join(receiver.sink[0].memory)
            whole = "whole" if memory == b"".join(chunks(0, CHUNKS, CHUNK_BYTES)) else "wrong"
            say("took", whole, sum(fetched.bytes_by_feed.values()), len(fetched.lost))
    loop.run(receiver.close())


# The tests


class Job:
    """A process on a host, told and heard line by line."""

    def __init__(self, host: Host, role: str, program: str = "tests.transport.test_hosts") -> None:
        command = (sys.executable, "-m", program, role, host.address)
        self.process = host.start(*command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def hear(self, word: str) -> list[str]:
        """The rest of the next line, which begins with this word."""
        assert self.process.stdout is not None
        first, *rest = self.process.stdout.readline().split() or ["nothing: it ended"]
        assert first == word, f"{first} {' '.join(rest)}"
        return rest

    def end(self) -> None:
        """It ends by itself and well."""
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


def source(host: Host) -> tuple[Job, str]:
    """A server of the state on this host, which sends no faster than ``RATE``; its url."""
    host.shape(RATE)
    job = Job(host, "serve")
    return job, job.hear("serves")[0]


@pytest.fixture
def three() -> Iterator[list[Host]]:
    need_hosts()
    pytest.importorskip("ucxx", reason="UCXX is not installed")
    with hosts(3) as made:
        yield made


def test_a_state_gets_from_host_to_host(three: list[Host]) -> None:
    server, url = source(three[0])
    receiver = Job(three[1], "receive")

    receiver.tell("take", url)

    receiver.hear("begun")
    assert receiver.hear("took") == ["whole", str(STATE_BYTES), "0"]
    receiver.end()
    server.end()


def test_along_a_chain_one_copy_leaves_the_source(three: list[Host]) -> None:
    server, url = source(three[0])
    before = [host.sent_bytes() for host in three]
    receivers = [Job(host, "receive") for host in three[1:]]

    for receiver in receivers:
        receiver.tell("join", url)
        receiver.hear("begun")  # in the middle: the next one joins while this one still receives

    for receiver in receivers:
        assert receiver.hear("took") == ["whole", str(STATE_BYTES), "0"]
    sent = [
        (host.sent_bytes() - old) / STATE_BYTES for host, old in zip(three, before, strict=True)
    ]
    assert 1 <= sent[0] < 1.05
    assert 1 <= sent[1] < 1.05
    assert sent[2] < 0.05
    for job in (*reversed(receivers), server):
        job.end()


def test_a_link_that_is_cut_is_noticed_in_time_and_the_rest_comes_once_it_is_mended(
    three: list[Host],
) -> None:
    server, url = source(three[0])
    receiver = Job(three[1], "receive")
    receiver.tell("take", url)
    receiver.hear("begun")

    three[0].cut()
    began = time.monotonic()
    kind, *_ = receiver.hear("failed")
    took_s = time.monotonic() - began
    three[0].mend()
    receiver.tell("take", url)

    assert kind == Disconnected.kind
    assert took_s < IN_TIME_S
    whole, moved, lost = receiver.hear("took")
    assert (whole, lost) == ("whole", "0")
    assert 0 < int(moved) < STATE_BYTES
    receiver.end()
    server.end()


def test_when_one_of_two_sources_dies_the_other_brings_the_rest(three: list[Host]) -> None:
    (dying, one), (server, other) = source(three[0]), source(three[2])
    receiver = Job(three[1], "receive")
    receiver.tell("take", one, other)
    receiver.hear("begun")

    dying.process.kill()

    assert receiver.hear("took") == ["whole", str(STATE_BYTES), "1"]
    receiver.end()
    server.end()


if __name__ == "__main__":
    {"serve": serve, "receive": receive}[sys.argv[1]](sys.argv[2])
