"""Amendments: what was written or changed in tables that do not only grow, a row for each, in one table that does.

Whoever tells others what is new in a lineage (``search/news``) finds it behind the last amendment that was told, and reads there what holds
now.
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
    """What is another than it was: the record of a run, the attributes of a state, its seal, a variant of a study, a report."""

    RUN = "run"
    ATTRIBUTES = "attributes"
    SEAL = "seal"
    VARIANT = "variant"
    REPORT = "report"


def amend(session: Session, kind: Amended, names: Iterable[str], *, study: str | None = None) -> None:
    """Note that these are new, or others than before: uids of runs or states, or names. Of variants also their ``study``."""
    rows = [{"kind": kind.value, "name": name, "study": study} for name in names]
    if rows:
        session.execute(_NOTE, rows)


_NOTE = insert(table(AmendmentRow))
