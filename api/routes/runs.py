"""Runs: each training of a process, with its configuration."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from datastates.api.models import Page, RunInfo
from datastates.api.processes import infos
from datastates.api.replies import reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen
from datastates.lineage.change import runs

__all__ = ["routes"]

routes = Routes("runs")

RunUid = Annotated[str, Path(pattern="^[0-9a-f]{24}$", description="A run's uid, whole")]


@routes.add("GET", "/runs", scope=Scope.READ, returns=Page[RunInfo])
def list_runs(
    served: Chosen,
    request: Request,
    after: Annotated[str | None, Query(pattern="^[0-9a-f]{24}$", description="The uid of the last run that came")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many")] = 100,
    fields: Annotated[str | None, Query(max_length=1000, description="Only these fields, separated by commas")] = None,
) -> Response:
    """The trainings, the last begun first; a process that captured states without a training counts as one."""
    with served.reading() as session:
        found, following = runs.listing(session, limit=limit, after=after)
        page = Page(tuple(infos(session, found, served.core.home)), following)
    return reply(page, request=request, fields=fields, etag=True)


@routes.add("GET", "/runs/{uid}", scope=Scope.READ, returns=RunInfo)
def run_detail(served: Chosen, request: Request, uid: RunUid) -> Response:
    """One training: its process, host and user, its code and configuration."""
    with served.reading() as session:
        (run,) = infos(session, [runs.get(session, uid)], served.core.home)
    return reply(run, request=request, etag=True)
