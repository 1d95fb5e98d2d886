"""Reads a state from packs.

Bytes are read into private memory, because a mapped file that is cut short kills the process that
reads it. Files are mapped only for bytes that the caller keeps longer than the reader, or that do
not fit into memory twice. Such maps are private, so writes to them do not reach a file.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from datastates.errors import Corrupt, Unavailable
from datastates.state.digest import chunk_digest, pieces_digest
from datastates.state.manifest import CHUNK_BYTES, ChunkRef, Manifest, PackInfo
from datastates.system.files import open_regular, read_at
from datastates.system.interrupts import checkpoint
from datastates.system.memory import available_memory_bytes

from .copying import Piece, Stage, ThreadBuffer, copy, on_threads, read_steps
from .durable_files import next_step
from .pack import LACKING, MAX_HEADER, padded, places_of
from .tier import Reader

_NAMED_PATHS = 8
_FEWEST = 4  # chunks; fewer are read sooner than threads start
_KEPT = 2  # the chunks read last: tensors that follow each other share them
# nothing is there, or no regular file
_NO_PACK = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENXIO,
)


class MappedReader(Reader):
    """A state on disk, opened. It opens the packs when it is made, so that it outlives their
    removal.

    A pack that is missing, damaged or out of reach raises only when one of its chunks is read.
    Chunks in other packs can be read.

    :raises OSError: this process, or the machine, lacks descriptors or memory.
    """

    is_waited_for = True

    def __init__(self, root: Path, manifest: Manifest, *, verify: bool) -> None:
        self.manifest = manifest
        self._root = root
        self._packs = [_open(root / pack.name, pack) for pack in manifest.packs]
        self._verifies = verify
        self._unverified = set(range(len(manifest.refs))) if verify else set[int]()
        self._unverified_packs = set(range(len(manifest.packs))) if verify else set[int]()
        self._kept: dict[int, memoryview] = {}
        self._is_roomy: bool | None = None
        self._stage: Stage | None = None

    def chunk(self, index: int) -> memoryview:
        """One chunk, in memory that stays as long as the view."""
        kept = self._kept.get(index)
        if kept is not None and not self._is_closed:
            return kept
        length = self.manifest.content.chunks[index].length
        data = _memory(padded(length))
        self._read(index, data)
        view = data[:length].toreadonly()
        latest = {**self._kept, index: view}
        while len(latest) > _KEPT:
            del latest[next(iter(latest))]
        self._kept = latest
        return view

    def span(self, start: int, length: int) -> memoryview | None:
        """A private, writable mapping if the chunks follow each other in one pack; it stays when
        the reader is closed.

        The kernel kills a process that reads it after the file was cut short.
        """
        self._check_open()
        touched = self.chunks_of(start, length)
        if not touched:
            return memoryview(b"")
        first, *rest = (self.manifest.refs[index] for index in touched)
        if any(
            (ref.pack, ref.offset) != (first.pack, first.offset + number * CHUNK_BYTES)
            for number, ref in enumerate(rest, 1)
        ):
            return None
        for index in touched:
            if index in self._unverified:
                self.chunk(index)
        begin = first.offset + start % CHUNK_BYTES
        return self._pack(touched.start).mapped()[begin : begin + length]

    def prepare(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Read the chunks of these stretches on a few threads, if they fit into memory and hold
        little else."""
        self._check_open()
        chunks = self.manifest.content.chunks
        wanted = sorted(
            {index for start, length in stretches for index in self.chunks_of(start, length)}
        )
        whole = sum(chunks[index].length for index in wanted)
        if (
            len(wanted) < _FEWEST
            or sum(length for _, length in stretches) < whole // 2
            or not self._has_room
        ):
            return
        for index in wanted:
            self._pack(index)  # checks its header, on this thread
        stage = Stage(wanted, padded(chunks[wanted[-1]].length))
        stage.fill(self._read)
        self._stage = stage

    def loan(self, start: int, length: int) -> memoryview | None:
        """The bytes that ``prepare`` has read. For other bytes: None if the whole state fits into
        memory, else a mapping."""
        self._check_open()
        if (
            self._stage is not None
            and (
                staged := self._stage.view(
                    self.chunks_of(start, length), start % CHUNK_BYTES, length
                )
            )
            is not None
        ):
            return staged
        return None if self._has_room else self.span(start, length)

    def gather(self, start: int, into: memoryview) -> None:
        """Fill ``into``: whole chunks are read straight into place, and checked there."""
        done = 0
        for index in self.chunks_of(start, into.nbytes):
            offset = start + done - index * CHUNK_BYTES
            piece = into[done : done + CHUNK_BYTES - offset]
            self._gather(index, offset, piece)
            done += piece.nbytes

    def check(self, indices: Sequence[int]) -> None:
        self._check_open()
        wanted = [index for index in indices if index in self._unverified]
        for index in wanted:
            self._pack(index)  # checks its header, on this thread
        room = ThreadBuffer()
        on_threads(wanted, lambda index: self._read(index, room.memory), between=checkpoint)

    def read_pieces(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        """See ``SupportsParallelRead``; chunks are checked again, since the file may have been
        written to meanwhile."""
        self._check_open()
        room = ThreadBuffer()
        on_threads(list(pieces), lambda index: self._read_pieces(index, pieces[index], room))

    def lying(self, index: int) -> memoryview:
        """A chunk as it is mapped, for other processes to read: a file that was cut short gives
        them an error."""
        ref = self.manifest.refs[index]
        return (
            self._pack(index)
            .mapped()[ref.offset : ref.offset + self.manifest.content.chunks[index].length]
            .toreadonly()
        )

    def verify(self) -> None:
        """Check every chunk, and the header of every pack."""
        super().verify()
        self.verify_headers()

    def verify_headers(self) -> None:
        """Check the header of every pack that is not checked yet."""
        for index in sorted(self._unverified_packs):
            self._check_open()
            self._verify_header(_checked(self._packs[index]), index)

    def close(self) -> None:
        """Release the packs; views that are left keep what they show."""
        self._is_closed = True
        self._packs, self._kept, self._stage = [], {}, None

    @property
    def _has_room(self) -> bool:
        """Whether the whole state fits into memory that is free now."""
        if self._is_roomy is None:
            self._is_roomy = (
                sum(chunk.length for chunk in self.manifest.content.chunks)
                <= available_memory_bytes() // 2
            )
        return self._is_roomy

    def _read(self, index: int, into: memoryview) -> None:
        """Read a whole chunk into ``into``, and check it while it is in the processor's cache.

        Runs on any thread."""
        length = self.manifest.content.chunks[index].length
        into = into[: padded(length) if self._verifies else length]
        count = read_at(self._pack(index).fd, into, self.manifest.refs[index].offset)
        if self._verifies:
            self._verify(into[:count], index)
        elif count < length:
            raise self._cut(index, count)

    def _read_pieces(self, index: int, pieces: Sequence[Piece], room: ThreadBuffer) -> None:
        """Read each step into place or into ``room``, and digest it while it is in the cache.

        Runs on any thread."""

        def strides() -> Iterator[memoryview]:
            for step in read_steps(
                pieces, self.manifest.content.chunks[index].length, is_whole=self._verifies
            ):
                stride = room.memory[: step.length] if step.memory is None else step.memory
                offset = self.manifest.refs[index].offset + step.offset
                count = read_at(self._pack(index).fd, stride, offset)
                if count < stride.nbytes:
                    raise self._cut(index, step.offset + count)
                yield stride
                for piece in step.pieces:
                    copy(piece.memory, stride[piece.offset - step.offset :][: piece.memory.nbytes])

        if not self._verifies:
            for _ in strides():
                pass
        elif pieces_digest(strides()) != self.manifest.content.chunks[index].digest:
            raise self._failed(index)

    def _pack(self, index: int) -> _Pack:
        self._check_open()
        number = self.manifest.refs[index].pack
        try:
            pack = _checked(self._packs[number])
        except Corrupt as exc:
            raise Corrupt(f"{exc}: {self._whose(index)}") from None
        if number in self._unverified_packs:
            self._verify_header(pack, number)
        return pack

    def _gather(self, index: int, offset: int, into: memoryview) -> None:
        kept, is_unverified = self._kept.get(index), index in self._unverified
        is_whole = into.nbytes == CHUNK_BYTES  # no zeros follow a whole chunk
        if kept is None and (is_whole or not is_unverified):
            count = read_at(self._pack(index).fd, into, self.manifest.refs[index].offset + offset)
            if is_unverified:
                self._verify(into[:count], index)
            elif count < into.nbytes:
                raise self._cut(index, offset + count)
        else:
            into[:] = self.chunk(index)[offset : offset + into.nbytes]

    def _verify(self, data: memoryview, index: int) -> None:
        """Check a chunk, and what follows it to the end of its page, if there is any."""
        chunk = self.manifest.content.chunks[index]
        if data.nbytes < padded(chunk.length):
            raise self._cut(index, data.nbytes)
        if chunk_digest(data[: chunk.length]) != chunk.digest:
            raise self._failed(index)
        if any(data[chunk.length :]):
            ref = self.manifest.refs[index]
            end, filled = ref.offset + chunk.length, ref.offset + padded(chunk.length)
            raise Corrupt(
                f"{self._path(ref)}: bytes {end}-{filled} are to be zeros behind a chunk, and are"
                f" not: {self._whose(index)}"
            )
        self._unverified.discard(index)

    def _failed(self, index: int) -> Corrupt:
        chunk, ref = self.manifest.content.chunks[index], self.manifest.refs[index]
        return Corrupt(
            f"{self._path(ref)}: bytes {ref.offset}-{ref.offset + chunk.length} fail their digest:"
            f" {self._whose(index)}"
        )

    def _cut(self, index: int, count: int) -> Corrupt:
        ref = self.manifest.refs[index]
        return Corrupt(
            f"{self._path(ref)} was cut short while it was read, at {ref.offset + count}:"
            f" {self._whose(index)}"
        )

    def _verify_header(self, pack: _Pack, index: int) -> None:
        info = self.manifest.packs[index]
        if (
            info.header_length > MAX_HEADER
            or pieces_digest(_pieces(pack.fd, info.header_length)) != info.header_digest
        ):
            raise Corrupt(
                f"{self._root / info.name}: its header, bytes 0-{info.header_length}, fails its"
                f" digest: state {self.manifest.origin.uid} needs this pack: restore another state"
            )
        self._unverified_packs.discard(index)

    def _path(self, ref: ChunkRef) -> Path:
        return self._root / self.manifest.packs[ref.pack].name

    def _whose(self, index: int) -> str:
        """A text that names a chunk and the tensors in it."""
        start, end = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
        paths = [
            place.spec.path
            for place in places_of(bytes(self.manifest.content.tensors))
            if place.start < end and place.end > start
        ]
        more = f" and {len(paths) - _NAMED_PATHS} more" if len(paths) > _NAMED_PATHS else ""
        held = ", ".join(paths[:_NAMED_PATHS]) + more or "no tensor"
        return (
            f"chunk {index} of state {self.manifest.origin.uid}, which holds {held}: restore"
            " another state"
        )


class _Pack:
    """An open pack of the size in its manifest."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self._size = fd, size
        self._map: memoryview | None = None

    def mapped(self) -> memoryview:
        """The whole file, mapped copy-on-write.

        :raises Corrupt: it was cut short meanwhile.
        :raises Unavailable: this process, or the machine, lacks what a map needs.
        """
        if self._map is None:
            flags = mmap.MAP_PRIVATE | (
                getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
            )
            options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            try:
                self._map = memoryview(
                    mmap.mmap(
                        self.fd,
                        self._size,
                        flags=flags,
                        prot=mmap.PROT_READ | mmap.PROT_WRITE,
                        **options,
                    )
                )
            except ValueError as exc:
                raise Corrupt(
                    f"a pack of {self._size} bytes cannot be mapped ({exc}): it was cut short"
                ) from exc
            except OSError as exc:
                raise Unavailable(
                    f"a pack of {self._size} bytes cannot be mapped ({exc}): {next_step(exc)}"
                ) from exc
        return self._map

    def __del__(self) -> None:
        os.close(self.fd)


def _open(path: Path, pack: PackInfo) -> _Pack | Corrupt | Unavailable:
    """The pack, or what keeps it from being read.

    :raises OSError: descriptors or memory have run out.
    """
    try:
        fd = open_regular(path)
    except OSError as exc:
        if exc.errno in LACKING:
            raise
        if exc.errno == errno.ENOENT:
            return Corrupt(f"{path} is missing")
        said = f"{path} cannot be opened ({exc})"
        return Corrupt(said) if exc.errno in _NO_PACK else Unavailable(f"{said}: {next_step(exc)}")
    size = os.fstat(fd).st_size
    if size == pack.size:
        # Not WILLNEED: it fills the page cache with small pages, from which later reads take twice
        # as long.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return _Pack(fd, size)
    os.close(fd)
    return Corrupt(f"{path} has {size} bytes, {pack.size} were written")


def _checked(pack: _Pack | Corrupt | Unavailable) -> _Pack:
    """The pack, if it can be read.

    :raises Corrupt: it is missing or damaged.
    :raises Unavailable: it may be sound, and cannot be read.
    """
    if isinstance(pack, _Pack):
        return pack
    raise type(pack)(str(pack))


def _pieces(fd: int, length: int) -> Iterator[memoryview]:
    for start in range(0, length, CHUNK_BYTES):
        piece = _memory(min(CHUNK_BYTES, length - start))
        yield piece[: read_at(fd, piece, start)]


def _memory(length: int) -> memoryview:
    return np.empty(length, np.uint8).data
