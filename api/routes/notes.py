"""Notes on states and branches, in Markdown: read, written, edited and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from fastapi import Path, Query, Request, Response

from datastates.api.etags import etag_of_note
from datastates.api.models import NewNote, Note, NoteText, Page
from datastates.api.replies import reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen, Served
from datastates.lineage.change import notes

from .refs import CHANGED, IfMatch, changing, check_match

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["routes"]

routes = Routes("notes")

_NoteUid = Annotated[str, Path(pattern="^[0-9a-f]{24}$", description="A note's uid")]


@routes.add("GET", "/notes", scope=Scope.READ, returns=Page[Note])
def list_notes(
    served: Chosen,
    request: Request,
    state: Annotated[str | None, Query(pattern="^[0-9a-f]{24}$", description="Only those on this state, by its uid")] = None,
    branch: Annotated[str | None, Query(max_length=255, description="Only those on this branch")] = None,
    after: Annotated[str | None, Query(pattern="^[0-9a-f]{24}$", description="The uid of the last note that came")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The notes on a state, on a branch, or on anything, newest first."""
    with served.reading() as session:
        found = notes.notes(session, state=state, branch=branch, limit=limit + 1, after=after)
    page = Page(tuple(found[:limit]), found[limit - 1].uid if len(found) > limit else None)
    return reply(page, request=request, etag=True)


@routes.add("POST", "/notes", scope=Scope.WRITE, returns=Note, status=201)
def write_note(served: Chosen, body: NewNote) -> Response:
    """Write a note on a state or a branch.

    The notes of a branch belong to its name. The author is not verified: any client that may write can give any name.
    """
    with served.writing() as session:
        note = notes.write(session, body.text, state=body.state, branch=body.branch, author=body.author)
    return reply(note, status=201, etag=etag_of_note(note))


@routes.add("PATCH", "/notes/{uid}", scope=Scope.WRITE, returns=Note, responses=CHANGED)
def edit_note(served: Chosen, uid: _NoteUid, body: NoteText, if_match: IfMatch = None) -> Response:
    """Change the text of a note, if its ETag is still that in `If-Match`: its `edited_at`, or else its `created_at`, as a JSON string."""
    with _changing(served, uid, if_match) as (session, seen):
        note = notes.edit(session, uid, body.text, seen=seen)
    return reply(note, etag=etag_of_note(note))


@routes.add("DELETE", "/notes/{uid}", scope=Scope.WRITE, returns=None, status=204, responses=CHANGED)
def delete_note(served: Chosen, uid: _NoteUid, if_match: IfMatch = None) -> Response:
    """Delete a note, if its ETag is still that in `If-Match`."""
    with _changing(served, uid, if_match) as (session, seen):
        notes.remove(session, uid, seen=seen)
    return Response(status_code=204)


@contextmanager
def _changing(served: Served, uid: str, if_match: str | None) -> Iterator[tuple[Session, Note]]:
    with changing(served, f"note {uid}", if_match) as session:
        note = notes.get(session, uid)
        check_match(f"note {uid}", etag_of_note(note), if_match)
        yield session, note
