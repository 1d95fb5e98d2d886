"""Reading a state from packs that are mapped privately: what a reader writes into its views never reaches a file."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from datastates.digest import chunk_digest
from datastates.errors import Closed, Corrupt
from datastates.manifest import CHUNK_BYTES, Chunk, ChunkRef, Manifest, PackInfo

from .pack import padded, places_of
from .tier import Reader

__all__ = ["MappedReader"]

_NAMED_PATHS = 8
_AHEAD = 4


class MappedReader(Reader):
    """A state on disk, opened. Its packs are mapped when it is made, so that it outlives their removal.

    Of a pack that is missing or damaged nothing is said before a chunk of it is asked for: what lies elsewhere can be read.
    """

    def __init__(self, root: Path, manifest: Manifest, *, verify: bool) -> None:
        self.manifest = manifest
        self._root = root
        self._maps = [_map(root / pack.name, pack) for pack in manifest.packs]
        self._unverified = set(range(len(manifest.refs))) if verify else set[int]()
        self._unverified_packs = set(range(len(manifest.packs))) if verify else set[int]()
        self._told = 0
        self._is_closed = False

    def chunk(self, index: int) -> memoryview:
        """One chunk, as it lies in its pack."""
        maps = self._check_open()
        ref, chunk = self.manifest.refs[index], self.manifest.content.chunks[index]
        pack = maps[ref.pack]
        if isinstance(pack, str):
            raise Corrupt(f"{pack}: {self._whose(index)}")
        self._read_ahead(maps, index)
        data = memoryview(pack)
        if index in self._unverified:
            self._verify(data, index, ref, chunk)
            self._unverified.discard(index)
        return data[ref.offset : ref.offset + chunk.length].toreadonly()

    def span(self, start: int, length: int) -> memoryview | None:
        """A private, writable view where the chunks follow each other in one pack; it stays when the reader is closed."""
        maps = self._check_open()
        touched = self.chunks_of(start, length)
        if not touched:
            return memoryview(b"")
        first, *rest = (self.manifest.refs[index] for index in touched)
        if any(ref != ChunkRef(first.pack, first.offset + number * CHUNK_BYTES) for number, ref in enumerate(rest, 1)):
            return None
        for index in touched:
            self.chunk(index)
        pack = maps[first.pack]
        begin = first.offset + start % CHUNK_BYTES
        return None if isinstance(pack, str) else memoryview(pack)[begin : begin + length]

    def verify(self) -> None:
        """Check every chunk, and the header of every pack."""
        super().verify()
        for index in sorted(self._unverified_packs):
            pack = self._check_open()[index]
            if isinstance(pack, str):
                raise Corrupt(pack)
            self._verify_header(memoryview(pack), index)

    def close(self) -> None:
        """Let go of the packs; views that are left keep theirs mapped."""
        self._is_closed = True
        self._maps = []

    def _read_ahead(self, maps: list[mmap.mmap | str], index: int) -> None:
        """Have the disk read this chunk and the next few, those that it was not yet told."""
        for upcoming in range(max(index, self._told), min(index + _AHEAD, len(self.manifest.refs))):
            ref, pack = self.manifest.refs[upcoming], maps[self.manifest.refs[upcoming].pack]
            if isinstance(pack, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
                pack.madvise(mmap.MADV_WILLNEED, ref.offset // mmap.PAGESIZE * mmap.PAGESIZE, self.manifest.content.chunks[upcoming].length)
        self._told = max(self._told, index + _AHEAD)

    def _check_open(self) -> list[mmap.mmap | str]:
        maps = self._maps
        if self._is_closed:
            raise Closed(f"the reader of state {self.manifest.origin.uid} is closed: open the state again")
        return maps

    def _verify(self, data: memoryview, index: int, ref: ChunkRef, chunk: Chunk) -> None:
        if ref.pack in self._unverified_packs:
            self._verify_header(data, ref.pack)
        end = ref.offset + chunk.length
        if chunk_digest(data[ref.offset : end]) != chunk.digest:
            raise Corrupt(f"{self._path(ref)}: bytes {ref.offset}-{end} fail their digest: {self._whose(index)}")
        filled = ref.offset + padded(chunk.length)
        if filled > data.nbytes or any(data[end:filled]):
            raise Corrupt(f"{self._path(ref)}: bytes {end}-{filled} are to be zeros behind a chunk, and are not: {self._whose(index)}")

    def _verify_header(self, data: memoryview, index: int) -> None:
        pack = self.manifest.packs[index]
        if chunk_digest(data[: pack.header_length]) != pack.header_digest:
            raise Corrupt(
                f"{self._root / pack.name}: its header, bytes 0-{pack.header_length}, fails its digest: state {self.manifest.origin.uid} "
                "needs this pack: restore another state"
            )
        self._unverified_packs.discard(index)

    def _path(self, ref: ChunkRef) -> Path:
        return self._root / self.manifest.packs[ref.pack].name

    def _whose(self, index: int) -> str:
        """What is lost with a chunk."""
        start, end = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
        paths = [place.spec.path for place in places_of(bytes(self.manifest.content.tensors)) if place.start < end and place.end > start]
        more = f" and {len(paths) - _NAMED_PATHS} more" if len(paths) > _NAMED_PATHS else ""
        held = ", ".join(paths[:_NAMED_PATHS]) + more or "no tensor"
        return f"chunk {index} of state {self.manifest.origin.uid}, which holds {held}: restore another state"


def _map(path: Path, pack: PackInfo) -> mmap.mmap | str:
    """The pack mapped copy-on-write; or what is wrong with it, in words."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as exc:
        return f"{path} cannot be opened ({exc})"
    try:
        size = os.fstat(fd).st_size
        if size != pack.size:
            return f"{path} has {size} bytes, {pack.size} were written"
        flags = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0)
        if sys.version_info >= (3, 13):
            return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, trackfd=False)
        return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as exc:
        return f"{path} cannot be read ({exc})"
    finally:
        os.close(fd)
