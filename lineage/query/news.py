"""What a lineage has and its chronicle does not: runs, states, lines of the reflog, notes,
clones, amendments; a page at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Integer,
    Select,
    bindparam,
    func,
    null,
    select,
    text,
    tuple_,
)

from datastates.errors import Unavailable
from datastates.lineage import lookup
from datastates.lineage.chronicle import (
    AttributesLine,
    CloneLine,
    Entry,
    EventLine,
    Mark,
    RemarkLine,
    ReportLine,
    RunLine,
    SampleLine,
    SealLine,
    StateLine,
    VariantLine,
)
from datastates.lineage.lookup import Amended, states
from datastates.lineage.schema import (
    AmendmentRow,
    Base,
    CloneRow,
    NoteRow,
    RefEventRow,
    RefRow,
    ReportRow,
    ReportSampleRow,
    RepositoryRow,
    RunRow,
    SealRow,
    StateRow,
    VariantRow,
    table,
    to_us,
)
from datastates.system.interrupts import checkpoint

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.lineage.database import Database

_amendment = table(AmendmentRow)
_state = table(StateRow)
_seal = table(SealRow)
_variant = table(VariantRow)
_report = table(ReportRow)
_sample = table(ReportSampleRow)
_run = table(RunRow)
_event = table(RefEventRow)
_ref = table(RefRow)
_note = table(NoteRow)
_clone = table(CloneRow)
_repository = table(RepositoryRow)

_PAGE = 200
"""How many to read at a time: an error has 20,000 characters, a report has pictures."""

_PICTURES_BYTES = 256 << 20
"""The pictures of a report are told if all of them take at most so much: an entry may not grow
without bounds."""


@dataclass(frozen=True, slots=True)
class Amendments:
    """Some amendments: the uids of the runs among them, and the current values of the rest.
    ``last`` is the newest of them, ``amended`` its name."""

    last: int
    amended: str
    runs: tuple[str, ...] = ()
    seals: tuple[SealLine, ...] = ()
    variants: tuple[VariantLine, ...] = ()
    reports: tuple[ReportLine, ...] = ()
    attributes: tuple[AttributesLine, ...] = ()


def name_at(session: Session, id_: int) -> str | None:
    """The name that the amendment with this row id is about; None: there is no such amendment."""
    found = session.execute(_NAME_AT, {"at": id_}).scalar()
    return None if found is None else str(found)


def metrics_version(session: Session) -> int:
    """How often metrics were added to states after their capture."""
    return int(session.execute(_MEASURED).scalar_one())


def amendments(
    session: Session, after: int, *, again: int, until: int, most: int
) -> Amendments | None:
    """The next amendments after ``after`` up to ``until``, ``most`` at most, and those of the
    ``again`` ids before it.

    None when there is no new one.
    """
    rows = session.execute(
        _NEW, {"after": after - again, "until": until, "most": min(most, _PAGE) + again}
    ).all()
    if not rows or rows[-1].id <= after:
        return None
    pictured = next(
        (
            number
            for number, row in enumerate(rows, 1)
            if row.id > after and row.kind == Amended.REPORT
        ),
        len(rows),
    )
    rows = rows[:pictured]  # one new report at a time
    named: defaultdict[str, list[Any]] = defaultdict(list)
    for row in rows:
        named[row.kind].append((row.study, row.name) if row.kind == Amended.VARIANT else row.name)
    of = {kind: list(dict.fromkeys(names)) for kind, names in named.items()}
    return Amendments(
        rows[-1].id,
        rows[-1].name,
        tuple(of.get(Amended.RUN, ())),
        _seals(session, of.get(Amended.SEAL, [])),
        _variants(session, of.get(Amended.VARIANT, [])),
        tuple(line for name in of.get(Amended.REPORT, ()) for line in _report_lines(session, name)),
        _attributes(session, of.get(Amended.ATTRIBUTES, []) + of.get(Amended.METRICS, [])),
    )


def _seals(session: Session, uids: list[str]) -> tuple[SealLine, ...]:
    return tuple(SealLine(*row) for row in session.execute(_SEALS, {"names": uids})) if uids else ()


def _variants(session: Session, names: list[tuple[str, str]]) -> tuple[VariantLine, ...]:
    if not names:
        return ()
    rows = session.execute(_VARIANTS.where(tuple_(_variant.c.study, _variant.c.name).in_(names)))
    return tuple(VariantLine(*row) for row in rows)


def _report_lines(session: Session, name: str) -> list[ReportLine]:
    """The report of that name, if it is there."""
    found = session.execute(_REPORT, {"of": name}).first()
    if found is None:
        return []
    has_room = session.execute(_TAKEN, {"of": found.id}).scalar_one() <= _PICTURES_BYTES
    samples = tuple(
        SampleLine(*row)
        for row in session.execute(_SAMPLES if has_room else _BARE_SAMPLES, {"of": found.id})
    )
    return [ReportLine(found.name, found.created_at, found.body, samples)]


def _attributes(session: Session, uids: list[str]) -> tuple[AttributesLine, ...]:
    ids = list(session.execute(_IDS, {"names": uids}).scalars()) if uids else []
    return tuple(
        AttributesLine(state.uid, state.attributes, state.metrics) for state in states(session, ids)
    )


_names: BindParameter[str] = bindparam("names", expanding=True)
_NAME_AT = select(_amendment.c.name).where(_amendment.c.id == bindparam("at"))
_MEASURED = select(func.count()).where(_amendment.c.kind == Amended.METRICS.value)
_NEW = (
    select(_amendment)
    .where(
        _amendment.c.id > bindparam("after", type_=BigInteger),
        _amendment.c.id <= bindparam("until", type_=BigInteger),
    )
    .order_by(_amendment.c.id)
    .limit(bindparam("most", type_=Integer))
)
_IDS = select(_state.c.id).where(_state.c.uid.in_(_names))
_SEALS = (
    select(_state.c.uid, _seal.c.digest)
    .join_from(_seal, _state, _state.c.id == _seal.c.state_id)
    .where(_state.c.uid.in_(_names))
    .order_by(_state.c.id)
)
_VARIANTS = select(*(_variant.c[name] for name in VariantLine.__struct_fields__)).order_by(
    _variant.c.study, _variant.c.place
)
_REPORT = select(_report).where(_report.c.name == bindparam("of"))
_TAKEN = select(func.coalesce(func.sum(func.length(_sample.c.picture)), 0)).where(
    _sample.c.report_id == bindparam("of")
)
_BARE = {"picture": null().label("picture")}
_SAMPLES, _BARE_SAMPLES = (
    select(*(left_out.get(name, _sample.c[name]) for name in SampleLine.__struct_fields__))
    .where(_sample.c.report_id == bindparam("of"))
    .order_by(_sample.c.rank)
    for left_out in ({}, _BARE)
)


# What a lineage has and its chronicle does not: runs, states, lines of the reflog, notes, clones,
# amendments; a page at a time.


_AGAIN = 256
"""How many rows before the newest are read again on PostgreSQL: a server that was killed forgets
its last moments, and may then give their ids to other rows."""


def is_behind(session: Session, mark: Mark) -> bool:
    """Whether this lineage lacks what its chronicle was told: it was restored from an older copy,
    or it is another one.

    A PostgreSQL server that is killed forgets its last moments, and is told of them again: its rows
    then have other ids, among the newest.
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
    """What came after ``mark`` and not after ``until``, at most ``most`` of each kind; None when
    nothing did.

    ``until`` was found before the session's transaction began.
    """
    # a frame that is divided is small all through
    again = min(most, _again(session)) if mark.state else 0
    count = most + again
    runs = _runs(session, _NEW_RUNS, {"after": mark.run, "until": until.run, "most": most})
    ids = list(
        session.execute(
            _NEW_STATES, {"after": mark.state - again, "until": until.state, "most": count}
        ).scalars()
    )
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
    chosen = lookup.of_runs(session.connection(), [row.id for row in rows])
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
    return [
        EventLine(
            row.id, row.name, row.kind, row.old, row.new, row.reason, row.created_at, row.message
        )
        for row in rows
    ]


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


_old = _state.alias("old")
_new = _state.alias("new")
_after = bindparam("after", type_=BigInteger)
_until = bindparam("until", type_=BigInteger)
_most = bindparam("most", type_=Integer)
_STATE_AT = select(_state.c.uid).where(_state.c.id == bindparam("at"))
_ID_OF = select(_state.c.id).where(_state.c.uid == bindparam("uid"))
_EVENT_AT = select(_event.c.created_at).where(_event.c.id == bindparam("at"))
_CLONE_AT = select(_clone.c.created_at).where(_clone.c.id == bindparam("at"))
_NEW_RUNS = (
    select(_run).where(_run.c.id > _after, _run.c.id <= _until).order_by(_run.c.id).limit(_most)
)
_RUNS_NAMED = select(_run).where(_run.c.uid.in_(bindparam("uids", expanding=True)))
_NEW_STATES = (
    select(_state.c.id)
    .where(_state.c.id > _after, _state.c.id <= _until)
    .order_by(_state.c.id)
    .limit(_most)
)
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
    select(
        _clone.c.id,
        _state.c.uid,
        _clone.c.source,
        _clone.c.source_repository,
        _clone.c.node,
        _run.c.uid.label("run"),
    )
    .add_columns(_clone.c.bytes_moved, _clone.c.created_at)
    .join_from(_clone, _state, _state.c.id == _clone.c.state_id)
    .outerjoin(_run, _run.c.id == _clone.c.run_id)
    .where(_clone.c.id > _after, _clone.c.id <= _until)
    .order_by(_clone.c.id)
    .limit(_most)
)
_REMARKS_NOW = select(
    func.count(), func.max(_note.c.created_at), func.max(_note.c.edited_at)
).select_from(_note)
_REMARKS = (
    select(
        _note.c.uid,
        _state.c.uid,
        _note.c.branch,
        _note.c.author,
        _note.c.text,
        _note.c.created_at,
        _note.c.edited_at,
    )
    .outerjoin_from(_note, _state, _state.c.id == _note.c.state_id)
    .order_by(_note.c.id)
)


# The rows of tables that only grow, as far as none can still come in between.


_LAST = 2**63 - 1
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Settled:
    """An id of each table: a transaction that begins now sees all rows up to it that there will
    ever be."""

    run: int = _LAST
    state: int = _LAST
    event: int = _LAST
    clone: int = _LAST
    amendment: int = _LAST


EVERYTHING = Settled()


def settled(database: Database, *, timeout_s: float) -> Settled:
    """The newest rows, once every transaction that may still commit an older one has ended; it
    waits for these, and for no others.

    :raises Unavailable: one of them did not end within ``timeout_s``.
    """
    if database.is_sqlite:
        return EVERYTHING
    end = time.monotonic() + timeout_s
    with database.read() as session:
        newest = Settled(*(id_ or 0 for id_ in session.execute(_NEWEST).one()))
        # read after the rows, or one that commits in between would be missed
        waiting = writers(session, _TABLES)
    while waiting:
        if time.monotonic() > end:
            raise Unavailable(
                f"a transaction that writes to the lineage did not end within {timeout_s:g} s: what"
                " is newer is told later"
            )
        checkpoint()
        time.sleep(_PAUSE_S)
        with database.read() as session:
            waiting &= writers(session, _TABLES)
    return newest


def writers(session: Session, tables: Iterable[type[Base]]) -> frozenset[str]:
    """The transactions that may commit rows to one of these tables whose ids they have drawn
    already; none on SQLite."""
    if session.get_bind().dialect.name != "postgresql":
        return frozenset()  # it has one writer at a time
    return frozenset(
        session.execute(_WRITERS, {"tables": [each.__tablename__ for each in tables]}).scalars()
    )


_TABLES = (RunRow, StateRow, RefEventRow, CloneRow, AmendmentRow)
_NEWEST = select(*(select(func.max(table(each).c.id)).scalar_subquery() for each in _TABLES))
_WRITERS = text(
    "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND mode ="
    " 'RowExclusiveLock' AND granted AND relation = ANY(CAST(CAST(:tables AS text[]) AS"
    " regclass[])) AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
