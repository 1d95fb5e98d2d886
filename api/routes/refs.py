"""Branches and tags: read, made, moved and deleted, each change by compare-and-swap on the ref as it was seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from fastapi import Header, Path, Query, Request, Response

from datastates.api.etags import etag_of_ref
from datastates.api.models import NewRef, Page, Ref, RefEvent, RefMove
from datastates.api.problems import Refusal
from datastates.api.replies import etag_of, reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen, Served
from datastates.errors import Conflict, InvalidInput
from datastates.lineage.change import refs
from datastates.lineage.search import revision
from datastates.lineage.states import RefKind

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["CHANGED", "IfMatch", "changing", "check_match", "routes"]

routes = Routes("refs")

Name = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[^\x00-\x20\x7f]+$", description="A branch or a tag; may have slashes")]
IfMatch = Annotated[str | None, Header(description="What it must still be: the ETag of `GET`")]
_IfNoneMatch = Annotated[str | None, Header(description="`*`: with 412 instead of 409 when the name is taken")]
CHANGED: dict[int | str, dict[str, object]] = {412: {}, 428: {}}


@routes.add("GET", "/refs", scope=Scope.READ, returns=Page[Ref])
def list_refs(served: Chosen, request: Request, kind: RefKind | None = None) -> Response:
    """Every branch and tag, by name, on one page."""
    with served.reading() as session:
        page = Page(tuple(refs.refs(session, kind)), None)
    return reply(page, request=request, etag=etag_of(page))


@routes.add("GET", "/refs/{name:path}", scope=Scope.READ, returns=Ref)
def get_ref(served: Chosen, name: Name) -> Response:
    """One branch or tag, with its ETag for `If-Match`; it is always sent, because that tag does not cover the message."""
    with served.reading() as session:
        ref = refs.get(session, name)
    return reply(ref, etag=etag_of_ref(ref))


@routes.add("PUT", "/refs/{name:path}", scope=Scope.WRITE, returns=Ref, status=201, responses={409: {}, 412: {}})
def make_ref(served: Chosen, name: Name, body: NewRef, if_none_match: _IfNoneMatch = None) -> Response:
    """Create a branch or a tag. A name that is taken is a conflict: `PATCH` moves it."""
    if body.kind is RefKind.BRANCH and body.message is not None:
        raise InvalidInput(f"a branch has no message: leave it out, or make {name!r} a tag")
    uid = _resolve(served, body.rev)
    try:
        with served.writing() as session:
            if body.kind is RefKind.TAG:
                ref = refs.tag(session, name, uid, message=body.message, reason="tag (web)")
                refs.warn(session, ref)
            else:
                ref = refs.branch(session, name, uid, reason="branch (web)")
    except Conflict as error:
        if if_none_match is None:
            raise
        raise Refusal(412, error.kind, str(error)) from error
    return reply(ref, status=201, etag=etag_of_ref(ref))


@routes.add("PATCH", "/refs/{name:path}", scope=Scope.WRITE, returns=Ref, responses=CHANGED)
def move_ref(served: Chosen, name: Name, body: RefMove, if_match: IfMatch = None) -> Response:
    """Point a branch or a tag at another state, if its ETag is still that in `If-Match`."""
    uid = _resolve(served, body.rev)
    with _changing(served, name, if_match) as (session, ref):
        moved = refs.move(session, name, uid, expected=ref.state, reason="move (web)")
        if moved != replace(ref, state=uid, version=ref.version + 1):
            raise Conflict(f"{ref.kind} {name!r} changed meanwhile: look again, then move it")
        refs.warn(session, moved)
    return reply(moved, etag=etag_of_ref(moved))


@routes.add("DELETE", "/refs/{name:path}", scope=Scope.WRITE, returns=None, status=204, responses=CHANGED)
def delete_ref(served: Chosen, name: Name, if_match: IfMatch = None) -> Response:
    """Delete a name, if its ETag is still that in `If-Match`. The states and the reflog stay."""
    with _changing(served, name, if_match) as (session, ref):
        deleted = refs.delete(session, name, reason="delete (web)")
        if deleted != ref:
            raise Conflict(f"{ref.kind} {name!r} changed meanwhile: look again, then delete it")
    return Response(status_code=204)


@routes.add("GET", "/reflog/{name:path}", scope=Scope.READ, returns=Page[RefEvent])
def reflog(
    served: Chosen,
    name: Name,
    request: Request,
    after: Annotated[int | None, Query(ge=1, lt=2**63, description="The `next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The moves of a name, newest first, even of a deleted one."""
    with served.reading() as session:
        found = refs.reflog(session, name, limit=limit + 1, before=after)
    items = tuple(found[:limit])
    page = Page(items, str(items[-1].id) if len(found) > limit else None)
    return reply(page, request=request, etag=etag_of(page))


@contextmanager
def changing(served: Served, what: str, if_match: str | None) -> Iterator[Session]:
    """A transaction that changes something as it was seen; if another client was faster, the answer is 412.

    On SQLite, whose writers queue, nothing comes between the read and the write. On PostgreSQL something may: the change itself compares
    again.
    """
    if if_match is None:
        raise Refusal(428, "invalid-input", f"send the ETag of {what}, as it was read, as If-Match")
    try:
        with served.writing() as session:
            yield session
    except Conflict as error:
        raise Refusal(412, error.kind, str(error)) from error


def check_match(what: str, etag: str, if_match: str | None) -> None:
    """Raise unless ``If-Match`` has this tag.

    :raises Conflict: the header has other tags.
    """
    if if_match is None or (if_match.strip() != "*" and etag not in [each.strip() for each in if_match.split(",")]):
        raise Conflict(f"{what} has the ETag {etag} now, not {str(if_match)[:50]}: read it again, then change it")


@contextmanager
def _changing(served: Served, name: str, if_match: str | None) -> Iterator[tuple[Session, Ref]]:
    with changing(served, repr(name), if_match) as session:
        ref = refs.get(session, name)
        check_match(f"{ref.kind} {name!r}", etag_of_ref(ref), if_match)
        yield session, ref


def _resolve(served: Served, rev: str) -> str:
    if not rev:
        raise InvalidInput("rev is empty: name a state by a revision such as main~3")
    with served.reading() as session:
        return revision.resolve(session, rev).uid
