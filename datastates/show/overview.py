"""A repository's branches and runs, as Python hands them out."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from datastates.lineage.change import runs as lineage_runs
from datastates.lineage.show.overview import branches
from datastates.opening.life import life_of

if TYPE_CHECKING:
    from datastates.lineage.show.branches import Branches
    from datastates.lineage.states import Run
    from datastates.opening.core import Core

__all__ = ["overview", "runs"]


def overview(core: Core, query: str, *, metric: str | None, sort: str, group: str | None) -> Branches:
    """Every branch for which a condition holds."""
    with core.reading() as session:
        return branches(session, query, metric=metric, sort=sort, group=group, living=partial(life_of, home=core.home))


def runs(core: Core, limit: int | None) -> list[Run]:
    """The processes that tracked, the last begun first."""
    with core.reading() as session:
        return lineage_runs.listing(session, limit=sys.maxsize >> 1 if limit is None else limit)[0]
