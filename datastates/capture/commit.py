"""The only place where a state becomes part of memory and lineage. Captures, merges and clones all go through it.

    enter      its slots become the memory tier's
    record     the lineage takes it, in one transaction; a round of captures in one
    announce   the engine knows that it is there

Whatever is raised on the way, between any two instructions, in the end either all three have the state or none has.

Rules:
- The lineage decides. A state that it has is announced, and then the error is raised (for a capture, by the next call that uses its
  line). Any other state leaves memory again, and a capture's handle is told why.
- If a transaction did not return, the lineage is asked whether it was committed. If the lineage does not answer, a capture waits in the
  journal, which finds out later. Any other state leaves memory, and the lineage is told that it left, as for any eviction.
- Slots that the memory tier did not take stay with the caller that acquired them: the tier removes those that it takes from the list.
- Each step of the way back may be done twice: if the way back is interrupted too, it starts again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from datastates.content.manifest import Manifest
from datastates.errors import Closed, DatastatesError, Torn
from datastates.lineage.database import Database
from datastates.lineage.states import NewState, State, StateFacts, Why
from datastates.modules.record import Record
from datastates.modules.telling import Skip
from datastates.store.roles import CaptureTier
from datastates.store.tier import Placed
from datastates.system.interrupts import Mutex
from datastates.system.recorder import Recorder

from .events import Action, Event, Recorded
from .line import Staged
from .pipeline import Pipeline
from .register import Books, Register

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Coming", "Commits"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Coming:
    """A state that no line captured: a merge or a clone, about to be taken in. ``enter`` makes its bytes the memory tier's, all or none.

    ``base`` is the manifest of a related state on disk.
    """

    facts: StateFacts
    digest: str
    bytes_total: int
    enter: Callable[[], Placed]
    base: Manifest | None = None

    def told(self, placed: Placed, tier: CaptureTier, holder: str) -> NewState:
        """The record of it for the lineage."""
        total, new = self.bytes_total, placed.bytes_new
        return NewState(self.facts, self.digest, tier.gives, bytes_total=total, bytes_new=new, tier=tier.name, node=holder)


class Commits:
    """Takes states in. ``adopt`` tells the engine of a merge or a clone, or raises Closed; ``post`` tells it of captures.

    Either may be called any number of times for one state.
    """

    def __init__(
        self,
        books: Books,
        register: Register,
        pipeline: Pipeline,
        memory: CaptureTier,
        *,
        adopt: Callable[[str, Manifest | None], None],
        post: Callable[[*tuple[Event, ...]], list[Action]],
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._database: Database = books.database
        self.holder = books.holder
        self._register, self._pipeline, self._memory, self._journal = register, pipeline, memory, register.journal
        self._record = Record(register.journal, memory, books.holder)
        self._adopt, self._post = adopt, post
        self._turn = Mutex()
        """Takes in one state at a time: of two clones of one state, one could take back what the other relies on."""

    # --- merges and clones: any thread -----------------------------------------------------------------------------------------

    def take_in(self, coming: Coming, record: Callable[[Session, NewState], State]) -> State:
        """Take in a merge or a clone: ``record`` tells the lineage of it, and its result is returned. An interrupt is raised at the end.

        :raises Conflict: another state of this uid is here, or the branch has moved on.
        """
        uid = coming.facts.uid
        with self._turn:
            was_here = self._memory.has(uid)
            try:
                placed = coming.enter()
                if self._journal.is_leaving(uid):
                    self._journal.tell_evictions()  # it left and comes back: the lineage must be told in this order
                with self._database.write(durable=True) as session:  # durable, because nothing would tell it again
                    state = record(session, coming.told(placed, self._memory, self.holder))
                self._adopt(uid, coming.base)
            except BaseException:
                if not was_here and self._stays(uid, lambda: self._journal.find(uid) is not None):
                    self._adopt_or_leave(coming)
                raise
        return state

    def _adopt_or_leave(self, coming: Coming) -> None:
        uid = coming.facts.uid
        try:
            self._adopt(uid, coming.base)
        except Closed:
            self._memory.remove(uid)
            self._journal.evict([uid])

    # --- captures: the engine thread -------------------------------------------------------------------------------------------

    def take_round(self, captures: Sequence[Staged]) -> None:
        """Take in captures that were copied. If one fails, its handle gets the error; an error that this raises is for ``settle``."""
        entered: list[Staged] = []
        for staged in captures:
            try:
                self._pipeline.enter(staged)
                self._register.await_others(staged)
                entered.append(staged)
            except BaseException as exc:  # the handle raises it, whatever it is
                self._refuse(staged, exc)
        began = time.monotonic()
        errors = self._record.process_all([staged.work for staged in entered if staged.work is not None])
        if entered:
            newest = entered[-1]
            self._recorder.span("record", began, time.monotonic(), newest.progress.uid, newest.facts.step)
        self._announce(self._concluded(entered, errors))

    def settle(self, captures: Sequence[Staged], error: BaseException) -> None:
        """Settle a round that ``error`` broke off at any point: memory, lineage and engine all have each of its captures, or none has."""
        self._announce(self._concluded(captures, {staged.progress.uid: error for staged in captures}))

    def _concluded(self, captures: Sequence[Staged], errors: Mapping[str, BaseException]) -> list[Staged]:
        """The captures that are in memory and in the lineage, or will be. The others are in neither from now on; their handles are told."""
        wrong = [staged for staged in captures if staged.progress.uid in errors]
        has_come = {staged.progress.uid: self._has_come(staged) for staged in wrong}  # parents first, as the journal tells them
        for staged in reversed(wrong):  # the newest first: each restores its line's tip before it
            error = errors[staged.progress.uid]
            if has_come[staged.progress.uid]:
                self._register.note(staged.line, error)
            else:
                self._refuse(staged, error)
        return [staged for staged in captures if has_come.get(staged.progress.uid, True)]

    def _has_come(self, staged: Staged) -> bool:
        entry = None if staged.work is None else staged.work.entry
        return entry is not None and self._stays(entry.new.uid, partial(self._journal.conclude, entry))

    def _refuse(self, staged: Staged, error: BaseException) -> None:
        self._pipeline.leave(staged)
        self._register.refuse(staged, error)
        if staged.line.part is not None:
            why = Why.TORN if isinstance(error, Torn) else Why.FAILED
            self._journal.skip(Skip(staged.facts, staged.line.part.rank, why, str(error) or repr(error)))

    def _announce(self, captures: Sequence[Staged]) -> None:
        whole = [staged for staged in captures if staged.line.part is None]  # the register announces parts, once their state is whole
        now = time.monotonic()
        self._post(*(Recorded(each.progress.uid, each.line.name, now, each.taken(), each is whole[-1]) for each in whole))

    # --- something was raised ----------------------------------------------------------------------------------------------------

    def _stays(self, uid: str, is_told: Callable[[], bool]) -> bool:
        """Whether memory and lineage have a state, or will. If not, the state is removed from memory."""
        if not self._memory.has(uid):
            return False  # the lineage was not told of it yet
        try:
            if is_told():
                return True
        except DatastatesError:
            _logger.warning("whether state %s was recorded is not known: it leaves memory", uid, exc_info=True)
            self._journal.evict([uid])
        self._memory.remove(uid)
        return False
