"""Curves: metrics along branches."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from datastates.api.curves import Shape
from datastates.api.models import Series
from datastates.api.replies import etag_of, is_known, reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen
from datastates.errors import InvalidInput
from datastates.lineage import lookup
from datastates.lineage.search import revision
from datastates.lineage.search.amended import metrics_version
from datastates.lineage.search.axis import Axis
from datastates.lineage.search.series import lost_parts
from datastates.lineage.show.grouping import groups_of, runs_of

__all__ = ["routes"]

routes = Routes("series")

POINTS_MAX = 200_000
"""The most points that all lines of an answer have together."""

Revision = Annotated[str, Query(min_length=1, max_length=500)]
Key = Annotated[str, Query(min_length=1, max_length=255)]


@routes.add("GET", "/series", scope=Scope.READ, returns=Series)
def series(
    served: Chosen,
    request: Request,
    head: Annotated[list[Revision], Query(min_length=1, max_length=128, description="Revisions: a line follows the first parents of each")],
    key: Annotated[list[Key], Query(default_factory=list, max_length=32, description="Metrics; none: only where the paths part")],
    points: Annotated[int, Query(ge=10, le=10_000, description="At most so many a line")] = 1000,
    shape: Annotated[
        Shape, Query(description="What is kept of more points: the extremes (M4), or means, which curves are averaged by")
    ] = Shape.EXTREMES,
    x: Annotated[Axis, Query(description="What `xs` says of each point: nothing beside its step, its time, or its epoch")] = Axis.STEP,
    group: Annotated[
        str | None, Query(min_length=1, max_length=300, description="`study`, `config.KEY` or `attr.KEY`: what `group` says of each line")
    ] = None,
) -> Response:
    """Metrics along the first parents of some heads, and where these paths fork."""
    heads, keys = list(dict.fromkeys(head)), list(dict.fromkeys(key))
    if len(heads) * len(keys) * points > POINTS_MAX:
        least = POINTS_MAX // (len(heads) * len(keys))
        raise InvalidInput(f"{len(heads)} heads and {len(keys)} metrics with {points} points each are too many: at most {least} points fit")
    with served.reading() as session:
        ids = [revision.resolve_id(session, one) for one in heads]
        groups = None if group is None else groups_of(session, group, runs_of(session, ids))
        uids = lookup.uids_of(session, ids)  # a lineage that is made anew has the same row ids again
        is_fixed = x is not Axis.EPOCH  # which comes from attributes, and these change
        lost = lost_parts(session, dict(zip(heads, ids, strict=True)))
        known = uids, heads, keys, points, shape, x, groups, metrics_version(session), repr(lost)
        etag: str | bool = etag_of("series-2", *known) if is_fixed else True
        if isinstance(etag, str) and is_known(request, etag):
            return Response(status_code=304, headers={"ETag": etag})
        found = served.curves.series(session, heads, ids, keys, points, axis=x, shape=shape, groups=groups)
    return reply(found, request=request, etag=etag)
