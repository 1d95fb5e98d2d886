"""Processes that serve a state or clone one, and take orders: the other ends of these tests.

``Served`` and ``Receiver`` are the side of the tests; ``serve`` and ``receive`` run in a child of
``tests.support.forge``.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch

import datastates
import datastates.transport.ucx
from datastates import Config, Repository
from datastates.errors import DatastatesError
from datastates.storage.memory import MemoryTier
from datastates.transport import loop, same_host
from datastates.transport.server import Server as TransportServer
from tests.support.forge import Forge, Job
from tests.transport.stores import UID, MemoryStore
from tests.transport.stores import chunks as chunks_of

TIMEOUT_S = 2.0  # where it is waited for
PATIENCE_S = (
    100.0  # where nothing is to be waited for, and a busy machine must not look like a silent peer
)
AT_ONCE_S = 30.0  # far from what is waited for then, and enough for the busiest machine
MIB = 1 << 20
PIECES = 24
_FLOATS = MIB  # of 4 bytes each: a tensor is a chunk

_LISTENING = "0A"  # as the kernel's tables say it

_serial = itertools.count()

Say = Callable[..., object]


def make(seed: int, chunks: int) -> dict[str, torch.Tensor]:
    """Tensors of a chunk each, which are no other seed's."""
    count = torch.arange(_FLOATS, dtype=torch.float32)
    return {f"t{number:02}": count + (seed * 1000 + number) * 0.5 for number in range(chunks)}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether all of them are equal bit for bit."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def quiet_config(chunks: int) -> Config:
    """Nothing is written to disk, and there is room for three states."""
    return Config(memory_bytes=3 * (chunks + 1) * 4 * MIB, durable_interval_s=None)


def connections() -> list[str]:
    """The connections that this process holds: its sockets without those that listen and those
    within the machine."""
    held = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            place = os.readlink(f"/proc/self/fd/{name}")
            held.add(
                place.removeprefix("socket:[").removesuffix("]")
                if place.startswith("socket:")
                else ""
            )
    held -= {"", *(row[6] for row in _rows("unix"))}
    # what is closed at both ends is not there any more
    tcp = {row[9]: row[1:4] for row in (*_rows("tcp"), *_rows("tcp6"))}
    return sorted(
        "-".join(tcp.get(inode, ["closed"]))
        for inode in held
        if tcp.get(inode, [""])[-1] != _LISTENING
    )


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]


def own_threads() -> list[str]:
    """Threads of this process that end with the clone that they are for: those that live as long
    as the process left out."""
    lasting = (
        "MainThread",
        "datastates-transport",
        "datastates-ucx",
        "asyncio_",
        "datastates-serve",
        "datastates-capture",
        "datastates-end",
    )
    return sorted(
        thread.name for thread in threading.enumerate() if not thread.name.startswith(lasting)
    )


def pins(repo: Repository) -> int:
    """How many readers hold states in memory."""
    memory = repo.core.tiers.captured
    return (
        sum(state.readers for state in memory._states.values())
        if isinstance(memory, MemoryTier)
        else 0
    )


def eventually(
    holds: Callable[[], bool], within_s: float, tell: Callable[[], object] = lambda: ""
) -> float:
    """Wait until it holds, and say after how many seconds it did; too late is an error."""
    began, pause = time.monotonic(), threading.Event()
    while not holds():
        assert time.monotonic() - began < within_s, f"not within {within_s} s {tell()}"
        pause.wait(0.01)
    return time.monotonic() - began


class Child:
    """A child that takes orders over a socket: a line each way."""

    def __init__(self, smith: Forge, call: str, **arguments: Any) -> None:
        # tests' own folders have names too long for a socket
        path = smith.folder / f"orders-{next(_serial)}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.smith, self._is_over = smith, False
        self._orders: socket.socket | None = None
        self.job: Job = smith.start(
            f"tests.transport.clones.processes:{call}", orders=str(path), **arguments
        )

    def hear(self) -> list[str]:
        """The next line that it says."""
        line = self.job.lines.readline()
        assert line.endswith("\n"), f"it ended:\n{self.smith.errors()}"
        return line.split()

    def ask(self, order: str) -> list[str]:
        """Have it do something; what it says to that."""
        if self._orders is None:
            self._orders, _ = self.listener.accept()
        self._orders.sendall(f"{order}\n".encode())
        return self.hear()

    def signal(self, number: int) -> None:
        self.job.kill(number)

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        self._is_over = True
        return self.job.wait()

    def end(self) -> None:
        """Whatever it does, it is gone afterwards; idempotent."""
        if not self._is_over:
            self.job.kill(signal.SIGKILL)
            self.job.kill(signal.SIGCONT)
            self.wait()
        self.listener.close()
        if self._orders is not None:
            self._orders.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


class Served(Child):
    """A process that serves one state of ``chunks`` tensors made from ``seed``; ``pace_s`` is
    how long it takes for a chunk, one by one."""

    def __init__(
        self,
        smith: Forge,
        folder: Path,
        *,
        seed: int = 1,
        chunks: int = 16,
        pace_s: float = 0.0,
        **arguments: Any,
    ) -> None:
        self.seed, self.chunks = seed, chunks
        super().__init__(
            smith,
            "serve",
            folder=str(folder / "repo"),
            seed=seed,
            chunks=chunks,
            pace_s=pace_s,
            **arguments,
        )
        _, self.url, self.uid = self.hear()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it serves."""
        return make(self.seed, self.chunks)

    def facts(self) -> dict[str, str]:
        """What it holds at the moment."""
        return dict(word.split("=") for word in self.ask("facts"))


Start = Callable[..., Served]
"""The fixture ``start``: a source of this name, with what ``Served`` takes."""


def serve(
    say: Say,
    orders: str,
    folder: str,
    seed: int,
    chunks: int,
    pace_s: float,
    token: str | None = None,
    twin_of: str | None = None,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Capture a state, or take it over from another, and serve it; do as it is told."""
    if pace_s:
        _slow_down(pace_s)
    with datastates.open(folder, config=quiet_config(chunks)) as repo:
        if twin_of is None:
            # held: a tracker that is dropped writes its head
            run = repo.track(weights=make(seed, chunks), rng=False)
            uid = run.capture().wait().uid
        else:
            with datastates.connect(twin_of) as peer:
                uid = peer.clone("main", repo=repo).state.uid
        server = repo.serve("ucx://127.0.0.1:0", token=token, timeout_s=timeout_s)
        say("serving", server.url, uid)
        for order in _orders(orders):
            match order:
                case "facts":
                    stats = server.stats()
                    say(
                        f"peers={stats.peers}", f"ever={stats.peers_ever}", f"refused={stats.refused}", f"sent={stats.bytes_sent}",
                        f"pins={pins(repo)}", f"threads={len(own_threads())}", f"connections={','.join(connections())}",
                    )  # fmt: skip
                case "close":
                    server.close(grace_s=0)
                    say("closed")
                case "remove":
                    assert repo.core.tiers.captured is not None
                    repo.core.tiers.captured.remove(uid)
                    say("removed")
                case "end":
                    break
    say("ended")


def _slow_down(pace_s: float) -> None:
    """Chunks leave one by one, each after its time."""
    import asyncio

    from datastates.transport.serving import StateSource

    line, chunk = asyncio.Lock(), StateSource.chunk

    async def slow(self: StateSource, index: int) -> Any:
        async with line:
            await asyncio.sleep(pace_s)
        return await chunk(self, index)

    StateSource.chunk = slow  # type: ignore[method-assign] # a machine that is slow


class Receiver(Child):
    """A process that clones what ``source`` serves, and sends itself ``number`` when the chunk
    ``at`` is here."""

    def __init__(
        self, smith: Forge, source: Served, number: int, *, at: int, is_atomic: bool = False
    ) -> None:
        super().__init__(
            smith,
            "receive",
            url=source.url,
            chunks=source.chunks,
            at=at,
            number=int(number),
            is_atomic=is_atomic,
        )
        assert self.hear() == ["begins"]


def receive(
    say: Say, orders: str, url: str, chunks: int, at: int, number: int, is_atomic: bool
) -> None:
    """Clone what is served, and send oneself a signal when the chunk ``at`` is here."""

    def on_progress(done: int, total: int) -> None:
        if done >= at * 4 * MIB:
            os.kill(os.getpid(), number)

    tensors = make(0, chunks)
    os.environ[same_host.SWITCH] = "0"
    with datastates.connect(url, timeout_s=PATIENCE_S) as peer:
        say("begins")
        try:
            peer.clone("main", weights=tensors, atomic=is_atomic, on_progress=on_progress)
        except DatastatesError as exc:
            say("failed", exc.kind)
        else:
            say("cloned")


def _orders(path: str) -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        with end.makefile() as lines:
            for line in lines:
                yield line.strip()


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """What is inside takes no longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"it took {took:.2f} s, and may take {seconds} s"


def serve_bytes(say: Say, seed: int) -> None:
    """Serve bytes without a repository, which begins faster, until it is killed."""
    server = TransportServer(
        MemoryStore({UID: pieces_of(seed)}), "ucx://127.0.0.1:0", timeout_s=PATIENCE_S
    )
    loop.run(server.start())
    say(server.url)
    threading.Event().wait()


def pieces_of(seed: int) -> list[bytes]:
    """What ``serve_bytes`` serves."""
    return chunks_of(seed, PIECES, MIB // 4)


def receive_until_killed(say: Say, url: str, seed: int, chunks: int) -> None:
    """Clone again and again, in place and by a shadow, and die at a moment of the first or
    second clone that the seed chooses."""
    # half of them read where the chunks lie, half get them over the transport
    os.environ[same_host.SWITCH] = str(seed // 2 % 2)
    choose = random.Random(seed)
    delay_s, at = (
        (choose.random() * 0.25, None) if seed % 2 else (None, choose.randrange(2 * chunks))
    )
    seen = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if at is not None and seen > at:
            die()

    expected, mine = make(1, chunks), make(0, chunks)
    if delay_s is not None:
        threading.Timer(delay_s, die).start()
    with datastates.connect(url, timeout_s=PATIENCE_S) as peer:
        say("here")
        while True:
            for tensor in mine.values():
                tensor.zero_()
            peer.clone(
                "main",
                weights=mine,
                atomic=choose.random() < 0.5,
                on_progress=on_progress,
            )
            say("cloned" if same(mine, expected) else "wrong")


def die() -> None:
    """Now, whatever any thread does."""
    os.kill(os.getpid(), signal.SIGKILL)
