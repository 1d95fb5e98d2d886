"""Copies of durable states on the further tiers, made on a thread of their own: a slow bucket holds up neither captures nor the disk.

Each state that becomes durable is put onto each further tier, in that order. A tier that fails is tried again with the next state,
and once more at the end; until then its states wait. What waits is bytes on disk and a uid here, so it costs nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from datastates.content.manifest import Manifest
from datastates.errors import Corrupt, NotFound, Unavailable
from datastates.lineage.change.replicas import mark
from datastates.lineage.database import Database
from datastates.lineage.states import State
from datastates.store.tier import SupportsManifests, Tier
from datastates.store.tiers import payload_of
from datastates.system.logs import event
from datastates.system.priority import yield_disk

__all__ = ["Copies", "Told"]

_logger = logging.getLogger(__name__)


class Told(Protocol):
    """A caller that waits for a state to reach a further tier."""

    state: State | None

    def advance(self, state: State) -> None:
        """The state reached a further tier."""

    def hold_up(self, why: Unavailable) -> None:
        """It does not, for now."""

    def give_up(self, why: str) -> None:
        """It will not."""


@dataclass(frozen=True, slots=True)
class _Turn:
    uid: str
    tier: Tier
    told: Told | None


class Copies:
    """Without further tiers it has no thread and costs nothing. ``on_done`` is called after each attempt."""

    def __init__(self, durable: Tier, further: Sequence[Tier], database: Database, on_done: Callable[[], None]) -> None:
        self._durable, self._further, self._database, self._on_done = durable, further, database, on_done
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._late: dict[str, deque[_Turn]] = {tier.name: deque() for tier in further}
        self._put = self._done = 0  # each is written by one thread at a time
        self._waiting = Counter[str]()
        self._took_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if further:
            self._thread = threading.Thread(target=self._run, name="datastates-copies", daemon=True)
            self._thread.start()

    @property
    def pending(self) -> int:
        """Copies that were not yet tried."""
        return self._put - self._done

    @property
    def took_s(self) -> float | None:
        """How long the newest state took onto all further tiers together, in seconds; None: none was put onto any."""
        return sum(self._took_s.copy().values()) if self._took_s else None

    def is_pending(self, uid: str) -> bool:
        """Whether a state is still to be put onto a tier, so that whoever waits for that is told by this."""
        with self._lock:
            return uid in self._waiting

    def put(self, uid: str, told: Told | None) -> None:
        """A state became durable. Any thread; never waits."""
        with self._lock:
            for tier in self._further:
                self._waiting[uid] += 1
                self._put += 1
                self._turns.put(_Turn(uid, tier, told))

    def close(self) -> None:
        """End the thread, once it has tried what waits; ``join`` waits for it. Idempotent."""
        self._turns.put(None)

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        yield_disk()
        while (turn := self._turns.get()) is not None:
            late = self._late[turn.tier.name]
            late.append(turn)
            self._work_off(late)
            self._done += 1
            self._on_done()
        for tier in self._further:
            self._give_up(tier, self._late[tier.name])

    def _work_off(self, late: deque[_Turn]) -> None:
        """Copy what waits for one tier, in order, until it fails."""
        was_late = len(late) > 1
        while late:
            turn = late[0]
            try:
                self._copy(turn)
            except Corrupt as exc:
                _logger.warning("state %s is not put onto the %s tier: %s", turn.uid, turn.tier.name, exc)
                if turn.told is not None:
                    turn.told.give_up(f"state {turn.uid} is not put onto the {turn.tier.name} tier: {exc}")
            except Exception as exc:  # a tier of the user's may raise anything; it is tried again
                newest = late[-1]  # those before it were told when they came
                said = f"state {newest.uid} is durable and not on the {turn.tier.name} tier: {exc}; it is tried again with the next"
                if newest.told is not None:
                    newest.told.hold_up(Unavailable(said))
                if not was_late:
                    _logger.warning(
                        "%s", said, exc_info=exc, extra=event("tier.away", tier=turn.tier.name, state=newest.uid, reason=str(exc))
                    )
                return
            self._forget(late.popleft())
            if was_late:
                _logger.warning("the %s tier takes states again", turn.tier.name, extra=event("tier.back", tier=turn.tier.name))
                was_late = False

    def _copy(self, turn: _Turn) -> None:
        try:
            reader = self._durable.open(turn.uid)
        except NotFound:
            return  # it was dropped meanwhile
        began = time.monotonic()
        with reader:
            placed = turn.tier.put(payload_of(reader), base=_relative(turn.tier, reader.manifest))
        with self._database.write(durable=True) as session:
            now = mark(session, turn.uid, turn.tier.gives, tier=turn.tier.name, node=turn.tier.node, bytes=placed.bytes_new)
        self._took_s[turn.tier.name] = time.monotonic() - began
        if turn.told is not None and turn.told.state is not None:
            turn.told.advance(replace(turn.told.state, status=now))

    def _give_up(self, tier: Tier, late: deque[_Turn]) -> None:
        self._work_off(late)
        if late:
            _logger.warning("%d states are durable, and not on the %s tier, the last of them %s", len(late), tier.name, late[-1].uid)
        for turn in late:
            self._forget(turn)
            if turn.told is not None:
                turn.told.give_up(f"state {turn.uid} is durable, and not on the {tier.name} tier, as its repository was closed")

    def _forget(self, turn: _Turn) -> None:
        with self._lock:
            self._waiting[turn.uid] -= 1
            if not self._waiting[turn.uid]:
                del self._waiting[turn.uid]


def _relative(tier: Tier, manifest: Manifest) -> Manifest | None:
    """The manifest that the tier has of a parent, for what both share."""
    if isinstance(tier, SupportsManifests):
        for uid in manifest.origin.parents:
            with suppress(NotFound, Corrupt, Unavailable):
                return tier.manifest(uid)
    return None
