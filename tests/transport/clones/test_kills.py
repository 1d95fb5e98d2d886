"""Deaths in the middle of clones, of the source or of the receiver: no hang, no wrong byte,
nothing left behind."""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

import datastates
from datastates.errors import DatastatesError, Dirty, Disconnected
from datastates.transport import loop
from datastates.transport.fetch import fetch
from datastates.transport.session import Session
from tests.support.effort import seeds
from tests.support.forge import Forge, Job
from tests.transport.clones.processes import (
    AT_ONCE_S,
    PATIENCE_S,
    PIECES,
    Served,
    Start,
    bounded,
    eventually,
    make,
    pieces_of,
    same,
)
from tests.transport.stores import UID, MemorySink

BATCH = 10
CHUNKS = 8


def is_refused(url: str) -> bool:
    """Whether nobody listens there any more."""
    host, port = url.removeprefix("ucx://").split(":")
    with socket.socket() as end:
        return end.connect_ex((host, int(port))) != 0


@contextmanager
def mortal(job: Job) -> Iterator[Job]:
    """A process that dies now or has died before."""
    try:
        yield job
    finally:
        job.kill(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL


@contextmanager
def killed_meanwhile(
    choose: random.Random,
    chunks: int,
    kill: Callable[[], None],
    *,
    is_by_progress: bool | None = None,
) -> Iterator[Callable[[int, int], None]]:
    """Kill at a moment of a clone: when so many chunks are here, or after a time, but not after
    its end. Gives what is told of progress."""
    if choose.random() < 0.5 if is_by_progress is None else is_by_progress:
        at, pending = choose.randrange(chunks), [kill]
        yield (
            lambda done, total: pending.pop()() if pending and done * chunks > at * total else None
        )
        return
    timer = threading.Timer(choose.random() * 0.05, kill)
    timer.start()
    try:
        yield lambda done, total: None
    finally:
        timer.cancel()
        timer.join()


async def clone_bytes(
    url: str, sinks: list[MemorySink], on_progress: Callable[[int, int], None]
) -> None:
    session = await Session.connect(url, timeout_s=PATIENCE_S)
    try:
        opened, feed = await session.open(UID)
        assert feed is not None
        sinks.append(MemorySink(opened.manifest))
        await fetch(sinks[0], [feed], timeout_s=PATIENCE_S, on_progress=on_progress)
    finally:
        await session.close()


@pytest.mark.long
@pytest.mark.parametrize("batch", seeds(9))
def test_a_source_may_die_at_any_moment(smith: Forge, batch: int) -> None:
    """Of every chunk that was accepted each byte is right, and an error comes at once."""
    outcomes = []
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        choose, sinks = random.Random(seed), list[MemorySink]()
        with mortal(smith.start("tests.transport.clones.processes:serve_bytes", seed=seed)) as job:
            url = job.lines.readline().strip()
            with (
                bounded(AT_ONCE_S),
                killed_meanwhile(choose, PIECES, partial(job.kill, signal.SIGKILL)) as on_progress,
            ):
                try:
                    loop.run(clone_bytes(url, sinks, on_progress))
                    outcomes.append("done")
                except Disconnected:
                    outcomes.append("failed")
        assert is_refused(url)
        expected = pieces_of(seed)
        for sink in sinks:
            assert outcomes[-1] == "failed" or len(sink.accepted) == PIECES
            assert all(sink.memory[index] == expected[index] for index in sink.accepted)
    assert "failed" in outcomes


@pytest.mark.long
@pytest.mark.parametrize("batch", seeds(5))
def test_a_repository_that_serves_may_die_at_any_moment(start: Start, batch: int) -> None:
    """The destination is as it was, or what was cloned, or says that it is neither."""
    outcomes = []
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        choose, is_atomic = random.Random(seed), seed % 2 == 0
        source, mine = (
            start(f"source-{seed}", seed=2 + seed, chunks=CHUNKS, pace_s=0.02),
            make(1, CHUNKS),
        )
        kill, is_by_progress = partial(source.signal, signal.SIGKILL), seed // 2 % 2 == 0
        if is_by_progress:
            # the source's data plane takes a second to start, and would then have all chunks to
            # send at once
            with datastates.connect(source.url, timeout_s=PATIENCE_S) as peer:
                peer.clone("main", weights=make(1, CHUNKS))
        # by time alone a busy machine would kill it before anything has come
        with (
            bounded(AT_ONCE_S),
            killed_meanwhile(choose, CHUNKS, kill, is_by_progress=is_by_progress) as on_progress,
        ):
            try:
                with datastates.connect(source.url, timeout_s=PATIENCE_S) as peer:
                    peer.clone("main", weights=mine, atomic=is_atomic, on_progress=on_progress)
                outcomes.append("done")
                assert same(mine, source.tensors)
            except Dirty:
                outcomes.append("dirty")
                assert not is_atomic
            except DatastatesError:
                outcomes.append("failed")
                assert same(mine, make(1, CHUNKS))
        source.end()
        assert is_refused(source.url)
    assert {"dirty", "failed"} <= set(outcomes)


@pytest.mark.long
def test_receivers_may_die_at_any_moment(smith: Forge, start: Start) -> None:
    """The source lets go of each, whatever it was doing, and serves the next."""
    source = start(chunks=CHUNKS)
    clone_here(source)
    eventually(lambda: source.facts()["peers"] == "0", AT_ONCE_S)
    before = source.facts()

    for batch in seeds(10):
        with bounded(60), ExitStack() as stack:
            jobs = [
                stack.enter_context(
                    mortal(
                        smith.start(
                            "tests.transport.clones.processes:receive_until_killed",
                            url=source.url,
                            seed=seed,
                            chunks=CHUNKS,
                        )
                    )
                )
                for seed in range(batch * BATCH, (batch + 1) * BATCH)
            ]
            said = [word for job in jobs for word in job.say()]
        assert set(said) <= {"here", "cloned"}
        eventually(
            lambda: (facts := source.facts())["peers"] == facts["pins"] == "0",
            AT_ONCE_S,
            source.facts,
        )
        clone_here(source)
    eventually(lambda: source.facts()["peers"] == "0", AT_ONCE_S)
    eventually(
        lambda: (
            (facts := source.facts())["threads"] == before["threads"] and not facts["connections"]
        ),
        AT_ONCE_S,
        source.facts,
    )


def clone_here(source: Served) -> None:
    mine = make(0, source.chunks)
    with bounded(AT_ONCE_S), datastates.connect(source.url, timeout_s=PATIENCE_S) as peer:
        peer.clone("main", weights=mine, atomic=False)
    assert same(mine, source.tensors)
