"""States: one, many, and what is known of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from datastates.api.details import detail_of
from datastates.api.models import Page, State, StateDetail, TensorInfo
from datastates.api.norms import tensors_of
from datastates.api.reads import stop_when_gone
from datastates.api.replies import etag_of, is_known, reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen, Uid
from datastates.lineage import lookup
from datastates.lineage.search import pages as search
from datastates.lineage.search import revision
from datastates.lineage.search.names import check_names
from datastates.lineage.show.detail import first_parents

__all__ = ["routes"]

routes = Routes("states")

Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many")]
Fields = Annotated[str | None, Query(max_length=1000, description="Only these fields, separated by commas: `uid,step,metrics.loss`")]


@routes.add("GET", "/resolve", scope=Scope.READ, returns=State)
def resolve(served: Chosen, request: Request, rev: Annotated[str, Query(min_length=1, max_length=500)], fields: Fields = None) -> Response:
    """The state that a revision names."""
    with served.reading() as session:
        state = revision.resolve(session, rev)
    return reply(state, request=request, fields=fields, etag=True)


@routes.add("GET", "/states", scope=Scope.READ, returns=Page[State])
def find_states(
    served: Chosen,
    request: Request,
    q: Annotated[str, Query(max_length=4000, description="A search; empty: all, newest first")] = "",
    after: Annotated[str | None, Query(max_length=8000, description="`next` of the page before, of the same search")] = None,
    limit: Limit = 100,
    fields: Fields = None,
) -> Response:
    """The states that a search finds, in its order."""
    with served.reading() as session:
        check_names(session, q)
        found = search.find(session, q, after=after, limit=limit)
    page = Page(tuple(found.states), found.next)
    return reply(page, request=request, fields=fields, etag=True)


@routes.add("GET", "/states/{uid}", scope=Scope.READ, returns=StateDetail)
def state_detail(served: Chosen, request: Request, uid: Uid, fields: Fields = None) -> Response:
    """Everything that is known of one state."""
    with served.reading() as session:
        detail = detail_of(session, uid, served.core.tiers.durable.packs(uid))
    return reply(detail, request=request, fields=fields, etag=True)


@routes.add("GET", "/states/{uid}/log", scope=Scope.READ, returns=Page[State])
def state_log(
    served: Chosen,
    request: Request,
    uid: Uid,
    after: Annotated[str | None, Query(pattern="^[0-9a-f]{24}$", description="The uid of the last state that came")] = None,
    limit: Limit = 100,
    fields: Fields = None,
) -> Response:
    """A state and its first parents, newest first."""
    with served.reading() as session:
        found, following = first_parents(session, uid, limit=limit, after=after)
    page = Page(tuple(found), following)
    return reply(page, request=request, fields=fields, etag=True)


@routes.add("GET", "/states/{uid}/tensors", scope=Scope.READ, returns=Page[TensorInfo], responses={410: {}})
def state_tensors(
    served: Chosen,
    request: Request,
    uid: Uid,
    norms: Annotated[bool, Query(description="With the norm of each: reads every byte once")] = False,
    fields: Fields = None,
) -> Response:
    """The tensors of a state, all on one page, in the order of its tree."""
    with served.reading() as session:
        state = lookup.state(session, uid)
    etag = etag_of("tensors-1", state.uid, state.digest, norms, fields)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    with served.core.open_payload(state) as reader:
        known = served.norms.get(uid) if norms else None
        if norms and known is None:
            with served.payload_reads.one():
                known = served.norms.read(uid, reader, stop_when_gone(request))
        page = Page(tuple(tensors_of(reader, known)), None)
    return reply(page, fields=fields, etag=etag)
