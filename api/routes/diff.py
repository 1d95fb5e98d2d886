"""What changed from one state to another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Query, Request, Response

from datastates.algebra.diff import Diff, TensorChange, to_plain
from datastates.algebra.diff import diff as compare
from datastates.api.problems import placeless
from datastates.api.reads import stop_when_gone
from datastates.api.replies import etag_of, is_known, reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen
from datastates.lineage.search import revision

__all__ = ["routes"]

routes = Routes("diff")

Revision = Annotated[str, Query(min_length=1, max_length=500, description="A revision")]
Pattern = Annotated[str, Query(max_length=500)]


@dataclass(frozen=True, slots=True)
class TensorReport(TensorChange):
    """One tensor of two states; ``relative`` is the distance in units of the old norm."""

    relative: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Diff):
    """The difference between ``old`` and ``new``, as ``datastates.algebra.diff.to_plain`` gives it."""

    tensors: tuple[TensorReport, ...]


@routes.add("GET", "/diff", scope=Scope.READ, returns=DiffReport)
def diff(
    served: Chosen,
    request: Request,
    old: Revision,
    new: Revision,
    only: Annotated[list[Pattern] | None, Query(max_length=64, description="Names or patterns of paths: `model`, `model/*.weight`")] = None,
    tensors: Annotated[bool, Query(description="False: the lineage only, no payload is read")] = True,
    stat: Annotated[
        bool, Query(description="Tensors by their manifests alone, no payload is read: `unread` are those that may differ")
    ] = False,
) -> Response:
    """Compare two states: each tensor, metrics, values, configuration and code, as `datastates diff --json` does.

    Where the bytes of one of them are not available, `lacking` says why and which state can be restored instead; all else is compared.
    """
    with served.reading() as session:
        one, other = revision.resolve(session, old), revision.resolve(session, new)
    etag = etag_of("diff-1", one, other, only, tensors, stat)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    if not tensors or stat:
        found = compare(served.core, one.uid, other.uid, only=only, with_tensors=tensors, stat=True)
    else:
        look = stop_when_gone(request)
        with served.payload_reads.one():
            found = compare(served.core, one.uid, other.uid, only=only, on_progress=lambda done, total: look())
    if found.lacking:  # bytes that are not here now may come
        told = tuple(replace(each, why=placeless(each.why, request.scope)) for each in found.lacking)
        return reply(to_plain(replace(found, lacking=told)), request=request)
    return reply(to_plain(found), request=request, etag=etag)
