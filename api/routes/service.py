"""The server itself: what it serves, whether it is alive, what it counts."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request, Response
from sqlalchemy import func, select

from datastates.api.activity import activity_lines
from datastates.api.meter import Meter, family
from datastates.api.models import Page, RepositoryInfo
from datastates.api.replies import reply
from datastates.api.routing import API, Routes, Scope
from datastates.api.served import Served
from datastates.lineage.change import clones
from datastates.lineage.schema import StateRow

__all__ = ["METRICS_TYPE", "root", "routes"]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

routes = Routes("service", prefix=API)
root = Routes("service", prefix="")
"""The routes outside ``/api/v1``."""


class Text(Response):
    """The type of the text, for the document."""

    media_type = "text/plain"


@routes.add("GET", "/repositories", scope=Scope.READ, returns=Page[RepositoryInfo])
def repositories(request: Request) -> Response:
    """The repositories of this server, and what the client may do with them."""
    scope = Scope(request.scope["state"]["granted"]).name.lower()
    items = []
    for served in _served(request):
        with served.core.database.read() as session:
            items.append(RepositoryInfo(served.name, clones.repository_uid(session), scope))
    return reply(Page(tuple(items), None), request=request)


@root.add("GET", "/healthz", scope=Scope.NONE, returns=None, response_class=Text)
async def healthz() -> Response:
    """Whether the server is alive: `ok`, and nothing more."""
    return Text("ok\n")


@root.add("GET", "/metrics", scope=Scope.READ, returns=None, response_class=Text)
def metrics(request: Request) -> Response:
    """What the server counts, in Prometheus' text format."""
    meter: Meter = request.app.state.meter
    served = _served(request)
    activities = {each.name: each.core.running.recorder.activity() for each in served if each.core.running is not None}
    lines = [*meter.lines(), *_repository_lines(served), *activity_lines(activities)]
    return Response("\n".join(lines) + "\n", headers={"Content-Type": METRICS_TYPE})


def _repository_lines(served: list[Served]) -> Iterator[str]:
    states = []
    for each in served:
        with each.core.database.read() as session:
            states.append(({"repository": each.name}, int(session.execute(select(func.count()).select_from(StateRow)).scalar_one())))
    yield from family("datastates_states", "gauge", "States of a repository", states)
    clients = [({"repository": each.name}, each.live.listeners) for each in served]
    yield from family("datastates_event_stream_clients", "gauge", "Clients that listen to events", clients)


def _served(request: Request) -> list[Served]:
    return [served for _, served in sorted(request.app.state.served.items())]
