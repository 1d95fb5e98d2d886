"""How a command ends: the exit code of each error, and how the error is reported."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from datastates.errors import Corrupt, DatastatesError, SyntaxProblem, Unavailable
from datastates.system import masking

from .cleaning import clean_lines

__all__ = ["EXIT_CODES", "code_of", "complain"]

EXIT_CODES = {
    "error": 1,
    "torn": 1,
    "closed": 1,
    "not-found": 3,
    "ambiguous": 3,
    "conflict": 4,
    "invalid-input": 5,
    "syntax": 5,
    "unsupported": 5,
    "corrupt": 6,
    "unavailable": 7,
    "over-budget": 7,
    "disconnected": 7,
    "unauthorized": 8,
    "peer-fault": 8,
    "dirty": 1,
    "module-failed": 1,
    "cancelled": 130,
}
"""Exit codes by the kind of error. 2 is a wrong command line; an error that is not listed is a defect: 1."""


def code_of(error: BaseException) -> int:
    """The exit code with which ``error`` ends a command."""
    return EXIT_CODES.get(error.kind, 1) if isinstance(error, DatastatesError) else 1


def complain(error: BaseException, *, as_json: bool) -> None:
    """Report an error on standard error: one red message, or a JSON object; with a traceback only if it is asked for."""
    if os.environ.get("DATASTATES_TRACEBACK"):
        traceback.print_exception(error)
    if as_json:
        import msgspec

        sys.stderr.write(msgspec.json.encode({"error": _describe(error)}).decode() + "\n")
        return
    if isinstance(error, DatastatesError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = f"unexpected {type(error).__name__}: {error}\nDATASTATES_TRACEBACK=1 shows where it comes from"
    said = clean_lines(masking.text(f"error: {text}"))
    has_colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    sys.stderr.write((typer.style(said, fg="red") if has_colours else said) + "\n")


def _describe(error: BaseException) -> dict[str, object]:
    described: dict[str, object] = {"kind": "error", "message": masking.text(str(error))}
    if isinstance(error, DatastatesError):
        described["kind"] = error.kind
    if isinstance(error, SyntaxProblem):
        described |= {"text": error.text, "column": error.column, "expected": list(error.expected)}
    if isinstance(error, Unavailable | Corrupt):
        described["nearest"] = error.nearest
    return described
