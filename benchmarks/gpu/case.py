"""The words of a run: a part has cases, and each case ends in an outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from .place import Place

TRACE_CHARACTERS = 8000
"""So much of a trace is kept: its end."""

Found = dict[str, Any]
"""What a case found, for JSON, by names that say the unit; a list of numbers are the samples of
one figure."""


class Status(StrEnum):
    """How a case ended. Only ``PASSED`` says that something works."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"
    NOT_BUILT = "not built"
    NOT_REACHED = "not reached"


class Skip(Exception):
    """This case says nothing here; why."""


class NotBuilt(Exception):
    """What this case measures does not exist yet; what that is."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something to find out.

    ``run`` raises what is wrong, ``Skip`` or ``NotBuilt``; it may hang or kill its process."""

    name: str
    run: Callable[[Place], Found]
    limit_s: float = 40.0


class Outcome(msgspec.Struct, frozen=True):
    """How a case ended: ``why`` unless it passed, what it found, and the end of what a case that
    failed left in tracebacks and its log."""

    case: str
    status: Status
    took_s: float = 0.0
    why: str = ""
    found: Found = {}
    trace: str = ""
