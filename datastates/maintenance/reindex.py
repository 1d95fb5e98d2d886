"""Rebuilding a lineage from its folder of packs alone, for a database that is lost, damaged, or
older than the folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import URL

from datastates import values
from datastates.engine.rank_reports import lines_of
from datastates.errors import (
    Conflict,
    Corrupt,
    DatastatesError,
    InvalidInput,
    NotFound,
    Unavailable,
)
from datastates.lineage import sqlite_files
from datastates.lineage.chronicle import (
    AttributesLine,
    CloneLine,
    Entry,
    EventLine,
    RemarkLine,
    ReportLine,
    RunLine,
    SealLine,
    StateLine,
    VariantLine,
)
from datastates.lineage.database import Database
from datastates.lineage.query import names
from datastates.lineage.states import RefKind
from datastates.lineage.write import attachments, runs
from datastates.lineage.write import clones as rebuild
from datastates.lineage.write.clones import known, new_state, repository_uid
from datastates.lineage.write.record import check
from datastates.lineage.write.replicas import mark, take_turns
from datastates.state.manifest import Manifest, root_digest
from datastates.storage.durable_files import sync_folder
from datastates.storage.roles import DurableTier
from datastates.storage.tiers import VOLATILE, packs_in
from datastates.system.files import hold
from datastates.system.interrupts import checkpoint, undisturbed

from .chronicle import Chronicle, chronicles, tell_anew
from .environment import node_name
from .lease import held_in, identity
from .location import DATABASE, Location, locate

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

_REINDEXED = "capture (found by reindex)"


@dataclass(slots=True)
class Retelling:
    """A lineage as its folder records it: states with parents first, lines of reflogs in order.

    ``lacking`` says what the folder lacks."""

    runs: list[RunLine] = field(default_factory=list)
    states: list[StateLine] = field(default_factory=list)
    events: list[EventLine] = field(default_factory=list)
    remarks: tuple[RemarkLine, ...] = ()
    clones: list[CloneLine] = field(default_factory=list)
    seals: list[SealLine] = field(default_factory=list)
    variants: list[VariantLine] = field(default_factory=list)
    reports: list[ReportLine] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    @property
    def ended_at(self) -> dict[str, int]:
        """When each run captured its last state."""
        found: dict[str, int] = {}
        for state in self.states:
            if state.run is not None:
                found[state.run] = max(found.get(state.run, 0), state.created_at)
        return found


def retell(chronicle: Chronicle | None, manifests: Mapping[tuple[str, int], Manifest]) -> Retelling:
    """The lineage from a chronicle, and from manifests by uid and rank, without those that only
    other lineages know."""
    told = Retelling()
    states: dict[str, StateLine] = {}
    runs: dict[str, RunLine] = {}
    events: dict[int, EventLine] = {}
    for entry in () if chronicle is None else chronicle.entries:
        runs |= {run.uid: run for run in entry.runs}
        states |= {state.uid: state for state in entry.states}
        states |= {
            each.state: _annotated(states[each.state], each)
            for each in entry.attributes
            if each.state in states
        }
        events |= {event.id: event for event in entry.events}
        told.remarks = told.remarks if entry.remarks is None else entry.remarks
    told.events = [events[id_] for id_ in sorted(events)]
    _tell_the_rest(told, () if chronicle is None else chronicle.entries)
    _say_what_is_lacking(told, chronicle)
    found = {
        line.uid: (line, branch) for line, branch in lines_of(manifests) if line.uid not in states
    }
    _add(told, states, _in_order(found), is_whole=chronicle is not None)
    told.states = _parents_first(told, states)
    _know_runs(told, runs)
    told.runs = sorted(runs.values(), key=lambda run: run.process is not None)
    return told


def _annotated(state: StateLine, changed: AttributesLine) -> StateLine:
    return msgspec.structs.replace(state, attributes=changed.attributes, metrics=changed.metrics)


def _tell_the_rest(told: Retelling, entries: Sequence[Entry]) -> None:
    """Add everything besides runs, states and names: the last entry on each."""
    told.clones = [
        line
        for _, line in sorted({line.id: line for entry in entries for line in entry.clones}.items())
    ]
    told.seals = list({line.state: line for entry in entries for line in entry.seals}.values())
    told.variants = list(
        {(line.study, line.name): line for entry in entries for line in entry.variants}.values()
    )
    told.reports = list({line.name: line for entry in entries for line in entry.reports}.values())


def _say_what_is_lacking(told: Retelling, chronicle: Chronicle | None) -> None:
    if chronicle is None:
        told.lacking.append(
            "the folder has no chronicle: tags, notes, configurations, seals, clones, studies,"
            " states that were only in memory, and where branches were moved by hand are not known"
        )
    elif chronicle.damaged_bytes:
        told.lacking.append(
            f"{chronicle.damaged_bytes} bytes of the chronicle are damaged: what they told is lost"
        )


def _in_order(
    found: Mapping[str, tuple[StateLine, str | None]],
) -> list[tuple[StateLine, str | None]]:
    """The states, oldest first, and each after its first parent, whatever the clock said."""
    ordered: dict[str, tuple[StateLine, str | None]] = {}
    for line, _ in sorted(found.values(), key=lambda each: (each[0].created_at, each[0].step)):
        path: dict[str, None] = {}
        uid: str | None = line.uid
        while uid is not None and uid in found and uid not in ordered and uid not in path:
            path[uid] = None
            uid = found[uid][0].parent
        ordered |= {each: found[each] for each in reversed(path)}
    return list(ordered.values())


def _add(
    told: Retelling,
    states: dict[str, StateLine],
    found: Sequence[tuple[StateLine, str | None]],
    *,
    is_whole: bool,
) -> None:
    """Add states that are only in manifests, the oldest first: each moves its branch, unless
    that was moved later."""
    heads = {event.name: event for event in told.events}
    last = max((event.id for event in told.events), default=0)
    coming, bridged = {line.uid for line, _ in found}, 0
    for line, branch in found:
        head = None if branch is None else heads.get(branch)
        known = line
        if line.parent is not None and line.parent not in states and line.parent not in coming:
            bridged += 1
            known = msgspec.structs.replace(
                line, parent=None if head is None or branch is None else head.new
            )
        known = msgspec.structs.replace(
            known,
            edges=tuple(edge for edge in line.edges if edge[0] in states or edge[0] in coming),
        )
        states[line.uid] = known
        if branch is not None and (head is None or _moves(head, known)):
            last += 1
            old = None if head is None else head.new
            heads[branch] = event = EventLine(
                last, branch, RefKind.BRANCH.value, old, line.uid, _REINDEXED, line.created_at, None
            )
            told.events.append(event)
    if bridged:
        told.lacking.append(
            f"{bridged} states name a parent that is not known: each hangs on to the newest one"
            " before it on its branch, or is a root"
        )
    if found and is_whole:
        told.lacking.append(
            f"{len(found)} states are newer than the chronicle, or it was damaged: their manifests"
            " tell of them"
        )


def _moves(head: EventLine, line: StateLine) -> bool:
    """Whether a state came after the last event of its branch's name: it has that event's state
    as its parent, or is not older."""
    return head.kind == RefKind.BRANCH.value and (
        (head.new is not None and line.parent == head.new) or head.created_at <= line.created_at
    )


def _know_runs(told: Retelling, runs: dict[str, RunLine]) -> None:
    """Add runs of which nothing is recorded but that they captured a state."""
    unknown = 0
    for line in told.states:
        if line.run is not None and line.run not in runs:
            unknown += 1
            runs[line.run] = RunLine(
                line.run, None, None, "", "", 0, (), None, None, {}, {}, line.created_at, None
            )
    if unknown:
        told.lacking.append(f"who ran {unknown} of the trainings, and how they were configured")


def _parents_first(told: Retelling, states: dict[str, StateLine]) -> list[StateLine]:
    """The states that can be recorded, each after its parents; a parent that is not available is
    left out."""
    ordered: dict[str, StateLine] = {}
    seen: set[str] = set()  # a circle of forged parents is cut where it closes
    refused = 0
    for uid in states:
        path = [uid]
        while path:
            line = states[path[-1]]
            seen.add(line.uid)
            above = next(
                (parent for parent in _parents(line) if parent in states and parent not in seen),
                None,
            )
            if above is not None:
                path.append(above)
                continue
            path.pop()
            if line.uid not in ordered:
                known = _of_known_parents(line, ordered)
                if _is_recordable(known):
                    ordered[line.uid] = known
                else:
                    refused += 1
    if refused:
        told.lacking.append(
            f"{refused} states cannot be recorded: what they say of themselves is nothing that a"
            " lineage holds"
        )
    return list(ordered.values())


def _parents(line: StateLine) -> tuple[str, ...]:
    further = tuple(edge[0] for edge in line.edges)
    return further if line.parent is None else (line.parent, *further)


def _of_known_parents(line: StateLine, known: Mapping[str, object]) -> StateLine:
    edges = tuple(edge for edge in line.edges if edge[0] in known)
    return msgspec.structs.replace(
        line, parent=line.parent if line.parent in known else None, edges=edges
    )


def _is_recordable(line: StateLine) -> bool:
    try:
        check(new_state(line))
    except (DatastatesError, ValueError, OverflowError):
        return False
    return True


# Rebuilding a lineage from its folder of packs alone, for a database that is lost, damaged, or
# older than the folder.


_Manifests = dict[tuple[str, int], Manifest]
_NEW = ".reindex.db"
_TURN = ".reindexing"


@dataclass(frozen=True, slots=True)
class ReindexReport:
    """What was rebuilt: the uid of the lineage, and how many states, states whose bytes are here,
    branches, tags, notes, lines of reflogs, records of clones, seals, and variants of studies.

    ``lacking`` says what the folder does not know. ``replaced`` is the new path of the database
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
    """Rebuild the lineage of a repository from its folder of packs, where the database is lost,
    damaged, or older than the packs.

    States, their ancestry, metrics, names, reflogs, notes, seals, studies, and the origins of
    cloned states come back as the folder last recorded them: at most ten seconds before a training
    was killed. The bytes of states are not touched.

        datastates.open("old").close()
        print(datastates.reindex("old", replace=True).states)

    :param url: as for ``open``; a database on a server must be empty.
    :param packs: as for ``open``.
    :param lineage: the uid of the lineage, if the folder serves several.
    :param replace: rebuild a lineage that exists; its file is kept beside the new one.
    :param on_progress: called with how many states have been recorded, and how many there are.
    :raises Conflict: a lineage exists and ``replace`` is false, or a process is at work in the
        folder, or has the lineage open.
    :raises NotFound: there is no folder of packs.
    """
    with undisturbed():
        return _rebuilt(
            locate(url, packs),
            lineage,
            on_progress or (lambda done, total: None),
            is_replacing=replace,
        )


def _rebuilt(
    location: Location, lineage: str | None, tell: Callable[[int, int], None], *, is_replacing: bool
) -> ReindexReport:
    """Rebuild the lineage; nothing is put in its place before all of it is complete."""
    if not location.packs.is_dir():
        raise NotFound(
            f"there is no folder of packs at {location.packs}: name the repository's folder, or its"
            " packs"
        )
    _check_unused(location)
    if location.root is None:
        return _told_anew(_into(location.database_url, location, lineage, tell), location)
    final = location.root / DATABASE
    if final.exists() and not is_replacing:
        raise Conflict(
            f"{final} is there: open the repository, or rebuild its lineage with --replace"
            " (replace=True), which keeps that file"
        )
    with sqlite_files.alone(final) as is_alone:
        if not is_alone:
            raise _in_use(final)
    making = location.root / _NEW
    with _taking_turns(location.root):
        _remove(making)
        try:
            before = _stamps(final)
            report = _into(
                URL.create("sqlite", database=str(making)).render_as_string(),
                location,
                lineage,
                tell,
            )
            with sqlite_files.alone(final) as is_alone:
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
    return _told_anew(replaced(report, replaced=None if kept is None else str(kept)), location)


@contextmanager
def _taking_turns(root: Path) -> Iterator[None]:
    """Rebuild alone: a second process would take the half-finished work of the first for that of
    a dead process."""
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
    """Write the chronicle anew with the rows of this database, because later additions look up
    the last rows by their ids."""
    database = Database(location.database_url)
    try:
        tell_anew(database, location.packs)
    except (OSError, DatastatesError) as exc:
        return replaced(
            report,
            lacking=(
                *report.lacking,
                f"the chronicle stays as it was, for it could not be written anew: {exc}",
            ),
        )
    finally:
        database.close()
    return report


def _check_unused(location: Location) -> None:
    """Raise if a process is at work there: it would continue with the database that it has open."""
    for name in held_in(location.packs):
        raise Conflict(
            f"a training or a server goes on in {location.packs} (its lease is {name}): end it,"
            " then rebuild the lineage"
        )


def _into(
    url: str, location: Location, lineage: str | None, tell: Callable[[int, int], None]
) -> ReindexReport:
    tier = packs_in(location.packs)
    chronicle, others = _chosen(chronicles(location.packs), lineage)
    manifests, unread = _manifests(
        tier, _told(others) - _told([] if chronicle is None else [chronicle])
    )
    told = retell(chronicle, manifests)
    told.lacking += unread
    database = Database(url)
    try:
        return _write(
            database,
            _Source(tier, identity(location.packs), chronicle, manifests),
            told,
            location,
            tell,
        )
    finally:
        database.close()


def _chosen(
    found: list[Chronicle], lineage: str | None
) -> tuple[Chronicle | None, list[Chronicle]]:
    """The chronicle of the lineage to rebuild, and the others."""
    named = [each for each in found if lineage is None or each.lineage == lineage]
    if len(named) > 1:
        listed = ", ".join(
            f"{each.lineage} ({sum(len(entry.states) for entry in each.entries)} states)"
            for each in named
        )
        raise InvalidInput(
            f"this folder serves {len(named)} lineages: {listed}: say which with --lineage"
            " (lineage=)"
        )
    if not named and lineage is not None:
        there = ", ".join(each.lineage for each in found) or "none"
        raise NotFound(f"no lineage {lineage!r} has a chronicle in this folder; there are {there}")
    return (named[0] if named else None), [each for each in found if each not in named]


def _told(those: list[Chronicle]) -> set[str]:
    """The uids of all states that these chronicles name."""
    return {
        state.uid for chronicle in those for entry in chronicle.entries for state in entry.states
    }


def _manifests(tier: DurableTier, theirs: Container[str]) -> tuple[_Manifests, list[str]]:
    """The manifests, without ``theirs``, which only other lineages know, and a message for each
    one that cannot be read."""
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


def _write(
    database: Database,
    source: _Source,
    told: Retelling,
    location: Location,
    tell: Callable[[int, int], None],
) -> ReindexReport:
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
        clones, seals = (
            rebuild.put_clones(session, told.clones),
            rebuild.put_seals(session, told.seals),
        )
        rebuild.put_variants(session, told.variants)
        rebuild.put_reports(session, told.reports)
        if source.folder is not None:
            attachments.note(session, source.folder, path=str(location.packs), host=node_name())
        back = runs.recover(session, [], volatile=VOLATILE)
        standing = names.refs(session)
        uid = repository_uid(session)
    told.lacking += [
        f"branch {each.branch!r} went back: the bytes of its newest states are not here"
        for each in back
    ]
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
    for uid, found in groupby(source.manifests.items(), key=lambda each: each[0][0]):
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
                told.lacking.append(
                    f"the bytes of state {uid}: its packs are not whole, or its manifest is another"
                    " state's"
                )
            continue
        count += 1
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
            if size > 1:
                parts.append((uid, rank, size, manifest.digest, manifest.origin.created_at_us))
    rebuild.put_parts(session, parts, tier=tier.name, node=node)
    return count


def _put_aside(path: Path) -> Path:
    """Rename the existing database, with the files that SQLite keeps beside it."""
    kept = next(
        name
        for name in (path.with_name(f"{path.name}.replaced-{number}") for number in count(1))
        if not name.exists()
    )
    for suffix in ("-wal", "-shm", ""):  # a log must never lie beside another database
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{kept}{suffix}")
    return kept


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
