"""The types of a run: a part has cases, and each case ends in an outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from .place import Place

TRACE_CHARACTERS = 8000
"""The number of characters that are kept from the end of a trace."""

Found = dict[str, Any]
"""The results of a case, for JSON, by names that include the unit. A list of numbers has the
samples of one figure."""


class Status(StrEnum):
    """How a case ended. ``PASSED`` alone means that something works."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"
    NOT_BUILT = "not built"
    NOT_REACHED = "not reached"


class Skip(Exception):
    """This case has no meaning here, for the given reason."""


class NotBuilt(Exception):
    """This case measures a feature that does not exist yet."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test or measurement.

    ``run`` raises an error, ``Skip`` or ``NotBuilt``. It may hang or kill its process."""

    name: str
    run: Callable[[Place], Found]
    limit_s: float = 40.0


class Outcome(msgspec.Struct, frozen=True):
    """How a case ended: ``why`` unless it passed, its results, and for a failed case the end of its
    tracebacks and its log."""

    case: str
    status: Status
    took_s: float = 0.0
    why: str = ""
    found: Found = {}
    trace: str = ""
