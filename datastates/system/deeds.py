"""What a thread is doing that may take long, call by call: a thread that makes no progress can be seen and named, and tests can hinder it.

    with deed("writing state 1f3a…") as one:      in the code that is responsible; any thread may look at ``one``
        at("write", path, size)                   before each call to the system that may take long, wherever it is made

``at`` costs almost nothing: it is called once for some megabytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Deed", "Hindrance", "at", "deed", "deed_of", "hindered"]

Hindrance = Callable[[str, Path, int], None]
"""Called with the next call, its file, and its number of bytes: waits, raises or does nothing."""

_SLOWEST = 20e6
"""Bytes a second of a slow disk: one call may bring gigabytes from the page cache to the disk, without a sign of progress."""

_hindrances: list[Hindrance] = []
_deeds: dict[int, Deed] = {}


@dataclass(slots=True)
class Deed:
    """One thing that a thread does. ``call`` and ``path`` say where the thread is, since ``since`` (of the monotonic clock)."""

    what: str
    call: str = ""
    path: Path | None = None
    size: int = 0
    since: float = field(default_factory=time.monotonic)

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Whether there was no progress for ``limit_s``, plus the time that a slow disk takes for the call's bytes."""
        return now - self.since >= limit_s + self.size / _SLOWEST

    def describe(self, now: float) -> str:
        """Where the thread is, and for how long."""
        where = f"{self.call} of {self.path}" if self.path is not None else self.what
        return f"{where} has made no progress for {now - self.since:.0f} s"


@contextmanager
def deed(what: str) -> Iterator[Deed]:
    """Note what this thread does until the end of the block."""
    thread = threading.get_ident()
    before = _deeds.get(thread)
    one = _deeds[thread] = Deed(what)
    try:
        yield one
    finally:
        if before is None:
            _deeds.pop(thread, None)
        else:
            _deeds[thread] = before


def deed_of(thread: threading.Thread) -> Deed | None:
    """What a thread is doing, if it has said so."""
    return None if thread.ident is None else _deeds.get(thread.ident)


def at(call: str, path: Path, size: int = 0) -> None:
    """Note that this thread is about to make a call that may take long, with this many bytes."""
    one = _deeds.get(threading.get_ident())
    if one is not None:
        one.call, one.path, one.size, one.since = call, path, size, time.monotonic()
    for hinder in tuple(_hindrances):
        hinder(call, path, size)


@contextmanager
def hindered(hinder: Hindrance) -> Iterator[None]:
    """Hinder every such call of this process until the end of the block; for tests."""
    _hindrances.append(hinder)
    try:
        yield
    finally:
        _hindrances.remove(hinder)
