"""A reader of a state whose chunks are in memory as plain bytes, for tiers that fetch a whole state at once."""

from __future__ import annotations

from collections.abc import Sequence

from datastates.content.digest import chunk_digest
from datastates.content.manifest import CHUNK_BYTES, Manifest
from datastates.errors import Closed, Corrupt

from .tier import Reader

__all__ = ["HeldReader"]


class HeldReader(Reader):
    """Reads ``chunks``, in the order of the manifest. Errors name ``source`` as the place from which they came."""

    def __init__(self, manifest: Manifest, chunks: Sequence[bytes | memoryview], *, source: str, verify: bool = True) -> None:
        if len(chunks) != len(manifest.content.chunks):
            raise Corrupt(f"state {manifest.origin.uid}: {len(manifest.content.chunks)} chunks are listed, {len(chunks)} are in {source}")
        self.manifest = manifest
        self._chunks: list[memoryview] | None = [memoryview(chunk).toreadonly() for chunk in chunks]
        self._source = source
        self._unverified = set(range(len(chunks))) if verify else set[int]()

    def chunk(self, index: int) -> memoryview:
        """One chunk, compared with its digest the first time."""
        uid = self.manifest.origin.uid
        if self._chunks is None:
            raise Closed(f"the reader of state {uid} is closed: open the state again")
        view, chunk = self._chunks[index], self.manifest.content.chunks[index]
        if index in self._unverified:
            if view.nbytes != chunk.length or chunk_digest(view) != chunk.digest:
                raise Corrupt(f"state {uid}: chunk {index} fails its digest in {self._source}: restore another state")
            self._unverified.discard(index)
        return view

    def span(self, start: int, length: int) -> memoryview | None:
        """A view if the stretch lies in one chunk, else None."""
        touched = self.chunks_of(start, length)
        if len(touched) > 1:
            for index in touched:
                self.chunk(index)
            return None
        if not touched:
            return memoryview(b"")
        offset = start - touched.start * CHUNK_BYTES
        return self.chunk(touched.start)[offset : offset + length]

    def close(self) -> None:
        """Release the bytes."""
        self._chunks = None
