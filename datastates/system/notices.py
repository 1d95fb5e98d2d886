"""Notices for a person at a terminal when nothing is wrong, for example that a training goes on from an earlier state."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

__all__ = ["say"]

_logger = logging.getLogger(__name__)


def say(text: str, extra: Mapping[str, object] | None = None) -> None:
    """Log one line at level INFO and, if logging is not set up, write it to standard error.

    ``logging.getLogger("datastates").setLevel(logging.WARNING)`` turns it off.
    """
    if _logger.hasHandlers():
        _logger.info("%s", text, extra=extra)
    elif not _is_turned_down() and sys.stderr is not None:
        sys.stderr.write(f"datastates: {text}\n")


def _is_turned_down() -> bool:
    """Whether the level of this logger or of the package's was raised; the root's, which is raised from the start, does not count."""
    logger = _logger
    while logger.level == logging.NOTSET and logger.parent is not None and logger.parent is not logging.root:
        logger = logger.parent
    return logger.level > logging.INFO
