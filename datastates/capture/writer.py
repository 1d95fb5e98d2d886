"""The thread that writes states to disk, one after the other, as the engine chooses them."""

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
        self._uids: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name="datastates-writer", daemon=True)

    def put(self, uid: str) -> None:
        """Queue a state; it is written once those before it are."""
        self._uids.put(uid)

    def close(self) -> None:
        """Let the thread end. Failures from now on are not reported: no caller waited for the writes, and the tier may be closed by now."""
        self._is_closed = True
        self._uids.put(None)

    def _run(self) -> None:
        yield_disk()  # the training may be reading its data
        while (uid := self._uids.get()) is not None:
            began = time.monotonic()
            try:
                with deed(f"writing state {uid}"):
                    self._pipeline.write(uid)
            except BaseException as exc:  # the handle raises it, whatever it is, and the thread goes on
                _logger.debug("writing %s failed", uid, exc_info=exc)
                if not self._is_closed:
                    self._on_failed(uid, exc)
            else:
                self._post(Written(uid, began, time.monotonic(), self._copies.took_s))
                self._trouble.end(self._engine.pending_writes)

    def _on_failed(self, uid: str, error: BaseException) -> None:
        is_passing = isinstance(error, Unavailable) and self._register.is_patient(uid)
        if is_passing:
            self._trouble.failures += 1
            self._recorder.count("retries")
            self._trouble.begin(str(error))
            if is_full(error):
                self.on_full()
        else:
            self._register.fail_write(uid, error)
        self._post(WriteFailed(uid, time.monotonic(), is_passing))
