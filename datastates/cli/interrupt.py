"""Ctrl-C ends a command quietly while it begins. Later it raises, so that unfinished work is
cleaned up."""

from __future__ import annotations

# has no stubs; ``signal`` takes longer to import than all of this
import _signal  # type: ignore[import-not-found]
import os

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""


def is_default() -> bool:
    """Whether Ctrl-C has Python's own handler; if not, the process that started us wants something
    else."""
    return _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler


def leave_at_once() -> None:
    """From here on Ctrl-C ends the process at once.

    An interrupted import leaves half a module behind, on which others then fail.
    """
    _signal.signal(_signal.SIGINT, _leave)


def orderly() -> None:
    """From here on Ctrl-C raises.

    Called once everything is imported, before anything is changed."""
    if _signal.getsignal(_signal.SIGINT) is _leave:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
