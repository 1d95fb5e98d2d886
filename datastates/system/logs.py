"""Events for machines: each event that is worth a counter or an alarm has a stable name, and fields.

    _logger.warning("the lineage does not answer: …", extra=event("lineage.away", reason=why))

The fields are plain attributes of the record, as ``extra`` makes them, so any JSON formatter finds them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from datetime import UTC, datetime

__all__ = ["JsonLines", "event", "reason_of"]

_PLAIN = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})


def event(name: str, /, **fields: object) -> dict[str, object]:
    """The ``extra`` of a call of a logger: the event's stable name and its fields; ``docs/guide/observing.md`` lists them."""
    return {"event": name, **fields}


def reason_of(error: BaseException, spell: Callable[[BaseException], str] = str) -> str:
    """What an error of a user's code says; the name of its type if it says nothing, or cannot say it."""
    try:
        said = spell(error)
    except Exception:  # its own methods may raise anything
        said = ""
    return said or type(error).__name__


class JsonLines(logging.Formatter):
    """A formatter for the standard library's logging: one JSON object a line, with ``time`` (UTC), ``level``, ``logger`` and ``message``.

    Events also have ``event``, their fields, and anything else given as ``extra``; an exception is a text. For any handler::

        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(datastates.JsonLines())
    """

    def __init__(self) -> None:
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _PLAIN and key not in line}
        if record.exc_info or record.exc_text:
            line["exception"] = record.exc_text or self.formatException(record.exc_info or (None, None, None))
        return json.dumps({key: _sound(value) for key, value in line.items()}, default=str, ensure_ascii=False)


def _sound(value: object) -> object:
    """A value that JSON can hold: a number that it cannot, such as the loss of a training that diverged, becomes a text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
