"""Requests that read payload: a few at a time, and none for a client that has hung up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio.from_thread

from datastates.errors import Cancelled, InvalidInput, Unavailable

from .problems import Refusal

if TYPE_CHECKING:
    from fastapi import Request

__all__ = ["PayloadReads", "stop_after", "stop_when_gone"]

_AT_ONCE = 4
_WAIT_S = 2.0
_LOOK_S = 0.25


class PayloadReads:
    """A limit on how many requests of one repository read payload at once: each occupies a thread, and the disk."""

    def __init__(self, at_once: int = _AT_ONCE, wait_s: float = _WAIT_S) -> None:
        self._free = threading.BoundedSemaphore(at_once)
        self._at_once, self._wait_s = at_once, wait_s

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold one of the places.

        :raises Refusal: none became free in time.
        """
        if not self._free.acquire(timeout=self._wait_s):
            detail = f"{self._at_once} requests read states of this repository just now: try again in a few seconds"
            raise Refusal(503, Unavailable.kind, detail, {"Retry-After": "2"})
        try:
            yield
        finally:
            self._free.release()


def stop_when_gone(request: Request) -> Callable[[], None]:
    """A function that the thread of a request calls often.

    :raises Cancelled: the client has hung up.
    """
    looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked < _LOOK_S:
            return
        looked = time.monotonic()
        if anyio.from_thread.run(request.is_disconnected):
            raise Cancelled("the client hung up")

    return look


def stop_after(seconds: float, what: str, instead: str) -> Callable[[], None]:
    """A function to call often during ``what``, which must end in time; ``instead`` is the advice to a client when it does not.

    :raises InvalidInput: ``seconds`` have passed.
    """
    until = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > until:
            raise InvalidInput(f"{what} takes more than {seconds:g} s, and was given up: {instead}")

    return look
