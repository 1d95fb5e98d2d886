"""Rebuilding a lineage from its folder of packs, for a database that is lost, damaged, or older
than the folder: from the backup there, and from manifests."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from datetime import UTC, datetime
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import URL

from datastates import values
from datastates.engine.rank_reports import states_of
from datastates.errors import (
    Conflict,
    Corrupt,
    DatastatesError,
    InvalidInput,
    NotFound,
    Unavailable,
)
from datastates.lineage import sqlite_files
from datastates.lineage.database import Database
from datastates.lineage.query.retained import held_on
from datastates.lineage.schema import to_us
from datastates.lineage.states import NewState, RefKind
from datastates.lineage.write import attachments, runs
from datastates.lineage.write import clones as rebuild
from datastates.lineage.write.clones import Move, known, repository_uid
from datastates.lineage.write.record import check
from datastates.lineage.write.replicas import evict, mark, take_turns
from datastates.state.manifest import Manifest, root_digest
from datastates.storage.local import LocalTier
from datastates.storage.remote import ObjectTier, tier_of_url
from datastates.storage.tiers import VOLATILE
from datastates.system.files import hold, share, sync_folder
from datastates.system.interrupts import checkpoint, undisturbed

from .backup import BACKUP, back_up, damage_of, is_behind, open_read_only
from .lease import held_in, identity, owner_of
from .location import DATABASE, Location, locate

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_REINDEXED = "capture (found by reindex)"
_ELSE = "tags, notes, configurations, seals, clones, studies, and states that were only in memory"


@dataclass(slots=True)
class Added:
    """The content of manifests that a lineage lacks: states with parents first, and moves of
    branches in order. ``lacking`` lists what the manifests lack, for people."""

    states: list[NewState]
    moves: list[Move]
    lacking: list[str] = field(default_factory=list)


def added_by(
    manifests: Mapping[tuple[str, int], Manifest],
    here: Container[str],
    heads: Mapping[str, Move],
) -> Added:
    """What manifests, by uid and rank, add to a lineage. It has the states ``here``, and ``heads``
    are the last lines of its reflogs, by name."""
    found = {new.uid: new for new in states_of(manifests) if new.uid not in here}
    placed, moves, bridged = _placed(_in_order(found), here, heads)
    states = _parents_first(placed, here)
    added = Added(list(states.values()), [move for move in moves if move.new in states])
    if bridged:
        added.lacking.append(
            f"{bridged} states name a parent that is not known: each hangs on to the newest one"
            " before it on its branch, or is a root"
        )
    if len(states) < len(placed):
        added.lacking.append(
            f"{len(placed) - len(states)} states cannot be recorded: what they say of themselves is"
            " nothing that a lineage holds"
        )
    return added


def _in_order(found: Mapping[str, NewState]) -> list[NewState]:
    """The states, oldest first, and each after its first parent, even if a clock was wrong."""
    ordered: dict[str, NewState] = {}
    for new in sorted(found.values(), key=lambda each: (_at_us(each), each.facts.step)):
        path: dict[str, None] = {}
        uid: str | None = new.uid
        while uid is not None and uid in found and uid not in ordered and uid not in path:
            path[uid] = None
            uid = found[uid].facts.parent
        ordered |= {each: found[each] for each in reversed(path)}
    return list(ordered.values())


def _placed(
    found: Sequence[NewState], here: Container[str], heads: Mapping[str, Move]
) -> tuple[dict[str, NewState], list[Move], int]:
    """The states without their branches, the moves of these, and how many states were given
    another parent, since theirs is not known. The oldest comes first: each moves its branch, unless
    that was moved later."""
    heads, moves, bridged = dict(heads), list[Move](), 0
    coming = {new.uid for new in found}
    placed: dict[str, NewState] = {}
    for new in found:
        facts, branch = new.facts, new.facts.branch
        head = None if branch is None else heads.get(branch)
        if facts.parent is not None and facts.parent not in here and facts.parent not in coming:
            bridged += 1
            facts = replaced(facts, parent=None if head is None else head.new)
        edges = tuple(edge for edge in facts.edges if edge.parent in here or edge.parent in coming)
        placed[new.uid] = replaced(new, facts=replaced(facts, branch=None, edges=edges))
        if branch is None:
            continue
        # a state moves its branch if it is a child of the branch's state, or is not older
        if head is None or (
            head.kind is RefKind.BRANCH
            and (
                (head.new is not None and placed[new.uid].facts.parent == head.new)
                or head.at_us <= _at_us(new)
            )
        ):
            old = None if head is None else head.new
            heads[branch] = Move(branch, RefKind.BRANCH, old, new.uid, _at_us(new))
            moves.append(heads[branch])
    return placed, moves, bridged


def _at_us(new: NewState) -> int:
    return to_us(new.facts.created_at)


def _parents_first(states: dict[str, NewState], here: Container[str]) -> dict[str, NewState]:
    """The states that can be recorded, each after its parents; a parent that is not available is
    left out."""
    ordered: dict[str, NewState] = {}
    seen: set[str] = set()  # a circle of forged parents is cut where it closes
    for uid in states:
        path = [uid]
        while path:
            new = states[path[-1]]
            seen.add(new.uid)
            above = next(
                (each for each in new.facts.parents if each in states and each not in seen), None
            )
            if above is not None:
                path.append(above)
                continue
            path.pop()
            if new.uid not in ordered:
                facts = new.facts
                parent = facts.parent if facts.parent in ordered or facts.parent in here else None
                edges = tuple(
                    edge for edge in facts.edges if edge.parent in ordered or edge.parent in here
                )
                known = replaced(new, facts=replaced(facts, parent=parent, edges=edges))
                with suppress(DatastatesError, ValueError, OverflowError):  # it is not recordable
                    check(known)
                    ordered[new.uid] = known
    return ordered


_Manifests = dict[tuple[str, int], Manifest]
_NEW = ".reindex.db"
_TURN = ".reindexing"


@dataclass(frozen=True, slots=True)
class ReindexReport:
    """The rebuilt lineage: its uid, and how many states, states whose bytes are here, branches,
    tags, notes, lines of reflogs, records of clones, seals, and variants of studies it has.

    ``lacking`` lists what is not known, for people. ``replaced`` is the new path of the database
    that was there before.
    """

    lineage: str
    states: int
    restorable: int
    branches: int
    tags: int
    notes: int
    events: int
    lacking: tuple[str, ...]
    clones: int = 0
    seals: int = 0
    variants: int = 0
    replaced: str | None = None


@dataclass(slots=True)
class _Work:
    """One rebuilding: the folder, its contents, its uid, and what was found lacking.

    ``backup_at`` is the time of the backup that it starts from; None if it starts from none.
    """

    location: Location
    tell: Callable[[int, int], None]
    may_add: bool
    tier: LocalTier
    manifests: _Manifests
    further: list[tuple[ObjectTier, _Manifests]] = field(default_factory=list)
    folder: str = ""
    backup_at: datetime | None = None
    lacking: list[str] = field(default_factory=list)


@values.checked
def reindex(
    url: values.FilePath = "runs",
    *,
    packs: values.FilePath | None = None,
    replace: bool = False,
    tiers: Sequence[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> ReindexReport:
    """Rebuild the lineage of a repository from its folder of packs, where the database is lost,
    damaged, or older than the packs.

    It starts from the backup in the folder, or from the database if that is sound and lacks
    nothing of the backup. A backup is at most about a minute older than the end of the last
    training. Then it adds the states that only manifests have, with ancestry and metrics, and moves
    the branches. Without a backup, everything comes from manifests. The bytes of states are not
    touched.

        datastates.open("old").close()
        print(datastates.reindex("old", replace=True).states)

    :param url: as for ``open``. A database on a server must be empty, or ``replace`` is given.
    :param packs: as for ``open``.
    :param replace: rebuild a lineage that exists. Its file is kept next to the new one. On a
        server, add to the lineage what the folder has.
    :param tiers: the URLs of buckets that hold states of this lineage. The folder of packs may be
        empty then.
    :param on_progress: called with how many states have been recorded, and how many there are.
    :raises Conflict: a lineage exists and ``replace`` is false, or a process is at work in the
        folder, or has the lineage open.
    :raises NotFound: there is no folder of packs.
    """
    location = locate(url, packs)
    buckets = dict.fromkeys([*filter(None, [location.bucket]), *tiers])
    with undisturbed():
        return _rebuilt(
            location,
            on_progress or (lambda done, total: None),
            [_bucket(each) for each in buckets],
            is_replacing=replace,
        )


def _bucket(url: str) -> ObjectTier:
    tier = tier_of_url(values.string(url, "tiers"))
    if not isinstance(tier, ObjectTier):
        raise InvalidInput(f"{url} is no bucket: reindex reads folders of packs and buckets")
    return tier


def _rebuilt(
    location: Location,
    tell: Callable[[int, int], None],
    further: Sequence[ObjectTier],
    *,
    is_replacing: bool,
) -> ReindexReport:
    """Rebuild the lineage; nothing is put in its place before all of it is complete."""
    if further:
        location.packs.mkdir(parents=True, exist_ok=True)
    if not location.packs.is_dir():
        raise NotFound(
            f"there is no folder of packs at {location.packs}: name the repository's folder, or its"
            " packs"
        )
    _check_unused(location)
    tier = LocalTier(location.packs)
    unread: list[str] = []
    work = _Work(location, tell, is_replacing, tier, _read(tier, unread))
    work.further = [(each, _read(each, unread)) for each in further]
    if location.root is None:
        report = _into(location.database_url, work)
        return replaced(report, lacking=(*report.lacking, *unread))
    final = location.root / DATABASE
    if final.exists() and not is_replacing:
        raise Conflict(
            f"{final} is there: open the repository, or rebuild its lineage with --replace"
            " (replace=True), which keeps that file"
        )
    with sqlite_files.exclusive(final) as is_alone:
        if not is_alone:
            raise _in_use(final)
    making = location.root / _NEW
    with _taking_turns(location.root):
        _remove(making)
        try:
            before = _stamps(final)
            _begin(work, final, making)
            report = _into(URL.create("sqlite", database=str(making)).render_as_string(), work)
            with sqlite_files.exclusive(final) as is_alone:
                _check_unused(location)
                if not is_alone:
                    raise _in_use(final)
                if _stamps(final) != before:
                    raise Conflict(
                        f"{final} was written to meanwhile, and stays as it is: rebuild the lineage"
                        " again"
                    )
                kept = _put_aside(final) if final.exists() else None
                os.rename(making, final)
            sync_folder(location.root)
        finally:
            _remove(making)
    # if this fails, the next process makes the backup
    with closing(Database(location.database_url)) as database, suppress(OSError, DatastatesError):
        back_up(database, location)
    return replaced(
        report,
        lacking=(*report.lacking, *unread),
        replaced=None if kept is None else str(kept),
    )


def _read(tier: LocalTier | ObjectTier, unread: list[str]) -> _Manifests:
    """The manifests of a tier. Those that cannot be read are added to ``unread``."""
    found: _Manifests = {}
    for uid, rank in sorted(tier.parts()):
        checkpoint()
        try:
            found[uid, rank] = tier.sound(uid, rank).manifest
        except (Corrupt, NotFound, Unavailable) as exc:
            unread.append(f"the manifest of state {uid}: {exc}")
    return found


def _begin(work: _Work, final: Path, making: Path) -> None:
    """Copy the database, if it is sound and lacks nothing of the backup. Else copy the backup, if
    there is one."""
    backup = work.location.packs / BACKUP
    damage = damage_of(backup) if backup.is_file() else None
    if damage is not None:
        os.replace(backup, aside := backup.with_name(f"{BACKUP}.damaged"))
        work.lacking.append(f"the backup of the database is damaged ({damage}); it is {aside} now")
    if not _copied(final, making, backup) and backup.is_file():
        shutil.copyfile(backup, making)
        work.backup_at = datetime.fromtimestamp(backup.stat().st_mtime, UTC)
    if making.exists():
        share(making.parent, making)


def _copied(final: Path, making: Path, backup: Path) -> bool:
    """Copy the database with its log, which a killed process may have left; returns whether the
    copy can be used. The database itself is not opened, because the log may be another one's."""
    if not final.is_file():
        return False
    for suffix in ("", "-wal"):
        if os.path.isfile(f"{final}{suffix}"):
            shutil.copyfile(f"{final}{suffix}", f"{making}{suffix}")
    with suppress(sqlite3.Error), closing(sqlite3.connect(making)) as copy:
        copy.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if damage_of(making) is None:
        with open_read_only(making) as lineage:
            if not is_behind(lineage, backup):
                return True
    _remove(making)
    return False


@contextmanager
def _taking_turns(root: Path) -> Iterator[None]:
    """Rebuild alone: a second process would assume that the first one's unfinished work is of a
    dead process."""
    try:
        held = hold(root / _TURN)
    except OSError as exc:
        raise Unavailable(
            f"no lineage can be made in {root} ({exc.strerror}): get the right to write there"
        ) from exc
    if held is None:
        raise Conflict(f"another process rebuilds the lineage in {root}: let it end")
    try:
        yield
    finally:
        held.close()


def _in_use(path: Path) -> Conflict:
    return Conflict(
        f"a process has {path} open, and would go on with what is there now: end it, then rebuild"
        " the lineage"
    )


def _stamps(path: Path) -> list[tuple[int, int, int] | None]:
    """The stamps that show whether a database was written to."""
    found: list[tuple[int, int, int] | None] = []
    for each in (path, Path(f"{path}-wal")):
        try:
            status = each.stat()
        except FileNotFoundError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _check_unused(location: Location) -> None:
    """Raise if a process is at work there, since it would keep using the database that it has
    open."""
    for name in held_in(location.packs):
        raise Conflict(
            f"a training or a server uses {location.packs} (its lease is {name}): end it,"
            " then rebuild the lineage"
        )


def _into(url: str, work: _Work) -> ReindexReport:
    """Add what the folder has to the lineage in a database, which may be empty."""
    with closing(Database(url)) as database, database.write(durable=True) as session:
        take_turns(session)  # two at once would both find it empty
        if not database.is_sqlite and not work.may_add and not rebuild.is_empty(session):
            raise Conflict(
                f"{work.location} holds a lineage already: name an empty database, or add what"
                " the folder has to it with --replace (replace=True)"
            )
        return _add(session, work)


def _add(session: Session, work: _Work) -> ReindexReport:
    owner = owner_of(work.location.packs)
    for tier, _ in work.further:
        owner = owner or tier.owner()
    if rebuild.is_empty(session):
        if owner is not None:
            rebuild.put_uid(session, owner[1])
        work.lacking.append(
            f"there is no backup of the database: {_ELSE} are not known, nor where branches were"
            " moved by hand"
        )
    work.folder = identity(work.location.packs, repository_uid(session)) or ""
    unended = [run.uid for run in runs.unfinished(session)] if work.location.root else []
    for tier, _ in work.further:
        tier.check(repository_uid(session))
        attachments.note(session, tier.node, path=tier.url, host=tier.url.partition("?")[0])
    manifests = dict(work.manifests)
    for _, found in work.further:
        manifests |= {part: each for part, each in found.items() if part not in manifests}
    named = {uid for uid, _ in manifests}
    for manifest in manifests.values():
        named.update(manifest.origin.parents)
    here = set(known(session, named))
    added = added_by(manifests, here, rebuild.last_moves(session))
    if work.backup_at is not None and (added.states or unended):
        newer = []
        if added.states:
            newer.append(
                f"{len(added.states)} states are newer than it, and come from their manifests"
            )
        if unended:
            newer.append(f"{len(unended)} trainings had not ended then")
        work.lacking.append(
            f"the backup is of {work.backup_at:%Y-%m-%d %H:%M:%S} UTC: {', and '.join(newer)};"
            f" {_ELSE} that are newer are not known"
        )
    work.lacking += added.lacking
    before = rebuild.totals(session)["states"]
    total = before + len(added.states)
    work.tell(before, total)
    unknown = rebuild.put_runs(session, added.states)
    if unknown:
        work.lacking.append(f"who ran {unknown} of the trainings, and how they were configured")
    rebuild.put_states(session, added.states, lambda done: work.tell(before + done, total))
    new_uids = {new.uid for new in added.states}
    whole = _mark(session, work, work.tier, work.folder, work.manifests, new_uids)
    for tier, found in work.further:
        whole |= _mark(session, work, tier, tier.node, found, new_uids - whole)
    # the folder has no other states, not even under an identity that it lost
    local, node = work.tier.name, work.folder
    for other in {node, *attachments.at(session, work.location.packs)}:
        gone = {uid for uid, _ in held_on(session, tier=local, node=other)}
        evict(session, gone - whole if other == node else gone, tier=local, node=other)
    rebuild.put_moves(session, added.moves, reason=_REINDEXED)
    if work.folder:
        path = str(work.location.packs)
        attachments.note(session, work.folder, path=path, host=socket.gethostname())
    back = runs.recover(session, unended, volatile=VOLATILE)
    work.lacking += [
        f"branch {each.branch!r} went back: the bytes of its newest states are not here"
        for each in back
    ]
    now = rebuild.totals(session)
    return ReindexReport(
        lineage=repository_uid(session),
        states=now["states"],
        restorable=len(whole),
        branches=now["branches"],
        tags=now["tags"],
        notes=now["notes"],
        events=now["events"],
        lacking=tuple(work.lacking),
        clones=now["clones"],
        seals=now["seals"],
        variants=now["variants"],
    )


def _mark(
    session: Session,
    work: _Work,
    tier: LocalTier | ObjectTier,
    node: str,
    manifests: _Manifests,
    added: Container[str],
) -> set[str]:
    """Record which states are whole on a tier, and return their uids. The parts of ``added`` states
    are recorded, too."""
    here = known(session, {uid for uid, _ in manifests})
    whole = tier.whole_parts(part for part in manifests if part[0] in here)
    parts: list[tuple[str, int, int, str, int]] = []
    marked: set[str] = set()
    for uid, found in groupby(manifests.items(), key=lambda each: each[0][0]):
        # they are sorted by uid and rank
        of_it = [manifest for _, manifest in found]
        size = len(of_it)
        is_whole = all(
            each.origin.world_size == size and (uid, rank) in whole
            for rank, each in enumerate(of_it)
        )
        if not is_whole or here.get(uid) != root_digest(
            [each.digest for each in of_it], of_it[0].origin.parent_digests
        ):
            if uid in here:
                work.lacking.append(
                    f"the bytes of state {uid}: its packs are not whole, or its manifest is another"
                    " state's"
                )
            continue
        marked.add(uid)
        for rank, manifest in enumerate(of_it):
            mark(
                session,
                uid,
                tier.gives,
                tier=tier.name,
                node=node,
                rank=rank,
                bytes=manifest.bytes_new,
            )
            if size > 1 and uid in added:
                parts.append((uid, rank, size, manifest.digest, manifest.origin.created_at_us))
    rebuild.put_parts(session, parts, tier=tier.name, node=node)
    return marked


def _put_aside(path: Path) -> Path:
    """Rename the existing database, with the other files of SQLite."""
    kept = next(
        name
        for name in (path.with_name(f"{path.name}.replaced-{number}") for number in count(1))
        if not name.exists()
    )
    for suffix in ("-wal", "-shm", ""):  # a log must never be next to another database
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{kept}{suffix}")
    return kept


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
