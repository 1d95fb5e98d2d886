"""Amendments: one append-only table with a row for each write or change in tables that do not only grow.

A process that publishes what is new in a lineage (``search/news``) reads the amendments after the last one that it published, and looks up
the current values.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

from sqlalchemy import insert

from .schema import AmendmentRow, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Amended", "amend"]


class Amended(StrEnum):
    """What changed: the record of a run, the attributes or the metrics of a state, its seal, a variant of a study, a report."""

    RUN = "run"
    ATTRIBUTES = "attributes"
    METRICS = "metrics"
    SEAL = "seal"
    VARIANT = "variant"
    REPORT = "report"


def amend(session: Session, kind: Amended, names: Iterable[str], *, study: str | None = None) -> None:
    """Note that these are new or have changed: uids of runs or states, or names. Variants also need their ``study``."""
    rows = [{"kind": kind.value, "name": name, "study": study} for name in names]
    if rows:
        session.execute(_NOTE, rows)


_NOTE = insert(table(AmendmentRow))
