"""Stored reports on outliers: what they contain, and the samples that they rank highest, with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import BigInteger, Integer, bindparam, func, select

from datastates.errors import NotFound
from datastates.lineage.schema import ReportRow, ReportSampleRow, from_us, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Report", "ReportDetail", "ReportSample", "picture", "report", "reports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report on outliers: over ``count`` samples, of which ``suspects`` were selected at ``noise_rate``.

    The ``kept`` highest ranked of them are stored here. ``cost`` says what training and scoring took.
    """

    id: int
    name: str
    created_at: datetime
    count: int
    suspects: int
    noise_rate: float
    is_noise_rate_estimated: bool
    kept: int
    branches: tuple[str, ...]
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSample:
    """One sample: ``rank`` 1 is the most suspicious. Losses are means: ``lineage_loss`` under states that may have been trained on it,
    ``held_out_loss`` under those that were not. ``description`` is the user's.
    """

    rank: int
    index: int
    score: float | None
    strength: float | None
    lineage_loss: float | None
    held_out_loss: float | None
    spread: float | None
    sources: int
    is_suspect: bool
    description: str | None
    has_picture: bool


@dataclass(frozen=True, slots=True)
class ReportDetail:
    """A report with some of its samples by rank; ``next`` is the rank to continue ``after``, None after the last."""

    report: Report
    samples: tuple[ReportSample, ...]
    next: int | None


def reports(session: Session, *, limit: int | None = None) -> tuple[Report, ...]:
    """The reports, the newest first."""
    return tuple(_report_of(row) for row in session.execute(_REPORTS.limit(limit)))


def report(session: Session, id_: int, *, after: int = 0, limit: int = 100) -> ReportDetail:
    """One report, with its samples of the ranks after ``after``.

    :raises NotFound: there is no report of this id.
    """
    row = session.execute(_REPORTS.where(_report.c.id == id_)).first()
    if row is None:
        raise NotFound(f"there is no report {id_}: outliers says which there are")
    found = session.execute(_SAMPLES, {"id": id_, "after": after, "limit": limit + 1}).all()
    samples = tuple(_sample_of(each) for each in found[:limit])
    return ReportDetail(_report_of(row), samples, samples[-1].rank if len(found) > limit else None)


def picture(session: Session, id_: int, index: int) -> bytes | None:
    """The stored picture of a sample; None if it has none.

    :raises NotFound: the report has no such sample.
    """
    row = session.execute(_PICTURE, {"id": id_, "index": index}).first()
    if row is None:
        raise NotFound(f"report {id_} has no sample {index} among those that it kept")
    return None if row.picture is None else bytes(row.picture)


def _report_of(row: Any) -> Report:
    said: Mapping[str, Any] = msgspec.json.decode(row.body)
    known = {key: said[key] for key in ("count", "suspects", "noise_rate", "is_noise_rate_estimated", "cost")}
    return Report(id=row.id, name=row.name, created_at=from_us(row.created_at), kept=row.kept, branches=tuple(said["branches"]), **known)


def _sample_of(row: Any) -> ReportSample:
    return msgspec.convert(
        {**msgspec.json.decode(row.body), "rank": row.rank, "index": row.sample, "has_picture": bool(row.has)}, ReportSample
    )


_report, _sample = table(ReportRow), table(ReportSampleRow)
_kept = select(func.count()).where(_sample.c.report_id == _report.c.id).correlate(_report).scalar_subquery()
_REPORTS = select(_report.c.id, _report.c.name, _report.c.created_at, _report.c.body, _kept.label("kept")).order_by(
    _report.c.created_at.desc(), _report.c.id.desc()
)
_id = _sample.c.report_id == bindparam("id", type_=BigInteger)
_SAMPLES = (
    select(_sample.c.rank, _sample.c.sample, _sample.c.body, _sample.c.picture.is_not(None).label("has"))
    .where(_id, _sample.c.rank > bindparam("after", type_=Integer))
    .order_by(_sample.c.rank)
    .limit(bindparam("limit", type_=Integer))
)
_PICTURE = select(_sample.c.picture).where(_id, _sample.c.sample == bindparam("index", type_=BigInteger))
