"""Repositories that are opened by their folder for one call, and stay open for the next calls of a loop.

Everything saved through one is durable before the call returns, so nothing depends on when it is closed: ``IDLE_S`` seconds after
the last call, or at exit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from datastates.errors import NotFound
from datastates.opening.location import DATABASE, locate
from datastates.repository import Repository
from datastates.repository import open as open_repository
from datastates.system.interrupts import Mutex

__all__ = ["IDLE_S", "let_go", "opened"]

IDLE_S = 10.0
"""How long after its last use, in seconds, a repository is closed and gives its memory back."""

_Key = tuple[str, int, int]


@dataclass(eq=False)
class _Kept:
    """An open repository and its users."""

    repository: Repository
    users: int = 0
    timer: threading.Timer | None = field(default=None, repr=False)


_lock = Mutex()
_kept: dict[_Key, _Kept] = {}
_owner = os.getpid()


@contextmanager
def opened(folder: str, *, must_exist: bool = False) -> Iterator[Repository]:
    """The repository of a folder, open for as long as the block lasts; made if it does not exist.

    :raises NotFound: it does not exist, with ``must_exist``.
    """
    location = locate(folder, must_exist=must_exist)
    root = location.root
    assert root is not None, "an address names a folder"
    with _lock:
        kept = _take(root)
    try:
        yield kept.repository
    finally:
        with _lock:
            kept.users -= 1
            if not kept.users:
                _close_later(kept)


def let_go() -> None:
    """Close every repository that is not in use."""
    with _lock:
        for key, kept in list(_kept.items()):
            if not kept.users:
                _close(key, kept)


def _take(root: Path) -> _Kept:
    global _owner
    if _owner != os.getpid():  # the parent owns what it opened
        _owner = os.getpid()
        _kept.clear()
    kept = None if (key := _key(root)) is None else _kept.get(key)
    if kept is None:
        repository = open_repository(root)
        key = _key(root)
        if key is None:
            raise NotFound(f"{root} is gone: somebody removed it while it was opened")
        kept = _kept[key] = _Kept(repository)
    kept.users += 1
    if kept.timer is not None:
        kept.timer.cancel()
        kept.timer = None
    return kept


def _key(root: Path) -> _Key | None:
    """The identity of a repository, so that another one that took its place is not mistaken for it."""
    try:
        found = (root / DATABASE).stat()
    except OSError:
        return None
    return str(root), found.st_dev, found.st_ino


def _close_later(kept: _Kept) -> None:
    kept.timer = threading.Timer(IDLE_S, _close_idle, [kept])
    kept.timer.name = "idle-repository"
    kept.timer.daemon = True
    kept.timer.start()


def _close_idle(kept: _Kept) -> None:
    with _lock:
        for key, each in list(_kept.items()):
            if each is kept and not kept.users:
                _close(key, kept)


def _close(key: _Key, kept: _Kept) -> None:
    del _kept[key]
    if kept.timer is not None:
        kept.timer.cancel()
    kept.repository.close()
