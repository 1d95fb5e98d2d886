"""Reports on outliers, stored for people to look at; a report replaces an earlier one of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import bindparam, delete, insert, select

from datastates import values
from datastates.lineage.amendments import Amended, amend
from datastates.lineage.schema import ReportRow, ReportSampleRow, table, to_us

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["NewSample", "keep"]


@dataclass(frozen=True, slots=True)
class NewSample:
    """One sample of a report: its place, its index in the data, what is known of it, and a picture of it as an encoded image."""

    rank: int
    sample: int
    facts: Mapping[str, Any]
    picture: bytes | None = None


def keep(session: Session, name: str, facts: Mapping[str, Any], samples: Iterable[NewSample]) -> int:
    """Store a report; returns its id, which is that of an earlier report of this name. ``facts`` is what it says of the whole.

    :raises InvalidInput: the name is not valid.
    """
    columns = {"name": values.key(name, "the name of a report"), "created_at": to_us(None), "body": _json(facts)}
    id_ = session.execute(_FIND, {"of": name}).scalar()
    if id_ is None:
        made: Any = session.execute(_KEEP, columns)
        id_ = int(made.inserted_primary_key[0])
    else:
        session.execute(_DROP_SAMPLES, {"id": id_})
        session.execute(_report.update().where(_report.c.id == id_).values(columns))
    rows = [
        {"report_id": id_, "rank": each.rank, "sample": each.sample, "body": _json(each.facts), "picture": each.picture} for each in samples
    ]
    if rows:
        session.execute(_KEEP_SAMPLES, rows)
    amend(session, Amended.REPORT, [str(columns["name"])])
    return id_


def _json(facts: Mapping[str, Any]) -> str:
    return msgspec.json.encode(facts).decode()


_report, _sample = table(ReportRow), table(ReportSampleRow)
_FIND = select(_report.c.id).where(_report.c.name == bindparam("of"))
_KEEP, _KEEP_SAMPLES = insert(_report), insert(_sample)
_DROP_SAMPLES = delete(_sample).where(_sample.c.report_id == bindparam("id"))
