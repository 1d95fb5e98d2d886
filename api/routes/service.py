"""The server itself: what it serves, whether it is alive, what it counts."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import Header, Query, Request, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import func, select

from datastates.api import live
from datastates.api.metrics import Meter, activity_lines, family
from datastates.api.models import (
    CloneInfo,
    Forecast,
    Page,
    Processes,
    RepositoryInfo,
    ServerInfo,
    Storage,
)
from datastates.api.payload import Streamed, reply
from datastates.api.routing import API, Routes, Scope
from datastates.api.served import Chosen, Served
from datastates.lineage.query.incomplete import Incomplete, incomplete
from datastates.lineage.schema import STATE
from datastates.lineage.write import clones
from datastates.system import logs
from datastates.transport.serving import Server

if TYPE_CHECKING:
    from datastates.api.live import Listener

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

service_routes = Routes("service", prefix=API)
root = Routes("service", prefix="")
"""The routes outside ``/api/v1``."""


@service_routes.add("GET", "/repositories", scope=Scope.READ, returns=Page[RepositoryInfo])
def repositories(request: Request) -> Response:
    """The repositories of this server, and what the client may do with them."""
    granted = Scope(request.scope["state"]["granted"])
    # without tokens, the server listens to its own machine alone
    is_told = granted >= Scope.WRITE or not request.scope["state"]["is_known"]
    items = []
    for served in _served(request):
        location = served.core.location
        with served.core.database.read() as session:
            uid = clones.repository_uid(session)
        info = RepositoryInfo(served.name, uid, granted.name.lower())
        if is_told:
            packs = None if location.root else location.bucket or str(location.packs)
            info = replace(info, location=str(location), packs=packs)
        items.append(info)
    return reply(Page(tuple(items), None), request=request)


@root.add("GET", "/healthz", scope=Scope.NONE, returns=None, response_class=PlainTextResponse)
async def healthz() -> Response:
    """Whether the server is alive: `ok`, and nothing more."""
    return PlainTextResponse("ok\n")


@root.add("GET", "/metrics", scope=Scope.READ, returns=None, response_class=PlainTextResponse)
def metrics(request: Request) -> Response:
    """What the server counts, in Prometheus' text format."""
    meter: Meter = request.app.state.meter
    served = _served(request)
    activities = {
        each.name: each.core.running.recorder.activity()
        for each in served
        if each.core.running is not None
    }
    lines = [*meter.lines(), *_repository_lines(served), *activity_lines(activities)]
    return Response("\n".join(lines) + "\n", headers={"Content-Type": METRICS_TYPE})


def _repository_lines(served: list[Served]) -> Iterator[str]:
    states = []
    for each in served:
        with each.core.database.read() as session:
            states.append(
                (
                    {"repository": each.name},
                    int(session.execute(select(func.count()).select_from(STATE)).scalar_one()),
                )
            )
    yield from family("datastates_states", "gauge", "States of a repository", states)
    clients = [({"repository": each.name}, each.live.listeners) for each in served]
    yield from family(
        "datastates_event_stream_clients", "gauge", "Clients that listen to events", clients
    )


def _served(request: Request) -> list[Served]:
    return [served for _, served in sorted(request.app.state.served.items())]


# The present: processes, servers, clones, tiers.


now_routes = Routes("now")


@now_routes.add("GET", "/processes", scope=Scope.READ, returns=Processes)
def list_processes(
    served: Chosen,
    request: Request,
    metric: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=255,
            description="Of the last values; left out: the most relevant one",
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many")] = 100,
) -> Response:
    """The processes that are tracking now: whether each is at work, and what its trainings
    captured last."""
    with served.reading() as session:
        found = live.now(session, served.core.home, metric=metric, limit=limit)
    return reply(found, request=request, etag=True)


@now_routes.add("GET", "/storage", scope=Scope.READ, returns=Storage)
def storage(served: Chosen, request: Request) -> Response:
    """The contents of each tier of each node, and the free space here.

    Bytes by branch are in `/branches?sort=bytes`."""
    with served.reading() as session:
        counts, bytes_stored = served.counts.of(session)
    try:
        disk = shutil.disk_usage(served.core.location.packs)
    except OSError:
        disk = None
    arena = served.core.arena
    size = None if arena is None else arena.capacity
    used = None if arena is None else arena.capacity - arena.available
    trouble = None if served.core.running is None else served.core.running.trouble
    made = Storage(
        bytes_stored=bytes_stored,
        disk_total=None if disk is None else disk.total,
        disk_free=None if disk is None else disk.free,
        memory_total=size,
        memory_used=used,
        tiers=counts.tiers,
        trouble=None if trouble is None else logs.text(trouble),
    )
    return reply(made, request=request, etag=True)


@now_routes.add("GET", "/retention", scope=Scope.READ, returns=Forecast)
def forecast(
    served: Chosen,
    request: Request,
    limit: Annotated[
        int, Query(ge=1, le=500, description="At most so many of the states that would go")
    ] = 50,
) -> Response:
    """The states that retention would drop now, by the trainings' policies and this server's
    configuration. This request drops nothing."""
    return reply(served.forecasts.of(limit), request=request, etag=True)


@now_routes.add("GET", "/incomplete", scope=Scope.READ, returns=Incomplete)
def list_incomplete(
    served: Chosen,
    request: Request,
    limit: Annotated[
        int, Query(ge=0, le=500, description="At most so many of those that were given up")
    ] = 50,
) -> Response:
    """The states of several ranks that still wait for parts of some of them, and those that were
    given up, with the reasons."""
    with served.reading() as session:
        found = incomplete(session, limit=limit)
    return reply(found, request=request, etag=True)


@now_routes.add("GET", "/clones", scope=Scope.READ, returns=Page[CloneInfo])
def list_clones(
    served: Chosen,
    request: Request,
    after: Annotated[
        int | None, Query(ge=1, lt=2**63, description="The `next` of the page before")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many")] = 50,
) -> Response:
    """The states that came here from other processes or folders, the newest first."""
    with served.reading() as session:
        found = clones.listing(session, limit=limit + 1, after=after)
    items = tuple(
        CloneInfo(
            id_, one.state, step, logs.text(one.source), one.node, one.bytes_moved, one.created_at
        )
        for id_, step, one in found[:limit]
    )
    return reply(
        Page(items, str(items[-1].id) if len(found) > limit else None), request=request, etag=True
    )


@now_routes.add("GET", "/servers", scope=Scope.READ, returns=Page[ServerInfo])
def list_servers(served: Chosen, request: Request) -> Response:
    """The addresses at which the answering process serves this repository, and their connections.
    Servers of other processes are not listed."""
    items = []
    for each in served.core.servers:
        if isinstance(each, Server):
            stats = each.stats()
            items.append(
                ServerInfo(
                    logs.text(each.url),
                    stats.peers,
                    stats.peers_ever,
                    stats.bytes_sent,
                    stats.refused,
                )
            )
    return reply(Page(tuple(items), None), request=request, etag=True)


# Live events: what happens to refs, as it happens.


HEARTBEAT_S = 15.0
RETRY_MS = 1000
MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_STREAM = {
    "description": "Server-sent events: `hello`, then `ref`, each a RefEvent",
    "content": {
        MEDIA_TYPE: {
            "schema": {
                "type": "string",
                "description": (
                    "Lines `id:`, `event:` and `data:`, parted by empty lines; `data` of a `ref` is"
                    " JSON"
                ),
            },
            "examples": {"hello": {"value": 'id: 7\nevent: hello\ndata: {"newest": 7}\n\n'}},
        }
    },
}

event_routes = Routes("events")


class EventStream(Response):
    """The type of the stream, for the document."""

    media_type = MEDIA_TYPE


@event_routes.add(
    "GET",
    "/events",
    scope=Scope.READ,
    returns=None,
    has_head=False,
    response_class=EventStream,
    responses={200: _STREAM},
)
def events(
    served: Chosen,
    after: Annotated[
        int | None, Query(ge=0, lt=2**63, description="The id of the last event that is known")
    ] = None,
    last_event_id: Annotated[
        int | None,
        Header(
            alias="Last-Event-ID",
            ge=0,
            lt=2**63,
            description="The same; sent when a stream is resumed",
        ),
    ] = None,
) -> Response:
    """Server-sent events of every ref, as they happen.

    Without `after` and `Last-Event-ID` the stream begins now. The first event is `hello`; its id is
    where the stream begins. Then each `ref` is one line of a reflog, with the id to resume from.
    Comments every 15 s show that the stream is alive.
    """
    listener = served.live.listen(after if last_event_id is None else last_event_id)
    return Streamed(_lines(listener), close=listener.close, headers=_HEADERS, media_type=MEDIA_TYPE)


async def _lines(listener: Listener) -> AsyncGenerator[bytes]:
    yield b": the refs of a repository\nretry: %d\n\n" % RETRY_MS
    yield _event(listener.position, "hello", {"newest": listener.newest})
    while not listener.is_over:
        found = await listener.next(HEARTBEAT_S)
        yield b"".join(_event(event.id, "ref", event) for event in found) or b":\n\n"


def _event(id_: int, name: str, data: object) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (id_, name.encode(), msgspec.json.encode(data))
