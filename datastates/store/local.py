"""The local tier: packs and manifests in one folder, each state whole or not there.

A state becomes durable in this order, and ``on_step`` is called after each step, on the thread that puts:

    pack-written        its new bytes, under a temporary name, fsynced
    pack-renamed        and the folder fsynced
    manifest-written    likewise
    manifest-renamed    from here on the state is visible, and durable

Chunks that the folder already holds, for any state, are referred to and not written again (``borrowing``).

A state is removed in the opposite order: its manifest first (``manifest-removed``), then the packs that no manifest in the
folder needs. Several processes may use one folder. Committing and opening share the folder's lock; removing holds it alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from datastates.content.digest import Sound, decode_sound
from datastates.content.manifest import Manifest, PackInfo
from datastates.errors import Closed, Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from datastates.lineage.states import Status
from datastates.system.regular import read_regular
from datastates.system.sharing import make_folders

from .borrowing import Borrowed, Stamp, find_borrowed, is_there
from .collecting import Collected, Collector
from .comparing import are_equal
from .files import (
    FORBIDDEN,
    TEMPORARY,
    Temporary,
    free_pack_name,
    locked,
    next_step,
    remove_abandoned,
    supports_direct,
    sync_folder,
    temporary,
    write_chunks,
    write_file,
)
from .index import SHARED_BYTES, ChunkIndex, Hint
from .mapped import MappedReader
from .naming import MAX_MANIFEST, bytes_of_packs, manifest_name, packs_of, uid_of
from .pace import Pace
from .pack import padded, payload_bytes
from .placing import Places, PutPlan, own_bytes, places_of, plan_put, readable
from .references import References
from .rewriting import Moved, Place, Rewriting
from .roles import DurableTier, Staged
from .tier import Payload, Placed, Reader

__all__ = ["LocalTier"]


def _untold(done: int, total: int) -> None:
    """Report progress to no one."""


class LocalTier(DurableTier):
    """States in a folder of this machine, or of a shared file system that has ``flock``.

    ``direct`` writes past the page cache (None: if the file system can). ``pace`` is how fast payload is written. ``rank`` is the rank
    whose part is used by methods that name only the state; the parts of all ranks may lie in one folder.
    """

    name = "local"
    gives = Status.DURABLE
    holds_parts = True

    def __init__(
        self,
        root: Path,
        *,
        direct: bool | None = None,
        pace: Pace | None = None,
        on_step: Callable[[str], None] | None = None,
        rank: int = 0,
    ) -> None:
        self.root = Path(root)
        self._direct, self._pace, self._rank = direct, pace, rank
        self._on_step = on_step or (lambda step: None)
        self._references = References(self.root)
        self._index = ChunkIndex(self.root)
        self._is_closed = False
        try:
            make_folders(self.root)
        except OSError as exc:
            if exc.errno not in FORBIDDEN:
                raise  # otherwise there is nothing to read here, and writers get the error

    @cached_property
    def is_direct(self) -> bool:
        """Whether packs are written past the page cache."""
        return supports_direct(self.root) if self._direct is None else self._direct

    def put(self, payload: Payload, *, base: Manifest | None = None, is_of_base: bool = False) -> Placed:
        """See ``DurableTier.put``."""
        self._check_open()
        payload.check()
        origin = payload.manifest.origin
        if uid_of(manifest_name(origin.uid, origin.rank), "manifest") is None:
            raise InvalidInput(f"state {origin.uid!r}, rank {origin.rank}: this tier holds states of uids without dots or slashes")
        try:
            return self._put(payload, base, is_of_base=is_of_base)
        except OSError as exc:
            if not self.root.is_dir():
                raise Unavailable(f"state {origin.uid} was not written: {self._gone()}", trouble=f"gone: {self.root}") from exc
            if exc.errno in FORBIDDEN:
                raise Unavailable(
                    f"state {origin.uid} was not written: {exc.filename or self.root} may not be written here ({exc.strerror}); "
                    "get the right to write in that folder, or choose another one for packs"
                ) from exc
            needed = sum(padded(view.nbytes) for view in payload.chunks)
            raise Unavailable(
                f"state {origin.uid} was not written to {self.root} ({exc}): it needs up to {needed} bytes, {_free(self.root)} are free; "
                "make room, or choose another folder for packs"
            ) from exc

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Open a state; its packs stay open while the reader is.

        :raises Unavailable: the folder itself is gone, or cannot be read.
        """
        return self.open_part(uid, self._rank, verify=verify)

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """``open`` for any rank's part: all lie in one folder."""
        self._check_open()
        if not self.root.is_dir():
            raise Unavailable(f"state {uid} cannot be read: {self._gone()}", trouble=f"gone: {self.root}")
        try:
            with locked(self.root, is_shared=True, is_needed=False):
                return MappedReader(self.root, self._sound(uid, rank).manifest, verify=verify)
        except OSError as exc:
            raise Unavailable(f"state {uid} cannot be read in {self.root} ({exc}): {next_step(exc)}") from exc

    def manifest(self, uid: str) -> Manifest:
        """See ``DurableTier.manifest``."""
        return self.sound(uid).manifest

    def sound(self, uid: str) -> Sound:
        """See ``DurableTier.sound``."""
        return self._sound(uid, self._rank)

    def packs(self, uid: str) -> tuple[PackInfo, ...]:
        """See ``DurableTier.packs``."""
        return packs_of(self.root, uid, self._rank)

    @property
    def bytes_stored(self) -> int:
        """See ``DurableTier.bytes_stored``."""
        return bytes_of_packs(self.root)

    def has(self, uid: str) -> bool:
        """Whether the manifest of a state is here."""
        self._check_open()
        name = manifest_name(uid, self._rank)
        return uid_of(name, "manifest") is not None and (self.root / name).exists()

    def uids(self) -> Iterator[str]:
        """The uid of every state whose manifest is here."""
        return iter([uid for uid, rank in self.parts() if rank == self._rank])

    def parts(self) -> Iterator[tuple[str, int]]:
        """See ``DurableTier.parts``."""
        self._check_open()
        named = (uid_of(name, "manifest") for name in (os.listdir(self.root) if self.root.is_dir() else ()))
        return iter(list(filter(None, named)))

    def part_manifest(self, uid: str, rank: int) -> Manifest:
        """See ``DurableTier.part_manifest``."""
        self._check_open()
        return self._sound(uid, rank).manifest

    def whole(self, uids: Iterable[str]) -> dict[str, Placed]:
        """See ``DurableTier.whole``."""
        return {uid: placed for (uid, _), placed in self.whole_parts((uid, self._rank) for uid in uids).items()}

    def whole_parts(self, parts: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Placed]:
        """See ``DurableTier.whole_parts``."""
        self._check_open()
        wanted, found = set(parts), {}
        with locked(self.root, is_shared=True, is_needed=False):
            for part in wanted.intersection(self.parts()):
                with suppress(NotFound, Corrupt, Unavailable):
                    manifest = self.part_manifest(*part)
                    if all(is_there(self.root / pack.name, pack.size) for pack in manifest.packs):
                        found[part] = Placed(manifest, own_bytes(manifest))
            if found:
                sync_folder(self.root)  # a process that was killed may have renamed the last file without syncing its name
        return found

    def remove(self, uid: str) -> int:
        """See ``DurableTier.remove``."""
        self._check_open()
        try:
            with locked(self.root, is_shared=False):
                return self._remove(self._names_of([uid]))
        except OSError as exc:
            raise Unavailable(f"state {uid} was not removed from {self.root} ({exc})") from exc

    def discard(self, packs: Iterable[str]) -> None:
        """See ``DurableTier.discard``."""
        self._check_open()
        try:
            with locked(self.root, is_shared=False):
                needed = self._references.needed()
                for name in packs if needed is not None else ():  # otherwise a sweep will do it
                    if uid_of(name, "safetensors") is not None and name not in (needed or ()):
                        (self.root / name).unlink(missing_ok=True)
                sync_folder(self.root)
        except OSError as exc:
            raise Unavailable(f"packs were not removed from {self.root} ({exc})") from exc

    def files(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """See ``DurableTier.files``."""
        self._check_open()
        try:
            found = self._references.files() if self.root.is_dir() else {}
        except OSError as exc:
            raise Unavailable(f"{self.root} cannot be read ({exc})") from exc
        named = ((uid_of(name, "manifest"), files) for name, files in found.items())
        return {place[0]: files for place, files in named if place is not None and place[1] == self._rank}

    def sweep(self) -> list[Path]:
        """See ``DurableTier.sweep``."""
        self._check_open()
        with locked(self.root, is_shared=False):
            found = [self.root / name for name in os.listdir(self.root)]
            removed = [path for path in found if path.name.startswith(TEMPORARY) and remove_abandoned(path)]
            needed = self._references.needed()
            if needed is not None:
                packs = [path for path in found if uid_of(path.name, "safetensors") is not None]
                removed += [path for path in packs if path.name not in needed and _unlink(path)]
            sync_folder(self.root)
        return removed

    def forget(self, uids: Iterable[str]) -> None:
        """See ``DurableTier.forget``."""
        self._check_open()
        names = self._names_of(uids)
        try:
            with locked(self.root, is_shared=False):
                for name in names:
                    (self.root / name).unlink(missing_ok=True)
                sync_folder(self.root)
        except OSError as exc:
            raise Unavailable(f"{len(names)} states were not removed from {self.root} ({exc})") from exc
        self._on_step("manifest-removed")

    def collect(self, *, is_dry: bool = False, without: Iterable[str] = (), tell: Callable[[int, int], None] = _untold) -> Collected:
        """See ``DurableTier.collect``."""
        self._check_open()
        rewriting = self._rewriting()
        gone = self._names_of(without)
        collector = Collector(self.root, self._references, rewriting, tell=tell, without=gone)
        try:
            return collector.look() if is_dry else collector.collect()
        except OSError as exc:
            raise Unavailable(f"no room was made in {self.root} ({exc})") from exc

    def mend(self, uid: str, rank: int, bad: Collection[Place], moved: Moved, chunk: Callable[[Reader, int], memoryview]) -> None:
        """See ``DurableTier.mend``."""
        self._check_open()
        try:
            self._rewriting().mend(uid, rank, bad, moved, chunk)
        except OSError as exc:
            raise Unavailable(f"state {uid} was not mended in {self.root} ({exc})") from exc

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """See ``DurableTier.hurrying``."""
        with nullcontext() if self._pace is None else self._pace.lifted():
            yield

    def close(self) -> None:
        """Refuse further use; open readers keep working."""
        self._is_closed = True

    @contextmanager
    def stage(
        self, payload: Payload, *, known: Places | None = None, likely: Places | None = None, is_sharing: bool = True
    ) -> Iterator[Staged]:
        """See ``DurableTier.stage``."""
        self._check_open()
        payload.check()
        origin = payload.manifest.origin
        known = known or {}
        with temporary(self.root / manifest_name(origin.uid, origin.rank)) as file:
            if (self.root / manifest_name(origin.uid, origin.rank)).exists():
                yield _Settled(Placed(self._same(payload), 0), self.root / manifest_name(origin.uid, origin.rank))
                return
            name = free_pack_name(self.root, origin.uid, origin.rank)
            borrowed = find_borrowed(self.root, self._index, payload, known, likely or {}) if is_sharing else Borrowed()
            plan = plan_put(payload.manifest, {**known, **borrowed.places}, name)
            with self._written(plan, payload, file, borrowed.stamps) as staged:
                yield staged

    def _names_of(self, uids: Iterable[str]) -> list[str]:
        """The names of the manifests of all parts of these states that are here."""
        wanted = set(uids)
        return [manifest_name(uid, rank) for uid, rank in self.parts() if uid in wanted] if wanted else []

    def _rewriting(self) -> Rewriting:
        return Rewriting(self.root, self._references, self._index, is_direct=lambda: self.is_direct, on_step=self._on_step)

    def _sound(self, uid: str, rank: int) -> Sound:
        path = self.root / manifest_name(uid, rank)
        if uid_of(path.name, "manifest") is None:
            raise NotFound(f"{uid!r} is no uid")
        try:
            data = read_regular(path, most=MAX_MANIFEST)
        except FileNotFoundError:
            raise NotFound(f"state {uid} is not in {self.root}") from None
        except OSError as exc:
            raise Unavailable(f"{path} cannot be read ({exc}): {next_step(exc)}") from exc
        sound = decode_sound(data, source=str(path))
        manifest = sound.manifest
        if (manifest.origin.uid, manifest.origin.rank) != (uid, rank):
            raise Corrupt(f"{path} is the manifest of state {manifest.origin.uid}, rank {manifest.origin.rank}: it was renamed or swapped")
        if len(manifest.refs) != len(manifest.content.chunks):
            raise Corrupt(f"{path} says of {len(manifest.content.chunks)} chunks where {len(manifest.refs)} lie")
        return sound

    def _put(self, payload: Payload, base: Manifest | None, *, is_of_base: bool) -> Placed:
        places = places_of(base)
        with self.stage(payload, known=places if is_of_base else {}, likely=places) as staged:
            placed = staged.commit()
        if placed is None:  # a pack to which it refers was removed meanwhile
            with self.stage(payload, is_sharing=False) as staged:
                placed = staged.commit()
        assert placed is not None, "it refers to nothing else"
        return placed

    @contextmanager
    def _written(self, plan: PutPlan, payload: Payload, file: Temporary, stamps: Mapping[str, Stamp]) -> Iterator[Staged]:
        encoded = readable(plan.manifest)
        with ExitStack() as stack:
            pack = None
            if plan.layout is not None:
                pack = stack.enter_context(temporary(self.root / plan.name))
                chunks = (payload.chunks[index] for index in plan.new)
                write_chunks(pack.fd, pack.path, plan.layout.header, chunks, plan.layout.size, is_direct=self.is_direct, pace=self._pace)
                self._on_step("pack-written")
            yield _Staged(self, plan, encoded, pack, file, stamps)

    def _same(self, payload: Payload) -> Manifest:
        """The manifest of a state that is already here, if it is the same state. Its bytes are compared, because uid and digest prove
        nothing: the earlier one may be forged.

        :raises Conflict: it is another state.
        """
        uid, rank = payload.manifest.origin.uid, payload.manifest.origin.rank
        here = self.root / manifest_name(uid, rank)
        try:
            with self.open_part(uid, rank) as reader:
                is_same = reader.manifest.digest == payload.manifest.digest and all(
                    are_equal(reader.chunk(index), chunk) for index, chunk in enumerate(payload.chunks)
                )
                if is_same:
                    return reader.manifest
                why = f"is another state of that uid, of digest {reader.manifest.digest[:16]} and other bytes: one of them is forged"
        except Corrupt as exc:
            why = f"is damaged ({exc})"
        raise Conflict(f"state {uid} was not written: {here} {why}; drop that one, or delete the file, and bring this state again")

    def _remove(self, names: list[str]) -> int:
        """Runs under the exclusive lock."""
        here, unneeded = self._references.freed(names)
        if not here:
            return 0
        for name in here:
            (self.root / name).unlink(missing_ok=True)
        sync_folder(self.root)
        self._on_step("manifest-removed")
        freed = 0
        for pack in unneeded:
            with suppress(FileNotFoundError):
                freed += payload_bytes(self.root / pack)
                (self.root / pack).unlink()
        sync_folder(self.root)
        return freed

    def _commit(self, staged: _Staged) -> Placed | None:
        plan, file = staged.plan, staged.file
        try:
            with locked(self.root, is_shared=True):  # packs to which it refers must stay until the manifest names them
                if not all(is_there(self.root / info.name, info.size, staged.stamps.get(info.name)) for info in plan.borrowed):
                    return None
                if staged.pack is not None:
                    staged.pack.commit()
                    self._on_step("pack-renamed")
                write_file(file.fd, file.path, staged.encoded)
                self._on_step("manifest-written")
                file.commit()
                self._on_step("manifest-renamed")
        except BaseException:
            self._undo(plan, file)
            raise
        self._index.add(_hints(plan))
        return Placed(plan.manifest, plan.bytes_new)

    def _undo(self, plan: PutPlan, file: Temporary) -> None:
        """Undo the renames of a commit."""
        with locked(self.root, is_shared=False):
            if file.is_committed:
                file.final.unlink(missing_ok=True)
            needed = self._references.needed()
            if plan.layout is not None and needed is not None and plan.name not in needed:
                (self.root / plan.name).unlink(missing_ok=True)
            sync_folder(self.root)

    def _gone(self) -> str:
        return (
            f"the folder {self.root} is gone, so somebody deleted, moved or unmounted it: bring it back; or restore what is still "
            "in memory here, and open a repository in another folder"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"the tier at {self.root} is closed: open the repository again")


@dataclass(frozen=True, slots=True)
class _Settled:
    """A state that was here already."""

    placed: Placed
    path: Path
    was_here: ClassVar[bool] = True

    def places(self) -> Iterable[tuple[PackInfo, int]]:
        return _places(self.placed.manifest)

    def commit(self) -> Placed | None:
        return self.placed if self.path.exists() else None

    def undo(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Staged:
    tier: LocalTier
    plan: PutPlan
    encoded: bytes
    pack: Temporary | None
    file: Temporary
    stamps: Mapping[str, Stamp]
    was_here: ClassVar[bool] = False

    def places(self) -> Iterable[tuple[PackInfo, int]]:
        return _places(self.plan.manifest)

    def commit(self) -> Placed | None:
        return self.tier._commit(self)

    def undo(self) -> None:
        self.tier._undo(self.plan, self.file)


def _places(manifest: Manifest) -> Iterator[tuple[PackInfo, int]]:
    return ((manifest.packs[ref.pack], ref.offset) for ref in manifest.refs)


def _hints(plan: PutPlan) -> Iterator[Hint]:
    """Hints at the chunks that a state wrote itself, and that others may share."""
    for index, offset in zip(plan.new, plan.layout.offsets if plan.layout is not None else (), strict=True):
        chunk = plan.manifest.content.chunks[index]
        if chunk.length >= SHARED_BYTES:
            yield Hint((chunk.digest, chunk.length), plan.name, offset)


def _unlink(path: Path) -> bool:
    """Delete a file; returns whether it is gone. In a folder with the sticky bit only its owner can delete it."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return False
    return True


def _free(root: Path) -> int | str:
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return "an unknown number of bytes"
