"""Notices for a person at a terminal although nothing is wrong, such as that a training goes on from an earlier state."""

from __future__ import annotations

import logging
import sys

__all__ = ["say"]

_log = logging.getLogger("datastates")


def say(text: str) -> None:
    """One line: a record of level INFO, and where nobody set logging up, on standard error.

    ``logging.getLogger("datastates").setLevel(logging.WARNING)`` turns it off.
    """
    if _log.hasHandlers():
        _log.info("%s", text)
    elif _log.level <= logging.INFO and sys.stderr is not None:
        sys.stderr.write(f"datastates: {text}\n")
