"""The one place where a state becomes part of memory and lineage: captures, merges and clones all come here.

    enter      its slots become the memory tier's
    record     the lineage takes it, in one transaction
    announce   the engine knows that it is there

Whatever is raised on the way, and between whichever two instructions, in the end all three have the state or none has.

Rules:
- What the lineage says decides. A state that it has is announced, and then the error is raised; any other leaves memory again.
- Whether a transaction that did not return went through, the lineage is asked. Where it does not answer, the state leaves memory, and
  that is told as of any other that does.
- Slots that the memory tier did not take stay with whoever acquired them: what was taken is gone from their list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates.content.manifest import Manifest
from datastates.errors import Closed, DatastatesError
from datastates.lineage.change.replicas import held
from datastates.lineage.database import Database
from datastates.lineage.states import NewState, State, StateFacts
from datastates.modules.journal import Journal
from datastates.store.roles import CaptureTier
from datastates.store.tier import Placed
from datastates.system.interrupts import Mutex

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Coming", "Commits"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Coming:
    """A state that no line captured, and that is to come in. ``enter`` makes its bytes the memory tier's, all of them or none.

    ``base`` is the manifest of a relative on disk.
    """

    facts: StateFacts
    digest: str
    bytes_total: int
    enter: Callable[[], Placed]
    base: Manifest | None = None

    def told(self, placed: Placed, tier: CaptureTier, holder: str) -> NewState:
        """What the lineage is told of it."""
        total, new = self.bytes_total, placed.bytes_new
        return NewState(self.facts, self.digest, tier.gives, bytes_total=total, bytes_new=new, tier=tier.name, node=holder)


class Commits:
    """Takes states in, one after the other. ``announce`` tells the engine of one, any number of times, or raises Closed."""

    def __init__(
        self, database: Database, memory: CaptureTier, journal: Journal, holder: str, *, announce: Callable[[str, Manifest | None], None]
    ) -> None:
        self._database, self._memory, self._journal, self.holder = database, memory, journal, holder
        self._announce = announce
        self._turn = Mutex()
        """One at a time: two clones of one state would each take back what the other counts on."""

    def take_in(self, coming: Coming, record: Callable[[Session, NewState], State]) -> State:
        """Let a merge or a clone in: ``record`` tells the lineage of it; what that returns. An interrupt is raised when this is over.

        :raises Conflict: another state of this uid is here, or the branch has moved on.
        """
        uid = coming.facts.uid
        with self._turn:
            if self._journal.is_leaving(uid):
                self._journal.tell_evictions()  # it left and comes back: the lineage hears it in this order
            was_here = self._memory.has(uid)
            try:
                placed = coming.enter()
                new = coming.told(placed, self._memory, self.holder)
                with self._database.write(durable=True) as session:  # nobody would tell it again
                    state = record(session, new)
                self._announce(uid, coming.base)
            except BaseException:
                self._conclude(coming, was_here=was_here)
                raise
        return state

    def _conclude(self, coming: Coming, *, was_here: bool) -> None:
        """Something was raised: the state is there for everybody, or for nobody."""
        uid = coming.facts.uid
        if not self._memory.has(uid):
            return  # the lineage was not asked yet
        is_told = self._is_told(uid)
        if is_told:
            with suppress(Closed):
                self._announce(uid, coming.base)
                return
        if was_here:
            return
        self._memory.remove(uid)
        if is_told is not False:
            self._journal.evict([uid])

    def _is_told(self, uid: str) -> bool | None:
        """Whether the lineage says that this process holds the state; None when it does not say anything."""
        try:
            with self._database.read() as session:
                return uid in held(session, [uid], tier=self._memory.name, node=self.holder)
        except DatastatesError:
            _logger.warning("whether state %s was recorded is not known: it left memory", uid, exc_info=True)
            return None
