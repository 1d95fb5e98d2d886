"""A repository's branches and runs, and states side by side, in the form that Python returns them."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from datastates.lineage.change import runs as lineage_runs
from datastates.lineage.search import revision
from datastates.lineage.search.incomplete import incomplete as lineage_incomplete
from datastates.lineage.show.comparison import check_count, compare
from datastates.lineage.show.overview import branches
from datastates.opening.life import life_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datastates.lineage.search.incomplete import Incomplete
    from datastates.lineage.show.branches import Branches
    from datastates.lineage.show.comparison import Comparison
    from datastates.lineage.states import Run
    from datastates.opening.core import Core

__all__ = ["comparison", "incomplete", "overview", "runs"]


def overview(core: Core, query: str, *, metric: str | None, sort: str, group: str | None) -> Branches:
    """Every branch that meets a condition."""
    with core.reading() as session:
        return branches(session, query, metric=metric, sort=sort, group=group, living=partial(life_of, home=core.home))


def runs(core: Core, limit: int | None) -> list[Run]:
    """The tracking processes, the latest first."""
    with core.reading() as session:
        return lineage_runs.listing(session, limit=sys.maxsize >> 1 if limit is None else limit)[0]


def incomplete(core: Core, limit: int) -> Incomplete:
    """The states of several ranks that wait for parts, and those that were given up."""
    with core.reading() as session:
        return lineage_incomplete(session, limit=limit)


def comparison(core: Core, revs: Sequence[str]) -> Comparison:
    """States side by side."""
    check_count(len(revs))
    with core.reading() as session:
        return compare(session, revs, [revision.resolve(session, rev) for rev in revs])
