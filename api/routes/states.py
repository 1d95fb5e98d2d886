"""States: one, many, and what is known of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from datastates.api.models import State
from datastates.api.replies import etag_of, reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen
from datastates.lineage import revision

__all__ = ["routes"]

routes = Routes("states")


@routes.add("GET", "/resolve", scope=Scope.READ, returns=State)
def resolve(
    served: Chosen, request: Request, rev: Annotated[str, Query(max_length=500)], fields: Annotated[str | None, Query()] = None
) -> Response:
    """The state that a revision names."""
    with served.reading() as session:
        state = revision.resolve(session, rev)
    return reply(state, request=request, fields=fields, etag=etag_of(state, fields))
