"""The graph of states, a window at a time."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from datastates.api.folding import Look
from datastates.api.models import GraphPage, Overview
from datastates.api.replies import reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen

__all__ = ["routes"]

routes = Routes("graph")

Uid = Annotated[str, Query(pattern="^[0-9a-f]{24}$")]
Revision = Annotated[str, Query(min_length=1, max_length=500)]


@routes.add("GET", "/graph", scope=Scope.READ, returns=GraphPage)
def graph(
    served: Chosen,
    request: Request,
    head: Annotated[list[Revision] | None, Query(max_length=64, description="Revisions; none: every branch and tag")] = None,
    first: Annotated[int, Query(ge=0, le=2**53)] = 0,
    count: Annotated[int, Query(ge=1, le=1000)] = 200,
    fold: Annotated[bool, Query(description="States that only follow one another share a row")] = False,
    open_: Annotated[
        list[Uid] | None, Query(alias="open", max_length=64, description="Folded stretches with these states are shown whole")
    ] = None,
    alone: Annotated[list[Uid] | None, Query(max_length=64, description="Of folded stretches these states have a row of their own")] = None,
    around: Annotated[str | None, Query(pattern="^[0-9a-f]{24}$", description="A state that is to be in the middle")] = None,
) -> Response:
    """Rows of the history of some heads, newest first, with their lanes."""
    with served.reading() as session:
        look = Look(tuple(open_ or ()), tuple(alone or ())) if fold else None
        page = served.windows.page(session, head or [], first=first, count=count, around=around, look=look)
    return reply(page, request=request, etag=True)


@routes.add("GET", "/graph/overview", scope=Scope.READ, returns=Overview)
def overview(
    served: Chosen,
    request: Request,
    head: Annotated[list[Revision] | None, Query(max_length=64, description="Revisions; none: every branch and tag")] = None,
    fold: Annotated[bool, Query(description="States that only follow one another share a row")] = False,
    open_: Annotated[list[Uid] | None, Query(alias="open", max_length=64, description="As for the graph")] = None,
    alone: Annotated[list[Uid] | None, Query(max_length=64, description="As for the graph")] = None,
) -> Response:
    """An overview of the whole graph: where each branch stands in it."""
    with served.reading() as session:
        look = Look(tuple(open_ or ()), tuple(alone or ())) if fold else None
        found = served.windows.overview(session, head or [], look)
    return reply(found, request=request, etag=True)
