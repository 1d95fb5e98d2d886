"""What this process has told of states of several parts: the states of which it waits to hear, and those of which it has no part."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from datastates.lineage.change.awaited import ranks_text, waiting
from datastates.lineage.change.parts import Telling
from datastates.lineage.lookup import state
from datastates.lineage.search.holders import replicas_of
from datastates.lineage.states import Status

from .entry import Entry
from .telling import Heard, Said, Skip

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Parts"]

_MOST_ASKED = 100
"""How many of the newest states are asked about, whether other ranks make them durable."""


class Parts:
    """The parts of a journal, which calls this in its turn; only ``skip`` may be called at any time, and never waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Entry, float]] = {}
        self._skips: dict[str, Skip] = {}
        self._unwritten: dict[str, int] = {}
        self._wishes: dict[str, int] = {}
        self._near: dict[str, int] = {}
        """The states that stay off further tiers, here and on all other ranks, until a rank has them go on."""
        self._half: dict[str, int] = {}
        """The states of which this rank's part is on disk, and those of others are not yet; with the bytes that this part added."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing has to be told, and nothing waits."""
        return not self._waiting and not self.is_to_tell

    @property
    def is_to_tell(self) -> bool:
        """Whether something has to be told."""
        return bool(self._skips or self._wishes)

    @property
    def is_awaiting(self) -> bool:
        """Whether a part waits for those of other ranks: to be told, or to be on their disks."""
        return bool(self._waiting or self._half)

    @property
    def may_be_wanted(self) -> bool:
        """Whether another rank may yet make durable a state that this rank has in memory only, has alone on disk, or keeps near."""
        return bool(self._unwritten or self._half or self._near)

    def is_half(self, uid: str) -> bool:
        """Whether this rank's part of a state is on disk, and that of another is not, as far as is known."""
        return uid in self._half

    def await_durable(self, uid: str, added: int) -> None:
        """Note that this rank's part is on disk, and the state is not durable yet."""
        self._half[uid] = added

    def __len__(self) -> int:
        """How many states wait for parts of others, or to be told."""
        return len(self._waiting) + len(self._skips)

    def __contains__(self, uid: str) -> bool:
        """Whether a part was told, and waits."""
        return uid in self._waiting

    def skip(self, skip: Skip) -> None:
        """Note that this rank has no part of a state; told with the next transaction."""
        self._skips[skip.facts.uid] = skip

    def want(self, uid: str, *, is_near: bool = False) -> None:
        """Note that this rank makes its part of a state durable. The other ranks must do the same, and are told with the next transaction.

        ``is_near``: it also keeps the part off further tiers.
        """
        rank = self._unwritten.pop(uid, None)
        if rank is not None:  # else another rank began
            self._wishes[uid] = rank
            if is_near:
                self._near[uid] = rank

    def pass_on(self, uid: str) -> None:
        """Note that a state that was kept near goes on to further tiers; so must the parts of the others."""
        rank = self._near.pop(uid, None)
        if rank is not None:
            self._wishes[uid] = rank

    def leave(self, uids: Iterable[str]) -> None:
        """Note that these states are no longer in memory only."""
        for uid in uids:
            self._unwritten.pop(uid, None)

    def entry(self, uid: str) -> Entry:
        """What was told of a part that waits."""
        return self._waiting[uid][0]

    def missing(self, session: Session, uid: str, tier: str) -> str | None:
        """What a state still waits for from other ranks, in words: their parts, or that these reach the ``tier``, the ranks' disks."""
        if uid in self._waiting:
            return next((str(each) for each in waiting(session, [uid])), None)
        if uid not in self._half:
            return None
        size, there = state(session, uid).world_size, {one.rank for one in replicas_of(session, uid) if one.tier == tier}
        late = ranks_text(sorted(set(range(size)) - there))
        return f"the parts of rank {late} of {size} are not on the disks of their ranks, whose logs may say why" if late else None

    # --- what is said -------------------------------------------------------------------------------------------------------

    def said(self, entries: Sequence[Entry] = (), *, late: Sequence[str] = (), patience_s: float | None = None) -> Said:
        """What has to be told besides these parts, and what is asked."""
        told = {entry.new.uid: entry for entry, _ in self._waiting.values()} | {entry.new.uid: entry for entry in entries}
        return Said(
            parts=tuple(Telling(entry.new, _rank(entry), entry.reduce, entry.form) for entry in entries),
            skips=tuple(self._skips.values()),
            late=tuple(late),
            patience_s=patience_s or 0.0,
            wishes=dict(self._wishes),
            near=frozenset(uid for uid in self._wishes if uid in self._near),
            asked={uid: _rank(entry) for uid, entry in told.items()},
            wanted=(*list(self._unwritten)[-_MOST_ASKED:], *list(self._near)[-_MOST_ASKED:]),
            halves=tuple(list(self._half)[-_MOST_ASKED:]),
        )

    def late(self, patience_s: float) -> list[str]:
        """The states that have waited for longer than ``patience_s``."""
        before = time.monotonic() - patience_s
        return [uid for uid, (_, since) in self._waiting.items() if since <= before]

    # --- once it is committed -----------------------------------------------------------------------------------------------

    def begin(self, entries: Iterable[Entry]) -> None:
        """Note that these parts were told: they wait now."""
        now = time.monotonic()
        for entry in entries:
            self._waiting.setdefault(entry.new.uid, (entry, now))

    def become_whole(self, uid: str) -> None:
        """Note that a state is whole: from now on any rank may make it durable."""
        self._unwritten.setdefault(uid, _rank(self._waiting[uid][0]))

    def end(self, uid: str) -> None:
        """Note that a state waits no longer."""
        self._waiting.pop(uid, None)

    def heed(self, said: Said, heard: Heard) -> dict[str, bool]:
        """Act on what was told and what was heard. Returns the states that others make durable, or have go on, and this rank does not yet;
        and whether they must stay near.
        """
        for skip in said.skips:
            self._skips.pop(skip.facts.uid, None)
        for uid in said.wishes:
            if (uid in said.near) == (uid in self._near):  # else it was passed on meanwhile, which has to be told
                self._wishes.pop(uid, None)
        wanted: dict[str, bool] = {}
        for uid, is_near in heard.wanted.items():
            rank = self._unwritten.pop(uid, None)
            if rank is not None and is_near:
                self._near[uid] = rank
            if rank is not None or (not is_near and self._near.pop(uid, None) is not None):
                wanted[uid] = is_near
        return wanted

    def settled(self, heard: Heard) -> list[tuple[str, int, bool]]:
        """The states that no longer wait for the disks of others, with the bytes that this rank added, and whether they are durable."""
        found = []
        for uid, status in heard.statuses.items():
            if status is not Status.CAPTURED and uid in self._half:
                found.append((uid, self._half.pop(uid), status.is_restorable))
        return found


def _rank(entry: Entry) -> int:
    assert entry.rank is not None, "it is a part"
    return entry.rank
