"""Learns from torn captures which tensors a training edits by hand; from then on these are copied before ``capture`` returns."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from datastates.errors import Torn
from datastates.system.logs import event

__all__ = ["Edits", "named"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tear:
    step: int
    error: Torn
    is_taught: bool


class Edits:
    """The torn captures of one tracker: the stage thread notes them, the training thread learns from them.

    ``paths`` are the tensors that tore. From then on they are copied before ``capture`` returns; if others tear after that, everything is
    (``are_anywhere``). So at most two edits cost a state, whatever a training does by hand.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.are_anywhere = False
        self._noted: deque[_Tear] = deque()

    def note(self, step: int, error: Torn, *, is_taught: bool) -> None:
        """Note that the capture of ``step`` tore. ``is_taught``: it tore although what had torn before was copied at once."""
        self._noted.append(_Tear(step, error, is_taught))

    def learn(self, branch: str) -> bool:
        """Whether anything must be copied differently from now on. Logs which steps have no state, and the first time why."""
        if not self._noted:
            return False
        tears = [self._noted.popleft() for _ in range(len(self._noted))]
        torn = {path for tear in tears for path in tear.error.paths}
        steps = f"step{'s' * (len(tears) > 1)} {', '.join(str(tear.step) for tear in tears)}"
        if self.are_anywhere or torn <= self.paths:
            _logger.warning("branch %s has no state of %s either, for the same reason", branch, steps)  # begun before it was known
            return False
        self.paths |= torn
        self.are_anywhere = any(tear.is_taught for tear in tears)
        _logger.warning(
            "branch %s has no state of %s: %s changed between capture() and the end of its copy, outside a tracked optimizer's step. "
            "From now on %s copied before capture() returns, so that no further state is lost; run.fence() before the edit, or "
            "track(defer=False), would have kept this one",
            *(branch, steps, named(sorted(torn)), "everything is" if self.are_anywhere else "these tensors are"),
            extra=event("capture.torn", branch=branch, steps=[tear.step for tear in tears], tensors=sorted(torn)),
        )
        return True


def named(paths: Sequence[str]) -> str:
    """A text of the first few paths, and how many more there are."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
