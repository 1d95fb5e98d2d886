"""Ctrl-C while a command begins ends it quietly; later it raises, so that what is half done is put in order."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # has no stubs; ``signal`` takes longer to import than all of this
import os

__all__ = ["INTERRUPTED", "is_default", "leave_at_once", "orderly"]

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""


def is_default() -> bool:
    """Whether Ctrl-C does what it does in Python; else whoever started us wants it otherwise."""
    return _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler


def leave_at_once() -> None:
    """From here on Ctrl-C ends the process where it stands.

    An import that is broken off leaves half a module behind, on which others then fail.
    """
    _signal.signal(_signal.SIGINT, _leave)


def orderly() -> None:
    """From here on Ctrl-C raises: called once everything is imported, before anything is changed."""
    if _signal.getsignal(_signal.SIGINT) is _leave:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
