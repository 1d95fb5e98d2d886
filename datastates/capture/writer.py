"""The thread that writes states to disk, a group after the other, as the engine chooses them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from datastates.errors import Unavailable
from datastates.modules.copies import Copies
from datastates.system.deeds import deed
from datastates.system.priority import yield_disk
from datastates.system.recorder import Recorder

from .events import WriteFailed, Written
from .pipeline import Pipeline
from .register import Locked, Register
from .trouble import Trouble, is_full

__all__ = ["Writer"]

_logger = logging.getLogger(__name__)


class Writer:
    """Writes states to disk; any thread may call ``put``. It reports each outcome to the register or to ``trouble``, and to the engine."""

    def __init__(
        self, pipeline: Pipeline, register: Register, locked: Locked, trouble: Trouble, copies: Copies, recorder: Recorder
    ) -> None:
        self._pipeline, self._register, self._engine, self._post = pipeline, register, locked.engine, locked.post
        self._trouble, self._copies, self._recorder = trouble, copies, recorder
        self.on_full: Callable[[], None] = lambda: None
        """Called when the disk is full."""
        self._groups: queue.SimpleQueue[tuple[str, ...] | None] = queue.SimpleQueue()
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name="datastates-writer", daemon=True)

    def put(self, uids: tuple[str, ...]) -> None:
        """Queue states, which are written together once those before them are."""
        self._groups.put(uids)

    def close(self) -> None:
        """Let the thread end. Failures from now on are not reported: no caller waited for the writes, and the tier may be closed by now."""
        self._is_closed = True
        self._groups.put(None)

    def _run(self) -> None:
        yield_disk()  # the training may be reading its data
        while (uids := self._groups.get()) is not None:
            self._write(uids)

    def _write(self, uids: tuple[str, ...]) -> None:
        began, used = time.monotonic(), time.thread_time()
        try:
            with deed(f"writing state {uids[0]}" + (f" and {len(uids) - 1} more" if len(uids) > 1 else "")):
                size = self._pipeline.write(uids)
        except BaseException as exc:  # the handle raises it, whatever it is, and the thread goes on
            _logger.debug("writing %s failed", uids, exc_info=exc)
            if len(uids) > 1 and not isinstance(exc, Unavailable):
                for uid in uids:  # one of them cannot be written, and the others can
                    self._write((uid,))
            elif not self._is_closed:
                self._on_failed(uids, exc)
        else:
            self._post(Written(uids, began, time.monotonic(), self._copies.took_s, size, time.thread_time() - used))
            self._trouble.end(self._engine.pending_writes)

    def _on_failed(self, uids: tuple[str, ...], error: BaseException) -> None:
        patient = [uid for uid in uids if isinstance(error, Unavailable) and self._register.is_patient(uid)]
        if patient:
            self._trouble.failures += 1
            self._recorder.count("retries")
            self._trouble.begin(str(error))
            if is_full(error):
                self.on_full()
        others = tuple(uid for uid in uids if uid not in patient)
        for uid in others:
            self._register.fail_write(uid, error)
        now = time.monotonic()
        self._post(*(WriteFailed(each, now, is_passing) for each, is_passing in ((others, False), (tuple(patient), True)) if each))
