"""What has changed in tables that do not only grow: reads the amendments and the current values, page by page."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, BindParameter, Integer, bindparam, func, null, select, tuple_

from datastates.lineage.amendments import Amended
from datastates.lineage.chronicle import AttributesLine, ReportLine, SampleLine, SealLine, VariantLine
from datastates.lineage.lookup import states
from datastates.lineage.schema import AmendmentRow, ReportRow, ReportSampleRow, SealRow, StateRow, VariantRow, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Amendments", "amendments", "metrics_version", "name_at"]

_PAGE = 200
"""How many to read at a time: an error has 20,000 characters, a report has pictures."""

_PICTURES_BYTES = 256 << 20
"""The pictures of a report are told if all of them take at most so much: an entry may not grow without bounds."""


@dataclass(frozen=True, slots=True)
class Amendments:
    """Some amendments: the uids of the runs among them, and the current values of the rest. ``last`` is the newest of them, ``amended`` its
    name."""

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


def amendments(session: Session, after: int, *, again: int, until: int, most: int) -> Amendments | None:
    """The next amendments after ``after`` up to ``until``, ``most`` at most, and those of the ``again`` ids before it.

    None when there is no new one.
    """
    rows = session.execute(_NEW, {"after": after - again, "until": until, "most": min(most, _PAGE) + again}).all()
    if not rows or rows[-1].id <= after:
        return None
    pictured = next((number for number, row in enumerate(rows, 1) if row.id > after and row.kind == Amended.REPORT), len(rows))
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
        tuple(line for name in of.get(Amended.REPORT, ()) for line in _report(session, name)),
        _attributes(session, of.get(Amended.ATTRIBUTES, []) + of.get(Amended.METRICS, [])),
    )


def _seals(session: Session, uids: list[str]) -> tuple[SealLine, ...]:
    return tuple(SealLine(*row) for row in session.execute(_SEALS, {"names": uids})) if uids else ()


def _variants(session: Session, names: list[tuple[str, str]]) -> tuple[VariantLine, ...]:
    if not names:
        return ()
    rows = session.execute(_VARIANTS.where(tuple_(_variant.c.study, _variant.c.name).in_(names)))
    return tuple(VariantLine(*row) for row in rows)


def _report(session: Session, name: str) -> list[ReportLine]:
    """The report of that name, if it is there."""
    found = session.execute(_REPORT, {"of": name}).first()
    if found is None:
        return []
    has_room = session.execute(_TAKEN, {"of": found.id}).scalar_one() <= _PICTURES_BYTES
    samples = tuple(SampleLine(*row) for row in session.execute(_SAMPLES if has_room else _BARE_SAMPLES, {"of": found.id}))
    return [ReportLine(found.name, found.created_at, found.body, samples)]


def _attributes(session: Session, uids: list[str]) -> tuple[AttributesLine, ...]:
    ids = list(session.execute(_IDS, {"names": uids}).scalars()) if uids else []
    return tuple(AttributesLine(state.uid, state.attributes, state.metrics) for state in states(session, ids))


_amendment, _state, _seal, _variant, _report_row, _sample = (
    table(row) for row in (AmendmentRow, StateRow, SealRow, VariantRow, ReportRow, ReportSampleRow)
)
_names: BindParameter[str] = bindparam("names", expanding=True)
_NAME_AT = select(_amendment.c.name).where(_amendment.c.id == bindparam("at"))
_MEASURED = select(func.count()).where(_amendment.c.kind == Amended.METRICS.value)
_NEW = (
    select(_amendment)
    .where(_amendment.c.id > bindparam("after", type_=BigInteger), _amendment.c.id <= bindparam("until", type_=BigInteger))
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
_VARIANTS = select(*(_variant.c[name] for name in VariantLine.__struct_fields__)).order_by(_variant.c.study, _variant.c.place)
_REPORT = select(_report_row).where(_report_row.c.name == bindparam("of"))
_TAKEN = select(func.coalesce(func.sum(func.length(_sample.c.picture)), 0)).where(_sample.c.report_id == bindparam("of"))
_BARE = {"picture": null().label("picture")}
_SAMPLES, _BARE_SAMPLES = (
    select(*(left_out.get(name, _sample.c[name]) for name in SampleLine.__struct_fields__))
    .where(_sample.c.report_id == bindparam("of"))
    .order_by(_sample.c.rank)
    for left_out in ({}, _BARE)
)
