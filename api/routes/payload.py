"""Payload: the tensors of a state as a file that any safetensors reader opens, and the files that
were captured with it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from typing import Annotated
from urllib.parse import quote

from fastapi import Header, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from datastates.api.live import TYPES
from datastates.api.models import FileInfo, Page, file_infos
from datastates.api.payload import StateFile, Streamed, etag_of, is_known, range_of, reply
from datastates.api.routing import Refusal, Routes, Scope
from datastates.api.served import Chosen, Served, Uid
from datastates.errors import DatastatesError, NotFound
from datastates.lineage import lookup
from datastates.lineage.states import State
from datastates.thumbnails import files_of, media_type

MEDIA_TYPE = "application/octet-stream"
_logger = logging.getLogger(__name__)

_FILE = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_ANSWERS: dict[int | str, dict[str, object]] = {
    200: {"description": "The file", "content": _FILE},
    206: {"description": "The range of it that was asked for", "content": _FILE},
    304: {"description": "Who asks has it: `If-None-Match`"},
    416: {"description": "There is no such range"},
    410: {},
}

routes = Routes("payload")
_Only = Annotated[
    list[Annotated[str, Query(max_length=500)]] | None,
    Query(max_length=64, description="Objects or tensors, or patterns: `model`, `model/*.weight`"),
]


class File(Response):
    """The type of the file, for the document."""

    media_type = MEDIA_TYPE


@routes.add(
    "GET",
    "/states/{uid}/payload",
    scope=Scope.READ,
    returns=None,
    has_head=False,
    response_class=File,
    responses=_ANSWERS,
)
def payload(
    served: Chosen,
    uid: Uid,
    request: Request,
    only: _Only = None,
    range: Annotated[
        str | None, Header(description="One range; several are answered by the whole")
    ] = None,  # the header's name
    if_range: Annotated[
        str | None, Header(description="An ETag: with another one the whole is sent")
    ] = None,
) -> Response:
    """A state's tensors as one safetensors file, or those that `only` selects.

    Each chunk is checked when it is read. If one is damaged, the connection breaks: wrong bytes are
    never sent.
    """
    state, etag = _state(served, uid, only)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    with ExitStack() as stack:
        file = _open(served, state, only, stack)
        wanted = (
            None
            if if_range is not None and if_range.strip() != etag
            else range_of(range, file.size)
        )
        start, end = wanted or (0, file.size)
        if start == end:
            headers = {"Content-Range": f"bytes */{file.size}", "ETag": etag}
            raise Refusal(
                416,
                "invalid-input",
                f"the file has {file.size} bytes, none of them are {range!r}: ask for others",
                headers,
            )
        headers = _headers(state, etag, end - start)
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
        status = 206 if wanted else 200
        pieces = file.pieces(start, end)
        first = next(pieces)  # damage at the very start is still reported in words
        close: Callable[[], None] = stack.pop_all().close
    return Streamed(
        _body(first, pieces, state),
        close=close,
        headers=headers,
        media_type=MEDIA_TYPE,
        status=status,
    )


@routes.add(
    "HEAD",
    "/states/{uid}/payload",
    scope=Scope.READ,
    returns=None,
    response_class=File,
    responses={304: _ANSWERS[304], 410: {}},
)
def payload_head(served: Chosen, uid: Uid, request: Request, only: _Only = None) -> Response:
    """The size and the ETag of that file."""
    state, etag = _state(served, uid, only)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    with ExitStack() as stack:
        return Response(
            headers=_headers(state, etag, _open(served, state, only, stack).size),
            media_type=MEDIA_TYPE,
        )


# The files of a state. Pictures of four formats have their own media type. A browser saves any
# other file, and shows nothing of it.


_STATE_FILE = {type_: {"schema": {"type": "string", "format": "binary"}} for type_ in TYPES}


@routes.add(
    "GET", "/states/{uid}/files", scope=Scope.READ, returns=Page[FileInfo], responses={410: {}}
)
def state_files(served: Chosen, uid: Uid, request: Request) -> Response:
    """The pictures and small files that were captured with a state."""
    with served.reading() as session:
        state = lookup.state(session, uid)
    etag = etag_of("files-1", state.uid, state.digest)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    with served.payload_reads.one(), served.core.open_payload(state, verify=True) as reader:
        items = file_infos(reader)
    return reply(Page(items, None), etag=etag)


@routes.add(
    "GET",
    "/states/{uid}/files/{name}",
    scope=Scope.READ,
    returns=None,
    response_class=File,
    responses={**_ANSWERS, 200: {"description": "The file", "content": {**_FILE, **_STATE_FILE}}},
)
def state_file(
    served: Chosen,
    uid: Uid,
    request: Request,
    name: Annotated[str, Path(min_length=1, max_length=200, description="The file's `name`")],
) -> Response:
    """One of these files, to be saved. PNG, JPEG, GIF and WebP have their own type."""
    with served.reading() as session:
        state = lookup.state(session, uid)
    etag = etag_of("file-1", state.uid, state.digest, name)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    with served.payload_reads.one(), served.core.open_payload(state, verify=True) as reader:
        files = files_of(reader)
    if name not in files:
        raise NotFound(f"state {uid} has no file {name!r}: it has {', '.join(files) or 'no files'}")
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "ETag": etag,
    }
    return Response(files[name], media_type=media_type(files[name]) or MEDIA_TYPE, headers=headers)


def _state(served: Served, uid: str, only: list[str] | None) -> tuple[State, str]:
    with served.reading() as session:
        state = lookup.state(session, uid)
    return state, etag_of("safetensors-1", state.uid, state.digest, sorted(set(only or ())))


def _open(served: Served, state: State, only: list[str] | None, stack: ExitStack) -> StateFile:
    stack.enter_context(served.downloads.one())
    reader = stack.enter_context(served.core.open_payload(state, verify=True))
    return StateFile(reader, state, only)


def _headers(state: State, etag: str, length: int) -> dict[str, str]:
    return {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": (
            f'attachment; filename="state-{state.uid[:10]}-step{state.step}.safetensors"'
        ),
        "Content-Length": str(length),
        "ETag": etag,
    }


async def _body(first: bytes, pieces: Iterator[bytes], state: State) -> AsyncGenerator[bytes]:
    piece = first
    try:
        while piece:
            yield piece
            piece = await run_in_threadpool(next, pieces, b"")
    except DatastatesError as error:
        # no trace of the web's own
        _logger.error("the download of state %s was broken off: %s", state.uid, error)  # noqa: TRY400
        raise
