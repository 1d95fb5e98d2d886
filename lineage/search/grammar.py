"""What the two grammars share: parsing, with errors that point at the column, and quotes and times."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from datastates.errors import SyntaxProblem

__all__ = ["Problem", "clamp", "load", "moment", "parse", "problem_at", "seconds", "unquote", "whole"]

_LENGTH = 10_000
_INT64 = 2**63 - 1
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class Problem(Exception):
    """A text that parses but has no meaning; ``parse`` turns it into a ``SyntaxProblem``."""

    def __init__(self, message: str, column: int, expected: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message, self.column, self.expected = message, column, expected


def load(name: str, transformer: Transformer[Token, Any]) -> Lark:
    """The parser of a grammar beside this file. ``transformer`` works while it parses, so nesting costs no recursion."""
    grammar = Path(__file__).with_name(f"{name}.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer="contextual", transformer=transformer, maybe_placeholders=True)


def parse(parser: Lark, text: str, names: dict[str, str]) -> Any:
    """What the transformer makes of the text. ``names`` says what its terminals are called for a reader.

    :raises SyntaxProblem: it does not parse.
    """
    if len(text) > _LENGTH:
        raise SyntaxProblem(f"the text has {len(text)} characters, at most {_LENGTH} are read", text=text[:60] + "...", column=1)
    unstorable = _UNSTORABLE.search(text)
    if unstorable:
        raise SyntaxProblem("a character that no name can hold", text=_UNSTORABLE.sub("?", text), column=unstorable.start() + 1)
    try:
        return parser.parse(text)
    except UnexpectedInput as error:
        raise _syntax_problem(error, text, names) from None
    except Problem as problem:
        raise SyntaxProblem(problem.message, text=text, column=problem.column, expected=problem.expected) from None


def problem_at(token: Token, message: str, expected: Iterable[str] = ()) -> Problem:
    """A problem with the text at a token."""
    return Problem(message, (token.start_pos or 0) + 1, tuple(expected))


def unquote(token: Token) -> str:
    """The text of a token, without its quotes and escapes if it has them."""
    if token[:1] in ('"', "'"):
        return _ESCAPE.sub(r"\1", token[1:-1])
    return str(token)


def seconds(token: Token, text: str) -> int:
    """``90m`` as seconds; a count of more than 18 digits is a problem."""
    return whole(token, text[:-1].strip()) * _UNITS[text[-1].lower()]


def whole(token: Token, text: str | None = None) -> int:
    """An integer that fits 64 bits."""
    text = str(token) if text is None else text
    if len(text) > 18:
        raise problem_at(token, f"a number of {len(text)} digits is too large")
    return int(text)


def moment(token: Token) -> datetime:
    """An ISO date or time; without a zone it is local time."""
    try:
        return datetime.fromisoformat(unquote(token)).astimezone()
    except (ValueError, OverflowError, OSError) as error:
        raise problem_at(token, f"{unquote(token)!r} is no date ({error})", ("a date such as 2026-11-21 or 2026-11-21T10:00",)) from None


def clamp(microseconds: int) -> int:
    """The nearest moment that a database can compare with."""
    return max(-_INT64, min(_INT64, microseconds))


def _syntax_problem(error: UnexpectedInput, text: str, names: dict[str, str]) -> SyntaxProblem:
    position = len(text)
    found = "the text ends too early"
    terminals: Iterable[str] = ()
    if isinstance(error, UnexpectedCharacters):
        position, terminals = getattr(error, "pos_in_stream", 0), error.allowed or ()
        found = f"{text[position]!r} cannot stand here" if position < len(text) else found
    elif isinstance(error, UnexpectedToken):
        terminals = error.accepts or error.expected
        if error.token.type != "$END":
            position = error.token.start_pos or 0
            found = f"{str(error.token)!r} cannot stand here"
    expected = sorted({names.get(terminal, "") for terminal in terminals} - {""})
    return SyntaxProblem(found, text=text, column=position + 1, expected=tuple(expected))
