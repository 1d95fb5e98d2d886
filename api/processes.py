"""Runs and what became of their processes, for the API and for ``datastates runs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from datastates.lineage.change import runs
from datastates.lineage.states import Run
from datastates.opening.home import Home
from datastates.opening.life import life_of

from .models import RunInfo

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["infos"]


def infos(session: Session, found: Sequence[Run], home: Home) -> list[RunInfo]:
    """These runs, in their order; ``home`` is the folder in which leases are looked for."""
    heads = runs.branches_of(session, [run.uid for run in found])
    return [
        RunInfo(
            **{field.name: getattr(run, field.name) for field in fields(Run)},
            life=life_of(run, home),
            branches=tuple(heads.get(run.uid, ())),
        )
        for run in found
    ]
