"""Numbers about a whole repository."""

from __future__ import annotations

from fastapi import Request, Response  # noqa: TC002 # read at run time

from datastates.api.models import Stats
from datastates.api.replies import reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen

__all__ = ["routes"]

routes = Routes("stats")


@routes.add("GET", "/stats", scope=Scope.READ, returns=Stats)
def stats(served: Chosen, request: Request) -> Response:
    """What the repository holds: states by status, the keys of metrics, attributes and configurations."""
    with served.reading() as session:
        found = served.statistics.of(session)
    return reply(found, request=request, etag=True)
