"""A state's seal: a digest of its chunks for which no one can make other content.

A state's own digest covers its structure, its history and the xxh3 of its chunks. It shows which state this claims to be, and whether it
has rotted. But other bytes with the same xxh3 can be made in milliseconds, so it does not show who made them. A seal is BLAKE3 over that
digest and the BLAKE3 of each chunk. It is made when a state is first exported, imported or verified, never when it is captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blake3 import blake3

from datastates.content.manifest import ChunkRef
from datastates.errors import Corrupt
from datastates.system.interrupts import checkpoint

from .tier import Reader

__all__ = ["DIGEST_BYTES", "SealedChunks", "seal_of"]

DIGEST_BYTES = 32

_Place = tuple[bytes, int, ChunkRef | None]


def seal_of(digest: str, chunks: Iterable[bytes]) -> str:
    """The seal of the state of this digest, in hex, by the BLAKE3 of each of its chunks."""
    hasher = blake3(b"datastates content 1\0" + digest.encode())
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


class SealedChunks(Sequence[memoryview]):
    """The chunks of an open state. Each is read and checked again whenever it is asked for, so that what is written is what was checked.

    ``digests`` has the BLAKE3 of each chunk. If it is None, later reads are compared with the first read of each chunk.
    """

    def __init__(self, reader: Reader, digests: Sequence[bytes] | None = None) -> None:
        count = len(reader.manifest.content.chunks)
        if digests is not None and len(digests) != count:
            raise Corrupt(f"state {reader.manifest.origin.uid} has {count} chunks, and {len(digests)} digests were given for them")
        self._reader = reader
        self._known: dict[_Place, bytes] = {}
        if digests is not None:
            for index, digest in enumerate(digests):
                self._note(index, digest)

    def check(self) -> None:
        """Read every chunk; chunks that lie in the same place are read once.

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
                f"chunk {index} of state {self._reader.manifest.origin.uid} has the digest that guards against rot and is not what it was "
                "when it was sealed, or a moment ago: somebody has forged it, or writes to it now"
            )

    def _place(self, index: int) -> _Place:
        manifest = self._reader.manifest
        chunk = manifest.content.chunks[index]
        return chunk.digest, chunk.length, manifest.refs[index] if manifest.refs else None
