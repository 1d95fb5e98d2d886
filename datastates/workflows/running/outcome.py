"""The outcome of one attempt at a variant, as a worker tells its explorer."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

__all__ = ["Outcome", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a task: the uid of the result, or an error with its traceback. ``source`` is where the starting state came from.

    ``is_death``: the error is that a process died, which may not be the variant's fault.
    """

    variant: str
    uid: str | None
    error: str | None = None
    traceback: str = ""
    source: str | None = None
    is_death: bool = False


def failed(variant: str, error: BaseException) -> Outcome:
    """The outcome of a variant that raised."""
    return Outcome(variant, None, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
