"""Errors of our tree for the wire: by kind and message, with the further fields of their class."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from datastates.errors import Corrupt, DatastatesError, SyntaxProblem, Unavailable
from datastates.values import MESSAGE_LENGTH

from .logs import RateLimitFilter

_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())
_CHARACTERS = 8 << 10

Uid = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[0-9a-zA-Z_-]+\\Z")]
Name = Annotated[str, Meta(max_length=255)]
Text = Annotated[str, Meta(max_length=MESSAGE_LENGTH)]


class Failure(Struct, frozen=True):
    """An error of our tree by its kind, with its message and the further fields of its class."""

    kind: Name
    message: Text
    nearest: Uid | None = None
    is_gone: bool = False
    text: Text | None = None
    column: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    expected: Annotated[tuple[Name, ...], Meta(max_length=100)] = ()


def describe(error: BaseException) -> Failure:
    """An error as the peer learns it.

    If the error is not ours, the peer learns only its type. The log here has its text."""
    if not isinstance(error, DatastatesError):
        _logger.error("a request of a peer failed here", exc_info=error)
        return Failure(
            DatastatesError.kind, f"the peer failed with {type(error).__name__}: its log says why"
        )
    if isinstance(error, SyntaxProblem):
        expected = tuple(_clean(word)[:255] for word in error.expected[:100])
        return Failure(
            error.kind,
            _clean(str(error)),
            text=_clean(error.text),
            column=max(error.column, 1),
            expected=expected,
        )
    nearest = error.nearest if isinstance(error, Corrupt | Unavailable) else None
    return Failure(
        error.kind,
        _clean(str(error)),
        nearest=nearest,
        is_gone=isinstance(error, Unavailable) and error.is_gone,
    )


def revive(failure: Failure) -> DatastatesError:
    """The same error on this side, ready to be raised; for a kind that this version does not
    know, the root of our tree."""
    cls = next(
        (each for each in _tree(DatastatesError) if each.kind == failure.kind), DatastatesError
    )
    message = _clean(failure.message)
    # its own __init__ would compose a message that is already complete
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    if isinstance(error, SyntaxProblem):
        error.text, error.column, error.expected = (
            failure.text or "",
            failure.column or 1,
            failure.expected,
        )
    elif isinstance(error, Corrupt | Unavailable):
        error.nearest = failure.nearest
    if isinstance(error, Unavailable):
        error.is_gone = failure.is_gone
    return error


def again(error: DatastatesError) -> DatastatesError:
    """An equal error for another waiting task: raising one object in several tasks would mix up
    their tracebacks."""
    return revive(describe(error))


def _tree(cls: type[DatastatesError]) -> Iterator[type[DatastatesError]]:
    yield cls
    for each in cls.__subclasses__():
        yield from _tree(each)


def _clean(text: str) -> str:
    """A text cut to what fits a frame, without anything that a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "?" for letter in text[:_CHARACTERS]
    )
