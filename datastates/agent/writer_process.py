"""``WriterProcess``: a process that writes the states of a training to the folder of packs, from
the shared memory of the training.

The training keeps the slots of a state while they are written. If the training dies meanwhile, its
memory may soon belong to another training. A state that was not completely read by then is
therefore not committed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from datastates.errors import DatastatesError, Unavailable
from datastates.state.manifest import ChunkRef, Manifest, PackInfo
from datastates.storage.arena import Arena
from datastates.storage.local import LocalTier, Put
from datastates.storage.tier import Payload, Placed
from datastates.system.threads import at, io_hook, yield_disk

from .memory_process import Ended, MemoryProcess, Server
from .messages import error_of

_REPORT_S = 0.5
_REPORT_BYTES = 16 << 20
"""A call with so many bytes may take long, so it is always reported."""

_REMEMBERED = 64
"""How many of the newest manifests both ends remember, so that none is sent again as a base."""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A part to write. ``base`` is the key of a remembered manifest; a new one comes along."""

    manifest: Manifest
    slots: tuple[int, ...]
    base: tuple[str, int] | None
    base_manifest: Manifest | None
    is_of_base: bool


class _Write(msgspec.Struct, frozen=True, array_like=True):
    parts: tuple[_Part, ...]


class _PlacedPart(msgspec.Struct, frozen=True, array_like=True):
    packs: tuple[PackInfo, ...]
    refs: tuple[ChunkRef, ...]
    bytes_new: int
    added: int


class _Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    parts: tuple[_PlacedPart, ...]


class _Calls(msgspec.Struct, frozen=True, array_like=True, tag="calls"):
    """A system call that may take long begins; see ``threads.at``."""

    call: str
    path: str
    size: int


class _Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """An error, with the number of the system's error that caused it, or 0."""

    kind: str
    text: str
    trouble: str | None
    cause: int


_Answer = _Written | _Calls | _Failed


def _remember(known: dict[tuple[str, int], Any], manifest: Manifest, value: Any) -> None:
    """Keep the newest; both ends call this in the same order."""
    key = manifest.origin.uid, manifest.origin.rank
    known.pop(key, None)
    known[key] = value
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]


class WriterProcess:
    """Writes states in ``arena`` in another process. One thread at a time may call ``put_all``;
    ``close`` may be called from any.

    Until the process is ready, and once it ended too often, ``local`` writes in this process.
    """

    def __init__(self, local: LocalTier, arena: Arena) -> None:
        self._local, self._arena = local, arena
        words = (str(local.root), str(int(local.is_direct)))
        self.process: MemoryProcess[_Answer] = MemoryProcess(__name__, words, arena, _Answer)  # type: ignore[arg-type]
        self._there: dict[tuple[str, int], None] = {}
        self._starts = 0

    def put_all(self, puts: Sequence[Put]) -> list[Placed]:
        """See ``LocalTier.put_all``."""
        if not self.process.is_ready():
            return self._local.put_all(puts)
        if self._starts != self.process.starts:
            self._starts = self.process.starts
            self._there.clear()
        try:
            answer = self.process.ask(_Write(tuple(map(self._part, puts))), _note)
        except Ended:  # nothing that it had not committed is visible
            return self._local.put_all(puts)
        if isinstance(answer, _Failed):
            raise error_of(answer.kind, answer.text, answer.trouble, answer.cause)
        assert isinstance(answer, _Written), "calls are noted"
        placed = [
            Placed(
                msgspec.structs.replace(
                    put.payload.manifest,
                    packs=part.packs,
                    refs=part.refs,
                    bytes_new=part.bytes_new,
                ),
                part.added,
            )
            for put, part in zip(puts, answer.parts, strict=True)
        ]
        for part in placed:
            _remember(self._there, part.manifest, None)
        return placed

    def close(self) -> None:
        """End the process. Idempotent."""
        self.process.close()

    def _part(self, put: Put) -> _Part:
        base, key = put.base, None
        if base is not None:
            key = base.origin.uid, base.origin.rank
            base = None if key in self._there else base
        slots = tuple(map(self._arena.slot_of, put.payload.chunks))
        return _Part(put.payload.manifest, slots, key, base, put.is_of_base)


def _note(answer: _Answer) -> bool:
    if isinstance(answer, _Calls):
        at(answer.call, Path(answer.path), answer.size)
        return True
    return False


# --- the process ---


def main(arguments: Sequence[str]) -> None:
    """Write the states that the training requests. The further arguments are the folder, and
    whether to write past the page cache."""
    server = Server(arguments)
    known: dict[tuple[str, int], Manifest] = {}
    reported_at = 0.0

    def check_parent(step: str) -> None:
        if step in {"pack-written", "manifest-written"} and not server.has_parent:
            raise Unavailable("the training has ended, and its memory may be another one's")

    def report(call: str, path: Path, size: int) -> None:
        nonlocal reported_at
        now = time.monotonic()
        if now - reported_at >= _REPORT_S or size >= _REPORT_BYTES:
            reported_at = now
            server.send(_Calls(call, str(path), size))

    def put(part: _Part) -> Put:
        base = part.base_manifest
        if base is None and part.base is not None:
            base = known[part.base]
        chunks = [
            server.view[slot : slot + chunk.length]
            for slot, chunk in zip(part.slots, part.manifest.content.chunks, strict=True)
        ]
        return Put(Payload(part.manifest, chunks), base, part.is_of_base)

    def write(request: _Write) -> _Answer:
        try:
            placed = local.put_all([put(part) for part in request.parts])
        except Exception as exc:  # the training raises it, whatever it is
            cause = exc.__cause__.errno if isinstance(exc.__cause__, OSError) else 0
            trouble = exc.trouble if isinstance(exc, DatastatesError) else None
            return _Failed(type(exc).__name__, str(exc) or repr(exc), trouble, cause or 0)
        for each in placed:
            _remember(known, each.manifest, each.manifest)
        manifests = [each.manifest for each in placed]
        return _Written(
            tuple(
                _PlacedPart(manifest.packs, manifest.refs, manifest.bytes_new, each.bytes_new)
                for manifest, each in zip(manifests, placed, strict=True)
            )
        )

    yield_disk()
    local = LocalTier(Path(server.words[0]), direct=server.words[1] == "1", on_step=check_parent)
    with io_hook(report):
        server.run(_Write, write)


if __name__ == "__main__":
    main(sys.argv[1:])
