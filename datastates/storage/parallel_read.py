"""Lets several ranks read one state at once. A chunk that several ranks want is read by one of
them, which passes it on.

Everything is collective, on the training threads. Every rank opens the parts that it reaches. The
ranks exchange which parts they reach and which chunks they want. Each rank computes the same plan
of which rank reads which chunk for which ranks. Each rank checks every chunk that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from datastates.collective import CollectiveCall
from datastates.errors import Corrupt, NotFound, Unavailable
from datastates.state.digest import chunk_digest, decode, encode, first_chunks
from datastates.state.manifest import CHUNK_BYTES, ChunkRef, Manifest
from datastates.system.interrupts import checkpoint

from .copying import Stage
from .reading import PartsReader
from .tier import Reader

NOT_HERE = 255
"""The distance of a part that a process does not reach."""


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """The transfer of a chunk from the rank that reads it to the other ranks that want it."""

    chunk: int
    root: int
    to: tuple[int, ...]


def plan_transfers(
    wants: Sequence[Sequence[int]], places: Sequence[Sequence[int]], starts: Sequence[int]
) -> list[ChunkTransfer]:
    """Which rank reads which chunk for which others, for every chunk that is passed on.

    ``wants`` has the chunks by rank. ``places`` has the distance of each part, by rank and part:
    255 if the rank does not reach it. ``starts`` has the first chunk of each part, and the end. The
    nearest rank that wants a chunk reads it. Among equally near ranks, the rank that has read least
    reads it. If none of them reaches it, another rank reads it.
    """
    wanting: dict[int, list[int]] = {}
    for rank, chunks in enumerate(wants):
        for chunk in chunks:
            wanting.setdefault(chunk, []).append(rank)
    loads = [0] * len(wants)
    found = []
    part = 0
    for chunk in sorted(wanting):
        while chunk >= starts[part + 1]:
            part += 1
        ranks = wanting[chunk]
        near = [rank for rank in ranks if places[rank][part] < NOT_HERE] or range(len(wants))
        root = min(near, key=lambda rank: (places[rank][part], loads[rank], rank))
        loads[root] += 1
        to = tuple(rank for rank in ranks if rank != root)
        if to:
            found.append(ChunkTransfer(chunk, root, to))
    return found


class SharedReader(PartsReader):
    """A reader of all parts of a state, of which this rank reaches some. It holds in memory the
    chunks that other ranks pass on to it."""

    def __init__(
        self,
        meeting: CollectiveCall,
        parts: Sequence[Reader],
        places: Sequence[bytes],
        *,
        rank: int,
    ) -> None:
        super().__init__(parts, rank=rank)
        self._meeting, self._places = meeting, places
        self._first = first_chunks([part.manifest for part in parts])
        self._passed: Stage | None = None

    def fetch(self, chunks: Sequence[int]) -> None:
        """Make these chunks available here; collective, and each rank gives its own.

        :raises Corrupt: a chunk that was read, or passed on, fails its digest, here or on another
            rank.
        """
        marks = np.zeros(self._first[-1], np.uint8)
        marks[list(chunks)] = 1
        said = self._meeting.meet(np.packbits(marks).tobytes())
        wants = [
            np.flatnonzero(
                np.unpackbits(np.frombuffer(each, np.uint8), count=self._first[-1])
            ).tolist()
            for each in said
        ]
        rank = self._meeting.group.rank
        error: Exception | None = None
        bad: list[ChunkTransfer] = []
        planned = plan_transfers(wants, self._places, self._first)
        given = {each.chunk for each in planned if rank in each.to}
        super().ahead(
            [
                *sorted(each.chunk for each in planned if each.root == rank),
                *sorted(set(wants[rank]) - given),
            ]
        )
        shared = {each.chunk for each in planned}.intersection(wants[rank])
        if shared:
            # chunks that follow each other in the stream do so there, so tensors over several
            # chunks are views
            self._passed = Stage(sorted(shared), self.manifest.content.chunks[max(shared)].length)
        for transfer in planned:
            if transfer.root == rank:
                error = self._give(transfer, error)
            elif rank in transfer.to and not self._take(transfer):
                bad.append(transfer)
        if error is not None:
            raise error
        self._meeting.meet()
        if bad:
            raise Corrupt(
                f"chunk {bad[0].chunk} of state {self.manifest.origin.uid}, which rank"
                f" {bad[0].root} read and passed on, came to rank {rank} as something else: check"
                " the network, and the memory of both"
            )

    def chunk(self, index: int) -> memoryview:
        """One chunk, as it was passed on, or from its part."""
        passed = self._view(index * CHUNK_BYTES, self.manifest.content.chunks[index].length)
        return super().chunk(index) if passed is None else passed.toreadonly()

    def span(self, start: int, length: int) -> memoryview | None:
        """The part's own span, if nothing of the stretch was passed on."""
        return None if self._is_passed(start, length) else super().span(start, length)

    def ahead(self, chunks: Sequence[int]) -> None:
        """Begin to fetch those of these chunks that were not passed on."""
        passed = self._passed
        super().ahead([each for each in chunks if passed is None or not passed.holds(each)])

    def loan(self, start: int, length: int) -> memoryview | None:
        """The part's own loan, or a view of what was passed on."""
        return (
            self._view(start, length)
            if self._is_passed(start, length)
            else super().loan(start, length)
        )

    def prepare(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Have each part prepare the stretches that it holds entirely, and of which nothing was
        passed on."""
        super().prepare([each for each in stretches if not self._is_passed(*each)])

    def _is_passed(self, start: int, length: int) -> bool:
        return self._passed is not None and any(
            map(self._passed.holds, self.chunks_of(start, length))
        )

    def _view(self, start: int, length: int) -> memoryview | None:
        """A view of the stretch, if all of its chunks were passed on."""
        return (
            None
            if self._passed is None
            else self._passed.view(self.chunks_of(start, length), start % CHUNK_BYTES, length)
        )

    def _give(self, transfer: ChunkTransfer, error: Exception | None) -> Exception | None:
        """Read a chunk and pass it on.

        An error is returned, not raised, since the other ranks wait for the chunk."""
        length = self.manifest.content.chunks[transfer.chunk].length
        data: memoryview | None = None
        if error is None:
            try:
                data = self._read(transfer.chunk, length)
            except Exception as exc:  # the other ranks must not wait for ever
                error = exc
        self._meeting.group.pass_on(
            memoryview(bytes(length)) if data is None else data,
            transfer.root,
            self._receivers(transfer),
        )
        return error

    def _read(self, index: int, length: int) -> memoryview:
        """A chunk from its part; if this rank wants it too, it is read to where it stays."""
        if self._passed is None or not self._passed.holds(index):
            return super().chunk(index)
        room = self._passed.room(index, length)
        part, start = self._part_of(index)
        part.gather((index - start) * CHUNK_BYTES, room)
        return room

    def _take(self, transfer: ChunkTransfer) -> bool:
        """Receive a chunk; returns whether it matches its digest."""
        chunk = self.manifest.content.chunks[transfer.chunk]
        assert self._passed is not None
        room = self._passed.room(transfer.chunk, chunk.length)
        self._meeting.group.pass_on(room, transfer.root, self._receivers(transfer))
        return chunk_digest(room) == chunk.digest

    def _receivers(self, transfer: ChunkTransfer) -> tuple[int, ...] | None:
        return None if len(transfer.to) == self._meeting.group.size - 1 else transfer.to


class _RemotePart(Reader):
    """A reader in place of a part that only other ranks reach."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def chunk(self, index: int) -> memoryview:
        origin = self.manifest.origin
        raise Unavailable(
            f"chunk {index} of rank {origin.rank} of state {origin.uid} is not here, and was not"
            " passed on"
        )

    def span(self, start: int, length: int) -> memoryview | None:
        return None

    def close(self) -> None:
        """Do nothing: nothing is held."""


def open_shared(
    meeting: CollectiveCall,
    uid: str,
    size: int,
    open_part: Callable[[int], tuple[Reader, int]],
    *,
    rank: int,
) -> SharedReader:
    """A reader of a state of ``size`` parts; collective. Each rank opens the parts that it reaches.
    Values come from the part of ``rank``.

    ``open_part`` returns a part, and how far away it is: 0 is this process's memory.

    :raises Unavailable: no rank reaches a part.
    :raises Corrupt: a manifest is damaged; or they are not the parts of one state.
    """
    with ExitStack() as stack:
        parts: dict[int, Reader] = {}
        near = bytearray([NOT_HERE]) * size
        for number in range(size):
            try:
                part, far = open_part(number)
            except NotFound:
                continue
            parts[number], near[number] = stack.enter_context(part), min(far, NOT_HERE - 1)
        places = meeting.meet(bytes(near))
        parts |= {
            number: _RemotePart(found)
            for number, found in _manifests(meeting, uid, parts, places).items()
        }
        reader = SharedReader(meeting, [parts[number] for number in range(size)], places, rank=rank)
        stack.pop_all()
        return reader


def _manifests(
    meeting: CollectiveCall, uid: str, parts: Mapping[int, Reader], places: Sequence[bytes]
) -> dict[int, Manifest]:
    """The manifests of the parts that this rank does not reach, from those that do."""
    group, size = meeting.group, len(places[0])
    nearest = [
        min(range(group.size), key=lambda rank: places[rank][number]) for number in range(size)
    ]
    lacking = [
        tuple(rank for rank in range(group.size) if places[rank][number] == NOT_HERE)
        for number in range(size)
    ]
    missing = [str(number) for number in range(size) if len(lacking[number]) == group.size]
    if missing:
        raise Unavailable(
            f"no rank reaches the parts of rank {', '.join(missing)} of state {uid}: bring their"
            " folder, or restore another state"
        )
    if not any(lacking):
        return {}
    own = {
        number: encode(msgspec.structs.replace(parts[number].manifest, packs=(), refs=()))
        for number in range(size)
        if lacking[number] and nearest[number] == group.rank
    }
    lengths: dict[int, int] = {}
    for said in meeting.meet(
        msgspec.msgpack.encode({number: len(data) for number, data in own.items()})
    ):
        lengths |= msgspec.msgpack.decode(said, type=dict[int, int])
    received = {
        number: bytearray(length) for number, length in lengths.items() if number not in parts
    }
    for number in sorted(lengths):
        data = own.get(number, received.get(number))
        if data is not None:
            group.pass_on(data, nearest[number], lacking[number])
    return {
        number: decode(
            memoryview(data), source=f"part {number} of state {uid} from rank {nearest[number]}"
        )
        for number, data in received.items()
    }


# A state's seal: a digest of its chunks for which no one can make other content.


DIGEST_BYTES = 32

_Place = tuple[bytes, int, ChunkRef | None]


def seal_of(digest: str, chunks: Iterable[bytes]) -> str:
    """The seal of the state of this digest, in hex, by the BLAKE3 of each of its chunks."""
    hasher = blake3(b"datastates content 1\0" + digest.encode())
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


class SealedChunks(Sequence[memoryview]):
    """The chunks of an open state. Each access reads and checks the chunk again, so that the
    checked bytes are written.

    ``digests`` has the BLAKE3 of each chunk. If it is None, later reads are compared with the first
    read of each chunk.
    """

    def __init__(self, reader: Reader, digests: Sequence[bytes] | None = None) -> None:
        count = len(reader.manifest.content.chunks)
        if digests is not None and len(digests) != count:
            raise Corrupt(
                f"state {reader.manifest.origin.uid} has {count} chunks, and {len(digests)} digests"
                " were given for them"
            )
        self._reader = reader
        self._known: dict[_Place, bytes] = {}
        if digests is not None:
            for index, digest in enumerate(digests):
                self._note(index, digest)

    def check(self) -> None:
        """Read every chunk. Chunks at the same place are read once.

        :raises Corrupt: a chunk is wrong; names the first.
        """
        for index in {self._place(index): index for index in range(len(self))}.values():
            checkpoint()
            self[index]

    @property
    def digests(self) -> list[bytes]:
        """The BLAKE3 of each chunk, once ``check`` was called."""
        return [self._known[self._place(index)] for index in range(len(self))]

    @property
    def seal(self) -> str:
        """The state's seal, once ``check`` was called."""
        return seal_of(self._reader.manifest.digest, self.digests)

    def __len__(self) -> int:
        return len(self._reader.manifest.content.chunks)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)  # ends an iteration
        view = self._reader.chunk(index)
        self._note(index, blake3(view).digest())
        return view

    def _note(self, index: int, digest: bytes) -> None:
        if self._known.setdefault(self._place(index), digest) != digest:
            raise Corrupt(
                f"chunk {index} of state {self._reader.manifest.origin.uid} has the digest that"
                " guards against rot and is not what it was when it was sealed, or a moment ago:"
                " somebody has forged it, or writes to it now"
            )

    def _place(self, index: int) -> _Place:
        manifest = self._reader.manifest
        chunk = manifest.content.chunks[index]
        return chunk.digest, chunk.length, manifest.refs[index] if manifest.refs else None
