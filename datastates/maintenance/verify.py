"""Reads every byte that a folder of packs, a bucket or another tier holds for this lineage once, on
several threads, and reports damage by name.

Files are read in the order of uids, so that a check that was ended continues after its last state.
Bytes that several states share are read once, and reported for each of them if they are damaged.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter

from datastates.errors import Conflict, Corrupt, NotFound, Unavailable
from datastates.lineage import lookup
from datastates.lineage.query import names, walk
from datastates.lineage.query.incomplete import waiting
from datastates.lineage.query.retained import held_on
from datastates.lineage.states import RefKind, State
from datastates.lineage.write import attachments
from datastates.lineage.write.clones import known, repository_uid
from datastates.lineage.write.parts import part_digest
from datastates.lineage.write.replicas import held
from datastates.state.manifest import CHUNK_BYTES, Manifest
from datastates.storage.dedup import ChunkIndex
from datastates.storage.local import LocalTier
from datastates.storage.pack import places_of
from datastates.storage.remote import ObjectTier
from datastates.storage.tier import Tier
from datastates.system.interrupts import checkpoint

from .backup import BACKUP, damage_of
from .core import Core
from .further import named
from .lease import identity

_PIECE = 16
"""One thread reads this many chunks at a time, 64 MiB at most."""

_MOST_THREADS = 4

_Place = tuple[str, str, int]
"""A tier, a pack, and the offset of a chunk in it; or a tier, the digest of a chunk, and 0."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a state: of a chunk, which holds (parts of) ``tensors``, or of its manifest, if
    ``chunk`` is None."""

    state: str
    rank: int
    chunk: int | None
    tensors: tuple[str, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a check of everything. ``states`` counts the states of which a manifest was
    read, ``bytes`` the payload that was read.

    ``unread`` names files that may be sound but cannot be read here: manifests of a newer version,
    files without permission, names that are not files. It also names damaged files that no state
    needs: the backup of the lineage, the index of chunks and the identity of the folder. ``mark``
    is the uid to continue from (``since``) if the check was ended early; None if it finished.
    ``partial`` lists states that wait for parts of other ranks, in words. They enter the lineage
    once they are whole, and cannot be restored before. ``elsewhere`` counts, for each tier that was
    not read, the states that only it holds.
    """

    states: int
    bytes: int
    damage: tuple[Damage, ...]
    unread: tuple[str, ...]
    mark: str | None
    partial: tuple[str, ...] = ()
    elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def hurt(self) -> tuple[str, ...]:
        """The uids of the damaged states, each once."""
        return tuple(dict.fromkeys(each.state for each in self.damage))


@dataclass(frozen=True, slots=True)
class Limits:
    """The start of a check, its longest time, and the further tier that is read instead of the
    packs. ``threads`` None: as many as there are cores, at most four."""

    since: str | None = None
    limit_s: float | None = None
    threads: int | None = None
    tier: str | None = None


def check_all(
    core: Core,
    limits: Limits,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_mark: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Read everything; see ``Repository.verify``.

    ``on_mark`` is called with each uid up to which everything was read."""
    core.check_open()
    core.settle()
    tiers: list[Tier] = [core.tiers.durable, *core.tiers.further[: bool(core.location.bucket)]]
    if limits.tier == core.tiers.durable.name:
        tiers = tiers[:1]
    elif limits.tier is not None:
        tiers = [named(core, limits.tier)]
    tell, mark = on_progress or (lambda done, total: None), on_mark or (lambda mark: None)
    return _Run(core, tiers, limits, tell, mark).run()


@dataclass(slots=True)
class _Task:
    """A state that is being read, as pieces that each return the damage."""

    tier: Tier
    uid: str
    rank: int
    pieces: list[Future[list[Damage]]] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    shared: list[tuple[int, _Place]] = field(default_factory=list)
    manifest: Manifest | None = None


class _Run:
    def __init__(
        self,
        core: Core,
        tiers: list[Tier],
        limits: Limits,
        tell: Callable[[int, int], None],
        mark: Callable[[str], None],
    ) -> None:
        self._core, self._limits, self._tell, self._mark = core, limits, tell, mark
        self._tiers = tiers
        self._total = 0
        self._done, self._lock = 0, threading.Lock()
        self._seen: set[_Place] = set()
        self._read_already: set[_Place] = set()
        self._bad: dict[_Place, str] = {}
        self._damage: list[Damage] = []
        self._unread: list[str] = []
        self._states, self._counted = 0, ""
        self._uids: set[str] = set()

    def run(self) -> VerifyReport:
        """Check every state that is on the tiers, or that the lineage records there."""
        until = None if self._limits.limit_s is None else time.monotonic() + self._limits.limit_s
        threads = self._limits.threads or min(_MOST_THREADS, os.cpu_count() or 1)
        waiting: deque[_Task] = deque()
        last: str | None = None
        since = self._limits.since
        found = [
            (uid, rank, tier)
            for tier in self._tiers
            for uid, rank in self._parts(tier)
            if since is None or uid > since
        ]
        self._uids = {uid for uid, _, _ in found}
        if since is None and self._core.tiers.durable in self._tiers:
            self._unread += _damaged_beside(self._core)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="datastates-verify")
        try:
            for uid, rank, tier in sorted(found, key=itemgetter(0)):
                if (
                    until is not None
                    and last is not None
                    and uid != last
                    and time.monotonic() > until
                ):
                    self._finish(waiting, 0)
                    return self._report(last)
                waiting.append(self._begin(tier, uid, rank, pool))
                last = uid
                self._finish(waiting, 4 * threads)
            self._finish(waiting, 0)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return self._report(None)

    def _parts(self, tier: Tier) -> set[tuple[str, int]]:
        """The parts that a tier holds, or holds as the lineage records it."""
        node = _node(self._core, tier)
        with self._core.database.read() as session:
            recorded = held_on(session, tier=tier.name, node=node)
        if isinstance(tier, LocalTier | ObjectTier):
            self._total += tier.bytes_stored
            return {*recorded, *tier.parts()}
        with self._core.database.read() as session:
            states = lookup.states(session, sorted({uid for uid, _ in recorded}))
        self._total += sum(state.bytes_total for state in states)
        return set(recorded)

    def _report(self, mark: str | None) -> VerifyReport:
        others = {
            tier.name: _node(self._core, tier)
            for tier in self._core.tiers.further
            if tier not in self._tiers and self._limits.tier is None
        }
        with self._core.database.read() as session:
            partial = tuple(str(each) for each in waiting(session))
            only = {
                name: {uid for uid, _ in held_on(session, tier=name, node=node)} - self._uids
                for name, node in others.items()
            }
        return VerifyReport(
            self._states,
            self._done,
            tuple(self._damage),
            tuple(dict.fromkeys(self._unread)),
            mark,
            partial,
            {name: len(uids) for name, uids in only.items() if uids},
        )

    def _begin(self, tier: Tier, uid: str, rank: int, pool: ThreadPoolExecutor) -> _Task:
        checkpoint()
        task = _Task(tier, uid, rank)
        try:
            task.manifest = manifest = _manifest(tier, uid, rank)
        except NotFound:
            node = _node(self._core, tier)
            with self._core.database.read() as session:
                is_claimed = bool(held(session, [uid], tier=tier.name, node=node))
            if is_claimed:
                task.damage.append(
                    Damage(
                        uid, rank, None, (), "its manifest is gone: somebody deleted or moved it"
                    )
                )
            return task
        except Corrupt as exc:
            task.damage.append(Damage(uid, rank, None, (), str(exc)))
            return task
        except Unavailable as exc:
            self._unread.append(str(exc))
            return task
        self._states += uid != self._counted  # the parts of a state follow each other
        self._counted = uid
        self._compare(task, manifest)
        wanted: list[int] = []
        for index in range(len(manifest.content.chunks)):
            place = _place(tier, manifest, index)
            if place in self._seen:
                task.shared.append((index, place))
            else:
                self._seen.add(place)
                wanted.append(index)
        task.pieces = [
            pool.submit(self._read, tier, uid, rank, wanted[at : at + _PIECE])
            for at in range(0, len(wanted), _PIECE)
        ]
        return task

    def _compare(self, task: _Task, manifest: Manifest) -> None:
        """Compare the digest of the manifest with the digest of the state, or of its part, in the
        lineage."""
        with self._core.database.read() as session:
            if manifest.origin.world_size > 1:
                digest = part_digest(session, task.uid, task.rank)
            else:
                digest = known(session, [task.uid]).get(task.uid)
        if digest not in (None, manifest.digest):
            said = (
                f"it is the manifest of a state of digest {manifest.digest[:16]}, the lineage knows"
                f" {str(digest)[:16]}"
            )
            task.damage.append(Damage(task.uid, task.rank, None, (), said))

    def _read(self, tier: Tier, uid: str, rank: int, chunks: list[int]) -> list[Damage]:
        """Read some chunks; runs on a thread of the pool."""
        found: list[Damage] = []
        try:
            reader = tier.open_part(uid, rank, verify=True)
        except (NotFound, Corrupt):
            return found  # removed, or replaced, since its manifest was read
        except Unavailable as exc:
            self._unread.append(str(exc))
            return found
        with reader:
            manifest = reader.manifest
            reader.ahead(chunks)
            for index in chunks:
                place = _place(tier, manifest, index)
                try:
                    reader.chunk(index)
                except Corrupt as exc:
                    self._bad[place] = str(exc)
                    found.append(Damage(uid, rank, index, _tensors(manifest, index), str(exc)))
                except Unavailable as exc:
                    self._unread.append(str(exc))
                    continue
                except OSError as exc:
                    found.append(
                        Damage(
                            uid, rank, index, _tensors(manifest, index), f"it cannot be read: {exc}"
                        )
                    )
                with self._lock:
                    self._read_already.add(place)
                    self._done += manifest.content.chunks[index].length
        return found

    def _finish(self, waiting: deque[_Task], most: int) -> None:
        """Finish the first states until at most ``most`` wait."""
        while len(waiting) > most:
            task = waiting.popleft()
            for piece in task.pieces:
                checkpoint()
                task.damage += piece.result()
            for index, place in task.shared:
                # an earlier state was to read it, and may have been removed meanwhile
                if place not in self._read_already:
                    task.damage += self._read(task.tier, task.uid, task.rank, [index])
                elif place in self._bad and task.manifest is not None:
                    tensors = _tensors(task.manifest, index)
                    task.damage.append(
                        Damage(task.uid, task.rank, index, tensors, self._bad[place])
                    )
            self._damage += task.damage
            self._tell(min(self._done, self._total), self._total)
            if not waiting or waiting[0].uid != task.uid:  # its last part
                self._mark(task.uid)


def _node(core: Core, tier: Tier) -> str:
    """The node under which the lineage records the states of a tier."""
    if tier is core.tiers.durable:
        return core.home.uid or ""
    with core.database.read() as session:  # a process that only reads has not checked the tier
        return tier.node or attachments.urls(session).get(getattr(tier, "url", ""), "")


def _manifest(tier: Tier, uid: str, rank: int) -> Manifest:
    if isinstance(tier, LocalTier | ObjectTier):
        return tier.sound(uid, rank).manifest
    with tier.open_part(uid, rank) as reader:
        return reader.manifest


def _place(tier: Tier, manifest: Manifest, index: int) -> _Place:
    if isinstance(tier, LocalTier | ObjectTier):
        ref = manifest.refs[index]
        return tier.name, manifest.packs[ref.pack].name, ref.offset
    return tier.name, manifest.content.chunks[index].digest.hex(), 0


def _tensors(manifest: Manifest, index: int) -> tuple[str, ...]:
    """The paths of the tensors in a chunk."""
    start, end = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
    return tuple(
        place.spec.path
        for place in places_of(bytes(manifest.content.tensors))
        if place.start < end and place.end > start
    )


def _damaged_beside(core: Core) -> list[str]:
    """The damage in the files that belong to the folder as a whole: the backup of its
    lineage, the index of chunks, the identity."""
    packs, tier = core.location.packs, core.tiers.durable
    try:
        with core.database.read() as session:
            uid = identity(packs, repository_uid(session))
        count = ChunkIndex(packs).damaged()
    except (OSError, Unavailable, Conflict) as exc:
        return [str(exc)]
    said: list[str] = []
    if (backup := packs / BACKUP).is_file() and (damage := damage_of(backup)) is not None:
        said.append(f"{backup} ({damage}): delete it, and the next training makes a new one")
    if count:
        said.append(
            f"{packs}/.chunks ({count} entries are damaged): delete it, and it is made anew from"
            " the manifests"
        )
    with core.database.read() as session:
        here = {*tier.parts()}.difference(held_on(session, tier=tier.name, node=uid or ""))
        others = [
            other
            for other in attachments.at(session, packs)
            if here.intersection(held_on(session, tier=tier.name, node=other))
        ]
    return said + [
        f"{packs}/.identity says {uid}, but its states lie in folder {other}: if it is that folder,"
        " write that"
        for other in others
    ]


# Help for damaged bytes: the nearest state that verifies, and how to continue from there.


_TRIED = 32
"""The most ancestors, and the most descendants, that are read, since each may have gigabytes."""


@contextmanager
def suggest_sound_state(core: Core, state: State) -> Iterator[None]:
    """Add to errors of damage inside the block the nearest state that verifies, and how to continue
    from it.

    :raises Corrupt: ``nearest`` is the uid of that state: an ancestor, else a descendant.
    """
    try:
        yield
    except Corrupt as exc:
        said = f"state {state.uid[:10]} (step {state.step}) is damaged: {exc}"
        sound = _nearest_sound(core, state)
        if sound is None:
            raise Corrupt(
                f"{said}, and no ancestor or descendant of it verifies here: bring its files back"
                " (`datastates repair --from FOLDER`), or begin on another branch"
            ) from exc
        lines = [
            f"{said}; the nearest state that verifies is {sound.uid[:10]} (step {sound.step}):"
            " restore that"
        ]
        with core.database.read() as session:
            branches = names.refs(session, RefKind.BRANCH)
        lines += [
            f"to go on from there on branch {ref.name!r}: repo.move({ref.name!r},"
            f" {sound.uid[:10]!r}, expected={state.uid[:10]!r}), then track it again"
            for ref in branches
            if ref.state == state.uid
        ]
        raise Corrupt("\n".join(lines), nearest=sound.uid) from exc


def _nearest_sound(core: Core, state: State) -> State | None:
    """The nearest ancestor, else descendant, that can be restored here and verifies."""
    with core.database.read() as session:
        later = [
            each
            for each in walk.descendants(session, state.uid, limit=_TRIED)
            if each.status.is_restorable
        ]
    tried = chain(islice(_restorable(core, state), _TRIED), later)
    return next((each for each in tried if _is_sound(core, each)), None)


def _restorable(core: Core, state: State) -> Iterator[State]:
    here: State | None = state
    while here is not None and here.parents:
        with core.database.read() as session:
            here = walk.nearest_restorable(session, here.parents[0])
        if here is not None:
            yield here


def _is_sound(core: Core, state: State) -> bool:
    try:
        with core.open_payload(state, verify=True) as reader:
            reader.verify()
    except (Corrupt, NotFound, Unavailable):
        return False
    return True
