"""The user's modules, and the thread that calls them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datastates.errors import ModuleFailed
from datastates.lineage.states import State
from datastates.store.roles import CaptureTier
from datastates.system.logs import event, reason_of

from .contract import Module
from .item import HeldItem

__all__ = ["Own"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A state, and the callback that is told which module failed on it."""

    item: HeldItem
    on_failed: Callable[[ModuleFailed], None]


class Own:
    """Calls each module with every state, in order. Without modules it has no thread and costs nothing.

    A state that waits for its turn keeps its memory; ``backlog`` counts those states. ``on_done`` is called after each of them.
    """

    def __init__(self, modules: Sequence[Module], memory: CaptureTier, on_done: Callable[[], None]) -> None:
        self._modules = sorted(modules, key=lambda module: module.priority)
        self._memory, self._on_done = memory, on_done
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._put = self._done = 0  # each is written by one thread at a time
        self._failed: set[str] = set()
        self._has_given_up = False
        self._thread: threading.Thread | None = None
        if self._modules:
            self._thread = threading.Thread(target=self._run, name="datastates-modules", daemon=True)
            self._thread.start()

    @property
    def backlog(self) -> int:
        """The number of states that some module has not seen; 0 if a module asks, because it would wait for itself."""
        return 0 if threading.current_thread() is self._thread else self._put - self._done

    def put(self, current: Callable[[], State], branch: str | None, on_failed: Callable[[ModuleFailed], None]) -> None:
        """Queue a recorded state, under the caller's lock, before the state may leave memory."""
        if self._modules:
            self._turns.put(_Turn(HeldItem(self._memory, current, branch), on_failed))
            self._put += 1

    def close(self, *, is_giving_up: bool = False) -> None:
        """Close the modules once they have seen what was put; ``join`` waits for that. Idempotent.

        ``is_giving_up``: do not wait for states that they have not seen, because the states' memory is about to go.
        """
        if is_giving_up and self.backlog:
            self._has_given_up = True
            _logger.warning("%d states were given up before every module had seen them", self.backlog)
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
            except BaseException:  # a module of the user's may raise anything, and the others have to be closed too
                _logger.warning("closing module %r failed", module.name, exc_info=True)

    def _take(self, turn: _Turn) -> None:
        for module in () if self._has_given_up else self._modules:
            try:
                module.process(turn.item)
            except BaseException as exc:  # likewise: the handle has the error, and the training goes on
                self._note(module, turn, exc)
        turn.item.let_go()

    def _note(self, module: Module, turn: _Turn, error: BaseException) -> None:
        state = turn.item.state
        failed = ModuleFailed(
            f"module {module.name!r} failed on state {state.uid} (step {state.step}): {reason_of(error, repr)}; the state is kept"
        )
        failed.__cause__ = error
        turn.on_failed(failed)
        if module.name not in self._failed:
            self._failed.add(module.name)
            what = event("module.failed", user_module=module.name, state=state.uid, step=state.step)
            _logger.warning("%s; if it fails again, only the handles of those captures say so", failed, exc_info=error, extra=what)
