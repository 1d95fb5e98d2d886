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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from datastates.content.digest import decode_sound
from datastates.content.envelope import frames
from datastates.content.manifest import Manifest, PackInfo
from datastates.system.interrupts import checkpoint
from datastates.system.regular import read_regular

from .borrowing import is_there
from .files import Temporary, locked, sync_folder, temporary, write_chunks, write_file
from .index import ChunkIndex, chunk_hints, state_hints
from .mapped import MappedReader
from .naming import MAX_MANIFEST, free_name
from .pack import padded
from .placing import Places, PutPlan, places_of, plan_put, readable
from .references import Catalogue, Member
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


def sparse_packs(manifests: Mapping[str, Sequence[Member]]) -> list[Sparse]:
    """The packs most of whose bytes none of these manifests needs, given by file."""
    live: dict[str, dict[int, int]] = {}
    users: dict[str, dict[str, None]] = {}
    sizes: dict[str, int] = {}
    for name, members in manifests.items():
        for member in members:
            for pack in member.packs:
                sizes[pack.name] = pack.size - pack.header_length
                users.setdefault(pack.name, {})[name] = None
            for ref in member.refs:
                live.setdefault(member.packs[ref.pack].name, {})[ref.offset] = padded(ref.length)
    found = [Sparse(pack, tuple(users[pack]), sizes[pack] - sum(spots.values())) for pack, spots in live.items()]
    return sorted((each for each in found if 2 * each.dead_bytes > sizes[each.name]), key=lambda each: -each.dead_bytes)


@dataclass(frozen=True, slots=True)
class _Old:
    """A file of manifests as it was read, and its bytes."""

    path: Path
    data: bytes
    manifests: tuple[Manifest, ...]


class Rewriting:
    """Moves needed chunks out of packs, in one folder."""

    def __init__(
        self, root: Path, catalogue: Catalogue, index: ChunkIndex, *, is_direct: Callable[[], bool], on_step: Callable[[str], None]
    ) -> None:
        self._root, self._catalogue, self._index = root, catalogue, index
        self._is_direct, self._on_step = is_direct, on_step

    def rewrite(self, pack: Sparse) -> int | None:
        """Move what is needed of a pack, and delete it; returns by how many bytes the folder shrank, None if the pack is still needed.

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
            needed = self._catalogue.needed()
            if needed is None or pack.name in needed:
                return None
            freed = path.stat().st_size if path.exists() else added
            path.unlink(missing_ok=True)
            sync_folder(self._root)
        self._on_step("pack-removed")
        return freed - added

    def mend(self, uid: str, rank: int, bad: Collection[Place], moved: Moved, chunk: Callable[[Reader, int], memoryview]) -> None:
        """Write a state's chunks that lie at ``bad`` places anew: ``chunk`` returns their bytes, checked.

        ``moved`` then says where they are now, for the states that share them.
        """
        found = self._catalogue.find(uid, rank)
        if found is not None:
            self._move(found[0], bad.__contains__, moved, chunk, only=(uid, rank))

    def _move(
        self,
        name: str,
        is_left: Callable[[Place], bool],
        moved: Moved,
        chunk: Callable[[Reader, int], memoryview],
        only: tuple[str, int] | None = None,
    ) -> int:
        """Make the states of a file, or ``only`` one of them, independent of places that must be left; returns the size of the pack that
        was written for them."""
        path = self._root / name
        with temporary(path) as file:  # no other process writes this manifest meanwhile
            try:
                old = _read(path)
            except FileNotFoundError:
                return 0  # dropped
            while (plan := self._planned(old.manifests, is_left, moved, only)) is not None:
                added = self._carry_out(plan, old, file, moved, chunk)
                if added is not None:
                    return added
        return 0

    def _carry_out(self, plan: PutPlan, old: _Old, file: Temporary, moved: Moved, chunk: Callable[[Reader, int], memoryview]) -> int | None:
        """The size of the pack that was written; None if the plan relies on packs that are gone meanwhile, which ``moved`` then forgets."""
        encoded = readable(plan.manifests)
        with ExitStack() as stack:
            new = stack.enter_context(temporary(self._root / plan.name))
            if plan.layout is not None:
                opened = {state: MappedReader(self._root, old.manifests[state], verify=True) for state in {state for state, _ in plan.new}}
                for reader in opened.values():
                    stack.callback(reader.close)
                chunks = (chunk(opened[state], index) for state, index in plan.new)
                write_chunks(new.fd, new.path, plan.layout, chunks, is_direct=self._is_direct())
                self._on_step("pack-moved")
            os.ftruncate(file.fd, 0)  # drop what an earlier attempt has written
            write_file(file.fd, file.path, b"".join(encoded))
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
        self._note(plan, old, moved)
        owners = [(manifest.origin.uid, manifest.origin.rank) for manifest in plan.manifests]
        hints = [hint for manifest in plan.manifests for hint in chunk_hints(manifest, {plan.name})]
        self._index.add([*state_hints(old.path.stem, owners, encoded), *hints])
        return 0 if plan.layout is None else plan.layout.size

    def _gone(self, plan: PutPlan, moved: Moved) -> set[PackInfo]:
        """The packs into which chunks were moved, and that were removed with the states that needed them. Runs under the lock."""
        into = {pack for pack, _ in moved.values()}
        return {pack for pack in plan.borrowed if pack in into and not is_there(self._root / pack.name, pack.size)}

    def _planned(
        self, manifests: Sequence[Manifest], is_left: Callable[[Place], bool], moved: Moved, only: tuple[str, int] | None
    ) -> PutPlan | None:
        """The plan for the states of a file; None if they no longer need any of those places."""
        each, is_leaving = list[Places](), False
        for manifest in manifests:
            is_meant = only in (None, (manifest.origin.uid, manifest.origin.rank))
            places = dict[tuple[bytes, int], tuple[PackInfo, int]]()
            for key, (info, offset) in places_of(manifest).items():
                place = info.name, offset
                if not is_meant or not is_left(place):
                    places[key] = info, offset
                    continue
                is_leaving = True
                if place in moved:
                    places[key] = moved[place]
            each.append(places)
        if not is_leaving:
            return None

        def are_one(one: tuple[int, int], other: tuple[int, int]) -> bool:
            return _place(manifests, one) == _place(manifests, other)

        origin = manifests[0].origin
        plan = plan_put(manifests, each, free_name(self._root, origin.uid, origin.rank, "safetensors"), are_one)
        kept = [msgspec.structs.replace(new, bytes_new=old.bytes_new) for new, old in zip(plan.manifests, manifests, strict=True)]
        return replace(plan, manifests=tuple(kept))

    def _note(self, plan: PutPlan, old: _Old, moved: Moved) -> None:
        """Note where chunks are now, for the other states that need them."""
        for mine in plan.new:
            manifest = plan.manifests[mine[0]]
            ref = manifest.refs[mine[1]]
            moved[_place(old.manifests, mine)] = manifest.packs[ref.pack], ref.offset


def _place(manifests: Sequence[Manifest], mine: tuple[int, int]) -> Place:
    manifest = manifests[mine[0]]
    ref = manifest.refs[mine[1]]
    return manifest.packs[ref.pack].name, ref.offset


def _read(path: Path) -> _Old:
    data, first, found = read_regular(path, most=MAX_MANIFEST), memoryview(b""), list[Manifest]()
    for _, frame in frames(data):
        first = first or frame
        found.append(decode_sound(frame, source=str(path), first=first).manifest)
    return _Old(path, data, tuple(found))


def _bytes_of(path: Path) -> bytes | None:
    try:
        return read_regular(path, most=MAX_MANIFEST)
    except FileNotFoundError:
        return None
