"""Where the terminal begins: Ctrl-C ends it quietly from the first import on."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # has no stubs; ``signal`` takes longer to import than all of this
import os

__all__ = ["INTERRUPTED", "main", "orderly"]

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""


def main() -> None:
    """Run the terminal; the process ends with the command's exit code."""
    is_ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler  # else whoever started us wants it otherwise
    if is_ours:
        _signal.signal(_signal.SIGINT, _leave)
    try:
        from .app import run

        run()
    finally:
        if is_ours:
            _signal.signal(_signal.SIGINT, _leave)


def orderly() -> None:
    """From here on Ctrl-C raises, for there is something to put in order: called once everything is imported, before anything is changed.

    Until then it ends the process where it stands: an import that is broken off leaves half a module behind, on which others then fail.
    """
    if _signal.getsignal(_signal.SIGINT) is _leave:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
