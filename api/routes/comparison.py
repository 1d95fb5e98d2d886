"""Comparisons: states beside each other, branches by their settings and metrics, and the distribution of a tensor's values."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from datastates.algebra.histogram import BINS, MOST_BINS, Histogram, Scale
from datastates.algebra.histogram import histogram as count
from datastates.api.reads import stop_after, stop_when_gone
from datastates.api.replies import etag_of, is_known, reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen
from datastates.lineage.search import revision
from datastates.lineage.show import comparison, parallels
from datastates.lineage.show.comparison import Comparison
from datastates.lineage.show.parallels import Parallels, Taken

__all__ = ["routes"]

COUNTING_S = 10.0
"""The time that counting a tensor's values may take."""

routes = Routes("comparison")

Revisions = Annotated[list[Annotated[str, Query(min_length=1, max_length=500)]], Query(description="Revisions, such as names of branches")]


@routes.add("GET", "/comparison", scope=Scope.READ, returns=Comparison)
def compare_states(served: Chosen, request: Request, rev: Revisions) -> Response:
    """States beside each other: configuration, metrics, attributes, code, and where each can be restored; reads no payload."""
    comparison.check_count(len(rev))
    with served.reading() as session:
        found = comparison.compare(session, rev, [revision.resolve(session, each) for each in rev])
    return reply(found, request=request, etag=True)


@routes.add("GET", "/parallels", scope=Scope.READ, returns=Parallels)
def list_parallels(
    served: Chosen,
    request: Request,
    q: Annotated[str, Query(max_length=4000, description="A condition of a search; it must hold of a branch's newest state")] = "",
    name: Annotated[str, Query(max_length=200, description="A part of the names that are wanted")] = "",
    taken: Annotated[Taken, Query(description="Which value of a metric stands for a branch")] = Taken.BEST,
    limit: Annotated[int, Query(ge=1, le=parallels.MOST, description="At most so many branches")] = parallels.MOST,
) -> Response:
    """Branches by settings and metrics, one axis for each: for parallel coordinates and scatter plots."""
    with served.reading() as session:
        found = parallels.parallels(session, q, name=name, taken=taken, limit=limit)
    return reply(found, request=request, etag=True)


@routes.add("GET", "/histogram", scope=Scope.READ, returns=Histogram, responses={410: {}})
def tensor_histogram(
    served: Chosen,
    request: Request,
    rev: Revisions,
    path: Annotated[str, Query(min_length=1, max_length=1000, description="The tensor's path, as `/diff` and `/tensors` say it")],
    bins: Annotated[int, Query(ge=1, le=MOST_BINS)] = BINS,
    scale: Annotated[Scale, Query(description="What the bins are equally wide in: values, or logarithms of magnitudes")] = Scale.LINEAR,
) -> Response:
    """How the values of one tensor are distributed in some states, over the same bins; it is read in pieces, for at most 10 s."""
    with served.reading() as session:
        states = [revision.resolve(session, each) for each in rev]
    etag = etag_of("histogram-1", [(state.uid, state.digest) for state in states], path, bins, scale)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    gone = stop_when_gone(request)
    late = stop_after(COUNTING_S, f"counting the values of {path!r}", f"download the tensor (payload?only={path}) and count there")

    def look(done: int, total: int) -> None:
        gone()
        late()

    with served.payload_reads.one():
        found = count(served.core, states, path, bins=bins, scale=scale, on_progress=look)
    return reply(found, etag=etag)
