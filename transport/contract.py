"""The contracts for carrying control frames and bytes between two processes.

Every coroutine here runs on the transport's loop thread."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from datastates.errors import InvalidInput
from datastates.values import shown

from .protocol import Identity, Offer, Reached, RefRecord, StatePage, StateRecord

if TYPE_CHECKING:
    import torch

    from datastates.system.devices import Mark

    from .connections import ConnectionLimiter


@dataclass(frozen=True, slots=True)
class Tls:
    """Files for TLS on the control channel: a server needs a certificate and its key, a client
    the certificates that it trusts."""

    certificate: Path | None = None
    key: Path | None = None
    trusted: Path | None = None


def tls_of(value: object, what: str) -> Tls:
    """The files for TLS that a user passed.

    :raises InvalidInput: ``value`` is something else.
    """
    if not isinstance(value, Tls):
        raise InvalidInput(f"{what} is {shown(value)}: give a datastates.Tls")
    return value


AnyTls = Annotated[Tls, tls_of]


class Channel(ABC):
    """Ordered control frames between two ends.

    ``send`` and ``receive`` may each run in one task at a time."""

    peer: str
    """Where the other end is, for messages: ``10.0.0.2:4711``."""

    host: str | None = None
    """The address of this end as the other one reaches it; None where both are in one process."""

    remote: tuple[str, int] | None = None
    """The address and the port of the other end; None where both are in one process."""

    is_secret: bool = False
    """Whether TLS protects the channel."""

    @abstractmethod
    async def send(self, frame: bytes) -> None:
        """Hand a frame over; waits while the other end accepts none.

        :raises Disconnected: the other end is gone.
        """

    @abstractmethod
    async def receive(self, limit: int) -> bytes:
        """The next frame, of at most ``limit`` bytes.

        :raises PeerFault: the announced length is greater. No memory was allocated for it, and
            the channel cannot be used any more.
        :raises Disconnected: the other end is gone.
        """

    def hold(self) -> None:
        """Keep this channel when others arrive, since the other end has proved itself."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Close the channel; idempotent.

        A caller that waits in ``receive`` gets ``Disconnected``."""


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """Flat memory on a device that receives a chunk.

    It may be written after ``ready``, a point in its owner's stream."""

    memory: torch.Tensor
    ready: Mark

    @property
    def nbytes(self) -> int:
        """How many bytes it receives."""
        return self.memory.nbytes


Destination = Sequence[memoryview] | OnDevice
"""The memory that receives a chunk: writable pieces of host memory in order, or a device's."""


def size_of(destination: Destination) -> int:
    """How many bytes a destination receives."""
    if isinstance(destination, OnDevice):
        return destination.nbytes
    return sum(piece.nbytes for piece in destination)


class Link(ABC):
    """The data plane to one peer. Any number of sends and receives may be under way at once."""

    @abstractmethod
    async def send(self, tag: int, data: memoryview) -> None:
        """Send bytes to the receiver of ``tag`` at the other end; ``data`` must not change before
        this returns.

        :raises Disconnected: the peer is gone, or the link was aborted.
        """

    @abstractmethod
    async def receive(self, tag: int, into: memoryview) -> None:
        """Receive the message of ``tag`` straight into ``into``, which it fills exactly.

        Cancelling the task does not stop the transfer: ``abort`` the link before the memory is used
        for anything else.

        :raises PeerFault: the message is longer. A shorter one may leave the end of ``into``
            unchanged, so callers check a digest.
        :raises Disconnected: the peer is gone, or the link was aborted.
        """

    def send_all(
        self, tag: int, data: Sequence[memoryview], moved: Callable[[int], None]
    ) -> asyncio.Future[Any]:
        """Begin to ``send`` each piece, to the receivers of ``tag`` and of the tags that follow
        it. ``moved`` is called with the number of each piece that has left, on any thread. The
        future reports errors."""
        return asyncio.gather(
            *(_told(self.send(tag + n, piece), moved, n) for n, piece in enumerate(data))
        )

    def receive_all(
        self, tag: int, into: Sequence[memoryview], moved: Callable[[int], None]
    ) -> asyncio.Future[Any]:
        """Begin to ``receive`` into each piece, from the senders of ``tag`` and of the tags that
        follow it, as ``send_all`` does."""
        return asyncio.gather(
            *(_told(self.receive(tag + n, piece), moved, n) for n, piece in enumerate(into))
        )

    def receive_there(
        self, tag: int, into: Sequence[OnDevice], moved: Callable[[int], None]
    ) -> asyncio.Future[Any]:
        """``receive_all`` into memory of one device, for data planes that can write there. Once a
        piece has moved, only this process can change its bytes.

        :raises InvalidInput: this data plane cannot.
        """
        raise InvalidInput(
            f"the message of tag {tag} was to be received on a device, which this data plane does"
            " not reach"
        )

    async def posted(self) -> None:
        """Wait until every receive begun so far has its destination ready, or the link is over.

        If a peer sends earlier, its bytes may fill memory that other peers' bytes need, and those
        then wait for this receive."""
        await asyncio.sleep(0)  # lets every receive run up to its first wait

    @abstractmethod
    async def abort(self) -> None:
        """Stop everything under way; idempotent.

        Once this returns no buffer is read or written any more."""


async def _told(move: Coroutine[Any, Any, None], moved: Callable[[int], None], number: int) -> None:
    await move
    moved(number)


class Listener(ABC):
    """An address at which peers arrive."""

    url: str
    """The address to dial, with the port that was taken."""

    @abstractmethod
    async def close(self) -> None:
        """Accept no more peers; those that are connected stay. Idempotent."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends of a session know about it. ``where`` is the address that was dialled, known
    at the end that dialled it.

    ``name`` and ``key`` are derived from the session's keys. The name is sent in the clear, the key
    is never sent. The end that dialled checks the other one by ``tls`` and ``host``.
    """

    name: bytes
    key: bytes
    peer: str
    where: tuple[str, int] | None = None
    host: str = ""
    tls: ssl.SSLContext | None = None
    timeout_s: float = 10.0


class End(ABC):
    """This side's end of the data plane, of one session or of all of them."""

    @property
    @abstractmethod
    def located(self) -> bytes:
        """The current address of this end; empty until it is used."""

    @abstractmethod
    async def address(self) -> bytes:
        """The address of this end, at most 8 KiB; a peer passes it to ``link``. Creates the end if
        there is none. If an end fails, the next one has another address.

        :raises Unavailable: it cannot be created.
        """

    @abstractmethod
    async def link(self, address: bytes) -> Link:
        """The data plane to the peer that has this address.

        :raises PeerFault: the address is not one of this kind of transport.
        :raises Disconnected: it cannot be reached.
        """

    async def leave(self) -> None:  # noqa: B027 # an end of all sessions stays
        """End the session's part; its link has been aborted. Idempotent."""


class Transport(End):
    """One kind of connection.

    A process has one instance of each kind, made by ``transport_for`` on first use."""

    scheme: ClassVar[str]

    @property
    def planes(self) -> tuple[str, ...]:
        """The data planes that its sessions can have, the best first (see ``handshake.offer``)."""
        return (self.scheme,)

    def end(self, plane: str, terms: Terms, generation: Callable[[], int]) -> End:
        """This side's end of a session's data plane; ``generation`` returns how often that was
        reset."""
        return self

    @abstractmethod
    async def listen(
        self,
        url: str,
        accept: Callable[[Channel], Awaitable[None]],
        *,
        tls: Tls | None = None,
        limiter: ConnectionLimiter | None = None,
    ) -> Listener:
        """Run ``accept`` in a new task for each peer that connects and sends something. Port 0
        takes any free port.

        ``limiter`` decides which connections are admitted, and ends those that prove nothing in
        time.

        :raises Unavailable: the address cannot be bound.
        """

    @abstractmethod
    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> Channel:
        """Connect to a listener.

        :raises Disconnected: no process accepts in time.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release threads and memory; idempotent."""


# The destination of a clone's chunks, and their origin.


class Sink(ABC):
    """A state that is being received.

    A chunk is *accepted* once its digest was right and its bytes are where they belong.
    ``lengths`` has the bytes of each chunk of the state.
    """

    lengths: tuple[int, ...]

    @abstractmethod
    def missing(self) -> Sequence[int]:
        """The chunks that are still to be fetched, in the best order to ask for them."""

    @abstractmethod
    def buffers(self, index: int) -> Sequence[memoryview] | None:
        """The memory into which a chunk is received: writable pieces in order, ``lengths[index]``
        bytes together. Called on the loop thread.

        None means that all scratch buffers are in use. Ask again after the next ``accept``.
        """

    def device_buffer(self, index: int) -> OnDevice | None:
        """Like ``buffers``: memory of a device for all of a chunk. None: ask for ``buffers``."""
        return None

    @abstractmethod
    def accept(self, index: int) -> bool:
        """Check what was received and put it where it belongs. Runs in a worker thread, for several
        chunks at once.

        False: the bytes fail the digest, and the chunk is missing again.
        """

    @abstractmethod
    def forget(self, index: int) -> None:
        """Mark a chunk as missing again after ``buffers`` was called for it. Its buffers are not
        written any more."""

    @abstractmethod
    def pieces(self, index: int) -> Sequence[memoryview] | None:
        """The bytes of an accepted chunk, for a receiver that forwards it; None if they were not
        kept."""


class Feed(ABC):
    """A state that a peer holds open for us.

    ``name`` is the peer, for messages. With ``is_bound``, its chunks are likely to be bound. With
    ``reaches_devices``, chunks may be received on a device.
    """

    name: str
    is_bound: bool = False
    reaches_devices: bool = False

    @abstractmethod
    async def receive(
        self, chunks: Mapping[int, Destination], arrived: Callable[[int, bool], None]
    ) -> None:
        """Fill the memory of some chunks. Several calls run at once.

        ``arrived`` is called with the index of each chunk that is there, on any thread. The chunk
        is not written any more. The second argument is True if the chunk is *bound*, which means
        that the channel proves that the peer sent the bytes. Otherwise anybody may have sent them.
        In both cases the caller compares digests.

        However a call ends, even if it is cancelled, no memory is written afterwards, and
        ``arrived`` is not called any more.

        :raises DatastatesError: the error that kept the peer from sending a chunk.
        """

    @abstractmethod
    async def digests(self, indexes: Sequence[int]) -> Sequence[bytes]:
        """BLAKE3 of these chunks, as the peer has them, over an authenticated channel."""

    @abstractmethod
    async def close(self) -> None:
        """Release the state. The caller that opened a feed closes it, and not ``fetch``."""


# What a server serves: the lineage as records, and states to be cloned. Plain methods run in
# worker threads.


class Source(ABC):
    """A state opened for sending; its bytes do not change until ``close``.

    ``manifest`` is ``digest.encode`` of its manifest, without the places where this process holds
    it. ``lengths`` has the bytes of each chunk.
    """

    manifest: bytes
    lengths: tuple[int, ...]

    @abstractmethod
    async def chunk(self, index: int) -> Sequence[memoryview]:
        """The bytes of a chunk in one or more pieces, in order; waits while the chunk is still
        arriving here.

        :raises Unavailable: it will not come.
        """

    def addresses(self) -> Sequence[int]:
        """The address of each chunk, if each is in this process's memory in one piece until
        ``close``; else nothing."""
        return ()

    def is_whole(self, index: int, pieces: Sequence[memoryview]) -> bool:
        """Whether these bytes match the manifest's digest of the chunk."""
        return True

    def when_wanted(self, tell: Callable[[], None]) -> None:  # noqa: B027 # optional
        """Register ``tell``, which is called when the owner needs the memory back. It may be
        called on any thread, any number of times."""

    def recall(self) -> bool:
        """Release the memory, which is not being read now. Returns whether the state can still be
        read, from somewhere else."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the state; idempotent."""


class Store(ABC):
    """A repository, as a server sees it. Errors of our tree travel to the peer by their kind.

    A store that serves only states need not define the other methods: they refuse the request.
    """

    @abstractmethod
    def identity(self) -> Identity:
        """The identity of the served repository."""

    def refs(self) -> list[RefRecord]:
        """Every branch and tag, by name."""
        raise _not_served()

    def find(self, query: str, limit: int, after: str | None) -> StatePage:
        """A page of the states that a query finds."""
        raise _not_served()

    def log(self, rev: str, limit: int, after: str | None) -> StatePage:
        """A page of a state and its ancestors, all parents followed, newest first; ``after`` is
        the uid of the last one seen."""
        raise _not_served()

    def resolve(self, rev: str) -> StateRecord:
        """The state that a revision names."""
        raise _not_served()

    @abstractmethod
    def open(self, uid: str) -> Source:
        """Pin a state and open it.

        :raises Unavailable: its bytes are not here.
        """

    def open_part(self, uid: str, rank: int) -> Source:
        """Pin one rank's part of a state of several ranks, and open it.

        :raises Unavailable: it is not here.
        """
        raise _not_served()

    def reach(self, uid: str) -> Reached:
        """How far away each part of a state is, and where the other processes of this job
        serve."""
        raise _not_served()

    def check_writable(self) -> None:
        """Raise unless peers may push. On the loop thread; must not block.

        :raises InvalidInput: this server accepts no states.
        """
        raise _not_served()

    def receive(self, offer: Offer) -> Sink:
        """Check the description of a state that a peer pushes, then allocate memory for it.

        :raises InvalidInput: something of it is wrong.
        """
        raise _not_served()

    def received(self, offer: Offer, sink: Sink) -> StateRecord:
        """Record the state of a push whose chunks were all accepted.

        :raises Conflict: a ref is at another state.
        """
        raise _not_served()

    def abandon(self, offer: Offer, sink: Sink) -> None:
        """Free the memory of a push that ended without being recorded."""
        raise _not_served()


def _not_served() -> InvalidInput:
    return InvalidInput("this process only sends states, and answers nothing else: ask the source")
