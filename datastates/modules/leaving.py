"""The states that left this process's memory, kept until the lineage was told and a later commit survives its server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from datastates.system.interrupts import Mutex

__all__ = ["Leaving"]

_MOST_GONE = 1000
"""The most states that left memory and are kept only because no later commit was durable; then the next commit is made durable."""


class Leaving:
    """The uids of states that left memory. ``add`` and ``in`` are safe from any thread and never wait; the rest runs in turn."""

    def __init__(self) -> None:
        self._untold: list[str] = []
        self._gone: list[str] = []
        self._changing = Mutex()

    def __contains__(self, uid: str) -> bool:
        """Whether a state left memory, and that was not told yet."""
        return uid in self._untold

    def add(self, uids: Iterable[str]) -> None:
        """Note that these states left memory."""
        with self._changing:
            self._untold += uids

    def untold(self, is_due: Callable[[str], bool] = lambda uid: True) -> list[str]:
        """The states that have to be told, in the order in which they left."""
        with self._changing:
            return [uid for uid in self._untold if is_due(uid)]

    def note(self, told: Collection[str]) -> None:
        """Note that these were told; a server that is killed may forget it."""
        if told:
            done = frozenset(told)
            self.keep(lambda uid: uid not in done)
            self._gone += told

    def keep(self, is_kept: Callable[[str], bool]) -> bool:
        """Keep only these of the states that have to be told; returns whether others were dropped."""
        with self._changing:
            kept = [uid for uid in self._untold if is_kept(uid)]
            is_less, self._untold = len(kept) < len(self._untold), kept
        return is_less

    @property
    def gone(self) -> list[str]:
        """The states that were told, and may still be forgotten."""
        return list(self._gone)

    @property
    def is_crowded(self) -> bool:
        """Whether so many may still be forgotten that the next commit has to survive the server."""
        return len(self._gone) >= _MOST_GONE

    def settle(self) -> list[str]:
        """Note that a commit survives the server, and with it everything told before; returns the uids that need not be remembered any
        more.
        """
        gone, self._gone = self._gone, []
        return gone
