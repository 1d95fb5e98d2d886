"""Logging what strangers and peers cause at most once a minute, and no longer than a screen, so that nobody can fill a disk with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Seldom"]

_EVERY_S = 60.0
_CHARACTERS = 1000
_TRACE_CHARACTERS = 8000
_plain = logging.Formatter()


class Seldom(logging.Filter):
    """A filter for a logger that lets through one message a minute for each text (without its arguments), and counts the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message passes; text that a peer chose is cut, and cannot control a terminal."""
        kind, now = str(record.msg), self._clock()
        with self._lock:
            said = self._said.get(kind)
            if said is not None and now - said < _EVERY_S:
                self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
                return False
            self._said[kind] = now
            unsaid = self._unsaid.pop(kind, 0)
        text = _clean(record.getMessage())
        record.msg, record.args = (f"{text} (and {unsaid} more like it, which were not logged)" if unsaid else text), ()
        if record.exc_info:
            record.exc_text = _plain.formatException(record.exc_info)[-_TRACE_CHARACTERS:]
        return True


def _clean(text: str) -> str:
    cut = f"{text[:_CHARACTERS]}…" if len(text) > _CHARACTERS else text
    return "".join(letter if letter.isprintable() else "?" for letter in cut)
