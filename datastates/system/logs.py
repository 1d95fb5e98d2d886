"""Events for machines: each event that is worth a counter or an alarm has a stable name, and
fields.

    _logger.warning("the lineage does not answer: …", extra=event("lineage.away", reason=why))

The fields are plain attributes of the record, as ``extra`` makes them, so any JSON formatter finds
them.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeVar, overload

_PLAIN = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})


def event(name: str, /, **fields: object) -> dict[str, object]:
    """The ``extra`` of a call of a logger: the event's stable name and its fields.
    ``docs/guide/observing.md`` lists them."""
    return {"event": name, **fields}


def reason_of(error: BaseException, spell: Callable[[BaseException], str] = str) -> str:
    """The text of an error of a user's code; the name of its type if there is no text."""
    try:
        said = spell(error)
    except Exception:  # its own methods may raise anything
        said = ""
    return said or type(error).__name__


class JsonLines(logging.Formatter):
    """A formatter for the standard library's logging: one JSON object a line, with ``time`` (UTC),
    ``level``, ``logger`` and ``message``.

    Events also have ``event``, their fields, and anything else given as ``extra``; an exception is
    a text. For any handler::

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
        line |= {
            key: value
            for key, value in vars(record).items()
            if key not in _PLAIN and key not in line
        }
        if record.exc_info or record.exc_text:
            line["exception"] = record.exc_text or self.formatException(
                record.exc_info or (None, None, None)
            )
        return json.dumps(
            {key: _sound(value) for key, value in line.items()}, default=str, ensure_ascii=False
        )


def _sound(value: object) -> object:
    """A value that JSON can hold: a number that it cannot, such as the loss of a training that
    diverged, becomes a text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# Notices for a person at a terminal that are no warnings, for example that a training continues
# from an earlier state.


_logger = logging.getLogger(__name__)


def say(text: str, extra: Mapping[str, object] | None = None) -> None:
    """Log one line at level INFO and, if logging is not set up, write it to standard error.

    ``logging.getLogger("datastates").setLevel(logging.WARNING)`` turns it off.
    """
    if _logger.hasHandlers():
        _logger.info("%s", text, extra=extra)
        return
    logger = _logger  # the root does not count: its level is raised from the start
    while not logger.level and logger.parent is not None and logger.parent is not logging.root:
        logger = logger.parent
    if logger.level <= logging.INFO and sys.stderr is not None:
        sys.stderr.write(f"datastates: {text}\n")


# Messages that peers cause are logged at most once a minute, and are cut to a screen, so that peers
# cannot fill a disk.


_EVERY_S = 60.0
_CHARACTERS = 1000
_TRACE_CHARACTERS = 8000
_plain = logging.Formatter()


class RateLimitFilter(logging.Filter):
    """A filter that passes one message a minute for each text (without its arguments), and counts
    the suppressed ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message passes; text that a peer chose is cut, and cannot control a
        terminal."""
        kind, now = str(record.msg), self._clock()
        with self._lock:
            said = self._said.get(kind)
            if said is not None and now - said < _EVERY_S:
                self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
                return False
            self._said[kind] = now
            unsaid = self._unsaid.pop(kind, 0)
        text = _clean(record.getMessage())
        record.msg, record.args = (
            (f"{text} (and {unsaid} more like it, which were not logged)" if unsaid else text),
            (),
        )
        if record.exc_info:
            record.exc_text = _plain.formatException(record.exc_info)[-_TRACE_CHARACTERS:]
        return True


def _clean(text: str) -> str:
    cut = f"{text[:_CHARACTERS]}…" if len(text) > _CHARACTERS else text
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


# Secrets in records, responses, logs and messages: this module alone decides which values are
# secret, and shows ``***`` for them.


MASK = "***"

_Value = TypeVar("_Value")
_Plain = str | int | float | bool | None

_WORDS = frozenset(
    (
        "password",
        "passwd",
        "passphrase",
        "passcode",
        "pwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "token",
        "auth",
        "authorization",
        "cookie",
        "apikey",
        "bearer",
    )
)
_ENDINGS = (
    "password",
    "passwd",
    "passphrase",
    "apikey",
    "authtoken",
    "accesstoken",
    "secretkey",
    "accesskey",
)
_KEYS = frozenset(
    (
        "api",
        "access",
        "secret",
        "private",
        "encryption",
        "signing",
        "account",
        "storage",
        "master",
        "service",
        "subscription",
    )
)
# of a ``pass``
_OWNERS = frozenset(("db", "user", "smtp", "mysql", "redis", "mail", "proxy", "login"))
_OF_MODELS = frozenset(
    (
        "pad",
        "eos",
        "bos",
        "unk",
        "cls",
        "sep",
        "mask",
        "sos",
        "special",
        "start",
        "end",
        "stop",
        "begin",
        "first",
        "last",
        "next",
        "image",
        "class",
        "per",
        "input",
        "output",
        "vocab",
        "prompt",
    )
)
# in addition to the words above, in a URL
_PARAMETERS = frozenset(("key", "sig", "signature", "credential", "code"))

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_USERINFO = re.compile(r"(?<![\w+.-])([A-Za-z][\w+.-]*://)([^\s/?#'\"@:]*):([^\s/?#'\"]*)@")
_DATABASE = re.compile(
    r"(?i)(?<![\w+.-])(postgres(?:ql)?(?:\+\w+)?://)([^\s:/]*):([^\s@]*(?:@[^\s/?#'\"@]*)*)@"
)
"""The user and the password of a database as SQLAlchemy reads them; the first ``@`` of a
password need not be its last."""
_PARAMETER = re.compile(r"""([?&;])([\w.%~-]+)=("[^"]*"|'[^']*'|["']?[^\s&;#'"]+)""")
_ASSIGNED = re.compile(r"""(["']?)(?<![\w.-])([\w.-]+)\1\s*[=:]\s*|(?<!\S)--([\w.-]+)\s+(?!-)""")
_QUOTED = r""""[^"]*"|'[^']*'"""
_ASSIGNED_VALUE = re.compile(
    rf"""(?:{_QUOTED})(?:(?!\W*[A-Za-z_][\w.-]*["']?\s*[=:])(?:{_QUOTED}|[^\s,;&}}\])"'])+)?"""
    r"""|["'][^\n]*|(?:(?i:bearer|basic)\s+)?[^\s,;&}\])"'](?:[^\s,;&}\])]*[^\s,;&}\])"'])?"""
)
"""What stands in quotes and what is joined to it, unless that is the next name; after a quote
that never ends, the rest of the line; else all up to a blank or a sign that ends it."""
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|sk-(?=[\w-]*[0-9])(?=[\w-]*[A-Z])[\w-]{20,}|xox[abeprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)(?![A-Za-z0-9])"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)([\w~+/.=-]{8,})")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a value with this name is a secret."""
    words = [word.lower() for word in _PART.findall(name)]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _OF_MODELS
    if last in ("key", "keys"):
        return before in _KEYS
    if last == "pass":
        return before in _OWNERS or name.strip("-") == "pass"
    return last in _WORDS or last.endswith(_ENDINGS)


def text(said: str) -> str:
    """The text with the secrets in URLs, and anything that looks like a secret, masked."""
    if "://" in said:
        for pattern in (_DATABASE, _USERINFO):
            said = pattern.sub(rf"\1\2:{MASK}@", said)
    said = _PARAMETER.sub(_parameter, said) if "?" in said else said
    said = _BEARER.sub(rf"\1\2{MASK}", said)
    return _SHAPES.sub(MASK, said)


def arguments(argv: Iterable[str]) -> tuple[str, ...]:
    """The command line with secrets masked. These are the word after ``--token`` in ``--token X``,
    and the value in ``NAME=X``, ``name: X`` and ``{"name": "X"}``. A word may itself be a command
    line, as of ``sh -c``.
    """
    found: list[str] = []
    is_next = False
    for word in argv:
        found.append(MASK if is_next and not word.startswith("--") else _in_full(word))
        is_next = (
            word.startswith("-") and "=" not in word and word.split() == [word] and is_secret(word)
        )
    return tuple(found)


@overload
def named(values: Mapping[str, _Plain]) -> dict[str, _Plain]: ...
@overload
def named(values: Mapping[str, _Value]) -> dict[str, _Value | str]: ...
def named(values: Mapping[str, _Value]) -> dict[str, _Value | str]:
    """The configuration with secrets masked: texts and numbers with a secret key, and secrets in
    other texts."""
    return {key: _value(key, value) for key, value in values.items()}


def _value(key: str, value: _Value) -> _Value | str:
    if isinstance(value, str):
        return MASK if value and is_secret(key) else _in_full(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return MASK if is_number and is_secret(key) and not key.lower().endswith("token") else value


def _in_full(said: str) -> str:
    """The text with all secrets masked.

    Masked values may end a parameter of a URL elsewhere, which is checked again."""
    return text(_without_assigned(text(said)))


def _without_assigned(word: str) -> str:
    """The word with the values in ``NAME=X``, ``name: X``, ``"name": "X"`` and ``--name X``
    masked, however deep they are nested."""
    kept, at = [], 0
    for match in _ASSIGNED.finditer(word):
        value = (
            _ASSIGNED_VALUE.match(word, match.end())
            if match.start() >= at and is_secret(match[2] or match[3])
            else None
        )
        if value is not None and value[0].lower() not in ("true", "false", "none", "null"):
            kept += [word[at : match.end()], _masked(value[0])]
            at = value.end()
    return "".join([*kept, word[at:]])


def _masked(value: str) -> str:
    """The mask, in the quotes that the value has."""
    quote = value[0] if value[0] in "\"'" else ""
    return f"{quote}{MASK}{quote}"


def _parameter(match: re.Match[str]) -> str:
    sign, name, value = match.groups()
    last = [word.lower() for word in _PART.findall(name)][-1:]
    return (
        f"{sign}{name}={_masked(value)}"
        if is_secret(name) or (last and last[0] in _PARAMETERS)
        else match[0]
    )
