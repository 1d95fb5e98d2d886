"""The user's processors, and the thread that calls them with every recorded state."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, Protocol

from datastates import config, values
from datastates.errors import Closed, NotFound, ProcessorFailed, Unavailable
from datastates.lineage.states import State
from datastates.state.manifest import Manifest
from datastates.state.report import Selection
from datastates.storage.memory import MemoryTier
from datastates.storage.reading import read_tree
from datastates.storage.tier import Reader
from datastates.system.logs import event, reason_of

_PRIORITY = 1000
"""The default priority of a processor."""


class CapturedState(Protocol):
    """One state, as a user's processor gets it.

    Its bytes stay in memory until ``process`` returns, and cannot be read after that."""

    @property
    def state(self) -> State:
        """The state as the lineage has it, with its ``status`` so far. You may keep it."""

    @property
    def branch(self) -> str | None:
        """The branch on which the state was captured; None for a merge into no branch. You may
        keep it."""

    @property
    def manifest(self) -> Manifest:
        """The state's manifest. You may keep it.

        :raises Unavailable: the state left memory before it was recorded, because the lineage was
            away for long.
        """

    def tree(self, only: str | Sequence[str] | None = None) -> Any:
        """Nested containers of tensors, as ``Repository.load`` returns them: copies that you may
        keep and change.

        ``only`` takes names or patterns of paths (``"model"``). Other parts are ``None`` in the
        tree.

        :raises Unavailable: as ``manifest``.
        """

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of the tensors in place, chunk by chunk in the manifest's order. Read them
        only, and do not keep them.

        :raises Unavailable: as ``manifest``.
        """


class Processor(Protocol):
    """A step of your own that is called with every state that this process captures or merges. Give
    it to ``Config(processors=[…])``.

    Subclass this for the defaults, or provide the names without ``where``. One thread,
    ``datastates-processors``, makes all calls, one at a time, so a processor needs no
    lock. Each processor sees the states in the order in which they were recorded. For each state,
    processors with smaller ``priority`` are called first.
    """

    name: str
    """The name of the processor in messages; unique among the processors of a repository."""

    priority: int = _PRIORITY
    """Its place among the processors of a repository; smaller numbers go first. The order does not
    change while the repository is open."""

    where: Literal["training", "agent"] = "training"
    """``"agent"``: call another object of this class in a separate process, on the shared memory of
    ``Config(agent="process")``. The class is importable and takes no arguments. Without an agent,
    the calls stay in this process."""

    def process(self, captured: CapturedState, /) -> None:
        """Do something with a recorded state.

        Captures go on meanwhile, and states that wait for the processor stay in memory: a processor
        that is slower than the captures eventually causes ``back_pressure``. An error that it
        raises is kept as ``Capture.error`` (a ``ProcessorFailed``), and logged once. It does not
        affect the state, the other processors or the training. Do not capture or close the
        repository here.
        """

    def close(self) -> None:
        """Called once, on the same thread, when the repository is closed and the last state was
        processed."""
        return  # a subclass may do without it


class ProcessorOutcome(StrEnum):
    """What became of a state at a processor. ``PASSED``: the processor was off."""

    DONE = "done"
    FAILED = "failed"
    PASSED = "passed"


@dataclass(frozen=True, slots=True)
class ProcessorResult:
    """The result of a processor for one state. ``at`` is when it came, in UTC. ``error`` is what
    the processor raised, or empty."""

    outcome: ProcessorOutcome
    at: datetime
    uid: str
    step: int
    error: str = ""


class ProcessorSwitch:
    """One processor of an open repository. Set ``is_on`` on any thread: a processor that is off
    passes the states whose turn comes then. ``last`` is its newest result, or None.

    ``counts`` has the number of its results so far, by outcome.
    """

    def __init__(self, processor: config.Processor) -> None:
        self.processor, self.name = processor, processor.name
        self.where = getattr(processor, "where", "training")
        self.is_on = True
        self.last: ProcessorResult | None = None
        self.counts = dict.fromkeys(ProcessorOutcome, 0)

    def __repr__(self) -> str:
        last = "no state yet" if self.last is None else f"{self.last.outcome} {self.last.uid}"
        return f"<processor {self.name!r}, {'on' if self.is_on else 'off'}, {last}>"

    def note(self, outcome: ProcessorOutcome, state: State, error: str = "") -> None:
        """Keep a result."""
        self.counts[outcome] += 1
        self.last = ProcessorResult(outcome, datetime.now(UTC), state.uid, state.step, error)


def switches(processors: Sequence[config.Processor]) -> dict[str, ProcessorSwitch]:
    """The processors by name, in the order in which each state goes to them."""
    ordered = sorted(processors, key=lambda processor: processor.priority)
    return {processor.name: ProcessorSwitch(processor) for processor in ordered}


# A recorded state as a user's processor gets it: its facts, and its bytes as long as the processor
# holds it.


class HeldState:
    """A ``CapturedState`` whose bytes stay in memory until ``release``.

    ``reader`` reads them; without it, only the facts are left. ``current`` returns how far the
    state has come by now."""

    def __init__(
        self, reader: Reader | None, current: Callable[[], State], branch: str | None
    ) -> None:
        self.reader, self._current, self._branch = reader, current, branch
        self._is_over = False

    @property
    def state(self) -> State:
        """The state as the lineage has it."""
        return self._current()

    @property
    def branch(self) -> str | None:
        """The branch on which the state was captured."""
        return self._branch

    @property
    def manifest(self) -> Manifest:
        """What the state consists of."""
        return self._open().manifest

    @values.checked
    def tree(self, only: values.Patterns | None = None) -> Any:
        """Copies of the state's tensors, in its containers. None for tensors that ``only``
        excludes.

        A pattern that selects nothing is no error here: a processor sees the states of whatever is
        trained.
        """
        return read_tree(self._open(), wants=Selection(only).wants)

    def chunks(self) -> Iterator[memoryview]:
        """The state's bytes in place."""
        reader = self._open()
        return (reader.chunk(index) for index in range(len(reader.manifest.content.chunks)))

    def release(self) -> None:
        """Release the bytes, so that they may leave memory."""
        self._is_over = True
        if self.reader is not None:
            self.reader.close()

    def _open(self) -> Reader:
        if self._is_over:
            raise Closed(
                f"state {self.state.uid} can no longer be read: a processor reads it before process"
                " returns"
            )
        if self.reader is None:
            raise Unavailable(
                f"state {self.state.uid} left memory before it was recorded, because the lineage"
                " was away: its facts are left, and its bytes where Repository.load finds them"
            )
        return self.reader


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A state, and the callback that is told which processor failed on it."""

    captured: HeldState
    on_failed: Callable[[ProcessorFailed], None]


class Processors:
    """Calls each processor with every state, in order. Without processors it has no thread and
    costs nothing.

    A state that waits for its turn keeps its memory; ``backlog`` counts those states. ``on_done``
    is called after each of them.
    """

    def __init__(
        self, processors: Sequence[ProcessorSwitch], memory: MemoryTier, on_done: Callable[[], None]
    ) -> None:
        self._processors = processors
        self._memory, self._on_done = memory, on_done
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._put = self._done = 0  # each is written by one thread at a time
        self._failed: set[str] = set()
        self._has_given_up = False
        self._thread: threading.Thread | None = None
        if self._processors:
            self._thread = threading.Thread(
                target=self._run, name="datastates-processors", daemon=True
            )
            self._thread.start()

    @property
    def backlog(self) -> int:
        """The number of states that some processor has not seen; 0 if a processor asks, because it
        would wait for itself."""
        return 0 if threading.current_thread() is self._thread else self._put - self._done

    def put(
        self,
        current: Callable[[], State],
        branch: str | None,
        on_failed: Callable[[ProcessorFailed], None],
    ) -> None:
        """Queue a recorded state, under the caller's lock, before the state may leave memory."""
        if self._processors:
            reader = None
            with suppress(Closed, NotFound):  # it was recorded late; only its facts are left
                # its digests were made from this very memory
                reader = self._memory.open(current().uid, verify=False)
            self._turns.put(_Turn(HeldState(reader, current, branch), on_failed))
            self._put += 1

    def close(self, *, is_giving_up: bool = False) -> None:
        """Close the processors once they have seen what was put; ``join`` waits for that.

        Idempotent.

        ``is_giving_up``: do not wait for states that they have not seen, because the states' memory
          is about to go.
        """
        if is_giving_up and self.backlog:
            self._has_given_up = True
            _logger.warning(
                "%d states were given up before every processor had seen them", self.backlog
            )
        self._turns.put(None)

    def join(self) -> None:
        """Wait until the processors are closed. Must not be called on a processor's own thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (turn := self._turns.get()) is not None:
            try:
                self._take(turn)
            finally:
                self._done += 1
                self._on_done()
            del turn
        for switch in self._processors:
            try:
                switch.processor.close()
            except BaseException:
                # a processor of the user's may raise anything, and the others have to be closed too
                _logger.warning("closing processor %r failed", switch.name, exc_info=True)

    def _take(self, turn: _Turn) -> None:
        for switch in () if self._has_given_up else self._processors:
            outcome, error = ProcessorOutcome.PASSED, ""
            try:
                if switch.is_on:
                    switch.processor.process(turn.captured)
                    outcome = ProcessorOutcome.DONE
            except BaseException as exc:
                # likewise: the handle has the error, and the training goes on
                outcome, error = ProcessorOutcome.FAILED, reason_of(exc, repr)
                self._report(switch.name, turn, exc)
            switch.note(outcome, turn.captured.state, error)
        turn.captured.release()

    def _report(self, name: str, turn: _Turn, error: BaseException) -> None:
        state = turn.captured.state
        failed = ProcessorFailed(
            f"processor {name!r} failed on state {state.uid} (step {state.step}):"
            f" {reason_of(error, repr)}; the state is kept"
        )
        failed.__cause__ = error
        turn.on_failed(failed)
        if name not in self._failed:
            self._failed.add(name)
            what = event("processor.failed", processor=name, state=state.uid, step=state.step)
            _logger.warning(
                "%s; if it fails again, only the handles of those captures say so",
                failed,
                exc_info=error,
                extra=what,
            )
