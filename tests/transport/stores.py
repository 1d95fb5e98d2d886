"""A Store in memory, whose manifests are lists of digests, and what tests need to hold it open,
slow it down and fill it."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from datastates.errors import NotFound, Unavailable
from datastates.transport.contract import Sink, Source, Store
from datastates.transport.protocol import Identity, Offer, RefRecord, StatePage, StateRecord

UID = "5e0f" * 6
CHUNK = 64 << 10


def record(uid: str = UID, *, step: int = 1, message: str | None = None) -> StateRecord:
    """A state of no run."""
    return StateRecord(
        uid, "0" * 64, step, 0, {"loss": 0.5}, {}, message, 0, "captured", (), (), None, 0, 0, 0
    )


def chunks(seed: int, count: int, length: int = CHUNK) -> list[bytes]:
    """Random bytes; the last chunk is an odd one."""
    source = random.Random(seed)
    return [source.randbytes(length if n + 1 < count else length - 17) for n in range(count)]


def manifest_of(pieces: Sequence[bytes]) -> bytes:
    """A manifest of these chunks, as this store writes it."""
    return msgspec.msgpack.encode(
        [(len(piece), hashlib.sha256(piece).digest()) for piece in pieces]
    )


class MemorySource(Source):
    """Gives out chunks, each in ``cuts`` pieces. ``before`` is awaited for each."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        cuts: int = 2,
        before: Callable[[int], object] | None = None,
    ) -> None:
        self.pieces, self.cuts, self.before = list(pieces), cuts, before
        self.manifest = manifest_of(pieces)
        self.lengths = tuple(map(len, pieces))
        self.is_closed = threading.Event()

    async def chunk(self, index: int) -> Sequence[memoryview]:
        assert not self.is_closed.is_set(), "a chunk of a closed source"
        if self.before is not None:
            waits = self.before(index)
            if asyncio.iscoroutine(waits):
                await waits
        view = memoryview(self.pieces[index])
        step = -(-len(view) // self.cuts)
        return [view[start : start + step] for start in range(0, len(view), step)]

    def close(self) -> None:
        self.is_closed.set()


class MemorySink(Sink):
    """Takes the chunks of a manifest."""

    def __init__(self, manifest: bytes, *, cuts: int = 1) -> None:
        self.digests: list[tuple[int, bytes]] = msgspec.msgpack.decode(
            manifest, type=list[tuple[int, bytes]]
        )
        self.lengths = tuple(length for length, _ in self.digests)
        self.memory = [bytearray(length) for length in self.lengths]
        self.accepted: set[int] = set()
        self.cuts = cuts

    def missing(self) -> Sequence[int]:
        return [index for index in range(len(self.lengths)) if index not in self.accepted]

    def buffers(self, index: int) -> Sequence[memoryview] | None:
        view = memoryview(self.memory[index])
        step = -(-len(view) // self.cuts)
        return [view[start : start + step] for start in range(0, len(view), step)]

    def accept(self, index: int) -> bool:
        if hashlib.sha256(self.memory[index]).digest() != self.digests[index][1]:
            return False
        self.accepted.add(index)
        return True

    def forget(self, index: int) -> None:
        assert index not in self.accepted

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        return [memoryview(self.memory[index])]


@dataclass
class MemoryStore(Store):
    """States by uid.

    ``hook`` runs first in every question, in the worker thread, and may raise or wait."""

    states: dict[str, list[bytes]] = field(default_factory=dict)
    records: list[StateRecord] = field(default_factory=lambda: [record()])
    branches: list[RefRecord] = field(default_factory=lambda: [RefRecord("main", "branch", UID)])
    hook: Callable[[str], object] = lambda name: None
    before: Callable[[int], object] | None = None
    opened: list[MemorySource] = field(default_factory=list)
    sinks: list[MemorySink] = field(default_factory=list)
    abandoned: list[Sink] = field(default_factory=list)

    def identity(self) -> Identity:
        return Identity("f00d", "node", "0")

    def refs(self) -> list[RefRecord]:
        self.hook("refs")
        return self.branches

    def find(self, query: str, limit: int, after: str | None) -> StatePage:
        self.hook(query)
        return StatePage(tuple(self.records[:limit]), after)

    def log(self, rev: str, limit: int, after: str | None) -> StatePage:
        self.hook(rev)
        return StatePage(tuple(self.records[:limit]), after)

    def resolve(self, rev: str) -> StateRecord:
        self.hook(rev)
        for state in self.records:
            if rev in {state.uid, "main"}:
                return state
        raise NotFound(f"no state {rev!r} here")

    def open(self, uid: str) -> MemorySource:
        self.hook(uid)
        if uid not in self.states:
            raise Unavailable(f"state {uid} is not here", nearest=UID)
        source = MemorySource(self.states[uid], before=self.before)
        self.opened.append(source)
        return source

    def check_writable(self) -> None:
        self.hook("writable")

    def receive(self, offer: Offer) -> MemorySink:
        self.hook("receive")
        self.sinks.append(MemorySink(offer.manifest))
        return self.sinks[-1]

    def received(self, offer: Offer, sink: Sink) -> StateRecord:
        self.hook("received")
        self.records.append(offer.state)
        return offer.state

    def abandon(self, offer: Offer, sink: Sink) -> None:
        self.abandoned.append(sink)
