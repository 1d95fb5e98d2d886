"""The contract of a place for payload, and the types that tiers and the engine share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

from datastates.errors import Closed, InvalidInput, NotFound
from datastates.lineage.states import Status
from datastates.state.manifest import CHUNK_BYTES, Manifest
from datastates.system.interrupts import checkpoint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Payload:
    """A whole state to put: its manifest and, in the manifest's order, the bytes of each chunk.

    ``chunks[i]`` has exactly ``manifest.content.chunks[i].length`` bytes, and stays unchanged until
    ``put`` returns. Memory at the start of a page is best, since it is written as it is. With
    ``is_on_demand``, each access makes and checks the chunk, so that a state larger than memory can
    be put.
    """

    manifest: Manifest
    chunks: Sequence[memoryview]
    is_on_demand: bool = False

    def check(self) -> None:
        """Raise unless every chunk has exactly its bytes.

        :raises InvalidInput: they do not fit the manifest.
        """
        if self.is_on_demand:
            return
        wanted = [chunk.length for chunk in self.manifest.content.chunks]
        found = [view.nbytes for view in self.chunks]
        if found != wanted:
            raise InvalidInput(
                f"state {self.manifest.origin.uid} lists chunks of {_brief(wanted)} bytes, but came"
                f" with {_brief(found)}"
            )
        if not all(view.c_contiguous for view in self.chunks):
            raise InvalidInput(
                f"state {self.manifest.origin.uid}: a chunk is no contiguous memory: pass one"
                " stretch of bytes for each"
            )


@dataclass(frozen=True, slots=True)
class Placed:
    """The result of ``put``: the manifest with this tier's places in it, and how many payload
    bytes this call added."""

    manifest: Manifest
    bytes_new: int


class Reader(ABC):
    """One state opened for reading. Views are valid, and their bytes stay as they are, until
    ``close``.

    Every chunk is checked against its digest the first time that it is read, unless the reader was
    opened with ``verify=False``. No method but ``span`` and ``lying`` may return memory to which a
    file is mapped.
    """

    manifest: Manifest
    _is_closed: bool = False
    is_waited_for: ClassVar[bool] = False
    """Whether ``chunk`` reads a file, so that a thread for which others wait should not call it."""

    @abstractmethod
    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk, read-only.

        :raises Corrupt: the bytes fail their digest or are cut short; names the file, the offset
            and the chunk.
        """

    @abstractmethod
    def span(self, start: int, length: int) -> memoryview | None:
        """The verified bytes of ``[start, start + length)`` of the stream without a copy.

        If the tier can give private (copy-on-write) memory, the view is writable, and its memory
        outlives ``close`` for as long as the view exists. None if the bytes are not contiguous or
        cannot be handed out: gather them from chunks then.
        """

    def when_wanted(self, tell: Callable[[], None]) -> None:
        """``tell`` is called, on any thread, when the memory that this reader keeps is wanted back.
        Close the reader soon then.

        Does nothing if the reader keeps no memory.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Release the state; idempotent."""

    # memory has nothing to do ahead
    def prepare(self, stretches: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Read these stretches of the stream (start, length), which are borrowed next, at once if
        that is faster than one by one.

        :raises Corrupt: as for ``chunk``.
        """

    def ahead(self, chunks: Sequence[int]) -> None:  # noqa: B027
        """Begin to fetch these chunks, which will be read in this order, if they are elsewhere;
        never waits."""

    def loan(self, start: int, length: int) -> memoryview | None:
        """A ``span`` that may only be read, and only while the reader is open.

        None: ``gather`` the bytes instead."""
        return self.span(start, length)

    def gather(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with verified bytes of the stream from ``start`` on.

        :raises Corrupt: as for ``chunk``.
        """
        done = 0
        for index in self.chunks_of(start, into.nbytes):
            offset = start + done - index * CHUNK_BYTES
            piece = self.chunk(index)[offset : offset + into.nbytes - done]
            into[done : done + piece.nbytes] = piece
            done += piece.nbytes

    def lying(self, index: int) -> memoryview:
        """A chunk in place, unverified, for other processes to read; its address stays the same
        while the reader is open."""
        return self.chunk(index)

    def pinned(self, chunks: Sequence[int]) -> list[torch.Tensor] | None:
        """The bytes of these chunks, checked, in memory from which devices copy asynchronously.

        Each tensor has chunks that follow each other in ``chunks``. None if they are not in such
        memory. Valid until ``close``.

        :raises Corrupt: as for ``chunk``.
        """
        return None

    def chunks_of(self, start: int, length: int) -> range:
        """The indices of the chunks with ``[start, start + length)`` of the stream.

        :raises InvalidInput: the stream has no such bytes.
        """
        chunks = self.manifest.content.chunks
        touched = (
            range(start // CHUNK_BYTES, -(-(start + length) // CHUNK_BYTES))
            if length > 0
            else range(0)
        )
        for index in touched:
            end = min(start + length - index * CHUNK_BYTES, CHUNK_BYTES)
            if not 0 <= index < len(chunks) or end > chunks[index].length:
                raise InvalidInput(
                    f"state {self.manifest.origin.uid} has no bytes {start}-{start + length}: chunk"
                    f" {index} ends before"
                )
        return touched

    def verify(self) -> None:
        """Check every chunk.

        :raises Corrupt: a chunk fails its digest; names the first.
        """
        for index in range(len(self.manifest.content.chunks)):
            checkpoint()
            self.chunk(index)

    def verify_headers(self) -> None:  # noqa: B027  # most tiers have nothing there
        """Check what is stored in addition to the chunks, if anything is.

        :raises Corrupt: it is damaged.
        """

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(
                f"the reader of state {self.manifest.origin.uid} is closed: open the state again"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tier(ABC):
    """A place for payload. Every method is safe from any thread.

    ``name`` is its name in the lineage, of at most twelve letters. ``gives`` is the status of a
    state that is whole here. ``node`` names the process, folder or machine with which the tier is
    lost, and is empty if there is none. With ``holds_parts``, the ranks of a job may each put their
    own part of one state (``manifest.origin.rank``), and ``open_part`` opens any of them. ``open``
    and ``has`` are then about the part of rank 0, and ``remove`` removes all parts.
    """

    name: ClassVar[str]
    gives: ClassVar[Status] = Status.EXTERNAL
    node: str = ""
    holds_parts: bool = False

    @abstractmethod
    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Store a state completely, or leave no trace of it. It is visible to ``open`` only once
        every byte is safe.

        ``base`` is a manifest that this tier placed earlier (the nearest ancestor): chunks whose
        digest it has are referenced, not stored again. A tier may find further chunks that it
        holds. Putting a uid that is already here is a no-op that returns what is here.
        """

    @abstractmethod
    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Open a state for reading; its bytes stay until the reader is closed, even if it is
        removed.

        :raises NotFound: it is not here.
        :raises Corrupt: its manifest is damaged.
        """

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """Open the part of a state that one of its ranks captured. A state of one part has only
        rank 0.

        :raises NotFound: it is not here.
        :raises Corrupt: its manifest is damaged.
        """
        reader = self.open(uid, verify=verify)
        if reader.manifest.origin.rank == rank:
            return reader
        reader.close()
        raise NotFound(f"rank {rank} of state {uid} is not here")

    @abstractmethod
    def uids(self) -> Iterator[str]:
        """The uid of every complete state that is here, in no order."""

    @abstractmethod
    def close(self) -> None:
        """Release files and memory; idempotent."""

    def check(self, repository: str) -> None:  # noqa: B027  # a tier may have nothing to check
        """Check that the tier can be used for the repository with this uid. It is called when the
        repository is opened for writing, and before the first copy.

        :raises InvalidInput: the tier is not configured correctly.
        :raises Conflict: it belongs to another repository.
        :raises Unavailable: it does not respond now.
        """

    def has_part(self, uid: str, rank: int) -> bool:
        """Whether one rank's part of a state is here. A copy counts once this returns True."""
        if rank == 0:
            return self.has(uid)
        try:
            self.open_part(uid, rank, verify=False).close()
        except NotFound:
            return False
        return True

    def has(self, uid: str) -> bool:
        """Whether a state is here, as far as is known without reading its bytes."""
        try:
            self.open(uid, verify=False).close()
        except NotFound:
            return False
        return True


@runtime_checkable
class SupportsRemoval(Protocol):
    """A tier that can drop a state.

    Any other keeps what it was given, such as an archive, or a bucket that only its owner
    cleans."""

    def remove(self, uid: str) -> int:
        """Drop a state and every byte that no other state here needs; returns the payload bytes
        freed, 0 for an unknown uid.

        It is gone for ``open`` and ``uids`` at once; what open readers need is freed when the last
        of them closes.
        """


@runtime_checkable
class SupportsManifests(Protocol):
    """A tier whose states can be inspected, and read in part, without opening all of their
    bytes."""

    def manifest(self, uid: str) -> Manifest:
        """The manifest of a state, with the place of each chunk.

        :raises NotFound: it is not here.
        :raises Corrupt: it is damaged, or another state's.
        """


@runtime_checkable
class SupportsDirectWrite(Protocol):
    """A tier that writes memory that begins at a page directly, past the page cache."""

    @property
    def is_direct(self) -> bool:
        """Whether it writes directly here."""


def _brief(lengths: list[int]) -> str:
    return (
        ", ".join(map(str, lengths[:4]))
        + (f" and {len(lengths) - 4} more" if len(lengths) > 4 else "")
        or "no"
    )
