"""Restores damaged bytes from any place that has the same bytes. For states that stay damaged, it
names the state to continue from.

A chunk is taken from this process's memory, from custom tiers, from another folder, or from peers.
The place must have the state by its digest (BLAKE3 over its structure and over the xxh3 of its
chunks), and the chunk by its own digest. A sealed state is compared with its seal before anything
changes, so that no forged bytes come in by repair. Bytes that a peer gave are noted as such, as for
a clone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from blake3 import blake3

from datastates.errors import DatastatesError, Disconnected, NotFound
from datastates.lineage import lookup
from datastates.lineage.query import walk
from datastates.lineage.write import attachments
from datastates.lineage.write.clones import known, note
from datastates.state.digest import chunk_digest
from datastates.state.manifest import Chunk, Manifest
from datastates.storage.garbage import MovedChunks, Place
from datastates.storage.local import LocalTier
from datastates.storage.parallel_read import seal_of
from datastates.storage.remote import tier_of_url
from datastates.storage.tier import Payload, Reader, Tier
from datastates.system.files import open_regular, read_at
from datastates.system.interrupts import checkpoint

from .core import Core
from .verify import Damage, Limits, VerifyReport, check_all

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DamagedState:
    """A state that stays damaged, why, and the uid of the nearest ancestor that is here and
    sound; None if there is none."""

    state: str
    problem: str
    nearest: str | None


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The uids of the states that are whole again, and of those that are not.

    ``unread`` as in ``VerifyReport``."""

    repaired: tuple[str, ...]
    hurt: tuple[DamagedState, ...]
    unread: tuple[str, ...]


class Peer(Protocol):
    """A place of another owner, whose bytes are trusted as much as its ``party``."""

    party: str

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """See ``Tier.open_part``."""


def repair(
    core: Core,
    *,
    source: str | None = None,
    peers: Sequence[Peer] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Check everything, and restore what can be restored; see ``Repository.repair``."""
    core.home.check_writable()
    core.settle()
    found = check_all(core, Limits(tier=core.tiers.durable.name), on_progress=on_progress)
    with ExitStack() as stack:
        places: list[Tier | Peer] = [
            *(() if core.tiers.captured is None else (core.tiers.captured,)),
            *core.tiers.further,
        ]
        if source is not None:
            places.append(place := _place_of(source))
            stack.callback(place.close)
        return _Repair(core, [*places, *peers], found).run()


def _place_of(source: str) -> Tier:
    if "://" in source:
        return tier_of_url(source)
    folder = Path(source)
    packs = folder / "packs" if (folder / "packs").is_dir() else folder
    if not packs.is_dir():
        raise NotFound(
            f"there is no folder {source}: name a repository's folder, or a folder of packs"
        )
    return LocalTier(packs)


_Found = tuple[Reader, str | None]
"""A state elsewhere, and whose bytes those are; None: ours."""


class _Repair:
    def __init__(self, core: Core, sources: Sequence[Tier | Peer], found: VerifyReport) -> None:
        self._core, self._sources, self._found = core, list(sources), found
        self._tier = core.tiers.durable
        self._moved: MovedChunks = {}
        self._given: dict[bytes, str] = {}
        self._noted: set[tuple[str, str]] = set()

    def run(self) -> RepairReport:
        left: dict[tuple[str, int], list[Damage]] = {}
        for damage in self._found.damage:
            left.setdefault((damage.state, damage.rank), []).append(damage)
        problems = {uid: "" for uid, _ in left}
        before = -1
        while left and before != len(left):  # what one state gets is there for those that share it
            before = len(left)
            for (uid, rank), damages in list(left.items()):
                checkpoint()
                try:
                    self._repair(uid, rank, damages)
                    del left[uid, rank]
                except DatastatesError as exc:
                    problems[uid] = f"{damages[0].problem}; {exc}"
        hurt = {uid: problems.pop(uid) for uid, _ in left}
        return RepairReport(
            tuple(problems),
            tuple(
                DamagedState(uid, problem, self._nearest(uid, hurt))
                for uid, problem in hurt.items()
            ),
            self._found.unread,
        )

    def _repair(self, uid: str, rank: int, damage: Sequence[Damage]) -> None:
        if any(each.chunk is None for each in damage):
            self._put_again(uid, rank)
            return
        manifest = self._tier.sound(uid, rank).manifest
        bad = {each.chunk for each in damage if each.chunk is not None}
        places = {_place(manifest, index) for index in bad}
        with ExitStack() as stack:
            readers = list(self._readers(stack, uid, rank, manifest.digest))

            def chunk(reader: Reader, index: int) -> memoryview:
                return self._chunk(manifest, index, readers)

            seal = self._seal(uid)
            if seal is None:
                for index in bad:  # to know now whether all of them are available
                    self._chunk(manifest, index, readers)
            else:
                with self._tier.open_part(uid, rank) as here:
                    mended = (
                        chunk(here, index) if index in bad else here.chunk(index)
                        for index in range(len(manifest.refs))
                    )
                    _check_seal(seal, manifest, mended)
            self._note(uid, [manifest.content.chunks[index] for index in bad])
            self._tier.rewrite_chunks(uid, rank, places, self._moved, chunk)

    def _put_again(self, uid: str, rank: int) -> None:
        """Write a state again, because its manifest is damaged or gone, from a place that has all
        of it."""
        with self._core.database.read() as session:
            digest = known(session, [uid]).get(uid)
        if digest is None or rank:
            raise NotFound("its lineage has no digest of it")
        with ExitStack() as stack:
            readers = list(self._readers(stack, uid, rank, digest))
            if not readers:
                raise NotFound("no other place has it")
            reader, party = readers[0]
            reader.verify()
            wanted = reader.manifest.content.chunks
            chunks = [reader.chunk(index) for index in range(len(wanted))]
            seal = self._seal(uid)
            if seal is not None:
                _check_seal(seal, reader.manifest, chunks)
            if party is not None:
                self._given |= dict.fromkeys((chunk.digest for chunk in wanted), party)
            self._note(uid, wanted)
            self._tier.forget([uid])
            self._tier.put(
                Payload(msgspec.structs.replace(reader.manifest, packs=(), refs=()), chunks)
            )

    def _note(self, uid: str, chunks: Sequence[Chunk]) -> None:
        """Note whose bytes a state is about to get: it is then trusted as much as they are."""
        came = Counter[str]()
        for chunk in chunks:
            if chunk.digest in self._given:
                came[self._given[chunk.digest]] += chunk.length
        new = {party: count for party, count in came.items() if (uid, party) not in self._noted}
        if not new:
            return
        with self._core.writing() as session:
            for party, count in new.items() if known(session, [uid]) else ():
                note(session, uid, node=self._core.home.uid or "", source=party, bytes_moved=count)
        self._noted |= {(uid, party) for party in new}

    def _readers(self, stack: ExitStack, uid: str, rank: int, digest: str) -> Iterator[_Found]:
        """The same state in other places. A place that breaks the protocol counts as having none. A
        place that does not answer is not tried again.
        """
        for source in list(self._sources):
            try:
                reader = stack.enter_context(source.open_part(uid, rank, verify=True))
            except Disconnected as exc:
                self._sources.remove(source)
                _logger.warning("it is repaired without a peer that does not answer: %s", exc)
                continue
            except DatastatesError:
                continue
            if reader.manifest.digest == digest:
                yield reader, getattr(source, "party", None)

    def _chunk(self, manifest: Manifest, index: int, readers: Sequence[_Found]) -> memoryview:
        """The bytes of a chunk: from another state that has them by now, from its own place if only
        the pack's header is damaged, or elsewhere.
        """
        place = _place(manifest, index)
        if place in self._moved:
            info, offset = self._moved[place]
            place = info.name, offset
        chunk = manifest.content.chunks[index]
        data = memoryview(bytearray(chunk.length))
        with (
            suppress(OSError),
            open(open_regular(self._core.location.packs / place[0]), "rb") as file,
        ):
            count = read_at(file.fileno(), data, place[1])
            if count == chunk.length and chunk_digest(data) == chunk.digest:
                return data.toreadonly()
        for reader, party in readers:
            with suppress(DatastatesError):
                view = reader.chunk(index)
                if party is not None:
                    self._given[chunk.digest] = party
                return view
        raise NotFound(f"no other place has chunk {index}")

    def _seal(self, uid: str) -> str | None:
        with self._core.database.read() as session:
            return attachments.seals(session, [uid]).get(uid)

    def _nearest(self, uid: str, problems: dict[str, str]) -> str | None:
        """The nearest first parent that is here, and was not found to be damaged."""
        with self._core.database.read() as session, suppress(NotFound):
            parents = lookup.state(session, uid).parents
            while parents:
                state = walk.nearest_restorable(session, parents[0])
                if state is None:
                    return None
                if state.uid not in problems and self._core.tiers.has(state.uid):
                    return state.uid
                parents = state.parents
        return None


def _check_seal(seal: str, manifest: Manifest, chunks: Iterable[memoryview]) -> None:
    """Raise unless the state would hold what it held when it was sealed.

    :raises Corrupt: it would not.
    """
    attachments.check(
        seal,
        seal_of(manifest.digest, (blake3(view).digest() for view in chunks)),
        manifest.origin.uid,
    )


def _place(manifest: Manifest, index: int) -> Place:
    ref = manifest.refs[index]
    return manifest.packs[ref.pack].name, ref.offset
