"""Frees space in a folder of packs. It deletes files of crashed writers and packs that no manifest
needs. It rewrites packs if manifests need less than half of their bytes.

A collection keeps no state: after an interrupted collection, the next one continues. It holds the
folder's exclusive lock for a few files at a time, and copies bytes without it. So captures and
readers are not blocked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from datastates.errors import Conflict, Corrupt, NotFound, Unavailable, Unsupported
from datastates.state.digest import MAX_MANIFEST, decode_sound, frames
from datastates.state.manifest import Manifest, PackInfo
from datastates.system.files import hold, read_regular, sync_folder
from datastates.system.interrupts import checkpoint

from .dedup import (
    ChunkIndex,
    Places,
    PutPlan,
    chunk_hints,
    is_there,
    places_of,
    plan_put,
    readable,
    state_hints,
)
from .durable_files import (
    TEMPORARY,
    Temporary,
    is_abandoned,
    locked,
    temporary,
    write_chunks,
    write_file,
)
from .pack import Catalogue, ManifestEntry, free_name, padded, uid_of
from .pack_reader import MappedReader
from .tier import Reader

Place = tuple[str, int]
"""A pack, and the offset of a chunk in it."""

MovedChunks = dict[Place, tuple[PackInfo, int]]
"""The new place of each chunk that was moved, by its old place."""


@dataclass(frozen=True, slots=True)
class SparsePack:
    """A pack of which less than half is needed, and the names of the manifests that need it."""

    name: str
    manifests: tuple[str, ...]
    dead_bytes: int


def sparse_packs(manifests: Mapping[str, Sequence[ManifestEntry]]) -> list[SparsePack]:
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
    found = [
        SparsePack(pack, tuple(users[pack]), sizes[pack] - sum(spots.values()))
        for pack, spots in live.items()
    ]
    return sorted(
        (each for each in found if 2 * each.dead_bytes > sizes[each.name]),
        key=lambda each: -each.dead_bytes,
    )


@dataclass(frozen=True, slots=True)
class _OldFile:
    """A file of manifests as it was read, and its bytes."""

    path: Path
    data: bytes
    manifests: tuple[Manifest, ...]


class Rewriting:
    """Moves needed chunks out of packs, in one folder."""

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        index: ChunkIndex,
        *,
        is_direct: Callable[[], bool],
        on_step: Callable[[str], None],
    ) -> None:
        self._root, self._catalogue, self._index = root, catalogue, index
        self._is_direct, self._on_step = is_direct, on_step

    def rewrite(self, pack: SparsePack) -> int | None:
        """Move what is needed of a pack, and delete it; returns by how many bytes the folder
        shrank, None if the pack is still needed.

        :raises Corrupt: a chunk of it is damaged; it stays where it is.
        :raises OSError: the disk is full, or fails.
        """
        moved: MovedChunks = {}
        added = 0
        for name in pack.manifests:
            checkpoint()
            added += self._move(
                name,
                lambda place: place[0] == pack.name,
                moved,
                lambda reader, index: reader.chunk(index),
            )
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

    def rewrite_chunks(
        self,
        uid: str,
        rank: int,
        bad: Collection[Place],
        moved: MovedChunks,
        chunk: Callable[[Reader, int], memoryview],
    ) -> None:
        """Write a state's chunks at ``bad`` places again. ``chunk`` returns their checked bytes.

        ``moved`` gets their new places, for the states that share them.
        """
        found = self._catalogue.find(uid, rank)
        if found is not None:
            self._move(found[0], bad.__contains__, moved, chunk, only=(uid, rank))

    def _move(
        self,
        name: str,
        is_left: Callable[[Place], bool],
        moved: MovedChunks,
        chunk: Callable[[Reader, int], memoryview],
        only: tuple[str, int] | None = None,
    ) -> int:
        """Make the states of a file, or ``only`` one of them, independent of places that must be
        left; returns the size of the pack that was written for them."""
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

    def _carry_out(
        self,
        plan: PutPlan,
        old: _OldFile,
        file: Temporary,
        moved: MovedChunks,
        chunk: Callable[[Reader, int], memoryview],
    ) -> int | None:
        """The size of the pack that was written; None if the plan relies on packs that are gone
        meanwhile, which ``moved`` then forgets."""
        encoded = readable(plan.manifests)
        with ExitStack() as stack:
            new = stack.enter_context(temporary(self._root / plan.name))
            if plan.layout is not None:
                opened = {
                    state: MappedReader(self._root, old.manifests[state], verify=True)
                    for state in {state for state, _ in plan.new}
                }
                for reader in opened.values():
                    stack.callback(reader.close)
                chunks = (chunk(opened[state], index) for state, index in plan.new)
                write_chunks(new.fd, new.path, plan.layout, chunks, is_direct=self._is_direct())
                self._on_step("pack-moved")
            os.ftruncate(file.fd, 0)  # drop what an earlier attempt has written
            write_file(file.fd, file.path, b"".join(encoded))
            with locked(self._root, is_shared=False):
                try:
                    is_same = read_regular(old.path, most=MAX_MANIFEST) == old.data
                except FileNotFoundError:
                    is_same = False
                if not is_same:
                    return 0  # dropped, or replaced by another
                into = {pack for pack, _ in moved.values()}
                gone = {
                    pack
                    for pack in plan.borrowed
                    if pack in into and not is_there(self._root / pack.name, pack.size)
                }
                if gone:  # removed with the states that needed them
                    for place in [place for place, (pack, _) in moved.items() if pack in gone]:
                        # the bytes are still at the old place too, since this state needs them
                        # there
                        del moved[place]
                    return None
                if plan.layout is not None:
                    new.commit()
                    self._on_step("pack-renamed")
                file.commit()
        self._on_step("manifest-replaced")
        for mine in plan.new:
            manifest = plan.manifests[mine[0]]
            ref = manifest.refs[mine[1]]
            moved[_place(old.manifests, mine)] = manifest.packs[ref.pack], ref.offset
        owners = [(manifest.origin.uid, manifest.origin.rank) for manifest in plan.manifests]
        hints = [hint for manifest in plan.manifests for hint in chunk_hints(manifest, {plan.name})]
        self._index.add([*state_hints(old.path.stem, owners, encoded), *hints])
        return 0 if plan.layout is None else plan.layout.size

    def _planned(
        self,
        manifests: Sequence[Manifest],
        is_left: Callable[[Place], bool],
        moved: MovedChunks,
        only: tuple[str, int] | None,
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

        origin = manifests[0].origin
        plan = plan_put(
            manifests,
            each,
            free_name(self._root, origin.uid, origin.rank, "safetensors"),
            lambda one, other: _place(manifests, one) == _place(manifests, other),
        )
        kept = [
            msgspec.structs.replace(new, bytes_new=old.bytes_new)
            for new, old in zip(plan.manifests, manifests, strict=True)
        ]
        return replace(plan, manifests=tuple(kept))


def _place(manifests: Sequence[Manifest], mine: tuple[int, int]) -> Place:
    manifest = manifests[mine[0]]
    ref = manifest.refs[mine[1]]
    return manifest.packs[ref.pack].name, ref.offset


def _read(path: Path) -> _OldFile:
    data, first, found = read_regular(path, most=MAX_MANIFEST), memoryview(b""), list[Manifest]()
    for _, frame in frames(data):
        first = first or frame
        found.append(decode_sound(frame, source=str(path), first=first).manifest)
    return _OldFile(path, data, tuple(found))


_BATCH = 32
"""The number of files that are deleted while the lock is held once."""

_ONE_AT_A_TIME = ".collecting"


@dataclass(slots=True)
class CollectReport:
    """The result of a collection, or of a dry run. Sizes are file sizes.

    ``left`` lists the files that were not touched, with the reason."""

    temporaries: int = 0
    temporary_bytes: int = 0
    packs: int = 0
    pack_bytes: int = 0
    rewritten: int = 0
    rewritten_bytes: int = 0
    left: list[str] = field(default_factory=list)


class Collector:
    """One collection in a folder. ``tell`` is called with the bytes freed so far, and the total
    that can be freed.

    ``without`` are states that ``look`` treats as deleted.

    :raises Conflict: another process collects in this folder.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        rewriting: Rewriting,
        *,
        tell: Callable[[int, int], None],
        without: Iterable[str] = (),
    ) -> None:
        self._root, self._catalogue, self._rewriting = root, catalogue, rewriting
        self._tell, self._without = tell, frozenset(without)
        self._collected = CollectReport()

    def look(self) -> CollectReport:
        """The result that a collection would have, without any change."""
        done = self._collected
        for path in self._temporaries():
            if is_abandoned(path):
                done.temporaries += 1
                done.temporary_bytes += _size(path)
        manifests = self._manifests()
        if manifests is not None:
            for name in self._unneeded(manifests):
                done.packs += 1
                done.pack_bytes += _size(self._root / name)
            for pack in sparse_packs(manifests):
                done.rewritten += 1
                done.rewritten_bytes += pack.dead_bytes
        return done

    def collect(self) -> CollectReport:
        """Collect; returns what was done."""
        held = hold(self._root / _ONE_AT_A_TIME)
        if held is None:
            raise Conflict(
                f"another process collects garbage in {self._root}: let it end, then do it again if"
                " there is still need"
            )
        try:
            manifests = self._manifests()
            unneeded = [] if manifests is None else self._unneeded(manifests)
            sparse = [] if manifests is None else sparse_packs(manifests)
            total = sum(_size(self._root / name) for name in unneeded)
            total += sum(pack.dead_bytes for pack in sparse)
            self._say(total)
            self._remove_temporaries()
            self._remove_packs(unneeded, total)
            for pack in sparse:
                checkpoint()
                self._rewrite(pack)
                self._say(total)
        finally:
            held.close()
        return self._collected

    def _say(self, total: int) -> None:
        self._tell(self._collected.pack_bytes + self._collected.rewritten_bytes, total)

    def _temporaries(self) -> list[Path]:
        return [self._root / name for name in os.listdir(self._root) if name.startswith(TEMPORARY)]

    def _manifests(self) -> dict[str, list[ManifestEntry]] | None:
        """The manifests in each file; None if one cannot be read, since it may need any pack."""
        listed = self._catalogue.listed()
        unread = sorted(
            name
            for name, each in listed.items()
            if not each.is_sound and (self._root / name).exists()
        )
        if unread:
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            self._collected.left.append(
                f"every pack, because {unread[0]}{more} cannot be read and may need any of them:"
                " `datastates verify` says why, `datastates repair` brings it back where it is"
                " elsewhere"
            )
            return None
        return {
            name: [member for member in each.members if member.uid not in self._without]
            for name, each in listed.items()
        }

    def _unneeded(self, manifests: Mapping[str, list[ManifestEntry]]) -> list[str]:
        needed = {
            pack.name
            for members in manifests.values()
            for member in members
            for pack in member.packs
        }
        return sorted(
            name
            for name in os.listdir(self._root)
            if uid_of(name, "safetensors") is not None and name not in needed
        )

    def _remove_temporaries(self) -> None:
        found = self._temporaries()
        for start in range(0, len(found), _BATCH):
            checkpoint()
            with locked(self._root, is_shared=False):  # an identity is written under this lock only
                for path in found[start : start + _BATCH]:
                    size = _size(path)
                    if is_abandoned(path, removes=True):
                        self._collected.temporaries += 1
                        self._collected.temporary_bytes += size

    def _remove_packs(self, names: list[str], total: int) -> None:
        for start in range(0, len(names), _BATCH):
            checkpoint()
            with locked(self._root, is_shared=False):
                needed = self._catalogue.needed()
                for name in names[start : start + _BATCH]:
                    if needed is None or name in needed:
                        continue
                    path = self._root / name
                    size = _size(path)
                    try:
                        path.unlink()
                    except FileNotFoundError:
                        continue
                    except OSError as exc:
                        self._collected.left.append(f"{path}: {exc.strerror}")
                    else:
                        self._collected.packs += 1
                        self._collected.pack_bytes += size
                sync_folder(self._root)
            self._say(total)

    def _rewrite(self, pack: SparsePack) -> None:
        try:
            freed = self._rewriting.rewrite(pack)
        except (Corrupt, NotFound, Unavailable, Unsupported, OSError) as exc:
            self._collected.left.append(
                f"{pack.name}, of which {pack.dead_bytes} bytes are not needed: {exc}"
            )
            return
        if freed is not None:
            self._collected.rewritten += 1
            self._collected.rewritten_bytes += freed


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
