"""Rebuilding a lineage from its folder of packs alone, for a database that is lost, damaged, or older than the folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as replaced
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import URL

from datastates import values
from datastates.content.digest import root_digest
from datastates.content.manifest import Manifest
from datastates.errors import Conflict, Corrupt, DatastatesError, InvalidInput, NotFound, Unavailable
from datastates.lineage import anchor
from datastates.lineage.change import folders, rebuild, refs, runs
from datastates.lineage.change.clones import known, repository_uid
from datastates.lineage.change.record import mark
from datastates.lineage.change.withdraw import take_turns
from datastates.lineage.database import Database
from datastates.lineage.states import RefKind
from datastates.opening.chronicle import Chronicle, chronicles, tell_anew
from datastates.opening.environment import node_name
from datastates.opening.home import identity
from datastates.opening.lease import held_in
from datastates.opening.location import DATABASE, Location, locate
from datastates.store.files import sync_folder
from datastates.store.roles import DurableTier
from datastates.store.tiers import VOLATILE, packs_in
from datastates.system.interrupts import checkpoint, undisturbed
from datastates.system.locks import hold

from .retelling import Retelling, retell

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["ReindexReport", "reindex"]

_Manifests = dict[tuple[str, int], Manifest]
_NEW = ".reindex.db"
_TURN = ".reindexing"


@dataclass(frozen=True, slots=True)
class ReindexReport:
    """What was rebuilt: the uid of the lineage, and how many states, states whose bytes are here, branches, tags, notes, lines of reflogs,
    records of clones, seals, and variants of studies.

    ``lacking`` says what the folder does not know. ``replaced`` is the new path of the database that was there before.
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


@dataclass(frozen=True, slots=True)
class _Source:
    """A folder of packs, its uid, and its contents."""

    tier: DurableTier
    folder: str | None
    chronicle: Chronicle | None
    manifests: _Manifests


@values.takes(
    url=values.path,
    packs=values.optional(values.path),
    lineage=values.optional(values.text),
    replace=values.flag,
    on_progress=values.optional(values.callback),
)
def reindex(
    url: str | os.PathLike[str] = "runs",
    *,
    packs: str | os.PathLike[str] | None = None,
    lineage: str | None = None,
    replace: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ReindexReport:
    """Rebuild the lineage of a repository from its folder of packs, where the database is lost, damaged, or older than the packs.

    States, their ancestry, metrics, names, reflogs, notes, seals, studies, and the origins of cloned states come back as the folder last
    recorded them: at most ten seconds before a training was killed. The bytes of states are not touched.

        datastates.open("old").close()
        print(datastates.reindex("old", replace=True).states)

    :param url: as for ``open``; a database on a server must be empty.
    :param packs: as for ``open``.
    :param lineage: the uid of the lineage, if the folder serves several.
    :param replace: rebuild a lineage that exists; its file is kept beside the new one.
    :param on_progress: called with how many states have been recorded, and how many there are.
    :raises Conflict: a lineage exists and ``replace`` is false, or a process is at work in the folder, or has the lineage open.
    :raises NotFound: there is no folder of packs.
    """
    with undisturbed():
        return _rebuilt(locate(url, packs), lineage, on_progress or (lambda done, total: None), is_replacing=replace)


def _rebuilt(location: Location, lineage: str | None, tell: Callable[[int, int], None], *, is_replacing: bool) -> ReindexReport:
    """Rebuild the lineage; nothing is put in its place before all of it is complete."""
    if not location.packs.is_dir():
        raise NotFound(f"there is no folder of packs at {location.packs}: name the repository's folder, or its packs")
    _check_unused(location)
    if location.root is None:
        return _told_anew(_into(location.database_url, location, lineage, tell), location)
    final = location.root / DATABASE
    if final.exists() and not is_replacing:
        raise Conflict(
            f"{final} is there: open the repository, or rebuild its lineage with --replace (replace=True), which keeps that file"
        )
    with anchor.alone(final) as is_alone:
        if not is_alone:
            raise _in_use(final)
    making = location.root / _NEW
    with _taking_turns(location.root):
        _remove(making)
        try:
            before = _stamps(final)
            report = _into(URL.create("sqlite", database=str(making)).render_as_string(), location, lineage, tell)
            with anchor.alone(final) as is_alone:
                _check_unused(location)
                if not is_alone:
                    raise _in_use(final)
                if _stamps(final) != before:
                    raise Conflict(f"{final} was written to meanwhile, and stays as it is: rebuild the lineage again")
                kept = _put_aside(final) if final.exists() else None
                os.rename(making, final)
            sync_folder(location.root)
        finally:
            _remove(making)
    return _told_anew(replaced(report, replaced=None if kept is None else str(kept)), location)


@contextmanager
def _taking_turns(root: Path) -> Iterator[None]:
    """Rebuild alone: a second process would take the half-finished work of the first for that of a dead process."""
    try:
        held = hold(root / _TURN)
    except OSError as exc:
        raise Unavailable(f"no lineage can be made in {root} ({exc.strerror}): get the right to write there") from exc
    if held is None:
        raise Conflict(f"another process rebuilds the lineage in {root}: let it end")
    try:
        yield
    finally:
        held.close()


def _in_use(path: Path) -> Conflict:
    return Conflict(f"a process has {path} open, and would go on with what is there now: end it, then rebuild the lineage")


def _stamps(path: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """The stamps by which a database that nobody has written to is recognized."""
    return tuple(map(_stamp, (path, Path(f"{path}-wal"))))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _told_anew(report: ReindexReport, location: Location) -> ReindexReport:
    """Write the chronicle anew with the rows of this database, because later additions look up the last rows by their ids."""
    database = Database(location.database_url)
    try:
        tell_anew(database, location.packs)
    except (OSError, DatastatesError) as exc:
        return replaced(report, lacking=(*report.lacking, f"the chronicle stays as it was, for it could not be written anew: {exc}"))
    finally:
        database.close()
    return report


def _check_unused(location: Location) -> None:
    """Raise if a process is at work there: it would continue with the database that it has open."""
    for name in held_in(location.packs):
        raise Conflict(f"a training or a server goes on in {location.packs} (its lease is {name}): end it, then rebuild the lineage")


def _into(url: str, location: Location, lineage: str | None, tell: Callable[[int, int], None]) -> ReindexReport:
    tier = packs_in(location.packs)
    chronicle, others = _chosen(chronicles(location.packs), lineage)
    manifests, unread = _manifests(tier, _told(others) - _told([] if chronicle is None else [chronicle]))
    told = retell(chronicle, manifests)
    told.lacking += unread
    database = Database(url)
    try:
        return _write(database, _Source(tier, identity(location.packs), chronicle, manifests), told, location, tell)
    finally:
        database.close()


def _chosen(found: list[Chronicle], lineage: str | None) -> tuple[Chronicle | None, list[Chronicle]]:
    """The chronicle of the lineage to rebuild, and the others."""
    named = [each for each in found if lineage is None or each.lineage == lineage]
    if len(named) > 1:
        listed = ", ".join(f"{each.lineage} ({sum(len(entry.states) for entry in each.entries)} states)" for each in named)
        raise InvalidInput(f"this folder serves {len(named)} lineages: {listed}: say which with --lineage (lineage=)")
    if not named and lineage is not None:
        there = ", ".join(each.lineage for each in found) or "none"
        raise NotFound(f"no lineage {lineage!r} has a chronicle in this folder; there are {there}")
    return (named[0] if named else None), [each for each in found if each not in named]


def _told(those: list[Chronicle]) -> set[str]:
    """The uids of all states that these chronicles name."""
    return {state.uid for chronicle in those for entry in chronicle.entries for state in entry.states}


def _manifests(tier: DurableTier, theirs: Container[str]) -> tuple[_Manifests, list[str]]:
    """The manifests, without ``theirs``, which only other lineages know, and a message for each one that cannot be read."""
    found: _Manifests = {}
    unread: list[str] = []
    for uid, rank in sorted(tier.parts()):
        checkpoint()
        if uid in theirs:
            continue
        try:
            found[uid, rank] = tier.part_manifest(uid, rank)
        except (Corrupt, NotFound, Unavailable) as exc:
            unread.append(f"the manifest of state {uid}: {exc}")
    return found, unread


def _write(database: Database, source: _Source, told: Retelling, location: Location, tell: Callable[[int, int], None]) -> ReindexReport:
    with database.write(durable=True) as session:
        take_turns(session)  # two at once would both find it empty
        if not rebuild.is_empty(session):
            raise Conflict(f"{location} holds a lineage already: name an empty database")
        if source.chronicle is not None:
            rebuild.put_uid(session, source.chronicle.lineage)
        rebuild.put_runs(session, told.runs, told.ended_at)
        news = [rebuild.new_state(line) for line in told.states]
        rebuild.put_states(session, news, lambda done: tell(done, len(news)))
        rebuild.put_events(session, told.events)
        restorable = _mark(session, source, told)
        notes = rebuild.put_remarks(session, told.remarks)
        clones, seals = rebuild.put_clones(session, told.clones), rebuild.put_seals(session, told.seals)
        rebuild.put_variants(session, told.variants)
        rebuild.put_reports(session, told.reports)
        if source.folder is not None:
            folders.note(session, source.folder, path=str(location.packs), host=node_name())
        back = runs.recover(session, [], volatile=VOLATILE)
        standing = refs.refs(session)
        uid = repository_uid(session)
    told.lacking += [f"branch {each.branch!r} went back: the bytes of its newest states are not here" for each in back]
    return ReindexReport(
        lineage=uid,
        states=len(news),
        restorable=restorable,
        branches=sum(ref.kind is RefKind.BRANCH for ref in standing),
        tags=sum(ref.kind is RefKind.TAG for ref in standing),
        notes=notes,
        events=len(told.events),
        lacking=tuple(told.lacking),
        clones=clones,
        seals=seals,
        variants=len(told.variants),
    )


def _mark(session: Session, source: _Source, told: Retelling) -> int:
    """Record which states are whole in the folder; returns how many."""
    tier, node, count = source.tier, source.folder or "", 0
    here = known(session, [line.uid for line in told.states])
    whole = tier.whole_parts((uid, rank) for uid, rank in source.manifests if uid in here)
    parts: list[tuple[str, int, int, str, int]] = []
    for uid, found in groupby(source.manifests.items(), key=lambda each: each[0][0]):  # they are sorted by uid and rank
        of_it = [manifest for _, manifest in found]
        size = len(of_it)
        is_whole = all(each.origin.world_size == size and (uid, rank) in whole for rank, each in enumerate(of_it))
        if not is_whole or here.get(uid) != root_digest([each.digest for each in of_it], of_it[0].origin.parent_digests):
            if uid in here:
                told.lacking.append(f"the bytes of state {uid}: its packs are not whole, or its manifest is another state's")
            continue
        count += 1
        for rank, manifest in enumerate(of_it):
            mark(session, uid, tier.gives, tier=tier.name, node=node, rank=rank, bytes=manifest.bytes_new)
            if size > 1:
                parts.append((uid, rank, size, manifest.digest, manifest.origin.created_at_us))
    rebuild.put_parts(session, parts, tier=tier.name, node=node)
    return count


def _put_aside(path: Path) -> Path:
    """Rename the existing database, with the files that SQLite keeps beside it."""
    kept = next(name for name in (path.with_name(f"{path.name}.replaced-{number}") for number in count(1)) if not name.exists())
    for suffix in ("-wal", "-shm", ""):  # a log must never lie beside another database
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{kept}{suffix}")
    return kept


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
