"""Branches and tags: read, made, moved and deleted, each change by compare-and-swap on the ref
as it was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Header, Path, Query, Request, Response

from datastates.api.cache import etag_of_note, etag_of_ref
from datastates.api.models import Annotations, Evicted, NewNote, NewRef, NoteText, Page, RefMove
from datastates.api.payload import etag_of, reply
from datastates.api.routing import Refusal, Routes, Scope, name_in_path
from datastates.api.served import Chosen, Served, Uid
from datastates.errors import Conflict, InvalidInput
from datastates.lineage.query import names, revision
from datastates.lineage.states import Note, Ref, RefEvent, RefKind, State
from datastates.lineage.write import refs
from datastates.lineage.write.refs import annotate
from datastates.maintenance.retention_pass import evict

if TYPE_CHECKING:
    from datastates.lineage.session import Session

Record = TypeVar("Record")

ref_routes = Routes("refs")

Name = Annotated[
    str,
    name_in_path("A branch or a tag; may have slashes"),
]
IfMatch = Annotated[str | None, Header(description="What it must still be: the ETag of `GET`")]
CHANGED: dict[int | str, dict[str, object]] = {412: {}, 428: {}}


@ref_routes.add("GET", "/refs", scope=Scope.READ, returns=Page[Ref])
def list_refs(served: Chosen, request: Request, kind: RefKind | None = None) -> Response:
    """Every branch and tag, by name, on one page."""
    with served.reading() as session:
        page = Page(tuple(names.refs(session, kind)), None)
    return reply(page, request=request, etag=etag_of(page))


@ref_routes.add("GET", "/refs/{name:path}", scope=Scope.READ, returns=Ref)
def get_ref(served: Chosen, name: Name) -> Response:
    """One branch or tag, with its ETag for `If-Match`; it is always sent, because that tag does
    not cover the message."""
    with served.reading() as session:
        ref = names.get(session, name)
    return reply(ref, etag=etag_of_ref(ref))


@ref_routes.add(
    "PUT",
    "/refs/{name:path}",
    scope=Scope.WRITE,
    returns=Ref,
    status=201,
    responses={409: {}, 412: {}},
)
def make_ref(
    served: Chosen,
    name: Name,
    body: NewRef,
    if_none_match: Annotated[
        str | None, Header(description="`*`: with 412 instead of 409 when the name is taken")
    ] = None,
) -> Response:
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


@ref_routes.add("PATCH", "/refs/{name:path}", scope=Scope.WRITE, returns=Ref, responses=CHANGED)
def move_ref(served: Chosen, name: Name, body: RefMove, if_match: IfMatch = None) -> Response:
    """Point a branch or a tag at another state, if its ETag is still that in `If-Match`."""
    uid = _resolve(served, body.rev)
    with _changing_ref(served, name, if_match) as (session, ref):
        moved = refs.move(session, name, uid, expected=ref.state, reason="move (web)")
        if moved != replace(ref, state=uid, version=ref.version + 1):
            raise Conflict(f"{ref.kind} {name!r} changed meanwhile: look again, then move it")
        refs.warn(session, moved)
    return reply(moved, etag=etag_of_ref(moved))


@ref_routes.add(
    "DELETE", "/refs/{name:path}", scope=Scope.WRITE, returns=None, status=204, responses=CHANGED
)
def delete_ref(served: Chosen, name: Name, if_match: IfMatch = None) -> Response:
    """Delete a name, if its ETag is still that in `If-Match`. The states and the reflog stay."""
    with _changing_ref(served, name, if_match) as (session, ref):
        deleted = refs.delete_ref(session, name, reason="delete (web)")
        if deleted != ref:
            raise Conflict(f"{ref.kind} {name!r} changed meanwhile: look again, then delete it")
    return Response(status_code=204)


@ref_routes.add("GET", "/reflog/{name:path}", scope=Scope.READ, returns=Page[RefEvent])
def reflog(
    served: Chosen,
    name: Name,
    request: Request,
    after: Annotated[
        int | None, Query(ge=1, lt=2**63, description="The `next` of the page before")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The moves of a name, newest first, even of a deleted one."""
    with served.reading() as session:
        found = names.reflog(session, name, limit=limit + 1, before=after)
    items = tuple(found[:limit])
    page = Page(items, str(items[-1].id) if len(found) > limit else None)
    return reply(page, request=request, etag=etag_of(page))


@contextmanager
def _changing(
    served: Served,
    what: str,
    if_match: str | None,
    read: Callable[[Session], Record],
    etag_of: Callable[[Record], str],
) -> Iterator[tuple[Session, Record]]:
    """A transaction that changes a record, and the record before. The answer is 412 if another
    client was faster: ``If-Match`` has not the record's tag.

    On SQLite, whose writers queue, nothing comes between the read and the write. On PostgreSQL
    something may: the change itself compares again.
    """
    if if_match is None:
        raise Refusal(428, "invalid-input", f"send the ETag of {what}, as it was read, as If-Match")
    try:
        with served.writing() as session:
            seen = read(session)
            _check_match(what, etag_of(seen), if_match)
            yield session, seen
    except Conflict as error:
        raise Refusal(412, error.kind, str(error)) from error


def _check_match(what: str, etag: str, if_match: str) -> None:
    if if_match.strip() != "*" and etag not in [each.strip() for each in if_match.split(",")]:
        raise Conflict(
            f"{what} has the ETag {etag} now, not {if_match[:50]}: read it again, then change it"
        )


def _changing_ref(
    served: Served, name: str, if_match: str | None
) -> AbstractContextManager[tuple[Session, Ref]]:
    return _changing(
        served, repr(name), if_match, lambda session: names.get(session, name), etag_of_ref
    )


def _resolve(served: Served, rev: str) -> str:
    if not rev:
        raise InvalidInput("rev is empty: name a state by a revision such as main~3")
    with served.reading() as session:
        return revision.resolve(session, rev).uid


# Notes on states and branches, in Markdown: read, written, edited and deleted.


note_routes = Routes("notes")

_NoteUid = Annotated[str, Path(pattern="^[0-9a-f]{24}$", description="A note's uid")]


@note_routes.add("GET", "/notes", scope=Scope.READ, returns=Page[Note])
def list_notes(
    served: Chosen,
    request: Request,
    state: Annotated[
        str | None,
        Query(pattern="^[0-9a-f]{24}$", description="Only those on this state, by its uid"),
    ] = None,
    branch: Annotated[
        str | None, Query(max_length=255, description="Only those on this branch")
    ] = None,
    after: Annotated[
        str | None,
        Query(pattern="^[0-9a-f]{24}$", description="The uid of the last note that came"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The notes on a state, on a branch, or on anything, newest first."""
    with served.reading() as session:
        found = names.notes(session, state=state, branch=branch, limit=limit + 1, after=after)
    page = Page(tuple(found[:limit]), found[limit - 1].uid if len(found) > limit else None)
    return reply(page, request=request, etag=True)


@note_routes.add("POST", "/notes", scope=Scope.WRITE, returns=Note, status=201)
def write_note(served: Chosen, body: NewNote) -> Response:
    """Write a note on a state or a branch.

    The notes of a branch belong to its name. The author is not verified: any client that may write
    can give any name.
    """
    with served.writing() as session:
        note = refs.write(
            session, body.text, state=body.state, branch=body.branch, author=body.author
        )
    return reply(note, status=201, etag=etag_of_note(note))


@note_routes.add("PATCH", "/notes/{uid}", scope=Scope.WRITE, returns=Note, responses=CHANGED)
def edit_note(served: Chosen, uid: _NoteUid, body: NoteText, if_match: IfMatch = None) -> Response:
    """Change the text of a note, if its ETag is still that in `If-Match`: its `edited_at`, or
    else its `created_at`, as a JSON string."""
    with _changing_note(served, uid, if_match) as (session, seen):
        note = refs.edit(session, uid, body.text, seen=seen)
    return reply(note, etag=etag_of_note(note))


@note_routes.add(
    "DELETE", "/notes/{uid}", scope=Scope.WRITE, returns=None, status=204, responses=CHANGED
)
def delete_note(served: Chosen, uid: _NoteUid, if_match: IfMatch = None) -> Response:
    """Delete a note, if its ETag is still that in `If-Match`."""
    with _changing_note(served, uid, if_match) as (session, seen):
        refs.remove(session, uid, seen=seen)
    return Response(status_code=204)


def _changing_note(
    served: Served, uid: str, if_match: str | None
) -> AbstractContextManager[tuple[Session, Note]]:
    return _changing(
        served, f"note {uid}", if_match, lambda session: names.get_note(session, uid), etag_of_note
    )


# Changes to a state after its capture: setting attributes, and dropping its bytes.


write_routes = Routes("states")


@write_routes.add("PATCH", "/states/{uid}/attributes", scope=Scope.WRITE, returns=State)
def annotate_state(served: Chosen, uid: Uid, body: Annotations) -> Response:
    """Set attributes of a state.

    Attributes that are null are removed; all others stay. The state's digest does not change: it
    identifies what was captured.
    """
    with served.writing() as session:
        state = annotate(session, uid, body.attributes)
    return reply(state)


@write_routes.add(
    "DELETE", "/states/{uid}/payload", scope=Scope.ADMIN, returns=Evicted, responses={409: {}}
)
def evict_state(
    served: Chosen,
    uid: Uid,
    force: Annotated[
        bool,
        Query(
            description=(
                "Drop it although a ref names it; never all that can be restored of a branch"
            )
        ),
    ] = False,
) -> Response:
    """Drop a state's bytes from the server's disk and memory.

    The state's record stays, and so do the bytes that other states need. The response has the
    number of bytes that were freed.
    """
    return reply(Evicted(uid, evict(served.core, uid, is_forced=force)))
