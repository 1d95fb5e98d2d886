"""What a lineage has and its chronicle does not: runs, states, lines of the reflog, notes, clones, amendments; a page at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Integer, Select, bindparam, func, select

from datastates.lineage import settings
from datastates.lineage.chronicle import CloneLine, Entry, EventLine, Mark, RemarkLine, RunLine, StateLine
from datastates.lineage.lookup import states
from datastates.lineage.schema import CloneRow, NoteRow, RefEventRow, RefRow, RepositoryRow, RunRow, StateRow, table, to_us

from .amended import amendments, name_at

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from .settled import Settled

__all__ = ["is_behind", "news"]

_AGAIN = 256
"""How many rows before the newest are read again on PostgreSQL: a server that was killed forgets its last moments, and may then give
their ids to other rows."""


def is_behind(session: Session, mark: Mark) -> bool:
    """Whether this lineage lacks what its chronicle was told: it was restored from an older copy, or it is another one.

    A PostgreSQL server that is killed forgets its last moments, and is told of them again: its rows then have other ids, among the newest.
    """
    if mark.state and session.execute(_STATE_AT, {"at": mark.state}).scalar() != mark.state_uid:
        again = session.execute(_ID_OF, {"uid": mark.state_uid}).scalar()
        return again is None or again <= mark.state - _again(session)
    if mark.event and session.execute(_EVENT_AT, {"at": mark.event}).scalar() != mark.event_at:
        return True
    if mark.clone and session.execute(_CLONE_AT, {"at": mark.clone}).scalar() != mark.clone_at:
        return True
    return bool(mark.amendment) and name_at(session, mark.amendment) != mark.amended


def news(session: Session, mark: Mark, *, most: int, until: Settled) -> Entry | None:
    """What came after ``mark`` and not after ``until``, at most ``most`` of each kind; None when nothing did.

    ``until`` was found before the session's transaction began.
    """
    again = min(most, _again(session)) if mark.state else 0  # a frame that is divided is small all through
    count = most + again
    runs = _runs(session, _NEW_RUNS, {"after": mark.run, "until": until.run, "most": most})
    ids = list(session.execute(_NEW_STATES, {"after": mark.state - again, "until": until.state, "most": count}).scalars())
    events = _events(session, {"after": mark.event - again, "until": until.event, "most": count})
    clones = _clones(session, {"after": mark.clone - again, "until": until.clone, "most": count})
    remarks, remarked, newest = _remarks(session, mark)
    amended = amendments(session, mark.amendment, again=again, until=until.amendment, most=most)
    if not (
        runs
        or max(ids, default=0) > mark.state
        or max((each.id for each in events), default=0) > mark.event
        or max((each.id for each in clones), default=0) > mark.clone
        or remarks is not None
        or amended is not None
    ):
        return None
    lines = _states(session, ids)
    changed = {} if amended is None else _runs(session, _RUNS_NAMED, {"uids": amended.runs})
    told = Mark(
        run=max(runs, default=mark.run),
        state=max([*ids, mark.state]),
        state_uid=lines[-1].uid if lines and ids[-1] > mark.state else mark.state_uid,
        event=max([*(each.id for each in events), mark.event]),
        event_at=events[-1].created_at if events and events[-1].id > mark.event else mark.event_at,
        remarks=remarked,
        remarks_at=newest,
        clone=max([*(each.id for each in clones), mark.clone]),
        clone_at=clones[-1].created_at if clones and clones[-1].id > mark.clone else mark.clone_at,
        amendment=mark.amendment if amended is None else amended.last,
        amended=mark.amended if amended is None else amended.amended,
    )
    return Entry(
        lineage=str(session.execute(select(_repository.c.uid)).scalar_one()),
        written_at=to_us(None),
        mark=told,
        runs=tuple(line for _, line in sorted((runs | changed).items())),
        states=tuple(lines),
        events=tuple(events),
        remarks=remarks,
        clones=tuple(clones),
        seals=() if amended is None else amended.seals,
        variants=() if amended is None else amended.variants,
        reports=() if amended is None else amended.reports,
        attributes=() if amended is None else amended.attributes,
    )


def _again(session: Session) -> int:
    return _AGAIN if session.get_bind().dialect.name == "postgresql" else 0


def _runs(session: Session, query: Select[Any], which: dict[str, object]) -> dict[int, RunLine]:
    """Runs by their row ids."""
    rows = session.execute(query, which).all()
    chosen = settings.of_runs(session.connection(), [row.id for row in rows])
    return {row.id: _run_line(row, chosen.get(row.id, {})) for row in rows}


def _run_line(row: Any, chosen: dict[str, Any]) -> RunLine:
    return RunLine(
        uid=row.uid,
        process=row.process,
        branch=row.branch,
        host=row.host,
        user=row.user,
        pid=row.pid,
        argv=tuple(row.argv),
        git_commit=row.git_commit,
        git_dirty=row.git_dirty,
        config={**row.config, **chosen},
        versions=dict(row.versions),
        started_at=row.started_at,
        is_carried=row.is_carried,
        finished_at=row.finished_at,
    )


def _states(session: Session, ids: list[int]) -> list[StateLine]:
    runs = {row.id: row.uid for row in session.execute(_RUNS_OF, {"ids": ids})} if ids else {}
    return [
        StateLine(
            uid=state.uid,
            digest=state.digest,
            parent=state.facts.parent,
            edges=tuple((edge.parent, edge.kind.value, edge.weight) for edge in state.edges),
            run=runs.get(id_),
            step=state.step,
            micro_step=state.micro_step,
            created_at=to_us(state.created_at),
            message=state.message,
            metrics=state.metrics,
            attributes=state.attributes,
            status=state.status.value,
            bytes_total=state.bytes_total,
            bytes_new=state.bytes_new,
            world_size=state.world_size,
        )
        for id_, state in zip(ids, states(session, ids), strict=True)
    ]


def _events(session: Session, which: dict[str, object]) -> list[EventLine]:
    rows = session.execute(_NEW_EVENTS, which)
    return [EventLine(row.id, row.name, row.kind, row.old, row.new, row.reason, row.created_at, row.message) for row in rows]


def _clones(session: Session, which: dict[str, object]) -> list[CloneLine]:
    return [CloneLine(*row) for row in session.execute(_NEW_CLONES, which)]


def _remarks(session: Session, mark: Mark) -> tuple[tuple[RemarkLine, ...] | None, int, int]:
    """All notes, if they changed; how many there are, and when the last of them was written."""
    count, made, edited = session.execute(_REMARKS_NOW).one()
    newest = max(made or 0, edited or 0)
    if (count, newest) == (mark.remarks, mark.remarks_at):
        return None, count, newest
    rows = session.execute(_REMARKS)
    return tuple(RemarkLine(*row) for row in rows), count, newest


_state, _run, _event, _ref, _note, _clone, _repository = (
    table(row) for row in (StateRow, RunRow, RefEventRow, RefRow, NoteRow, CloneRow, RepositoryRow)
)
_old, _new = _state.alias("old"), _state.alias("new")
_after, _until = bindparam("after", type_=BigInteger), bindparam("until", type_=BigInteger)
_most = bindparam("most", type_=Integer)
_STATE_AT = select(_state.c.uid).where(_state.c.id == bindparam("at"))
_ID_OF = select(_state.c.id).where(_state.c.uid == bindparam("uid"))
_EVENT_AT = select(_event.c.created_at).where(_event.c.id == bindparam("at"))
_CLONE_AT = select(_clone.c.created_at).where(_clone.c.id == bindparam("at"))
_NEW_RUNS = select(_run).where(_run.c.id > _after, _run.c.id <= _until).order_by(_run.c.id).limit(_most)
_RUNS_NAMED = select(_run).where(_run.c.uid.in_(bindparam("uids", expanding=True)))
_NEW_STATES = select(_state.c.id).where(_state.c.id > _after, _state.c.id <= _until).order_by(_state.c.id).limit(_most)
_RUNS_OF = (
    select(_state.c.id, _run.c.uid)
    .join_from(_state, _run, _run.c.id == _state.c.run_id)
    .where(_state.c.id.in_(bindparam("ids", expanding=True)))
)
_NEW_EVENTS = (
    select(_event.c.id, _event.c.name, _event.c.kind, _event.c.reason, _event.c.created_at)
    .add_columns(_old.c.uid.label("old"), _new.c.uid.label("new"), _ref.c.message)
    .outerjoin_from(_event, _old, _old.c.id == _event.c.old_id)
    .outerjoin(_new, _new.c.id == _event.c.new_id)
    .outerjoin(_ref, _ref.c.name == _event.c.name)
    .where(_event.c.id > _after, _event.c.id <= _until)
    .order_by(_event.c.id)
    .limit(_most)
)
_NEW_CLONES = (
    select(_clone.c.id, _state.c.uid, _clone.c.source, _clone.c.source_repository, _clone.c.node, _run.c.uid.label("run"))
    .add_columns(_clone.c.bytes_moved, _clone.c.created_at)
    .join_from(_clone, _state, _state.c.id == _clone.c.state_id)
    .outerjoin(_run, _run.c.id == _clone.c.run_id)
    .where(_clone.c.id > _after, _clone.c.id <= _until)
    .order_by(_clone.c.id)
    .limit(_most)
)
_REMARKS_NOW = select(func.count(), func.max(_note.c.created_at), func.max(_note.c.edited_at)).select_from(_note)
_REMARKS = (
    select(_note.c.uid, _state.c.uid, _note.c.branch, _note.c.author, _note.c.text, _note.c.created_at, _note.c.edited_at)
    .outerjoin_from(_note, _state, _state.c.id == _note.c.state_id)
    .order_by(_note.c.id)
)
