"""One connection of a browser or a program: admitted or refused, and ended when it makes no progress.

A connection has a place in the server's ``Admission`` from ``accept`` on (see ``listening``). It keeps the place while a request that
``Gatekeeper`` let in is answered; before that and between requests it gives way to others. A client that does not send a whole request,
or does not take an answer, is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from datastates.system.admission import Limits

if TYPE_CHECKING:
    from datastates.system.admission import Place
    from datastates.transport.wire.arrival import Arrival

__all__ = ["PLACE", "Connection", "limits"]

PLACE = "datastates.place"
"""The key in a request's ``state`` for the place of its connection, which ``Gatekeeper`` holds."""

REQUEST_S = 10.0
"""The time for a whole request: from the connection, or the first byte of a further request, to the request's last byte."""

ANSWER_S = 30.0
"""The time within which some bytes of an answer that waits to be taken must leave."""

_logger = logging.getLogger(__name__)
_logger.setLevel(logging.ERROR)  # nothing is logged of what strangers send: that would fill a disk


def limits() -> Limits:
    """The limits of a web server."""
    return Limits(proof_s=REQUEST_S)


class Connection(H11Protocol):
    """Runs on the server's loop once the head of its first request is there; until then the connection is an ``arrival``."""

    def __init__(self, *args: Any, arrival: Arrival, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _logger
        self._arrival = arrival
        self._place: Place = arrival.hand_over()
        self._request_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's own
        """Give the request the time that is left."""
        super().connection_made(transport)
        self._await_request(self._arrival.due)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_waiting()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
        self._place.release()

    def data_received(self, data: bytes) -> None:
        """Take in part of a request; data that comes after the connection was given up is ignored."""
        if self.transport.is_closing():
            return
        if self._request_timer is None and self._is_idle():
            self._await_request()
        super().data_received(data)

    def handle_events(self) -> None:
        """Stop waiting for a request once it is complete."""
        super().handle_events()
        if self._is_idle():
            return
        self.scope["state"][PLACE] = self._place
        if not self.cycle.more_body:
            self._stop_waiting()
        elif self._request_timer is None:
            self._await_request()

    def on_response_complete(self) -> None:
        """Let other connections have the place until the next request."""
        self._place.loosen()
        super().on_response_complete()
        self._await_taking()

    def pause_writing(self) -> None:
        """Begin to time the other side, which takes no more bytes for now."""
        super().pause_writing()
        self._await_taking()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # uvicorn has None there at first

    def _await_request(self, due: float | None = None) -> None:
        self._request_timer = self.loop.call_at(self.loop.time() + REQUEST_S if due is None else due, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _await_taking(self) -> None:
        """End the connection unless some of the waiting bytes leave within ``ANSWER_S``; repeat until none wait."""
        waiting = self.transport.get_write_buffer_size()
        if not waiting or self._answer_timer is not None:
            return

        def look() -> None:
            self._answer_timer = None
            if self.transport.get_write_buffer_size() < waiting:
                self._await_taking()
            else:
                self.transport.abort()

        self._answer_timer = self.loop.call_later(ANSWER_S, look)
