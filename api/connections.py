"""One connection of a browser or a program: let in or not, and ended when it does not go on.

A connection has a place in the server's ``Admission`` from ``accept`` on (see ``listening``). It holds it while a request is answered
that ``Gatekeeper`` let in; before and between requests it gives way to others. A client that does not send a whole request, or does
not take an answer, is let go.
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
"""In a request's ``state``: the place of its connection, to be held."""

REQUEST_S = 10.0
"""From the connection, or from the first byte of a further request, to the last byte of the request."""

ANSWER_S = 30.0
"""Of an answer that waits to be taken some must leave in so long."""

_logger = logging.getLogger(__name__)
_logger.setLevel(logging.ERROR)  # of what strangers send, nothing is told: that would fill a disk


def limits() -> Limits:
    """The limits of a web server."""
    return Limits(proof_s=REQUEST_S)


class Connection(H11Protocol):
    """Runs on the server's loop, from when the head of its first request is there: until then it is an ``arrival``."""

    def __init__(self, *args: Any, arrival: Arrival, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _logger
        self._arrival = arrival
        self._place: Place = arrival.hand_over()
        self._request_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own says so too
        """The request must come in what is left of the time."""
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
        """Take part of a request; what comes after the connection was given up is not looked at."""
        if self.transport.is_closing():
            return
        if self._request_timer is None and self._is_idle():
            self._await_request()
        super().data_received(data)

    def handle_events(self) -> None:
        """Stop waiting for a request once it is whole."""
        super().handle_events()
        if self._is_idle():
            return
        self.scope["state"][PLACE] = self._place
        if not self.cycle.more_body:
            self._stop_waiting()
        elif self._request_timer is None:
            self._await_request()

    def on_response_complete(self) -> None:
        """The next may have the place, until the next request."""
        self._place.loosen()
        super().on_response_complete()
        self._await_taking()

    def pause_writing(self) -> None:
        """The other side takes no more: not for ever."""
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
        """End it unless some of what waits to be sent leaves in ``ANSWER_S``, again and again until nothing waits."""
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
