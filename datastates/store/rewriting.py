"""Rewrites packs of which few bytes are still needed: these move into new packs, then the old pack is deleted. Damaged chunks are replaced
in the same way.

Each state that needs the old pack gets a manifest that names the new places of those chunks. The steps are these, and ``on_step`` is
called after each:

    pack-moved          the chunks, in a pack of the first state that needs them, under a temporary name, fsynced
    pack-renamed        and the folder fsynced: no manifest needs it yet
    manifest-replaced   the state's manifest, by one rename; its digest covers no places, so it is what it was
    pack-removed        the old pack, once no manifest needs it; one of a state that came meanwhile may

Wherever this is interrupted, each state has its bytes, and the next collection goes on. Readers have the old pack open, and keep it. If a
state is dropped meanwhile, what was moved for it goes with it, and the next state that needs it moves it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from datastates.content.digest import decode
from datastates.content.manifest import Manifest, PackInfo
from datastates.errors import Corrupt, Unavailable
from datastates.system.interrupts import checkpoint
from datastates.system.regular import read_regular

from .borrowing import is_there
from .files import Temporary, free_pack_name, locked, sync_folder, temporary, write_chunks, write_file
from .index import SHARED_BYTES, ChunkIndex, Hint
from .mapped import MappedReader
from .naming import MAX_MANIFEST, manifest_name, uid_of
from .pack import padded
from .placing import PutPlan, places_of, plan_put, readable
from .references import References
from .tier import Reader

__all__ = ["Moved", "Place", "Rewriting", "Sparse", "sparse_packs"]

Place = tuple[str, int]
"""A pack, and the offset of a chunk in it."""

Moved = dict[Place, tuple[PackInfo, int]]
"""The new place of each chunk that was moved, by its old place."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """A pack of which less than half is needed, and the names of the manifests that need it."""

    name: str
    manifests: tuple[str, ...]
    dead_bytes: int


def sparse_packs(root: Path, manifests: Mapping[str, frozenset[str]]) -> list[Sparse]:
    """The packs most of whose bytes no manifest needs. A pack is needed whole as long as the manifest of its own state is here."""
    users: dict[str, list[str]] = {}
    for name in sorted(manifests):
        for pack in manifests[name]:
            users.setdefault(pack, []).append(name)
    suspects = {pack: names for pack, names in users.items() if not _has_owner(pack, names)}
    live: dict[str, dict[int, int]] = {pack: {} for pack in suspects}
    sizes: dict[str, int] = {}
    unread: set[str] = set()
    for name in sorted({name for names in suspects.values() for name in names}):
        checkpoint()
        try:
            manifest = _read(root / name)[1]
        except (Corrupt, Unavailable, OSError):
            unread |= manifests[name]
            continue
        sizes.update((pack.name, pack.size - pack.header_length) for pack in manifest.packs if pack.name in suspects)
        for ref, chunk in zip(manifest.refs, manifest.content.chunks, strict=True):
            pack = manifest.packs[ref.pack].name
            if pack in live:
                live[pack][ref.offset] = padded(chunk.length)
    found = []
    for pack, spots in live.items():
        needed = sum(spots.values())
        if pack not in unread and 2 * needed < sizes.get(pack, 0):
            found.append(Sparse(pack, tuple(suspects[pack]), sizes[pack] - needed))
    return sorted(found, key=lambda each: -each.dead_bytes)


@dataclass(frozen=True, slots=True)
class _Old:
    """A manifest as it was read, and its bytes."""

    path: Path
    data: bytes
    manifest: Manifest


class Rewriting:
    """Moves needed chunks out of packs, in one folder."""

    def __init__(
        self, root: Path, references: References, index: ChunkIndex, *, is_direct: Callable[[], bool], on_step: Callable[[str], None]
    ) -> None:
        self._root, self._references, self._index = root, references, index
        self._is_direct, self._on_step = is_direct, on_step

    def rewrite(self, pack: Sparse) -> int:
        """Move what is needed of a pack, and delete it; returns by how many bytes the folder shrank, 0 if the pack is still needed.

        :raises Corrupt: a chunk of it is damaged; it stays where it is.
        :raises OSError: the disk is full, or fails.
        """
        moved: Moved = {}
        added = 0
        for name in pack.manifests:
            checkpoint()
            added += self._move(name, lambda place: place[0] == pack.name, moved, lambda reader, index: reader.chunk(index))
        path = self._root / pack.name
        with locked(self._root, is_shared=False):
            needed = self._references.needed()
            if needed is None or pack.name in needed:
                return 0
            freed = path.stat().st_size if path.exists() else added
            path.unlink(missing_ok=True)
            sync_folder(self._root)
        self._on_step("pack-removed")
        return freed - added

    def mend(self, uid: str, rank: int, bad: Collection[Place], moved: Moved, chunk: Callable[[Reader, int], memoryview]) -> None:
        """Write a state's chunks that lie at ``bad`` places anew: ``chunk`` returns their bytes, checked.

        ``moved`` then says where they are now, for the states that share them.
        """
        self._move(manifest_name(uid, rank), bad.__contains__, moved, chunk)

    def _move(self, name: str, is_left: Callable[[Place], bool], moved: Moved, chunk: Callable[[Reader, int], memoryview]) -> int:
        """Make one state independent of places that must be left; returns the size of the pack that was written for it."""
        path = self._root / name
        with temporary(path) as file:  # no other process writes this manifest meanwhile
            try:
                data, manifest = _read(path)
            except FileNotFoundError:
                return 0  # dropped
            while (plan := self._planned(manifest, is_left, moved)) is not None:
                added = self._carry_out(plan, _Old(path, data, manifest), file, moved, chunk)
                if added is not None:
                    return added
        return 0

    def _carry_out(self, plan: PutPlan, old: _Old, file: Temporary, moved: Moved, chunk: Callable[[Reader, int], memoryview]) -> int | None:
        """The size of the pack that was written; None if the plan relies on packs that are gone meanwhile, which ``moved`` then forgets."""
        encoded = readable(plan.manifest)
        with MappedReader(self._root, old.manifest, verify=True) as reader, temporary(self._root / plan.name) as new:
            if plan.layout is not None:
                chunks = (chunk(reader, index) for index in plan.new)
                write_chunks(new.fd, new.path, plan.layout.header, chunks, plan.layout.size, is_direct=self._is_direct())
                self._on_step("pack-moved")
            os.ftruncate(file.fd, 0)  # drop what an earlier attempt has written
            write_file(file.fd, file.path, encoded)
            with locked(self._root, is_shared=False):
                if _bytes_of(old.path) != old.data:
                    return 0  # dropped, or replaced by another
                gone = self._gone(plan, moved)
                if gone:
                    for place in [place for place, (pack, _) in moved.items() if pack in gone]:
                        del moved[place]  # the bytes still lie at the old place too, as this state needs them there
                    return None
                if plan.layout is not None:
                    new.commit()
                    self._on_step("pack-renamed")
                file.commit()
        self._on_step("manifest-replaced")
        self._note(plan, old.manifest, moved)
        return 0 if plan.layout is None else plan.layout.size

    def _gone(self, plan: PutPlan, moved: Moved) -> set[PackInfo]:
        """The packs into which chunks were moved, and that were removed with the states that needed them. Runs under the lock."""
        into = {pack for pack, _ in moved.values()}
        return {pack for pack in plan.borrowed if pack in into and not is_there(self._root / pack.name, pack.size)}

    def _planned(self, manifest: Manifest, is_left: Callable[[Place], bool], moved: Moved) -> PutPlan | None:
        """The plan for one state; None if it no longer needs any of those places."""
        places, is_leaving = {}, False
        for key, (info, offset) in places_of(manifest).items():
            place = info.name, offset
            if not is_left(place):
                places[key] = info, offset
                continue
            is_leaving = True
            if place in moved:
                places[key] = moved[place]
        origin = manifest.origin
        return plan_put(manifest, places, free_pack_name(self._root, origin.uid, origin.rank)) if is_leaving else None

    def _note(self, plan: PutPlan, old: Manifest, moved: Moved) -> None:
        """Note where chunks are now, for the other states that need them, and for those to come."""
        hints = []
        for index in plan.new:
            was, ref, chunk = old.refs[index], plan.manifest.refs[index], plan.manifest.content.chunks[index]
            moved[old.packs[was.pack].name, was.offset] = plan.manifest.packs[ref.pack], ref.offset
            if chunk.length >= SHARED_BYTES:
                hints.append(Hint((chunk.digest, chunk.length), plan.name, ref.offset))
        self._index.add(hints)


def _has_owner(pack: str, users: list[str]) -> bool:
    """Whether the state for which a pack was written is among those that need it, since it needs all of it."""
    owner = uid_of(pack, "safetensors")
    return owner is not None and manifest_name(*owner) in users


def _read(path: Path) -> tuple[bytes, Manifest]:
    data = read_regular(path, most=MAX_MANIFEST)
    return data, decode(data, source=str(path))


def _bytes_of(path: Path) -> bytes | None:
    try:
        return read_regular(path, most=MAX_MANIFEST)
    except FileNotFoundError:
        return None
