"""A state to be recorded, as the journal keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from datastates.lineage.change.reduction import FIRST, Reduce
from datastates.lineage.states import NewState

__all__ = ["Entry"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A state to be recorded, and the tip of its line before it: its uid and digest.

    ``rank`` says whose part of several it is, ``reduce`` how the metrics of all parts are combined, ``form`` what all parts have in common;
    None: it is the whole state.
    """

    new: NewState
    before: tuple[str, str] | None
    rank: int | None = None
    reduce: Reduce = FIRST
    form: str = ""
