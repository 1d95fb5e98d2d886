"""The user's processors, here named ``Module``: their contract, the items that they get, and the
thread that calls them.

The engine's own steps and the user's modules have the same shape. Each step has its own kind of
item, and a thread that calls it:

    priority  step        item     thread
    100       digest      Work     datastates-engine   digests of chunks, content and state
    200       dedup       Work     datastates-engine   into memory; chunks that memory holds give
                                                       their slots back
    300       record      Work     datastates-engine   into the lineage, a round of captures in one
                                                       transaction
    400       write       Writing  datastates-writer   to disk; only states that become durable
    1000      the user's  Item     datastates-modules  once the state is recorded

Durable states are also put onto the user's tiers, on a separate thread (``steps.Copies``).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from datastates import values
from datastates.errors import Closed, ModuleFailed, NotFound, Unavailable
from datastates.lineage.states import State
from datastates.state.manifest import Manifest
from datastates.state.report import Selection
from datastates.storage.reading import read_tree
from datastates.storage.roles import CaptureTier
from datastates.storage.tier import Reader
from datastates.system.logs import event, reason_of

Kind = TypeVar("Kind", contravariant=True)


class Priority(IntEnum):
    """The priorities of the engine's own steps; smaller numbers go first."""

    DIGEST = 100
    DEDUP = 200
    RECORD = 300
    WRITE = 400
    OWN = 1000


class Step(Protocol[Kind]):
    """One step of the pipeline. One thread at a time calls it, in the order of the captures."""

    name: str
    priority: int

    def process(self, item: Kind, /) -> None:
        """Do this step for one state.

        An error that it raises ends this state's way through the pipeline, and no other's."""


class Item(Protocol):
    """One state, as a user's module gets it.

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


class Module(Protocol):
    """A custom step that is called with every state that this process captures or merges. Give it
    to ``Config(modules=[…])``.

    Subclass this for the defaults, or provide the four names. One thread, ``datastates-modules``,
    makes all calls, one at a time, so a module needs no lock. Each module sees the states in the
    order in which they were recorded. For each state, modules with smaller ``priority`` are called
    first.
    """

    name: str
    """The name of the module in messages; unique among the modules of a repository."""

    priority: int = Priority.OWN
    """Its place among the modules of a repository.

    All of them come after the engine's own steps up to ``record``."""

    def process(self, item: Item, /) -> None:
        """Do something with a recorded state.

        Captures continue meanwhile, and states that wait for the module stay in memory. A module
        that is slower than the captures eventually causes ``back_pressure``. An error that it
        raises is kept as ``Capture.error`` (a ``ModuleFailed``), and logged once. It does not
        affect the state, the other modules or the training. Do not capture or close the repository
        here.
        """

    def close(self) -> None:
        """Called once, on the same thread, when the repository is closed and the last state was
        processed."""
        return  # a subclass may do without it


# --- The item that a user's module gets: its facts, and its bytes as long as it is held ---


class HeldItem:
    """An ``Item`` whose bytes stay in memory until ``let_go``.

    ``current`` returns how far the state has come by now."""

    def __init__(
        self, memory: CaptureTier, current: Callable[[], State], branch: str | None
    ) -> None:
        self._current, self._branch = current, branch
        self._reader: Reader | None = None
        self._is_over = False
        with suppress(Closed, NotFound):  # it was recorded late; only its facts are left
            # its digests were made from this very memory
            self._reader = memory.open(self.state.uid, verify=False)

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

    @values.takes(only=values.patterns)
    def tree(self, only: str | Sequence[str] | None = None) -> Any:
        """Copies of the state's tensors, in its containers. None for tensors that ``only``
        excludes.

        A pattern that selects nothing is no error here, because a module sees the states of all
        trainings.
        """
        return read_tree(self._open(), wants=Selection(only).wants)

    def chunks(self) -> Iterator[memoryview]:
        """The state's bytes in place."""
        reader = self._open()
        return (reader.chunk(index) for index in range(len(reader.manifest.content.chunks)))

    def let_go(self) -> None:
        """Release the bytes, so that they may leave memory."""
        self._is_over = True
        if self._reader is not None:
            self._reader.close()

    def _open(self) -> Reader:
        if self._is_over:
            raise Closed(
                f"the item of state {self.state.uid} is over: a module reads it before process"
                " returns"
            )
        if self._reader is None:
            raise Unavailable(
                f"state {self.state.uid} left memory before it was recorded, because the lineage"
                " was away: its facts are left, and its bytes where Repository.load finds them"
            )
        return self._reader


# --- The user's modules, and the thread that calls them ---


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A state, and the callback that gets the module that failed on it."""

    item: HeldItem
    on_failed: Callable[[ModuleFailed], None]


class Own:
    """Calls each module with every state, in order. Without modules it has no thread and costs
    nothing.

    A state that waits for its turn keeps its memory; ``backlog`` counts those states. ``on_done``
    is called after each of them.
    """

    def __init__(
        self, modules: Sequence[Module], memory: CaptureTier, on_done: Callable[[], None]
    ) -> None:
        self._modules = sorted(modules, key=lambda module: module.priority)
        self._memory, self._on_done = memory, on_done
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._put = self._done = 0  # each is written by one thread at a time
        self._failed: set[str] = set()
        self._has_given_up = False
        self._thread: threading.Thread | None = None
        if self._modules:
            self._thread = threading.Thread(
                target=self._run, name="datastates-modules", daemon=True
            )
            self._thread.start()

    @property
    def backlog(self) -> int:
        """The number of states that some module has not seen. 0 if a module calls this, because it
        would wait for itself."""
        return 0 if threading.current_thread() is self._thread else self._put - self._done

    def put(
        self,
        current: Callable[[], State],
        branch: str | None,
        on_failed: Callable[[ModuleFailed], None],
    ) -> None:
        """Queue a recorded state, under the caller's lock, before the state may leave memory."""
        if self._modules:
            self._turns.put(_Turn(HeldItem(self._memory, current, branch), on_failed))
            self._put += 1

    def close(self, *, is_giving_up: bool = False) -> None:
        """Close the modules once they have seen what was put; ``join`` waits for that. Idempotent.

        ``is_giving_up``: do not wait for states that they have not seen, because the states' memory
          is about to go.
        """
        if is_giving_up and self.backlog:
            self._has_given_up = True
            _logger.warning(
                "%d states were given up before every module had seen them", self.backlog
            )
        self._turns.put(None)

    def join(self) -> None:
        """Wait until the modules are closed. Must not be called on a module's own thread."""
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
        for module in self._modules:
            try:
                module.close()
            except BaseException:
                # a module of the user's may raise anything, and the other modules have to be closed
                # too
                _logger.warning("closing module %r failed", module.name, exc_info=True)

    def _take(self, turn: _Turn) -> None:
        for module in () if self._has_given_up else self._modules:
            try:
                module.process(turn.item)
            except BaseException as exc:
                # the same: the handle has the error, and the training continues
                self._note(module, turn, exc)
        turn.item.let_go()

    def _note(self, module: Module, turn: _Turn, error: BaseException) -> None:
        state = turn.item.state
        failed = ModuleFailed(
            f"module {module.name!r} failed on state {state.uid} (step {state.step}):"
            f" {reason_of(error, repr)}; the state is kept"
        )
        failed.__cause__ = error
        turn.on_failed(failed)
        if module.name not in self._failed:
            self._failed.add(module.name)
            what = event("module.failed", user_module=module.name, state=state.uid, step=state.step)
            _logger.warning(
                "%s; if it fails again, only the handles of those captures say so",
                failed,
                exc_info=error,
                extra=what,
            )
