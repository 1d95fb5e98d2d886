"""A summary of the branches, which people ask for first."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response

from datastates.api.models import Branches
from datastates.api.replies import reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen
from datastates.lineage.show import overview
from datastates.lineage.show.goals import Direction
from datastates.opening.life import life_of

__all__ = ["routes"]

routes = Routes("branches")


@routes.add("GET", "/branches", scope=Scope.READ, returns=Branches)
def list_branches(
    served: Chosen,
    request: Request,
    q: Annotated[str, Query(max_length=4000, description="A condition of a search; it must hold of a branch's newest state")] = "",
    name: Annotated[str, Query(max_length=200, description="A part of the names that are wanted")] = "",
    metric: Annotated[
        str | None, Query(min_length=1, max_length=255, description="Of what last, best and line are; left out: the most relevant one")
    ] = None,
    direction: Annotated[Direction | None, Query(description="Which values are better; left out: by the metric's name")] = None,
    sort: Annotated[
        str, Query(max_length=20, description=f"One of {', '.join(overview.SORTS)}, the best and newest first; `-` before it turns that")
    ] = "changed",
    group: Annotated[str | None, Query(min_length=1, max_length=300, description="`study`, `config.KEY` or `attr.KEY`")] = None,
    after: Annotated[str | None, Query(max_length=8000, description="`next` of the page before, with all else unchanged")] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many")] = 50,
    fields: Annotated[str | None, Query(max_length=1000, description="Only these fields of each, separated by commas")] = None,
) -> Response:
    """The branches: where each forked, its curve, its best state, what can be restored, what was configured, and whether it runs."""
    living = partial(life_of, home=served.core.home)
    with served.reading() as session:
        found = overview.branches(
            session,
            q,
            name=name,
            metric=metric,
            direction=direction,
            sort=sort,
            group=group,
            after=after,
            limit=limit,
            living=living,
            drawn=served.lines,
            counts=served.branch_counts.of,
        )
    return reply(found, request=request, fields=fields, etag=True)
