"""The graph of states, a window at a time."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from datastates.api.models import GraphPage
from datastates.api.replies import reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen

__all__ = ["routes"]

routes = Routes("graph")

Revision = Annotated[str, Query(min_length=1, max_length=500)]


@routes.add("GET", "/graph", scope=Scope.READ, returns=GraphPage)
def graph(
    served: Chosen,
    request: Request,
    head: Annotated[list[Revision] | None, Query(max_length=64, description="Revisions; none: every branch and tag")] = None,
    first: Annotated[int, Query(ge=0, le=2**53)] = 0,
    count: Annotated[int, Query(ge=1, le=1000)] = 200,
    around: Annotated[str | None, Query(pattern="^[0-9a-f]{24}$", description="A state that is to be in the middle")] = None,
) -> Response:
    """Rows of the history of some heads, newest first, with their lanes."""
    with served.reading() as session:
        page = served.windows.page(session, head or [], first=first, count=count, around=around)
    return reply(page, request=request, etag=True)
