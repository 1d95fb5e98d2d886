"""What is going on and what is stored where: processes, servers, clones, tiers."""

from __future__ import annotations

import shutil
from typing import Annotated

from fastapi import Query, Request, Response

from datastates.api import processes
from datastates.api.models import CloneInfo, Forecast, Incomplete, Page, Processes, ServerInfo, Storage
from datastates.api.replies import reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen, Served
from datastates.clone.serving import Server
from datastates.lineage.change import clones
from datastates.lineage.search.incomplete import incomplete
from datastates.system import masking

__all__ = ["routes"]

routes = Routes("now")


@routes.add("GET", "/processes", scope=Scope.READ, returns=Processes)
def list_processes(
    served: Chosen,
    request: Request,
    metric: Annotated[
        str | None, Query(min_length=1, max_length=255, description="Of the last values; left out: the most relevant one")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many")] = 100,
) -> Response:
    """The processes that are tracking now: whether each is at work, and what its trainings captured last."""
    with served.reading() as session:
        found = processes.now(session, served.core.home, metric=metric, limit=limit)
    return reply(found, request=request, etag=True)


@routes.add("GET", "/storage", scope=Scope.READ, returns=Storage)
def storage(served: Chosen, request: Request) -> Response:
    """What each tier of each node holds, and how much room is left here. Bytes by branch are in `/branches?sort=bytes`."""
    with served.reading() as session:
        found = served.statistics.of(session)
    total, free = _disk(served)
    arena = served.core.arena
    size = None if arena is None else arena.capacity
    used = None if arena is None else arena.capacity - arena.available
    trouble = None if served.core.running is None else served.core.running.trouble
    made = Storage(
        bytes_stored=found.bytes_stored,
        disk_total=total,
        disk_free=free,
        memory_total=size,
        memory_used=used,
        tiers=found.tiers,
        trouble=None if trouble is None else masking.text(trouble),
    )
    return reply(made, request=request, etag=True)


@routes.add("GET", "/retention", scope=Scope.READ, returns=Forecast)
def forecast(
    served: Chosen,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many of the states that would go")] = 50,
) -> Response:
    """What retention would drop if applied now, by the trainings' requests and this server's configuration; nothing is dropped."""
    return reply(served.forecasts.of(limit), request=request, etag=True)


@routes.add("GET", "/incomplete", scope=Scope.READ, returns=Incomplete)
def list_incomplete(
    served: Chosen,
    request: Request,
    limit: Annotated[int, Query(ge=0, le=500, description="At most so many of those that were given up")] = 50,
) -> Response:
    """The states of several ranks that still wait for parts of some of them, and those that were given up, with the reasons."""
    with served.reading() as session:
        found = incomplete(session, limit=limit)
    return reply(found, request=request, etag=True)


@routes.add("GET", "/clones", scope=Scope.READ, returns=Page[CloneInfo])
def list_clones(
    served: Chosen,
    request: Request,
    after: Annotated[int | None, Query(ge=1, lt=2**63, description="The `next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many")] = 50,
) -> Response:
    """The states that came here from other processes or folders, the newest first."""
    with served.reading() as session:
        found = clones.listing(session, limit=limit + 1, after=after)
    items = tuple(
        CloneInfo(id_, one.state, step, masking.text(one.source), one.node, one.bytes_moved, one.created_at)
        for id_, step, one in found[:limit]
    )
    return reply(Page(items, str(items[-1].id) if len(found) > limit else None), request=request, etag=True)


@routes.add("GET", "/servers", scope=Scope.READ, returns=Page[ServerInfo])
def list_servers(served: Chosen, request: Request) -> Response:
    """Where the answering process serves this repository, and who is connected; only other processes know what they serve."""
    items = []
    for each in served.core.servers:
        if isinstance(each, Server):
            stats = each.stats()
            items.append(ServerInfo(masking.text(each.url), stats.peers, stats.peers_ever, stats.bytes_sent, stats.refused))
    return reply(Page(tuple(items), None), request=request, etag=True)


def _disk(served: Served) -> tuple[int | None, int | None]:
    """The size of the disk that holds the packs, and how much of it is free."""
    try:
        usage = shutil.disk_usage(served.core.location.packs)
    except OSError:
        return None, None
    return usage.total, usage.free
