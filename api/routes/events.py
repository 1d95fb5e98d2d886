"""Live events: what happens to refs, as it happens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import Header, Query, Response

from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen
from datastates.api.streaming import Streamed

if TYPE_CHECKING:
    from datastates.api.live import Listener

__all__ = ["routes"]

HEARTBEAT_S = 15.0
RETRY_MS = 1000
MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_STREAM = {
    "description": "Server-sent events: `hello`, then `ref`, each a RefEvent",
    "content": {
        MEDIA_TYPE: {
            "schema": {
                "type": "string",
                "description": "Lines `id:`, `event:` and `data:`, parted by empty lines; `data` of a `ref` is JSON",
            },
            "examples": {"hello": {"value": 'id: 7\nevent: hello\ndata: {"newest": 7}\n\n'}},
        }
    },
}

routes = Routes("events")
_Id = Annotated[int | None, Query(ge=0, lt=2**63, description="The id of the last event that is known")]
_LastId = Annotated[int | None, Header(alias="Last-Event-ID", ge=0, lt=2**63, description="The same; sent when a stream is resumed")]


class EventStream(Response):
    """The type of the stream, for the document."""

    media_type = MEDIA_TYPE


@routes.add("GET", "/events", scope=Scope.READ, returns=None, has_head=False, response_class=EventStream, responses={200: _STREAM})
def events(served: Chosen, after: _Id = None, last_event_id: _LastId = None) -> Response:
    """Server-sent events of every ref, as they happen.

    Without `after` and `Last-Event-ID` the stream begins now. The first event is `hello`; its id is where the stream begins. Then each
    `ref` is one line of a reflog, with the id to resume from. Comments every 15 s show that the stream is alive.
    """
    listener = served.live.listen(after if last_event_id is None else last_event_id)
    return Streamed(_lines(listener), close=listener.close, headers=_HEADERS, media_type=MEDIA_TYPE)


async def _lines(listener: Listener) -> AsyncGenerator[bytes]:
    yield b": the refs of a repository\nretry: %d\n\n" % RETRY_MS
    yield _event(listener.position, "hello", {"newest": listener.newest})
    while not listener.is_over:
        found = await listener.next(HEARTBEAT_S)
        yield b"".join(_event(event.id, "ref", event) for event in found) or b":\n\n"


def _event(id_: int, name: str, data: object) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (id_, name.encode(), msgspec.json.encode(data))
