"""Plain values as typed columns, for attributes and settings: ``number`` for numbers and booleans, ``text`` for strings."""

from __future__ import annotations

import math

from datastates import values
from datastates.errors import InvalidInput

from .schema import EXACT_INT
from .states import Value

__all__ = ["columns_of", "value_of"]


def columns_of(key: str, value: Value, what: str) -> dict[str, object]:
    """The columns for a value, by its name; ``what`` says in the message what it is.

    :raises InvalidInput: it cannot be stored.
    """
    type_, number, text = "none", None, None
    match value:
        case str():
            type_, text = "str", values.text(value, f"{what} {key!r}")
        case bool():
            type_, number = "bool", float(value)
        case int():
            values.plain(value, f"{what} {key!r}")  # at most 64 bits: the chronicle stores no more
            type_, number, text = "int", float(value), None if abs(value) <= EXACT_INT else str(value)
        case float():
            type_, number = "float", None if math.isnan(value) else value
        case None:
            pass
        case _:
            raise InvalidInput(f"{what} {key!r} is a {type(value).__name__}: store a str, int, float, bool or None")
    return {"key": key, "type": type_, "number": number, "text": text}


def value_of(type_: str, number: float | None, text: str | None) -> Value:
    """The stored value, as it was given."""
    match type_:
        case "str":
            return text
        case "int":
            return int(text) if text is not None else int(number or 0)
        case "bool":
            return bool(number)
        case "float":
            return math.nan if number is None else number
    return None
