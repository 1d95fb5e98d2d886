"""Rebuilds a lineage in an empty database from what a folder knows of it: in one transaction, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs
from sqlalchemy import BindParameter, bindparam, insert, select, update

from datastates.lineage import settings
from datastates.lineage.amendments import Amended, amend
from datastates.lineage.batches import batches
from datastates.lineage.chronicle import CloneLine, EventLine, RemarkLine, ReportLine, RunLine, SealLine, StateLine, VariantLine
from datastates.lineage.lookup import ids_of
from datastates.lineage.schema import (
    CloneRow,
    NoteRow,
    PartRow,
    RefEventRow,
    RefRow,
    ReportRow,
    ReportSampleRow,
    RepositoryRow,
    RunRow,
    SealRow,
    StateRow,
    VariantRow,
    from_us,
    table,
)
from datastates.lineage.states import OURS, Edge, EdgeKind, NewState, RefKind, StateFacts, Status
from datastates.system.interrupts import checkpoint

from . import segments
from .record import record_all

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = [
    "is_empty",
    "new_state",
    "put_clones",
    "put_events",
    "put_parts",
    "put_remarks",
    "put_reports",
    "put_runs",
    "put_seals",
    "put_states",
    "put_uid",
    "put_variants",
]

_BATCH = 500


def is_empty(session: Session) -> bool:
    """Whether nothing was ever recorded here."""
    return not any(session.execute(select(each.c.id).limit(1)).first() for each in (_state, _run, _event))


def put_uid(session: Session, uid: str) -> None:
    """Give the lineage the uid that it had; two databases of one uid are never used at once."""
    session.execute(update(_repository).values(uid=uid))


def put_runs(session: Session, runs: Sequence[RunLine], ended_at: Mapping[str, int]) -> None:
    """Put every process and training. All of them are over: those without a recorded end ended at their last sign of life."""
    connection = session.connection()
    for run in runs:
        row = {
            "uid": run.uid,
            "process": run.process,
            "branch": run.branch,
            "host": run.host,
            "user": run.user,
            "pid": run.pid,
            "argv": list(run.argv),
            "git_commit": run.git_commit,
            "git_dirty": run.git_dirty,
            "config": {key: value for key, value in run.config.items() if key.startswith(OURS)},
            "versions": run.versions,
            "started_at": run.started_at,
            "finished_at": run.finished_at or max(run.started_at, ended_at.get(run.uid, 0)),
            "is_carried": run.is_carried,
        }
        connection.execute(insert(_run), row)
    ids = {row.uid: row.id for row in connection.execute(select(_run.c.uid, _run.c.id))}
    for run in runs:
        settings.keep(connection, ids[run.uid], run.config)


def new_state(line: StateLine) -> NewState:
    """A state without bytes, as ``record`` takes it; the code that finds its bytes marks it later.

    :raises ValueError: the line is none that this version knows.
    """
    was = Status(line.status)
    facts = StateFacts(
        uid=line.uid,
        parent=line.parent,
        branch=None,
        run=line.run,
        step=line.step,
        micro_step=line.micro_step,
        metrics=line.metrics,
        attributes=line.attributes,
        message=line.message,
        created_at=from_us(line.created_at),
        edges=tuple(Edge(parent, EdgeKind(kind), weight) for parent, kind, weight in line.edges),
        world_size=line.world_size,
    )
    status = Status.LOST if was in (Status.LOST, Status.CAPTURED) else Status.EVICTED
    return NewState(facts, line.digest, status, bytes_total=line.bytes_total, bytes_new=line.bytes_new)


def put_states(session: Session, news: Sequence[NewState], tell: Callable[[int], None]) -> None:
    """Put states, parents before their children."""
    for start in range(0, len(news), _BATCH):
        checkpoint()
        record_all(session, news[start : start + _BATCH])
        tell(min(start + _BATCH, len(news)))


def put_parts(session: Session, parts: Iterable[tuple[str, int, int, str, int]], *, tier: str, node: str) -> None:
    """Put the parts of states of several parts: uid, rank, number of parts, digest, and when it was reported."""
    rows = [
        {
            **{"state_uid": uid, "rank": rank, "world_size": count, "digest": digest, "run_id": None, "status": Status.DURABLE.value},
            **{"tier": tier, "node": node, "bytes_total": 0, "bytes_new": 0, "told_at": told_at, "place": None, "said": None},
        }
        for uid, rank, count, digest, told_at in parts
    ]
    for some in batches(rows, _BATCH):
        session.execute(insert(_part), some)


def put_events(session: Session, events: Sequence[EventLine]) -> None:
    """Put every line of the reflogs, and the names as they stand after the last of them; also computes the segments of branches."""
    ids = _ids(session, {uid for event in events for uid in (event.old, event.new) if uid is not None})
    rows = [
        {
            "name": event.name,
            "kind": event.kind,
            "old_id": None if event.old is None else ids.get(event.old),
            "new_id": None if event.new is None else ids.get(event.new),
            "reason": event.reason,
            "created_at": event.created_at,
        }
        for event in events
    ]
    for some in batches(rows, _BATCH):
        session.execute(insert(_event), some)
    standing: dict[str, dict[str, object]] = {}
    for event in events:
        at = None if event.new is None else ids.get(event.new)
        if at is None:
            standing.pop(event.name, None)
            continue
        ref = standing.setdefault(event.name, {"name": event.name, "kind": event.kind, "version": 0, "message": None})
        ref |= {"state_id": at, "version": int(str(ref["version"])) + 1, "message": event.message}
    if standing:
        session.execute(insert(_ref), list(standing.values()))
    for name, ref in standing.items():  # in the order in which they were made
        if ref["kind"] == RefKind.BRANCH.value:
            segments.begin(session, name, int(str(ref["state_id"])))


def put_remarks(session: Session, remarks: Sequence[RemarkLine]) -> int:
    """Put the notes on states that are here, and on branches; returns how many there are."""
    ids = _ids(session, {remark.state for remark in remarks if remark.state is not None})
    rows = [
        {
            **{"uid": remark.uid, "state_id": None if remark.state is None else ids[remark.state], "branch": remark.branch},
            **{"author": remark.author, "text": remark.text, "created_at": remark.created_at, "edited_at": remark.edited_at},
        }
        for remark in remarks
        if remark.state is None or remark.state in ids
    ]
    if rows:
        session.execute(insert(_note), rows)
    return len(rows)


def put_clones(session: Session, clones: Sequence[CloneLine]) -> int:
    """Put every arrival of a state that is here, in the order of arrival; returns how many there are."""
    ids = _ids(session, {clone.state for clone in clones})
    runs = {row.uid: row.id for row in session.execute(select(_run.c.uid, _run.c.id))}
    rows = [
        {
            **{"state_id": ids[clone.state], "source": clone.source, "source_repository": clone.source_repository, "node": clone.node},
            **{"run_id": runs.get(clone.run or ""), "bytes_moved": clone.bytes_moved, "created_at": clone.created_at},
        }
        for clone in clones
        if clone.state in ids
    ]
    for some in batches(rows, _BATCH):
        session.execute(insert(_clone), some)
    return len(rows)


def put_seals(session: Session, seals: Sequence[SealLine]) -> int:
    """Put the seal of each state that is here; returns how many there are."""
    ids = _ids(session, {seal.state for seal in seals})
    rows = [{"state_id": ids[seal.state], "digest": seal.digest} for seal in seals if seal.state in ids]
    for some in batches(rows, _BATCH):
        session.execute(insert(_seal), some)
    amend(session, Amended.SEAL, [seal.state for seal in seals if seal.state in ids])
    return len(rows)


def put_variants(session: Session, variants: Sequence[VariantLine]) -> None:
    """Put what became of the variants of studies."""
    for some in batches([structs.asdict(variant) for variant in variants], _BATCH):
        session.execute(insert(_variant), some)
    for variant in variants:
        amend(session, Amended.VARIANT, [variant.name], study=variant.study)


def put_reports(session: Session, reports: Sequence[ReportLine]) -> None:
    """Put the reports that were stored, with their samples."""
    for report in reports:
        made: Any = session.execute(insert(_report), {"name": report.name, "created_at": report.created_at, "body": report.body})
        (id_,) = made.inserted_primary_key
        if report.samples:
            session.execute(insert(_sample), [{"report_id": id_, **structs.asdict(sample)} for sample in report.samples])
        amend(session, Amended.REPORT, [report.name])


def _ids(session: Session, uids: set[str]) -> dict[str, int]:
    """The row ids of those of these states that are here."""
    here: list[str] = []
    for some in batches(sorted(uids), _BATCH):
        here += session.execute(_HERE, {"uids": some}).scalars()
    return dict(zip(here, ids_of(session, here), strict=True))


_state, _run, _event, _ref, _note, _part, _repository = (
    table(row) for row in (StateRow, RunRow, RefEventRow, RefRow, NoteRow, PartRow, RepositoryRow)
)
_clone, _seal, _variant, _report, _sample = (table(row) for row in (CloneRow, SealRow, VariantRow, ReportRow, ReportSampleRow))
_uids: BindParameter[str] = bindparam("uids", expanding=True)
_HERE = select(_state.c.uid).where(_state.c.uid.in_(_uids))
