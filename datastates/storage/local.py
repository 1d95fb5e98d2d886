"""The local tier: packs and manifests in one folder, each state whole or not there.

A state becomes durable in this order, and ``on_step`` is called after each step, on the thread that
puts:

    pack-written        its new bytes, under a temporary name, fsynced
    pack-renamed        and the folder fsynced
    manifest-written    likewise
    manifest-renamed    from here on the state is visible, and durable

States that are put together take these steps together: they share a pack and a file of manifests,
and all become visible at once. A state is found by its file name, by the index, or by reading every
manifest (``pack.Catalogue``).

Chunks that the folder already holds, for any state, are referred to and not written again
(``dedup``).

A state is removed in the opposite order: its manifest first (``manifest-removed``), then the packs
that no manifest in the folder needs. Several processes may use one folder. Committing and opening
share the folder's lock; removing holds it alone.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from datastates.errors import Closed, Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from datastates.lineage.states import Status
from datastates.state.digest import MAX_MANIFEST, Sound, decode_sound, frames, joined, opened
from datastates.state.manifest import Manifest, PackInfo
from datastates.system.files import make_folders, read_regular, sync_folder

from .copying import are_equal
from .dedup import (
    SHARED_BYTES,
    ChunkIndex,
    Hint,
    Places,
    PutPlan,
    SharedChunks,
    Stamp,
    chunk_hints,
    find_shared,
    is_there,
    places_of,
    plan_put,
    readable,
    state_hints,
    state_key,
)
from .durable_files import (
    FORBIDDEN,
    TEMPORARY,
    Pace,
    Temporary,
    is_abandoned,
    locked,
    next_step,
    supports_direct,
    temporary,
    write_chunks,
    write_file,
)
from .garbage import Collector, CollectReport, MovedChunks, Place, Rewriting
from .pack import (
    Catalogue,
    ManifestFile,
    bytes_of_packs,
    free_name,
    manifest_name,
    padded,
    payload_bytes,
    uid_of,
)
from .pack_reader import MappedReader
from .tier import Payload, Placed, Reader, Tier

_NAMED = 3
"""How many states an error names."""


@dataclass(frozen=True, slots=True)
class Put:
    """A state to write to a folder of packs; see ``LocalTier.put``."""

    payload: Payload
    base: Manifest | None = None
    is_of_base: bool = False


class LocalTier(Tier):
    """States in a folder of this machine, or of a shared file system that has ``flock``.

    The folder is made if it is missing. ``direct`` writes past the page cache (None: if the file
    system can). ``pace`` is how fast payload is written. ``on_step`` is called after each step, see
    above. ``rank`` is the rank whose part is used by methods that name only the state. One folder
    may have the parts of all ranks.
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
        self._catalogue = Catalogue(self.root)
        self._index = ChunkIndex(self.root)
        self._rewriting = Rewriting(
            self.root,
            self._catalogue,
            self._index,
            is_direct=lambda: self.is_direct,
            on_step=self._on_step,
        )
        self._is_closed = False
        try:
            make_folders(self.root)
        except (FileExistsError, NotADirectoryError) as exc:
            raise Unavailable(
                f"{exc.filename} is no folder, so no packs can be there: move it away, or name"
                " another folder"
            ) from exc
        except OSError as exc:
            if exc.errno not in FORBIDDEN:
                raise  # otherwise there is nothing to read here, and writers get the error

    @cached_property
    def is_direct(self) -> bool:
        return supports_direct(self.root) if self._direct is None else self._direct

    def put(
        self, payload: Payload, *, base: Manifest | None = None, is_of_base: bool = False
    ) -> Placed:
        """Write a state; on return it is durable.

        ``is_of_base``: this process captured both this state and ``base`` in one training, and put
        ``base`` here itself. Then chunks of ``base`` are referred to by digest alone. Otherwise
        their bytes are compared.

        :raises Conflict: another state with this uid is here.
        :raises Unsupported: its manifest holds something that could not be read again.
        :raises Unavailable: the disk is full or fails; nothing of the state is left.
        """
        return self.put_all([Put(payload, base, is_of_base)])[0]

    def put_all(self, puts: Sequence[Put]) -> list[Placed]:
        """Write several states, in the order of their captures; all of them are durable on return,
        or none is.

        :raises DatastatesError: as ``put``, for one of them; nothing of any of them is left then.
        """
        self._check_open()
        for put in puts:
            put.payload.check()
        uid = ", ".join(put.payload.manifest.origin.uid for put in puts[:_NAMED]) + (
            " and others" if len(puts) > _NAMED else ""
        )
        try:
            wishes = [
                _PutRequest(
                    put.payload,
                    places_of(put.base if put.is_of_base else None),
                    places_of(put.base),
                )
                for put in puts
            ]
            with self._staged(wishes) as staged:
                placed = staged.commit_all()
            if placed is None:  # a pack to which it refers was removed meanwhile
                with self._staged(
                    [_PutRequest(put.payload) for put in puts], is_sharing=False
                ) as staged:
                    placed = staged.commit_all()
        except OSError as exc:
            if not self.root.is_dir():
                raise Unavailable(
                    f"state {uid} was not written: {self._gone()}", trouble=f"gone: {self.root}"
                ) from exc
            if exc.errno in FORBIDDEN:
                raise Unavailable(
                    f"state {uid} was not written: {exc.filename or self.root} may not be written"
                    f" here ({exc.strerror}); get the right to write in that folder, or choose"
                    " another one for packs"
                ) from exc
            needed = sum(padded(view.nbytes) for put in puts for view in put.payload.chunks)
            raise Unavailable(
                f"state {uid} was not written to {self.root} ({exc}): it needs up to {needed}"
                f" bytes, {_free(self.root)} are free; make room, or choose another folder for"
                " packs"
            ) from exc
        assert placed is not None, "it refers to nothing else"
        return placed

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Open a state; its packs stay open while the reader is.

        :raises Unavailable: the folder itself is gone, or cannot be read.
        """
        return self.open_part(uid, self._rank, verify=verify)

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """``open`` for any rank's part."""
        self._check_open()
        if not self.root.is_dir():
            raise Unavailable(
                f"state {uid} cannot be read: {self._gone()}", trouble=f"gone: {self.root}"
            )
        try:
            with locked(self.root, is_shared=True, is_needed=False):
                return MappedReader(self.root, self.sound(uid, rank).manifest, verify=verify)
        except OSError as exc:
            raise Unavailable(
                f"state {uid} cannot be read in {self.root} ({exc}): {next_step(exc)}"
            ) from exc

    def manifest(self, uid: str) -> Manifest:
        """The manifest of a state, checked.

        :raises NotFound: it is not here.
        :raises Corrupt: it is damaged, or another state's.
        """
        return self.sound(uid, self._rank).manifest

    @property
    def bytes_stored(self) -> int:
        """The total size of all packs in the folder, of whichever lineage."""
        return bytes_of_packs(self.root)

    def has(self, uid: str) -> bool:
        """Whether the manifest of a state is here, damaged or not."""
        self._check_open()
        return self.has_part(uid, self._rank)

    def has_part(self, uid: str, rank: int) -> bool:
        """``has`` for any rank's part."""
        try:
            return self._find(uid, rank) is not None
        except (Corrupt, Unavailable):
            return True

    def uids(self) -> Iterator[str]:
        """The uid of every state whose manifest is here."""
        return iter([uid for uid, rank in self.parts() if rank == self._rank])

    def parts(self) -> Iterator[tuple[str, int]]:
        """The uid and the rank of every manifest that is here, whole or not."""
        self._check_open()
        listed = self._catalogue.listed() if self.root.is_dir() else {}
        members = {
            (member.uid, member.rank): None for each in listed.values() for member in each.members
        }
        damaged = (uid_of(name, "manifest") for name, each in listed.items() if not each.is_sound)
        return iter(
            [*members, *(each for each in damaged if each is not None and each not in members)]
        )

    def whole_parts(self, parts: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Placed]:
        """``whole`` for the parts of any ranks, by uid and rank."""
        self._check_open()
        found, left = dict[tuple[str, int], Placed](), list(dict.fromkeys(parts))
        with locked(self.root, is_shared=True, is_needed=False):
            hints = self._index.find(itertools.starmap(state_key, left))
            for is_thorough in (False, True):
                for part in {*self.parts()}.intersection(left) if is_thorough and left else left:
                    with suppress(NotFound, Corrupt, Unavailable):
                        sound = self._find(
                            *part, None if is_thorough else hints.get(state_key(*part), ())
                        )
                        if sound is not None and all(
                            is_there(self.root / pack.name, pack.size)
                            for pack in sound.manifest.packs
                        ):
                            found[part] = Placed(sound.manifest, sound.manifest.bytes_new)
                left = [part for part in left if part not in found]
            if found:
                # a process that was killed may have renamed the last file without syncing its name
                sync_folder(self.root)
        return found

    def remove(self, uid: str) -> int:
        """Delete the manifests of all parts of a state, then the packs that no other manifest in
        the folder needs; returns the payload bytes freed.
        """
        self._check_open()
        try:
            packs = {
                pack
                for each in self._catalogue.listed().values()
                for member in each.members
                if member.uid == uid
                for pack in member.packs
            }
            if not self._erase([uid]):
                return 0
            freed = 0
            with locked(self.root, is_shared=False):
                needed = self._catalogue.needed()
                for pack in packs if needed is not None else ():
                    if pack.name not in (needed or ()):
                        with suppress(FileNotFoundError):
                            freed += payload_bytes(self.root / pack.name)
                            (self.root / pack.name).unlink()
                sync_folder(self.root)
        except OSError as exc:
            raise Unavailable(f"state {uid} was not removed from {self.root} ({exc})") from exc
        return freed

    def discard(self, packs: Iterable[str]) -> None:
        """Delete the packs that no manifest needs, in one pass."""
        self._check_open()
        try:
            with locked(self.root, is_shared=False):
                needed = self._catalogue.needed()
                for name in packs if needed is not None else ():  # otherwise a sweep will do it
                    if uid_of(name, "safetensors") is not None and name not in (needed or ()):
                        (self.root / name).unlink(missing_ok=True)
                sync_folder(self.root)
        except OSError as exc:
            raise Unavailable(f"packs were not removed from {self.root} ({exc})") from exc

    def files(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """The files that each state here needs, by its uid: names and sizes, including files
        that others need too."""
        self._check_open()
        try:
            found = self._catalogue.files(padded) if self.root.is_dir() else {}
        except OSError as exc:
            raise Unavailable(f"{self.root} cannot be read ({exc})") from exc
        return {uid: files for (uid, rank), files in found.items() if rank == self._rank}

    def sweep(self) -> list[Path]:
        """Delete what crashes left behind: temporary files that no process writes, packs that no
        manifest needs. Returns what went."""
        self._check_open()
        with locked(self.root, is_shared=False):
            found = [self.root / name for name in os.listdir(self.root)]
            removed = [
                path
                for path in found
                if path.name.startswith(TEMPORARY) and is_abandoned(path, removes=True)
            ]
            needed = self._catalogue.needed()
            if needed is not None:
                for path in found:
                    if uid_of(path.name, "safetensors") is not None and path.name not in needed:
                        with suppress(PermissionError):  # another user's, in a sticky folder
                            path.unlink(missing_ok=True)
                            removed.append(path)
            sync_folder(self.root)
        return removed

    def forget(self, uids: Iterable[str]) -> None:
        """Delete the manifests of states at once, of all their parts that are here; ``collect``
        removes what they needed."""
        self._check_open()
        wanted = set(uids)
        try:
            self._erase(wanted)
        except OSError as exc:
            raise Unavailable(
                f"{len(wanted)} states were not removed from {self.root} ({exc})"
            ) from exc

    def collect(
        self,
        *,
        is_dry: bool = False,
        without: Iterable[str] = (),
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> CollectReport:
        """``sweep``, and rewrite packs if manifests need less than half of their bytes. It handles
        a few files at a time, and blocks no other work.

        ``is_dry`` changes nothing, and assumes that the states ``without`` are removed. ``tell`` is
        called with the bytes of packs freed so far, and the total.

        :raises Conflict: another process collects in this folder.
        """
        self._check_open()
        collector = Collector(
            self.root, self._catalogue, self._rewriting, tell=tell, without=without
        )
        try:
            return collector.look() if is_dry else collector.collect()
        except OSError as exc:
            raise Unavailable(f"no room was made in {self.root} ({exc})") from exc

    def rewrite_chunks(
        self,
        uid: str,
        rank: int,
        bad: Collection[Place],
        moved: MovedChunks,
        chunk: Callable[[Reader, int], memoryview],
    ) -> None:
        """Write the chunks of a state at ``bad`` places again, with the bytes that ``chunk``
        returns. Its manifest then has the new places. ``moved`` has them too, for the states that
        share the chunks. After an interrupt, the state is as before, or mended.
        """
        self._check_open()
        try:
            self._rewriting.rewrite_chunks(uid, rank, bad, moved, chunk)
        except OSError as exc:
            raise Unavailable(f"state {uid} was not mended in {self.root} ({exc})") from exc

    @contextmanager
    def unthrottled(self) -> Iterator[None]:
        """Write without the rate limit until the end of the block, because a caller wants to
        end."""
        with nullcontext() if self._pace is None else self._pace.lifted():
            yield

    def close(self) -> None:
        """Refuse further use; open readers keep working."""
        self._is_closed = True

    @contextmanager
    def stage(
        self,
        payload: Payload,
        *,
        known: Places | None = None,
        likely: Places | None = None,
        is_sharing: bool = True,
    ) -> Iterator[StagedPut]:
        """A state that is written but not visible. ``commit`` makes it visible; otherwise nothing
        of it is left at the end of the block.

        ``known`` are places of its chunks that need no comparison, in packs that are here or are
        committed earlier. The bytes at ``likely`` places are compared, as are those that
        ``is_sharing`` finds in other states.

        :raises Conflict: another state with this uid is here.
        """
        self._check_open()
        payload.check()
        with self._staged(
            [_PutRequest(payload, known or {}, likely or {})], is_sharing=is_sharing
        ) as staged:
            yield staged

    def sound(self, uid: str, rank: int) -> Sound:
        """The manifest of a state on one rank, with its tensors.

        :raises NotFound: it is not here.
        :raises Corrupt: it is damaged, or another state's.
        """
        self._check_open()
        if uid_of(manifest_name(uid, rank), "manifest") is None:
            raise NotFound(f"{uid!r} is no uid")
        sound = self._find(uid, rank)
        if sound is None:
            raise NotFound(f"state {uid} is not in {self.root}")
        if len(sound.manifest.refs) != len(sound.manifest.content.chunks):
            where = self.root / manifest_name(uid, rank)
            raise Corrupt(
                f"{where} says of {len(sound.manifest.content.chunks)} chunks where"
                f" {len(sound.manifest.refs)} lie"
            )
        return sound

    def _find(self, uid: str, rank: int, hints: Sequence[Hint] | None = None) -> Sound | None:
        """The manifest of a state; None if it is not here. Its own file and the index are tried
        first. With ``hints``, only these are tried.

        :raises Corrupt: it is damaged.
        """
        is_thorough = hints is None

        def places() -> Iterator[tuple[str, int]]:
            yield manifest_name(uid, rank), 0
            known = hints
            if known is None:  # only now: the first look at an index may write one
                known = self._index.find([key := state_key(uid, rank)]).get(key, ())
            for hint in known:
                yield f"{hint.pack.removesuffix('.safetensors')}.manifest", hint.offset

        doubt: Corrupt | None = None
        for name, offset in places():
            try:
                sound = self._frame(name, offset)
            except Corrupt as exc:
                doubt = exc
                continue
            if sound is not None and (sound.manifest.origin.uid, sound.manifest.origin.rank) == (
                uid,
                rank,
            ):
                return sound
        if is_thorough or doubt is not None:
            found = self._catalogue.find(uid, rank) if self.root.is_dir() else None
            if found is not None:
                return self._frame(*found)
        if doubt is not None:
            raise doubt
        return None

    def _frame(self, name: str, offset: int) -> Sound | None:
        """The manifest at an offset of a file; None if no manifest begins there."""
        path = self.root / name
        try:
            data = read_regular(path, most=MAX_MANIFEST)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise Unavailable(f"{path} cannot be read ({exc}): {next_step(exc)}") from exc
        first = memoryview(b"")
        for at, frame in frames(data):
            first = first or frame
            if at >= offset:
                source = f"{path}, from byte {at} on," if at else str(path)
                return decode_sound(frame, source=source, first=first) if at == offset else None
        return None

    @contextmanager
    def _staged(
        self, wishes: Sequence[_PutRequest], *, is_sharing: bool = True
    ) -> Iterator[StagedPut]:
        """States whose bytes are written, and that are not visible."""
        origin = wishes[0].payload.manifest.origin
        if any(
            uid_of(manifest_name(each.uid, each.rank), "manifest") is None
            for each in (wish.payload.manifest.origin for wish in wishes)
        ):
            raise InvalidInput(
                f"state {origin.uid!r}, rank {origin.rank}: this tier holds states of uids without"
                " dots or slashes"
            )
        with ExitStack() as stack:
            while True:
                file = stack.enter_context(
                    temporary(self.root / free_name(self.root, origin.uid, origin.rank, "manifest"))
                )
                if not file.final.exists():  # otherwise another writer had the name first
                    break
            keys: list[tuple[bytes, int]] = []
            for wish in wishes:
                keys.append(wish.key)
                for chunk in wish.payload.manifest.content.chunks:
                    key = chunk.digest, chunk.length
                    if chunk.length >= SHARED_BYTES and key not in wish.known:
                        keys.append(key)
            hints = self._index.find(keys)
            here = {
                number: Placed(manifest, 0)
                for number, wish in enumerate(wishes)
                if (manifest := self._same(wish.payload, hints.get(wish.key, ()))) is not None
            }
            new = [wish for number, wish in enumerate(wishes) if number not in here]
            if not new:
                yield StagedPut(self, here, None, (), None, file, {})
                return
            found = [
                (
                    find_shared(self.root, hints, wish.payload, wish.known, wish.likely)
                    if is_sharing
                    else SharedChunks()
                )
                for wish in new
            ]
            plan = plan_put(
                [wish.payload.manifest for wish in new],
                [
                    {**wish.known, **borrowed.places}
                    for wish, borrowed in zip(new, found, strict=True)
                ],
                free_name(self.root, origin.uid, origin.rank, "safetensors"),
                lambda one, other: are_equal(
                    new[one[0]].payload.chunks[one[1]], new[other[0]].payload.chunks[other[1]]
                ),
            )
            encoded, pack = readable(plan.manifests), None
            if plan.layout is not None:
                pack = stack.enter_context(temporary(self.root / plan.name))
                chunks = (new[state].payload.chunks[index] for state, index in plan.new)
                write_chunks(
                    pack.fd,
                    pack.path,
                    plan.layout,
                    chunks,
                    is_direct=self.is_direct,
                    pace=self._pace,
                )
                self._on_step("pack-written")
            stamps = {name: stamp for borrowed in found for name, stamp in borrowed.stamps.items()}
            yield StagedPut(self, here, plan, encoded, pack, file, stamps)

    def _same(self, payload: Payload, hints: Sequence[Hint]) -> Manifest | None:
        """The manifest of a state that is already here, if it is the same state. Its bytes are
        compared, because uid and digest prove nothing: the earlier one may be forged. None: it is
        not here, or its manifest is damaged.

        :raises Conflict: another state of this uid is here, or a chunk of it is damaged.
        """
        uid, rank = payload.manifest.origin.uid, payload.manifest.origin.rank
        if not hints and not os.path.lexists(self.root / manifest_name(uid, rank)):
            return None
        try:
            sound = self._find(uid, rank, hints)
        except Corrupt:
            return None
        if sound is None:
            return None
        try:
            with self.open_part(uid, rank) as reader:
                is_same = reader.manifest.digest == payload.manifest.digest and all(
                    are_equal(reader.chunk(index), chunk)
                    for index, chunk in enumerate(payload.chunks)
                )
                if is_same:
                    return reader.manifest
                why = (
                    f"is another state of that uid, of digest {reader.manifest.digest[:16]} and"
                    " other bytes: one of them is forged"
                )
        except Corrupt as exc:
            why = f"is damaged ({exc})"
        here = f"the one in {self.root}"
        raise Conflict(
            f"state {uid} was not written: {here} {why}; drop that one, or delete its file, and"
            " bring this state again"
        )

    def _erase(self, uids: Collection[str]) -> bool:
        """Remove the manifests of states, of all their parts; returns whether there were any."""
        found = self._index.find(state_key(uid, self._rank) for uid in uids).values()
        owned = {
            (f"{hint.pack.removesuffix('.safetensors')}.manifest", hint.offset)
            for hints in found
            for hint in hints
        }

        def going(name: str, each: ManifestFile) -> set[int]:
            is_named = (uid_of(name, "manifest") or ("",))[0] in uids
            damaged = {at for at in each.damaged if (name, at) in owned or (is_named and not at)}
            return damaged.union(member.offset for member in each.members if member.uid in uids)

        whole, has_any = list[Path](), False
        for name, each in self._catalogue.listed().items():
            gone = going(name, each)
            has_any |= bool(gone)
            # the other frames were deflated with the damaged one
            is_dead = 0 in each.damaged and 0 in gone
            if gone and (is_dead or len(gone) == len(each.members) + len(each.damaged)):
                whole.append(self.root / name)
            elif gone:
                self._cut(self.root / name, going)
        if has_any:
            with locked(self.root, is_shared=False):
                for path in whole:
                    path.unlink(missing_ok=True)
                sync_folder(self.root)
            self._on_step("manifest-removed")
        return has_any

    def _cut(self, path: Path, going: Callable[[str, ManifestFile], set[int]]) -> None:
        """Remove manifests from a file that others share."""
        with temporary(path) as file:  # no other process writes this file meanwhile
            try:
                listed = self._catalogue.look(path)
            except FileNotFoundError:
                return
            gone, data = going(path.name, listed), read_regular(path, most=MAX_MANIFEST)
            kept = [(at, frame) for at, frame in frames(data) if at not in gone]
            encoded = [bytes(frame) for _, frame in kept]
            if 0 in gone:  # the other frames were deflated with it
                first = next(frame for _, frame in frames(data))
                sound = [number for number, (at, _) in enumerate(kept) if at not in listed.damaged]
                bodies = [
                    bytes(opened(kept[number][1], source=str(path), first=first)[1])
                    for number in sound
                ]
                for number, frame in zip(sound, joined(bodies) if bodies else (), strict=True):
                    encoded[number] = frame
            write_file(file.fd, file.path, b"".join(encoded))
            with locked(self.root, is_shared=False):
                if read_regular(path, most=MAX_MANIFEST) == data:
                    file.commit()
            owner = {member.offset: (member.uid, member.rank) for member in listed.members}
            self._index.add(state_hints(path.stem, [owner.get(at) for at, _ in kept], encoded))

    def _commit(self, staged: StagedPut, plan: PutPlan) -> bool:
        file = staged.file
        try:
            with locked(self.root, is_shared=True):
                # packs to which it refers must stay until the manifest names them
                if not all(
                    is_there(self.root / info.name, info.size, staged.stamps.get(info.name))
                    for info in plan.borrowed
                ):
                    return False
                if staged.pack is not None:
                    staged.pack.commit()
                    self._on_step("pack-renamed")
                write_file(file.fd, file.path, b"".join(staged.encoded))
                self._on_step("manifest-written")
                file.commit()
                self._on_step("manifest-renamed")
        except BaseException:
            self._undo(plan, file)
            raise
        owners = [(manifest.origin.uid, manifest.origin.rank) for manifest in plan.manifests]
        hints = [hint for manifest in plan.manifests for hint in chunk_hints(manifest, {plan.name})]
        self._index.add([*state_hints(file.final.stem, owners, staged.encoded), *hints])
        return True

    def _undo(self, plan: PutPlan, file: Temporary) -> None:
        """Undo the renames of a commit."""
        with locked(self.root, is_shared=False):
            if file.is_committed:
                file.final.unlink(missing_ok=True)
            needed = self._catalogue.needed()
            if plan.layout is not None and needed is not None and plan.name not in needed:
                (self.root / plan.name).unlink(missing_ok=True)
            sync_folder(self.root)

    def _gone(self) -> str:
        return (
            f"the folder {self.root} is gone, so somebody deleted, moved or unmounted it: bring it"
            " back; or restore what is still in memory here, and open a repository in another"
            " folder"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"the tier at {self.root} is closed: open the repository again")


@dataclass(frozen=True, slots=True)
class _PutRequest:
    """A state to write, with the places of its chunks that are ``known``, or only ``likely``."""

    payload: Payload
    known: Places = field(default_factory=dict)
    likely: Places = field(default_factory=dict)

    @property
    def key(self) -> tuple[bytes, int]:
        return state_key(self.payload.manifest.origin.uid, self.payload.manifest.origin.rank)


@dataclass(frozen=True, slots=True)
class StagedPut:
    """States that are written together; those ``here`` were there before, by their number.

    Without ``plan`` all of them were."""

    tier: LocalTier
    here: dict[int, Placed]
    plan: PutPlan | None
    encoded: Sequence[bytes]
    pack: Temporary | None
    file: Temporary
    stamps: Mapping[str, Stamp]

    @property
    def was_here(self) -> bool:
        """Whether all of them were here already, so that nothing was written."""
        return self.plan is None

    def places(self) -> Iterator[tuple[PackInfo, int]]:
        """The place of each chunk once it is committed."""
        manifests = (
            [placed.manifest for placed in self.here.values()]
            if self.plan is None
            else self.plan.manifests
        )
        return (
            (manifest.packs[ref.pack], ref.offset)
            for manifest in manifests
            for ref in manifest.refs
        )

    def commit_all(self) -> list[Placed] | None:
        """Make them visible and durable; the result for each state, in order.

        None if a pack that one of them shares, or a state that was here, was removed or replaced
        meanwhile: stage them again then."""
        for placed in self.here.values():
            if not self.tier.has_part(placed.manifest.origin.uid, placed.manifest.origin.rank):
                return None
        if self.plan is not None and not self.tier._commit(self, self.plan):
            return None
        new = iter(self.plan.manifests if self.plan is not None else ())
        total = len(self.here) + (0 if self.plan is None else len(self.plan.manifests))
        return [
            self.here.get(number) or Placed(manifest := next(new), manifest.bytes_new)
            for number in range(total)
        ]

    def commit(self) -> Placed | None:
        """``commit_all`` for a single state."""
        placed = self.commit_all()
        return None if placed is None else placed[0]

    def undo(self) -> None:
        """Undo the commit; does nothing if all states were here before."""
        if self.plan is not None:
            self.tier._undo(self.plan, self.file)


def _free(root: Path) -> int | str:
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return "an unknown number of bytes"
