"""Events as an iterator that outlives the connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

import httpx
import msgspec

from datastates.errors import PeerFault, Unavailable
from datastates.system.bell import Latch

from .answers import checked, disconnected
from .models import RefEvent

__all__ = ["RefEvents"]

_QUIET_S = 45.0  # three heartbeats
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_BLOCK_MAX = 1 << 20


class RefEvents(Iterator[RefEvent]):
    """Events in the order of their ids, each once; ``Client.events`` makes it. ``last`` is the id of the newest event known to have come.

    Iterate in one thread; ``close`` may come from another, and ends the iteration.
    """

    def __init__(self, http: httpx.Client, path: str, after: int | None, *, patience_s: float) -> None:
        self.last = after
        self._http, self._path, self._patience_s = http, path, patience_s
        self._response: httpx.Response | None = None
        self._blocks: Iterator[bytes] = iter(())
        self._closed = Latch()
        self._connect()

    def __next__(self) -> RefEvent:
        while not self._closed.is_set():
            name, id_, data = self._next_block()
            if name == "ref" and (self.last is None or id_ > self.last):
                self.last = id_
                return msgspec.json.decode(data, type=RefEvent)
        raise StopIteration

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._closed.set()
        response = self._response
        if response is not None:
            stream = response.extensions.get("network_stream")
            with suppress(OSError, AttributeError):  # wakes a reader in another thread
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr] # httpcore has no types for it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        self._drop()

    def _next_block(self) -> tuple[str, int, bytes]:
        """The next event of the stream, or of a new stream when this one has ended; an empty one once this is closed."""
        while not self._closed.is_set():
            with suppress(httpx.TransportError, httpx.StreamError):
                for block in self._blocks:
                    found = _parse(block)
                    if found is not None:
                        return found
            self._drop()
            if not self._closed.is_set():
                self._connect()
        return "", 0, b""

    def _connect(self) -> None:
        """Open a stream where the last one ended, and read its ``hello``."""
        began, wait_s = time.monotonic(), _FIRST_WAIT_S
        while not self._closed.is_set():
            try:
                return self._open()
            except (httpx.TransportError, httpx.StreamError) as error:
                problem: Unavailable = disconnected(str(self._http.base_url), error)
                problem.__cause__ = error
            except Unavailable as error:
                problem = error
            except BaseException:
                self._drop()
                raise
            self._drop()
            if time.monotonic() - began + wait_s > self._patience_s:
                raise problem
            self._closed.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return None

    def _open(self) -> None:
        headers = {"Accept": "text/event-stream"} | ({} if self.last is None else {"Last-Event-ID": str(self.last)})
        request = self._http.build_request("GET", self._path, headers=headers, timeout=httpx.Timeout(10.0, read=_QUIET_S))
        self._response = self._http.send(request, stream=True)
        checked(self._response)
        self._blocks = _blocks(self._response)
        for block in self._blocks:
            found = _parse(block)
            if found is not None:
                name, id_, _ = found
                if name != "hello":
                    raise PeerFault(f"{self._http.base_url} began its events with {name!r}: is it datastates, of this version?")
                self.last = id_
                return
        raise httpx.ReadError("the stream ended before it began")

    def _drop(self) -> None:
        response, self._response, self._blocks = self._response, None, iter(())
        if response is not None:
            with suppress(httpx.TransportError, httpx.StreamError):
                response.close()


def _blocks(response: httpx.Response) -> Iterator[bytes]:
    left = b""
    for piece in response.iter_bytes():
        *whole, left = (left + piece).split(b"\n\n")
        yield from whole
        if len(left) > _BLOCK_MAX:
            raise PeerFault(f"{response.url} sent an event of more than {_BLOCK_MAX} bytes: is it datastates?")


def _parse(block: bytes) -> tuple[str, int, bytes] | None:
    """Name, id and data of an event; None for a comment."""
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line and not line.startswith(b":"))
    if b"event" not in fields:
        return None
    try:
        return fields[b"event"].decode(), int(fields[b"id"]), fields[b"data"]
    except (KeyError, ValueError) as error:
        raise PeerFault(f"an event came without an id or data ({block[:80]!r}): is it datastates, of this version?") from error
