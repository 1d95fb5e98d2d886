"""What a server serves: the lineage as records, and states to be cloned. Plain methods run in worker threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from .protocol import Identity, Offer, Reached, RefRecord, StatePage, StateRecord
from .sink import Sink

__all__ = ["Relays", "Source", "Store", "SupportsAddresses", "SupportsCheck", "SupportsParts", "SupportsRecall"]


class Source(Protocol):
    """A state opened for sending; its bytes do not change until ``close``."""

    @property
    def manifest(self) -> bytes:
        """``digest.encode`` of its manifest, without the places where this process holds it."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The bytes of each chunk."""

    async def chunk(self, index: int) -> Sequence[memoryview]:
        """The bytes of a chunk in one or more pieces, in order; waits while the chunk is still arriving here.

        :raises Unavailable: it will not come.
        """

    def close(self) -> None:
        """Release the state; idempotent."""


@runtime_checkable
class SupportsAddresses(Protocol):
    """A source whose chunks are in this process's memory until it is closed, each in one piece."""

    def addresses(self) -> Sequence[int]:
        """The address of each chunk; runs in a worker thread."""


@runtime_checkable
class SupportsCheck(Protocol):
    """A source that can tell whether a chunk still matches its manifest."""

    def is_whole(self, index: int, pieces: Sequence[memoryview]) -> bool:
        """Whether these bytes are that chunk; runs in a worker thread."""


@runtime_checkable
class SupportsRecall(Protocol):
    """A source in memory that others may need: it can be asked to release that memory."""

    def when_wanted(self, tell: Callable[[], None]) -> None:
        """Register ``tell``, which is called on any thread, any number of times, when the memory is wanted back."""

    def recall(self) -> bool:
        """Release the memory, which nobody reads now. Returns whether the state can be read on, from elsewhere. Runs in a worker thread."""


class Store(Protocol):
    """A repository, as a server sees it. Errors of our tree travel to the peer by their kind."""

    def identity(self) -> Identity:
        """The identity of the served repository."""

    def refs(self) -> list[RefRecord]:
        """Every branch and tag, by name."""

    def find(self, query: str, limit: int, after: str | None) -> StatePage:
        """A page of the states that a query finds."""

    def log(self, rev: str, limit: int, after: str | None) -> StatePage:
        """A page of a state and its ancestors, all parents followed, newest first; ``after`` is the uid of the last one seen."""

    def resolve(self, rev: str) -> StateRecord:
        """The state that a revision names."""

    def open(self, uid: str) -> Source:
        """Pin a state and open it.

        :raises Unavailable: its bytes are not here.
        """

    def check_writable(self) -> None:
        """Raise unless peers may push. On the loop thread; must not block.

        :raises InvalidInput: this server accepts no states.
        """

    def receive(self, offer: Offer) -> Sink:
        """Check everything that a peer says of a state that it pushes, then make room for it.

        :raises InvalidInput: something of it is wrong.
        """

    def received(self, offer: Offer, sink: Sink) -> StateRecord:
        """Record the state of a push whose chunks were all accepted.

        :raises Conflict: a ref stands elsewhere.
        """

    def abandon(self, offer: Offer, sink: Sink) -> None:
        """Release what ``receive`` made room for: the push ended without being recorded."""


@runtime_checkable
class SupportsParts(Protocol):
    """A store of states that several ranks captured together, which serves each part by itself. Both methods run in worker threads."""

    def open_part(self, uid: str, rank: int) -> Source:
        """Pin the part of one rank and open it.

        :raises Unavailable: it is not here.
        """

    def reach(self, uid: str) -> Reached:
        """How far away each part is, and where the other processes of this one's job serve."""


class Relays(Protocol):
    """The chains of a server; on the loop thread, must not block. ``chain.Chains`` implements it."""

    def join(self, uid: str, relay_url: str, failed: Sequence[str]) -> str | None:
        """Add a receiver that serves what it gets under ``relay_url``; returns the url to ask instead of this server, or None for this
        server.

        The receivers in ``failed`` did not answer it.
        """

    def leave(self, uid: str, relay_url: str) -> None:
        """Leave the chain; idempotent."""
