"""The uid of the next state: a single tracker draws it at random, and several ranks that capture the same state derive it.

Ranks that capture one state give it one uid before anything is copied, without exchanging a message: they derive it from what all of them
know.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Protocol

__all__ = ["Agreed", "Drawn", "Uids"]

_DIGITS = 24


class Uids(Protocol):
    """Gives uids: one for each capture, on the training thread, even if the capture is skipped afterwards."""

    def next(self, branch: str, step: int, micro_step: int) -> str:
        """The uid of the state that is captured at this step: 24 lower-case hex digits."""


class Drawn:
    """A random uid for each state."""

    def next(self, branch: str, step: int, micro_step: int) -> str:
        """A uid that no other state has."""
        return secrets.token_hex(_DIGITS // 2)


class Agreed:
    """The same uids on every rank that captures at the same steps in the same order. All trackers of a process share one.

    ``run`` is the uid of the current job, which its ranks share and no other job ever has. A step that comes again on a branch, as
    after a restore, counts as another turn and gets another uid.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._turns: dict[str, tuple[int, tuple[int, int]]] = {}

    def next(self, branch: str, step: int, micro_step: int) -> str:
        """The uid that every rank derives at this step."""
        turn, last = self._turns.get(branch, (0, (-1, -1)))
        if (step, micro_step) <= last:
            turn += 1
        self._turns[branch] = turn, (step, micro_step)
        said = json.dumps(["datastates state uid 1", self._run, branch, turn, step, micro_step])
        return hashlib.sha256(said.encode()).hexdigest()[:_DIGITS]
